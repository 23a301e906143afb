//! [`EventualCounters`]: all eventual counters of this instance.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    counter_map::{CounterMap, SHARDS},
    eventual_counter::EventualCounter,
    store_call::StoreCall,
};
use crate::{
    algorithm::{Action, Algorithm, Consistency, Decision},
    store::{Hit, StepOutcome, StoreError},
};

/// Settings of eventual counters.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Interval at which each counter reports its hits to the store and reads those of other instances.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub sync: Duration,
    /// Maximum age of a counter's last synchronisation. Older counters do not decide without the store.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
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
pub(super) struct EventualCounters {
    entities: CounterMap<Entry>,
    /// Position of the sweep: number of shards that were due for a report since the clock's origin.
    last_turn: AtomicUsize,
    settings: Settings,
}

/// An eventual counter with its name and algorithm.
struct Entry {
    key: Box<[u8]>,
    identity: u128,
    per_second: bool,
    algorithm: Algorithm,
    counter: EventualCounter,
}

impl EventualCounters {
    /// Creates an empty set of counters. Returns `None` if the settings turn eventual counters off.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        let is_enabled = settings.max_counters > 0 && !settings.sync.is_zero();
        is_enabled.then(|| Self {
            entities: CounterMap::new(settings.max_counters),
            last_turn: AtomicUsize::new(0),
            settings: settings.clone(),
        })
    }

    /// Decides a hit.
    ///
    /// Returns `None` if the hit is a refund or is not eventual, if its counter is unknown or stale, or if its rule has
    /// changed.
    pub(super) fn decide(&self, identity: u128, hit: &Hit<'_>, now: Duration) -> Option<Decision> {
        // Refunds go to the store immediately.
        if hit.consistency != Consistency::Eventual || hit.action.releases() {
            return None;
        }
        let max_staleness = self.settings.max_staleness;
        let decide = |entry: &mut Entry| {
            let is_same = entry.algorithm == *hit.algorithm;
            is_same.then(|| entry.counter.decide(&entry.algorithm, hit, now, max_staleness)).flatten()
        };
        self.entities.find(identity, decide).flatten()
    }

    /// Merges the outcome of a store call into the counter, which is created if it is unknown and there is room.
    pub(super) fn merge(
        &self,
        identity: u128,
        hit: &Hit<'_>,
        outcome: &StepOutcome,
        called_at: Duration,
        now: Duration,
    ) {
        let new = || {
            Some(Entry {
                key: hit.key.into(),
                identity,
                per_second: hit.per_second,
                algorithm: *hit.algorithm,
                counter: EventualCounter::new(outcome, called_at),
            })
        };
        let _ = self.entities.with_or_insert(identity, new, |entry| {
            entry.algorithm = *hit.algorithm;
            entry.counter.merge(hit.algorithm, outcome, called_at, now);
        });
    }

    /// Returns the reports that are due, and removes idle counters.
    ///
    /// Each counter's turn comes once per sync interval, shard by shard, so that the reports are spread over the
    /// interval.
    pub(super) fn sweep(&self, now: Duration) -> Vec<StoreCall> {
        let idle_since = now.saturating_sub(2 * self.settings.sync);
        let turn = (now.as_micros() * SHARDS as u128 / self.settings.sync.as_micros().max(1)) as usize;
        let last_turn = self.last_turn.swap(turn, Relaxed);
        let mut calls = Vec::new();
        self.entities.retain_in_shards(last_turn.max(turn.saturating_sub(SHARDS))..turn, |entry| {
            calls.extend(entry.counter.begin_report(&entry.algorithm, now).map(|hits| entry.store_call(hits)));
            !entry.counter.is_idle(idle_since)
        });
        calls
    }

    /// Removes all counters, and returns the reports of their pending hits.
    pub(super) fn drain(&self, now: Duration) -> Vec<StoreCall> {
        let mut calls = Vec::new();
        self.entities.retain(|entry| {
            let pending = entry.counter.drain(&entry.algorithm, now);
            calls.extend(pending.map(|hits| entry.store_call(hits)));
            false
        });
        calls
    }

    /// Completes a report and returns the number of its hits that the store may not have counted.
    pub(super) fn finish_report(
        &self,
        call: &StoreCall,
        answer: Result<StepOutcome, StoreError>,
        called_at: Duration,
        now: Duration,
    ) -> u64 {
        let finish = |entry: &mut Entry| entry.counter.finish_report(&entry.algorithm, answer, called_at, now);
        self.entities.find(call.identity, finish).unwrap_or_default()
    }
}

impl Entry {
    /// Returns the store call that reports `hits` hits, or reads the counter for 0.
    fn store_call(&self, hits: u64) -> StoreCall {
        StoreCall {
            identity: self.identity,
            key: self.key.clone(),
            per_second: self.per_second,
            algorithm: self.algorithm.recording(),
            action: if hits > 0 { Action::Take } else { Action::Peek },
            hits,
        }
    }
}
