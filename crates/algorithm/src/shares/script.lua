-- Equivalent of Shares::step. The value consists of numbers of 7 bytes: the instant, the capacity at that instant, the
-- use of the common bucket, and for each class the use of its own bucket, the borrowed part, and the use of its
-- maximum.
local value = call('GET', key) or ''
local numbers = {now, capacity, 0}
local size = 3 + 3 * count
local numbers_format = '<' .. string.rep('I7', size)
if #value ~= 7 * size then
  for index = 4, size do
    numbers[index] = 0
  end
else
  numbers = {unpack_numbers(numbers_format, value)}
  -- struct.unpack also returns the position after the last number.
  numbers[size + 1] = nil
end
local shares = {unpack_numbers('<' .. string.rep('d', count), records, more)}
local elapsed = min(max(now - numbers[1], 0), window)
if numbers[2] < capacity then
  elapsed = floor(elapsed * numbers[2] / capacity)
end
local corrected = numbers[1] > now + slack or numbers[2] ~= capacity
numbers[1] = numbers[1] > now + slack and now or max(numbers[1], now)
numbers[2] = capacity
local inflow, promised = capacity * elapsed, 0
for i = 1, count do
  local index, class_max = 3 * i + 1, shares[i] % CLASS_MIN_FACTOR
  local class_min = (shares[i] - class_max) / CLASS_MIN_FACTOR
  promised = promised + class_min
  -- Most classes are idle, and comparisons cost less than calls.
  local own, all = numbers[index], numbers[index + 2]
  if own > 0 then
    own = min(own, class_min * window)
    local refilled = min(own, class_min * elapsed)
    inflow, numbers[index] = inflow - refilled, own - refilled
  end
  if all > 0 then
    numbers[index + 2] = max(min(all, class_max * window) - class_max * elapsed, 0)
  end
end
local common = (capacity - promised) * window
numbers[3] = max(min(numbers[3], common) - inflow, 0)
for i = 1, count do
  if numbers[3 * i + 2] > numbers[3] then
    numbers[3 * i + 2] = numbers[3]
  end
end
local index, units, allowed = 3 * class + 4, cost * window, 1
local class_max = shares[class + 1] % CLASS_MIN_FACTOR
local class_min = (shares[class + 1] - class_max) / CLASS_MIN_FACTOR
if action == TAKE or action == PEEK then
  local own = class_min * window - numbers[index]
  if units > min(own + common - numbers[3], class_max * window - numbers[index + 2]) then
    allowed, units = 0, 0
  end
  if action == PEEK or (allowed == 0 and not corrected) then
    return allowed, value
  end
  own = min(own, units)
  numbers[3] = numbers[3] + units - own
  numbers[index] = numbers[index] + own
  numbers[index + 1] = numbers[index + 1] + units - own
  numbers[index + 2] = numbers[index + 2] + units
else
  local since = 0
  if action == ROLL_BACK then
    since = min(max(now - taken, 0), window)
  end
  local refunded = max(units - capacity * since, 0)
  local borrowed = min(refunded, numbers[index + 1])
  numbers[3] = numbers[3] - borrowed
  numbers[index] = max(numbers[index] - (refunded - borrowed), 0)
  numbers[index + 1] = numbers[index + 1] - borrowed
  numbers[index + 2] = max(numbers[index + 2] - max(units - class_max * since, 0), 0)
end
local first_used = 3
while first_used <= size and numbers[first_used] == 0 do
  first_used = first_used + 1
end
if first_used > size then
  call('DEL', key)
  return allowed, ''
end
value = pack(numbers_format, unpack(numbers))
store(key, value, numbers[1] + window - now, jitter)
return allowed, value
