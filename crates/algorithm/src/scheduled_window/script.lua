-- Equivalent of ScheduledWindow::step. The value is the time of the latest hit and the count, of 7 bytes each.
--
-- The window of the caller's clock is from `from` until `to`. By the clock of this server it may be the one before or after.
local value = call('GET', key) or ''
if now >= to then
  from, to, after = to, after, 2 * after - to
elseif now < from then
  from, to, after = before, from, to
end
local at = min(max(now, from), to - 1)
local latest, count = at, 0
if #value >= 14 then
  local stored_latest, stored_count = unpack_numbers('<I7I7', value)
  if from <= stored_latest and stored_latest <= at + slack then
    latest, count = stored_latest, stored_count
  end
end
local fits = count <= ceiling and cost <= ceiling - count
local total = count
if action == TAKE then
  if fits or count_denied == 1 then
    total = cost > MAX - count and MAX or count + cost
  end
elseif action == REFUND or action == ROLL_BACK and from <= taken and (taken < to or latest >= to) then
  total = max(count - cost, 0)
end
if total ~= count then
  if action == TAKE then
    latest = max(latest, at)
  end
  if total > 0 then
    value = pack('<I7I7', latest, total)
    -- If the clock has stepped back, the count is that of the next window.
    store(key, value, (latest < to and to or after) - now, jitter)
  else
    value = ''
    call('DEL', key)
  end
end
return (fits or action >= REFUND) and 1 or 0, value
