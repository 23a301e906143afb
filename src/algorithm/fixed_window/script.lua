-- Twin of FixedWindow::step. One integer per window, at key:<start in seconds>, so that redis-cli shows the count.
-- p1: limit, p2: window in microseconds.
local start = now - now % p2
local counter = key .. ':' .. string.format('%.0f', start / 1000000)
local count
if action == 0 then
  count = redis.call('INCRBY', counter, cost)
  if count > MAX then
    count = MAX
    redis.call('SET', counter, string.format('%.0f', count), 'KEEPTTL')
  end
  if count == cost then
    redis.call('PEXPIRE', counter, math.ceil((start + p2 - now) / 1000) + keep)
  end
  return count <= p1 and 1 or 0, start, count
end
count = tonumber(redis.call('GET', counter) or '0')
if action == 1 then
  return count + cost <= p1 and 1 or 0, start, count
end
local after = math.max(0, count - cost)
if after ~= count then
  redis.call('SET', counter, string.format('%.0f', after), 'KEEPTTL')
end
return 1, start, after
