//! What a limit that is shared by classes, or that sheds, does to each of them.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::{
    algorithm::Micros,
    metrics::{Counter, WorkerId},
    rules::Labels,
};

/// Who is shed again within this time has been shed all along.
const PAUSE: Micros = Micros::from_secs(30);

/// What became of hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::engine) enum Outcome {
    Allowed,
    /// For what their caller has had.
    Denied,
    /// For overload.
    Shed,
}

impl Outcome {
    pub(super) const ALL: [Self; 3] = [Self::Allowed, Self::Denied, Self::Shed];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Allowed => "passed",
            Self::Denied => "refused",
            Self::Shed => "shed",
        }
    }
}

/// The classes of one rule; of one without classes, all.
pub(in crate::engine) struct Shedding {
    pub(super) labels: Labels,
    pub(super) classes: Vec<Class>,
}

/// One of them.
pub(super) struct Class {
    pub(super) name: String,
    hits: [Counter; Outcome::ALL.len()],
    /// When the shedding began that was still going on at `last`, in microseconds.
    since: AtomicU64,
    last: AtomicU64,
}

impl Shedding {
    pub(super) fn new(labels: Labels, names: impl Iterator<Item = String>, workers: usize) -> Self {
        let class = |name| Class {
            name,
            hits: std::array::from_fn(|_| Counter::new(workers)),
            since: AtomicU64::new(0),
            last: AtomicU64::new(0),
        };
        Self { labels, classes: names.map(class).collect() }
    }

    pub(in crate::engine) fn decided(&self, worker: WorkerId, class: usize, outcome: Outcome, hits: u64, now: Micros) {
        let Some(class) = self.classes.get(class) else {
            return;
        };
        class.hits[outcome as usize].add(worker, hits);
        if outcome == Outcome::Shed {
            class.shed(now);
        }
    }
}

impl Class {
    pub(super) fn hits(&self, outcome: Outcome) -> u64 {
        self.hits[outcome as usize].get()
    }

    /// To the second: there are many of these while it lasts.
    fn shed(&self, now: Micros) {
        let last = Micros::new(self.last.load(Relaxed));
        if last.floor_secs() == now.floor_secs() {
            return;
        }
        if self.last.swap(now.get(), Relaxed) + PAUSE.get() < now.get() {
            self.since.store(now.get(), Relaxed);
        }
    }

    /// When the shedding began that goes on now.
    pub(super) fn since(&self, now: Micros) -> Option<Micros> {
        let goes_on = self.last.load(Relaxed) + PAUSE.get() >= now.get();
        goes_on.then(|| Micros::new(self.since.load(Relaxed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shedding_goes_on_until_nobody_is_shed_for_a_while() {
        let shedding = Shedding::new([].into(), std::iter::once("get".to_owned()), 1);
        let at = |second: u64| Micros::from_secs(1_000_000 + second);
        let shed = |second| shedding.decided(WorkerId(0), 0, Outcome::Shed, 2, at(second));
        let since = |second| shedding.classes[0].since(at(second));
        assert_eq!(since(0), None);
        shed(0);
        shed(20);
        shed(50);
        assert_eq!((since(50), since(80), since(81)), (Some(at(0)), Some(at(0)), None));
        shedding.decided(WorkerId(0), 0, Outcome::Allowed, 7, at(90));
        assert_eq!(since(90), None);
        shed(100);
        assert_eq!(since(101), Some(at(100)));
        let hits = Outcome::ALL.map(|outcome| shedding.classes[0].hits(outcome));
        assert_eq!(hits, [7, 0, 8]);
        shedding.decided(WorkerId(0), 1, Outcome::Shed, 1, at(101));
    }
}
