//! The scripts of all algorithms joined to one program, how it is called, and what it answers.
//!
//! Arguments: the keys; then now in microseconds or nothing (Redis' own time); then for each key one packed record: a
//! byte each for the script, the action and whether the hit is binding; two bytes for how many hits, from this one on,
//! are charged together or not at all (0: this one has no such company); then 8 bytes each, little endian, for the
//! milliseconds to keep the key and the script's own arguments. One record rather than many texts: Redis unpacks it for
//! less than it takes to parse the texts.
//!
//! The answer is a flat list: now, then `allowed` and the state for each key. States are explained in Rust, by the same
//! code that explains a state in memory.
//!
//! A call may hold hits of several requests. So a counter that cannot be used (somebody wrote something else to its
//! key) spoils its own hit only: `allowed` is -1. Any other error, of the server and not of a key, fails the call.

use std::{
    fmt::Write,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use redis::{Cmd, Script, Value};

use super::{Settings, Time};
use crate::{
    algorithm::{Action, Algorithm, Micros, PRELUDE, State},
    store::Hit,
};

const MAIN: &str = "
-- What Redis or Lua says of a value that is not what a script left there.
local function is_spoiled(message)
  for _, words in ipairs({'WRONGTYPE', 'not an integer', 'overflow', 'too short', 'attempt to', 'bad argument'}) do
    if string.find(message, words, 1, true) then
      return true
    end
  end
  return false
end

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local reply, together, refused = {now}, 0, false
for i, key in ipairs(KEYS) do
  local record = ARGV[i + 1]
  local script, action, _, company = struct.unpack('<BBBI2', record)
  if company > 0 then
    -- Nobody else is served meanwhile: what all of them foretell is still so when they take.
    together, refused = company, false
    for j = i, i + company - 1 do
      local script, _, binding = struct.unpack('<BBB', ARGV[j + 1])
      if binding == 1 and not refused then
        local fine, allowed = pcall(step, script, KEYS[j], PEEK, ARGV[j + 1], now)
        refused = not fine or allowed == 0
      end
    end
  end
  if together > 0 then
    together = together - 1
    if refused and action == TAKE then
      action = PEEK
    end
  end
  local fine, allowed, state = pcall(step, script, key, action, record, now)
  if not fine then
    local message = type(allowed) == 'table' and allowed.err or tostring(allowed)
    if not is_spoiled(message) then
      return redis.error_reply(message)
    end
    allowed, state = -1, 0
  end
  reply[2 * i], reply[2 * i + 1] = allowed, state
end
return reply
";

/// Where the 8-byte words of a record begin, as Lua counts.
const WORDS: usize = 6;
/// A key that nobody asks for is kept a day longer than it can matter at most, whatever the jitter.
const LONGEST_JITTER_MILLIS: u64 = 86_400_000;

pub(super) struct Program {
    script: Script,
    /// By the algorithm's index.
    script_numbers: Vec<u8>,
    key_prefix: Vec<u8>,
    time: Time,
    jitter_millis: u64,
    /// Drives the jitter. It needs to differ, not to surprise.
    sequence: AtomicU64,
}

/// A call in the making.
#[derive(Default)]
pub(super) struct Call {
    keys: Parts,
    records: Parts,
    now: Micros,
}

/// Texts one after the other.
#[derive(Default)]
struct Parts {
    bytes: Vec<u8>,
    ends: Vec<usize>,
}

impl Parts {
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.bytes[start..*end])
    }
}

impl Call {
    pub(super) fn hits(&self) -> usize {
        self.keys.ends.len()
    }
}

/// What the program did to one counter.
#[derive(Clone, Debug)]
pub(super) struct Step {
    /// `None`: the counter cannot be used.
    pub(super) allowed: Option<bool>,
    pub(super) state: State,
}

impl Program {
    pub(super) fn new(settings: &Settings, time: Time) -> Self {
        let jitter = u64::try_from(settings.expiry_jitter.as_millis()).unwrap_or(u64::MAX);
        let (source, script_numbers) = join();
        Self {
            script: Script::new(&source),
            script_numbers,
            key_prefix: settings.key_prefix.as_bytes().to_vec(),
            time,
            jitter_millis: jitter.clamp(1, LONGEST_JITTER_MILLIS),
            sequence: rand::random::<u64>().into(),
        }
    }

    pub(super) fn script(&self) -> &Script {
        &self.script
    }

