//! The connection to a control plane, and the next one.

use std::{
    collections::BTreeMap,
    fs,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use opentelemetry::metrics::Meter;
use prost::Message;
use prost_types::{Any, Struct, Value, value::Kind};
use sluicegate_proto::{
    envoy::{
        config::core::v3::{Node, node::UserAgentVersionType},
        service::discovery::v3::aggregated_discovery_service_client::AggregatedDiscoveryServiceClient,
    },
    ratelimit::config::ratelimit::v3::RateLimitConfig,
};
use tokio::time::{sleep, timeout};
use tonic::{
    Request, Status,
    metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap},
    transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity, Uri},
};

use super::{Protocol, Settings, convert, stream};
use crate::{
    metrics::{Counter, WorkerId, observe_counter, observe_gauge},
    rules::{Diagnostic, SourceFile},
    service::{reload::Reloader, run_on_compile_thread},
};

/// A silent connection is asked whether it lives: by TCP, and more rarely by HTTP/2, since servers in Go take pings more
/// often than every five minutes for an attack.
const TCP_KEEPALIVE: Duration = Duration::from_secs(30);
const PING: Duration = Duration::from_secs(6 * 60);
/// And so long for the answer.
const PONG: Duration = Duration::from_secs(20);
/// A complaint is no longer than this.
const LONGEST_COMPLAINT: usize = 4_096;

/// Settings by which nobody can be asked.
#[derive(Debug, thiserror::Error)]
pub enum XdsError {
    /// The address.
    #[error("rules.xds.server {0:?} is no address like http://host:18000 or https://host:18001")]
    Address(String),
    /// A header or what the node is to say.
    #[error("rules.xds.{setting} has {text:?}, which is no {what}")]
    Pair {
        /// The list.
        setting: &'static str,
        /// One of it.
        text: String,
        /// What it should be.
        what: &'static str,
    },
    /// One of two files.
    #[error("rules.xds.tls needs both cert_file and key_file, or none")]
    Identity,
}

/// Why a connection has ended, or has not begun.
#[derive(Debug, thiserror::Error)]
pub(super) enum Disconnect {
    #[error("cannot read {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("no connection")]
    Connect(#[from] tonic::transport::Error),
    #[error("no connection within {0:?}")]
    Slow(Duration),
    #[error("the stream has broken: {0}")]
    Stream(String),
    #[error("the stream has ended")]
    Ended,
}

impl From<Status> for Disconnect {
    /// What is at the bottom of it; the layers above say the same in more words.
    fn from(status: Status) -> Self {
        let mut cause = std::error::Error::source(&status);
        while let Some(deeper) = cause.and_then(std::error::Error::source) {
            cause = Some(deeper);
        }
        Self::Stream(cause.map_or_else(|| status.message().to_owned(), ToString::to_string))
    }
}

/// Asks a control plane for rules.
pub struct Client {
    settings: Settings,
    server: Uri,
    headers: MetadataMap,
    node: Node,
    reloader: Arc<Reloader>,
    /// There is a connection.
    connected: AtomicBool,
    /// There has been a response by it.
    heard: AtomicBool,
    attempts: Counter,
    accepted: Counter,
    refused: Counter,
}

impl Client {
    /// `None` without a control plane in the settings.
    pub fn new(settings: &Settings, reloader: &Arc<Reloader>) -> Result<Option<Arc<Self>>, XdsError> {
        let Some(address) = &settings.server else {
            return Ok(None);
        };
        let server: Uri = address.parse().map_err(|_| XdsError::Address(address.clone()))?;
        if !matches!(server.scheme_str(), Some("http" | "https")) || server.port().is_none() {
            return Err(XdsError::Address(address.clone()));
        }
        if settings.tls.cert_file.is_some() != settings.tls.key_file.is_some() {
            return Err(XdsError::Identity);
        }
        let mut headers = MetadataMap::new();
        for text in &settings.headers {
            let header = text.split_once('=').and_then(|(name, value)| {
                let name = AsciiMetadataKey::from_bytes(name.trim().as_bytes()).ok()?;
                Some((name, AsciiMetadataValue::try_from(value.trim()).ok()?))
            });
            let (name, value) = header.ok_or_else(|| XdsError::Pair {
                setting: "headers",
                // What is behind it may be a secret.
                text: text.split('=').next().unwrap_or_default().to_owned(),
                what: "name=value of an HTTP header",
            })?;
            headers.append(name, value);
        }
        let mut fields = BTreeMap::new();
        for text in &settings.node_metadata {
            let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
            let what = "name=value";
            let (name, value) =
                pair.ok_or_else(|| XdsError::Pair { setting: "node_metadata", text: text.clone(), what })?;
            fields.insert(name.to_owned(), Value { kind: Some(Kind::StringValue(value.to_owned())) });
        }
        let node = Node {
            id: settings.node_id.clone(),
            metadata: (!fields.is_empty()).then_some(Struct { fields }),
            user_agent_name: env!("CARGO_PKG_NAME").into(),
            user_agent_version_type: Some(UserAgentVersionType::UserAgentVersion(env!("CARGO_PKG_VERSION").into())),
            ..Node::default()
        };
        Ok(Some(Arc::new(Self {
            settings: settings.clone(),
            server,
            headers,
            node,
            reloader: Arc::clone(reloader),
            connected: AtomicBool::new(false),
            heard: AtomicBool::new(false),
            attempts: Counter::new(1),
            accepted: Counter::new(1),
            refused: Counter::new(1),
        })))
    }

