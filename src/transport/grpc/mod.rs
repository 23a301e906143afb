//! gRPC: one acceptor hands each connection to the worker with the fewest; a worker decides on its own thread.
//!
//! `ShouldRateLimit` is framed by hand on hyper (`unary`): a fifth cheaper than through tonic's router and codec. So are
//! the frames of `sluicegate.v1` (`stream`). All other services (health, reflection, what resources say) are
//! tonic's.

mod connection;
mod decode;
mod encode;
mod exact;
mod feedback;
mod headers;
mod limits;
mod listener;
mod resources;
mod server;
mod service;
mod settings;
mod status;
mod stream;
mod unary;

pub(super) use connection::told_to_stop;
pub(crate) use decode::decode;
pub(crate) use encode::encode;
pub use limits::Limits;
pub use resources::ResourceService;
pub use server::{Server, ServerError};
pub(crate) use service::HEALTH_NAMES;
pub use service::{Handler, build_tonic_services};
pub use settings::{HeaderStyle, ResponseSettings, Settings, TlsSettings};
pub(crate) use status::RequestError;
