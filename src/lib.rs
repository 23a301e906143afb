//! Sluicegate decides whether a request may pass: Envoy and other callers ask, over gRPC, before they let it through.
//!
//! # The way of a decision
//!
//! ```text
//! Envoy, client crate, grpcurl, curl
//!         │
//!     transport      gRPC and HTTP: bytes in, bytes out, status codes, limits on input
//!         │
//!     service        the use case: validate, read the clock, ask the engine, note how long it took
//!         │
//!      engine ─────▶ rules      which limits apply: an immutable snapshot, walked without a lock
//!         │
//!      store         remember it, atomically: in memory, or in Redis
//!         │
//!    algorithm       may it pass: arithmetic on a few bytes, run where the counter is locked
//! ```
//!
//! A request goes down this way once, and its answer comes up once. What is on top uses what is below and never the
//! other way round; a test reads the `use` lines and says so. `docs/architecture.md` has the table, and says where
//! to add what.
//!
//! Beside the way stand [`settings`] (how all of it is set), [`app`] (the only wiring), [`cli`], [`telemetry`] (setting up
//! logs, metrics and traces), [`metrics`] (counters that the hot path may touch), [`traffic`] (recorded requests) and [`replay`]
//! (asking them again of other rules).

pub mod cli;

pub mod app;

pub mod settings;

pub mod transport;

pub mod service;

pub mod engine;

pub mod rules;

pub mod store;

pub mod algorithm;

pub mod metrics;
pub mod replay;
pub mod telemetry;
pub mod traffic;

mod allocator;
mod debounce;
mod duration;
mod errors;