    /// Asks for ever.
    pub async fn run(self: Arc<Self>) {
        tracing::info!(server = %self.server, node = self.node.id, "asking the control plane for rules");
        let mut pause = self.settings.retry_min;
        // What goes wrong is told once, until it is something else or the control plane answers again.
        let mut told = String::new();
        let mut known = stream::Known::new();
        loop {
            self.attempts.add(WorkerId(0), 1);
            let lost = self.subscribe(&mut known).await;
            self.connected.store(false, Relaxed);
            if self.heard.swap(false, Relaxed) {
                pause = self.settings.retry_min;
                told.clear();
            }
            let reason = crate::errors::chain(&lost);
            if reason != told {
                tracing::warn!(server = %self.server, reason, "no control plane; the rules stay, and it is tried again");
                told = reason;
            }
            sleep(pause.mul_f64(rand::random_range(0.5..=1.0))).await;
            pause = pause.saturating_mul(2).min(self.settings.retry_max);
        }
    }

    /// By one connection, until it ends.
    async fn subscribe(&self, known: &mut stream::Known) -> Disconnect {
        let limit = self.settings.connect_timeout;
        let channel = match timeout(limit, async { Ok(self.endpoint()?.connect().await?) }).await {
            Ok(Ok(channel)) => channel,
            Ok(Err(lost)) => return lost,
            Err(_) => return Disconnect::Slow(limit),
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
            Err(lost) => lost,
        }
    }

    /// Certificates are read here, and so for each connection.
    fn endpoint(&self) -> Result<Endpoint, Disconnect> {
        let endpoint = Channel::builder(self.server.clone())
            .connect_timeout(self.settings.connect_timeout)
            .tcp_keepalive(Some(TCP_KEEPALIVE))
            .http2_keep_alive_interval(PING)
            .keep_alive_timeout(PONG)
            .keep_alive_while_idle(true);
        if self.server.scheme_str() != Some("https") {
            return Ok(endpoint);
        }
        let read = |path: &PathBuf| fs::read(path).map_err(|source| Disconnect::File { path: path.clone(), source });
        let files = &self.settings.tls;
        let mut tls = match &files.ca_file {
            Some(path) => ClientTlsConfig::new().ca_certificate(Certificate::from_pem(read(path)?)),
            None => ClientTlsConfig::new().with_native_roots(),
        };
        if let (Some(cert), Some(key)) = (&files.cert_file, &files.key_file) {
            tls = tls.identity(Identity::from_pem(read(cert)?, read(key)?));
        }
        if let Some(name) = &files.server_name {
            tls = tls.domain_name(name.clone());
        }
        Ok(endpoint.tls_config(tls)?)
    }

    /// Who asks.
    pub(super) const fn node(&self) -> &Node {
        &self.node
    }

    /// A call with its headers.
    pub(super) fn request<T>(&self, body: T) -> Request<T> {
        let mut request = Request::new(body);
        *request.metadata_mut() = self.headers.clone();
        request
    }

    /// There was a response.
    pub(super) fn heard(&self) {
        if !self.heard.swap(true, Relaxed) {
            tracing::info!(server = %self.server, "the control plane answers");
        }
    }

    /// Puts in force what `read` makes of a response, and gives it back; or a sentence for who sent it. `news`: the resources of the
    /// response, as they came. All of it apart: with many rules that is work for seconds.
    pub(super) async fn offer<T: Send + 'static>(
        &self,
        news: Vec<Any>,
        read: impl FnOnce(&[Any]) -> Result<(Vec<SourceFile>, T), String> + Send + 'static,
    ) -> Result<T, String> {
        let reloader = Arc::clone(&self.reloader);
        let offered = run_on_compile_thread(move || {
            let (files, read) = read(&news).inspect_err(|complaint| {
                tracing::error!("the control plane has sent what cannot be read; the rules stay: {complaint}");
            })?;
            let locate = |problems: &mut Vec<Diagnostic>| {
                let configs: Vec<_> = news.iter().filter_map(|it| RateLimitConfig::decode(&*it.value).ok()).collect();
                convert::locate(problems, &configs);
            };
            reloader.push(&files, locate).map_err(|error| crate::errors::chain(&error))?;
            Ok(read)
        });
        let offered = offered.await.unwrap_or_else(|error| Err(error.to_string()));
        let counter = if offered.is_ok() { &self.accepted } else { &self.refused };
        counter.add(WorkerId(0), 1);
        offered.map_err(|mut complaint| {
            if let Some((end, _)) = complaint.char_indices().find(|(start, _)| *start >= LONGEST_COMPLAINT) {
                complaint.truncate(end);
                complaint.push_str(" …");
            }
            complaint
        })
    }

    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        observe_gauge(meter, "sluicegate_xds_connected", "Whether the control plane is connected", move || {
            this.connected.load(Relaxed).into()
        });
        type Read = fn(&Client) -> &Counter;
        let counters: [(&'static str, &'static str, Read); 3] = [
            ("sluicegate_xds_connection_attempts_total", "Connections to the control plane that were tried", |it| {
                &it.attempts
            }),
            ("sluicegate_xds_updates_accepted_total", "Updates by the control plane that were taken", |it| {
                &it.accepted
            }),
            ("sluicegate_xds_updates_rejected_total", "Updates by the control plane that were refused", |it| {
                &it.refused
            }),
        ];
        for (name, description, read) in counters {
            let this = Arc::clone(self);
            observe_counter(meter, name, description, move || read(&this).get());
        }
    }
}
