//! Connections and errors of the commands that are gRPC clients: `ctl` and `request`.

use std::{
    error::Error,
    io,
    path::{Path, PathBuf},
    sync::LazyLock,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use sluicegate_files as files;
use sluicegate_proto::FILE_DESCRIPTOR_SET;
use tonic::{
    Status,
    transport::{Certificate, ClientTlsConfig, Endpoint, Identity},
};

/// Timeout of connections and calls.
const TIMEOUT: Duration = Duration::from_secs(10);

static POOL: LazyLock<Option<DescriptorPool>> = LazyLock::new(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).ok());

/// Files for connections to `https://` addresses.
#[derive(Debug, Args)]
pub(crate) struct Tls {
    /// PEM file with the certificate authorities to trust for https:// [default: the system's]
    #[arg(long, global = true, value_name = "FILE", help_heading = "Connection")]
    ca: Option<PathBuf>,
    /// PEM file with the client certificate for https://
    #[arg(long, global = true, value_name = "FILE", requires = "key", help_heading = "Connection")]
    cert: Option<PathBuf>,
    /// PEM file with the key of the client certificate
    #[arg(long, global = true, value_name = "FILE", requires = "cert", help_heading = "Connection")]
    key: Option<PathBuf>,
}

impl Tls {
    /// Returns the endpoint at an address from [`address`].
    pub(crate) fn endpoint(&self, addr: &str) -> anyhow::Result<Endpoint> {
        let mut endpoint =
            Endpoint::from_shared(addr.to_owned()).with_context(|| format!("{addr:?} is not a valid address"))?;
        if addr.starts_with("https:") {
            let mut tls = ClientTlsConfig::new();
            tls = match &self.ca {
                Some(ca) => tls.ca_certificate(Certificate::from_pem(read(files::read_authorities, ca)?)),
                None => tls.with_native_roots(),
            };
            if let (Some(cert), Some(key)) = (&self.cert, &self.key) {
                tls = tls
                    .identity(Identity::from_pem(read(files::read_certificates, cert)?, read(files::read_key, key)?));
            }
            endpoint = endpoint.tls_config(tls).context("cannot set up TLS")?;
        } else if self.ca.is_some() || self.cert.is_some() {
            bail!("--ca and --cert require an https:// address, not {addr}");
        }
        Ok(endpoint.connect_timeout(TIMEOUT).timeout(TIMEOUT))
    }
}

fn read(read: fn(&Path) -> io::Result<Vec<u8>>, path: &Path) -> anyhow::Result<Vec<u8>> {
    read(path).with_context(|| format!("cannot read {}", path.display()))
}

/// Returns an address with its scheme, which is `http://` if there is none.
pub(crate) fn address(text: &str) -> anyhow::Result<String> {
    let text = text.trim();
    match text.split_once("://") {
        Some(("http" | "https", host)) if !host.is_empty() => Ok(text.to_owned()),
        None if !text.is_empty() => Ok(format!("http://{text}")),
        _ => bail!("{text:?} is not an address such as http://127.0.0.1:8082 or https://gate.example.org:8082"),
    }
}

/// Runs a client on a runtime of this thread.
pub(crate) fn block_on<T>(client: impl Future<Output = anyhow::Result<T>>) -> anyhow::Result<T> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(client)
}

/// Returns the message of a status, with all of its causes. `if_refused` is added if nothing listens at the address.
pub(crate) fn message(status: &Status, if_refused: &str) -> String {
    let mut message = status.message().to_owned();
    let mut source = Error::source(status);
    while let Some(cause) = source {
        let cause_message = cause.to_string();
        if !message.contains(&cause_message) {
            message += &format!(": {cause_message}");
        }
        source = cause.source();
    }
    if message.contains("Connection refused") {
        message += &format!("; {if_refused}");
    } else if message.contains("InvalidContentType") {
        message += "; the server does not use TLS at this address, so use http:// in place of https://";
    }
    message
}

/// Returns a message as proto3 JSON. `name` is its full name.
pub(crate) fn json(name: &str, message: &impl Message) -> anyhow::Result<String> {
    let descriptor = POOL.as_ref().and_then(|pool| pool.get_message_by_name(name));
    let descriptor = descriptor.with_context(|| format!("no JSON representation of {name}"))?;
    let message = DynamicMessage::decode(descriptor, &message.encode_to_vec()[..])?;
    Ok(serde_json::to_string(&message)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_without_a_scheme_is_plain_http() {
        for (text, expected) in [
            ("127.0.0.1:8082", "http://127.0.0.1:8082"),
            ("localhost:1", "http://localhost:1"),
            (" http://a:1 ", "http://a:1"),
            ("https://a:1", "https://a:1"),
        ] {
            assert_eq!(address(text).unwrap(), expected);
        }
        for text in ["", "http://", "redis://a:1", "unix:///a"] {
            let error = address(text).unwrap_err().to_string();
            assert!(error.contains("is not an address such as http://127.0.0.1:8082"), "{error}");
        }
    }
}
