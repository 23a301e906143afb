//! Response headers computed from the statuses of a verdict, for services that send none.
//!
//! The headers are `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11, and `Retry-After`.
//! The quota of a policy is the limit's number of requests per window. The service's own headers contain the burst of a
//! limit instead, which the client does not receive.

use std::{borrow::Cow, time::Duration};

use sluicegate_wire::response_headers;

use super::{Limit, Status, Verdict};
use crate::Descriptor;

/// Name of a limit without a name, if the keys of its descriptor are unknown.
const DEFAULT_NAME: &str = "default";

impl Verdict {
    /// Returns the headers that the service sent, or else those computed from the statuses.
    pub(super) fn headers_or_computed(&self) -> &[(String, String)] {
        self.headers.get_or_init(|| {
            let mut headers = self.compute_rate_limit_headers(&[]);
            if !self.allowed
                && let Some(retry_after) = self.retry_after()
            {
                headers.push(("Retry-After".into(), retry_after_seconds(retry_after).to_string()));
            }
            headers
        })
    }

    /// Computes `RateLimit-Policy` and `RateLimit`, or nothing if no limit applied. `descriptors` are those of the
    /// check: their keys are the names of limits without a name.
    pub(crate) fn compute_rate_limit_headers(&self, descriptors: &[Descriptor<'_>]) -> Vec<(String, String)> {
        let Some(tightest) = self.tightest_index() else {
            return Vec::new();
        };
        if self.statuses[tightest].limit.is_none() {
            return Vec::new();
        }
        let mut policies = String::new();
        for (index, status) in self.statuses.iter().enumerate() {
            if let Some(limit) = &status.limit {
                append_policy(&mut policies, &self.limit_name(index, descriptors), limit);
            }
            for limit in status.others.iter().filter_map(|other| other.limit.as_ref()) {
                append_policy(&mut policies, limit.name.as_deref().unwrap_or(DEFAULT_NAME), limit);
            }
        }
        let Status { remaining, retry_after, reset, .. } = self.statuses[tightest];
        let name = self.limit_name(tightest, descriptors);
        let seconds = retry_after.map(retry_after_seconds).or(reset.map(ceil_seconds));
        let limit = response_headers::rate_limit(&name, remaining, seconds);
        vec![(response_headers::POLICY_HEADER.into(), policies), (response_headers::LIMIT_HEADER.into(), limit)]
    }

    /// Returns the name of the limit of a status, or else the keys of its descriptor, separated by dots. Without the
    /// descriptor, the name is [`DEFAULT_NAME`].
    pub(crate) fn limit_name(&self, index: usize, descriptors: &[Descriptor<'_>]) -> Cow<'_, str> {
        let limit = self.statuses.get(index).and_then(|status| status.limit.as_ref());
        if let Some(name) = limit.and_then(|limit| limit.name.as_deref()) {
            return name.into();
        }
        match descriptors.get(index) {
            Some(descriptor) => descriptor.keys().into(),
            None => DEFAULT_NAME.into(),
        }
    }
}

fn append_policy(policies: &mut String, name: &str, limit: &Limit) {
    let seconds = limit.window.as_secs();
    let window = if seconds > 0 { Some(seconds) } else { None };
    response_headers::append_policy(policies, name, limit.requests_per_unit.into(), window);
}

/// Returns the time in whole seconds, rounded up.
pub(crate) fn ceil_seconds(time: Duration) -> u64 {
    time.as_secs() + u64::from(time.subsec_nanos() > 0)
}

/// Returns the value of `Retry-After`: whole seconds, rounded up, at least 1. 0 would invite an immediate retry.
pub(crate) fn retry_after_seconds(retry_after: Duration) -> u64 {
    ceil_seconds(retry_after).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DecidedBy, descriptor};

    fn limited(remaining: u64, name: Option<&str>, window: u64) -> Status {
        let window = Duration::from_secs(window);
        let limit = Some(Limit { requests_per_unit: 9, window, name: name.map(Into::into) });
        Status { allowed: true, limit, remaining, reset: Some(Duration::from_millis(1_500)), ..Status::default() }
    }

    fn verdict(allowed: bool, statuses: Vec<Status>) -> Verdict {
        Verdict { statuses: statuses.into(), ..Verdict::empty(allowed, DecidedBy::Server) }
    }

    fn headers(verdict: &Verdict) -> Vec<(&str, &str)> {
        verdict.headers().iter().map(|(name, value)| (name.as_str(), value.as_str())).collect()
    }

    #[test]
    fn headers_are_computed_if_the_service_sent_none() {
        let unmatched = Status { allowed: true, ..Status::default() };
        let allowed = verdict(true, vec![limited(5, Some("day"), 86_400), unmatched, limited(3, None, 0)]);
        let policies = r#""day";q=9;w=86400, "default";q=9;qu="concurrent-requests""#;
        assert_eq!(headers(&allowed), [("RateLimit-Policy", policies), ("RateLimit", r#""default";r=3;t=2"#)]);
        let retry_after = Some(Duration::from_millis(300));
        let denied = verdict(false, vec![Status { allowed: false, retry_after, ..limited(0, Some("few"), 60) }]);
        let expected =
            [("RateLimit-Policy", r#""few";q=9;w=60"#), ("RateLimit", r#""few";r=0;t=1"#), ("Retry-After", "1")];
        assert_eq!(headers(&denied), expected);
    }

    #[test]
    fn all_limits_of_a_rule_are_policies_and_determine_the_verdict() {
        let second =
            Status { remaining: 1, delay: Duration::from_millis(30), soft: true, ..limited(1, Some("second"), 1) };
        let day = Status { others: vec![second], ..limited(5, Some("day"), 86_400) };
        let allowed = verdict(true, vec![day]);
        let policies = r#""day";q=9;w=86400, "second";q=9;w=1"#;
        assert_eq!(headers(&allowed)[0], ("RateLimit-Policy", policies));
        assert_eq!((allowed.remaining(), allowed.delay()), (Some(1), Duration::from_millis(30)));
        assert!(allowed.soft());
    }

    #[test]
    fn headers_of_the_service_take_precedence() {
        let sent = vec![("X-RateLimit-Limit".to_owned(), "9".to_owned())];
        let verdict = Verdict { headers: sent.clone().into(), ..verdict(true, vec![limited(5, None, 60)]) };
        assert_eq!(verdict.headers(), sent);
    }

    #[test]
    fn a_verdict_without_a_limit_has_no_headers() {
        let unmatched = Status { allowed: true, ..Status::default() };
        assert_eq!(headers(&verdict(true, vec![unmatched])), []);
        assert_eq!(headers(&verdict(false, Vec::new())), []);
    }

    #[test]
    fn verdicts_stay_equal_when_their_headers_are_computed() {
        let (one, other) = (verdict(true, vec![limited(5, None, 60)]), verdict(true, vec![limited(5, None, 60)]));
        assert!(!one.headers().is_empty());
        assert_eq!(one, other);
        assert_ne!(one, verdict(true, vec![limited(4, None, 60)]));
    }

    #[test]
    fn a_limit_without_a_name_has_the_keys_of_its_descriptor() {
        let verdict = verdict(true, vec![limited(5, Some("day"), 60), limited(3, None, 60)]);
        let descriptors = [descriptor! { "user" => "bob" }, descriptor! { "api" => "search", "user" => "bob" }];
        let names = [0, 1].map(|index| verdict.limit_name(index, &descriptors));
        assert_eq!(names, ["day", "api.user"]);
        let computed = verdict.compute_rate_limit_headers(&descriptors);
        assert_eq!(computed[1], ("RateLimit".to_owned(), r#""api.user";r=3;t=2"#.to_owned()));
    }

    #[test]
    fn seconds_are_rounded_up() {
        for (nanos, expected) in [(0, 0), (1, 1), (1_000_000_000, 1), (1_000_000_001, 2), (59_500_000_000, 60)] {
            assert_eq!(ceil_seconds(Duration::from_nanos(nanos)), expected);
        }
        assert_eq!(retry_after_seconds(Duration::ZERO), 1);
    }
}
