//! [`Settings`] of the memcached store. The servers are not part of them: they are the name of the store,
//! `--store memcached://…`.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use sluicegate_store::TlsSettings;

use super::key::MAX_KEY_BYTES;

/// Maximum length of the prefix in bytes, so that a key with a digest is not too long.
const MAX_PREFIX_BYTES: usize = MAX_KEY_BYTES - 65;

/// Settings of the memcached store.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Prefix of every key, in visible ASCII characters.
    pub key_prefix: String,
    /// Time after which a call fails.
    #[serde(with = "sluicegate_duration::Text")]
    pub timeout: Duration,
    /// Time after which an attempt to connect fails.
    #[serde(with = "sluicegate_duration::Text")]
    pub connect_timeout: Duration,
    /// TLS settings for `memcacheds://`.
    pub tls: TlsSettings,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            key_prefix: "sluicegate:".into(),
            timeout: Duration::from_millis(20),
            connect_timeout: Duration::from_millis(500),
            tls: TlsSettings::default(),
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.timeout.is_zero() || self.connect_timeout.is_zero() {
            return Some("memcached.timeout and memcached.connect_timeout must be greater than 0");
        }
        if self.key_prefix.len() > MAX_PREFIX_BYTES {
            return Some("memcached.key_prefix must have at most 185 bytes");
        }
        if !self.key_prefix.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Some("memcached.key_prefix must consist of visible ASCII characters");
        }
        if self.tls.server_name.is_some() && !self.tls.verify_name {
            return Some("memcached.tls.server_name has no effect with memcached.tls.verify_name = false");
        }
        if self.tls.cert_file.is_some() != self.tls.key_file.is_some() {
            return Some("memcached.tls.cert_file and memcached.tls.key_file must be set together");
        }
        None
    }
}
