//! [`ResponseSettings`]: the content of responses besides the verdict.

use http::HeaderName;
use serde::{Deserialize, Serialize};
use sluicegate_wire::response_headers;

use crate::engine::headers;

/// Style of the rate limit headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "kebab-case")]
pub enum HeaderStyle {
    /// A header each for the limit, the remaining hits and the reset, as in envoyproxy/ratelimit.
    #[default]
    Separate,
    /// `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11. Later drafts may differ.
    #[serde(rename = "ietf-draft-11")]
    IetfDraft11,
    /// The headers of both styles.
    Both,
}

/// Settings for the content of responses besides the verdict.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ResponseSettings {
    /// Add rate limit headers for the caller's response to `response_headers_to_add`, and `Retry-After` if the request
    /// is denied.
    pub headers: bool,
    /// Style of the headers: the three headers below, those of the IETF draft, or both.
    pub header_style: HeaderStyle,
    /// Name of the header with the limit.
    pub limit_header: String,
    /// Name of the header with the remaining hits.
    pub remaining_header: String,
    /// Name of the header with the reset: the seconds until a denied request would be allowed, or until the full limit
    /// is available again.
    pub reset_header: String,
    /// Name of the header that marks a response above a soft limit, or allowed only because an elastic limit has risen.
    pub soft_header: String,
    /// Name of the header with the seconds until a denied request would be allowed.
    pub retry_after_header: String,
    /// Name of the header with the largest cost that a limit can allow, for a request that costs more.
    pub max_cost_header: String,
    /// Name of the header with all limits of a request, in the style of the IETF draft.
    pub policy_header: String,
    /// Name of the header with the remaining hits of the tightest limit, in the style of the IETF draft.
    pub tightest_limit_header: String,
    /// Add the request's descriptors, the rules' metadata and the exact numbers of every status to `dynamic_metadata`.
    pub dynamic_metadata: bool,
}

impl Default for ResponseSettings {
    fn default() -> Self {
        Self {
            headers: false,
            header_style: HeaderStyle::default(),
            limit_header: "RateLimit-Limit".into(),
            remaining_header: "RateLimit-Remaining".into(),
            reset_header: "RateLimit-Reset".into(),
            soft_header: "RateLimit-Soft".into(),
            retry_after_header: headers::RETRY_AFTER.into(),
            max_cost_header: headers::MAX_COST.into(),
            policy_header: response_headers::POLICY_HEADER.into(),
            tightest_limit_header: response_headers::LIMIT_HEADER.into(),
            dynamic_metadata: false,
        }
    }
}

impl ResponseSettings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        let names = [
            &self.limit_header,
            &self.remaining_header,
            &self.reset_header,
            &self.soft_header,
            &self.retry_after_header,
            &self.max_cost_header,
            &self.policy_header,
            &self.tightest_limit_header,
        ];
        if names.into_iter().any(|name| HeaderName::try_from(name).is_err()) {
            return Some("response.*_header must be valid names of HTTP headers");
        }
        None
    }

    /// Returns the configured name of a header that [`engine::headers`](headers) calls `name`.
    pub(in crate::transport) fn header_name<'s>(&'s self, name: &'s str) -> &'s str {
        match name {
            headers::RETRY_AFTER => &self.retry_after_header,
            headers::MAX_COST => &self.max_cost_header,
            response_headers::POLICY_HEADER => &self.policy_header,
            response_headers::LIMIT_HEADER => &self.tightest_limit_header,
            _ => name,
        }
    }
}
