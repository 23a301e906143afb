//! All black-box tests in one binary, grouped by subject. `support` starts the servers they need on free ports.
//! `make test` installs those servers: Redis, Envoy, Prometheus and others.
#![allow(
    missing_docs,
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "a failed assumption of a test must fail the test"
)]

mod support;

/// Every algorithm against its definition, against other implementations, and over the wire.
mod algorithms;
/// The order of layers, and the dependencies that crates may not have.
mod architecture;
/// The client crate.
mod client;
/// Instances without a shared store that exchange the hits they count: counting, joins, partitions, hostile callers.
mod cluster;
/// What later versions must keep: protocols, settings, stored data, and upgrades while requests arrive.
mod compatibility;
/// The web console in a real browser.
mod console;
/// Deployment: charts, images, gateways, and replacing envoyproxy/ratelimit.
mod deploy;
/// The documentation: links, the book, the length of paragraphs.
mod docs;
/// memcached as the store.
mod memcached;
/// Running the service: command line, admin API, overrides, telemetry, simulation, shutdown.
mod operations;
/// Overload protection: shedding, elastic limits, plans.
mod overload;
/// Pages of the book with rule files, configurations of Envoy and commands, which are run as written.
mod recipes;
/// Redis as the store: state, topologies, failures, and decisions without a call to Redis.
mod redis;
/// Each module uses only those below it.
mod rooms;
/// Rule files, rules from a control plane, reloads, and candidate rules.
mod rules;
/// The threat model of SECURITY.md.
mod security;
/// The protocols over the wire: Envoy's gRPC, `sluicegate.v1`, HTTP, TLS, connections, and invalid input.
mod wire;
