-- Twin of Bucket::step. The value is 7 bytes of the instant at which the bucket will have drained, 4 of its fraction,
-- and 5 (mantissa, exponent) of the time that a full bucket took to drain when it was written.
local value = call('GET', key)
local at, part, changed = now, 0, false
if value then
  local stored_mantissa, stored_exponent
  at, part, stored_mantissa, stored_exponent = unpack_numbers('<I7I4I4B', value)
  if at < now then
    at, part = now, 0
  elseif stored_mantissa ~= mantissa or stored_exponent ~= exponent then
    -- The limit was changed: what was used of the old one is as large a part of the new one.
    local used = at - now + min(part, 1)
    used = ceil(used * (mantissa * 2 ^ exponent) / (max(stored_mantissa, 1) * 2 ^ stored_exponent))
    at, part, changed = now + min(used, full), 0, true
  elseif part >= parts then
    -- The fraction was one of another limit.
    at, part = at + 1, 0
  end
  if at - now > full + slack then
    -- The clock was wrong when this was written.
    at, part, changed = now + full, full_part, true
  end
end
local allowed = 1
if action >= RETURN then
  if action == UNDO then
    -- The time since has brought a part of it back.
    charge = charge - max(now - taken, 0)
    if charge < 0 then
      charge, charge_part = 0, 0
    end
  end
  if at > now or part > 0 then
    at, part, changed = at - charge, part - charge_part, true
    if part < 0 then
      at, part = at - 1, part + parts
    end
  end
else
  local after, after_part = at + charge, part + charge_part
  if after_part >= parts then
    after, after_part = after + 1, after_part - parts
  end
  local ahead = after - now
  if ahead > full or ahead == full and after_part > full_part then
    allowed = 0
    after, after_part = now + full, full_part
    if after < at or after == at and after_part <= part then
      after, after_part = at, part
    end
  end
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    at, part, changed = after, after_part, true
  end
end
if not changed then
  return allowed, value or ''
elseif at < now or at == now and part == 0 then
  call('DEL', key)
  return allowed, ''
end
value = pack('<I7I4I4B', at, part, mantissa, exponent)
call('SET', key, value, 'PX', ceil((at - now) / 1000) + keep)
return allowed, value
