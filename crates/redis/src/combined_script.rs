//! [`CombinedScript`]: the scripts of all counter programs in one, and the format of its calls and replies.
//!
//! # Calls
//! The arguments are the keys, the time in microseconds (empty for Redis' own time), and one string with the records of
//! all keys. A record consists of:
//!
//! - one byte each for the script, the action and the length of the record;
//! - two bytes for the number of hits, counted from this one, that are charged together or not at all;
//! - the jitter and the script's arguments as little-endian doubles, which are exact for everything that is counted;
//! - if the record undoes a take, the time of that take.
//!
//! All records are one string because an additional argument costs Redis more (to parse it, to allocate it, to pass it
//! to Lua) than unpacking the string.
//!
//! A cluster rejects calls with keys of several slots if the keys are declared, but accepts them as arguments. In a
//! cluster the keys therefore follow the records. The cluster then sends no redirects, but the outcome reports a key
//! that belongs to another server or is migrating to one. Such a key is unchanged, because a step reads its key before
//! it writes, and accesses no other key.
//!
//! # Replies
//! The reply is a list: the time, a string with one letter per hit for its outcome (empty if all hits are allowed), and
//! the state of each key (in two parts if a script has appended to a long one). One more value per hit would increase
//! the client's cost per hit by half; one string with everything would increase the cost in Redis by half. The same Rust
//! code explains states from memory and from Redis.
//!
//! A call can contain hits of several requests. Therefore a key with an invalid state (another client has written to
//! it) concerns only its own hit: the value is removed, and the step runs again as for a new counter. Its letter is a
//! capital then. Should it fail again, the hit has the outcome `s`. Any other error concerns the server and fails the
//! whole call.

use std::fmt::Write;

use redis::{Cmd, Value};
use sluicegate_algorithm::{Action, Micros, PRELUDE, Program, Script, State};
use sluicegate_store::{AHEAD, Charge, Counter, Hit};
use smallvec::SmallVec;

use super::{Settings, TimeSource};

const MAIN: &str = include_str!("main.lua");

/// Length of a record's header in bytes, before the arguments.
const HEADER: usize = 5;
/// Flag in the script's number: the first hit of a group that is charged together.
const LEADER: u8 = 128;
/// Flag in the action: a blocking hit of a group that is charged together.
const BLOCKING: u8 = 128;
/// Action of a take that counts as if it arrived [`AHEAD`] later.
const TAKE_AHEAD: u8 = 4;
/// Maximum jitter, even if `expiry_jitter` is longer: a key outlives its content by at most one day.
const MAX_JITTER_MILLIS: u64 = 86_400_000;

/// The combined script and the settings of its calls.
pub(super) struct CombinedScript {
    source: String,
    script: redis::Script,
    /// Number of each counter program's script, by the program's index.
    script_numbers: Vec<u8>,
    key_prefix: Vec<u8>,
    time_source: TimeSource,
    jitter_millis: u64,
}

/// The keys and records of a call that is being assembled.
#[derive(Default)]
pub(super) struct Call {
    keys: Vec<u8>,
    /// Position in `keys` at which each key ends.
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

/// The outcome of a step and the counter's state after it.
#[derive(Clone, Debug)]
pub(super) struct Step {
    pub(super) outcome: Outcome,
    /// Whether the key contained other data than the counter's state, which were removed before the step.
    pub(super) is_repaired: bool,
    pub(super) state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Allowed,
    Denied,
    /// The key contained other data than the counter's state. They were removed, but the step failed again.
    InvalidState,
    /// The key is not, or no longer, on this server. The step did nothing.
    NonLocal,
    /// The server requires declared keys. The step did nothing.
    Undeclared,
}

impl Outcome {
    const fn from_letter(letter: u8) -> Option<Self> {
        Some(match letter {
            b'y' | b'Y' => Self::Allowed,
            b'n' | b'N' => Self::Denied,
            b's' => Self::InvalidState,
            b'e' => Self::NonLocal,
            b'u' => Self::Undeclared,
            _ => return None,
        })
    }
}

/// The way in which a call passes its keys to the script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keys {
    Declared,
    /// Keys as arguments behind the records.
    AsArguments,
}

impl CombinedScript {
    pub(super) fn new(settings: &Settings, time_source: TimeSource) -> Self {
        let jitter = u64::try_from(settings.expiry_jitter.as_millis()).unwrap_or(u64::MAX);
        let (source, script_numbers) = join_scripts(settings.bound_expiry_jitter);
        Self {
            script: redis::Script::new(&source),
            source,
            script_numbers,
            key_prefix: settings.key_prefix.as_bytes().to_vec(),
            time_source,
            jitter_millis: jitter.clamp(1, MAX_JITTER_MILLIS),
        }
    }

