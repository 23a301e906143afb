-- Helpers that several scripts call. Numbers are doubles, which are exact integers up to 2^53. All values stay
-- below, because Rust bounds every cost and time (MAX_NUMBER). Tests compare both languages (tests/algorithms).
local TAKE, PEEK, REFUND, ROLL_BACK = 0, 1, 2, 3
local MAX = 9007199254740991
-- A class of a shared capacity is encoded as one number: its minimum times this factor, plus its maximum.
local CLASS_MIN_FACTOR = 134217728
local ceil, floor, max, min = math.ceil, math.floor, math.max, math.min
local call, byte, pack, unpack_numbers = redis.call, string.byte, struct.pack, struct.unpack
local sub = string.sub

-- Returns the lifetime in milliseconds of a key whose state has a meaning for `lifetime` microseconds, at least 1. The
-- key outlives it by `jitter` milliseconds, at most by its lifetime, so that keys of one window do not expire together.
local function key_lifetime(lifetime, jitter)
  local millis = max(ceil(lifetime / 1000), 1)
  return millis + (BOUND_JITTER and jitter % (millis + 1) or jitter)
end

-- Writes a state that has a meaning for `lifetime` microseconds.
local function store(key, value, lifetime, jitter)
  call('SET', key, value, 'PX', key_lifetime(lifetime, jitter))
end

-- Returns count * part / whole, rounded up, for count < 2^51 and part <= whole <= 2^49. If the product exceeds a
-- double, this is a long division that processes three bits of the count at a time.
local function share(count, part, whole)
  local product = count * part
  if product <= MAX then
    return ceil(product / whole)
  end
  local quotient, remainder, digit_value = 0, 0, 2 ^ 48
  repeat
    remainder = remainder * 8 + floor(count / digit_value) % 8 * part
    local digit = floor(remainder / whole)
    quotient, remainder = quotient * 8 + digit, remainder - digit * whole
    digit_value = digit_value / 8
  until digit_value < 1
  return remainder > 0 and quotient + 1 or quotient
end

-- Returns the sum of the buckets from `first` to `last`, of 4 bytes each, which follow a header.
local function sum_buckets(value, header, first, last)
  local sum = 0
  for index = first, last do
    sum = sum + unpack_numbers('<I4', value, header + 4 * index - 3)
  end
  return sum
end

-- Returns how many entries of a sorted state, of `bytes` bytes each, begin with `instant` or an earlier one.
local function count_until(value, bytes, instant)
  local low, high = 0, floor(#value / bytes)
  while low < high do
    local middle = floor((low + high) / 2)
    if unpack_numbers('<I7', value, bytes * middle + 1) <= instant then
      low = middle + 1
    else
      high = middle
    end
  end
  return low
end
