//! The scripts of all algorithms joined to one program, how it is called, and what it answers.
//!
//! Arguments: the keys; then now in microseconds or nothing (Redis' own time); then for each key one packed record
//! (algorithm, action: a byte each; cost, p1, p2, keep: 8 bytes each, little endian). One record rather than six texts:
//! Redis unpacks it for less than it takes to parse the texts. The answer is a flat list of integers: now, then
//! `allowed` and the two words of the state for each key. They are explained in Rust, by the same code that
//! explains a state in memory.
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
    algorithm::{Action, Algorithm, MAX, Micros, State},
    store::Hit,
};

const MAIN: &str = "
local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end
local reply = {now}
for i, key in ipairs(KEYS) do
  local algorithm, action, cost, p1, p2, keep = struct.unpack('<BBI8I8I8I8', ARGV[i + 1])
  local fine, allowed, first, second = pcall(step, algorithm, key, action, cost, p1, p2, now, keep)
  if not fine then
    local message = type(allowed) == 'table' and allowed.err or tostring(allowed)
    if not (string.find(message, 'WRONGTYPE', 1, true) or string.find(message, 'not an integer', 1, true)) then
      return redis.error_reply(message)
    end
    allowed, first, second = -1, 0, 0
  end
  local at = 3 * i
  reply[at - 1], reply[at], reply[at + 1] = allowed, first, second
end
return reply
";

pub(super) struct Program {
    script: Script,
    key_prefix: Vec<u8>,
    time: Time,
    jitter_millis: u64,
    /// Drives the jitter. It needs to differ, not to surprise.
    sequence: AtomicU64,
}

/// A call in the making.
#[derive(Default)]
pub(super) struct Call {
    keys: Vec<u8>,
    ends: Vec<usize>,
    records: Vec<[u8; 34]>,
    now: Micros,
}

impl Call {
    pub(super) fn hits(&self) -> usize {
        self.ends.len()
    }
}

/// What the program did to one counter.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    /// `None`: the counter cannot be used.
    pub(super) allowed: Option<bool>,
    pub(super) state: State,
}

impl Program {
    pub(super) fn new(settings: &Settings, time: Time) -> Self {
        Self {
            script: Script::new(&source()),
            key_prefix: settings.key_prefix.as_bytes().to_vec(),
            time,
            jitter_millis: u64::try_from(settings.expiry_jitter.as_millis()).unwrap_or(u64::MAX).clamp(1, MAX),
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

    pub(super) fn add(&self, call: &mut Call, hit: &Hit<'_>, now: Micros) {
        call.keys.extend_from_slice(&self.key_prefix);
        call.keys.extend_from_slice(hit.key);
        call.ends.push(call.keys.len());
        call.records.push(self.record(hit));
        call.now = now;
    }

    pub(super) fn command(&self, call: &Call) -> Cmd {
        let hits = call.hits();
        let mut cmd = Cmd::with_capacity(4 + 2 * hits, 64 + call.keys.len() + 34 * hits);
        cmd.arg("EVALSHA").arg(self.script.get_hash()).arg(hits);
        let mut start = 0;
        for end in &call.ends {
            cmd.arg(&call.keys[start..*end]);
            start = *end;
        }
        match self.time {
            Time::Server => cmd.arg(""),
            Time::Caller => cmd.arg(call.now.get()),
        };
        for record in &call.records {
            cmd.arg(record);
        }
        cmd
    }

    fn record(&self, hit: &Hit<'_>) -> [u8; 34] {
        // 2⁶⁴ divided by the golden ratio: consecutive multiples spread evenly over the jitter.
        let step = self.sequence.fetch_add(0x9E37_79B9_7F4A_7C15, Relaxed);
        let keep = ((u128::from(step) * u128::from(self.jitter_millis)) >> 64) as u64;
        let [p1, p2] = hit.algorithm.parameters();
        let action = match hit.action {
            Action::Take => 0,
            Action::Peek => 1,
            Action::Return => 2,
        };
        let mut record = [0; 34];
        record[0] = hit.algorithm.index() as u8;
        record[1] = action;
        for (place, word) in [hit.cost.min(MAX), p1, p2, keep].into_iter().enumerate() {
            record[2 + 8 * place..10 + 8 * place].copy_from_slice(&word.to_le_bytes());
        }
        record
    }
}

/// The time of the call and a step for each hit; `None` when the reply is not the program's.
pub(super) fn read(reply: &Value) -> Option<(Micros, impl Iterator<Item = Option<Step>>)> {
    let Value::Array(values) = reply else {
        return None;
    };
    let now = Micros::new(word(values.first()?)?);
    let steps = values.get(1..)?.chunks_exact(3).map(|step| {
        let [Value::Int(allowed), first, second] = step else {
            return None;
        };
        let allowed = (*allowed >= 0).then_some(*allowed == 1);
        Some(Step { allowed, state: State([word(first)?, word(second)?]) })
    });
    Some((now, steps))
}

fn word(value: &Value) -> Option<u64> {
    let Value::Int(number) = value else {
        return None;
    };
    u64::try_from(*number).ok()
}

/// One function with a branch for each algorithm: a call makes one closure, not one for each of them.
fn source() -> String {
    let mut text = format!("local MAX = {MAX}\nlocal function step(algorithm, key, action, cost, p1, p2, now, keep)\n");
    for (index, body) in Algorithm::SCRIPTS.iter().enumerate() {
        let word = if index == 0 { "if" } else { "elseif" };
        let _ = write!(text, "{word} algorithm == {index} then\n{body}\n");
    }
    text + "end\nend\n" + MAIN
}
