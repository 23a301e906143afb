//! [`Violation`]: a breach of the protocol by a member, and [`Violations`], the metrics of breaches.

use std::sync::Arc;

use crate::{
    metrics::{Counter, Instrument, Label, Meter, WorkerId},
    service::overrides::Ignored,
};

/// A breach of the protocol that only the called member itself can have made. The member is excluded for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Violation {
    /// A message is too large, has too many items, or cannot be decoded.
    #[error("message that no member sends")]
    Message,
    /// A copy of the counters has pages without counters, or does not end.
    #[error("copy of the counters without an end")]
    Copy,
    /// The overrides have more pages than a member can have, or pages without contents.
    #[error("overrides without an end")]
    Overrides,
    /// The epoch changes more often than a process can start.
    #[error("epoch that changes all the time")]
    Epoch,
}

/// Numbers of violations, by kind.
pub(super) struct Violations {
    counters: [Counter; KINDS.len()],
}

/// Names of the kinds in the metric. The first four are those of [`Violation`]: the member is excluded. For the others,
/// only the value or the call is ignored.
const KINDS: [&str; 9] =
    ["message", "copy", "overrides", "epoch", "version", "rule_set", "override", "override_bytes", "address"];

impl Violations {
    pub(super) fn new() -> Arc<Self> {
        Arc::new(Self { counters: std::array::from_fn(|_| Counter::new(1)) })
    }

    pub(super) fn add(&self, violation: Violation) {
        self.add_kind(
            match violation {
                Violation::Message => 0,
                Violation::Copy => 1,
                Violation::Overrides => 2,
                Violation::Epoch => 3,
            },
            1,
        );
    }

    /// Counts values that were ignored.
    pub(super) fn add_ignored(&self, ignored: &Ignored) {
        self.add_kind(4, ignored.versions);
        self.add_kind(5, ignored.rule_sets);
        self.add_kind(6, ignored.overrides);
        self.add_kind(7, ignored.over_budget);
    }

    /// Counts a call that names one more address than its host can have.
    pub(super) fn add_address(&self) {
        self.add_kind(8, 1);
    }

    fn add_kind(&self, kind: usize, count: u64) {
        self.counters[kind].add(WorkerId(0), count);
    }

    /// Registers the metric.
    pub(super) fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "sluicegate_cluster_violations_total",
            "Messages and values of peers that were rejected, by kind",
            move |observer| {
                for (kind, counter) in KINDS.into_iter().zip(&this.counters) {
                    observer.observe(counter.get(), [Label::new("kind", kind)]);
                }
            },
        ));
    }
}
