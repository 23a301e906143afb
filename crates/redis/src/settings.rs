//! [`Settings`] of the Redis store. The address is not part of them: it is the name of the store, `--store redis://…`.

use std::{path::PathBuf, time::Duration};

use serde::{Deserialize, Serialize};
use sluicegate_store::TlsSettings;

/// Settings of the Redis store.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Prefix of every key. It must not contain braces, which mark the shard key.
    pub key_prefix: String,
    /// Time after which a call fails.
    #[serde(with = "sluicegate_duration::Text")]
    pub timeout: Duration,
    /// Time after which an attempt to connect fails.
    #[serde(with = "sluicegate_duration::Text")]
    pub connect_timeout: Duration,
    /// Number of consecutive timeouts after which a server receives no calls until a new connection to it has answered.
    pub timeouts_until_down: u32,
    /// Maximum random time by which a key outlives its content, so that the keys of one window do not expire together.
    #[serde(with = "sluicegate_duration::Text")]
    pub expiry_jitter: Duration,
    /// Whether a key outlives its content at most by the content's own lifetime, even if `expiry_jitter` is longer.
    /// Otherwise unused keys of short limits fill Redis.
    pub bound_expiry_jitter: bool,
    /// File with the password, or with `user:password` if the address has no user. It is read again when it changes.
    pub password_file: Option<PathBuf>,
    /// Program with arguments, separated by spaces, that prints the password, or `user:password` if the address has no
    /// user. Arguments cannot contain spaces.
    pub password_command: Option<String>,
    /// Time after which `password_command` runs again.
    #[serde(with = "sluicegate_duration::Text")]
    pub password_max_age: Duration,
    /// Nodes of `redis+ring://`, if the address does not list them.
    pub ring: Vec<RingNode>,
    /// TLS settings for `rediss…://`.
    pub tls: TlsSettings,
    /// Settings for `redis+sentinel://`.
    pub sentinel: SentinelSettings,
}

/// One node of a ring.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
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

/// Settings for connections to sentinels. The credentials in the address are those of the master.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct SentinelSettings {
    /// ACL user.
    pub username: Option<String>,
    /// Password of the ACL user, or of `requirepass`.
    pub password: Option<String>,
    /// File with the password, or with `user:password` if there is no `username`. It is read again when it changes.
    pub password_file: Option<PathBuf>,
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
            password_file: None,
            password_command: None,
            password_max_age: Duration::from_secs(600),
            ring: Vec::new(),
            tls: TlsSettings::default(),
            sentinel: SentinelSettings::default(),
        }
    }
}

impl Settings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if self.timeout.is_zero() || self.connect_timeout.is_zero() {
            return Some("redis.timeout and redis.connect_timeout must be greater than 0");
        }
        if self.key_prefix.contains(['{', '}']) {
            return Some("redis.key_prefix must not contain braces, which mark the shard key");
        }
        if self.password_file.is_some() && self.password_command.is_some() {
            return Some("redis.password_file and redis.password_command cannot be combined");
        }
        if self.password_command.as_deref().is_some_and(|line| line.trim().is_empty()) {
            return Some("redis.password_command must begin with the path of a program");
        }
        if self.password_max_age < Duration::from_secs(1) {
            return Some("redis.password_max_age must be at least 1s");
        }
        if self.sentinel.password.is_some() && self.sentinel.password_file.is_some() {
            return Some("redis.sentinel.password and redis.sentinel.password_file cannot be combined");
        }
        if self.tls.server_name.is_some() && !self.tls.verify_name {
            return Some("redis.tls.server_name has no effect with redis.tls.verify_name = false");
        }
        None
    }

    /// Returns a copy without passwords.
    #[must_use]
    pub fn masked(&self) -> Self {
        let mut masked = self.clone();
        for node in &mut masked.ring {
            node.url = crate::redact(&node.url);
        }
        if let Some(password) = &mut masked.sentinel.password {
            "***".clone_into(password);
        }
        masked
    }
}
