-- What Redis or Lua says of a value that is not what a script left there.
local function is_spoiled(message)
  for _, words in ipairs({'WRONGTYPE', 'not an integer', 'overflow', 'too short', 'attempt to', 'bad argument'}) do
    if string.find(message, words, 1, true) then
      return true
    end
  end
  return false
end

if not now then
  local time = call('TIME')
  now = time[1] * 1000000 + time[2]
end
local hits = #KEYS
local reply, decided, at = {now}, 0, 1
local together, refused = 0, false

-- Charged together, hits take only if all that are binding pass. Nobody else is served meanwhile: what they foretell
-- is still so when they take.
local function foretell(company)
  together, refused = company, true
  local ahead = at
  for i = decided + 1, decided + company do
    local script, action, length = byte(records, ahead, ahead + 2)
    if action >= BINDING and step(script % LEADER, KEYS[i], PEEK, ahead) == 0 then
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
    local allowed, state = step(script, KEYS[i], action, at)
    reply[2 * i], reply[2 * i + 1] = allowed, state
    decided, at, together = i, at + length, max(together - 1, 0)
  end
end

while decided < hits do
  local fine, failure = pcall(decide)
  if not fine then
    local message = type(failure) == 'table' and failure.err or tostring(failure)
    if not is_spoiled(message) then
      return redis.error_reply(message)
    end
    decided, at, together = decided + 1, at + byte(records, at + 2), max(together - 1, 0)
    reply[2 * decided], reply[2 * decided + 1] = -1, 0
  end
end
return reply
