//! The client crate.

/// The tower layers.
mod layer;
/// Verdicts before the deadline during every kind of failure.
mod outage;
/// Clients that are paused.
mod pauses;
/// Permits: slots of a concurrency limit.
mod permits;
/// The content of verdicts, the deny cache, and grants.
pub(crate) mod verdicts;
