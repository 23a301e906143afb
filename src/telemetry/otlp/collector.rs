//! [`Collector`]: sends metrics or traces to an OpenTelemetry collector, over gRPC or HTTP.

use std::{fmt, future::poll_fn, io::Read, time::Duration};

use bytes::Bytes;
use flate2::{Compression, read::GzEncoder};
use http::{
    HeaderMap, HeaderValue, Method, StatusCode, Uri, Version,
    header::{CONTENT_ENCODING, CONTENT_TYPE, TE},
};
use http_body_util::{BodyExt, Full};
use opentelemetry_http::HttpClient as _;
use opentelemetry_proto::tonic::collector::{
    metrics::v1::ExportMetricsServiceRequest, trace::v1::ExportTraceServiceRequest,
};
use prost::Message;
use tokio::{runtime::Handle, time::timeout};
use tonic::{
    Code, Status,
    body::Body,
    transport::{Channel, Endpoint},
};
use tower_service::Service;

use super::{
    OtlpCompression, OtlpProtocol, OtlpSettings, certificates::Certificates, http_client, http_client::HttpClient,
    settings::Signal,
};
use crate::telemetry::TelemetryError;

const METRICS_PATH: &str = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export";
const TRACES_PATH: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";

/// A message to the collector.
#[derive(Clone, Debug)]
pub(super) enum Batch {
    Metrics(ExportMetricsServiceRequest),
    Traces(ExportTraceServiceRequest),
}

/// Error returned when a message cannot be sent.
#[derive(Debug)]
pub(super) struct SendError {
    message: String,
    /// Whether another attempt can succeed.
    pub(super) is_transient: bool,
}

impl fmt::Display for SendError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.message)
    }
}

impl From<Status> for SendError {
    fn from(status: Status) -> Self {
        // The codes that the specification of OTLP names.
        let is_transient = matches!(
            status.code(),
            Code::Cancelled
                | Code::DeadlineExceeded
                | Code::Aborted
                | Code::OutOfRange
                | Code::Unavailable
                | Code::DataLoss
        );
        Self { message: status.to_string(), is_transient }
    }
}

/// A connection to a collector, which is opened when it first sends.
#[derive(Clone, Debug)]
pub(super) struct Collector {
    connection: Connection,
    headers: HeaderMap,
    compression: OtlpCompression,
    timeout: Duration,
    /// Runtime of the connection; OpenTelemetry exports on threads of its own.
    runtime: Handle,
}

#[derive(Clone, Debug)]
enum Connection {
    Grpc(Channel),
    Http(Box<HttpClient>, Uri),
}

impl Collector {
    /// Creates the connection for a signal. Must be called inside a tokio runtime.
    pub(super) fn new(settings: &OtlpSettings, signal: Signal) -> Result<Self, TelemetryError> {
        let url = settings.url(signal);
        let uri: Uri = url.parse().map_err(|error: http::uri::InvalidUri| invalid_endpoint(&error))?;
        let certificates = Certificates::read(&settings.tls, &uri)?;
        let connection = match settings.protocol {
            OtlpProtocol::Grpc => {
                let mut endpoint = Endpoint::from_shared(url).map_err(|error| invalid_endpoint(&error))?;
                if let Some(certificates) = certificates {
                    endpoint =
                        endpoint.tls_config(certificates.into_grpc()).map_err(|error| invalid_endpoint(&error))?;
                }
                Connection::Grpc(endpoint.connect_timeout(settings.timeout).connect_lazy())
            }
            OtlpProtocol::Http => {
                let client = http_client::connect(settings.timeout, certificates)
                    .map_err(|error| TelemetryError(format!("telemetry.otlp.tls: {error}")))?;
                Connection::Http(Box::new(client), uri)
            }
        };
        Ok(Self {
            connection,
            headers: settings.headers(signal)?,
            compression: settings.compression,
            timeout: settings.timeout,
            runtime: Handle::current(),
        })
    }

    /// Sends a message within the timeout. Can be called outside of the runtime.
    pub(super) async fn send(&self, batch: Batch) -> Result<(), SendError> {
        let collector = self.clone();
        let sent = self.runtime.spawn(async move { timeout(collector.timeout, collector.call(batch)).await });
        match sent.await {
            Ok(Ok(result)) => result,
            Ok(Err(_)) => {
                Err(SendError { message: format!("no reply within {:?}", self.timeout), is_transient: false })
            }
            Err(error) => Err(SendError { message: error.to_string(), is_transient: false }),
        }
    }

