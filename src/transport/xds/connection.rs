//! Connects a [`Client`] to the control plane, and reconnects when a connection ends.

use std::{
    io,
    path::Path,
    sync::{Arc, atomic::Ordering::Relaxed},
    time::Duration,
};

use sluicegate_deadline::within;
use sluicegate_files as files;
use sluicegate_proto::envoy::service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient;
use tokio::time::sleep;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use super::{
    Protocol,
    client::{Client, Disconnect},
    stream,
};
use crate::metrics::WorkerId;

/// Interval of TCP keepalive probes on an idle connection.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
/// Interval of HTTP/2 pings. Servers in Go treat pings more often than every five minutes as an attack.
const PING_INTERVAL: Duration = Duration::from_secs(6 * 60);
/// Timeout for the reply to a ping.
const PING_TIMEOUT: Duration = Duration::from_secs(20);

impl Client {
    /// Connects and reconnects. Never returns.
    pub async fn run(self: Arc<Self>) {
        tracing::info!(server = %self.server, node = self.node.id, "subscribing to rules from the control plane");
        let mut pause = self.settings.retry_min;
        // The same reason is logged once, until the control plane responds again.
        let mut logged_reason = String::new();
        let mut known = stream::KnownResources::new();
        loop {
            self.attempts.add(WorkerId(0), 1);
            let disconnect = self.subscribe(&mut known).await;
            self.connected.store(false, Relaxed);
            if self.has_response.swap(false, Relaxed) {
                pause = self.settings.retry_min;
                logged_reason.clear();
            }
            let reason = crate::metrics::chain(&disconnect);
            if reason != logged_reason {
                tracing::warn!(
                    server = %self.server,
                    reason,
                    "control plane unavailable; keeping the current rules and reconnecting"
                );
                logged_reason = reason;
            }
            sleep(pause.mul_f64(rand::random_range(0.5..=1.0))).await;
            pause = pause.saturating_mul(2).min(self.settings.retry_max);
        }
    }

    /// Opens one connection and receives updates until it ends.
    async fn subscribe(&self, known: &mut stream::KnownResources) -> Disconnect {
        let limit = self.settings.connect_timeout;
        let channel = match within(limit, async { Ok(self.endpoint()?.connect().await?) }).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(disconnect)) => return disconnect,
            Err(_) => return Disconnect::Timeout(limit),
        };
        self.connected.store(true, Relaxed);
        let client = AggregatedDiscoveryServiceClient::new(channel);
        let client = client.max_decoding_message_size(self.settings.max_message_bytes);
        let ended = match self.settings.protocol {
            Protocol::Sotw => stream::state_of_the_world(self, client).await,
            Protocol::Delta => stream::delta(self, client, known).await,
        };
        match ended {
            Ok(never) => match never {},
            Err(disconnect) => disconnect,
        }
    }

    /// Returns the endpoint. Reads the certificates for each connection, so that changed files take effect.
    fn endpoint(&self) -> Result<Endpoint, Disconnect> {
        let endpoint = Channel::builder(self.server.clone())
            .tcp_keepalive(Some(TCP_KEEPALIVE))
            .http2_keep_alive_interval(PING_INTERVAL)
            .keep_alive_timeout(PING_TIMEOUT)
            .keep_alive_while_idle(true);
        if self.server.scheme_str() != Some("https") {
            return Ok(endpoint);
        }
        let settings = &self.settings.tls;
        let mut tls = match &settings.ca_file {
            Some(path) => {
                let authorities = read_file(files::read_authorities, path)?;
                ClientTlsConfig::new().ca_certificate(Certificate::from_pem(authorities))
            }
            None => ClientTlsConfig::new().with_native_roots(),
        };
        if let (Some(cert_file), Some(key_file)) = (&settings.cert_file, &settings.key_file) {
            let certificates = read_file(files::read_certificates, cert_file)?;
            let key = read_file(files::read_key, key_file)?;
            tls = tls.identity(Identity::from_pem(certificates, key));
        }
        if let Some(name) = &settings.server_name {
            tls = tls.domain_name(name.clone());
        }
        Ok(endpoint.tls_config(tls)?)
    }
}

/// Reads a file of the TLS settings.
fn read_file(read: fn(&Path) -> io::Result<Vec<u8>>, path: &Path) -> Result<Vec<u8>, Disconnect> {
    read(path).map_err(|source| Disconnect::File { path: path.to_owned(), source })
}
