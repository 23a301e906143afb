-- Twin of SlidingLog::step. The value is 7 bytes for the instant of each hit, the oldest first.
local function logged(at)
  return grid > 0 and at - at % grid + 2 * grid or at
end
local value = call('GET', key) or ''
local held = floor(#value / 7)
local newest = held > 0 and unpack_numbers('<I7', value, 7 * held - 6) or 0
local changed = false
if newest > now + slack then
  -- The clock was wrong when this was written: hits of the future become hits of now.
  local entries = {}
  for place = 1, held do
    entries[place] = pack('<I7', min(unpack_numbers('<I7', value, 7 * place - 6), now))
  end
  value, newest, changed = table.concat(entries), now, true
end
local gone = count_until(value, 7, now - window)
held = held - gone
local allowed = 1
if action == UNDO then
  local entry = pack('<I7', logged(taken))
  for place = gone + 1, held + gone do
    if string.sub(value, 7 * place - 6, 7 * place) == entry then
      local given = 0
      while given < cost and string.sub(value, 7 * (place + given) - 6, 7 * (place + given)) == entry do
        given = given + 1
      end
      value, changed = string.sub(value, 7 * gone + 1, 7 * place - 7) .. string.sub(value, 7 * (place + given) - 6), true
      break
    end
  end
elseif action == RETURN then
  local given = min(cost, held)
  if given > 0 then
    value, changed = string.sub(value, 7 * gone + 1, -7 * given - 1), true
  end
else
  if held + cost > ceiling or interval > 0 and cost > 0 and newest + interval > now then
    allowed = 0
  end
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    local added = min(cost, ceiling)
    local pushed_out = min(max(held + added - ceiling, 0), added)
    newest = max(newest, logged(now))
    value = string.sub(value, 7 * (gone + pushed_out) + 1) .. string.rep(pack('<I7', newest), added)
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
call('SET', key, value, 'PX', ceil((newest + window - now) / 1000) + keep)
return allowed, value
