-- Equivalent of Assignments::step. The value has 20 bytes for each caller: the end of its assignment (5, in units of
-- time_unit), the caller (5), its demand (2, in units of demand_unit), its share (3), its former share if that is larger
-- (3), and how much earlier than the assignment the former one ends (2, in units of time_unit).
local value = call('GET', key) or ''
if action == PEEK then
  return 1, value
end
local others, demands, last, assigned = {}, {}, 0, 0
local own_offset, own_end, own_share, own_usable, own_former_end
for offset = 1, #value - 19, 20 do
  local ends, stored_caller, wants, share, former_share, earlier = unpack_numbers('<I5I5I2I3I3I2', value, offset)
  local former_end = (ends - earlier) * time_unit
  ends = ends * time_unit
  if ends > now and ends <= now + max_end_ahead then
    local usable = former_end > now and max(share, former_share) or share
    if stored_caller ~= caller then
      last, assigned = max(last, ends), assigned + usable
      others[#others + 1] = sub(value, offset, offset + 19)
      demands[#demands + 1] = wants * demand_unit
    elseif not own_end then
      own_offset, own_end, own_share, own_usable, own_former_end = offset, ends, share, usable, former_end
    end
  end
end
local callers = #demands + 1
local ends = ceil((now + ttl) / time_unit) * time_unit
local most = (own_end or held == 0) and whole or held
local lasts = own_end and action == TAKE and own_end >= now + reduction_time
if not own_end and (action ~= TAKE or callers > max_callers) then
  return action == TAKE and 0 or 1, value
end
demand = action == TAKE and max(demand, floor(whole / (idle_divisor * callers))) or 0
demand = ceil(demand / demand_unit) * demand_unit
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
if not own_end then
  own_end, own_share, own_usable, own_former_end = ends, held, held, ends
end
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
share = min(share, most)
if share < own_share and own_share <= free and lasts then
  ends = own_end
  others[#others + 1] = sub(value, own_offset, own_offset + 9) .. pack('<I2', demand / demand_unit)
    .. sub(value, own_offset + 12, own_offset + 19)
else
  local former_share, former_end = 0, ends
  if own_usable > share then
    former_share, former_end = own_usable, share < own_share and own_end or own_former_end
  end
  ends = max(ends, former_end)
  others[#others + 1] = pack('<I5I5I2I3I3I2', ends / time_unit, caller, demand / demand_unit, share, former_share,
    (ends - former_end) / time_unit)
end
value = table.concat(others)
store(key, value, max(last, ends) - now, jitter)
return 1, value
