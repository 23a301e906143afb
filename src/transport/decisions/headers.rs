//! Headers that Envoy adds to the caller's response: the three of envoyproxy/ratelimit, the two of the IETF draft,
//! `Retry-After`, and this service's own for soft and elastic limits and for requests that cost too much.
//!
//! [`headers`] has the values of the draft and of `Retry-After`, which callers of the engine use as well.

use sluicegate_wire::Writer;

use super::{ResponseSettings, settings::HeaderStyle};
use crate::engine::{DenialResponse, Verdict, headers};

/// Writes the headers of a response as its field 3. `RateLimitResponse` and `CheckResponse` have the same field.
pub(in crate::transport) fn encode(verdict: &Verdict, settings: &ResponseSettings, response: &mut Writer<'_>) {
    each(verdict, settings, |name, value| {
        response.message(3, |header| {
            header.text(1, name);
            header.text(2, value);
        });
    });
}

/// Writes the headers of a rule's denial, like [`encode`].
pub(in crate::transport) fn encode_denial(denial: &DenialResponse, response: &mut Writer<'_>) {
    let content_type = denial.content_type.iter().map(|kind| ("content-type", kind.as_str()));
    let headers = denial.headers.iter().map(|(name, value)| (name.as_str(), value.as_str()));
    for (name, value) in content_type.chain(headers) {
        response.message(3, |header| {
            header.text(1, name);
            header.text(2, value);
        });
    }
}

/// Calls `add` with the name and the value of each header, if headers are enabled: those about the limits if a limit
/// applied, and for a denied request the wait or the largest cost that fits.
pub(in crate::transport) fn each(verdict: &Verdict, settings: &ResponseSettings, mut add: impl FnMut(&str, &str)) {
    if !settings.headers {
        return;
    }
    if let Some(binding) = verdict.binding()
        && settings.header_style != HeaderStyle::IetfDraft11
    {
        add(&settings.limit_header, &binding.limit.to_string());
        add(&settings.remaining_header, &binding.remaining.to_string());
        add(&settings.reset_header, &binding.reset_seconds.to_string());
    }
    if settings.header_style != HeaderStyle::Separate {
        for (name, value) in headers::limits(verdict) {
            add(settings.header_name(name), &value);
        }
    }
    if verdict.statuses.iter().any(|status| status.soft) {
        add(&settings.soft_header, "exceeded");
    } else if verdict.statuses.iter().any(|status| status.elastic) {
        add(&settings.soft_header, "elastic");
    }
    for (name, value) in headers::waits(verdict) {
        add(settings.header_name(name), &value);
    }
}
