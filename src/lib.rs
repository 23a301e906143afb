//! Sluicegate is a rate limit service. Envoy and other callers send it checks, over gRPC or HTTP, and it decides
//! whether a request is allowed.
//!
//! # Flow of a decision
//!
//! ```text
//! Envoy, client crate, grpcurl, curl
//!         │
//!         ▼
//!     transport      gRPC and HTTP: decoding, limits on input, encoding, status codes
//!         │
//!         ▼
//!      service       the use case: validates the request, reads the clock, measures the latency
//!         │
//!         ▼
//!      engine ─────▶ rules       limits that apply, from an immutable snapshot that is read without a lock
//!         │
//!         ▼
//!       store        counters in memory, in Redis or in memcached, changed atomically; leases, deny cache and eventual counters
//!         │
//!         ▼
//!     algorithm      arithmetic on a few bytes of state, executed while the counter is locked
//! ```
//!
//! 1. [`transport`] decodes a request: a domain and one or more descriptors.
//! 2. [`service`] rejects a request that is invalid, reads the clock once, and calls the engine.
//! 3. [`engine`] matches each descriptor with the [`rules`] and applies the operators' overrides. It turns each limit
//!    that applies into a hit on a named counter, and makes one call to the store with all hits.
//! 4. [`store`] decides each hit. With Redis, an instance can decide without a call: from an eventual counter, from a
//!    lease, or from the deny cache.
//! 5. [`algorithm`] computes the decision from the counter's state: allowed or denied, remaining, reset and
//!    retry-after. The step that changes the state runs while the counter is locked, in Rust for memory and in Lua for
//!    Redis.
//! 6. [`engine`] combines the decisions into a verdict. If the store failed, the rule's failure policy decides.
//! 7. [`transport`] encodes the verdict.
//!
//! # Crates and modules
//!
//! Decisions, counting and storage are crates of their own, under `crates/`: this crate re-exports them under short names.
//! It is the service itself. Each module uses only modules below it, which `tests/architecture.rs` checks.
//! `docs/design/architecture.md` has the complete tables, and shows where a new feature belongs.
//!
//! | layer | module or crate | contents |
//! | --- | --- | --- |
//! | program | [`cli`] | the command line; the commands that are clients are in the crate `ctl` |
//! | | [`app`] | builds the service from its settings, runs it, and shuts it down |
//! | | [`settings`] | all settings, from defaults, a file, environment variables and flags |
//! | protocols | [`transport`] | gRPC, HTTP, the admin API and xDS |
//! | use cases | [`service`] | checks, reloads, overrides, candidate rules, reports of resources, recording |
//! | | [`store`] | the store that the settings select, and overrides in a file |
//! | measurement | [`telemetry`] | setup of logs, metrics and traces |
//! | | [`process`] | pauses of the process, stalls of its threads, its CPU, memory and files |
//! | crates | [`replay`], [`traffic`] | recorded requests, and the decisions of other rules about them |
//! | | [`engine`] | matching, hits, verdicts and statistics |
//! | | [`rules`] | rule files and the rule sets that they are compiled into |
//! | | [`algorithm`] | rate limiting algorithms |
//! | | [`metrics`] | counters and histograms for hot code |
//!
//! Small private modules are available to all: `allocator` (returning freed memory), `budget` (a bound on the memory that
//! callers hold), `debounce` (stable changes of polled values), `platform` (what differs between operating systems) and
//! `yaml` (settings and mapping files in YAML).

pub mod app;
pub mod cli;
pub mod process;
pub mod service;
pub mod settings;
pub mod store;
pub mod telemetry;
pub mod transport;

pub use sluicegate_algorithm as algorithm;
pub use sluicegate_engine as engine;
pub use sluicegate_metrics as metrics;
pub use sluicegate_rules as rules;
pub use sluicegate_simulator::{replay, traffic};

mod allocator;
mod budget;
mod debounce;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod platform;
mod yaml;
