-- Equivalent of SlidingLog::step. The value is 7 bytes for the instant of each hit, the oldest first.
local function logged_at(at)
  return grid > 0 and at - at % grid + 2 * grid or at
end
local value = call('GET', key) or ''
local used = floor(#value / 7)
local newest = used > 0 and unpack_numbers('<I7', value, 7 * used - 6) or 0
local changed = false
if newest > now + slack then
  -- A clock was wrong when this was written: instants in the future are replaced by now.
  local entries = {}
  for index = 1, used do
    entries[index] = pack('<I7', min(unpack_numbers('<I7', value, 7 * index - 6), now))
  end
  value, newest, changed = table.concat(entries), now, true
end
local expired = count_until(value, 7, now - window)
used = used - expired
local allowed = 1
if action == ROLL_BACK then
  local entry = pack('<I7', logged_at(taken))
  for index = expired + 1, used + expired do
    if string.sub(value, 7 * index - 6, 7 * index) == entry then
      local removed = 0
      while removed < cost and string.sub(value, 7 * (index + removed) - 6, 7 * (index + removed)) == entry do
        removed = removed + 1
      end
      value, changed = string.sub(value, 7 * expired + 1, 7 * index - 7) .. string.sub(value, 7 * (index + removed) - 6), true
      break
    end
  end
elseif action == REFUND then
  local removed = min(cost, used)
  if removed > 0 then
    value, changed = string.sub(value, 7 * expired + 1, -7 * removed - 1), true
  end
else
  if used + cost > ceiling or interval > 0 and cost > 0 and newest + interval > now then
    allowed = 0
  end
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    local added = min(cost, ceiling)
    local pushed_out = min(max(used + added - ceiling, 0), added)
    newest = max(newest, logged_at(now))
    value = string.sub(value, 7 * (expired + pushed_out) + 1) .. string.rep(pack('<I7', newest), added)
    changed = true
  end
end
if not changed then
  return allowed, value
elseif value == '' then
  call('DEL', key)
  return allowed, ''
end
newest = unpack_numbers('<I7', value, #value - 6)
store(key, value, newest + window - now, jitter)
return allowed, value
