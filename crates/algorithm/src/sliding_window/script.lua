-- Equivalent of SlidingWindow::step. The value is 7 bytes for the start of the current bucket, 5 (mantissa, exponent)
-- for the duration of a bucket, 4 for the sum of all buckets if there are more than two, and 4 for each bucket, the
-- current one first.
local elapsed = now % width
local start = now - elapsed
local value = call('GET', key)
local changed = false
-- Whether the start remains the same. Then the value is overwritten in place and the key keeps its expiry, which costs
-- less than a new value with a new expiry.
local keeps_start = false

if buckets == 1 and (not value or #value == 20) then
  -- The usual case of one bucket per window needs no tables.
  local current, oldest = 0, 0
  local same = true
  if value then
    local stored, stored_mantissa, stored_exponent
    stored, stored_mantissa, stored_exponent, current, oldest = unpack_numbers('<I7I4BI4I4', value)
    same = stored_mantissa == mantissa and stored_exponent == exponent
    keeps_start = same and stored == start
    if same and stored ~= start then
      if stored == start - width then
        current, oldest = 0, current
      elseif stored < start then
        current, oldest = 0, 0
      elseif stored - now <= slack then
        start, elapsed, keeps_start = stored, 0, true
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
      local used = current + ((strict == 1 or oldest == 0) and oldest or share(oldest, width - elapsed, width))
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
    if keeps_start then
      call('SETRANGE', key, '0', value)
    else
      store(key, value, start + 2 * width - now, jitter)
    end
    return allowed, value
  end
end

-- The sum of all buckets, the current bucket, and the bytes of the others, of which the oldest is the last.
local MAX_COUNT, MAX_BUCKETS = 4294967295, 256
local total, current, oldest, others = 0, 0, 0, nil
if value then
  local stored, stored_mantissa, stored_exponent, stored_total, stored_current = unpack_numbers('<I7I4BI4I4', value)
  local header = #value > 20 and 16 or 12
  local is_same = stored_mantissa == mantissa and stored_exponent == exponent and #value == 20 + 4 * buckets
  if buckets == 1 or not is_same then
    -- The window was changed: all hits that still count are counted as if they had arrived now.
    local age = floor(max(now - stored, 0) / max(stored_mantissa * 2 ^ stored_exponent, 1))
    local stored_count = min(floor((#value - header) / 4), MAX_BUCKETS + 1)
    current = min(sum_buckets(value, header, 1, stored_count - age), ceiling, MAX_COUNT)
    total, changed = current, true
  else
    -- A larger sum does not fit into its bytes.
    total = stored_total < MAX_COUNT and stored_total or sum_buckets(value, 16, 1, buckets + 1)
    local steps = floor((start - stored) / width)
    if steps <= 0 then
      keeps_start = steps == 0
      if steps < 0 and stored - now <= slack then
        start, elapsed, keeps_start = stored, 0, true
      elseif steps < 0 then
        changed = true
      end
      current, others = stored_current, sub(value, 21)
    elseif steps <= buckets then
      -- The buckets move by `steps` places, and the last ones have expired.
      total = total - sum_buckets(value, 16, buckets + 2 - steps, buckets + 1)
      others = string.rep('\0', 4 * steps - 4) .. sub(value, 17, -4 * steps - 1)
    else
      total = 0
    end
    if others then
      oldest = unpack_numbers('<I4', others, 4 * buckets - 3)
    end
    if total < current + oldest then
      error('overflow: the buckets exceed their sum')
    end
  end
end
others = others or string.rep('\0', 4 * buckets)
local allowed = 1
if action >= REFUND then
  local format = '<' .. string.rep('I4', buckets)
  local counts = {unpack_numbers(format, others)}
  local first, last = 0, buckets
  if action == ROLL_BACK then
    first = (start - taken + taken % width) / width
    last = first >= 0 and min(first, last) or -1
  end
  counts[0] = current
  local remaining = cost
  for index = first, last do
    local removed = min(remaining, counts[index])
    counts[index], remaining = counts[index] - removed, remaining - removed
  end
  if remaining < cost then
    total, current, changed = total - cost + remaining, counts[0], true
    others = pack(format, unpack(counts, 1, buckets))
  end
else
  local used = total
  if strict == 0 and oldest > 0 then
    used = total - oldest + share(oldest, width - elapsed, width)
  end
  allowed = used + cost <= ceiling and 1 or 0
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    local added = min(current + cost, MAX_COUNT) - current
    total, current, changed = total + added, current + added, true
  end
end
if not changed then
  return allowed, value or ''
end
if total == 0 then
  call('DEL', key)
  return allowed, ''
end
if buckets == 1 then
  value = pack('<I7I4BI4', start, mantissa, exponent, current) .. others
else
  value = pack('<I7I4BI4I4', start, mantissa, exponent, min(total, MAX_COUNT), current) .. others
end
if keeps_start then
  call('SETRANGE', key, '0', value)
else
  store(key, value, start + (buckets + 1) * width - now, jitter)
end
return allowed, value