    /// A command that needs a server that writes, of those that the scripts use, and changes nothing.
    pub(super) fn write_probe(&self) -> Cmd {
        let mut cmd = redis::cmd("PEXPIRE");
        cmd.arg([self.key_prefix.as_slice(), b"probe"].concat()).arg(1);
        cmd
    }

    /// Requests with clocks of their own cannot be joined to one call.
    pub(super) fn joins_requests(&self) -> bool {
        self.time == Time::Server
    }

    /// `together`: so many hits from this one on are charged together.
    pub(super) fn add(&self, call: &mut Call, hit: &Hit<'_>, together: usize, now: Micros) {
        call.keys.bytes.extend_from_slice(&self.key_prefix);
        call.keys.bytes.extend_from_slice(hit.key);
        call.keys.ends.push(call.keys.bytes.len());
        self.write_record(&mut call.records.bytes, hit, together, now);
        call.records.ends.push(call.records.bytes.len());
        call.now = now;
    }

    pub(super) fn command(&self, call: &Call) -> Cmd {
        let hits = call.hits();
        let mut cmd = Cmd::with_capacity(4 + 2 * hits, 64 + call.keys.bytes.len() + call.records.bytes.len());
        cmd.arg("EVALSHA").arg(self.script.get_hash()).arg(hits);
        for key in call.keys.iter() {
            cmd.arg(key);
        }
        match self.time {
            Time::Server => cmd.arg(""),
            Time::Caller => cmd.arg(call.now.get()),
        };
        for record in call.records.iter() {
            cmd.arg(record);
        }
        cmd
    }

    fn write_record(&self, record: &mut Vec<u8>, hit: &Hit<'_>, together: usize, now: Micros) {
        // 2⁶⁴ divided by the golden ratio: consecutive multiples spread evenly over the jitter.
        let step = self.sequence.fetch_add(0x9E37_79B9_7F4A_7C15, Relaxed);
        let keep = ((u128::from(step) * u128::from(self.jitter_millis)) >> 64) as u64;
        let action = match hit.action {
            Action::Take => 0,
            Action::Peek => 1,
            Action::Return => 2,
        };
        let company = u16::try_from(together).unwrap_or(u16::MAX).to_le_bytes();
        record.extend([self.script_numbers[hit.algorithm.index()], action, hit.binding.into()]);
        record.extend(company);
        record.extend(keep.to_le_bytes());
        record.extend(hit.algorithm.arguments(hit.ask(now)).into_iter().flat_map(u64::to_le_bytes));
    }
}

/// The time of the call and a step for each hit; `None` when the reply is not the program's.
pub(super) fn read(reply: &Value) -> Option<(Micros, impl Iterator<Item = Option<Step>>)> {
    let Value::Array(values) = reply else {
        return None;
    };
    let Some(Value::Int(now)) = values.first() else {
        return None;
    };
    let steps = values.get(1..)?.chunks_exact(2).map(|step| {
        let [Value::Int(allowed), state] = step else {
            return None;
        };
        let state = match state {
            Value::Int(number) => State::from_bytes(&number.to_le_bytes()),
            Value::BulkString(bytes) => State::from_bytes(bytes),
            _ => return None,
        };
        Some(Step { allowed: (*allowed >= 0).then_some(*allowed == 1), state })
    });
    Some((Micros::new(u64::try_from(*now).ok()?), steps))
}

/// The program, and for each algorithm the number of its script in it; some share one. One function with a branch for
/// each script: a call makes one closure, not one for each of them.
fn join() -> (String, Vec<u8>) {
    let mut text = format!("{PRELUDE}\nlocal function step(script, key, action, record, now)\n");
    let mut scripts = Vec::new();
    let mut numbers = Vec::new();
    for script in Algorithm::SCRIPTS {
        let number = scripts.iter().position(|known| known == script).unwrap_or(scripts.len());
        numbers.push(number as u8);
        if number < scripts.len() {
            continue;
        }
        scripts.push(*script);
        let (arguments, body) = script;
        let word = if number == 0 { "if" } else { "elseif" };
        let names = arguments.join(", ");
        let format = "I8".repeat(arguments.len() + 1);
        let _ = write!(
            text,
            "{word} script == {number} then\n\
             local keep, {names} = struct.unpack('<{format}', record, {WORDS})\n{body}\n"
        );
    }
    (text + "end\nend\n" + MAIN, numbers)
}
