//! The scripts of all algorithms joined to one program, how it is called, and what it answers.
//!
//! Arguments: the keys; then now in microseconds or nothing (Redis' own time); then for each key one packed record
//! (algorithm, action: a byte each; cost, p1, p2, keep: 8 bytes each, little endian). One record rather than six texts:
//! Redis unpacks it for less than it takes to parse the texts. The answer is a flat list of integers: now, then
//! `allowed` and the two words of the state for each key. They are explained in Rust, by the same code that
//! explains a state in memory.

use std::{fmt::Write, sync::atomic::Ordering::Relaxed};

use redis::{Cmd, Script, Value};

use super::{Settings, Time};
use crate::{
    algorithm::{Action, Algorithm, Ask, MAX, Micros, State},
    store::{Decisions, Hit},
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
  local at = #reply
  reply[at + 1], reply[at + 2], reply[at + 3] = step(algorithm, key, action, cost, p1, p2, now, keep)
end
return reply
";

pub(super) struct Program {
    script: Script,
    key_prefix: Vec<u8>,
    time: Time,
    jitter_millis: u64,
    /// Drives the jitter. It needs to differ, not to surprise.
    sequence: std::sync::atomic::AtomicU64,
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

    pub(super) fn call(&self, hits: &[Hit<'_>], now: Micros) -> Cmd {
        let mut cmd = Cmd::with_capacity(4 + 2 * hits.len(), 96 + 160 * hits.len());
        cmd.arg("EVALSHA").arg(self.script.get_hash()).arg(hits.len());
        let mut key = self.key_prefix.clone();
        for hit in hits {
            key.truncate(self.key_prefix.len());
            key.extend_from_slice(hit.key);
            cmd.arg(&key);
        }
        match self.time {
            Time::Server => cmd.arg(""),
            Time::Caller => cmd.arg(now.get()),
        };
        for hit in hits {
            cmd.arg(&self.record(hit));
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

    /// `None` when the reply is not this program's.
    pub(super) fn read(&self, reply: &Value, hits: &[Hit<'_>]) -> Option<Decisions> {
        let Value::Array(values) = reply else {
            return None;
        };
        let now = Micros::new(word(values.first()?)?);
        let steps = values.get(1..)?.chunks_exact(3);
        if steps.len() != hits.len() || !steps.remainder().is_empty() {
            return None;
        }
        let decide = |(hit, step): (&Hit<'_>, &[Value])| {
            let [allowed, first, second] = step else {
                return None;
            };
            let state = State([word(first)?, word(second)?]);
            let ask = Ask { action: hit.action, cost: hit.cost, now };
            Some(hit.algorithm.explain(state, ask, word(allowed)? == 1))
        };
        hits.iter().zip(steps).map(decide).collect()
    }
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
