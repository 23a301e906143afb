//! [`Event`]: an event of a scenario and its parameters.

use std::collections::HashSet;

use sluicegate::store::peers::{Batch, CounterCopy};

use super::Knowledge;

/// A copy of the counters in transit, and the models of its source.
pub(super) struct Copy {
    pub(super) source: usize,
    pub(super) after: Option<u64>,
    pub(super) positions: Vec<(u64, u64)>,
    pub(super) counters: Vec<CounterCopy>,
    pub(super) known: HashSet<usize>,
    pub(super) knowledge: [Knowledge; 2],
}

pub(super) enum Event {
    Request,
    Publish(usize),
    PullAll(usize),
    Pull {
        from: usize,
        to: usize,
        after: u64,
    },
    Batch {
        from: usize,
        to: usize,
        batch: Batch,
    },
    /// A pull is answered with [`Pull::Copy`].
    CopyNeeded {
        member: usize,
        source: usize,
        after: u64,
    },
    /// `after` is the position at which increments are missing, unless the member joins.
    CopyRequest {
        from: usize,
        to: usize,
        after: Option<u64>,
    },
    CopyParts {
        from: usize,
        to: usize,
        positions: Vec<(u64, u64)>,
        after: Option<u64>,
    },
    CopyArrives {
        to: usize,
        copy: Box<Copy>,
    },
    /// A copy has not arrived, and another member is tried.
    CopyTimeout {
        member: usize,
        attempt: u32,
    },
    Disturb,
    /// A lying member sends a message.
    Lie,
}

impl Event {
    /// Returns the member that handles the event.
    pub(super) fn member(&self) -> Option<usize> {
        match self {
            Self::Publish(member)
            | Self::PullAll(member)
            | Self::CopyNeeded { member, .. }
            | Self::CopyTimeout { member, .. } => Some(*member),
            Self::Pull { to, .. }
            | Self::Batch { to, .. }
            | Self::CopyRequest { to, .. }
            | Self::CopyParts { to, .. }
            | Self::CopyArrives { to, .. } => Some(*to),
            Self::Request | Self::Disturb | Self::Lie => None,
        }
    }
}
