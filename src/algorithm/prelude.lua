-- What several scripts call. Numbers are doubles: whole and exact up to 2^53, and everything here stays below that.
local TAKE, PEEK, RETURN, UNDO = 0, 1, 2, 3
local MAX = 9007199254740991
-- A class of a shared capacity is one number: what is always there for it times this, and the most it may have.
local CLASS = 134217728
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min
local call, byte, pack, unpack_numbers = redis.call, string.byte, struct.pack, struct.unpack

-- count * part / whole, rounded up, for count < 2^51 and part <= whole <= 2^49. When the product outgrows a double it
-- is divided as on paper, three bits of the count at a time.
local function share(count, part, whole)
  local product = count * part
  if product <= MAX then
    return ceil(product / whole)
  end
  local quotient, rest, place = 0, 0, 2 ^ 48
  repeat
    rest = rest * 8 + floor(count / place) % 8 * part
    local digit = floor(rest / whole)
    quotient, rest = quotient * 8 + digit, rest - digit * whole
    place = place / 8
  until place < 1
  return rest > 0 and quotient + 1 or quotient
end

-- How many of a state's entries, each of so many bytes, begin with this instant or an earlier one. They are in that order.
local function count_until(value, bytes, instant)
  local first, last = 0, floor(#value / bytes)
  while first < last do
    local middle = floor((first + last) / 2)
    if unpack_numbers('<I7', value, bytes * middle + 1) <= instant then
      first = middle + 1
    else
      last = middle
    end
  end
  return first
end

-- Twins of Estimate and Window (sluicegate_common::adaptive): the same operations on doubles, in the same order.
local function learn_from(value, bounds)
  local it = {bounds = bounds, limit = bounds.initial, baseline = 0, count = 0, probing = 0,
    ends = 0, sum = 0, samples = 0, in_flight = 0, dropped = 0}
  if #value >= 45 then
    local limit, baseline, count, probing, ends, sum, samples, in_flight, dropped =
      unpack_numbers('<ddI4BI7dI4I4B', value)
    if limit >= 0 and limit < 1e15 and baseline >= 0 and baseline < 1e15 and sum >= 0 and sum < 1e15 then
      it.limit = min(max(limit, bounds.least), bounds.most)
      it.baseline, it.count, it.probing = baseline, count, probing
      it.ends, it.sum, it.samples, it.in_flight, it.dropped = ends, sum, samples, in_flight, dropped > 0 and 1 or 0
    end
  end
  return it
end

local function learned_head(it)
  return pack('<ddI4BI7dI4I4B', it.limit, it.baseline, it.count, it.probing, it.ends, it.sum, it.samples, it.in_flight, it.dropped)
end

local function learned_limit(it)
  local limit = floor(it.probing > 0 and it.limit * 0.5 or it.limit)
  return min(max(limit, it.bounds.least), it.bounds.most)
end

local function vegas(it, latency, in_flight, dropped, chance)
  if it.probing > 0 then
    it.probing = it.probing - 1
    if it.probing == 0 then
      it.baseline = latency
    end
    return
  end
  it.count = min(it.count + 1, 4294967295)
  if (0.5 + chance / 2) * 30 * it.limit <= it.count then
    it.probing, it.count = 2, 0
    return
  end
  if it.baseline == 0 or latency < it.baseline then
    it.baseline = latency
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
    it.limit = it.limit - step
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

-- One sample more; `method` is 1 for AIMD, 2 for Gradient2 and 3 for Vegas.
local function learn(it, latency, in_flight, dropped, method, now)
  if it.samples == 0 then
    it.ends = now + 100000
  end
  it.sum, it.samples = it.sum + latency, min(it.samples + 1, 4294967295)
  it.in_flight, it.dropped = max(it.in_flight, in_flight), dropped and 1 or it.dropped
  if (now < it.ends and it.ends <= now + 100000) or it.samples < 10 then
    return
  end
  latency, in_flight, dropped = it.sum / it.samples, it.in_flight, it.dropped > 0
  it.ends, it.sum, it.samples, it.in_flight, it.dropped = 0, 0, 0, 0, 0
  dropped = dropped or latency > it.bounds.timeout
  if method == 1 then
    if dropped then
      it.limit = floor(it.limit * 0.9)
    elseif in_flight * 2 >= it.limit then
      it.limit = it.limit + 1
    end
  elseif method == 2 then
    gradient2(it, latency, in_flight)
  else
    vegas(it, latency, in_flight, dropped, now % 997 / 997)
  end
  it.limit = min(max(it.limit, max(it.bounds.least, 1)), max(it.bounds.most, 1))
end
