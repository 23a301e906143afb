-- Returns whether Redis or Lua reports a value that no script has written.
local function is_spoiled(message)
  for _, words in ipairs({'WRONGTYPE', 'not an integer', 'overflow', 'too short', 'attempt to', 'bad argument'}) do
    if string.find(message, words, 1, true) then
      return true
    end
  end
  return false
end

-- Returns whether a cluster reports that the key is on another server. The key was not changed.
local function is_elsewhere(message)
  return string.find(message, 'non local key', 1, true)
end

-- Returns whether the server reports that it requires declared keys.
local function is_undeclared(message)
  return string.find(message, 'undeclared', 1, true) or string.find(message, 'same slot', 1, true)
end

local function text(failure)
  return type(failure) == 'table' and failure.err or tostring(failure)
end

if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- The keys are either declared or follow the records in ARGV.
local keys, before, hits = KEYS, 0, #KEYS
if hits == 0 then
  keys, before, hits = ARGV, 2, #ARGV - 2
end
local reply, decided, at = {now, ''}, 0, 1
-- One letter per hit, created at the first hit that is not allowed. Allowed hits have 'y'.
local outcomes
local function note(i, letter)
  if not outcomes then
    outcomes = {}
    for place = 1, hits do
      outcomes[place] = 'y'
    end
  end
  outcomes[i] = letter
end
local together, refused = 0, false

-- Hits that are charged together take only if all binding hits pass and all keys are on this server. Redis serves no
-- other call meanwhile, so the peeks are still valid when the hits take.
local function foretell(company)
  together, refused = company, true
  local ahead = at
  for i = decided + 1, decided + company do
    local script, action, length = byte(records, ahead, ahead + 2)
    local fine, passes = pcall(step, script % LEADER, keys[before + i], PEEK, ahead)
    if not fine and (action >= BINDING or not is_spoiled(text(passes))) then
      error(passes, 0)
    elseif action >= BINDING and passes == 0 then
      return
    end
    ahead = ahead + length
  end
  refused = false
end

local function decide()
  for i = decided + 1, hits do
    local script, action, length, low, high = byte(records, at, at + 4)
    if script >= LEADER then
      foretell(low + 256 * high)
      script = script - LEADER
    end
    if together > 0 then
      action = action % BINDING
      if refused and action == TAKE then
        action = PEEK
      end
    end
    if action == ROLL_BACK then
      taken = unpack_numbers('<d', records, at + length - 8)
    end
    local allowed, state = step(script, keys[before + i], action, at)
    reply[i + 2] = state
    if allowed == 0 then
      note(i, 'n')
    end
    decided, at, together = i, at + length, max(together - 1, 0)
  end
end

while decided < hits do
  local fine, failure = pcall(decide)
  if not fine then
    local message = text(failure)
    local letter = is_spoiled(message) and 's' or is_elsewhere(message) and 'e' or is_undeclared(message) and 'u'
    if not letter then
      return redis.error_reply(message)
    end
    decided, at, together = decided + 1, at + byte(records, at + 2), max(together - 1, 0)
    reply[decided + 2] = 0
    note(decided, letter)
  end
end
if outcomes then
  reply[2] = table.concat(outcomes)
end
return reply
