-- What several scripts call. Numbers are doubles: whole and exact up to 2^53, and everything here stays below that.
local TAKE, PEEK, RETURN, UNDO = 0, 1, 2, 3
local MAX = 9007199254740991
-- A class of a shared capacity is one number: what is always there for it times this, and the most it may have.
local CLASS = 134217728
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min
local call, byte, pack, unpack_numbers = redis.call, string.byte, struct.pack, struct.unpack

-- count * part / whole, rounded up, for count < 2^51 and part <= whole <= 2^49. When the product outgrows a double it
-- is divided as on paper, three bits of the count at a time.
local function share(count, part, whole)
  local product = count * part
  if product <= MAX then
    return ceil(product / whole)
  end
  local quotient, rest, place = 0, 0, 2 ^ 48
  repeat
    rest = rest * 8 + floor(count / place) % 8 * part
    local digit = floor(rest / whole)
    quotient, rest = quotient * 8 + digit, rest - digit * whole
    place = place / 8
  until place < 1
  return rest > 0 and quotient + 1 or quotient
end

-- How many of a state's entries, each of so many bytes, begin with this instant or an earlier one. They are in that order.
local function count_until(value, bytes, instant)
  local first, last = 0, floor(#value / bytes)
  while first < last do
    local middle = floor((first + last) / 2)
    if unpack_numbers('<I7', value, bytes * middle + 1) <= instant then
      first = middle + 1
    else
      last = middle
    end
  end
  return first
end
