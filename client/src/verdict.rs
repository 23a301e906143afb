//! What a caller gets: always an answer, and where it comes from.

use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};

use sluicegate_common::wire::{Fields, Malformed};
use sluicegate_proto::{
    envoy::service::ratelimit::v3::{
        RateLimitResponse, rate_limit_response,
        rate_limit_response::{DescriptorStatus, Quota, quota::ExpirationSpecifier, rate_limit},
    },
    sluicegate::v1,
};
use smallvec::SmallVec;
use tonic::Code;

use crate::grants::GrantOffer;

/// Who answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecidedBy {
    /// The service.
    Server,
    /// This client: the service has refused the same before, and the wait it named is not over.
    DenyCache,
    /// This client: from hits that the service had granted in advance.
    Grant,
    /// This client, since the service did not answer: [`Builder::on_error`](crate::Builder::on_error).
    Fallback,
}

/// May the request pass?
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    pub(crate) allowed: bool,
    pub(crate) by: DecidedBy,
    pub(crate) statuses: SmallVec<[Status; 1]>,
    pub(crate) headers: Vec<(String, String)>,
    pub(crate) failure: Option<Box<Failure>>,
}

/// The answer to one descriptor. What the service did not say is `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// Whether it passes.
    pub allowed: bool,
    /// What applied, if anything that is counted.
    pub limit: Option<Limit>,
    /// Hits that would still pass.
    pub remaining: u64,
    /// Until everything is restored.
    pub reset: Option<Duration>,
    /// When refused: until the same hits would pass. To the microsecond from `sluicegate.v1`, in whole seconds rounded up
    /// from Envoy's protocol.
    pub retry_after: Option<Duration>,
    /// When allowed: how long to wait before going on, for a limit that shapes.
    pub delay: Duration,
    /// Allowed only because the limit is soft.
    pub soft: bool,
    /// Allowed only because a resource has capacity to spare; from `sluicegate.v1` only.
    pub elastic: bool,
    /// When refused: for overload, and not for what this caller has had; never by services that are not Sluicegate.
    pub shed: bool,
    /// The service's counters were out of reach: its `on_error` decided.
    pub fallback: bool,
    /// Refused hits count: this refusal is not remembered.
    pub(crate) refusal_counts: bool,
    /// Times are whole seconds, rounded up.
    pub(crate) coarse: bool,
    /// Hits that may be spent without asking.
    pub(crate) grant: Option<GrantOffer>,
}

/// The limit that applied: so many requests in so many units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    /// Requests in the window.
    pub requests_per_unit: u32,
    /// The length of the window; a month has 30 days and a year 365 here.
    pub window: Duration,
    /// The rule's name for it, if it has one.
    pub name: Option<Arc<str>>,
}

/// Why the service has no answer. Texts are for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Not within the deadline. The hits may or may not have been counted.
    #[error("the rate limit service did not answer within {0:?}")]
    Deadline(Duration),
    /// No endpoint is thought to be alive, or there is none: nobody was asked.
    #[error("no rate limit service is within reach")]
    Unreachable,
    /// Too many checks wait to be sent: this one was not.
    #[error("too many checks wait for the rate limit service")]
    Overloaded,
    /// The connection broke. The hits may or may not have been counted.
    #[error("the connection to the rate limit service failed: {0}")]
    Connection(String),
    /// The service answered with an error.
    #[error("the rate limit service says {code:?}: {message}")]
    Service {
        /// The gRPC status code.
        code: Code,
        /// What it says.
        message: String,
    },
}

/// A status with all its causes.
pub(crate) fn text(status: &tonic::Status) -> String {
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
        Self { allowed, by, statuses: SmallVec::new(), headers: Vec::new(), failure: None }
    }

    /// Whether the request may pass.
    #[must_use]
    pub fn allowed(&self) -> bool {
        self.allowed
    }

    /// Who says so.
    #[must_use]
    pub fn decided_by(&self) -> DecidedBy {
        self.by
    }

    /// One for each descriptor, in their order; none from a fallback.
    #[must_use]
    pub fn statuses(&self) -> &[Status] {
        &self.statuses
    }

    /// Headers that the service wants on the answer to the request, if it is set to name them.
    #[must_use]
    pub fn headers(&self) -> &[(String, String)] {
        &self.headers
    }

    /// Why the service was not heard, when it was not.
    #[must_use]
    pub fn failure(&self) -> Option<&Failure> {
        self.failure.as_deref()
    }

    /// Of the limits that applied, the one with the least remaining; when refused, of those that refuse.
    #[must_use]
    pub fn tightest(&self) -> Option<&Status> {
        let refused = self.statuses.iter().filter(|status| !self.allowed && !status.allowed);
        let limited = self.statuses.iter().filter(|status| status.limit.is_some());
        refused.max_by_key(|status| status.retry_after).or_else(|| limited.min_by_key(|status| status.remaining))
    }

    /// Hits that would still pass by the tightest limit.
    #[must_use]
    pub fn remaining(&self) -> Option<u64> {
        self.statuses.iter().filter(|status| status.limit.is_some()).map(|status| status.remaining).min()
    }

    /// When refused: how long until all limits that refuse would let the request pass.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        self.statuses.iter().filter(|status| !status.allowed).filter_map(|status| status.retry_after).max()
    }

    /// How long to wait before going on: the longest of all limits that shape.
    #[must_use]
    pub fn delay(&self) -> Duration {
        self.statuses.iter().filter(|status| status.allowed).map(|status| status.delay).max().unwrap_or_default()
    }

    /// Refused for overload that the caller did not cause, and for nothing else: HTTP has 503 for it, and 429 for all else.
    #[must_use]
    pub fn shed(&self) -> bool {
        let mut refused = self.statuses.iter().filter(|status| !status.allowed).peekable();
        !self.allowed && refused.peek().is_some() && refused.all(|status| status.shed)
    }

    /// Allowed only because a limit is soft.
    #[must_use]
    pub fn soft(&self) -> bool {
        self.statuses.iter().any(|status| status.soft)
    }
}

