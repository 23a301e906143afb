//! Counts the overrides without effect: they name a domain, a rule or a plan that the rules in force do not have.

use std::{
    sync::{
        Arc, Weak,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::time::interval;

use super::OverrideSync;
use crate::engine::{
    Snapshot,
    overrides::{KnownNames, Origin, Target},
};

/// Time between two counts, if the rules or the overrides have changed.
pub(crate) const COUNT_INTERVAL: Duration = Duration::from_secs(15);

/// Numbers of overrides without effect, by kind of target.
#[derive(Default)]
pub(super) struct WithoutEffect {
    limits: AtomicU64,
    plans: AtomicU64,
    switches: AtomicU64,
}

/// Numbers of overrides without effect in one snapshot, by kind of target.
#[derive(Debug, Default, PartialEq, Eq)]
struct Counts {
    limits: u64,
    plans: u64,
    switches: u64,
}

impl WithoutEffect {
    /// Returns the number for each kind of target, with the name of the kind.
    pub(super) fn by_kind(&self) -> [(&'static str, u64); 3] {
        [
            ("limit", self.limits.load(Relaxed)),
            ("plan", self.plans.load(Relaxed)),
            ("switch", self.switches.load(Relaxed)),
        ]
    }

    fn set(&self, counts: &Counts) {
        self.limits.store(counts.limits, Relaxed);
        self.plans.store(counts.plans, Relaxed);
        self.switches.store(counts.switches, Relaxed);
    }
}

impl OverrideSync {
    /// Counts the overrides without effect after each change. Never returns.
    pub async fn follow_names(self: Arc<Self>) {
        let mut tick = interval(COUNT_INTERVAL);
        let mut counted = Weak::<Snapshot>::new();
        loop {
            tick.tick().await;
            let snapshot = self.context.in_force.snapshot().load_full();
            if counted.as_ptr() == Arc::as_ptr(&snapshot) {
                continue;
            }
            counted = Arc::downgrade(&snapshot);
            // With a million overrides this takes a second.
            if let Ok(counts) = tokio::task::spawn_blocking(move || count(&snapshot)).await {
                self.without_effect.set(&counts);
            }
        }
    }
}

fn count(snapshot: &Snapshot) -> Counts {
    let mut counts = Counts::default();
    if snapshot.awaits_rules() {
        return counts;
    }
    let overrides = snapshot.overrides();
    let mut names = KnownNames::new(snapshot.rule_set());
    let own_switches = [Origin::File, Origin::Instance].into_iter().flat_map(|origin| overrides.switches(origin));
    for entry in overrides.iter().chain(own_switches.cloned()) {
        if names.name_without_effect(&entry.target, &entry.value).is_none() {
            continue;
        }
        match entry.target {
            Target::Limit { .. } => counts.limits += 1,
            Target::Plan { .. } => counts.plans += 1,
            Target::Switch(_) => counts.switches += 1,
            // Until it begins, the rules can get its names.
            Target::Rules(_) | Target::Planned { .. } => {}
        }
    }
    counts
}
