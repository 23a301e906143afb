//! [`explore`]: visits every reachable state of a protocol, up to a number of events (explicit-state model checking).
//!
//! A model runs the code of the service. It offers the events that can happen in its present state: a message arrives or
//! is dropped, a process crashes, time passes. The search tries them all in every order. It is breadth-first, so the first
//! violation that it finds is one with the fewest events.
//!
//! The code cannot be copied in the middle of a call, so the search stores paths instead of states: it runs the events of
//! a path again, from the beginning. A state is identified by a hash of 64 bits, and is continued only from the first
//! path that reaches it.

use std::{
    collections::HashSet,
    fmt::{self, Debug},
    hash::{BuildHasher, Hash},
    time::{Duration, Instant},
};

/// A protocol in a state.
pub trait Model {
    /// An event, such as the arrival of a message.
    type Event: Copy + Debug;

    /// Returns the events that can happen now.
    fn events(&self) -> Vec<Self::Event>;

    /// Lets an event happen.
    ///
    /// # Errors
    ///
    /// Returns the description of a violated invariant.
    fn apply(&mut self, event: Self::Event) -> Result<(), String>;

    /// Returns a hash of everything that determines the future of this state.
    ///
    /// States that differ only in the names of their instances should have the same hash.
    fn fingerprint(&self) -> u64;

    /// Delivers all messages without further failures, and checks what must hold in the end.
    ///
    /// # Errors
    ///
    /// Returns the description of a violation.
    fn settle(self) -> Result<(), String>;
}

/// Size of a search that has found no violation.
#[derive(Clone, Copy, Debug, Default)]
pub struct Explored {
    /// Number of different states.
    pub states: usize,
    /// Number of events that happened in them.
    pub events: usize,
    /// Number of events of the longest path.
    pub depth: usize,
    /// Time of the search.
    pub duration: Duration,
}

impl fmt::Display for Explored {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { states, events, depth, duration } = self;
        write!(f, "{states} states, {events} events, {depth} deep, in {:.1} s", duration.as_secs_f64())
    }
}

/// Visits all states that at most `max_depth` events lead to.
///
/// # Errors
///
/// Returns the description of a violation, with the events that lead to it.
pub fn explore<M: Model>(new: impl Fn() -> M, max_depth: usize) -> Result<Explored, String> {
    let began = Instant::now();
    let replay = |path: &[M::Event]| {
        let mut model = new();
        for event in path {
            model.apply(*event).map_err(|violation| format!("{violation}, when repeated, after {path:?}"))?;
        }
        Ok::<_, String>(model)
    };
    let first = new();
    let mut visited = HashSet::from([first.fingerprint()]);
    let mut explored = Explored::default();
    first.settle().map_err(|violation| format!("{violation} at the beginning"))?;
    let mut paths = vec![Vec::new()];
    while !paths.is_empty() && explored.depth < max_depth {
        explored.depth += 1;
        let mut next = Vec::new();
        for path in paths {
            let mut parent = Some(replay(&path)?);
            for event in parent.as_ref().map(M::events).unwrap_or_default() {
                let mut model = match parent.take() {
                    Some(parent) => parent,
                    None => replay(&path)?,
                };
                explored.events += 1;
                let mut longer = path.clone();
                longer.push(event);
                model.apply(event).map_err(|violation| format!("{violation} after {longer:?}"))?;
                if visited.insert(model.fingerprint()) {
                    model
                        .settle()
                        .map_err(|violation| format!("{violation} after {longer:?} and no further failure"))?;
                    next.push(longer);
                }
            }
        }
        paths = next;
    }
    Ok(Explored { states: visited.len(), duration: began.elapsed(), ..explored })
}

/// Returns whether the searches are those of `make model`, which take minutes, and not those of `make test`.
pub fn is_large() -> bool {
    std::env::var_os("LARGE_MODELS").is_some()
}

/// Returns the hash of a value.
pub fn hash(value: impl Hash) -> u64 {
    foldhash::fast::FixedState::with_seed(1).hash_one(value)
}

/// Returns a hash of values that does not depend on their order.
pub fn hash_unordered(values: impl IntoIterator<Item = u64>) -> u64 {
    let mut values: Vec<_> = values.into_iter().collect();
    values.sort_unstable();
    hash(values)
}

/// Returns all pairs of different numbers below `count`.
pub fn pairs(count: usize) -> Vec<(usize, usize)> {
    let pairs = (0..count).flat_map(|one| (0..count).map(move |other| (one, other)));
    pairs.filter(|(one, other)| one != other).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two counters from 0 to 9. The state with `(4, 2)` violates the invariant if `fault` is set.
    #[derive(Clone, Copy)]
    struct Counters {
        values: [u64; 2],
        fault: Option<&'static str>,
    }

    impl Model for Counters {
        type Event = usize;

        fn events(&self) -> Vec<usize> {
            (0..2).filter(|index| self.values[*index] < 9).collect()
        }

        fn apply(&mut self, index: usize) -> Result<(), String> {
            self.values[index] += 1;
            let is_violated = self.fault == Some("invariant") && self.values == [4, 2];
            if is_violated { Err("invariant".to_owned()) } else { Ok(()) }
        }

        fn fingerprint(&self) -> u64 {
            hash(self.values)
        }

        fn settle(self) -> Result<(), String> {
            let is_violated = self.fault == Some("liveness") && self.values == [1, 1];
            if is_violated { Err("liveness".to_owned()) } else { Ok(()) }
        }
    }

    #[test]
    fn each_state_is_visited_once() {
        let counters = Counters { values: [0, 0], fault: None };
        let explored = explore(|| counters, 100).unwrap();
        assert_eq!((explored.states, explored.events, explored.depth), (100, 180, 19));
        let explored = explore(|| counters, 3).unwrap();
        assert_eq!((explored.states, explored.events, explored.depth), (10, 12, 3));
    }

    #[test]
    fn the_first_violation_has_the_fewest_events() {
        let search = |fault, depth| explore(|| Counters { values: [0, 0], fault: Some(fault) }, depth);
        let violation = search("invariant", 100).unwrap_err();
        assert!(violation.starts_with("invariant after [") && violation.matches(',').count() == 5, "{violation}");
        assert!(search("invariant", 5).is_ok());
        assert_eq!(search("liveness", 2).unwrap_err(), "liveness after [0, 1] and no further failure");
    }
}