    /// Builds the command that loads the script into a server.
    pub(super) fn load_command(&self) -> Cmd {
        let mut cmd = redis::cmd("SCRIPT");
        cmd.arg("LOAD").arg(self.source.as_str());
        cmd
    }

    /// Builds a write command that changes nothing, one of those that the scripts use.
    pub(super) fn write_probe(&self) -> Cmd {
        let mut cmd = redis::cmd("PEXPIRE");
        cmd.arg([self.key_prefix.as_slice(), b"probe"].concat()).arg(1);
        cmd
    }

    /// Returns whether requests can share a call, which is not possible if each passes its own time.
    pub(super) fn can_join_requests(&self) -> bool {
        self.time_source == TimeSource::Own
    }

    pub(super) fn add(&self, call: &mut Call, hits: &[Hit<&Counter>], charge: Charge, now: Micros) {
        let together = charge == Charge::All;
        for (index, hit) in hits.iter().enumerate() {
            call.keys.extend_from_slice(&self.key_prefix);
            call.keys.extend_from_slice(&hit.counter.name);
            call.ends.push(call.keys.len());
            let group_size = if together && index == 0 { hits.len() } else { 0 };
            self.write_record(&mut call.records, hit, group_size, together && hit.blocks.on_denial(), now);
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
        match self.time_source {
            TimeSource::Own => cmd.arg(""),
            TimeSource::Caller => cmd.arg(call.now.get()),
        };
        cmd.arg(call.records.as_slice());
        if keys == Keys::AsArguments {
            call.add_keys(&mut cmd);
        }
        cmd
    }

    fn write_record(&self, records: &mut Vec<u8>, hit: &Hit<&Counter>, group_size: usize, blocks: bool, now: Micros) {
        let jitter = rand::random_range(0..self.jitter_millis);
        let action = match hit.action {
            Action::Take if hit.is_ahead => TAKE_AHEAD,
            Action::Take => 0,
            Action::Peek => 1,
            Action::Refund => 2,
            Action::RollBack(_) => 3,
        };
        let taken = match hit.action {
            Action::RollBack(taken) => Some(taken.get()),
            Action::Take | Action::Peek | Action::Refund => None,
        };
        let script = self.script_numbers[hit.counter.program.index()] + if group_size > 0 { LEADER } else { 0 };
        let action = action + if blocks { BLOCKING } else { 0 };
        let arguments = hit.counter.program.arguments(hit.operation(now));
        let length = HEADER + size_of::<f64>() * (1 + arguments.len() + usize::from(taken.is_some()));
        records.reserve(length);
        let [low, high] = u16::try_from(group_size).unwrap_or(u16::MAX).to_le_bytes();
        records.extend_from_slice(&[script, action, length as u8, low, high]);
        for number in std::iter::once(jitter).chain(arguments).chain(taken) {
            records.extend_from_slice(&(number as f64).to_le_bytes());
        }
    }
}

/// Returns the time of the call and its steps, or `None` if the reply is not in the script's format.
pub(super) fn parse_reply(reply: &Value) -> Option<(Micros, ReplySteps<'_>)> {
    let Value::Array(values) = reply else {
        return None;
    };
    let [Value::Int(now), Value::BulkString(outcomes), states @ ..] = values.as_slice() else {
        return None;
    };
    if !outcomes.is_empty() && outcomes.len() != states.len() {
        return None;
    }
    let now = Micros::new(u64::try_from(*now).ok()?);
    Some((now, ReplySteps { outcomes, states, consumed: 0 }))
}

/// The steps of a reply, which are taken one after the other.
pub(super) struct ReplySteps<'r> {
    outcomes: &'r [u8],
    states: &'r [Value],
    consumed: usize,
}

impl ReplySteps<'_> {
    /// Takes the steps of the next `hits` hits. Returns `None` if the reply does not contain all of them.
    pub(super) fn take(&mut self, hits: usize) -> Option<SmallVec<[Step; 1]>> {
        (0..hits).map(|_| self.step()).collect()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.consumed == self.states.len()
    }

    fn step(&mut self) -> Option<Step> {
        let state = match self.states.get(self.consumed)? {
            Value::Int(number) => State::from_bytes(&number.to_le_bytes()),
            Value::BulkString(bytes) => State::from_bytes(bytes),
            Value::Array(parts) => match parts.as_slice() {
                [Value::BulkString(before), Value::BulkString(appended)] => {
                    State::from_long([before.as_slice(), appended].concat())
                }
                _ => return None,
            },
            _ => return None,
        };
        let letter = self.outcomes.get(self.consumed).copied().unwrap_or(b'y');
        self.consumed += 1;
        Some(Step { outcome: Outcome::from_letter(letter)?, is_repaired: letter.is_ascii_uppercase(), state })
    }
}

