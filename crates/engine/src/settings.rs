//! [`Settings`] that apply to all rules.

use std::{num::NonZeroU32, path::PathBuf};

use serde::{Deserialize, Serialize};
use sluicegate_rules::FailurePolicy;

use super::ValueHash;

/// Settings that apply to all rules.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Failure policy of rules without `on_error`.
    pub on_error: FailurePolicy,
    /// Deny nothing, and count the requests that would have been denied.
    pub shadow_mode: bool,
    /// Deny a request only if all of its rules are over their limits, as if each had `quota_mode: true`.
    pub quota_mode: bool,
    /// Share of a limit above which hits are counted as near the limit.
    pub near_limit_ratio: f32,
    /// File with a secret key of at least 16 bytes. If set, names of counters and the log contain 128 bits of a hash with
    /// this key instead of the values of entries.
    pub hash_key_file: Option<PathBuf>,
    /// The hash of values, if they are hashed.
    #[serde(skip)]
    pub value_hash: Option<ValueHash>,
    /// Number of instances among which a limit is divided while each instance decides alone.
    #[serde(skip, default = "one")]
    pub instances: NonZeroU32,
    /// Whether verdicts contain the metadata of the rules.
    #[serde(skip)]
    pub metadata: bool,
    /// Whether verdicts contain the names of the rules' policies.
    #[serde(skip)]
    pub policies: bool,
}

const fn one() -> NonZeroU32 {
    NonZeroU32::MIN
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            instances: one(),
            on_error: FailurePolicy::Error,
            shadow_mode: false,
            quota_mode: false,
            near_limit_ratio: 0.8,
            hash_key_file: None,
            value_hash: None,
            metadata: false,
            policies: false,
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !(0.0..=1.0).contains(&self.near_limit_ratio) {
            return Some("decisions.near_limit_ratio must be between 0 and 1");
        }
        None
    }
}
