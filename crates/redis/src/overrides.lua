-- Overrides: a hash of texts by target (each prefixed with its version and a bar), a stream of changes, and a hash with
-- the last change (epoch, version, id) and the number of texts.
local texts, log, head, staged = KEYS[1], KEYS[2], KEYS[3], KEYS[4]

-- Returns the cursor (epoch, version, id) of the last change, or nil if the store is empty or incomplete.
local function read_cursor()
  local fields = redis.call('HMGET', head, 'epoch', 'version', 'id', 'count')
  -- A server that evicts keys may have evicted some of the texts.
  if fields[1] and tonumber(fields[4]) == redis.call('HLEN', texts) then
    return fields[1], tonumber(fields[2]), fields[3]
  end
end

local function version_of(text)
  return text and tonumber(string.match(text, '^%d+')) or 0
end

local operation = table.remove(ARGV, 1)
local epoch, version, id = read_cursor()

if operation == 'mark' then
  if not epoch then return {'empty'} end
  return {'mark', epoch, version, id}
end

if operation == 'since' then
  local cursor_epoch, cursor_version, cursor_id, max_changes = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
  if not epoch then return {'empty'} end
  if epoch ~= cursor_epoch then return {'other'} end
  if version < cursor_version then return {'behind'} end
  if version == cursor_version then
    return {id == cursor_id and 'nothing' or 'other'}
  end
  local last_seen = redis.call('XRANGE', log, cursor_version .. '-0', cursor_version .. '-0')[1]
  if not last_seen or last_seen[2][2] ~= cursor_id then return {'other'} end
  -- Only the beginning of the log is trimmed: if it contains the caller's change, it contains all later ones.
  return {'changes', redis.call('XRANGE', log, '(' .. cursor_version .. '-0', '+', 'COUNT', max_changes)}
end

if operation == 'write' then
  -- Arguments: id and info of the change, maximum length of the log, epoch for an empty store, the caller's cursor
  -- (epoch, version, id); and per override: target, expected version or '', '1' to set or '0' to delete, text.
  local new_id, change_info, max_log_length, new_epoch = unpack(ARGV, 1, 4)
  local cursor_epoch, cursor_version, cursor_id = ARGV[5], tonumber(ARGV[6]), ARGV[7]
  -- A caller must know the last change before it writes. It must restore changes that this store lacks, and it can only
  -- restore its own change after a failover if it has all changes before it.
  if cursor_version ~= (version or 0) then return {'moved'} end
  if epoch and (epoch ~= cursor_epoch or id ~= cursor_id) then return {'moved'} end
  local before = {}
  for at = 8, #ARGV, 4 do
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
  local fields = {'id', new_id, 'head', change_info}
  for at = 8, #ARGV, 4 do
    local target, is_set, text = ARGV[at], ARGV[at + 2] == '1', ARGV[at + 3]
    if is_set then
      redis.call('HSET', texts, target, version .. '|' .. text)
    else
      redis.call('HDEL', texts, target)
    end
    local add_field = function(name, value)
      fields[#fields + 1] = name
      fields[#fields + 1] = value
    end
    add_field('target', target)
    if before[at] then add_field('before', (string.gsub(before[at], '^%d+|', '', 1))) end
    if is_set then add_field('after', text) end
  end
  redis.call('XADD', log, 'MAXLEN', '~', max_log_length, version .. '-0', unpack(fields))
  redis.call('HSET', head, 'epoch', epoch, 'version', version, 'id', new_id, 'count', redis.call('HLEN', texts))
  return {'done', epoch, version, redis.call('XRANGE', log, version .. '-0', version .. '-0')[1] or {}}
end

if operation == 'gather' then
  -- Stages texts for an empty store under a separate key. Arguments: TTL in seconds, then target and text of each.
  for at = 2, #ARGV, 2 do
    redis.call('HSET', staged, ARGV[at], ARGV[at + 1])
  end
  redis.call('EXPIRE', staged, ARGV[1])
  return {'done'}
end

if operation == 'adopt' then
  -- Moves the staged texts into place atomically, unless the store is no longer empty. The log begins with the last
  -- change, so that other instances find their cursor in it.
  if epoch then return {'moved'} end
  redis.call('DEL', texts, log, head)
  if redis.call('EXISTS', staged) == 1 then
    redis.call('RENAME', staged, texts)
    redis.call('PERSIST', texts)
  end
  redis.call('XADD', log, ARGV[2] .. '-0', 'id', ARGV[3], 'head', ARGV[4])
  redis.call('HSET', head, 'epoch', ARGV[1], 'version', ARGV[2], 'id', ARGV[3], 'count', redis.call('HLEN', texts))
  return {'done'}
end
