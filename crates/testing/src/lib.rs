#![doc = include_str!("../README.md")]
#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "only tests use this crate")]

pub mod model_checker;
pub mod test_log;
