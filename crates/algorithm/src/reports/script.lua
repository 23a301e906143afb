-- Equivalent of UtilizationReports::step. The value is 15 bytes for each reporter: the end of its report (7), the
-- reporter (6), and the utilization (2).
local value = call('GET', key) or ''
if action == PEEK then
  return 1, value
end
local reports, last, reporters = {}, 0, 0
for offset = 1, #value - 14, 15 do
  local ends, stored_reporter = unpack_numbers('<I7I6', value, offset)
  if ends > now and ends <= now + max_end_ahead and stored_reporter ~= reporter then
    reporters, last = reporters + 1, max(last, ends)
    reports[reporters] = string.sub(value, offset, offset + 14)
  end
end
local allowed = 1
if action == TAKE then
  if reporters < max_reporters then
    last = max(last, now + ttl)
    reports[reporters + 1] = pack('<I7I6I2', now + ttl, reporter, utilization)
  else
    allowed = 0
  end
end
value = table.concat(reports)
if value == '' then
  call('DEL', key)
else
  store(key, value, last - now, jitter)
end
return allowed, value
