#![doc = include_str!("../README.md")]

pub mod adaptive;
mod breaker;
mod builder;
mod check_request;
mod client;
mod deny_cache;
mod endpoint;
mod grants;
#[cfg(feature = "tower")]
pub mod layer;
mod lock;
mod on_error;
mod permit;
mod raw;
mod resources;
mod routing;
pub mod shed;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
mod stream_connection;
mod telemetry;
#[cfg(feature = "test-util")]
pub mod testing;
mod verdict;
mod wait_queue;

pub use builder::{BuildError, Builder};
pub use check_request::{Descriptor, Outcome, Unit};
pub use client::{Check, CheckFuture, Client};
pub use on_error::OnError;
pub use permit::{Acquire, Permit};
pub use resources::Utilization;
pub use routing::Routing;
pub use tonic;
pub use verdict::{DecidedBy, Denial, Failure, Limit, Status, Verdict};
