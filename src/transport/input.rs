//! [`Settings`] for the memory that callers can make the process hold.

use serde::{Deserialize, Serialize};

use crate::budget::{Budget, Victim};

/// Settings for the memory that callers can make the process hold, on all listeners together.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Maximum total size in bytes of incomplete input, unread responses and open streams. Half is for streams.
    /// Above the maximum, the oldest input or response is dropped, or a stream of the connection with the most streams.
    pub max_bytes: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_bytes: 64 << 20 }
    }
}

impl Settings {
    /// Creates the budget for unfinished input and unread responses.
    pub(crate) fn budget(&self) -> Budget {
        Budget::new("input", self.max_bytes - self.max_bytes / 2, Victim::Oldest)
    }

    /// Creates the budget for open streams.
    pub(crate) fn streams(&self) -> Budget {
        Budget::new("streams", self.max_bytes / 2, Victim::OldestOfLargestShare)
    }
}
