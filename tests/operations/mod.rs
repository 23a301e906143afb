//! Running the service: command line, admin API, overrides, telemetry, simulation, shutdown.

/// The admin API: authentication, roles, and invalid input.
mod admin;
/// The command line and the start of the process.
mod cli;
/// The API of the web console on the HTTP listener.
mod console_api;
/// The file of overrides: mounts, links, full disks, two processes, and lines that cannot be read.
mod journal;
/// Mistakes on the command line, and inputs in the spelling of outputs.
mod messages;
/// Alerts, the dashboard, and a real Prometheus.
mod monitoring;
/// Traces and metrics exported to a collector.
mod otlp;
/// Overrides: how they take effect and reach every instance.
mod overrides;
/// Planned overrides: their beginning, with Redis and with the file of overrides.
mod planned;
/// `sluicegate request`.
mod request;
/// The shutdown of the process.
mod shutdown;
/// `sluicegate simulate` on recorded traffic.
mod simulate;
/// The transcripts of docs/guides/operations.md.
mod transcripts;
