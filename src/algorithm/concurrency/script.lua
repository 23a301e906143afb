-- Twin of Concurrency::step, and of Adaptive::step where there is a method. The value is 14 bytes for each slot, the one that
-- ends first first: its end (7), its holder (6) and the holder's class (1). Behind them stands what has been learned.
local value, learned = call('GET', key) or '', nil
if method > 0 then
  local least, most, initial, timeout, latency, dropped = unpack_numbers('<dddddd', records, more)
  learned = learn_from(value, {least = least, most = most, initial = initial, timeout = timeout})
  value = #value >= 56 and string.sub(value, 1, -57) or ''
  learned.sample = latency > 0 and {latency, dropped > 0}
  ceiling = learned_limit(learned)
end
local held = floor(#value / 14)
local newest, changed = held > 0 and unpack_numbers('<I7', value, 14 * held - 13) or 0, false
if newest > now + hold + slack then
  -- The clock was wrong when this was written, or the rule another: these slots are as if taken now.
  local slots = {}
  for place = 1, held do
    local ends = min(unpack_numbers('<I7', value, 14 * place - 13), now + hold)
    slots[place] = pack('<I7', ends) .. string.sub(value, 14 * place - 6, 14 * place)
  end
  value, newest, changed = table.concat(slots), now + hold, true
end
local gone = count_until(value, 14, now)
held = held - gone
local name = pack('<I6', holder) .. (holder == 0 and string.char(class) or '')
-- Most of those who take a slot have none: then there is nothing else to look for.
local allowed, before, is_held = 1, held, false
if action == RETURN or action == UNDO or (holder > 0 and string.find(value, name, 14 * gone + 1, true)) then
  -- The next slot from a place on that has these bytes at this offset.
  local function find(bytes, offset, place)
    local at = string.find(value, bytes, 14 * place - 13, true)
    while at and (at - 1) % 14 ~= offset do
      at = string.find(value, bytes, at + 1, true)
    end
    return at and (at - 1 - offset) / 14 + 1
  end
  local function free(bytes, offset, most)
    local freed, place = 0, find(bytes, offset, gone + 1)
    while place and freed < most do
      value = string.sub(value, 1, 14 * place - 14) .. string.sub(value, 14 * place + 1)
      freed, changed = freed + 1, true
      place = freed < most and find(bytes, offset, place)
    end
    return freed
  end
  if action == UNDO then
    free(pack('<I7', taken + hold) .. name, 0, cost)
  elseif action == RETURN then
    if holder > 0 then
      free(name, 7, held)
    elseif count > 0 then
      free(name, 7, cost)
    else
      gone, changed = gone + min(cost, held), true
    end
  else
    is_held = find(name, 7, gone + 1)
    if is_held and action == TAKE then
      cost = free(name, 7, held)
    end
  end
end
if action == TAKE or action == PEEK then
  local room = ceiling - held
  if count > 0 and not is_held then
    -- Free for a class is what is not promised to others, up to its own ceiling.
    local shares, have = {unpack_numbers('<' .. string.rep('d', count), records, more)}, {}
    for i = 1, count do
      have[i] = 0
    end
    for at = 14 * gone + 14, #value, 14 do
      local i = byte(value, at) % 16 + 1
      have[i] = (have[i] or 0) + 1
    end
    local others, most = 0, shares[class + 1] % CLASS
    for i, slots in pairs(have) do
      local least = i <= count and i ~= class + 1 and floor(shares[i] / CLASS) or 0
      others = others + max(slots, least)
    end
    room = min(ceiling - others, most - have[class + 1])
  end
  if not is_held and cost > max(room, 0) then
    allowed = 0
  elseif action == TAKE then
    value, changed = value .. string.rep(pack('<I7I6B', max(newest, now + hold), holder, class), cost), true
  end
end
if method > 0 then
  if changed and gone > 0 then
    value = string.sub(value, 14 * gone + 1)
  end
  if action == RETURN and learned.sample and changed and floor(#value / 14) < before then
    learn(learned, learned.sample[1], before, learned.sample[2], now)
  end
  local tail = learned_tail(learned)
  if value == '' and tail == learned_tail(learn_from('', learned.bounds)) then
    call('DEL', key)
    return allowed, ''
  end
  local last = value ~= '' and unpack_numbers('<I7', value, #value - 13) or 0
  value = value .. tail
  call('SET', key, value, 'PX', ceil((max(last, now + 3600000000) - now) / 1000) + keep)
  return allowed, value
end
if not changed then
  return allowed, value
end
if gone > 0 then
  value = string.sub(value, 14 * gone + 1)
end
if value == '' then
  call('DEL', key)
  return allowed, ''
end
call('SET', key, value, 'PX', ceil((unpack_numbers('<I7', value, #value - 13) - now) / 1000) + keep)
return allowed, value
