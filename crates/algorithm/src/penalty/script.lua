-- Equivalent of Penalty::step. The value is the end of the last penalty and its length, of 7 bytes each.
local value = call('GET', key) or ''
local stored_end, stored_length, ends, length = 0, 0, 0, 0
if #value >= 14 then
  stored_end, stored_length = unpack_numbers('<I7I7', value)
  if stored_end <= now + slack + stored_length then
    ends, length = stored_end, stored_length
  end
end
if action == TAKE then
  if now < ends then
    return 0, value
  end
  local next_length = shortest
  if now < ends + length then
    next_length = max(min(2 * length, longest), shortest)
  end
  value = pack('<I7I7', now + next_length, next_length)
  store(key, value, longest > shortest and 2 * next_length or next_length, jitter)
elseif action == PEEK then
  return now < ends and 0 or 1, value
elseif action == ROLL_BACK and #value >= 14 and stored_end == taken + stored_length then
  if stored_length > shortest then
    local earlier_length = max(floor(stored_length / 2), shortest)
    value = pack('<I7I7', taken, earlier_length)
    store(key, value, max(taken + earlier_length - now, 1), jitter)
  else
    value = ''
    call('DEL', key)
  end
end
return 1, value
