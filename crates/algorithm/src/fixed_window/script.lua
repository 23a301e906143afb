-- Equivalent of FixedWindow::step. The value is an integer: its last ten digits are the count, the digits before
-- identify the window.
local COUNT_RANGE, MAX_COUNT, WINDOW_TAGS = 10000000000, 4999999999, 900000
local elapsed = now % window
local number = (now - elapsed) / window
local value
if action == TAKE and count_denied == 1 then
  -- Nearly every cost is 1, and INCRBY would have to format the cost as text.
  value = cost == 1 and call('INCR', key) or call('INCRBY', key, cost)
else
  value = tonumber(call('GET', key) or 0)
end
local count = value % COUNT_RANGE
local tag = (value - count) / COUNT_RANGE
local is_current = tag >= 1 and tag <= WINDOW_TAGS and (tag - 1 - number) % WINDOW_TAGS * window <= slack + elapsed
if action == TAKE then
  if is_current and count_denied == 1 then
    if count > MAX_COUNT then
      value = value - count + MAX_COUNT
      call('SET', key, value, 'KEEPTTL')
    end
    return count <= ceiling and 1 or 0, value
  end
  local fits = (is_current and count or 0) + cost <= ceiling
  if is_current and fits then
    value = call('INCRBY', key, cost)
  elseif fits or count_denied == 1 then
    value = (number % WINDOW_TAGS + 1) * COUNT_RANGE + cost
    store(key, value, window - elapsed, jitter)
  end
  return fits and 1 or 0, value
elseif action == PEEK then
  return (is_current and count or 0) + cost <= ceiling and 1 or 0, value
end
-- A take in another window than the counted one is not rolled back.
if action == ROLL_BACK and (tag - 1 - floor(taken / window)) % WINDOW_TAGS ~= 0 then
  is_current = false
end
local refunded = is_current and min(count, cost) or 0
if refunded > 0 then
  value = call('DECRBY', key, refunded)
end
return 1, value
