//! Headers that Envoy adds to the caller's response: the three of envoyproxy/ratelimit, the two of the IETF draft, and
//! `Retry-After`.
//!
//! [`response_headers`] writes the values of the draft. The client crate uses it as well.

use sluicegate_wire::{Writer, response_headers};

use super::{ResponseSettings, settings::HeaderStyle};
use crate::{
    engine::{CurrentLimit, Status, Verdict},
    rules::Measure,
};

/// Name of the policy of a limit that the request itself supplies.
const REQUESTED_POLICY: &str = "override";

/// Name of the header with the largest cost that a limit can allow, for a request that costs more. To repeat it is
/// useless, and it has no `Retry-After`.
const MAX_COST: &str = "RateLimit-Max-Cost";

/// Writes the headers of a response as its field 3, if they are enabled and a limit applied. `RateLimitResponse` and
/// `CheckResponse` have the same field.
pub(super) fn encode(verdict: &Verdict, settings: &ResponseSettings, response: &mut Writer<'_>) {
    if !settings.headers {
        return;
    }
    let Some((status, binding)) = verdict.binding_status().zip(verdict.binding()) else {
        return;
    };
    let mut add = |name: &str, value: String| {
        response.message(3, |header| {
            header.text(1, name);
            header.text(2, &value);
        });
    };
    if settings.header_style != HeaderStyle::IetfDraft11 {
        add(&settings.limit_header, binding.limit.to_string());
        add(&settings.remaining_header, binding.remaining.to_string());
        add(&settings.reset_header, binding.reset_seconds.to_string());
    }
    if settings.header_style != HeaderStyle::Separate {
        add(response_headers::POLICY_HEADER, policies(verdict));
        add(response_headers::LIMIT_HEADER, tightest_limit(status));
    }
    if verdict.statuses.iter().any(|status| status.soft) {
        add(&settings.soft_header, "exceeded".into());
    } else if verdict.statuses.iter().any(|status| status.elastic) {
        add(&settings.soft_header, "elastic".into());
    }
    // Whole seconds, rounded up, because 0 would mean that the caller may retry now.
    if let Some(wait) = verdict.retry_after() {
        add("Retry-After", wait.ceil_secs().max(1).to_string());
    }
    if let Some(max_cost) = verdict.max_cost() {
        add(MAX_COST, max_cost.to_string());
    }
}

/// Returns the value of `RateLimit-Policy`: every limit with its quota and window.
fn policies(verdict: &Verdict) -> String {
    let mut text = String::new();
    for limit in verdict.statuses.iter().filter_map(|status| status.limit.as_ref()) {
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
    let name = status.limit.as_ref().map_or(REQUESTED_POLICY, name);
    let until_more = if status.is_over() { status.retry_after } else { None }.unwrap_or(status.next);
    let seconds = until_more.ceil_secs().max(u64::from(status.is_over()));
    response_headers::rate_limit(name, status.remaining.into(), Some(seconds))
}

/// Returns the name of a limit's policy.
fn name(limit: &CurrentLimit) -> &str {
    limit.policy.as_deref().unwrap_or(REQUESTED_POLICY)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Limit, Unit};

    #[test]
    fn a_limit_without_a_policy_is_that_of_the_request() {
        let limit = Limit::new(1, Unit::Hour, 1).unwrap();
        let with_policy = CurrentLimit { policy: Some("user".into()), ..CurrentLimit::new(&limit, None, None) };
        assert_eq!(name(&with_policy), "user");
        assert_eq!(name(&CurrentLimit::new(&limit, None, None)), "override");
    }
}
