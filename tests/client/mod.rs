//! The client crate.

/// The tower layers.
mod layer;
/// A verdict before the deadline, whatever fails.
mod outage;
/// Permits: slots of a concurrency limit.
mod permits;
/// What a verdict contains, and what is answered without a call.
pub(crate) mod verdicts;
