//! [`Settings`] for the gRPC server, and [`ResponseSettings`] for the content of responses.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Limits;

/// Settings for the gRPC server.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Address to listen on.
    pub addr: SocketAddr,
    /// Unix socket to listen on instead of `addr`.
    pub uds: Option<PathBuf>,
    /// Maximum number of connections. Above it, a new connection replaces another one.
    pub max_connections: usize,
    /// Maximum number of concurrent calls on one connection.
    pub max_concurrent_streams: u32,
    /// Time without new calls after which an HTTP/2 ping is sent on a connection.
    #[serde(with = "sluicegate_duration")]
    #[schemars(schema_with = "sluicegate_duration::schema")]
    pub keepalive_interval: Duration,
    /// Timeout for the reply to a ping. Without a reply, the connection is closed.
    #[serde(with = "sluicegate_duration")]
    #[schemars(schema_with = "sluicegate_duration::schema")]
    pub keepalive_timeout: Duration,
    /// Age (± 10%) at which a connection is closed gracefully, so that clients also connect to new instances.
    #[serde(with = "sluicegate_duration")]
    #[schemars(schema_with = "sluicegate_duration::schema")]
    pub max_connection_age: Duration,
    /// Time for calls to finish after `max_connection_age`, before the connection is closed.
    #[serde(with = "sluicegate_duration")]
    #[schemars(schema_with = "sluicegate_duration::schema")]
    pub max_connection_age_grace: Duration,
    /// Time after which a response is dropped if the caller does not read it.
    #[serde(with = "sluicegate_duration")]
    #[schemars(schema_with = "sluicegate_duration::schema")]
    pub send_timeout: Duration,
    /// Limits on the size of a request.
    pub limits: Limits,
    /// TLS settings. Without a certificate, TLS is off.
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
            send_timeout: Duration::from_secs(30),
            limits: Limits::default(),
            tls: TlsSettings::default(),
        }
    }
}

/// Certificates of a listener. They are reloaded when their files change.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file with the server certificate and its chain.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the server certificate.
    pub key_file: Option<PathBuf>,
    /// PEM file with CA certificates. If set, clients must have a certificate of one of these CAs.
    pub client_ca_file: Option<PathBuf>,
    /// DNS name that the client certificates must contain.
    pub client_name: Option<String>,
}

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
