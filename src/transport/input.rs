//! [`Settings`] for the memory that callers can make the process hold.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::budget::Budget;

/// Settings for the memory that callers can make the process hold, on all listeners together.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Maximum size in bytes of all input that is not complete, and of all responses that are not read. Above it, the
    /// oldest is dropped.
    pub max_bytes: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_bytes: 128 << 20 }
    }
}

impl Settings {
    pub(crate) fn budget(&self) -> Budget {
        Budget::new("input", self.max_bytes)
    }
}
