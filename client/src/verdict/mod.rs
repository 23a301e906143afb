//! [`Verdict`]: the decision about a request, its decider, and one [`Status`] per descriptor.

mod decode;
mod envoy;
mod headers;

use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

use sluicegate_proto::envoy::service::ratelimit::v3::rate_limit_response::rate_limit;
use smallvec::SmallVec;
use tonic::Code;

#[cfg(feature = "tower")]
pub(crate) use self::headers::retry_after_seconds;

/// Source of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The service.
    Server,
    /// The client's deny cache: the service denied an equal request before, and the denial is still valid. Also the
    /// source of a denial if the turn of a waiter ([`Check::max_wait`](crate::Check::max_wait)) cannot come in time.
    DenyCache,
    /// A grant: hits that the client received in advance.
    Grant,
    /// The client itself, by [`Builder::on_error`](crate::Builder::on_error), because the service did not decide in
    /// time.
    Fallback,
}

/// Grant in a response of the service: a number of hits and their lifetime.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrantOffer {
    pub(crate) hits: u64,
    pub(crate) ttl: Duration,
    pub(crate) id: Arc<str>,
}

/// Decision about a request: whether it is allowed, its source, and one [`Status`] per descriptor.
///
/// # Examples
///
/// ```no_run
/// use sluicegate_client::{Client, DecidedBy, descriptor};
///
/// # async fn example(client: Client) {
/// let verdict = client.check([descriptor! { "user" => "alice" }]).await;
/// if verdict.decided_by() == DecidedBy::Fallback {
///     eprintln!("rate limit service unavailable: {:?}", verdict.failure());
/// }
/// let status = match (verdict.allowed(), verdict.shed()) {
///     (true, _) => 200,
///     (false, true) => 503,
///     (false, false) => 429,
/// };
/// # let _ = status;
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Verdict {
    pub(crate) allowed: bool,
    pub(crate) by: DecidedBy,
    pub(crate) statuses: SmallVec<[Status; 1]>,
    /// Headers that the service sent. If it sent none, they are computed when they are needed.
    pub(crate) headers: OnceLock<Vec<(String, String)>>,
    pub(crate) failure: Option<Box<Failure>>,
    pub(crate) denial: Option<Box<Denial>>,
}

/// Status and message of the rule that denies a request. The rule's headers are in [`Verdict::headers`], with the type
/// of the message in `content-type`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Denial {
    /// HTTP status of the rule. `None` if the rule has none: the status is 429, or 503 if the denial is shed. Always
    /// `None` with Envoy's protocol, which does not contain the status.
    pub status: Option<u16>,
    /// Body of the response; empty if the rule has none.
    pub message: String,
}

/// Decision about one descriptor. Values that the service did not send are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether the descriptor is within its limit.
    pub allowed: bool,
    /// Limit that applied. `None` if the descriptor is not counted: see [`matched`](Self::matched).
    pub limit: Option<Limit>,
    /// Hits that would still be allowed.
    pub remaining: u64,
    /// Time until the full limit is available again.
    pub reset: Option<Duration>,
    /// Time until the same hits would be allowed, if the descriptor is denied. Exact to the microsecond with
    /// `sluicegate.v1`, in whole seconds rounded up with Envoy's protocol.
    pub retry_after: Option<Duration>,
    /// Time that the caller must wait before it continues, if the descriptor is allowed by a limit that shapes traffic.
    pub delay: Duration,
    /// Whether the descriptor is allowed only because the limit is soft.
    pub soft: bool,
    /// Whether the descriptor is allowed only because a resource has spare capacity. Set with `sluicegate.v1` only.
    pub elastic: bool,
    /// Whether the cause of a denial is overload, not the usage of this caller. Set by Sluicegate only.
    pub shed: bool,
    /// Whether the service's counters were unavailable, so that the rule's `on_error` decided.
    pub fallback: bool,
    /// Statuses by the other limits of a rule with several limits, in no particular order. The status itself is that of
    /// the limit that denies with the longest retry-after. If none denies, it is that of the limit of which the
    /// smallest part remains. Set with `sluicegate.v1` only.
    pub others: Vec<Status>,
    /// Whether an override of the service applied to the descriptor.
    pub(crate) overridden: bool,
    /// Whether a denial must not be cached: denied hits count against the limit, or the denial can end at any time.
    pub(crate) denial_counts: bool,
    /// Whether the service sent `reset` and `retry_after` in whole seconds, rounded up, as Envoy's protocol has them.
    pub(crate) whole_seconds: bool,
    /// Hits that the client may use without a call.
    pub(crate) grant: Option<GrantOffer>,
}

