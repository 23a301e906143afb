//! [`Certificates`]: the certificates of a connection to a collector.

use std::{io, path::Path};

use http::Uri;
use sluicegate_files as files;
use tonic::transport::{Certificate, ClientTlsConfig, Identity};

use super::OtlpTlsSettings;
use crate::telemetry::TelemetryError;

/// Certificates for a connection with TLS, in PEM.
pub(super) struct Certificates {
    /// Certificate authorities in place of the system's.
    pub(super) authorities: Option<Vec<u8>>,
    /// The client's certificate and its key.
    pub(super) identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl Certificates {
    /// Reads the files; `None` if the connection does not use TLS.
    pub(super) fn read(settings: &OtlpTlsSettings, uri: &Uri) -> Result<Option<Self>, TelemetryError> {
        if uri.scheme_str() != Some("https") {
            return Ok(None);
        }
        let mut authorities = None;
        if let Some(path) = &settings.ca_file {
            authorities = Some(read_file(files::read_authorities, "ca_file", path)?);
        }
        let identity = match (&settings.cert_file, &settings.key_file) {
            (Some(certificate), Some(key)) => Some((
                read_file(files::read_certificates, "cert_file", certificate)?,
                read_file(files::read_key, "key_file", key)?,
            )),
            _ => None,
        };
        Ok(Some(Self { authorities, identity }))
    }

    pub(super) fn into_grpc(self) -> ClientTlsConfig {
        let mut config = ClientTlsConfig::new();
        config = match self.authorities {
            Some(pem) => config.ca_certificate(Certificate::from_pem(pem)),
            None => config.with_native_roots(),
        };
        if let Some((certificate, key)) = self.identity {
            config = config.identity(Identity::from_pem(certificate, key));
        }
        config
    }
}

fn read_file(read: fn(&Path) -> io::Result<Vec<u8>>, setting: &str, path: &Path) -> Result<Vec<u8>, TelemetryError> {
    read(path).map_err(|error| TelemetryError(format!("telemetry.otlp.tls.{setting} {}: {error}", path.display())))
}
