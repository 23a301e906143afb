//! The gRPC [`Server`]: one acceptor passes each connection to the worker with the fewest connections, and a worker
//! answers on its own thread. The server knows no method: those are `Methods`.
//!
//! From the socket to a method: `server` and `listener` accept; `connection` has the handshakes and the age of a
//! connection; `any_authority`, `header_blocks` and `backpressure` watch its bytes; `http2` has its calls, on the crate
//! `h2`; `request_body` and `message` receive a message within the memory of `input`; `response` sends.

mod any_authority;
mod backpressure;
mod connection;
mod header_blocks;
mod http2;
mod input;
mod keep_alive;
mod limits;
mod listener;
pub(super) mod message;
mod methods;
mod request_body;
mod response;
mod server;
mod settings;
// Windows has no Unix sockets.
#[cfg_attr(windows, path = "no_unix_socket.rs")]
mod unix_socket;

#[cfg(any(test, fuzzing))]
pub(super) use any_authority::AnyAuthority;
#[cfg(any(test, fuzzing))]
pub(super) use connection::{ConnectionContext, serve_http2};
#[cfg(any(test, fuzzing))]
pub(super) use input::Budgets;
pub(super) use input::{CALL_BYTES, Input, TONIC_MESSAGE_BYTES};
pub use limits::Limits;
pub(crate) use methods::{Answer, Methods};
pub(super) use request_body::{RequestBody, TonicBody};
pub(super) use response::{Frames, Response};
pub use server::{Server, ServerError};
pub use settings::Settings;
