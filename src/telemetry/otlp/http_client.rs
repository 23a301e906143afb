//! [`HttpClient`]: sends metrics and traces to an OpenTelemetry collector over HTTP or HTTPS.

use std::{io, sync::Arc, time::Duration};

use hyper_rustls::{ConfigBuilderExt, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use opentelemetry_http::hyper::HyperClient;
use rustls::{
    ClientConfig, RootCertStore,
    crypto::ring,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
};

use super::certificates::Certificates;

/// An HTTP client, to be used inside a tokio runtime.
pub(super) type HttpClient = HyperClient<HttpsConnector<HttpConnector>>;

/// Creates a client, which connects when it first sends. Without certificates, it cannot use HTTPS.
pub(super) fn connect(timeout: Duration, certificates: Option<Certificates>) -> io::Result<HttpClient> {
    let config = tls_config(certificates)?;
    let connector = HttpsConnectorBuilder::new().with_tls_config(config).https_or_http().enable_http1().build();
    Ok(HyperClient::new(connector, timeout, None))
}

fn tls_config(certificates: Option<Certificates>) -> io::Result<ClientConfig> {
    let builder = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(invalid_data)?;
    let Some(Certificates { authorities, identity }) = certificates else {
        return Ok(builder.with_root_certificates(RootCertStore::empty()).with_no_client_auth());
    };
    let builder = match authorities {
        Some(pem) => {
            let mut roots = RootCertStore::empty();
            for certificate in read_pem(&pem)? {
                roots.add(certificate).map_err(invalid_data)?;
            }
            builder.with_root_certificates(roots)
        }
        None => builder.with_native_roots()?,
    };
    let Some((certificate, key)) = identity else {
        return Ok(builder.with_no_client_auth());
    };
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    builder.with_client_auth_cert(read_pem(&certificate)?, key).map_err(invalid_data)
}

fn read_pem(pem: &[u8]) -> io::Result<Vec<CertificateDer<'static>>> {
    let certificates: Result<_, _> = CertificateDer::pem_slice_iter(pem).collect();
    certificates.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

fn invalid_data(error: rustls::Error) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}
