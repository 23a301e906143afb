//! [`Settings`] for the gRPC server.

use std::{net::SocketAddr, path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

use super::Limits;
use crate::transport::tls::TlsSettings;

/// Settings for the gRPC server.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
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
    #[serde(with = "sluicegate_duration::Text")]
    pub keepalive_interval: Duration,
    /// Timeout for the reply to a ping. Without a reply, the connection is closed.
    #[serde(with = "sluicegate_duration::Text")]
    pub keepalive_timeout: Duration,
    /// Age (± 10%) at which a connection is closed gracefully, so that clients also connect to new instances.
    #[serde(with = "sluicegate_duration::Text")]
    pub max_connection_age: Duration,
    /// Time for calls to finish after `max_connection_age`, before the connection is closed.
    #[serde(with = "sluicegate_duration::Text")]
    pub max_connection_age_grace: Duration,
    /// Time after which a response is dropped if the caller does not read it.
    #[serde(with = "sluicegate_duration::Text")]
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

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.max_connection_age.is_zero() {
            return Some("grpc.max_connection_age must be greater than 0");
        }
        if self.keepalive_interval.is_zero() {
            return Some("grpc.keepalive_interval must be greater than 0");
        }
        if self.max_connections == 0 {
            return Some("grpc.max_connections must be greater than 0");
        }
        None
    }
}
