//! How gRPC is served, and what answers carry.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Limits;

/// How gRPC is served.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Where to listen.
    pub addr: SocketAddr,
    /// A Unix socket to listen on in place of the address.
    pub uds: Option<PathBuf>,
    /// Connections at most; more are closed at once.
    pub max_connections: usize,
    /// Calls under way on one connection.
    pub max_concurrent_streams: u32,
    /// A connection that is silent for so long is asked whether it lives.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub keepalive_interval: Duration,
    /// And closed when it doesn't answer for so long.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub keepalive_timeout: Duration,
    /// A connection of this age (± 10%) is asked to go, so that clients spread over new instances.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub max_connection_age: Duration,
    /// And closed when its calls take longer than this after that.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub max_connection_age_grace: Duration,
    /// What a request may hold.
    pub limits: Limits,
    /// Off without a certificate.
    pub tls: TlsSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            addr: SocketAddr::from(([0, 0, 0, 0], 8081)),
            uds: None,
            max_connections: 10_000,
            max_concurrent_streams: 1_000,
            keepalive_interval: Duration::from_secs(60),
            keepalive_timeout: Duration::from_secs(20),
            max_connection_age: Duration::from_secs(24 * 3_600),
            max_connection_age_grace: Duration::from_secs(60),
            limits: Limits::default(),
            tls: TlsSettings::default(),
        }
    }
}

/// Certificates; read anew when their files change.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file of the certificate to show, with its chain.
    pub cert_file: Option<PathBuf>,
    /// PEM file of its key.
    pub key_file: Option<PathBuf>,
    /// PEM file of authorities: clients must show a certificate of theirs.
    pub client_ca_file: Option<PathBuf>,
    /// A DNS name that must be in it.
    pub client_name: Option<String>,
}

/// How limits are written into headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum HeaderStyle {
    /// Limit, remaining and reset in a header each, as envoyproxy/ratelimit does.
    #[default]
    Separate,
    /// `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11. A draft: its next may differ.
    #[serde(rename = "ietf-draft-11")]
    IetfDraft11,
    /// All of them.
    Both,
}

/// What answers carry beside the verdict.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ResponseSettings {
    /// Headers for the caller's response, in `response_headers_to_add`, and Retry-After when it is refused.
    pub headers: bool,
    /// Which: the three below, the IETF draft's, or both.
    pub header_style: HeaderStyle,
    /// Name of the header with the limit.
    pub limit_header: String,
    /// Name of the header with what remains.
    pub remaining_header: String,
    /// Name of the header with the seconds to wait: of a refusal until the request would pass, else until everything is
    /// restored.
    pub reset_header: String,
    /// Name of the header that marks an answer over a soft limit.
    pub soft_header: String,
    /// The request's descriptors, the rules' metadata and the exact numbers of every answer, in `dynamic_metadata`.
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
