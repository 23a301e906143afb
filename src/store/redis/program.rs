//! The scripts of all algorithms joined to one program, how it is called, and what it answers.
//!
//! Arguments: the keys; then now in microseconds or nothing (Redis' own time); then the records of all keys in one text:
//! a byte each for the script, the action and the record's length, two bytes for how many hits, from this one on, are
//! charged together or not at all, and the script's arguments as doubles, little endian, which are exact for all that
//! is counted. One text rather than many: what Redis pays for an argument (to parse it, to allocate it, to hand it to
//! Lua) is more than what it takes to unpack it. A record that undoes a take ends with the instant of that take.
//!
//! A cluster refuses keys of several slots in one call if they are declared as keys, and takes them as arguments. So
//! there they stand behind the records. It gives no redirect then; a key that is another server's, or on its way there,
//! is told by its outcome, and nothing was done to it: a step reads its key before it writes, and no other.
//!
//! The answer is a list: now, then a text with a letter for each hit's outcome, or none when all are allowed, and then the
//! state of each key. A value more for each hit would cost the client half as much again to read as all else that it does
//! for it; one text of everything, half as much again in Redis. States are explained in Rust, by the same code that
//! explains a state in memory.
//!
//! A call may hold hits of several requests. So a counter that cannot be used (somebody wrote something else to its
//! key) spoils its own hit only: `allowed` is -1. Any other error, of the server and not of a key, fails the call.

use std::{
    fmt::Write,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
};

use redis::{Cmd, Script, Value};
use smallvec::SmallVec;

use super::{Settings, Time};
use crate::{
    algorithm::{Action, Algorithm, Micros, PRELUDE, State},
    store::{Charge, Hit},
};

const MAIN: &str = include_str!("main.lua");

/// Bytes of a record before the arguments.
const HEADER: usize = 5;
/// Added to the script's number of the first hit of those that are charged together.
const LEADER: u8 = 128;
/// Added to the action of a hit that is charged with others and binding.
const BINDING: u8 = 128;
/// A key that nobody asks for is kept a day longer than it can matter at most, whatever the jitter.
const LONGEST_JITTER_MILLIS: u64 = 86_400_000;

pub(super) struct Program {
    source: String,
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
    keys: Vec<u8>,
    ends: Vec<usize>,
    records: Vec<u8>,
    now: Micros,
}

impl Call {
    pub(super) fn hits(&self) -> usize {
        self.ends.len()
    }

    fn add_keys(&self, cmd: &mut Cmd) {
        let mut start = 0;
        for end in &self.ends {
            cmd.arg(&self.keys[start..*end]);
            start = *end;
        }
    }
}

/// What the program did to one counter.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) outcome: Outcome,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Allowed,
    Refused,
    /// The counter cannot be used: somebody wrote something else to it.
    Spoiled,
    /// Not on this server, or no longer; nothing was done.
    Elsewhere,
    /// The server wants its keys declared; nothing was done.
    Undeclared,
}

impl Outcome {
    const fn read(letter: u8) -> Option<Self> {
        Some(match letter {
            b'y' => Self::Allowed,
            b'n' => Self::Refused,
            b's' => Self::Spoiled,
            b'e' => Self::Elsewhere,
            b'u' => Self::Undeclared,
            _ => return None,
        })
    }
}

/// How keys are given to the program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keys {
    Declared,
    AsArguments,
}

impl Program {
    pub(super) fn new(settings: &Settings, time: Time) -> Self {
        let jitter = u64::try_from(settings.expiry_jitter.as_millis()).unwrap_or(u64::MAX);
        let (source, script_numbers) = join();
        Self {
            script: Script::new(&source),
            source,
            script_numbers,
            key_prefix: settings.key_prefix.as_bytes().to_vec(),
            time,
            jitter_millis: jitter.clamp(1, LONGEST_JITTER_MILLIS),
            sequence: rand::random::<u64>().into(),
        }
    }

