//! [`EventualCounters`]: all eventual counters of this instance.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use sluicegate_algorithm::{Action, Algorithm, Consistency, Decision};
use sluicegate_store::{Counter, Hit, StepOutcome, StoreError};

use super::counter::EventualCounter;
use crate::{
    counter_map::{CounterMap, SHARDS},
    store_call::StoreCall,
};

/// Settings of eventual counters.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Interval at which each counter reports its hits to the store and reads those of other instances.
    #[serde(with = "sluicegate_duration::Text")]
    pub sync: Duration,
    /// Maximum age of a counter's last synchronisation. Older counters do not decide without the store.
    #[serde(with = "sluicegate_duration::Text")]
    pub max_staleness: Duration,
    /// Maximum number of eventual counters, of about 400 bytes each. If 0, there are none and every hit calls the
    /// store.
    pub max_counters: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { sync: Duration::from_millis(200), max_staleness: Duration::from_secs(60), max_counters: 65_536 }
    }
}

/// The eventual counters, shared by all workers.
pub(crate) struct EventualCounters {
    counters: CounterMap<Entry>,
    /// Position of the sweep: number of shards that were due for a report since the clock's origin.
    last_turn: AtomicUsize,
    settings: Settings,
}

/// An eventual counter with this instance's copy.
struct Entry {
    identity: u128,
    /// The algorithm of the limit.
    algorithm: Algorithm,
    /// The counter that reports are sent to. Its program counts hits even above the limit.
    counter: Counter,
    copy: EventualCounter,
}

impl EventualCounters {
    /// Creates an empty set of counters. Returns `None` if the settings turn eventual counters off.
    pub(crate) fn new(settings: &Settings) -> Option<Self> {
        if settings.max_counters == 0 || settings.sync.is_zero() {
            return None;
        }
        Some(Self {
            counters: CounterMap::new(settings.max_counters),
            last_turn: AtomicUsize::new(0),
            settings: settings.clone(),
        })
    }

    /// Decides a hit.
    ///
    /// Returns `None` if the hit is a refund or is not eventual, if its counter is unknown or stale, or if its rule has
    /// changed.
    pub(crate) fn decide(&self, identity: u128, hit: &Hit<&Counter>, now: Duration) -> Option<Decision> {
        // Refunds go to the store immediately.
        if hit.counter.consistency != Consistency::Eventual || hit.action.releases() {
            return None;
        }
        let decision = self.counters.find(identity, |entry| {
            if hit.counter.program.algorithm() != Some(&entry.algorithm) {
                return None;
            }
            entry.copy.decide(&entry.algorithm, hit, now, self.settings.max_staleness)
        });
        decision.flatten()
    }

    /// Merges the outcome of a store call into the counter, which is created if it is unknown and there is room.
    pub(crate) fn merge(
        &self,
        identity: u128,
        hit: &Hit<&Counter>,
        outcome: &StepOutcome,
        called_at: Duration,
        now: Duration,
    ) {
        let Some(algorithm) = hit.counter.program.algorithm() else {
            return;
        };
        let recording = algorithm.recording().into();
        let _ = self.counters.with_or_insert(
            identity,
            || {
                // The store itself counts exactly.
                let counter = Counter { program: recording, consistency: Consistency::Exact, ..hit.counter.clone() };
                Some(Entry { identity, algorithm: *algorithm, counter, copy: EventualCounter::new(outcome, called_at) })
            },
            |entry| {
                entry.algorithm = *algorithm;
                entry.counter.program = recording;
                entry.copy.merge(algorithm, outcome, called_at, now);
            },
        );
    }

    /// Returns the reports that are due, and removes idle counters.
    ///
    /// Each counter's turn comes once per sync interval, shard by shard, so that the reports are spread over the
    /// interval.
    pub(crate) fn sweep(&self, now: Duration) -> Vec<StoreCall> {
        let idle_since = now.saturating_sub(2 * self.settings.sync);
        let turn = (now.as_micros() * SHARDS as u128 / self.settings.sync.as_micros().max(1)) as usize;
        let last_turn = self.last_turn.swap(turn, Relaxed);
        let mut calls = Vec::new();
        self.counters.retain_in_shards(last_turn.max(turn.saturating_sub(SHARDS))..turn, |entry| {
            if let Some(hits) = entry.copy.begin_report(&entry.algorithm, now) {
                calls.push(entry.store_call(hits));
            }
            !entry.copy.is_idle(idle_since)
        });
        calls
    }

    /// Removes all counters, and returns the reports of their pending hits.
    pub(crate) fn drain(&self, now: Duration) -> Vec<StoreCall> {
        let mut calls = Vec::new();
        self.counters.retain(|entry| {
            if let Some(hits) = entry.copy.drain(&entry.algorithm, now) {
                calls.push(entry.store_call(hits));
            }
            false
        });
        calls
    }

    /// Completes a report and returns the number of its hits that the store may not have counted.
    pub(crate) fn finish_report(
        &self,
        call: &StoreCall,
        answer: Result<StepOutcome, StoreError>,
        called_at: Duration,
        now: Duration,
    ) -> u64 {
        let lost = self
            .counters
            .find(call.identity, |entry| entry.copy.finish_report(&entry.algorithm, answer, called_at, now));
        lost.unwrap_or_default()
    }
}

