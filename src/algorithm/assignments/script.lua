-- Equivalent of Assignments::step. The value is 29 bytes for each caller: the end of its assignment (7), the caller (6),
-- its demand and share (3 each), and the end and size of a former share (7 and 3).
local value = call('GET', key) or ''
if action == PEEK then
  return 1, value
end
local others, demands, last, assigned = {}, {}, 0, 0
local own_end, own_share, former_end, former_share
for offset = 1, #value - 28, 29 do
  local ends, stored_caller, wants, share, old_end, old_share = unpack_numbers('<I7I6I3I3I7I3', value, offset)
  if ends > now and ends <= now + max_end_ahead then
    if stored_caller ~= caller then
      demands[#demands + 1], last = wants, max(last, ends)
      assigned = assigned + (old_end > now and max(share, old_share) or share)
      others[#others + 1] = sub(value, offset, offset + 28)
    elseif not own_end then
      own_end, own_share, former_end, former_share = ends, share, old_end, old_share
    end
  end
end
if not own_end and (action ~= TAKE or #others >= max_callers) then
  return action == TAKE and 0 or 1, value
end
local callers = #others + 1
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
  if former_end > now then
    former_end, former_share = max(former_end, own_end), max(own_share, former_share)
  else
    former_end, former_share = own_end, own_share
  end
end
value = table.concat(others) .. pack('<I7I6I3I3I7I3', now + ttl, caller, demand, share, former_end, former_share)
store(key, value, max(last, now + ttl) - now, jitter)
return 1, value
