//! Bytes in, bytes out, status codes, and limits on what may come in. Nothing of gRPC or HTTP goes below here.

pub mod admin;
pub mod grpc;
pub mod http;
mod http_server;
mod tls;
pub mod xds;

pub use tls::TlsError;