impl Verdict {
    /// A `sluicegate.v1.Verdict`: `allowed`, `statuses`, `response_headers_to_add`.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut verdict = Self::empty(false, DecidedBy::Server);
        for field in fields {
            match field? {
                (1, value) => verdict.allowed = value.number()? != 0,
                (2, value) => verdict.statuses.push(Status::read(value.message()?)?),
                (3, value) => verdict.headers.push(read_header(value.message()?)?),
                _ => {}
            }
        }
        Ok(verdict)
    }
}

/// `name`, `value`.
fn read_header(fields: Fields<'_>) -> Result<(String, String), Malformed> {
    let mut header = (String::new(), String::new());
    for field in fields {
        match field? {
            (1, value) => header.0 = value.text()?.to_owned(),
            (2, value) => header.1 = value.text()?.to_owned(),
            _ => {}
        }
    }
    Ok(header)
}

impl Status {
    /// `allowed`, `limit`, `remaining`, `reset_us`, `retry_after_us`, `delay_us`, `soft`, `decider`, `refusal_counts`,
    /// `grant`, `shed`, `elastic`.
    fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let mut status = Self::default();
        for field in fields {
            match field? {
                (1, value) => status.allowed = value.number()? != 0,
                (2, value) => status.limit = Some(Limit::read(value.message()?)?),
                (3, value) => status.remaining = value.number()?,
                (4, value) => status.reset = Some(Duration::from_micros(value.number()?)),
                (5, value) => status.retry_after = Some(Duration::from_micros(value.number()?)),
                (6, value) => status.delay = Duration::from_micros(value.number()?),
                (7, value) => status.soft = value.number()? != 0,
                (8, value) => status.fallback = value.number()? == v1::Decider::Fallback as u64,
                (9, value) => status.refusal_counts = value.number()? != 0,
                (10, value) => status.grant = Some(GrantOffer::read(value.message()?)?),
                (11, value) => status.shed = value.number()? != 0,
                (12, value) => status.elastic = value.number()? != 0,
                _ => {}
            }
        }
        Ok(status)
    }
}

impl GrantOffer {
    /// `hits`, `life_us`, `id`.
    fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let (mut hits, mut life, mut id) = (0, Duration::ZERO, "");
        for field in fields {
            match field? {
                (1, value) => hits = value.number()?,
                (2, value) => life = Duration::from_micros(value.number()?),
                (3, value) => id = value.text()?,
                _ => {}
            }
        }
        Ok(Self { hits, ttl: life, id: id.into() })
    }
}

impl Limit {
    /// `requests_per_unit`, `unit`, `unit_multiplier`, `name`.
    fn read(fields: Fields<'_>) -> Result<Self, Malformed> {
        let (mut requests_per_unit, mut unit, mut multiplier, mut name) = (0, 0, 0, "");
        for field in fields {
            match field? {
                (1, value) => requests_per_unit = value.number()? as u32,
                (2, value) => unit = value.number()? as i32,
                (3, value) => multiplier = value.number()? as u32,
                (4, value) => name = value.text()?,
                _ => {}
            }
        }
        Ok(Self::new(requests_per_unit, rate_limit::Unit::try_from(unit).unwrap_or_default(), multiplier, name))
    }
}

impl Verdict {
    /// `lives`: of the grants, where the service says how long they are; those of others end by the clock on the wall.
    /// `shed`: what refuses does so for overload, as the service says.
    pub(crate) fn from_envoy(message: RateLimitResponse, lives: Option<&str>, shed: bool) -> Self {
        let mut lives = lives.map(|lives| lives.split(','));
        let allowed = message.overall_code() != rate_limit_response::Code::OverLimit;
        let headers = message.response_headers_to_add.into_iter().map(|header| (header.key, header.value));
        Self {
            allowed,
            by: DecidedBy::Server,
            statuses: message
                .statuses
                .into_iter()
                .map(|status| {
                    let life = lives.as_mut().map(|lives| lives.next().and_then(|life| life.trim().parse().ok()));
                    let status = Status::from_envoy(status, life);
                    Status { shed: shed && !status.allowed, ..status }
                })
                .collect(),
            headers: headers.collect(),
            failure: None,
        }
    }
}

