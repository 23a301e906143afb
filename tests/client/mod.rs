//! The client crate.

/// The first examples in the documents.
mod documents;
/// The tower layers.
mod layer;
/// The log of the clients.
mod log;
/// Verdicts before the deadline during every kind of failure.
mod outage;
/// Clients that are paused.
mod pauses;
/// Permits: slots of a concurrency limit.
mod permits;
/// Checks for which the service has no rule, and headers that the client computes.
mod unmatched;
/// The content of verdicts, the deny cache, and grants.
pub(crate) mod verdicts;
/// Callers that wait until they are allowed.
mod waiting;
