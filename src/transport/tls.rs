//! TLS and mutual TLS; certificates are read anew when their files change, and bad ones change nothing.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use rustls::{
    RootCertStore, ServerConfig,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    server::WebPkiClientVerifier,
};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::{TlsAcceptor, server::TlsStream};
use webpki::EndEntityCert;

use super::grpc::TlsSettings;
use crate::debounce::Debounce;

/// Between two looks at the files.
const POLL_INTERVAL: Duration = Duration::from_millis(500);

/// Why there is no TLS.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// One of the two is missing.
    #[error("TLS needs both cert_file and key_file")]
    Incomplete,
    /// A file that is not what it should be.
    #[error("cannot use {path}: {reason}")]
    File {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A name that no certificate can have.
    #[error("client_name is a DNS name that clients' certificates have, beside a client_ca_file")]
    Name,
    /// The files don't make a configuration together.
    #[error("the certificate and key cannot be used together")]
    Config(#[source] rustls::Error),
}

pub(super) struct Tls {
    settings: TlsSettings,
    protocols: &'static [&'static [u8]],
    config: ArcSwap<ServerConfig>,
    /// In the certificates of all who come in.
    client_name: Option<ServerName<'static>>,
}

impl Tls {
    /// `None` without a certificate in the settings. `protocols`: those of HTTP that are spoken, the best first.
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
        let config = ArcSwap::new(load(settings, protocols)?);
        Ok(Some(Arc::new(Self { settings: settings.clone(), protocols, config, client_name })))
    }

    /// The handshake, and whether whoever calls has the name that is wanted.
    pub(super) async fn accept<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> io::Result<TlsStream<S>> {
        let stream = TlsAcceptor::from(self.config.load_full()).accept(stream).await?;
        if let Some(name) = &self.client_name {
            let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
            let certificate = certificate.and_then(|it| EndEntityCert::try_from(it).ok());
            if certificate.is_none_or(|it| it.verify_is_valid_for_subject_name(name).is_err()) {
                return Err(io::Error::other("the caller's certificate has another name than client_name"));
            }
        }
        Ok(stream)
    }

    /// Follows the files for ever.
    pub(super) async fn follow(self: Arc<Self>) {
        let mut settled = Debounce::new(fingerprint(&self.settings));
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if !settled.poll(fingerprint(&self.settings)) {
                continue;
            }
            match load(&self.settings, self.protocols) {
                Ok(config) => {
                    self.config.store(config);
                    tracing::info!("certificates reloaded");
                }
                Err(error) => {
                    let error = crate::errors::chain(&error);
                    tracing::error!(error, "the certificates changed and cannot be used; those before stay");
                }
            }
        }
    }
}

fn fingerprint(settings: &TlsSettings) -> Vec<Option<(SystemTime, u64)>> {
    let look = |path: &PathBuf| {
        let metadata = fs::metadata(path).ok()?;
        Some((metadata.modified().ok()?, metadata.len()))
    };
    let files = [&settings.cert_file, &settings.key_file, &settings.client_ca_file];
    files.into_iter().flatten().map(look).collect()
}

fn load(settings: &TlsSettings, protocols: &[&[u8]]) -> Result<Arc<ServerConfig>, TlsError> {
    let (Some(cert), Some(key)) = (&settings.cert_file, &settings.key_file) else {
        return Err(TlsError::Incomplete);
    };
    let chain = certificates(cert)?;
    let key = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| unusable(key, &error))?;
    let builder = ServerConfig::builder();
    let builder = match &settings.client_ca_file {
        None => builder.with_no_client_auth(),
        Some(path) => {
            let mut roots = RootCertStore::empty();
            for certificate in certificates(path)? {
                roots.add(certificate).map_err(|error| unusable(path, &error))?;
            }
            let verifier = WebPkiClientVerifier::builder(Arc::new(roots)).build();
            builder.with_client_cert_verifier(verifier.map_err(|error| unusable(path, &error))?)
        }
    };
    let mut config = builder.with_single_cert(chain, key).map_err(TlsError::Config)?;
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(Arc::new(config))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, TlsError> {
    let pem = read(path)?;
    let all: Vec<_> =
        CertificateDer::pem_slice_iter(&pem).collect::<Result<_, _>>().map_err(|error| unusable(path, &error))?;
    if all.is_empty() {
        return Err(TlsError::File { path: path.to_owned(), reason: "no certificate in it".into() });
    }
    Ok(all)
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    fs::read(path).map_err(|error: io::Error| unusable(path, &error))
}

fn unusable(path: &Path, error: &impl ToString) -> TlsError {
    TlsError::File { path: path.to_owned(), reason: error.to_string() }
}
