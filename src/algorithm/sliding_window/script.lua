-- Twin of SlidingWindow::step. The value is 7 bytes of the instant at which the current counter began, 5 (mantissa,
-- exponent) of a counter's width, and 4 for each counter, the current one first.
local into = now % width
local start = now - into
local value = call('GET', key)
local changed = false

if buckets == 1 and (not value or #value == 20) then
  -- The common shape, without tables.
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
        start, into = stored, 0
      else
        changed = true
      end
    end
  end
  if same then
    local allowed = 1
    if action >= RETURN then
      local begun = action == UNDO and taken - taken % width
      local given = (not begun or begun == start) and min(cost, current) or 0
      local more = (not begun or begun == start - width) and min(cost - given, oldest) or 0
      if given + more > 0 then
        current, oldest, changed = current - given, oldest - more, true
      end
    else
      local used = current + (strict == 1 and oldest or share(oldest, width - into, width))
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
    call('SET', key, value, 'PX', ceil((start + 2 * width - now) / 1000) + keep)
    return allowed, value
  end
end

local counts, whole, oldest = {}, 0, 0
for place = 1, buckets + 1 do
  counts[place] = 0
end
if value then
  local stored, stored_mantissa, stored_exponent = unpack_numbers('<I7I4B', value)
  local known = floor((#value - 12) / 4)
  local stored_counts = {unpack_numbers('<' .. string.rep('I4', known), value, 13)}
  if stored_mantissa ~= mantissa or stored_exponent ~= exponent or #value ~= 16 + 4 * buckets then
    -- The window was changed: all that still counted counts as if it had come just now.
    local age = floor(max(now - stored, 0) / max(stored_mantissa * 2 ^ stored_exponent, 1))
    local sum = 0
    for place = 1, known - age do
      sum = sum + stored_counts[place]
    end
    counts[1], changed = min(sum, ceiling, 4294967295), true
  else
    local passed = (start - stored) / width
    if passed < 0 then
      passed = 0
      if stored - now <= slack then
        start, into = stored, 0
      else
        changed = true
      end
    end
    for place = 1, buckets + 1 - passed do
      counts[place + passed] = stored_counts[place]
    end
  end
end
local allowed = 1
if action >= RETURN then
  local left, first, last = cost, 1, buckets + 1
  if action == UNDO then
    first = (start - taken + taken % width) / width + 1
    last = first >= 1 and min(first, last) or 0
  end
  for place = first, last do
    local given = min(left, counts[place])
    if given > 0 then
      counts[place], left, changed = counts[place] - given, left - given, true
    end
  end
else
  for place = 1, buckets do
    whole = whole + counts[place]
  end
  oldest = counts[buckets + 1]
  local used = whole + (strict == 1 and oldest or share(oldest, width - into, width))
  allowed = used + cost <= ceiling and 1 or 0
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    counts[1], changed = min(counts[1] + cost, 4294967295), true
  end
end
if not changed then
  return allowed, value or ''
end
local sum = 0
for place = 1, buckets + 1 do
  sum = sum + counts[place]
end
if sum == 0 then
  call('DEL', key)
  return allowed, ''
end
value = pack('<I7I4B' .. string.rep('I4', buckets + 1), start, mantissa, exponent, unpack(counts))
call('SET', key, value, 'PX', ceil((start + (buckets + 1) * width - now) / 1000) + keep)
return allowed, value
