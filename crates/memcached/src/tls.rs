//! [`Tls`]: connections to servers with TLS.

use std::{io, path::Path, sync::Arc};

use rustls::{
    CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime, pem::PemObject},
};
use sluicegate_files as files;
use sluicegate_store::TlsSettings;
use tokio::net::TcpStream;
use tokio_rustls::{TlsConnector, client::TlsStream};

use super::SetupError;

/// The certificates of connections, and the name that those of the servers must have.
#[derive(Clone)]
pub(crate) struct Tls {
    connector: TlsConnector,
    /// Name that replaces the host in the address.
    name: Option<ServerName<'static>>,
}

impl Tls {
    /// Reads the certificates.
    ///
    /// # Errors
    ///
    /// Returns an error if a file cannot be read, a certificate or key is invalid, or the name is none.
    pub(crate) fn new(settings: &TlsSettings) -> Result<Self, SetupError> {
        let config = client_config(settings)?;
        let name = match &settings.server_name {
            Some(name) => Some(ServerName::try_from(name.clone()).map_err(|_| SetupError::ServerName(name.clone()))?),
            None => None,
        };
        Ok(Self { connector: TlsConnector::from(Arc::new(config)), name })
    }

    /// Establishes TLS with the server at `host`.
    ///
    /// # Errors
    ///
    /// Returns an error if one side does not accept the other's certificate, or the connection fails.
    pub(crate) async fn connect(&self, stream: TcpStream, host: &str) -> io::Result<TlsStream<TcpStream>> {
        let name = match &self.name {
            Some(name) => name.clone(),
            None => ServerName::try_from(host.to_owned()).map_err(io::Error::other)?,
        };
        self.connector.connect(name, stream).await
    }
}

fn client_config(settings: &TlsSettings) -> Result<ClientConfig, SetupError> {
    let provider = Arc::new(ring::default_provider());
    let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(authorities(settings)?), Arc::clone(&provider));
    let verifier = verifier.build().map_err(|error| SetupError::Tls(rustls::Error::General(error.to_string())))?;
    let verifier = Verifier { inner: verifier, verifies_name: settings.verify_name };
    let builder = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let builder = builder.map_err(SetupError::Tls)?.dangerous().with_custom_certificate_verifier(Arc::new(verifier));
    let (Some(certificate), Some(key)) = (&settings.cert_file, &settings.key_file) else {
        return Ok(builder.with_no_client_auth());
    };
    let chain = read(certificate, files::read_certificates(certificate))?;
    let private = read(key, files::read_key(key))?;
    let private = PrivateKeyDer::from_pem_slice(&private).map_err(|error| invalid(key, error))?;
    builder.with_client_auth_cert(certificates(certificate, &chain)?, private).map_err(SetupError::Tls)
}

/// Returns the authorities of the file, or else those of the system.
fn authorities(settings: &TlsSettings) -> Result<RootCertStore, SetupError> {
    let mut roots = RootCertStore::empty();
    let Some(path) = &settings.ca_file else {
        roots.add_parsable_certificates(rustls_native_certs::load_native_certs().certs);
        return Ok(roots);
    };
    let pem = read(path, files::read_authorities(path))?;
    for certificate in certificates(path, &pem)? {
        roots.add(certificate).map_err(SetupError::Tls)?;
    }
    Ok(roots)
}

fn certificates(path: &Path, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, SetupError> {
    let certificates: Result<_, _> = CertificateDer::pem_slice_iter(pem).collect();
    certificates.map_err(|error| invalid(path, error))
}

fn read<T>(path: &Path, result: io::Result<T>) -> Result<T, SetupError> {
    result.map_err(|source| SetupError::Certificate { path: path.display().to_string(), source })
}

fn invalid(path: &Path, error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> SetupError {
    let source = io::Error::new(io::ErrorKind::InvalidData, error);
    SetupError::Certificate { path: path.display().to_string(), source }
}

/// Verifier that accepts certificates of trusted authorities, and that can ignore the name in them.
#[derive(Debug)]
struct Verifier {
    inner: Arc<WebPkiServerVerifier>,
    verifies_name: bool,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        // The name is checked last, so a certificate with another error is not accepted.
        match self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            Err(rustls::Error::InvalidCertificate(
                CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. },
            )) if !self.verifies_name => Ok(ServerCertVerified::assertion()),
            result => result,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