/// Limit that applied: [`requests_per_unit`](Self::requests_per_unit) requests per [`window`](Self::window).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Number of requests per window; a larger number than 4,294,967,295 is reduced to it. For a concurrency limit
    /// (with a `window` of zero): requests in flight.
    pub requests_per_unit: u32,
    /// Length of the window. A month counts as 30 days and a year as 365 days.
    pub window: Duration,
    /// Name of the limit in its rule, if it has one.
    pub name: Option<Arc<str>>,
}

/// Reason why the service did not decide a check.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// No answer within the timeout. The hits may have been counted.
    #[error("rate limit service did not answer within {0:?}")]
    Timeout(Duration),
    /// No endpoint is available: the circuit breakers of all endpoints are open, there are no endpoints, or the service
    /// closed the streams of both attempts. The check was not executed.
    #[error("no rate limit service endpoint available")]
    Unreachable,
    /// Too many checks are waiting to be sent. The check was not sent.
    #[error("too many checks are waiting for the rate limit service")]
    Overloaded,
    /// The connection failed. The hits may have been counted.
    #[error("connection to rate limit service failed: {0}")]
    Connection(String),
    /// The service answered with an error.
    #[error("rate limit service returned {code:?}: {message}")]
    Service {
        /// The gRPC status code.
        code: Code,
        /// The message of the gRPC status.
        message: String,
    },
}

/// Returns the message of a status and those of its causes.
pub(crate) fn full_message(status: &tonic::Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

impl Verdict {
    pub(crate) fn fallback(allowed: bool, failure: Failure) -> Self {
        Self { failure: Some(Box::new(failure)), ..Self::empty(allowed, DecidedBy::Fallback) }
    }

    pub(crate) fn empty(allowed: bool, by: DecidedBy) -> Self {
        Self { allowed, by, statuses: SmallVec::new(), headers: OnceLock::new(), failure: None, denial: None }
    }

    /// Returns `true` if the request is allowed.
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.allowed
    }

    /// Returns the source of the decision.
    #[must_use]
    pub fn decided_by(&self) -> DecidedBy {
        self.by
    }

    /// Returns one status per descriptor, in the same order. A fallback has no statuses.
    #[must_use]
    pub fn statuses(&self) -> &[Status] {
        &self.statuses
    }

    /// Returns `true` if the rules have a limit for at least one descriptor, or an unlimited rule.
    ///
    /// `false` means that nothing limits the request: the rules do not have its domain, or no rule has the keys of its
    /// descriptors in their order. A fallback returns `false`, because no rule was evaluated.
    #[must_use]
    pub fn matched(&self) -> bool {
        self.statuses.iter().any(Status::matched)
    }

    /// Returns the headers (name, value) to add to the response of the checked request.
    ///
    /// These are the headers that the service sent (`response.headers = true`). If it sent none, they are
    /// `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11, computed from the statuses, and
    /// `Retry-After` if the request is denied. Limits without a name are called `default` then. There are no headers if
    /// no limit applied, for instance in a fallback.
    #[must_use]
    pub fn headers(&self) -> &[(String, String)] {
        self.headers_or_computed()
    }

    /// Returns the status and the message of the rule that denies the request, if it has any.
    #[must_use]
    pub fn denial(&self) -> Option<&Denial> {
        self.denial.as_deref()
    }

    /// Returns the reason why the service did not decide, if the verdict is a fallback.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_deref()
    }

    /// Returns the status of the most restrictive limit: if the request is denied, the denying one with the longest
    /// retry-after, otherwise the one with the fewest hits remaining.
    #[must_use]
    pub fn tightest(&self) -> Option<&Status> {
        self.statuses.get(self.tightest_index()?)
    }

    /// Returns the index of [`tightest`](Self::tightest).
    fn tightest_index(&self) -> Option<usize> {
        let statuses = self.statuses.iter().enumerate();
        if !self.allowed {
            let denied = statuses.clone().filter(|(_, status)| !status.allowed);
            if let Some((index, _)) = denied.max_by_key(|(_, status)| status.retry_after) {
                return Some(index);
            }
        }
        let limited = statuses.filter(|(_, status)| status.limit.is_some());
        let (index, _) = limited.min_by_key(|(_, status)| status.remaining)?;
        Some(index)
    }

    /// Returns the smallest number of hits that any limit would still allow, or `None` if no limit applied.
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.limits().filter(|status| status.limit.is_some()).map(|status| status.remaining).min()
    }

    /// Returns the longest retry-after of the denied statuses: the time until each of their limits would allow the
    /// request. Returns `None` if no status is denied, or if no time is known.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.limits().filter(|status| !status.allowed).filter_map(|status| status.retry_after).max()
    }

    /// Returns how long an allowed request must wait before it continues: the longest delay of the limits that shape
    /// traffic.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.limits().filter(|status| status.allowed).map(|status| status.delay).max().unwrap_or_default()
    }

    /// Returns `true` if the request is denied only because of overload that the caller did not cause. The HTTP status
    /// is 503 for such a denial, and 429 for all others.
    #[must_use]
    pub fn shed(&self) -> bool {
        let mut denied = self.statuses.iter().filter(|status| !status.allowed).peekable();
        !self.allowed && denied.peek().is_some() && denied.all(|status| status.shed)
    }

    /// Returns `true` if the request is allowed only because a limit is soft.
    #[must_use]
    pub fn soft(&self) -> bool {
        self.limits().any(|status| status.soft)
    }

    /// Returns the status of each limit, also of several limits of one rule.
    fn limits(&self) -> impl Iterator<Item = &Status> {
        self.statuses.iter().flat_map(|status| std::iter::once(status).chain(&status.others))
    }
}

