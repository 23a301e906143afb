//! [`Shedding`]: hits per class of a limit that classes share or that sheds, and the time since which a class is shed.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use sluicegate_algorithm::Micros;
use sluicegate_metrics::{Counter, WorkerId};
use sluicegate_rules::Labels;

/// Maximum time between two shed hits of one period of shedding.
const MAX_PAUSE: Micros = Micros::from_secs(30);

/// The outcome of hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    Allowed,
    /// Denied because the caller exceeded its limit.
    Denied,
    /// Denied because of overload.
    Shed,
}

impl Outcome {
    pub(super) const ALL: [Self; 3] = [Self::Allowed, Self::Denied, Self::Shed];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Shed => "shed",
        }
    }
}

/// Statistics of the classes of one rule. A rule without classes has one entry for all callers.
pub(crate) struct Shedding {
    pub(super) labels: Labels,
    pub(super) classes: Vec<Class>,
}

/// Statistics of one class.
pub(super) struct Class {
    pub(super) name: String,
    hits: [Counter; Outcome::ALL.len()],
    /// Start of the latest period of shedding, in microseconds.
    since: AtomicU64,
    /// Time of the last shed hit, in microseconds.
    last_shed: AtomicU64,
}

impl Shedding {
    pub(super) fn new(labels: Labels, names: impl Iterator<Item = String>, workers: usize) -> Self {
        Self { labels, classes: names.map(|name| Class::new(name, workers)).collect() }
    }

    pub(crate) fn record(&self, worker: WorkerId, class: usize, outcome: Outcome, hits: u64, now: Micros) {
        let Some(class) = self.classes.get(class) else {
            return;
        };
        class.hits[outcome as usize].add(worker, hits);
        if outcome == Outcome::Shed {
            class.record_shed(now);
        }
    }
}

impl Class {
    fn new(name: String, workers: usize) -> Self {
        Self {
            name,
            hits: std::array::from_fn(|_| Counter::new(workers)),
            since: AtomicU64::new(0),
            last_shed: AtomicU64::new(0),
        }
    }

    pub(super) fn hits(&self, outcome: Outcome) -> u64 {
        self.hits[outcome as usize].get()
    }

    /// Records that hits were shed, at most once per second: calls are frequent while shedding lasts.
    fn record_shed(&self, now: Micros) {
        let last_shed = Micros::new(self.last_shed.load(Relaxed));
        if last_shed.floor_secs() == now.floor_secs() {
            return;
        }
        if self.last_shed.swap(now.get(), Relaxed) + MAX_PAUSE.get() < now.get() {
            self.since.store(now.get(), Relaxed);
        }
    }

    /// Returns the start of the current period of shedding, or `None` if the class is not shed now.
    pub(super) fn since(&self, now: Micros) -> Option<Micros> {
        let is_shedding = self.last_shed.load(Relaxed) + MAX_PAUSE.get() >= now.get();
        if is_shedding { Some(Micros::new(self.since.load(Relaxed))) } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shedding_ends_after_a_pause_without_shed_hits() {
        let shedding = Shedding::new([].into(), std::iter::once("get".to_owned()), 1);
        let at = |second: u64| Micros::from_secs(1_000_000 + second);
        let shed = |second| shedding.record(WorkerId(0), 0, Outcome::Shed, 2, at(second));
        let since = |second| shedding.classes[0].since(at(second));
        assert_eq!(since(0), None);
        shed(0);
        shed(20);
        shed(50);
        assert_eq!((since(50), since(80), since(81)), (Some(at(0)), Some(at(0)), None));
        shedding.record(WorkerId(0), 0, Outcome::Allowed, 7, at(90));
        assert_eq!(since(90), None);
        shed(100);
        assert_eq!(since(101), Some(at(100)));
        let hits = Outcome::ALL.map(|outcome| shedding.classes[0].hits(outcome));
        assert_eq!(hits, [7, 0, 8]);
        shedding.record(WorkerId(0), 1, Outcome::Shed, 1, at(101));
    }
}
