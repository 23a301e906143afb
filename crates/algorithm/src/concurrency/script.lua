-- Equivalent of Concurrency::step, and of Adaptive::step if `method` is greater than 0. The value is 14 bytes for each
-- slot in the order in which they end: the end (7), the holder (6) and the holder's class (1). The learned state
-- follows.
local value, learned = call('GET', key) or '', nil
if method > 0 then
  local floor_limit, ceiling_limit, initial, timeout, latency, dropped = unpack_numbers('<dddddd', records, more)
  learned = learn_from(value, {floor_limit = floor_limit, ceiling_limit = ceiling_limit, initial = initial, timeout = timeout})
  value = #value >= 56 and sub(value, 1, -57) or ''
  learned.sample = latency > 0 and {latency, dropped > 0}
  ceiling = learned_limit(learned)
end
local held = floor(#value / 14)
local newest, changed = held > 0 and unpack_numbers('<I7', value, 14 * held - 13) or 0, false
if newest > now + hold + slack then
  -- A clock was wrong when this was written, or the hold was longer: these slots end one hold from now.
  local slots = {}
  for place = 1, held do
    local ends = min(unpack_numbers('<I7', value, 14 * place - 13), now + hold)
    slots[place] = pack('<I7', ends) .. sub(value, 14 * place - 6, 14 * place)
  end
  value, newest, changed = table.concat(slots), now + hold, true
end
-- Most often no slot has ended.
local expired = held > 0 and unpack_numbers('<I7', value) <= now and count_until(value, 14, now) or 0
held = held - expired
local name = holder > 0 and pack('<I6', holder) or action >= REFUND and pack('<I6B', holder, class)
-- Most callers that take a slot have none yet, so the search for their slots is skipped.
local allowed, before, already_holds = 1, held, false
if action >= REFUND or (holder > 0 and string.find(value, name, 14 * expired + 1, true)) then
  -- Returns the first slot from `place` on that contains these bytes at this offset.
  local function find(bytes, offset, place)
    local at = string.find(value, bytes, 14 * place - 13, true)
    while at and (at - 1) % 14 ~= offset do
      at = string.find(value, bytes, at + 1, true)
    end
    return at and (at - 1 - offset) / 14 + 1
  end
  local function free(bytes, offset, max_slots)
    local freed, place = 0, find(bytes, offset, expired + 1)
    while place and freed < max_slots do
      value = sub(value, 1, 14 * place - 14) .. sub(value, 14 * place + 1)
      freed, changed = freed + 1, true
      place = freed < max_slots and find(bytes, offset, place)
    end
    return freed
  end
  if action == ROLL_BACK then
    free(pack('<I7', taken + hold) .. name, 0, cost)
  elseif action == REFUND then
    if holder > 0 then
      free(name, 7, held)
    elseif count > 0 then
      free(name, 7, cost)
    else
      expired, changed = expired + min(cost, held), true
    end
  else
    already_holds = find(name, 7, expired + 1)
    if already_holds and action == TAKE then
      cost = free(name, 7, held)
    end
  end
end
if action == TAKE or action == PEEK then
  local room = ceiling - held
  if count > 0 and not already_holds then
    -- The free slots of a class are those that are not guaranteed to others, up to the maximum of the class.
    local shares, held_by_class = {unpack_numbers('<' .. string.rep('d', count), records, more)}, {}
    for i = 1, count do
      held_by_class[i] = 0
    end
    for at = 14 * expired + 14, #value, 14 do
      local i = byte(value, at) % 16 + 1
      held_by_class[i] = (held_by_class[i] or 0) + 1
    end
    local others, class_max = 0, shares[class + 1] % CLASS_MIN_FACTOR
    for i, slots in pairs(held_by_class) do
      local class_min = i <= count and i ~= class + 1 and floor(shares[i] / CLASS_MIN_FACTOR) or 0
      others = others + max(slots, class_min)
    end
    room = min(ceiling - others, class_max - held_by_class[class + 1])
  end
  if not already_holds and cost > max(room, 0) then
    allowed = 0
  elseif action == TAKE then
    local slot = pack('<I7I6B', max(newest, now + hold), holder, class)
    value, changed = value .. (cost == 1 and slot or string.rep(slot, cost)), true
  end
end
if method > 0 then
  if changed and expired > 0 then
    value = sub(value, 14 * expired + 1)
  end
  if action == REFUND and learned.sample and changed and floor(#value / 14) < before then
    learn(learned, learned.sample[1], before, learned.sample[2], now)
  end
  local tail = learned_tail(learned)
  if value == '' and tail == learned_tail(learn_from('', learned.bounds)) then
    call('DEL', key)
    return allowed, ''
  end
  local last = value ~= '' and unpack_numbers('<I7', value, #value - 13) or 0
  value = value .. tail
  store(key, value, max(last, now + 3600000000) - now, jitter)
  return allowed, value
end
if not changed then
  return allowed, value
end
if expired > 0 then
  value = sub(value, 14 * expired + 1)
end
if value == '' then
  call('DEL', key)
  return allowed, ''
end
store(key, value, unpack_numbers('<I7', value, #value - 13) - now, jitter)
return allowed, value