    /// The command that makes the program known to a server.
    pub(super) fn load(&self) -> Cmd {
        let mut cmd = redis::cmd("SCRIPT");
        cmd.arg("LOAD").arg(self.source.as_str());
        cmd
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

    /// Adds hits of one request.
    pub(super) fn add(&self, call: &mut Call, hits: &[Hit<'_>], charge: Charge, now: Micros) {
        let together = charge == Charge::All;
        for (place, hit) in hits.iter().enumerate() {
            call.keys.extend_from_slice(&self.key_prefix);
            call.keys.extend_from_slice(hit.key);
            call.ends.push(call.keys.len());
            let company = if together && place == 0 { hits.len() } else { 0 };
            self.write_record(&mut call.records, hit, company, together && hit.binding, now);
        }
        call.now = now;
    }

    pub(super) fn command(&self, call: &Call, keys: Keys) -> Cmd {
        let hits = call.hits();
        let mut cmd = Cmd::with_capacity(5 + hits, 64 + call.keys.len() + call.records.len());
        cmd.arg("EVALSHA").arg(self.script.get_hash());
        if keys == Keys::Declared {
            cmd.arg(hits);
            call.add_keys(&mut cmd);
        } else {
            cmd.arg(0);
        }
        match self.time {
            Time::Server => cmd.arg(""),
            Time::Caller => cmd.arg(call.now.get()),
        };
        cmd.arg(call.records.as_slice());
        if keys == Keys::AsArguments {
            call.add_keys(&mut cmd);
        }
        cmd
    }

    fn write_record(&self, records: &mut Vec<u8>, hit: &Hit<'_>, company: usize, binding: bool, now: Micros) {
        // 2⁶⁴ divided by the golden ratio: consecutive multiples spread evenly over the jitter.
        let step = self.sequence.fetch_add(0x9E37_79B9_7F4A_7C15, Relaxed);
        let keep = ((u128::from(step) * u128::from(self.jitter_millis)) >> 64) as u64;
        let action = match hit.action {
            Action::Take => 0,
            Action::Peek => 1,
            Action::Refund => 2,
            Action::RollBack(_) => 3,
        };
        let taken = match hit.action {
            Action::RollBack(taken) => Some(taken.get()),
            Action::Take | Action::Peek | Action::Refund => None,
        };
        let script = self.script_numbers[hit.algorithm.index()] + if company > 0 { LEADER } else { 0 };
        let action = action + if binding { BINDING } else { 0 };
        let arguments = hit.algorithm.arguments(hit.operation(now));
        let length = HEADER + size_of::<f64>() * (1 + arguments.len() + usize::from(taken.is_some()));
        records.reserve(length);
        let [low, high] = u16::try_from(company).unwrap_or(u16::MAX).to_le_bytes();
        records.extend_from_slice(&[script, action, length as u8, low, high]);
        for number in std::iter::once(keep).chain(arguments).chain(taken) {
            records.extend_from_slice(&(number as f64).to_le_bytes());
        }
    }
}

/// The time of the call and its steps; `None` when the reply is not the program's.
pub(super) fn read(reply: &Value) -> Option<(Micros, Steps<'_>)> {
    let Value::Array(values) = reply else {
        return None;
    };
    let [Value::Int(now), Value::BulkString(outcomes), states @ ..] = values.as_slice() else {
        return None;
    };
    let steps = Steps { outcomes, states, read: 0 };
    let fits = outcomes.is_empty() || outcomes.len() == states.len();
    fits.then_some((Micros::new(u64::try_from(*now).ok()?), steps))
}

/// The steps of a reply, of which some have been read.
pub(super) struct Steps<'r> {
    outcomes: &'r [u8],
    states: &'r [Value],
    read: usize,
}

impl Steps<'_> {
    /// The steps of the next so many hits; `None` when they are not all there.
    pub(super) fn take(&mut self, hits: usize) -> Option<SmallVec<[Step; 1]>> {
        (0..hits).map(|_| self.step()).collect()
    }

    /// Whether all have been read.
    pub(super) fn is_empty(&self) -> bool {
        self.read == self.states.len()
    }

    fn step(&mut self) -> Option<Step> {
        let state = match self.states.get(self.read)? {
            Value::Int(number) => State::from_bytes(&number.to_le_bytes()),
            Value::BulkString(bytes) => State::from_bytes(bytes),
            _ => return None,
        };
        let outcome = self.outcomes.get(self.read).map_or(Some(Outcome::Allowed), |letter| Outcome::read(*letter))?;
        self.read += 1;
        Some(Step { outcome, state })
    }
}

/// The program, and for each algorithm the number of its script in it; some share one. One function with a branch for
/// each script: a call makes one closure, not one for each of them.
fn join() -> (String, Vec<u8>) {
    let mut text = format!(
        "{PRELUDE}\nlocal HEADER, LEADER, BINDING = {HEADER}, {LEADER}, {BINDING}\n\
         local now, records = tonumber(ARGV[1]), ARGV[2]\n\
         local taken\n\
         local function step(script, key, action, at)\n"
    );
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
        let format = "d".repeat(arguments.len() + 1);
        let _ = write!(
            text,
            "{word} script == {number} then\n\
             local keep, {names} = unpack_numbers('<{format}', records, at + HEADER)\n\
             local more = at + HEADER + {}\n{body}\n",
            size_of::<f64>() * (arguments.len() + 1)
        );
    }
    (text + "end\nend\n" + MAIN, numbers)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reply_has_a_state_for_each_hit_and_none_too_many() {
        let state = |bytes: &[u8]| Value::BulkString(bytes.to_vec());
        let reply =
            |outcomes: &[u8], states: &[Value]| Value::Array([&[Value::Int(7), state(outcomes)], states].concat());
        let full = reply(b"yn", &[state(b"a"), Value::Int(1)]);
        let (now, mut steps) = read(&full).unwrap();
        assert_eq!((now, steps.is_empty()), (Micros::new(7), false));
        let first = steps.take(1).unwrap();
        assert_eq!(
            (first[0].outcome, first[0].state.as_bytes(), steps.is_empty()),
            (Outcome::Allowed, &b"a"[..], false)
        );
        let second = steps.take(1).unwrap();
        assert_eq!((second[0].outcome, steps.is_empty()), (Outcome::Refused, true));
        assert!(steps.take(1).is_none());
        let all_allowed = reply(b"", &[state(b"a")]);
        assert_eq!(read(&all_allowed).unwrap().1.take(1).unwrap()[0].outcome, Outcome::Allowed);
        for nonsense in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Int(-1), state(b"")]),
            reply(b"y", &[state(b"a"), state(b"b")]),
        ] {
            assert!(read(&nonsense).is_none(), "{nonsense:?}");
        }
        for outcomes in [&b"?"[..], b"y"] {
            let nonsense = reply(outcomes, &[Value::Nil]);
            assert!(read(&nonsense).unwrap().1.take(1).is_none(), "{nonsense:?}");
        }
    }

    #[test]
    fn scripts_that_are_the_same_stand_there_once() {
        let (text, numbers) = join();
        let distinct: std::collections::BTreeSet<_> = Algorithm::SCRIPTS.iter().collect();
        assert_eq!(text.matches(" script == ").count(), distinct.len());
        assert_eq!(numbers.iter().collect::<std::collections::BTreeSet<_>>().len(), distinct.len());
    }
}
