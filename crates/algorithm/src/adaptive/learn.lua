-- Equivalents of Estimate and Window (sluicegate_common::adaptive): the same operations on doubles, in the same order.
-- They are only defined if there is a method: 1 for AIMD, 2 for Gradient2, 3 for Vegas.
local learn_from, learned_tail, learned_limit, learn
if method > 0 then
  local LEARNED = '<dddI4BI7dI4I4I4'
  -- Reads the learned state at the end of a value, or returns the initial one.
  function learn_from(value, bounds)
    local learned = {method = method, bounds = bounds, limit = bounds.initial, baseline = 0, measured = 0, count = 0,
      probing = method == 3 and 3 or 0, ends = 0, sum = 0, samples = 0, in_flight = 0, dropped = 0}
    if #value >= 56 then
      local limit, baseline, measured, count, probing, ends, sum, samples, in_flight, dropped = unpack_numbers(LEARNED, value, #value - 55)
      local function is_number(number)
        return number >= 0 and number < 1e15
      end
      if is_number(limit) and is_number(baseline) and is_number(measured) and is_number(sum) then
        learned.limit = min(max(limit, bounds.floor_limit), bounds.ceiling_limit)
        learned.baseline, learned.measured, learned.count, learned.probing = baseline, measured, count, probing
        learned.ends, learned.sum, learned.samples = ends, sum, samples
        learned.in_flight, learned.dropped = in_flight, dropped
      end
    end
    return learned
  end

  -- Returns the bytes of the learned state.
  function learned_tail(learned)
    return pack(LEARNED, learned.limit, learned.baseline, learned.measured, learned.count, learned.probing, learned.ends,
      learned.sum, learned.samples, learned.in_flight, learned.dropped)
  end

  -- Returns the current limit. It is halved while the baseline is measured.
  function learned_limit(learned)
    local limit = floor(learned.probing > 0 and learned.baseline > 0 and learned.limit * 0.5 or learned.limit)
    return min(max(limit, learned.bounds.floor_limit), learned.bounds.ceiling_limit)
  end

  local function vegas(learned, latency, in_flight, dropped, now)
    local period = floor(now / 40000000) % 4294967296
    if learned.probing > 0 then
      learned.count = period
      learned.probing = min(learned.probing - 1, 3)
      if learned.probing < 2 then
        learned.measured = learned.measured + (latency - learned.measured) / (2 - learned.probing)
      end
      if learned.probing == 0 then
        local weight = learned.baseline > 0 and 0.25 or 0
        learned.baseline, learned.measured = learned.baseline * weight + learned.measured * (1 - weight), 0
      end
      return
    end
    if learned.count ~= period or latency < learned.baseline * 0.75 then
      learned.probing = 3
      return
    end
    local step = learned.limit >= 1000 and 3 or learned.limit >= 100 and 2 or 1
    local queue = ceil(learned.limit * (1 - learned.baseline / latency))
    if dropped then
      learned.limit = learned.limit - step
    elseif in_flight * 2 < learned.limit then
      return
    elseif queue <= step then
      learned.limit = learned.limit + 6 * step
    elseif queue < 3 * step then
      learned.limit = learned.limit + step
    elseif queue > 6 * step then
      learned.limit = learned.limit - max(floor((queue - 6 * step) * 0.5), step)
    end
  end

  local function gradient2(learned, latency, in_flight)
    if learned.count < 10 then
      learned.count = learned.count + 1
      learned.baseline = learned.baseline + (latency - learned.baseline) / learned.count
    else
      local factor = 2 / 601
      learned.baseline = learned.baseline * (1 - factor) + latency * factor
    end
    local long = learned.baseline
    if long / latency > 2 then
      learned.baseline = long * 0.95
    end
    if in_flight < learned.limit / 2 then
      return
    end
    local gradient = max(min(1.5 * long / latency, 1), 0.5)
    learned.limit = learned.limit * (1 - 0.2) + (learned.limit * gradient + 4) * 0.2
  end

  -- Adds one sample, and updates the limit when a window of samples is complete.
  function learn(learned, latency, in_flight, dropped, now)
    if learned.samples == 0 then
      learned.ends = now + 500000
    end
    learned.sum, learned.samples = learned.sum + latency, min(learned.samples + 1, 4294967295)
    learned.in_flight, learned.dropped = max(learned.in_flight, in_flight), learned.dropped + (dropped and 1 or 0)
    if (now < learned.ends and learned.ends <= now + 500000) or learned.samples < 10 then
      return
    end
    latency, in_flight, dropped = learned.sum / learned.samples, learned.in_flight, learned.dropped * 20 > learned.samples
    learned.ends, learned.sum, learned.samples, learned.in_flight, learned.dropped = 0, 0, 0, 0, 0
    dropped = dropped or latency > learned.bounds.timeout
    if learned.method == 1 then
      if dropped then
        learned.limit = floor(learned.limit * 0.9)
      elseif in_flight * 2 >= learned.limit then
        learned.limit = learned.limit + 1
      end
    elseif learned.method == 2 then
      gradient2(learned, latency, in_flight)
    else
      vegas(learned, latency, in_flight, dropped, now)
    end
    learned.limit = min(max(learned.limit, max(learned.bounds.floor_limit, 1)), max(learned.bounds.ceiling_limit, 1))
  end
end
