//! [`Settings`] of the Redis store. The address is not part of them: it is the name of the store, `--store redis://…`.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Settings of the Redis store.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Prefix of every key. It must not contain braces, which mark the shard key.
    pub key_prefix: String,
    /// Time after which a call fails.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub timeout: Duration,
    /// Time after which an attempt to connect fails.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub connect_timeout: Duration,
    /// Number of consecutive timeouts after which a server receives no calls until a new connection to it has answered.
    pub timeouts_until_down: u32,
    /// Maximum random time by which a key outlives its content, so that the keys of one window do not expire together.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub expiry_jitter: Duration,
    /// Whether a key outlives its content at most by the content's own lifetime, even if `expiry_jitter` is longer.
    /// Otherwise unused keys of short limits fill Redis.
    pub bound_expiry_jitter: bool,
    /// Nodes of `redis+ring://`, if the address does not list them.
    pub ring: Vec<RingNode>,
    /// TLS settings for `rediss…://`.
    pub tls: TlsSettings,
    /// Settings for `redis+sentinel://`.
    pub sentinel: SentinelSettings,
}

/// One node of a ring.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RingNode {
    /// Name that determines the node's counters. The address does not affect them.
    pub name: String,
    /// Address of the node, `redis://…`, with its own credentials.
    pub url: String,
    /// Share of the counters, relative to the weights of other nodes.
    #[serde(default = "default_weight")]
    pub weight: u32,
}

const fn default_weight() -> u32 {
    1
}

/// Certificates for `rediss…://`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file with the certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the client certificate.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    pub key_file: Option<PathBuf>,
}

/// Settings for connections to sentinels. The credentials in the address are those of the master.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SentinelSettings {
    /// ACL user.
    pub username: Option<String>,
    /// Password of the ACL user, or of `requirepass`.
    pub password: Option<String>,
    /// Whether to connect to the sentinels with TLS. By default the same as for the master.
    pub tls: Option<bool>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            key_prefix: "sluicegate:".into(),
            timeout: Duration::from_millis(20),
            connect_timeout: Duration::from_millis(500),
            timeouts_until_down: 3,
            expiry_jitter: Duration::from_secs(300),
            bound_expiry_jitter: true,
            ring: Vec::new(),
            tls: TlsSettings::default(),
            sentinel: SentinelSettings::default(),
        }
    }
}

impl Settings {
    /// Returns a copy without passwords.
    #[must_use]
    pub fn masked(&self) -> Self {
        let mut masked = self.clone();
        for node in &mut masked.ring {
            node.url = crate::store::redact(&node.url);
        }
        if let Some(password) = &mut masked.sentinel.password {
            "***".clone_into(password);
        }
        masked
    }
}
