//! Fuzz target: rules from a control plane.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use prost::Message;
use sluicegate_proto::ratelimit::config::ratelimit::v3::RateLimitConfig;

use super::convert;
use crate::rules::{Options, compile};

/// Converts and compiles a `RateLimitConfig`. The reasons of a rejection must not refer to lines, which the control plane
/// does not know.
pub fn xds_resource(input: &[u8]) {
    let Ok(config) = RateLimitConfig::decode(input) else {
        return;
    };
    let file = convert::file(&config);
    if let Err(mut diagnostics) = compile(&[file], Options::default()) {
        convert::locate(&mut diagnostics, &[config]);
        assert!(!diagnostics.is_empty());
        assert!(diagnostics.iter().all(|diagnostic| diagnostic.location.line == 0), "{diagnostics:?}");
    }
}
