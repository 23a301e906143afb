//! Converts a response of Envoy's protocol to a [`Verdict`].

use std::{
    sync::OnceLock,
    time::{Duration, SystemTime},
};

use sluicegate_proto::envoy::service::ratelimit::v3::{
    RateLimitResponse, rate_limit_response,
    rate_limit_response::{DescriptorStatus, Quota, quota::ExpirationSpecifier},
};

use super::{DecidedBy, Denial, GrantOffer, Limit, Status, Verdict};

impl Verdict {
    /// Converts a response of Envoy's protocol.
    ///
    /// `grant_ttls` is the metadata with the lifetimes of the grants, if the service sent it; otherwise `valid_until`
    /// applies, which is a wall-clock time. `shed` is `true` if the metadata contains that the denial is caused by
    /// overload.
    pub(crate) fn from_envoy(message: RateLimitResponse, grant_ttls: Option<&str>, shed: bool) -> Self {
        let mut grant_ttls = grant_ttls.map(|ttls| ttls.split(','));
        let allowed = message.overall_code() != rate_limit_response::Code::OverLimit;
        let headers: Vec<_> =
            message.response_headers_to_add.into_iter().map(|header| (header.key, header.value)).collect();
        Self {
            allowed,
            by: DecidedBy::Server,
            statuses: message
                .statuses
                .into_iter()
                .map(|status| {
                    let ttl = grant_ttls.as_mut().map(|ttls| ttls.next().and_then(|ttl| ttl.trim().parse().ok()));
                    let status = Status::from_envoy(status, ttl);
                    Status { shed: shed && !status.allowed, ..status }
                })
                .collect(),
            headers: if headers.is_empty() { OnceLock::new() } else { headers.into() },
            failure: None,
            denial: if message.raw_body.is_empty() {
                None
            } else {
                let message = String::from_utf8_lossy(&message.raw_body).into_owned();
                Some(Box::new(Denial { status: None, message }))
            },
        }
    }
}

impl Status {
    /// Converts one status. `grant_ttl_us` is `None` if the service does not send lifetimes, and `Some(None)` if it
    /// sent none for this descriptor.
    fn from_envoy(message: DescriptorStatus, grant_ttl_us: Option<Option<u64>>) -> Self {
        let allowed = message.code() != rate_limit_response::Code::OverLimit;
        // `duration_until_reset` is the retry-after of a denial, and otherwise the time until the full limit is
        // available.
        let until = message.duration_until_reset.and_then(|until| Duration::try_from(until).ok());
        let limit = message.current_limit.map(|limit| {
            let unit = limit.unit();
            Limit::new(limit.requests_per_unit, unit, limit.unit_multiplier.unwrap_or(1), &limit.name)
        });
        Self {
            allowed,
            limit,
            remaining: message.limit_remaining.into(),
            reset: if allowed { until } else { None },
            retry_after: if allowed { None } else { until },
            whole_seconds: true,
            grant: message.quota.and_then(|quota| {
                let ttl = match grant_ttl_us {
                    Some(ttl) => Duration::from_micros(ttl?),
                    None => remaining_lifetime(&quota)?,
                };
                Some(GrantOffer { hits: quota.requests.into(), ttl, id: quota.id.into() })
            }),
            ..Self::default()
        }
    }
}

/// Assumed maximum difference between the wall clocks of client and service. If they differ by more, a grant may be
/// used after it has expired.
const MAX_CLOCK_SKEW: Duration = Duration::from_secs(1);

/// Returns the remaining lifetime of a quota if the clocks differ by [`MAX_CLOCK_SKEW`], or `None` if it has expired.
#[allow(clippy::disallowed_methods, reason = "`valid_until` is a wall-clock time")]
fn remaining_lifetime(quota: &Quota) -> Option<Duration> {
    let ExpirationSpecifier::ValidUntil(until) = quota.expiration_specifier.as_ref()?;
    let until = Duration::new(until.seconds.try_into().ok()?, until.nanos.try_into().ok()?);
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).ok()?;
    until.checked_sub(now)?.checked_sub(MAX_CLOCK_SKEW)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_of_a_status_determines_the_meaning_of_its_duration() {
        let status = |code: rate_limit_response::Code| DescriptorStatus {
            code: code.into(),
            duration_until_reset: Some(prost_types::Duration { seconds: 5, nanos: 0 }),
            ..DescriptorStatus::default()
        };
        let (allowed, denied) = (rate_limit_response::Code::Ok, rate_limit_response::Code::OverLimit);
        let statuses = vec![status(allowed), status(denied)];
        let message = RateLimitResponse { overall_code: denied.into(), statuses, ..RateLimitResponse::default() };
        let verdict = Verdict::from_envoy(message, None, false);
        let five = Some(Duration::from_secs(5));
        let expected = [
            Status { allowed: true, reset: five, whole_seconds: true, ..Status::default() },
            Status { allowed: false, retry_after: five, whole_seconds: true, ..Status::default() },
        ];
        assert_eq!((verdict.allowed(), verdict.statuses()), (false, &expected[..]));
    }
}
