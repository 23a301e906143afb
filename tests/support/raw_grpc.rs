//! [`Raw`]: an HTTP/2 connection that sends arbitrary bytes as calls of gRPC.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::time::timeout;

use super::{DEADLINE, Server};

pub(crate) const STREAM: &str = "/sluicegate.v1.DecisionService/Stream";
pub(crate) const BATCH: &str = "/sluicegate.v1.DecisionService/Batch";
pub(crate) const QUOTAS: &str = "/envoy.service.rate_limit_quota.v3.RateLimitQuotaService/StreamRateLimitQuotas";
pub(crate) const METHOD: &str = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// An HTTP/2 connection that sends arbitrary bytes.
pub(crate) struct Raw(pub(crate) hyper::client::conn::http2::SendRequest<Full<Bytes>>);

/// The gRPC status, its message, and the bytes of the response.
pub(crate) type Answer = (String, String, Bytes);

impl Raw {
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(server.grpc, 65_535).await
    }

    /// Connects with this flow-control window for each response, in bytes.
    pub(crate) async fn with_window(server: &Server, bytes: u32) -> Self {
        Self::connect_to(server.grpc, bytes).await
    }

    /// Connects to any listener.
    pub(crate) async fn connect_to(addr: SocketAddr, window_bytes: u32) -> Self {
        let stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let mut builder = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let handshake = builder.initial_stream_window_size(window_bytes).handshake(TokioIo::new(stream));
        let (sender, connection) = handshake.await.unwrap();
        tokio::spawn(connection);
        Self(sender)
    }

    pub(crate) async fn send(&mut self, path: &str, body: Vec<u8>) -> Answer {
        self.request(Method::POST, path, "application/grpc", body).await
    }

    pub(crate) async fn request(&mut self, method: Method, path: &str, content_type: &str, body: Vec<u8>) -> Answer {
        let request = Request::builder().method(method).uri(format!("http://x{path}"));
        let request = request.header("content-type", content_type);
        let request = request.header("te", "trailers").body(Full::new(Bytes::from(body))).unwrap();
        let response = timeout(DEADLINE, self.0.send_request(request)).await.unwrap().unwrap();
        assert_eq!(response.status(), 200);
        let head = response.headers().clone();
        let body = timeout(DEADLINE, response.into_body().collect()).await.unwrap().unwrap();
        let trailers = body.trailers().cloned().unwrap_or_default();
        let field = |name: &str| {
            let text = |headers: &HeaderMap| Some(headers.get(name)?.to_str().unwrap().to_owned());
            text(&head).or_else(|| text(&trailers)).unwrap_or_default()
        };
        (field("grpc-status"), field("grpc-message"), body.to_bytes())
    }
}

/// Returns a message with the prefix of gRPC.
pub(crate) fn frame(message: &[u8]) -> Vec<u8> {
    let mut frame = vec![0];
    frame.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend_from_slice(message);
    frame
}

/// Returns a field of a protobuf message: its number, and bytes that need not be UTF-8.
pub(crate) fn field(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut field = vec![number << 3 | 2];
    prost::encoding::encode_varint(bytes.len() as u64, &mut field);
    field.extend_from_slice(bytes);
    field
}
