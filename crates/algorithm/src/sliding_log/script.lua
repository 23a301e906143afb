-- Equivalent of SlidingLog::step. The value is 7 bytes for the instant of each hit, the oldest first.
-- Length in bytes from which hits are appended to a log in place.
local LONG = 512
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
-- Most often no hit has expired.
local expired = used > 0 and unpack_numbers('<I7', value) <= now - window and count_until(value, 7, now - window) or 0
used = used - expired
local allowed = 1
if action == ROLL_BACK then
  local entry = pack('<I7', grid > 0 and taken - taken % grid + 2 * grid or taken)
  for index = expired + 1, used + expired do
    if sub(value, 7 * index - 6, 7 * index) == entry then
      local removed = 0
      while removed < cost and sub(value, 7 * (index + removed) - 6, 7 * (index + removed)) == entry do
        removed = removed + 1
      end
      value, changed = sub(value, 7 * expired + 1, 7 * index - 7) .. sub(value, 7 * (index + removed) - 6), true
      break
    end
  end
elseif action == REFUND then
  local removed = min(cost, used)
  if removed > 0 then
    value, changed = sub(value, 7 * expired + 1, -7 * removed - 1), true
  end
else
  if used + cost > ceiling or interval > 0 and cost > 0 and newest + interval > now then
    allowed = 0
  end
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    local added = min(cost, ceiling)
    local pushed_out = min(max(used + added - ceiling, 0), added)
    newest = max(newest, grid > 0 and now - now % grid + 2 * grid or now)
    local entry = pack('<I7', newest)
    local entries = added == 1 and entry or string.rep(entry, added)
    local removed = expired + pushed_out
    if removed > 0 then
      value = sub(value, 7 * removed + 1)
    elseif #value >= LONG and not changed then
      -- Redis hashes each string that a script creates, which takes long for a whole log. The hits are therefore appended
      -- in place, and the state is returned in two parts.
      call('SETRANGE', key, #value, entries)
      call('PEXPIRE', key, key_lifetime(newest + window - now, jitter))
      return allowed, {value, entries}
    end
    value, changed = value .. entries, true
  end
end
if not changed then
  return allowed, value
elseif value == '' then
  call('DEL', key)
  return allowed, ''
end
if action ~= TAKE then
  newest = unpack_numbers('<I7', value, #value - 6)
end
store(key, value, newest + window - now, jitter)
return allowed, value
