-- Twin of FixedWindow::step. The value is an integer: its last ten digits are the count, those before tell the window.
local COUNTS, MOST, TAGS = 10000000000, 4999999999, 900000
local into = now % window
local number = (now - into) / window
local value
if action == TAKE and count_denied == 1 then
  -- Nearly every cost is 1, and a number among the arguments has to be printed.
  value = cost == 1 and call('INCR', key) or call('INCRBY', key, cost)
else
  value = tonumber(call('GET', key) or 0)
end
local count = value % COUNTS
local tag = (value - count) / COUNTS
local known = tag >= 1 and tag <= TAGS and (tag - 1 - number) % TAGS <= believed
if action == TAKE then
  if known and count_denied == 1 then
    if count > MOST then
      value = value - count + MOST
      call('SET', key, value, 'KEEPTTL')
    end
    return count <= ceiling and 1 or 0, value
  end
  local fits = (known and count or 0) + cost <= ceiling
  if known and fits then
    value = call('INCRBY', key, cost)
  elseif fits or count_denied == 1 then
    value = (number % TAGS + 1) * COUNTS + cost
    call('SET', key, value, 'PX', ceil((window - into) / 1000) + keep)
  end
  return fits and 1 or 0, value
elseif action == PEEK then
  return (known and count or 0) + cost <= ceiling and 1 or 0, value
end
-- Of another window than the one that took it nothing is taken back.
if action == UNDO and (tag - 1 - floor(taken / window)) % TAGS ~= 0 then
  known = false
end
local given = known and min(count, cost) or 0
if given > 0 then
  value = call('DECRBY', key, given)
end
return 1, value
