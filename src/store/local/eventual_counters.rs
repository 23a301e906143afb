//! The counters that this instance decides by itself, and tells the store of a little later.

use std::{
    sync::atomic::{AtomicUsize, Ordering::Relaxed},
    time::Duration,
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    entities::{Entities, SHARDS},
    eventual_counter::EventualCounter,
    store_call::StoreCall,
};
use crate::{
    algorithm::{Action, Algorithm, Consistency, Decision},
    store::{Hit, StepOutcome, StoreError},
};

/// How counting in arrears works.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// So often a counter tells the store what has passed, and hears of others.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub sync: Duration,
    /// For so long it decides without having heard anything.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub max_staleness: Duration,
    /// Counters at most, about 400 bytes each; 0: none, every hit asks the store.
    pub max_counters: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { sync: Duration::from_millis(200), max_staleness: Duration::from_secs(60), max_counters: 65_536 }
    }
}

pub(super) struct EventualCounters {
    entities: Entities<Entry>,
    /// Whose turn it was last.
    sync_turn: AtomicUsize,
    settings: Settings,
}

struct Entry {
    key: Box<[u8]>,
    identity: u128,
    per_second: bool,
    algorithm: Algorithm,
    replica: EventualCounter,
}

impl EventualCounters {
    /// `None` where nothing is to be counted in arrears.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        let counts = settings.max_counters > 0 && !settings.sync.is_zero();
        counts.then(|| Self {
            entities: Entities::new(settings.max_counters),
            sync_turn: AtomicUsize::new(0),
            settings: settings.clone(),
        })
    }

    /// Decides a hit, if its counter is known.
    pub(super) fn decide(&self, identity: u128, hit: &Hit<'_>, now: Duration) -> Option<Decision> {
        // What is given back is given to the counter itself.
        if hit.consistency != Consistency::Eventual || hit.action.releases() {
            return None;
        }
        let outage = self.settings.max_staleness;
        let decide = |entity: &mut Entry| {
            let is_same = entity.algorithm == *hit.algorithm;
            is_same.then(|| entity.replica.decide(&entity.algorithm, hit, now, outage)).flatten()
        };
        self.entities.find(identity, decide).flatten()
    }

    /// The store has been asked itself: the counter is known from now on.
    pub(super) fn merge(&self, identity: u128, hit: &Hit<'_>, counted: &StepOutcome, asked: Duration, now: Duration) {
        let new = || {
            Some(Entry {
                key: hit.key.into(),
                identity,
                per_second: hit.per_second,
                algorithm: *hit.algorithm,
                replica: EventualCounter::new(counted, asked),
            })
        };
        let _ = self.entities.with(identity, new, |entity| {
            entity.algorithm = *hit.algorithm;
            entity.replica.merge(hit.algorithm, counted, asked, now);
        });
    }

    /// What is to be told by now; and counters that nobody asks for are forgotten. Each counter has its turn once in a
    /// sync: they come in the order in which they are kept, so that not all are told at once.
    pub(super) fn sweep(&self, now: Duration) -> Vec<StoreCall> {
        let forgotten = now.saturating_sub(2 * self.settings.sync);
        let turn = (now.as_micros() * SHARDS as u128 / self.settings.sync.as_micros().max(1)) as usize;
        let before = self.sync_turn.swap(turn, Relaxed);
        let mut errands = Vec::new();
        self.entities.retain_of(before.max(turn.saturating_sub(SHARDS))..turn, |entity| {
            errands.extend(entity.replica.report(&entity.algorithm, now).map(|hits| entity.errand(hits)));
            !entity.replica.is_idle(forgotten)
        });
        errands
    }

    /// All that is untold, at the end.
    pub(super) fn drain(&self, now: Duration) -> Vec<StoreCall> {
        let mut errands = Vec::new();
        self.entities.retain(|entity| {
            let rest = entity.replica.unreported(&entity.algorithm, now);
            errands.extend(rest.map(|hits| entity.errand(hits)));
            false
        });
        errands
    }

    /// What the store says to that; how many hits it has perhaps not counted.
    pub(super) fn report_result(
        &self,
        errand: &StoreCall,
        answer: Result<StepOutcome, StoreError>,
        asked: Duration,
        now: Duration,
    ) -> u64 {
        let told = |entity: &mut Entry| entity.replica.reported(&entity.algorithm, answer, asked, now);
        self.entities.find(errand.identity, told).unwrap_or_default()
    }
}

impl Entry {
    fn errand(&self, hits: u64) -> StoreCall {
        StoreCall {
            identity: self.identity,
            key: self.key.clone(),
            per_second: self.per_second,
            algorithm: self.algorithm.counting(),
            action: if hits > 0 { Action::Take } else { Action::Peek },
            hits,
        }
    }
}
