//! [`Client`]: receives rules from a control plane, such as Envoy Gateway, by Envoy's discovery protocol (xDS).
//!
//! The client subscribes to all resources of type `ratelimit.config.ratelimit.v3.RateLimitConfig` over one aggregated
//! stream (ADS). Each response contains all resources, or in the delta variant those that have changed. A valid
//! response is accepted (ACK). An invalid one is rejected with the reason (NACK), and the previous rules stay in force.
//! The rules also stay in force while the control plane is unavailable.

mod client;
mod connection;
mod convert;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod settings;
mod stream;

pub use client::{Client, XdsError};
pub use settings::{Protocol, Settings, TlsSettings};
