//! [`Settings`] for the control plane.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// Settings for receiving rules from a control plane.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Address of the control plane: `http://host:port`, or `https://host:port` for TLS. Without it, rules come from
    /// files.
    pub server: Option<String>,
    /// Variant of the protocol.
    pub protocol: Protocol,
    /// Node id that is sent to the control plane, which selects the resources by it.
    pub node_id: String,
    /// Metadata of the node that is sent to the control plane, as `name=value`.
    pub node_metadata: Vec<String>,
    /// Headers of each call to the control plane, as `name=value`.
    pub headers: Vec<String>,
    /// Maximum size of a response in bytes.
    pub max_message_bytes: usize,
    /// Timeout for connecting to the control plane.
    #[serde(with = "sluicegate_duration::Text")]
    pub connect_timeout: Duration,
    /// First pause before a new attempt to connect. Each pause is up to twice the previous one, minus a random part of
    /// up to half.
    #[serde(with = "sluicegate_duration::Text")]
    pub retry_min: Duration,
    /// Maximum pause before a new attempt to connect.
    #[serde(with = "sluicegate_duration::Text")]
    pub retry_max: Duration,
    /// Serve before the first rules are received. Requests get an error until then.
    pub start_without_rules: bool,
    /// TLS settings for an `https://` address.
    pub tls: TlsSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            server: None,
            protocol: Protocol::default(),
            node_id: "default".into(),
            node_metadata: Vec::new(),
            headers: Vec::new(),
            max_message_bytes: 64 * 1_024 * 1_024,
            connect_timeout: Duration::from_secs(5),
            retry_min: Duration::from_millis(500),
            retry_max: Duration::from_secs(30),
            start_without_rules: false,
            tls: TlsSettings::default(),
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.retry_min.is_zero() || self.retry_min > self.retry_max {
            return Some("rules.xds.retry_min must be greater than 0 and at most rules.xds.retry_max");
        }
        if self.connect_timeout.is_zero() || self.max_message_bytes == 0 {
            return Some("rules.xds.connect_timeout and rules.xds.max_message_bytes must be greater than 0");
        }
        None
    }

    /// Returns the settings without the values of headers, for printing.
    #[must_use]
    pub fn masked(&self) -> Self {
        let mut headers = Vec::with_capacity(self.headers.len());
        for header in &self.headers {
            let (name, _) = header.split_once('=').unwrap_or_default();
            headers.push(format!("{name}=***"));
        }
        Self { headers, ..self.clone() }
    }
}

/// Variant of the xDS protocol.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// State of the world: every response contains all resources.
    #[default]
    Sotw,
    /// Incremental: every response contains the changed resources.
    Delta,
}

/// Certificates for the connection to the control plane, read again for each connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file with the CA certificates for the server's certificate. Without it, the system's CA certificates are
    /// used.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the client certificate and its chain.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    pub key_file: Option<PathBuf>,
    /// Name that the server's certificate must have, if it is not the host of the address.
    pub server_name: Option<String>,
}
