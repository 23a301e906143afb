//! Files in PEM: certificates and keys. A file that contains none is an error here, but not for TLS libraries.

use std::{io, path::Path};

use rustls::{
    RootCertStore,
    pki_types::{
        CertificateDer, PrivateKeyDer,
        pem::{self, PemObject},
    },
};

use super::{MAX_BYTES, read};

/// Reads a PEM file with certificate authorities.
///
/// # Errors
///
/// Returns an error if the file cannot be read, contains no certificate, or an invalid one.
pub fn read_authorities(path: &Path) -> io::Result<Vec<u8>> {
    let pem = read_certificates(path)?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&pem).flatten() {
        roots.add(certificate).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
    }
    Ok(pem)
}

/// Reads a PEM file with certificates.
///
/// # Errors
///
/// Returns an error if the file cannot be read, contains no certificate, or is not valid PEM.
pub fn read_certificates(path: &Path) -> io::Result<Vec<u8>> {
    let pem = read(path, MAX_BYTES)?;
    let mut is_empty = true;
    for certificate in CertificateDer::pem_slice_iter(&pem) {
        certificate.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        is_empty = false;
    }
    if is_empty {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file contains no certificate in PEM"));
    }
    Ok(pem)
}

/// Reads a PEM file with a private key.
///
/// # Errors
///
/// Returns an error if the file cannot be read, or contains no private key.
pub fn read_key(path: &Path) -> io::Result<Vec<u8>> {
    let pem = read(path, MAX_BYTES)?;
    if matches!(PrivateKeyDer::from_pem_slice(&pem), Err(pem::Error::NoItemsFound)) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the file contains no private key in PEM"));
    }
    Ok(pem)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_without_a_certificate_or_key_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let error = |read: fn(&Path) -> io::Result<Vec<u8>>| read(&path).unwrap_err().to_string();
        for text in ["", "no certificate\n", "-----BEGIN OTHER-----\nAAAA\n-----END OTHER-----\n"] {
            fs::write(&path, text).unwrap();
            assert_eq!(error(read_authorities), "the file contains no certificate in PEM");
            assert_eq!(error(read_certificates), "the file contains no certificate in PEM");
            assert_eq!(error(read_key), "the file contains no private key in PEM");
        }
        fs::write(&path, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(read_certificates(&path).is_ok());
        assert_eq!(read_authorities(&path).unwrap_err().kind(), io::ErrorKind::InvalidData);
    }
}
