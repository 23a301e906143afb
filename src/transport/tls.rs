//! [`Tls`]: TLS and mutual TLS for listeners. Certificates are reloaded when their files change. If the new files are
//! invalid, the previous certificates stay in use.

use std::{
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use arc_swap::ArcSwap;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
};
use serde::{Deserialize, Serialize};
use sluicegate_files::{self as files, FileVersion};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use webpki::EndEntityCert;

use crate::debounce::Debounce;

/// Interval between two polls of the files.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Certificates of a listener. They are reloaded when their files change.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct TlsSettings {
    /// PEM file with the server certificate and its chain.
    pub cert_file: Option<PathBuf>,
    /// PEM file with the key of the server certificate.
    pub key_file: Option<PathBuf>,
    /// PEM file with CA certificates. If set, clients must have a certificate of one of these CAs.
    pub client_ca_file: Option<PathBuf>,
    /// DNS name that the client certificates must contain.
    pub client_name: Option<String>,
}

/// Error returned when TLS cannot be configured.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// The certificate or the key is missing.
    #[error("TLS needs both cert_file and key_file")]
    Incomplete,
    /// A file cannot be read or is invalid.
    #[error("cannot use {path}: {reason}")]
    File {
        /// The path of the file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// `client_name` is no DNS name, or `client_ca_file` is missing.
    #[error("client_name must be a DNS name and needs client_ca_file")]
    Name,
    /// The certificate and the key do not belong together.
    #[error("the certificate and the key cannot be used together")]
    Config(#[source] rustls::Error),
}

/// TLS configuration of a listener, replaced when its files change.
pub(super) struct Tls {
    settings: TlsSettings,
    /// Versions of the files that were read at the start.
    first_versions: Vec<Option<FileVersion>>,
    protocols: &'static [&'static [u8]],
    config: ArcSwap<ServerConfig>,
    /// Name that the certificates of all clients must have.
    client_name: Option<ServerName<'static>>,
}

impl Tls {
    /// Loads the certificates. Returns `None` if the settings contain none.
    ///
    /// `protocols` are the ALPN names of the supported protocols, in order of preference.
    pub(super) fn new(
        settings: &TlsSettings,
        protocols: &'static [&'static [u8]],
    ) -> Result<Option<Arc<Self>>, TlsError> {
        if settings.cert_file.is_none() && settings.key_file.is_none() && settings.client_ca_file.is_none() {
            return Ok(None);
        }
        let name = settings.client_name.clone().map(ServerName::try_from).transpose();
        let client_name = name.map_err(|_| TlsError::Name)?;
        if client_name.is_some() && settings.client_ca_file.is_none() {
            return Err(TlsError::Name);
        }
        let first_versions = versions(settings);
        let config = ArcSwap::new(load(settings, protocols)?);
        Ok(Some(Arc::new(Self { settings: settings.clone(), first_versions, protocols, config, client_name })))
    }

    /// Performs the TLS handshake, and verifies that the client's certificate has the name `client_name`.
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let stream = TlsAcceptor::from(self.config.load_full()).accept(stream).await?;
        if let Some(name) = &self.client_name {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let certificate = certificate.and_then(|der| EndEntityCert::try_from(der).ok());
            if certificate.is_none_or(|certificate| certificate.verify_is_valid_for_subject_name(name).is_err()) {
                return Err(io::Error::other("the client's certificate does not have the name in client_name"));
            }
        }
        Ok(stream)
    }

    /// Polls the files and reloads them when they change. Never returns.
    pub(super) async fn follow(self: Arc<Self>) {
        let mut debounce = Debounce::new(self.first_versions.clone());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if !debounce.poll(versions(&self.settings)) {
                continue;
            }
            let path = self.settings.cert_file.as_deref().map(|file| tracing::field::display(file.display()));
            match load(&self.settings, self.protocols) {
                Ok(config) => {
                    self.config.store(config);
                    tracing::info!(path, "certificates reloaded");
                }
                Err(error) => {
                    let error = crate::metrics::chain(&error);
                    tracing::error!(path, error, "cannot use the changed certificates; the previous ones stay in use");
                }
            }
        }
    }
}

fn versions(settings: &TlsSettings) -> Vec<Option<FileVersion>> {
    let files = [&settings.cert_file, &settings.key_file, &settings.client_ca_file];
    files.into_iter().flatten().map(|path| FileVersion::of(path)).collect()
}

fn load(settings: &TlsSettings, protocols: &[&[u8]]) -> Result<Arc<ServerConfig>, TlsError> {
    let (Some(cert), Some(key)) = (&settings.cert_file, &settings.key_file) else {
        return Err(TlsError::Incomplete);
    };
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| file_error(key, &error))?;
    let builder = ServerConfig::builder();
    let builder = match &settings.client_ca_file {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| file_error(path, &error))?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| file_error(path, &error))?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(TlsError::Config)?;
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = read(path)?;
    let certificates: Vec<_> =
        CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().map_err(|error| file_error(path, &error))?;
    if certificates.is_empty() {
        return Err(TlsError::File { path: path.to_owned(), reason: "the file contains no certificate".into() });
    }
    Ok(certificates)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    files::read(path, files::MAX_BYTES).map_err(|error| file_error(path, &error))
}

fn file_error(path: &Path, error: &impl ToString) -> TlsError {
    TlsError::File { path: path.to_owned(), reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use rcgen::{CertificateParams, KeyPair};

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn certificates_are_read_again_when_their_files_have_changed_and_only_then() {
        let _ = rustls::crypto::ring::default_provider().install_default();
        let folder = tempfile::tempdir().unwrap();
        let (cert_file, key_file) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let write = |names: &[&str]| {
            let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
            let key = KeyPair::generate().unwrap();
            let certificate = CertificateParams::new(names).unwrap().self_signed(&key).unwrap();
            fs::write(&cert_file, certificate.pem()).unwrap();
            fs::write(&key_file, key.serialize_pem()).unwrap();
        };
        write(&["localhost"]);
        let (cert_file, key_file) = (Some(cert_file.clone()), Some(key_file.clone()));
        let settings = TlsSettings { cert_file, key_file, ..TlsSettings::default() };
        let tls = Tls::new(&settings, &[b"h2"]).unwrap().unwrap();
        let following = tokio::spawn(Arc::clone(&tls).follow());
        let first = tls.config.load_full();
        tokio::time::sleep(POLL_INTERVAL * 10).await;
        assert!(Arc::ptr_eq(&first, &tls.config.load_full()));
        write(&["localhost", "sluicegate.example.com"]);
        tokio::time::sleep(POLL_INTERVAL * 10).await;
        assert!(!Arc::ptr_eq(&first, &tls.config.load_full()));
        following.abort();
    }
}
