//! Overrides that begin later. Each instance puts them in force at their second, by its own clock and without the store.
//!
//! The overrides of a replication are those of the store, with planned ones beside those of their targets. A snapshot
//! has what follows from them at a time ([`in_force_at`]): a planned override that has begun replaces that of its target.
//! One instance then writes this to the store ([`Context::beginnings`]), or each instance to its own journal.

use std::{collections::BTreeMap, time::Duration};

use super::{ChangeInfo, ChangeRequest, POLL_INTERVAL, change::NewWrite, context::Context, format};
use crate::{
    algorithm::Micros,
    engine::{Override, Overrides, overrides::Target},
    rules::Options,
    store::overrides::MAX_CHANGES,
};

/// Maximum number of planned overrides in one change. Each is removed, and sets an override.
const MAX_BEGINNINGS: usize = MAX_CHANGES / 2;

/// The overrides of the last snapshot.
#[derive(Default)]
pub(super) struct Published {
    /// The overrides of the store.
    stored: Overrides,
    /// Number of planned overrides that had begun.
    begun: usize,
}

/// The writes that follow from planned overrides that have begun. Each can be repeated.
#[derive(Debug, Default)]
pub(super) struct Beginnings {
    /// Sets the overrides under their own targets.
    pub(super) set: Vec<NewWrite>,
    /// Removes the planned ones. Must not be executed before `set`.
    pub(super) remove: Vec<NewWrite>,
}

impl Beginnings {
    pub(super) fn is_empty(&self) -> bool {
        self.remove.is_empty()
    }
}

/// Returns the overrides with those in force that have begun until `now`.
pub(super) fn in_force_at(stored: &Overrides, now: Micros, options: Options) -> Overrides {
    let mut in_force = stored.clone();
    in_force.begin_planned(now, options);
    in_force
}

impl Context {
    /// Puts overrides of the store in force, with the planned ones that have begun.
    pub(super) fn publish(&self, stored: &Overrides) {
        let mut published = self.published.lock();
        published.stored = stored.clone();
        self.publish_again(&mut published);
    }

    /// Publishes a snapshot if planned overrides have begun since the last one, or if a changed clock is before the
    /// beginning of some.
    pub(super) fn publish_beginnings(&self) {
        let mut published = self.published.lock();
        if published.stored.due(self.clock.now()).count() != published.begun {
            self.publish_again(&mut published);
        }
    }

    fn publish_again(&self, published: &mut Published) {
        let now = self.clock.now();
        published.begun = published.stored.due(now).count();
        self.in_force.set_overrides(in_force_at(&published.stored, now, self.options));
    }

    /// Returns the time until the next planned override begins, or until the clock must be read again because it may have
    /// been changed.
    pub(super) fn until_next_beginning(&self) -> Duration {
        let now = self.clock.now();
        let Some(next) = self.published.lock().stored.next_beginning(now) else {
            return POLL_INTERVAL;
        };
        let left = Duration::from_micros(next.get().saturating_sub(now.get()));
        left.clamp(Duration::from_millis(1), POLL_INTERVAL)
    }

    /// Returns the writes for planned overrides that have begun: for the targets of some requests, or for those that began
    /// first.
    pub(super) fn beginnings(&self, stored: &Overrides, requests: Option<&[ChangeRequest]>) -> Beginnings {
        let now = self.clock.now();
        let mut by_target: BTreeMap<&Target, Vec<&Override>> = BTreeMap::new();
        let mut count = 0;
        for planned in stored.due(now) {
            let target = planned.target.begun();
            if requests.is_some_and(|requests| !concern(requests, target)) {
                continue;
            }
            by_target.entry(target).or_default().push(planned);
            count += 1;
            if count == MAX_BEGINNINGS {
                break;
            }
        }
        let mut beginnings = Beginnings::default();
        for (target, planned) in by_target {
            beginnings.remove.extend(planned.iter().map(|planned| NewWrite::removal(planned)));
            if let Some(begun) = planned.last().and_then(|latest| latest.begun()) {
                beginnings.set.extend(self.beginning(stored, target, begun));
            }
        }
        beginnings
    }

    /// Returns the write that sets an override that has begun; `None` if its target has it, or a newer one.
    fn beginning(&self, stored: &Overrides, target: &Target, begun: Override) -> Option<NewWrite> {
        if stored.is_set_after(target, begun.at) {
            return None;
        }
        if let Err(error) = stored.can_put(&begun, self.options) {
            self.note_unreadable(&target.to_string(), &error.to_string());
            return None;
        }
        let mut version = 0;
        if let Some(before) = stored.get(target) {
            if format::write(&before) == format::write(&begun) {
                return None;
            }
            version = before.version;
        }
        Some(NewWrite { target: target.clone(), entry: Some(begun), expected: Some(version) })
    }

    /// Returns the author of a change that puts planned overrides in force. The overrides keep their own authors.
    pub(super) fn beginning_info(&self) -> ChangeInfo {
        ChangeInfo { author: "sluicegate".into(), reason: "began as planned".into(), at: self.clock.now().get() }
    }
}

/// Returns whether one of the requests changes a target, which is not that of a planned override.
fn concern(requests: &[ChangeRequest], target: &Target) -> bool {
    requests.iter().any(|request| request.target.begun() == target)
}
