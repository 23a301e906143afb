//! Which control plane, and who asks it.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Which control plane, and who asks it.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// `http://host:port`, or `https://host:port` for TLS; without one, rules come from files.
    pub server: Option<String>,
    /// How it is asked.
    pub protocol: Protocol,
    /// By which the control plane knows what to send.
    pub node_id: String,
    /// What else it is told, as `name=value`.
    pub node_metadata: Vec<String>,
    /// Headers of each call, as `name=value`.
    pub headers: Vec<String>,
    /// The largest message that is taken.
    pub max_message_bytes: usize,
    /// A connection must be there within this time.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub connect_timeout: Duration,
    /// The first pause before it is tried again. Each is up to twice as long as the one before, less up to half by chance.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub retry_min: Duration,
    /// The longest.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub retry_max: Duration,
    /// Serve before the first rules have come; requests get an error until then.
    pub start_without_rules: bool,
    /// For `https://`.
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
    /// For printing: without what headers say.
    #[must_use]
    pub fn masked(&self) -> Self {
        let name = |header: &String| format!("{}=***", header.split_once('=').map_or("", |(name, _)| name));
        Self { headers: self.headers.iter().map(name).collect(), ..self.clone() }
    }
}

/// How a control plane is asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Protocol {
    /// The state of the world: every response has all there is.
    #[default]
    Sotw,
    /// Every response has what has changed.
    Delta,
}

/// Certificates, read anew for each connection.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file of those who may sign the server's certificate; without one, those that the system trusts.
    pub ca_file: Option<PathBuf>,
    /// PEM file of the certificate to show, with its chain.
    pub cert_file: Option<PathBuf>,
    /// PEM file of its key.
    pub key_file: Option<PathBuf>,
    /// The name that the server's certificate must have, if it is not the address's host.
    pub server_name: Option<String>,
}