/// Returns the source of the combined script, and for each counter program the number of its script. Some programs share
/// a script.
///
/// The source has one function with a branch per script, so that a call creates one closure, not one per script.
fn join_scripts(bound_jitter: bool) -> (String, Vec<u8>) {
    let ahead = AHEAD.get();
    let mut text = format!(
        "local BOUND_JITTER = {bound_jitter}\n{PRELUDE}\nlocal HEADER, LEADER, BLOCKING = {HEADER}, {LEADER}, {BLOCKING}\n\
         local TAKE_AHEAD, AHEAD = {TAKE_AHEAD}, {ahead}\n\
         local now, records = tonumber(ARGV[1]), ARGV[2]\n\
         local taken\n\
         local function step(script, key, action, at)\n"
    );
    let mut scripts = Vec::new();
    let mut numbers = Vec::new();
    for script in Program::scripts() {
        let number = scripts.iter().position(|known| *known == script).unwrap_or(scripts.len());
        numbers.push(number as u8);
        if number < scripts.len() {
            continue;
        }
        scripts.push(script);
        let Script { arguments, body } = script;
        let keyword = if number == 0 { "if" } else { "elseif" };
        let names = arguments.join(", ");
        let format = "d".repeat(arguments.len() + 1);
        let _ = write!(
            text,
            "{keyword} script == {number} then\n\
             local jitter, {names} = unpack_numbers('<{format}', records, at + HEADER)\n\
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
    fn a_valid_reply_has_one_state_per_hit() {
        let state = |bytes: &[u8]| Value::BulkString(bytes.to_vec());
        let reply =
            |outcomes: &[u8], states: &[Value]| Value::Array([&[Value::Int(7), state(outcomes)], states].concat());
        let full = reply(b"yn", &[state(b"a"), Value::Int(1)]);
        let (now, mut steps) = parse_reply(&full).unwrap();
        assert_eq!((now, steps.is_empty()), (Micros::new(7), false));
        let first = steps.take(1).unwrap();
        assert_eq!(
            (first[0].outcome, first[0].state.as_bytes(), steps.is_empty()),
            (Outcome::Allowed, &b"a"[..], false)
        );
        let second = steps.take(1).unwrap();
        assert_eq!((second[0].outcome, steps.is_empty()), (Outcome::Denied, true));
        assert!(steps.take(1).is_none());
        let all_allowed = reply(b"", &[state(b"a")]);
        assert_eq!(parse_reply(&all_allowed).unwrap().1.take(1).unwrap()[0].outcome, Outcome::Allowed);
        for invalid in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![Value::Int(-1), state(b"")]),
            reply(b"y", &[state(b"a"), state(b"b")]),
        ] {
            assert!(parse_reply(&invalid).is_none(), "{invalid:?}");
        }
        let appended = reply(b"", &[Value::Array(vec![state(b"ab"), state(b"c")])]);
        assert_eq!(parse_reply(&appended).unwrap().1.take(1).unwrap()[0].state.as_bytes(), b"abc");
        for parts in [vec![], vec![state(b"a")], vec![state(b"a"), Value::Int(1)]] {
            assert!(parse_reply(&reply(b"", &[Value::Array(parts)])).unwrap().1.take(1).is_none());
        }
        for outcomes in [&b"?"[..], b"y"] {
            let invalid = reply(outcomes, &[Value::Nil]);
            assert!(parse_reply(&invalid).unwrap().1.take(1).is_none(), "{invalid:?}");
        }
    }

    #[test]
    fn programs_with_equal_scripts_share_one_branch() {
        let (text, numbers) = join_scripts(true);
        let distinct: std::collections::BTreeSet<_> = Program::scripts().collect();
        assert_eq!(text.matches(" script == ").count(), distinct.len());
        assert_eq!(numbers.iter().collect::<std::collections::BTreeSet<_>>().len(), distinct.len());
    }

    #[test]
    fn a_call_contains_each_key_once_and_records_of_the_stated_length() {
        let script = CombinedScript::new(&Settings::default(), TimeSource::Own);
        let counter = Counter::new(b"the-key", sluicegate_algorithm::fixed_window::FixedWindow::DENY_ALL);
        for action in [Action::Take, Action::Peek, Action::Refund, Action::RollBack(Micros::new(7))] {
            let (mut call, hit) = (Call::default(), Hit { action, ..counter.take(1) });
            script.add(&mut call, &[hit], Charge::Each, Micros::new(9));
            assert_eq!(usize::from(call.records[2]), call.records.len(), "{action:?}");
            for keys in [Keys::Declared, Keys::AsArguments] {
                let command = script.command(&call, keys).get_packed_command();
                let key = b"sluicegate:the-key";
                assert_eq!(command.windows(key.len()).filter(|part| *part == key).count(), 1, "{keys:?}");
            }
        }
    }
}
