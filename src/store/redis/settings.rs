//! How to use Redis. The address itself is the store's name: `--store redis://…`.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};

/// How to use Redis.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Before every key.
    pub key_prefix: String,
    /// A call that takes longer has failed.
    #[serde(with = "crate::duration")]
    pub timeout: Duration,
    /// An attempt to connect that takes longer has failed.
    #[serde(with = "crate::duration")]
    pub connect_timeout: Duration,
    /// So many calls without an answer in a row, and Redis is not asked again until a new connection answers.
    pub timeouts_until_down: u32,
    /// A key outlives its use by a random time up to this, so that keys of one window don't all expire at once.
    #[serde(with = "crate::duration")]
    pub expiry_jitter: Duration,
    /// For `rediss://`.
    pub tls: TlsSettings,
}

/// Certificates for `rediss://`.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file of the authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file of the certificate to show.
    pub cert_file: Option<PathBuf>,
    /// PEM file of that certificate's key.
    pub key_file: Option<PathBuf>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            key_prefix: "sluicegate:".into(),
            timeout: Duration::from_millis(20),
            connect_timeout: Duration::from_millis(500),
            timeouts_until_down: 3,
            expiry_jitter: Duration::from_secs(300),
            tls: TlsSettings::default(),
        }
    }
}