impl Status {
    /// `life`: in microseconds, when the service tells such things.
    fn from_envoy(message: DescriptorStatus, life: Option<Option<u64>>) -> Self {
        let allowed = message.code() != rate_limit_response::Code::OverLimit;
        // Of a refusal it says when the hits would pass, and of all else when everything is restored.
        let until = message.duration_until_reset.and_then(|until| Duration::try_from(until).ok());
        let limit = message.current_limit.map(|limit| {
            let unit = limit.unit();
            Limit::new(limit.requests_per_unit, unit, limit.unit_multiplier.unwrap_or(1), &limit.name)
        });
        Self {
            allowed,
            limit,
            remaining: message.limit_remaining.into(),
            reset: until.filter(|_| allowed),
            retry_after: until.filter(|_| !allowed),
            coarse: true,
            grant: message.quota.and_then(|quota| {
                let life = match life {
                    Some(life) => Duration::from_micros(life?),
                    None => time_until(&quota)?,
                };
                Some(GrantOffer { hits: quota.requests.into(), ttl: life, id: quota.id.into() })
            }),
            ..Self::default()
        }
    }
}

/// Clocks on walls differ: by no more than this, or a grant is spent after its end.
const SKEW: Duration = Duration::from_secs(1);

/// What is left of a quota when both clocks are as far apart as may be.
#[allow(clippy::disallowed_methods, reason = "the quota's end is a time of the wall's clock")]
fn time_until(quota: &Quota) -> Option<Duration> {
    let ExpirationSpecifier::ValidUntil(until) = quota.expiration_specifier.as_ref()?;
    let until = Duration::new(until.seconds.try_into().ok()?, until.nanos.try_into().ok()?);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    until.checked_sub(now)?.checked_sub(SKEW)
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
        Self { requests_per_unit, window, name: (!name.is_empty()).then(|| name.into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(allowed: bool, remaining: u64, wait: Option<u64>) -> Status {
        let limit = Some(Limit { requests_per_unit: 9, window: Duration::from_secs(1), name: None });
        Status { allowed, limit, remaining, retry_after: wait.map(Duration::from_secs), ..Status::default() }
    }

    fn verdict(allowed: bool, statuses: &[Status]) -> Verdict {
        Verdict { statuses: statuses.iter().cloned().collect(), ..Verdict::empty(allowed, DecidedBy::Server) }
    }

    #[test]
    fn the_longest_wait_and_the_least_that_remains_count() {
        let unlimited = Status { allowed: true, ..Status::default() };
        let refused = verdict(
            false,
            &[status(false, 0, Some(3)), status(true, 1, None), status(false, 0, Some(7)), unlimited.clone()],
        );
        assert_eq!((refused.retry_after(), refused.remaining()), (Some(Duration::from_secs(7)), Some(0)));
        assert_eq!(refused.tightest(), Some(&status(false, 0, Some(7))));
        let allowed = verdict(true, &[unlimited, status(true, 5, None), status(true, 2, None)]);
        assert_eq!((allowed.retry_after(), allowed.remaining()), (None, Some(2)));
        assert_eq!(allowed.tightest(), Some(&status(true, 2, None)));
        // One that a shadow rule refuses does not refuse the request.
        let shadow = verdict(true, &[status(false, 5, Some(3)), status(true, 2, None)]);
        assert_eq!(shadow.tightest().map(|status| status.remaining), Some(2));
    }

    #[test]
    fn windows_are_as_long_as_their_units() {
        let days = |unit, multiplier| Limit::new(1, unit, multiplier, "").window.as_secs_f64() / 86_400.0;
        let each = [rate_limit::Unit::Day, rate_limit::Unit::Week, rate_limit::Unit::Month, rate_limit::Unit::Year];
        assert_eq!(each.map(|unit| days(unit, 0)), [1.0, 7.0, 30.0, 365.0]);
        assert_eq!(days(rate_limit::Unit::Hour, 12), 0.5);
        assert_eq!((days(rate_limit::Unit::Minute, 720), days(rate_limit::Unit::Second, 43_200)), (0.5, 0.5));
    }

    #[test]
    fn the_longest_delay_of_those_that_pass_counts() {
        let delayed = |millis, allowed| Status { delay: Duration::from_millis(millis), allowed, ..Status::default() };
        let all = verdict(true, &[delayed(5, true), delayed(9, true), delayed(50, false)]);
        assert_eq!(all.delay(), Duration::from_millis(9));
        assert_eq!((verdict(true, &[]).delay(), verdict(true, &[]).soft()), (Duration::ZERO, false));
        assert!(verdict(true, &[Status::default(), Status { soft: true, ..Status::default() }]).soft());
    }
}