impl Entry {
    /// Returns the store call that adds `hits` to the counter. If `hits` is 0, it only reads the counter.
    fn store_call(&self, hits: u64) -> StoreCall {
        let action = if hits > 0 { Action::Take } else { Action::Peek };
        StoreCall { identity: self.identity, hit: Hit { action, ..Hit::take(self.counter.clone(), hits) } }
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_algorithm::{MaxHits, Micros, State, fixed_window::FixedWindow};

    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn eventual(limit: u64) -> Counter {
        let window = FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(3_600), false).unwrap();
        Counter { consistency: Consistency::Eventual, ..Counter::new(b"k", window) }
    }

    fn counters() -> EventualCounters {
        EventualCounters::new(&Settings { sync: at(200), ..Settings::default() }).unwrap()
    }

    /// Returns the outcome of a hit of a new counter.
    fn outcome(hit: &Hit<&Counter>) -> StepOutcome {
        let (mut state, at) = (State::default(), Micros::from_secs(1));
        let allowed = hit.counter.program.step(&mut state, hit.operation(at));
        StepOutcome { allowed, action: hit.action, at, state }
    }

    fn merge(counters: &EventualCounters, identity: u128, hit: &Hit<&Counter>) {
        counters.merge(identity, hit, &outcome(hit), at(0), at(0));
    }

    fn decide(counters: &EventualCounters, identity: u128, hit: &Hit<&Counter>, now: Duration) -> Option<(bool, u64)> {
        counters.decide(identity, hit, now).map(|decision| (decision.allowed, decision.remaining))
    }

    #[test]
    fn only_known_counters_of_the_same_rule_decide_takes_and_peeks() {
        let (counters, limit, other) = (counters(), eventual(100), eventual(50));
        let hit = limit.take(3);
        assert_eq!(decide(&counters, 1, &hit, at(1)), None, "the counter is unknown");
        merge(&counters, 1, &hit);
        assert_eq!(decide(&counters, 1, &hit, at(1)), Some((true, 94)));
        assert_eq!(decide(&counters, 1, &Hit { action: Action::Peek, ..hit }, at(1)), Some((true, 94)));
        assert_eq!(decide(&counters, 1, &Hit { action: Action::Refund, ..hit }, at(1)), None);
        let exact = Counter { consistency: Consistency::Exact, ..limit.clone() };
        assert_eq!(decide(&counters, 1, &exact.take(3), at(1)), None);
        assert_eq!(decide(&counters, 1, &other.take(3), at(1)), None, "another limit");
        merge(&counters, 1, &other.take(3));
        assert_eq!(decide(&counters, 1, &hit, at(1)), None, "the limit was changed");
        assert!(decide(&counters, 1, &other.take(1), at(1)).is_some());
    }

    #[test]
    fn the_reports_of_an_interval_are_spread_over_it() {
        let (counters, limit) = (counters(), eventual(100));
        let hit = limit.take(3);
        // The highest bits of the identity select the shard.
        for identity in (0_u128..64).map(|shard| shard << 112) {
            merge(&counters, identity, &hit);
            assert_eq!(decide(&counters, identity, &hit, at(0)), Some((true, 94)));
        }
        let sweep = |millis| {
            let calls = counters.sweep(at(millis));
            assert!(calls.iter().all(|call| (call.hit.action, call.hit.cost) == (Action::Take, 3)));
            calls.iter().map(|call| call.identity >> 112).collect::<Vec<_>>()
        };
        assert_eq!(sweep(50), (0..16).collect::<Vec<_>>());
        assert_eq!(sweep(100), (16..32).collect::<Vec<_>>());
        assert_eq!(sweep(200), (32..64).collect::<Vec<_>>());
        assert!(sweep(400).is_empty(), "all reports are in progress");
    }

    #[test]
    fn a_counter_is_read_while_it_is_used_and_removed_when_it_is_idle() {
        let (counters, limit) = (counters(), eventual(100));
        let hit = limit.take(3);
        let peek = Hit { action: Action::Peek, ..hit };
        let sweep = |millis| counters.sweep(at(millis));
        let finish = |call: &StoreCall, answer, millis| counters.finish_report(call, answer, at(millis), at(millis));
        merge(&counters, 1, &hit);
        decide(&counters, 1, &hit, at(1));
        let report = &sweep(200)[0];
        assert_eq!(finish(report, Err(StoreError::Timeout), 200), 3, "the hits may not have been counted");
        assert_eq!(decide(&counters, 1, &peek, at(201)), Some((true, 94)));
        let read = &sweep(400)[0];
        assert_eq!((read.hit.action, read.hit.cost), (Action::Peek, 0));
        assert_eq!(finish(read, Ok(outcome(&hit)), 400), 0);
        assert_eq!(decide(&counters, 1, &peek, at(401)), Some((true, 97)));
        assert_eq!(finish(&sweep(600)[0], Ok(outcome(&hit)), 600), 0);
        assert!(sweep(801).is_empty() && decide(&counters, 1, &peek, at(801)).is_some());
        finish(&sweep(1_001)[0], Ok(outcome(&hit)), 1_001);
        assert!(sweep(1_400).is_empty() && decide(&counters, 1, &peek, at(1_400)).is_none());
    }

    #[test]
    fn a_shutdown_reports_pending_hits_and_removes_all_counters() {
        let (counters, limit) = (counters(), eventual(100));
        let hit = limit.take(3);
        for identity in [1, 2] {
            merge(&counters, identity, &hit);
        }
        decide(&counters, 2, &hit, at(1));
        let drained = counters.drain(at(2));
        let calls: Vec<_> = drained.iter().map(|call| (call.identity, call.hit.action, call.hit.cost)).collect();
        assert_eq!(calls, [(2, Action::Take, 3)]);
        assert!([1, 2].into_iter().all(|identity| decide(&counters, identity, &hit, at(2)).is_none()));
    }
}
