//! [`Options`]: settings that change the meaning of rule files.

use std::num::NonZeroU32;

/// Settings that change the meaning of rule files.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Whether several files may define one domain, so that their descriptors are combined.
    pub merge_domains: bool,
    /// Whether domains without `charge` take a request's hits from all of its limits or from none.
    pub charge_all: bool,
    /// Number of instances among which a limit is divided if each instance decides on its own.
    pub instances: NonZeroU32,
    /// Whether the counters are in memory and exchanged with other instances. Limits whose counters are not exchanged
    /// then have a warning.
    pub peers: bool,
    /// Whether diagnostics include notes.
    pub notes: bool,
}

impl Default for Options {
    fn default() -> Self {
        Self { merge_domains: false, charge_all: false, instances: NonZeroU32::MIN, peers: false, notes: false }
    }
}
