//! [`HttpClient`]: sends metrics and traces to an OpenTelemetry collector over HTTP.

use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response};
use opentelemetry_http::{HttpError, hyper::HyperClient};
use tokio::runtime::Handle;

/// An HTTP client for threads outside of the tokio runtime, from which OpenTelemetry exports.
#[derive(Clone, Debug)]
pub(super) struct HttpClient {
    client: HyperClient,
    runtime: Handle,
}

impl HttpClient {
    /// Creates a client, which connects when it first sends. Must be called inside a tokio runtime.
    pub(super) fn new(timeout: Duration) -> Self {
        Self { client: HyperClient::with_default_connector(timeout, None), runtime: Handle::current() }
    }
}

#[tonic::async_trait]
impl opentelemetry_http::HttpClient for HttpClient {
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let client = self.client.clone();
        self.runtime.spawn(async move { client.send_bytes(request).await }).await?
    }
}
