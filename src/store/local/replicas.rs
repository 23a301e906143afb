//! The counters that this instance decides by itself, and tells the store of a little later.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::{entities::Entities, errand::Errand, replica::Replica};
use crate::{
    algorithm::{Action, Algorithm, Consistency, Decision},
    store::{Counted, Hit, StoreError},
};

/// How counting in arrears works.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// So often a counter tells the store what has passed, and hears of others; up to a quarter sooner.
    #[serde(with = "crate::duration")]
    pub sync: Duration,
    /// For so long it decides without having heard anything.
    #[serde(with = "crate::duration")]
    pub outage: Duration,
    /// Counters at most, about 400 bytes each; 0: none, every hit asks the store.
    pub max_entities: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { sync: Duration::from_millis(200), outage: Duration::from_secs(60), max_entities: 65_536 }
    }
}

pub(super) struct Replicas {
    entities: Entities<Entity>,
    settings: Settings,
}

struct Entity {
    key: Box<[u8]>,
    identity: u128,
    per_second: bool,
    algorithm: Algorithm,
    replica: Replica,
    /// Each tells at times of its own.
    interval: Duration,
}

impl Replicas {
    /// `None` where nothing is to be counted in arrears.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        let counts = settings.max_entities > 0 && !settings.sync.is_zero();
        counts.then(|| Self { entities: Entities::new(settings.max_entities), settings: settings.clone() })
    }

    /// Decides a hit, if its counter is known.
    pub(super) fn decide(&self, identity: u128, hit: &Hit<'_>, now: Duration) -> Option<Decision> {
        // What is given back is given to the counter itself.
        if hit.consistency != Consistency::Eventual || hit.action.gives() {
            return None;
        }
        let outage = self.settings.outage;
        let decide = |entity: &mut Entity| {
            let is_same = entity.algorithm == *hit.algorithm;
            is_same.then(|| entity.replica.decide(&entity.algorithm, hit, now, outage)).flatten()
        };
        self.entities.find(identity, decide).flatten()
    }

    /// The store has been asked itself: the counter is known from now on.
    pub(super) fn learn(&self, identity: u128, hit: &Hit<'_>, counted: &Counted, asked: Duration, now: Duration) {
        let new = || {
            let jitter = self.settings.sync / 4 * u32::from(identity as u8) / 256;
            Some(Entity {
                key: hit.key.into(),
                identity,
                per_second: hit.per_second,
                algorithm: *hit.algorithm,
                replica: Replica::new(counted, asked),
                interval: self.settings.sync - jitter,
            })
        };
        let _ = self.entities.with(identity, new, |entity| {
            entity.algorithm = *hit.algorithm;
            entity.replica.hear(hit.algorithm, counted, asked, now);
        });
    }

    /// What is to be told by now; and counters that nobody asks for are forgotten.
    pub(super) fn sweep(&self, now: Duration) -> Vec<Errand> {
        let forgotten = now.saturating_sub(2 * self.settings.sync);
        let mut errands = Vec::new();
        self.entities.retain(|entity| {
            errands.extend(entity.tell(now, entity.interval));
            !entity.replica.is_idle(forgotten)
        });
        errands
    }

    /// All that is untold, at the end.
    pub(super) fn take_all(&self, now: Duration) -> Vec<Errand> {
        let mut errands = Vec::new();
        self.entities.retain(|entity| {
            let rest = entity.replica.rest(&entity.algorithm, now);
            errands.extend(rest.map(|hits| entity.errand(hits)));
            false
        });
        errands
    }

    /// What the store says to that; how many hits it has perhaps not counted.
    pub(super) fn told(
        &self,
        errand: &Errand,
        answer: Result<Counted, StoreError>,
        asked: Duration,
        now: Duration,
    ) -> u64 {
        let told = |entity: &mut Entity| entity.replica.told(&entity.algorithm, answer, asked, now);
        self.entities.find(errand.identity, told).unwrap_or_default()
    }
}

impl Entity {
    fn tell(&mut self, now: Duration, interval: Duration) -> Option<Errand> {
        self.replica.tell(&self.algorithm, now, interval).map(|hits| self.errand(hits))
    }

    fn errand(&self, hits: u64) -> Errand {
        Errand {
            identity: self.identity,
            key: self.key.clone(),
            per_second: self.per_second,
            algorithm: self.algorithm.counting(),
            action: if hits > 0 { Action::Take } else { Action::Peek },
            hits,
        }
    }
}
