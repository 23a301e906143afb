//! One binary for all black-box tests. A promise has a module; `support` starts what they need on free ports.
//! `make test` installs what they use: redis-server, and a Python environment with Envoy and grpcio.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod support;

/// The admin API: who may do what, and what comes of bad input.
mod admin;
/// Every algorithm over the wire, and the example rule files.
mod algorithms;
/// Rules that are tried out, promoted and rolled back.
mod candidates;
/// The command line and the start of the process.
mod cli;
/// The client crate: what a verdict says, and what is known without asking.
mod client;
/// The client crate: always an answer in time.
mod client_outage;
/// In the place of envoyproxy/ratelimit.
mod compat;
/// How many connections there may be, and for how long.
mod connections;
/// What is decided without asking the shared store.
mod consistency;
/// The chart, the manifests and the compose files.
mod deploy;
/// What operators said, as Redis keeps it.
mod directive_store;
/// What operators say while the service runs, and that it is in force everywhere.
mod directives;
/// A real Envoy.
mod envoy;
/// Counted here, and told a little later.
mod eventual;
/// Redis behind a network that breaks, and servers that answer anything but decisions.
mod faults;
/// A client that shares no code with us.
mod foreign;
/// Envoy Gateway: what its translator makes, and an Envoy as it configures one.
mod gateway;
/// Every algorithm as derived from its definition: the functions, memory, Redis.
mod golden;
/// Hits that callers admit by themselves.
mod grants;
/// Memory and Redis give the same answers to random histories of every algorithm.
mod histories;
/// Bad input of every kind.
mod hostile;
/// `/json`, `/metrics` and the other pages.
mod http;
/// What is in the container, as any user.
mod image;
/// How many at once.
mod in_flight;
/// The client's tower layer.
mod layer;
/// The order of layers.
mod layers;
/// Alerts, the dashboard, and a real Prometheus.
mod monitoring;
/// The transcripts of docs/operating.md.
mod operating;
/// Traces and metrics sent to a collector.
mod otlp;
/// Redis stopped, killed, frozen, flushed.
mod outage;
/// The bucket family beside other implementations of it.
mod peers;
/// Slots that the client holds.
mod permits;
/// Rules that change while they are in use.
mod reload;
/// Rule files: what is accepted, what is refused and how that reads.
mod rules;
/// Overload: who is shed, and how a refusal says so; limits that stretch; plans.
mod shedding;
/// The end of the process.
mod shutdown;
/// Recorded traffic, asked again of other rules.
mod simulate;
/// What Redis holds, and how many callers share a limit exactly.
mod stores;
/// Many checks at once: `sluicegate.v1`.
mod stream;
/// TLS and mutual TLS.
mod tls;
/// Charged for all or none, where the limits of a request live on several servers.
mod together;
/// Clusters, sentinels and rings: where counters live, and what moves.
mod topologies;
/// Matching and counting as recorded from envoyproxy/ratelimit, on both stores.
mod vectors;
/// The protocol over the wire, on both stores.
mod wire;
/// Rules from a real control plane.
mod xds;
