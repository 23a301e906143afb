//! Fuzz target: the report of an instance, which other instances read from Redis.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use super::instances;

/// Reads a report and adds it up with itself.
pub fn activity_report(input: &[u8]) {
    if let Some(report) = instances::decode(input) {
        let _ = instances::sum([&report, &report].into_iter());
    }
}
