//! The network protocols: gRPC, HTTP, the admin API and xDS, with their status codes and their limits on input. Other
//! modules contain nothing that is specific to gRPC or HTTP.

pub mod admin;
mod browser_security;
pub mod cluster;
pub mod console;
pub mod grpc;
pub mod http;
mod http_server;
mod idle_timeout;
pub mod input;
mod tls;
pub mod xds;

pub use tls::TlsError;
