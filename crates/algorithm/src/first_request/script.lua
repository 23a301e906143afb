-- Equivalent of FirstRequestWindow::step. The value is the start of the window and the count, of 7 bytes each.
local value = call('GET', key) or ''
local start, count = now, 0
if #value >= 14 then
  local stored_start, stored_count = unpack_numbers('<I7I7', value)
  if now < stored_start + window and stored_start <= now + slack then
    start, count = stored_start, stored_count
  end
end
local fits = count <= ceiling and cost <= ceiling - count
local after = count
if action == TAKE then
  if fits or count_denied == 1 then
    after = cost > MAX - count and MAX or count + cost
  end
elseif action == REFUND or action == ROLL_BACK and start <= taken and taken < start + window then
  after = max(count - cost, 0)
end
if after ~= count then
  if action == ROLL_BACK and taken == start and is_lease == 0 then
    -- Without the first take, the window had begun with a later one, at the latest now.
    start = max(start, now)
  end
  if after > 0 then
    value = pack('<I7I7', start, after)
    store(key, value, start + window - now, jitter)
  else
    value = ''
    call('DEL', key)
  end
end
return (fits or action >= REFUND) and 1 or 0, value
