-- Equivalent of WarmUp::step. The value is that of a bucket (see bucket/script.lua) and 4 bytes for `cold`, in
-- microseconds.
local value = call('GET', key)
local at, part, cold, changed = now, 0, period, false
if value then
  local stored_mantissa, stored_exponent
  at, part, stored_mantissa, stored_exponent, cold = unpack_numbers('<I7I4I4BI4', value)
  cold = min(cold, period)
  if at < now then
    at, part, cold = now, 0, min(cold + now - at, period)
  elseif stored_mantissa ~= mantissa or stored_exponent ~= exponent then
    -- The limit was changed: the debt is scaled.
    local debt = at - now + min(part, 1)
    debt = ceil(debt * (mantissa * 2 ^ exponent) / (max(stored_mantissa, 1) * 2 ^ stored_exponent))
    at, part, changed = now + min(debt, max_debt), 0, true
  elseif part >= parts then
    -- The fraction is one of another limit.
    at, part = at + 1, 0
  end
  -- A minute, as CLOCK_SLACK in Rust.
  local slack = 60000000
  if at - now > max_debt + slack or changed and at - now >= max_debt then
    -- A clock was wrong when this was written: the burst is used up.
    at, part, changed = now + full, 0, true
  end
end
local warmth = charge + (charge_part > 0 and 1 or 0)
local allowed = 1
if action >= REFUND then
  if action == ROLL_BACK then
    -- The take has also prevented idleness, and a part of its debt has been paid since.
    warmth, charge = 4 * warmth, charge - max(now - taken, 0)
    if charge < 0 then
      charge, charge_part = 0, 0
    end
  end
  if at > now or part > 0 or cold < period then
    at, part, cold, changed = at - charge, part - charge_part, cold + warmth, true
    if part < 0 then
      at, part = at - 1, part + parts
    end
    if at < now then
      at, part = now, 0
    end
  end
else
  local debt = at - now
  if possible == 0 or debt > allowed_debt or debt == allowed_debt and part > allowed_debt_part then
    allowed = 0
  end
  if action == TAKE and (allowed == 1 or count_denied == 1) then
    local after, after_part = at + charge, part + charge_part
    if after_part >= parts then
      after, after_part = after + 1, after_part - parts
    end
    if allowed == 1 then
      local above = max(cold - floor(period / 2), 0)
      local surcharged = min(above, charge)
      after = after + share(2 * surcharged, 2 * above - surcharged, period)
      cold = max(cold - warmth, 0)
    else
      if after > now + max_debt or after == now + max_debt and after_part > 0 then
        after, after_part = now + max_debt, 0
      end
      if after < at or after == at and after_part < part then
        after, after_part = at, part
      end
    end
    at, part, changed = after, after_part, true
  end
end
if not changed then
  return allowed, value or ''
end
cold = min(cold, period)
if at == now and part == 0 and cold == period then
  call('DEL', key)
  return allowed, ''
end
value = pack('<I7I4I4BI4', at, part, mantissa, exponent, cold)
store(key, value, at - now + period - cold, jitter)
return allowed, value
