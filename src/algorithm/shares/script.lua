-- Twin of Shares::step. The value is numbers of 7 bytes: as of when, of which capacity, what is used of the bucket for all,
-- and for each class what it uses of its own, what it borrowed, and what counts below its maximum.
local value = call('GET', key) or ''
local numbers = {now, capacity, 0}
local size = 3 + 3 * count
if #value ~= 7 * size then
  for place = 4, size do
    numbers[place] = 0
  end
else
  numbers = {unpack_numbers('<' .. string.rep('I7', size), value)}
  -- Behind them it says where it stopped.
  numbers[size + 1] = nil
end
local shares = {unpack_numbers('<' .. string.rep('d', count), records, more)}
local past = min(max(now - numbers[1], 0), window)
if numbers[2] < capacity then
  past = floor(past * numbers[2] / capacity)
end
numbers[1] = numbers[1] > now + slack and now or max(numbers[1], now)
numbers[2] = capacity
local inflow, promised = capacity * past, 0
for i = 1, count do
  local place, most = 3 * i + 1, shares[i] % CLASS
  local least = (shares[i] - most) / CLASS
  local own = min(numbers[place], least * window)
  local refilled = min(own, least * past)
  inflow, promised = inflow - refilled, promised + least
  numbers[place] = own - refilled
  numbers[place + 2] = max(min(numbers[place + 2], most * window) - most * past, 0)
end
local common = (capacity - promised) * window
numbers[3] = max(min(numbers[3], common) - inflow, 0)
for i = 1, count do
  numbers[3 * i + 2] = min(numbers[3 * i + 2], numbers[3])
end
local place, units = 3 * class + 4, cost * window
local most = shares[class + 1] % CLASS
local least = (shares[class + 1] - most) / CLASS
if action == TAKE or action == PEEK then
  local own = least * window - numbers[place]
  if units > min(own + common - numbers[3], most * window - numbers[place + 2]) then
    return 0, value
  end
  if action == PEEK then
    return 1, value
  end
  own = min(own, units)
  numbers[3] = numbers[3] + units - own
  numbers[place] = numbers[place] + own
  numbers[place + 1] = numbers[place + 1] + units - own
  numbers[place + 2] = numbers[place + 2] + units
else
  local since = 0
  if action == UNDO then
    since = min(max(now - taken, 0), window)
  end
  local back = max(units - capacity * since, 0)
  local borrowed = min(back, numbers[place + 1])
  numbers[3] = numbers[3] - borrowed
  numbers[place] = max(numbers[place] - (back - borrowed), 0)
  numbers[place + 1] = numbers[place + 1] - borrowed
  numbers[place + 2] = max(numbers[place + 2] - max(units - most * since, 0), 0)
end
local used = false
for i = 3, size do
  used = used or numbers[i] > 0
end
if not used then
  call('DEL', key)
  return 1, ''
end
value = pack('<' .. string.rep('I7', size), unpack(numbers))
call('SET', key, value, 'PX', ceil((numbers[1] + window - now) / 1000) + keep)
return 1, value
