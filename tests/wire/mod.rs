//! The protocols over the wire: Envoy's gRPC, `sluicegate.v1`, HTTP, TLS, connections, and invalid input.

/// Bytes by which a caller tries to get past its limit.
mod bypass;
/// Limits on the number and the age of connections.
mod connections;
/// A real Envoy with the rate limit filter.
pub(crate) mod envoy;
/// Envoy's rate limit protocol, on both stores.
mod envoy_protocol;
/// A real Envoy with its quota filter.
mod envoy_quotas;
/// A generated client that shares no code with this project.
mod foreign_client;
/// Grants: hits that clients may admit without a call.
mod grants;
/// `/json`, `/metrics` and the other HTTP pages.
mod http;
/// HTTP/2 at its edges, frame by frame.
mod http2;
/// Malformed and oversized input of every kind.
mod invalid_input;
/// The documented middleware for other languages.
mod middleware;
/// Envoy's quota protocol.
pub(crate) mod quotas;
/// Replays of responses recorded from envoyproxy/ratelimit, on all stores.
mod recorded;
/// Batched checks: `sluicegate.v1`.
mod stream;
/// TLS and mutual TLS.
mod tls;
