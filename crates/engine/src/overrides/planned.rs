//! [`PlannedOverrides`]: the overrides that begin later, by target and by time. Decisions do not read them.

use std::collections::{BTreeMap, BTreeSet};

use sluicegate_algorithm::Micros;

use super::{Override, Target};

/// Maximum number of planned overrides. Each change of one copies the list of all.
pub(super) const MAX_PLANNED: usize = if cfg!(test) { 100 } else { 10_000 };

/// Overrides with [`Target::Planned`].
#[derive(Clone, Default)]
pub(super) struct PlannedOverrides {
    /// The overrides by the target that they have after their beginning, and by the second of the beginning.
    by_target: BTreeMap<(Target, u32), Override>,
    by_time: BTreeSet<(u32, Target)>,
}

impl PlannedOverrides {
    pub(super) fn len(&self) -> usize {
        self.by_target.len()
    }

    /// Adds or replaces an override. Ignores one that is not planned.
    pub(super) fn insert(&mut self, planned: Override) {
        if let Target::Planned { from_seconds, target } = &planned.target {
            let (from_seconds, target) = (*from_seconds, (**target).clone());
            self.by_time.insert((from_seconds, target.clone()));
            self.by_target.insert((target, from_seconds), planned);
        }
    }

    /// Removes the override of a planned target.
    pub(super) fn remove(&mut self, target: &Target) {
        if let Target::Planned { from_seconds, target } = target {
            self.by_time.remove(&(*from_seconds, (**target).clone()));
            self.by_target.remove(&((**target).clone(), *from_seconds));
        }
    }

    /// Returns the override of a planned target.
    pub(super) fn get(&self, target: &Target) -> Option<&Override> {
        let Target::Planned { from_seconds, target } = target else {
            return None;
        };
        self.by_target.get(&((**target).clone(), *from_seconds))
    }

    /// Returns all overrides, ordered by target.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Override> {
        self.by_target.values()
    }

    /// Returns the overrides that a target will have, earliest first.
    pub(super) fn of(&self, target: &Target) -> impl Iterator<Item = &Override> {
        let first = (target.clone(), 0);
        let last = (target.clone(), u32::MAX);
        self.by_target.range(first..=last).map(|(_, planned)| planned)
    }

    /// Returns the overrides that have begun, earliest first.
    pub(super) fn due(&self, now: Micros) -> impl Iterator<Item = &Override> {
        let begun = self.by_time.iter().take_while(move |(from, _)| u64::from(*from) <= now.floor_secs());
        begun.filter_map(|(from, target)| self.by_target.get(&(target.clone(), *from)))
    }

    /// Returns the earliest beginning after `now`.
    pub(super) fn next(&self, now: Micros) -> Option<Micros> {
        let (from, _) = self.by_time.iter().find(|(from, _)| u64::from(*from) > now.floor_secs())?;
        Some(Micros::from_secs((*from).into()))
    }
}
