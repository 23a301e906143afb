-- Overrides: a hash of texts by target (each prefixed with its version and a bar), a stream of changes, and a hash with
-- the last change (epoch, version, id) and the number of texts.
local texts, log, head, gathered = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

local function mark()
  local is = redis.call('HMGET', head, 'epoch', 'version', 'id', 'count')
  -- A server that evicts keys may have evicted some of the texts.
  if is[1] and tonumber(is[4]) == redis.call('HLEN', texts) then
    return is[1], tonumber(is[2]), is[3]
  end
end

local function version_of(text)
  return text and tonumber(string.match(text, '^%d+')) or 0
end

local order = table.remove(ARGV, 1)
local epoch, version, id = mark()

if order == 'mark' then
  if not epoch then return {'empty'} end
  return {'mark', epoch, version, id}
end

if order == 'since' then
  local their_epoch, their_version, their_id, most = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
  if not epoch then return {'empty'} end
  if epoch ~= their_epoch then return {'other'} end
  if version < their_version then return {'behind'} end
  if version == their_version then
    return {id == their_id and 'nothing' or 'other'}
  end
  local same = redis.call('XRANGE', log, their_version .. '-0', their_version .. '-0')[1]
  if not same or same[2][2] ~= their_id then return {'other'} end
  -- Only the beginning of the log is trimmed: if it contains the caller's change, it contains all later ones.
  return {'changes', redis.call('XRANGE', log, '(' .. their_version .. '-0', '+', 'COUNT', most)}
end

if order == 'write' then
  -- Arguments: id, head, maximum length of the log, epoch for an empty store, the caller's cursor (epoch, version, id),
  -- whether that must be the last change here; and per override: target, expected version or '', '1' to set or '0' to
  -- delete, text.
  local new_id, who, longest, new_epoch, their_epoch, their_version, their_id, exactly = unpack(ARGV, 1, 8)
  their_version = tonumber(their_version)
  if their_version > 0 then
    -- A caller that has seen later changes than this store must restore them before it writes.
    local is_behind = epoch ~= their_epoch or version < their_version
    if is_behind or (version == their_version and id ~= their_id) then return {'moved'} end
  end
  if exactly == '1' and (version or 0) ~= their_version then return {'moved'} end
  local before = {}
  for at = 9, #ARGV, 4 do
    local text = epoch and redis.call('HGET', texts, ARGV[at])
    if ARGV[at + 1] ~= '' and tonumber(ARGV[at + 1]) ~= version_of(text) then
      return {'conflict', ARGV[at], version_of(text)}
    end
    before[at] = text
  end
  if not epoch then
    redis.call('DEL', texts, log, head)
    epoch, version = new_epoch, 0
  end
  version = version + 1
  local fields = {'id', new_id, 'head', who}
  for at = 9, #ARGV, 4 do
    local target, keeps, text = ARGV[at], ARGV[at + 2] == '1', ARGV[at + 3]
    if keeps then
      redis.call('HSET', texts, target, version .. '|' .. text)
    else
      redis.call('HDEL', texts, target)
    end
    local field = function(name, value)
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
    field('target', target)
    if before[at] then field('before', (string.gsub(before[at], '^%d+|', '', 1))) end
    if keeps then field('after', text) end
  end
  redis.call('XADD', log, 'MAXLEN', '~', longest, version .. '-0', unpack(fields))
  redis.call('HSET', head, 'epoch', epoch, 'version', version, 'id', new_id, 'count', redis.call('HLEN', texts))
  return {'done', epoch, version, redis.call('XRANGE', log, version .. '-0', version .. '-0')[1] or {}}
end

if order == 'gather' then
  -- Stages texts for an empty store under a separate key. Arguments: TTL in seconds, then target and text of each.
  for at = 2, #ARGV, 2 do
    redis.call('HSET', gathered, ARGV[at], ARGV[at + 1])
  end
  redis.call('EXPIRE', gathered, ARGV[1])
  return {'done'}
end

if order == 'adopt' then
  -- Moves the staged texts into place atomically, unless the store is no longer empty. The log begins with the last
  -- change, so that other instances find their cursor in it.
  if epoch then return {'moved'} end
  redis.call('DEL', texts, log, head)
  if redis.call('EXISTS', gathered) == 1 then
    redis.call('RENAME', gathered, texts)
    redis.call('PERSIST', texts)
  end
  redis.call('XADD', log, ARGV[2] .. '-0', 'id', ARGV[3], 'head', ARGV[4])
  redis.call('HSET', head, 'epoch', ARGV[1], 'version', ARGV[2], 'id', ARGV[3], 'count', redis.call('HLEN', texts))
  return {'done'}
end
