-- Twin of Reports::step. The value is 15 bytes a reporter: until when it holds (7), who (6), and what (2).
local value = call('GET', key) or ''
if action == PEEK then
  return 1, value
end
local kept, last, reporters = {}, 0, 0
for place = 1, #value - 14, 15 do
  local ends, who = unpack_numbers('<I7I6', value, place)
  if ends > now and ends <= now + longest and who ~= reporter then
    reporters, last = reporters + 1, max(last, ends)
    kept[reporters] = string.sub(value, place, place + 14)
  end
end
local allowed = 1
if action == TAKE then
  if reporters < most then
    last = max(last, now + life)
    kept[reporters + 1] = pack('<I7I6I2', now + life, reporter, part)
  else
    allowed = 0
  end
end
value = table.concat(kept)
if value == '' then
  call('DEL', key)
else
  call('SET', key, value, 'PX', ceil((last - now) / 1000) + keep)
end
return allowed, value
