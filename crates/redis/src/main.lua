-- Returns whether an error means that the key contains data that no script has written.
local function is_invalid_state(message)
  for _, pattern in ipairs({'WRONGTYPE', 'not an integer', 'overflow', 'too short', 'attempt to', 'bad argument'}) do
    if string.find(message, pattern, 1, true) then
      return true
    end
  end
  return false
end

-- Returns whether an error means that the key is on another server of a cluster. The key was not changed.
local function is_non_local(message)
  return string.find(message, 'non local key', 1, true)
end

-- Returns whether an error means that the server requires declared keys.
local function is_undeclared(message)
  return string.find(message, 'undeclared', 1, true) or string.find(message, 'same slot', 1, true)
end

-- Returns the message of an error, which is a table since Redis 7.
local function error_message(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- The keys are either declared or follow the records in ARGV. The key of hit i is keys[key_offset + i].
local keys, key_offset, hits = KEYS, 0, #KEYS
if hits == 0 then
  keys, key_offset, hits = ARGV, 2, #ARGV - 2
end
-- The reply, the number of decided hits, and the position of the next record.
local reply, decided, at = {now, ''}, 0, 1
-- One letter per hit, created at the first hit that is not allowed. Allowed hits have 'y'. Hits with a
-- repaired key have capital letters.
local outcomes
local function set_outcome(i, letter)
  if not outcomes then
    outcomes = {}
    for hit = 1, hits do
      outcomes[hit] = 'y'
    end
  end
  outcomes[i] = letter
end
-- The number of hits of the current group that are not decided yet, and whether the whole group is denied.
local group_remaining, group_denied = 0, false

-- The hits with keys that contained a value that no script has written; nil if there is none.
local repaired
-- Removes such a value, so that the counter is a new one. It may have no expiry, and would stay for ever.
local function repair(i)
  repaired = repaired or {}
  repaired[i] = true
  call('DEL', keys[key_offset + i])
end

-- Begins a group of hits that are charged together, and peeks at all of them: the takes of a group are executed only if
-- all blocking hits are allowed and all keys are on this server. Redis executes no other call in between, so the results
-- of the peeks are still valid for the takes.
local function begin_group(group_size)
  group_remaining, group_denied = group_size, true
  local peek_at = at
  for i = decided + 1, decided + group_size do
    local script, action, length = byte(records, peek_at, peek_at + 2)
    local ok, allowed = pcall(step, script % LEADER, keys[key_offset + i], PEEK, peek_at)
    -- If pcall fails, its second result is the error.
    if not ok and is_invalid_state(error_message(allowed)) then
      repair(i)
      ok, allowed = pcall(step, script % LEADER, keys[key_offset + i], PEEK, peek_at)
    end
    if not ok and (action >= BLOCKING or not is_invalid_state(error_message(allowed))) then
      error(allowed, 0)
    elseif action >= BLOCKING and allowed == 0 then
      return
    end
    peek_at = peek_at + length
  end
  group_denied = false
end

local function decide()
  for i = decided + 1, hits do
    local script, action, length, low, high = byte(records, at, at + 4)
    if script >= LEADER then
      begin_group(low + 256 * high)
      script = script - LEADER
    end
    if group_remaining > 0 then
      action = action % BLOCKING
    end
    if action == TAKE_AHEAD then
      action, now = TAKE, now + AHEAD
    end
    if group_denied and group_remaining > 0 and action == TAKE then
      action = PEEK
    end
    if action == ROLL_BACK then
      taken = unpack_numbers('<d', records, at + length - 8)
    end
    local allowed, state = step(script, keys[key_offset + i], action, at)
    now = reply[1]
    reply[i + 2] = state
    if repaired and repaired[i] then
      set_outcome(i, allowed == 0 and 'N' or 'Y')
    elseif allowed == 0 then
      set_outcome(i, 'n')
    end
    decided, at, group_remaining = i, at + length, max(group_remaining - 1, 0)
  end
end

while decided < hits do
  local ok, failure = pcall(decide)
  if not ok then
    now = reply[1]
    local message = error_message(failure)
    local is_invalid = is_invalid_state(message)
    if is_invalid and not (repaired and repaired[decided + 1]) then
      repair(decided + 1)
    else
      local letter = is_invalid and 's' or is_non_local(message) and 'e' or is_undeclared(message) and 'u'
      if not letter then
        return redis.error_reply(message)
      end
      decided, at, group_remaining = decided + 1, at + byte(records, at + 2), max(group_remaining - 1, 0)
      reply[decided + 2] = 0
      set_outcome(decided, letter)
    end
  end
end
if outcomes then
  reply[2] = table.concat(outcomes)
end
return reply
