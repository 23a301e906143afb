//! [`Client`]: the state of a connection to the control plane, and how an update takes effect.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::Duration,
};

use prost::Message;
use prost_types::{Any, Struct, Value, value::Kind};
use sluicegate_proto::{
    envoy::config::core::v3::{Node, node::UserAgentVersionType},
    ratelimit::config::ratelimit::v3::RateLimitConfig,
};
use tonic::{
    Request, Status,
    metadata::{AsciiMetadataKey, AsciiMetadataValue, MetadataMap},
    transport::Uri,
};

use super::{Settings, convert};
use crate::{
    metrics::{Counter, Meter, Registrar, WorkerId},
    rules::{Diagnostic, SourceFile},
    service::{reload::RulesInForce, run_on_compile_thread},
};

/// Maximum length of the error in a NACK.
const MAX_ERROR_BYTES: usize = 4_096;

/// Error returned when the settings for the control plane are invalid.
#[derive(Debug, thiserror::Error)]
pub enum XdsError {
    /// The address is invalid.
    #[error("rules.xds.server must be an address such as http://host:18000 or https://host:18001, not {0:?}")]
    Address(String),
    /// A header or an entry of the node metadata is invalid.
    #[error("rules.xds.{setting} must contain {expected}, not {text:?}")]
    Pair {
        /// The name of the setting.
        setting: &'static str,
        /// The invalid element.
        text: String,
        /// The expected format.
        expected: &'static str,
    },
    /// The certificate or the key is missing.
    #[error("rules.xds.tls needs both cert_file and key_file, or neither")]
    Identity,
}

/// The reason why a connection has ended or could not be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum Disconnect {
    #[error("cannot read {path}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("cannot connect")]
    Connect(#[from] tonic::transport::Error),
    #[error("no connection within {0:?}")]
    Timeout(Duration),
    #[error("the stream failed: {0}")]
    Stream(String),
    #[error("the stream has ended")]
    Ended,
}

impl From<Status> for Disconnect {
    /// Converts the innermost cause of a status. The outer errors only repeat it.
    fn from(status: Status) -> Self {
        let mut cause = std::error::Error::source(&status);
        while let Some(deeper) = cause.and_then(std::error::Error::source) {
            cause = Some(deeper);
        }
        let message = match cause {
            Some(cause) => cause.to_string(),
            None => status.message().to_owned(),
        };
        Self::Stream(message)
    }
}

/// Client that receives rules from a control plane.
pub struct Client {
    pub(super) settings: Settings,
    pub(super) server: Uri,
    pub(super) headers: MetadataMap,
    pub(super) node: Node,
    pub(super) in_force: Arc<RulesInForce>,
    /// Whether a connection is open.
    pub(super) connected: AtomicBool,
    /// Whether the connection has received a response.
    pub(super) has_response: AtomicBool,
    pub(super) attempts: Counter,
    pub(super) accepted: Counter,
    pub(super) rejected: Counter,
}

impl Client {
    /// Creates a client. Returns `None` if the settings contain no control plane.
    ///
    /// # Errors
    ///
    /// Returns an error if the settings are invalid.
    pub fn new(settings: &Settings, in_force: &Arc<RulesInForce>) -> Result<Option<Arc<Self>>, XdsError> {
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
                // Only the name of the header, because its value may be a secret.
                text: text
                    .split(|end: char| end == '=' || end == ':' || end.is_whitespace())
                    .next()
                    .unwrap_or_default()
                    .to_owned(),
                expected: "HTTP headers as name=value",
            })?;
            headers.append(name, value);
        }
        let mut fields = BTreeMap::new();
        for text in &settings.node_metadata {
            let pair = text.split_once('=').filter(|(name, _)| !name.is_empty());
            let expected = "name=value";
            let (name, value) =
                pair.ok_or_else(|| XdsError::Pair { setting: "node_metadata", text: text.clone(), expected })?;
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
            in_force: Arc::clone(in_force),
            connected: AtomicBool::new(false),
            has_response: AtomicBool::new(false),
            attempts: Counter::new(1),
            accepted: Counter::new(1),
            rejected: Counter::new(1),
        })))
    }

    /// Returns the node that this client represents.
    pub(super) const fn node(&self) -> &Node {
        &self.node
    }

    /// Returns a request with the configured headers.
    pub(super) fn request<T>(&self, body: T) -> Request<T> {
        let mut request = Request::new(body);
        *request.metadata_mut() = self.headers.clone();
        request
    }

    /// Records that a response was received, and logs the first response of a connection.
    pub(super) fn note_response(&self) {
        if !self.has_response.swap(true, Relaxed) {
            tracing::info!(server = %self.server, "receiving rules from the control plane");
        }
    }

    /// Puts the rule files in force that `read` returns for the resources of a response.
    ///
    /// Returns the second value that `read` returns, or the error for a NACK. All of this runs on the compile thread,
    /// because it takes seconds with many rules.
    pub(super) async fn apply_update<T: Send + 'static>(
        &self,
        resources: Vec<Any>,
        read: impl FnOnce(&[Any]) -> Result<(Vec<SourceFile>, T), String> + Send + 'static,
    ) -> Result<T, String> {
        let in_force = Arc::clone(&self.in_force);
        let result = run_on_compile_thread(move || {
            let (files, value) = read(&resources).inspect_err(|error| {
                tracing::error!("cannot read an update of the control plane; keeping the current rules: {error}");
            })?;
            let pushed = in_force.push(&files, |diagnostics| locate(diagnostics, &resources));
            pushed.map_err(|error| crate::metrics::chain(&error))?;
            Ok(value)
        });
        let result = result.await.unwrap_or_else(|error| Err(error.to_string()));
        let counter = if result.is_ok() { &self.accepted } else { &self.rejected };
        counter.add(WorkerId(0), 1);
        result.map_err(|mut error| {
            if let Some((end, _)) = error.char_indices().find(|(start, _)| *start >= MAX_ERROR_BYTES) {
                error.truncate(end);
                error.push_str(" …");
            }
            error
        })
    }

    /// Registers the metrics of the connection with `meter`.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: self };
        registrar.gauge("sluicegate_xds_connected", "1 if the control plane is connected, otherwise 0", |client| {
            client.connected.load(Relaxed).into()
        });
        registrar.counter(
            "sluicegate_xds_connection_attempts_total",
            "Number of attempts to connect to the control plane",
            |client| client.attempts.get(),
        );
        registrar.counter(
            "sluicegate_xds_updates_accepted_total",
            "Number of accepted updates from the control plane",
            |client| client.accepted.get(),
        );
        registrar.counter(
            "sluicegate_xds_updates_rejected_total",
            "Number of rejected updates from the control plane",
            |client| client.rejected.get(),
        );
    }
}

/// Replaces the lines in diagnostics by the resources of the update and their descriptors.
fn locate(diagnostics: &mut Vec<Diagnostic>, resources: &[Any]) {
    let configs: Vec<_> =
        resources.iter().filter_map(|resource| RateLimitConfig::decode(&*resource.value).ok()).collect();
    convert::locate(diagnostics, &configs);
}
