//! The gRPC [`Server`]: one acceptor passes each connection to the worker with the fewest connections, and a worker
//! decides on its own thread.
//!
//! Connections are served on the crate `h2` (`http2`). `ShouldRateLimit` (`service`), the frames of `sluicegate.v1`
//! (`stream`) and quotas (`quotas`) are implemented without tonic's router and codec, which makes a call a fifth cheaper.
//! All other services (health, reflection, resources) use tonic.

mod any_authority;
mod backpressure;
mod caller_errors;
mod checker;
mod connection;
mod decode;
mod encode;
mod exact;
mod feedback;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod header_blocks;
mod headers;
mod http2;
mod input;
mod keep_alive;
mod limits;
mod listener;
mod message;
mod quotas;
mod request_body;
mod resources;
mod response;
mod server;
mod service;
mod settings;
mod status;
mod stream;
mod texts;
// Windows has no Unix sockets.
#[cfg_attr(windows, path = "no_unix_socket.rs")]
mod unix_socket;

pub use caller_errors::CallerErrors;
pub(super) use connection::wait_for_shutdown;
pub(crate) use decode::decode;
pub(crate) use encode::encode;
pub use limits::Limits;
pub use quotas::QuotaService;
pub use resources::ResourceService;
pub use server::{Server, ServerError};
pub(crate) use service::HEALTH_NAMES;
pub use service::{Handler, build_tonic_services};
pub use settings::{HeaderStyle, ResponseSettings, Settings, TlsSettings};
pub(crate) use status::RequestError;
pub(crate) use texts::{readable, rewritten, text_of};