impl PartialEq for Verdict {
    fn eq(&self, other: &Self) -> bool {
        self.allowed == other.allowed
            && self.by == other.by
            && self.statuses == other.statuses
            && self.failure == other.failure
            // Computed headers depend on the statuses only, so it does not matter which of both have been computed.
            && self.headers() == other.headers()
    }
}

impl Status {
    /// Returns `true` if a rule applied to the descriptor: one with a [`limit`](Self::limit), one that is unlimited, or
    /// one that an operator has switched off (the latter with `sluicegate.v1` only). A limit that the request itself
    /// supplied counts, too.
    #[must_use]
    pub fn matched(&self) -> bool {
        // The service reports the largest number as the remaining hits of an unlimited rule, and 0 without a rule.
        self.limit.is_some() || self.overridden || self.remaining > 0
    }

    /// Reduces the times of a denial by its age.
    pub(crate) fn reduce_times(&mut self, age: Duration) {
        self.reset = self.reset.map(|time| time.saturating_sub(age));
        self.retry_after = self.retry_after.map(|time| time.saturating_sub(age));
    }
}

impl Limit {
    fn new(requests_per_unit: u32, unit: rate_limit::Unit, multiplier: u32, name: &str) -> Self {
        const DAY: u64 = 86_400;
        let seconds = match unit {
            rate_limit::Unit::Unknown => 0,
            rate_limit::Unit::Second => 1,
            rate_limit::Unit::Minute => 60,
            rate_limit::Unit::Hour => 3_600,
            rate_limit::Unit::Day => DAY,
            rate_limit::Unit::Week => 7 * DAY,
            rate_limit::Unit::Month => 30 * DAY,
            rate_limit::Unit::Year => 365 * DAY,
        };
        let window = Duration::from_secs(seconds.saturating_mul(multiplier.max(1).into()));
        let name = if name.is_empty() { None } else { Some(name.into()) };
        Self { requests_per_unit, window, name }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(allowed: bool, remaining: u64, retry_after: Option<u64>) -> Status {
        let limit = Some(Limit { requests_per_unit: 9, window: Duration::from_secs(1), name: None });
        Status { allowed, limit, remaining, retry_after: retry_after.map(Duration::from_secs), ..Status::default() }
    }

    fn verdict(allowed: bool, statuses: &[Status]) -> Verdict {
        Verdict { statuses: statuses.iter().cloned().collect(), ..Verdict::empty(allowed, DecidedBy::Server) }
    }

    #[test]
    fn a_verdict_has_the_longest_retry_after_and_the_fewest_remaining_hits() {
        let unlimited = Status { allowed: true, ..Status::default() };
        let denied = verdict(
            false,
            &[status(false, 0, Some(3)), status(true, 1, None), status(false, 0, Some(7)), unlimited.clone()],
        );
        assert_eq!((denied.retry_after(), denied.remaining()), (Some(Duration::from_secs(7)), Some(0)));
        assert_eq!(denied.tightest(), Some(&status(false, 0, Some(7))));
        let allowed = verdict(true, &[unlimited, status(true, 5, None), status(true, 2, None)]);
        assert_eq!((allowed.retry_after(), allowed.remaining()), (None, Some(2)));
        assert_eq!(allowed.tightest(), Some(&status(true, 2, None)));
        // A status that a rule in shadow mode denies does not deny the request.
        let shadow = verdict(true, &[status(false, 5, Some(3)), status(true, 2, None)]);
        assert_eq!(shadow.tightest().map(|status| status.remaining), Some(2));
    }

    #[test]
    fn a_rule_matched_if_there_is_a_limit_an_unlimited_rule_or_an_override() {
        let unmatched = Status { allowed: true, ..Status::default() };
        let unlimited = Status { remaining: u32::MAX.into(), ..unmatched.clone() };
        let off = Status { overridden: true, ..unmatched.clone() };
        for (status, expected) in
            [(&unmatched, false), (&unlimited, true), (&off, true), (&status(false, 0, None), true)]
        {
            assert_eq!(status.matched(), expected, "{status:?}");
            assert_eq!(verdict(true, &[unmatched.clone(), status.clone()]).matched(), expected);
        }
        assert!(!Verdict::fallback(true, Failure::Unreachable).matched());
    }

    #[test]
    fn the_window_is_the_unit_times_its_multiplier() {
        let days = |unit, multiplier| Limit::new(1, unit, multiplier, "").window.as_secs_f64() / 86_400.0;
        let each = [rate_limit::Unit::Day, rate_limit::Unit::Week, rate_limit::Unit::Month, rate_limit::Unit::Year];
        assert_eq!(each.map(|unit| days(unit, 0)), [1.0, 7.0, 30.0, 365.0]);
        assert_eq!(days(rate_limit::Unit::Hour, 12), 0.5);
        assert_eq!((days(rate_limit::Unit::Minute, 720), days(rate_limit::Unit::Second, 43_200)), (0.5, 0.5));
    }

    #[test]
    fn the_delay_is_the_longest_of_all_allowed_statuses() {
        let delayed = |millis, allowed| Status { delay: Duration::from_millis(millis), allowed, ..Status::default() };
        let all = verdict(true, &[delayed(5, true), delayed(9, true), delayed(50, false)]);
        assert_eq!(all.delay(), Duration::from_millis(9));
        assert_eq!((verdict(true, &[]).delay(), verdict(true, &[]).soft()), (Duration::ZERO, false));
        assert!(verdict(true, &[Status::default(), Status { soft: true, ..Status::default() }]).soft());
    }

    #[test]
    fn a_verdict_is_shed_if_overload_causes_all_denials() {
        let denied = |shed| Status { shed, ..Status::default() };
        assert!(verdict(false, &[denied(true), Status { allowed: true, ..denied(false) }]).shed());
        assert!(!verdict(false, &[denied(true), denied(false)]).shed());
        assert!(!verdict(false, &[denied(false)]).shed());
        assert!(!verdict(false, &[]).shed(), "the cause is unknown");
        assert!(!verdict(true, &[denied(true)]).shed(), "denied by a rule in shadow mode");
    }
}
