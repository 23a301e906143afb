//! [`RecentChanges`]: the last changes, for the audit log and for other instances.

use std::collections::VecDeque;

use crate::store::overrides::Change;

/// Maximum number of recent changes.
pub(super) const MAX_RECENT_CHANGES: usize = 1_000;

/// The last changes, the oldest first.
#[derive(Default)]
pub(super) struct RecentChanges {
    changes: VecDeque<Change>,
    /// Number of changes that were ever added.
    position: u64,
}

impl RecentChanges {
    /// Adds a change, and drops the oldest one if there are too many.
    pub(super) fn push(&mut self, change: Change) {
        if self.changes.len() >= MAX_RECENT_CHANGES {
            self.changes.pop_front();
        }
        self.changes.push_back(change);
        self.position += 1;
    }

    /// Replaces the changes by those of a file that was read again. Earlier positions are no longer available.
    pub(super) fn replace(&mut self, next: Self) {
        self.position += next.changes.len() as u64 + 1;
        self.changes = next.changes;
    }

    /// Returns the number of changes that were ever added.
    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// Returns the changes after a position; `None` if they are no longer available.
    pub(super) fn after(&self, position: u64) -> Option<impl Iterator<Item = &Change>> {
        let missing = usize::try_from(self.position.checked_sub(position)?).ok()?;
        let skipped = self.changes.len().checked_sub(missing)?;
        Some(self.changes.iter().skip(skipped))
    }

    /// Returns all changes, the oldest first.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Change> {
        self.changes.iter()
    }

    /// Returns the version of the oldest change; 0 if none has been dropped.
    pub(super) fn oldest_version(&self) -> u64 {
        if self.changes.len() < MAX_RECENT_CHANGES {
            return 0;
        }
        self.changes.iter().map(|change| change.version).min().unwrap_or_default()
    }
}
