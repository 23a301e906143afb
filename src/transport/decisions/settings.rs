//! [`ResponseSettings`]: the content of responses besides the verdict.

use http::HeaderName;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Style of the rate limit headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
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
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ResponseSettings {
    /// Add rate limit headers for the caller's response to `response_headers_to_add`, and `Retry-After` if it is
    /// denied.
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
    /// Name of the header that marks a response above a soft limit.
    pub soft_header: String,
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
            dynamic_metadata: false,
        }
    }
}

impl ResponseSettings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        for name in [&self.limit_header, &self.remaining_header, &self.reset_header] {
            if HeaderName::try_from(name).is_err() {
                return Some("response.*_header must be valid names of HTTP headers");
            }
        }
        None
    }
}
