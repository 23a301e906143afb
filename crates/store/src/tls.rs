//! [`TlsSettings`] of the connections to the servers of a store.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// Certificates for connections to servers with TLS.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file with the certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// PEM file with the client certificate.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the client certificate.
    pub key_file: Option<PathBuf>,
    /// Name that the certificates of the servers must have, instead of the host in the address.
    pub server_name: Option<String>,
    /// Whether the certificate of a server must have its name. If not, any certificate of a trusted authority is
    /// accepted.
    pub verify_name: bool,
}

impl Default for TlsSettings {
    fn default() -> Self {
        Self { ca_file: None, cert_file: None, key_file: None, server_name: None, verify_name: true }
    }
}
