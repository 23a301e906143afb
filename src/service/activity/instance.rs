//! [`Instance`]: an instance of the service, and its name.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// An instance of the service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// Unique name: host and port.
    pub name: String,
    /// Version of the service.
    pub version: String,
    /// Microseconds since the Unix epoch at which the instance started.
    pub since: u64,
}

/// Returns the name of this instance: the host and the port. Without `/proc`, the variable `HOSTNAME` is the host.
pub fn instance_name(port: Option<u16>) -> Arc<str> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = host.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_else(|| "localhost".to_owned());
    match port {
        Some(port) => format!("{}:{port}", host.trim()).into(),
        None => host.trim().into(),
    }
}
