-- Equivalent of Assignments::step. The value has 19 bytes for each caller: the end of its assignment (7), the caller (6),
-- its demand and share (3 each). While a former share is larger, a second entry has the difference, and former_mark
-- instead of the demand.
local value = call('GET', key) or ''
if action == PEEK then
  return 1, value
end
local others, demands, last, assigned = {}, {}, 0, 0
local own_end, own_share, former_end, former_share
for offset = 1, #value - 18, 19 do
  local ends, stored_caller, wants, share = unpack_numbers('<I7I6I3I3', value, offset)
  if ends > now and ends <= now + max_end_ahead then
    if stored_caller ~= caller then
      last, assigned = max(last, ends), assigned + share
      others[#others + 1] = sub(value, offset, offset + 18)
      if wants ~= former_mark then
        demands[#demands + 1] = wants
      end
    elseif wants == former_mark then
      former_end, former_share = former_end or ends, former_share or share
    else
      own_end, own_share = own_end or ends, own_share or share
    end
  end
end
local callers = #demands + 1
if not own_end and (action ~= TAKE or callers > max_callers) then
  return action == TAKE and 0 or 1, value
end
demand = action == TAKE and max(demand, floor(whole / (idle_divisor * callers))) or 0
demands[#demands + 1] = demand
table.sort(demands)
local fair, rest = whole, whole
for index, wants in ipairs(demands) do
  local level = floor(rest / (#demands - index + 1))
  if wants > level then
    fair = level
    break
  end
  rest = rest - wants
end
own_end, own_share, former_end, former_share = own_end or 0, own_share or 0, former_end or 0, former_share or 0
local met = 0
for _, wants in ipairs(demands) do
  met = met + min(wants, fair)
end
local free, spare = max(whole - assigned, 0), floor(max(whole - met, 0) / callers)
local target = min(demand, fair)
target = target + min(spare, floor(target / headroom_divisor))
local tolerance = floor(target / ((demand > fair or target > own_share) and 128 or 8))
local share = min(target, free)
if own_share <= free and math.abs(target - own_share) <= tolerance then
  share = own_share
end
if share < own_share then
  former_end = max(former_end, own_end)
end
former_share = own_share + former_share - share
local own = pack('<I7I6I3I3', now + ttl, caller, demand, share)
if former_share > 0 then
  own, last = own .. pack('<I7I6I3I3', former_end, caller, former_mark, former_share), max(last, former_end)
end
value = table.concat(others) .. own
store(key, value, max(last, now + ttl) - now, jitter)
return 1, value
