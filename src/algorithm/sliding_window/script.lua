-- Equivalent of SlidingWindow::step. The value is 7 bytes for the start of the current counter, 5 (mantissa, exponent)
-- for the duration of a counter, and 4 for each counter, the current one first.
local elapsed = now % width
local start = now - elapsed
local value = call('GET', key)
local changed = false

if buckets == 1 and (not value or #value == 20) then
  -- The usual case of one counter per window needs no tables.
  local current, oldest = 0, 0
  local same = true
  if value then
    local stored, stored_mantissa, stored_exponent
    stored, stored_mantissa, stored_exponent, current, oldest = unpack_numbers('<I7I4BI4I4', value)
    same = stored_mantissa == mantissa and stored_exponent == exponent
    if same and stored ~= start then
      if stored == start - width then
        current, oldest = 0, current
      elseif stored < start then
        current, oldest = 0, 0
      elseif stored - now <= slack then
        start, elapsed = stored, 0
      else
        changed = true
      end
    end
  end
  if same then
    local allowed = 1
    if action >= REFUND then
      local taken_start = action == ROLL_BACK and taken - taken % width
      local removed = (not taken_start or taken_start == start) and min(cost, current) or 0
      local removed_oldest = (not taken_start or taken_start == start - width) and min(cost - removed, oldest) or 0
      if removed + removed_oldest > 0 then
        current, oldest, changed = current - removed, oldest - removed_oldest, true
      end
    else
      local used = current + (strict == 1 and oldest or share(oldest, width - elapsed, width))
      allowed = used + cost <= ceiling and 1 or 0
      if action == TAKE and (allowed == 1 or count_denied == 1) then
        current, changed = min(current + cost, 4294967295), true
      end
    end
    if not changed then
      return allowed, value or ''
    elseif current + oldest == 0 then
      call('DEL', key)
      return allowed, ''
    end
    value = pack('<I7I4BI4I4', start, mantissa, exponent, current, oldest)
    store(key, value, start + 2 * width - now, jitter)
    return allowed, value
  end
end

local counts, whole, oldest = {}, 0, 0
for index = 1, buckets + 1 do
  counts[index] = 0
end
if value then
  local stored, stored_mantissa, stored_exponent = unpack_numbers('<I7I4B', value)
  local stored_count = floor((#value - 12) / 4)
  local stored_counts = {unpack_numbers('<' .. string.rep('I4', stored_count), value, 13)}
  if stored_mantissa ~= mantissa or stored_exponent ~= exponent or #value ~= 16 + 4 * buckets then
    -- The window was changed: all hits that still count are counted as if they had arrived now.
    local age = floor(max(now - stored, 0) / max(stored_mantissa * 2 ^ stored_exponent, 1))
    local sum = 0
    for index = 1, stored_count - age do
      sum = sum + stored_counts[index]
    end
    counts[1], changed = min(sum, ceiling, 4294967295), true
  else
    local steps = (start - stored) / width
    if steps < 0 then
      steps = 0
      if stored - now <= slack then
        start, elapsed = stored, 0
      else
        changed = true
      end
    end
    for index = 1, buckets + 1 - steps do
      counts[index + steps] = stored_counts[index]
    end
  end
end
local allowed = 1
if action >= REFUND then
  local remaining, first, last = cost, 1, buckets + 1
  if action == ROLL_BACK then
    first = (start - taken + taken % width) / width + 1
    last = first >= 1 and min(first, last) or 0
  end
  for index = first, last do
    local removed = min(remaining, counts[index])
    if removed > 0 then
      counts[index], remaining, changed = counts[index] - removed, remaining - removed, true
    end
  end
else
  for index = 1, buckets do
    whole = whole + counts[index]
  end
  oldest = counts[buckets + 1]
  local used = whole + (strict == 1 and oldest or share(oldest, width - elapsed, width))
  allowed = used + cost <= ceiling and 1 or 0
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    counts[1], changed = min(counts[1] + cost, 4294967295), true
  end
end
if not changed then
  return allowed, value or ''
end
local sum = 0
for index = 1, buckets + 1 do
  sum = sum + counts[index]
end
if sum == 0 then
  call('DEL', key)
  return allowed, ''
end
value = pack('<I7I4B' .. string.rep('I4', buckets + 1), start, mantissa, exponent, unpack(counts))
store(key, value, start + (buckets + 1) * width - now, jitter)
return allowed, value