    /// Waits for the time `pause`, on the runtime of the connection.
    pub(super) async fn pause(&self, pause: Duration) {
        // A timer can only be created inside of the runtime.
        let _ = self.runtime.spawn(async move { tokio::time::sleep(pause).await }).await;
    }

    async fn call(&self, batch: Batch) -> Result<(), SendError> {
        let (path, message) = match batch {
            Batch::Metrics(message) => (METRICS_PATH, message.encode_to_vec()),
            Batch::Traces(message) => (TRACES_PATH, message.encode_to_vec()),
        };
        match &self.connection {
            Connection::Grpc(channel) => Ok(self.call_grpc(channel.clone(), path, message).await?),
            Connection::Http(client, uri) => self.post(client, uri, message).await,
        }
    }

    /// Makes a unary call. The clients of tonic do not compress without its feature `gzip`, which replaces the library
    /// that decompresses the messages of callers.
    async fn call_grpc(&self, mut channel: Channel, path: &'static str, message: Vec<u8>) -> Result<(), Status> {
        let is_compressed = self.compression == OtlpCompression::Gzip;
        let message = if is_compressed { compress(&message) } else { message };
        let length =
            u32::try_from(message.len()).map_err(|_| Status::resource_exhausted("the message is too large"))?;
        let mut body = vec![u8::from(is_compressed)];
        body.extend(length.to_be_bytes());
        body.extend(message);
        let mut request = http::Request::new(Body::new(Full::new(Bytes::from(body))));
        *request.method_mut() = Method::POST;
        *request.version_mut() = Version::HTTP_2;
        *request.uri_mut() = Uri::from_static(path);
        *request.headers_mut() = self.headers.clone();
        request.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        request.headers_mut().insert(TE, HeaderValue::from_static("trailers"));
        if is_compressed {
            request.headers_mut().insert("grpc-encoding", HeaderValue::from_static("gzip"));
        }
        poll_fn(|context| channel.poll_ready(context)).await.map_err(|error| Status::from_error(error.into()))?;
        let response = channel.call(request).await.map_err(|error| Status::from_error(error.into()))?;
        if response.status() != StatusCode::OK {
            return Err(Status::unavailable(format!("the collector responded with status {}", response.status())));
        }
        // A response without a message has the status in its headers.
        if let Some(status) = Status::from_header_map(response.headers()) {
            return ok_or_status(status);
        }
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            let Ok(trailers) = frame?.into_trailers() else {
                continue;
            };
            return ok_or_status(
                Status::from_header_map(&trailers).unwrap_or_else(|| Status::unknown("the response has no status")),
            );
        }
        Err(Status::unknown("the response has no status"))
    }

    async fn post(&self, client: &HttpClient, uri: &Uri, message: Vec<u8>) -> Result<(), SendError> {
        let mut body = message;
        let mut headers = self.headers.clone();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
        if self.compression == OtlpCompression::Gzip {
            body = compress(&body);
            headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
        }
        let mut post = http::Request::new(body.into());
        *post.method_mut() = Method::POST;
        *post.uri_mut() = uri.clone();
        *post.headers_mut() = headers;
        let response = client.send_bytes(post).await;
        let response =
            response.map_err(|error| SendError { message: crate::metrics::chain(&*error), is_transient: true })?;
        let status = response.status();
        if status.is_success() {
            return Ok(());
        }
        let is_transient = matches!(
            status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        );
        Err(SendError { message: format!("the collector responded with status {status}"), is_transient })
    }
}

fn ok_or_status(status: Status) -> Result<(), Status> {
    if status.code() == Code::Ok { Ok(()) } else { Err(status) }
}

fn compress(body: &[u8]) -> Vec<u8> {
    let mut compressed = Vec::new();
    // Reading from memory cannot fail.
    let _ = GzEncoder::new(body, Compression::default()).read_to_end(&mut compressed);
    compressed
}

fn invalid_endpoint(error: &dyn std::error::Error) -> TelemetryError {
    TelemetryError(format!("telemetry.otlp.endpoint: {}", crate::metrics::chain(error)))
}
