//! How to use Redis. The address itself is the store's name: `--store redis://…`.

use std::{path::PathBuf, time::Duration};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// How to use Redis.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Before every key; without braces, which are the shard's.
    pub key_prefix: String,
    /// A call that takes longer has failed.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub timeout: Duration,
    /// An attempt to connect that takes longer has failed.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub connect_timeout: Duration,
    /// So many calls without an answer in a row, and a server is not asked again until a new connection answers.
    pub timeouts_until_down: u32,
    /// A key outlives its use by a random time up to this, so that keys of one window don't all expire at once.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub expiry_jitter: Duration,
    /// The nodes of `redis+ring://`, where the address does not name them.
    pub ring: Vec<RingNode>,
    /// For `rediss…://`.
    pub tls: TlsSettings,
    /// For `redis+sentinel://`.
    pub sentinel: SentinelSettings,
}

/// One node of a ring.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RingNode {
    /// What the placement goes by: a node that keeps its name keeps its counters' places, whatever its address.
    pub name: String,
    /// `redis://…`, with its own credentials.
    pub url: String,
    /// How much it holds, beside the others.
    #[serde(default = "one")]
    pub weight: u32,
}

const fn one() -> u32 {
    1
}

/// Certificates for `rediss…://`.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file of the authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file of the certificate to show.
    pub cert_file: Option<PathBuf>,
    /// PEM file of that certificate's key.
    pub key_file: Option<PathBuf>,
}

/// How to speak to the sentinels themselves; the credentials in the address are the master's.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct SentinelSettings {
    /// An ACL user.
    pub username: Option<String>,
    /// Its password, or that of `requirepass`.
    pub password: Option<String>,
    /// Whether they speak TLS, where that is not as with the master.
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
            ring: Vec::new(),
            tls: TlsSettings::default(),
            sentinel: SentinelSettings::default(),
        }
    }
}

impl Settings {
    /// Without passwords.
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
