//! The use cases of the service, independent of any protocol.
//!
//! - [`decisions`] decides a request.
//! - [`reload`] loads the rules and follows their source.
//! - [`overrides`] synchronises the operators' overrides with the store.
//! - [`candidates`] evaluates, promotes and rolls back rule sets.
//! - [`admin`] performs the operators' actions on counters and overrides.
//! - [`activity`] records the decisions of the last hour.
//! - [`search`] finds the entities of one customer.
//! - [`resources`] collects the reported utilization of resources.
//! - [`quotas`] hands out quotas to callers that limit requests by themselves.
//! - [`record`] writes a sample of the requests to files.
//! - [`simulation`] replays these files with changed rules.

pub mod activity;
pub mod admin;
pub mod candidates;
mod compile_thread;
mod compressed_files;
pub mod decisions;
mod hash_key;
pub mod overrides;
pub mod quotas;
pub mod record;
pub mod reload;
pub mod resources;
pub mod search;
pub mod simulation;
#[cfg(test)]
mod testing;

pub use crate::engine::Clock;
pub use activity::Activity;
pub use admin::Admin;
pub use candidates::Candidates;
pub use compile_thread::run_on_compile_thread;
pub use decisions::{DecisionError, Decisions};
pub use hash_key::read_hash_key;
pub use overrides::OverrideSync;
pub use quotas::Quotas;
pub use record::Recorder;
pub use resources::ResourceReports;
pub use simulation::Simulator;
