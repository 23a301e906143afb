//! May it pass: pure arithmetic on 16 bytes of state. No I/O, no clock, no allocation; integers only.
//!
//! Every algorithm is a folder with the same files: `mod.rs` (the rule and its arithmetic), `script.lua` (the state's
//! transition again, for Redis) and `tests.rs`. `list` names them all; nothing else has to.
//!
//! An algorithm comes in two halves. [`Rule::step`] moves the state and is what has to be atomic: a store runs it
//! where the counter is locked, and `script.lua` is its twin. [`Rule::explain`] reads the state that a step left and
//! says what to tell the caller; it exists once, in Rust, for every store.

pub mod fixed_window;
mod list;
mod micros;

pub use list::Algorithm;
pub use micros::Micros;

/// The largest count and the longest span that every store can hold: Lua's numbers are doubles, exact up to 2⁵³.
pub const MAX: u64 = (1 << 53) - 1;

/// What is asked of a counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Take the cost if the algorithm allows it.
    Take,
    /// Say what taking the cost would do; change nothing.
    Peek,
    /// Give the cost back, never above full.
    Return,
}

/// One question to one counter.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// What to do.
    pub action: Action,
    /// How many hits; above [`MAX`] it counts as [`MAX`].
    pub cost: u64,
    /// The instant of the question.
    pub now: Micros,
}

/// What an algorithm remembers of one counter. All zero is a counter never used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct State(pub [u64; 2]);

/// What to tell the caller.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// Whether the cost passes.
    pub allowed: bool,
    /// Hits that would still pass now.
    pub remaining: u64,
    /// Hits that count against the limit now; above it where denied hits count too.
    pub used: u64,
    /// Until everything is restored, if nobody else asks.
    pub reset: Micros,
    /// When denied: until this same cost would pass, if nobody else asks; `None` when it never will.
    pub retry_after: Option<Micros>,
}

/// What every algorithm offers. Implementors are small values, checked when they were made: nothing here can fail.
pub trait Rule {
    /// A few letters that stand for the algorithm and its shape in a key: counters of different algorithms never meet.
    const TAG: &'static str;

    /// The body of a Lua function `(key, action, cost, p1, p2, now, keep)` that does what [`Rule::step`] does and
    /// returns `allowed` (1 or 0) and the two words of the state. `action` is 0 take, 1 peek, 2 return; times are
    /// microseconds, but for `keep`, the milliseconds that a key outlives its use.
    const SCRIPT: &'static str;

    /// The two numbers that the script gets as `p1` and `p2`.
    fn parameters(&self) -> [u64; 2];

    /// The part of the key that separates counters of one descriptor: seconds of a window, for one.
    fn scope(&self) -> u64;

    /// Moves the state and says whether the cost passes. A peek moves nothing.
    fn step(&self, state: &mut State, ask: Ask) -> bool;

    /// Reads the state that a step left.
    fn explain(&self, state: State, ask: Ask, allowed: bool) -> Decision;

    /// The instant from which the state says no more than a new one would.
    fn expires(&self, state: State) -> Micros;
}
