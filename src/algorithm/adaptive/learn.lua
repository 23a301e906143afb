-- Equivalents of Estimate and Window (sluicegate_common::adaptive): the same operations on doubles, in the same order.
-- They are only defined if there is a method: 1 for AIMD, 2 for Gradient2, 3 for Vegas.
local learn_from, learned_tail, learned_limit, learn
if method > 0 then
  local LEARNED = '<dddI4BI7dI4I4I4'
  function learn_from(value, bounds)
    local it = {method = method, bounds = bounds, limit = bounds.initial, baseline = 0, measured = 0, count = 0,
      probing = method == 3 and 3 or 0, ends = 0, sum = 0, samples = 0, in_flight = 0, dropped = 0}
    if #value >= 56 then
      local limit, baseline, measured, count, probing, ends, sum, samples, in_flight, dropped = unpack_numbers(LEARNED, value, #value - 55)
      local function is_number(number)
        return number >= 0 and number < 1e15
      end
      if is_number(limit) and is_number(baseline) and is_number(measured) and is_number(sum) then
        it.limit = min(max(limit, bounds.floor_limit), bounds.ceiling_limit)
        it.baseline, it.measured, it.count, it.probing = baseline, measured, count, probing
        it.ends, it.sum, it.samples, it.in_flight, it.dropped = ends, sum, samples, in_flight, dropped
      end
    end
    return it
  end

  function learned_tail(it)
    return pack(LEARNED, it.limit, it.baseline, it.measured, it.count, it.probing, it.ends, it.sum, it.samples,
      it.in_flight, it.dropped)
  end

  function learned_limit(it)
    local limit = floor(it.probing > 0 and it.baseline > 0 and it.limit * 0.5 or it.limit)
    return min(max(limit, it.bounds.floor_limit), it.bounds.ceiling_limit)
  end

  local function vegas(it, latency, in_flight, dropped, now)
    local period = floor(now / 40000000) % 4294967296
    if it.probing > 0 then
      it.count = period
      it.probing = min(it.probing - 1, 3)
      if it.probing < 2 then
        it.measured = it.measured + (latency - it.measured) / (2 - it.probing)
      end
      if it.probing == 0 then
        local weight = it.baseline > 0 and 0.25 or 0
        it.baseline, it.measured = it.baseline * weight + it.measured * (1 - weight), 0
      end
      return
    end
    if it.count ~= period or latency < it.baseline * 0.75 then
      it.probing = 3
      return
    end
    local step = it.limit >= 1000 and 3 or it.limit >= 100 and 2 or 1
    local queue = ceil(it.limit * (1 - it.baseline / latency))
    if dropped then
      it.limit = it.limit - step
    elseif in_flight * 2 < it.limit then
      return
    elseif queue <= step then
      it.limit = it.limit + 6 * step
    elseif queue < 3 * step then
      it.limit = it.limit + step
    elseif queue > 6 * step then
      it.limit = it.limit - max(floor((queue - 6 * step) * 0.5), step)
    end
  end

  local function gradient2(it, latency, in_flight)
    if it.count < 10 then
      it.count = it.count + 1
      it.baseline = it.baseline + (latency - it.baseline) / it.count
    else
      local factor = 2 / 601
      it.baseline = it.baseline * (1 - factor) + latency * factor
    end
    local long = it.baseline
    if long / latency > 2 then
      it.baseline = long * 0.95
    end
    if in_flight < it.limit / 2 then
      return
    end
    local gradient = max(min(1.5 * long / latency, 1), 0.5)
    it.limit = it.limit * (1 - 0.2) + (it.limit * gradient + 4) * 0.2
  end

  -- Adds one sample.
  function learn(it, latency, in_flight, dropped, now)
    if it.samples == 0 then
      it.ends = now + 500000
    end
    it.sum, it.samples = it.sum + latency, min(it.samples + 1, 4294967295)
    it.in_flight, it.dropped = max(it.in_flight, in_flight), it.dropped + (dropped and 1 or 0)
    if (now < it.ends and it.ends <= now + 500000) or it.samples < 10 then
      return
    end
    latency, in_flight, dropped = it.sum / it.samples, it.in_flight, it.dropped * 20 > it.samples
    it.ends, it.sum, it.samples, it.in_flight, it.dropped = 0, 0, 0, 0, 0
    dropped = dropped or latency > it.bounds.timeout
    if it.method == 1 then
      if dropped then
        it.limit = floor(it.limit * 0.9)
      elseif in_flight * 2 >= it.limit then
        it.limit = it.limit + 1
      end
    elseif it.method == 2 then
      gradient2(it, latency, in_flight)
    else
      vegas(it, latency, in_flight, dropped, now)
    end
    it.limit = min(max(it.limit, max(it.bounds.floor_limit, 1)), max(it.bounds.ceiling_limit, 1))
  end
end
