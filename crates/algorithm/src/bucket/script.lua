-- Equivalent of Bucket::step. The value begins with 7 bytes for the instant at which the bucket will have drained, 4
-- or 7 for its fraction, and 5 (mantissa, exponent) for the drain time of a full bucket. 18 bytes for each leased part
-- follow: 7 for the instant at which it ends, 7 and 4 for its size. Buckets with long fractions have no leased parts.
local value = call('GET', key)
local at, part, changed = now, 0, false
-- The stored instant of a value that can be overwritten in place.
local stored_at
-- The leased parts, by number and by the instant at which they end.
local entries, leased_total, leased_total_part
if value then
  local stored_mantissa, stored_exponent
  at, part, stored_mantissa, stored_exponent = unpack_numbers(format, value)
  local same = stored_mantissa == mantissa and stored_exponent == exponent
  local scale_to, scale_from
  if same and #value == state_bytes then
    stored_at = at
  elseif not same then
    scale_to, scale_from = mantissa * 2 ^ exponent, max(stored_mantissa, 1) * 2 ^ stored_exponent
  end
  if #value > state_bytes and state_bytes == 16 then
    entries, leased_total, leased_total_part, changed = {}, 0, 0, not same
    if part >= parts or not same then
      at, part = at + min(part, 1), 0
    end
    for offset = 17, min(#value, 88) - 17, 18 do
      local ends, span, span_part = unpack_numbers('<I7I7I4', value, offset)
      if span_part >= parts or not same then
        span, span_part = span + min(span_part, 1), 0
      end
      if ends <= now or ends > now + slack + 1000000 then
        -- The lease has ended. It is poured into the bucket as of its end, until the bucket is full.
        local since = min(ends, now)
        if at < since then
          at, part = since, 0
        end
        local after, after_part = at + span, part + span_part
        if after_part >= parts then
          after, after_part = after + 1, after_part - parts
        end
        if same and (after > since + full or after == since + full and after_part > full_part) then
          after, after_part = since + full, full_part
        end
        if after > at or after == at and after_part > part then
          at, part = after, after_part
        end
      else
        if not same then
          span = ceil(span * scale_to / scale_from)
        end
        -- The parts of a broken value can be larger than a full bucket.
        local free, free_part = full - leased_total, full_part - leased_total_part
        if free_part < 0 then
          free, free_part = free - 1, free_part + parts
        end
        if span > free or span == free and span_part > free_part then
          span, span_part = free, free_part
        end
        local entry = {ends, span, span_part}
        entries[#entries + 1], entries[ends] = entry, entries[ends] or entry
        leased_total, leased_total_part = leased_total + span, leased_total_part + span_part
        if leased_total_part >= parts then
          leased_total, leased_total_part = leased_total + 1, leased_total_part - parts
        end
      end
    end
  end
  if at < now then
    at, part = now, 0
  elseif not same then
    -- The limit was changed: the level stays the same proportion of a full bucket.
    at, part, changed = now + min(ceil((at - now + min(part, 1)) * scale_to / scale_from), full), 0, true
  elseif part >= parts then
    -- The fraction is one of another limit.
    at, part = at + 1, 0
  end
  if at - now > full + slack then
    -- A clock was wrong when this was written.
    at, part, changed = now + full, full_part, true
  end
end
local allowed = 1
if action >= REFUND then
  changed = changed or at > now or part > 0 or entries and #entries > 0
  local since = taken
  if action == ROLL_BACK and grid > 0 then
    since = taken - taken % grid + 2 * grid
    if since > now then
      local entry = entries and entries[since]
      if entry then
        entry[2], entry[3] = entry[2] - charge, entry[3] - charge_part
        if entry[3] < 0 then
          entry[2], entry[3] = entry[2] - 1, entry[3] + parts
        end
        if entry[2] < 0 then
          entry[2], entry[3] = 0, 0
        end
      end
      charge, charge_part = 0, 0
    end
  end
  if action == ROLL_BACK then
    -- A part has drained since.
    charge = charge - max(now - since, 0)
    if charge < 0 then
      charge, charge_part = 0, 0
    end
  end
  at, part = at - charge, part - charge_part
  if part < 0 then
    at, part = at - 1, part + parts
  end
  if at < now then
    at, part = now, 0
  end
else
  local after, after_part = at + charge, part - (parts - charge_part)
  if after_part >= 0 then
    after = after + 1
  else
    -- The sum is exact, because it is less than `parts`.
    after_part = part + charge_part
  end
  if free and (at - now > free or at - now == free and part > free_part) then
    -- Hits are owed, so nothing is allowed.
    max_fill = -1
  end
  local ahead, ahead_part = after - now, after_part
  if leased_total then
    ahead, ahead_part = ahead + leased_total, ahead_part + leased_total_part
    if ahead_part >= parts then
      ahead, ahead_part = ahead + 1, ahead_part - parts
    end
  end
  if ahead > max_fill or ahead == max_fill and ahead_part > max_fill_part then
    allowed = 0
    if count_denied == 2 then
      -- The bucket goes into debt. A deeper debt would look as if a clock had been wrong.
      if after >= now + full + slack then
        after, after_part = now + full + slack, 0
      end
    else
      after, after_part = now + full, full_part
    end
    if leased_total and count_denied < 2 then
      after, after_part = after - leased_total, after_part - leased_total_part
      if after_part < 0 then
        after, after_part = after - 1, after_part + parts
      end
    end
    if after < at or after == at and after_part <= part then
      after, after_part = at, part
    end
  end
  if action == TAKE and (allowed == 1 or count_denied > 0) then
    if grid == 0 then
      at, part = after, after_part
    else
      local ends = now - now % grid + 2 * grid
      entries = entries or {}
      local entry = entries[ends]
      if entry then
        entry[2], entry[3] = entry[2] + charge, entry[3] + charge_part
        if entry[3] >= parts then
          entry[2], entry[3] = entry[2] + 1, entry[3] - parts
        end
      elseif #entries < 4 then
        entries[#entries + 1] = {ends, charge, charge_part}
      else
        allowed = 0
      end
    end
    changed = true
  end
end
if not changed then
  return allowed, value or ''
end
local leased, last = '', at
if entries then
  for _, entry in ipairs(entries) do
    local ends, span, span_part = entry[1], entry[2], entry[3]
    if span > 0 or span_part > 0 then
      leased = leased .. pack('<I7I7I4', ends, span, span_part)
      last = max(last, ends) + span
    end
  end
end
if leased == '' and at == now and part == 0 then
  call('DEL', key)
  return allowed, ''
end
value = pack(format, at, part, mantissa, exponent) .. leased
-- Keys expire at multiples of a sixteenth of the drain time. Most hits therefore change the value in place and need no
-- new expiry, which would cost a fifth of the decision.
local step = mantissa * 2 ^ exponent / 16
local expires = ceil(last / step)
if stored_at and leased == '' and expires <= ceil(stored_at / step) then
  call('SETRANGE', key, '0', value)
else
  store(key, value, expires * step - now, jitter)
end
return allowed, value
