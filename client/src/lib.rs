#![doc = include_str!("../README.md")]

pub mod adaptive;
mod ask;
mod breaker;
mod builder;
mod client;
mod deny_cache;
mod endpoint;
mod grants;
mod lane;
#[cfg(feature = "tower")]
pub mod layer;
mod permit;
mod raw;
mod resources;
mod routing;
pub mod shed;
#[cfg(feature = "simulation")]
#[doc(hidden)]
pub mod simulation;
mod telemetry;
mod verdict;

pub use ask::{Descriptor, Outcome, Unit};
pub use builder::{BuildError, Builder, OnError};
pub use client::{Check, Checking, Client};
pub use permit::{Acquire, Permit};
pub use resources::Utilization;
pub use routing::Routing;
pub use tonic;
pub use verdict::{By, Failure, Limit, Status, Verdict};
