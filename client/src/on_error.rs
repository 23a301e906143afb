//! [`OnError`]: the verdict about requests that the service did not decide.

/// Verdict about requests that the service did not decide in time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// The request is allowed: an outage of the rate limit service is no outage of its callers.
    #[default]
    Allow,
    /// The request is denied.
    Deny,
}
