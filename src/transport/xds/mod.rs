//! Rules from a control plane, by Envoy's discovery protocol (xDS): Envoy Gateway sends them so.
//!
//! Over one aggregated stream (ADS) all resources of the type `ratelimit.config.ratelimit.v3.RateLimitConfig` are asked for: the
//! whole state with each change, or in the delta variant what has changed. What can be used is taken (ACK), what cannot
//! is refused with the reason (NACK), and the rules before stay. While there is no control plane the rules stay as well.

mod client;
mod convert;
mod settings;
mod stream;

pub use client::{Client, XdsError};
pub use settings::{Protocol, Settings, TlsSettings};
