//! Headers about the limits of a caller: `RateLimit-Policy` and `RateLimit` of the IETF draft
//! (`draft-ietf-httpapi-ratelimit-headers`), `Retry-After` of RFC 9110, and `RateLimit-Max-Cost`.

use rand::random_range;
use sluicegate_algorithm::Micros;
use sluicegate_rules::Measure;
use sluicegate_wire::response_headers;

use super::{CurrentLimit, Status, Verdict};

/// Name of the policy of a limit that the request itself supplies.
const REQUESTED_POLICY: &str = "override";
/// Name of the header with the largest cost that a limit can allow, for a request that costs more. Such a request is
/// denied at any time, so its response has no `Retry-After`.
pub const MAX_COST: &str = "RateLimit-Max-Cost";
/// Name of the header with the seconds until a denied request would be allowed.
pub const RETRY_AFTER: &str = "Retry-After";

/// Returns all headers about a verdict, with their names; none if no limit applied.
#[must_use]
pub fn all(verdict: &Verdict) -> Vec<(&'static str, String)> {
    let mut headers = limits(verdict);
    headers.extend(waits(verdict));
    headers
}

/// Returns the headers `RateLimit-Policy` and `RateLimit`; none if no limit applied.
#[must_use]
pub fn limits(verdict: &Verdict) -> Vec<(&'static str, String)> {
    let Some(status) = verdict.binding_status() else {
        return Vec::new();
    };
    vec![(response_headers::POLICY_HEADER, policies(verdict)), (response_headers::LIMIT_HEADER, tightest_limit(status))]
}

/// Returns the headers of a denied request: `Retry-After`, or `RateLimit-Max-Cost` if the request never fits.
#[must_use]
pub fn waits(verdict: &Verdict) -> Vec<(&'static str, String)> {
    let mut headers = Vec::new();
    // Whole seconds, rounded up, because 0 would mean that the caller may retry now.
    if let Some(wait) = verdict.retry_after() {
        let jitter = verdict.retry_jitter();
        let wait = if jitter > Micros::ZERO { wait + Micros::new(random_range(0..=jitter.get())) } else { wait };
        headers.push((RETRY_AFTER, wait.ceil_secs().max(1).to_string()));
    }
    if let Some(max_cost) = verdict.max_cost() {
        headers.push((MAX_COST, max_cost.to_string()));
    }
    headers
}

/// Returns the value of `RateLimit-Policy`: every limit with its quota and window.
fn policies(verdict: &Verdict) -> String {
    let mut text = String::new();
    let statuses = verdict.statuses.iter().flat_map(|status| std::iter::once(status).chain(&status.others));
    for limit in statuses.filter_map(|status| status.limit.as_ref()) {
        let window_seconds = match limit.measure {
            Measure::Rate { .. } => Some(limit.window.ceil_secs().max(1)),
            Measure::InFlight { .. } => None,
        };
        response_headers::append_policy(&mut text, name(limit), limit.quota, window_seconds);
    }
    text
}

/// Returns the value of `RateLimit`: the remaining hits, and the seconds until more remain.
fn tightest_limit(status: &Status) -> String {
    let name = match &status.limit {
        Some(limit) => name(limit),
        None => REQUESTED_POLICY,
    };
    let until_more = match status.retry_after {
        Some(retry_after) if status.is_over() => retry_after,
        _ => status.next,
    };
    let seconds = until_more.ceil_secs().max(u64::from(status.is_over()));
    response_headers::rate_limit(name, status.remaining, Some(seconds))
}

/// Returns the name of a limit's policy.
fn name(limit: &CurrentLimit) -> &str {
    limit.policy.as_deref().unwrap_or(REQUESTED_POLICY)
}

#[cfg(test)]
mod tests {
    use sluicegate_rules::{Limit, Unit};

    use super::*;

    #[test]
    fn a_limit_without_a_policy_is_that_of_the_request() {
        let limit = Limit::new(1, Unit::Hour, 1).unwrap();
        let with_policy = CurrentLimit { policy: Some("user".into()), ..CurrentLimit::new(&limit, None, None) };
        assert_eq!(name(&with_policy), "user");
        assert_eq!(name(&CurrentLimit::new(&limit, None, None)), "override");
    }
}
