//! Headers that Envoy adds to the caller's response: the three of envoyproxy/ratelimit, the two of the IETF draft, and
//! `Retry-After`.
//!
//! The draft is draft-ietf-httpapi-ratelimit-headers-11. `RateLimit-Policy: "user";q=100;w=60` contains every limit of
//! the request. `RateLimit: "user";r=50;t=30` contains the remaining hits of the tightest limit, and the seconds until
//! more remain.

use std::fmt::Write;

use sluicegate_common::wire::Writer;

use super::{ResponseSettings, settings::HeaderStyle};
use crate::{
    engine::{CurrentLimit, Status, Verdict},
    rules::Measure,
};

/// Name of the policy of a limit that the request itself supplies.
const REQUESTED_POLICY: &str = "override";

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
        add("RateLimit-Policy", policies(verdict));
        add("RateLimit", tightest_limit(status));
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
}

/// Returns the value of `RateLimit-Policy`: every limit with its quota and window.
fn policies(verdict: &Verdict) -> String {
    let mut text = String::new();
    for limit in verdict.statuses.iter().filter_map(|status| status.limit.as_ref()) {
        let separator = if text.is_empty() { "" } else { ", " };
        // Writing to a `String` cannot fail.
        let _ = write!(text, "{separator}{};q={}", name(limit), limit.quota);
        let _ = match limit.measure {
            Measure::Rate { .. } => write!(text, ";w={}", limit.window.ceil_secs().max(1)),
            Measure::InFlight { .. } => write!(text, ";qu=\"concurrent-requests\""),
        };
    }
    text
}

/// Returns the value of `RateLimit`: the remaining hits, and the seconds until more remain.
fn tightest_limit(status: &Status) -> String {
    let name = status.limit.as_ref().map_or_else(String::new, name);
    let until_more = if status.is_over() { status.retry_after } else { None }.unwrap_or(status.next);
    let seconds = until_more.ceil_secs().max(u64::from(status.is_over()));
    format!("{name};r={};t={seconds}", status.remaining)
}

/// Returns a policy's name as a Structured Field string (RFC 9651): printable ASCII in quotes. Other characters become
/// `_`.
fn name(limit: &CurrentLimit) -> String {
    let mut text = String::from('"');
    for letter in limit.policy.as_deref().unwrap_or(REQUESTED_POLICY).chars() {
        match letter {
            '"' | '\\' => text.extend(['\\', letter]),
            ' '..='~' => text.push(letter),
            _ => text.push('_'),
        }
    }
    text + "\""
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Limit, Unit};

    #[test]
    fn a_name_is_a_structured_field_string() {
        let limit = Limit::new(1, Unit::Hour, 1).unwrap();
        for (policy, expected) in [
            (Some("a b~"), r#""a b~""#),
            (Some(r#"a"b\c"#), r#""a\"b\\c""#),
            (Some("ä\n"), r#""__""#),
            (None, r#""override""#),
        ] {
            let limit = CurrentLimit { policy: policy.map(Into::into), ..CurrentLimit::new(&limit, None, None) };
            assert_eq!(name(&limit), expected);
        }
    }
}
