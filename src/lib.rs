//! Sluicegate.
pub mod algorithm;
pub mod app;
pub mod cli;
mod duration;
pub mod engine;
mod errors;
pub mod metrics;
pub mod rules;
pub mod service;
pub mod settings;
pub mod store;
pub mod telemetry;
pub mod transport;
