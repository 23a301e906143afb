//! [`AppError`]: why the service cannot run.

use std::io;

use super::store::StoreSetupError;
use crate::{
    rules::source::LoadError,
    store::overrides::JournalError,
    telemetry::TelemetryError,
    transport::{admin::AdminServerError, cluster::ClusterError, grpc::ServerError, http, xds::XdsError},
};

/// Error that prevents the service from running.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// Logs, metrics or traces cannot be set up.
    #[error(transparent)]
    Telemetry(#[from] TelemetryError),
    /// The first set of rules is invalid or cannot be read.
    #[error("cannot load the rules")]
    Rules(#[source] LoadError),
    /// The settings of the control plane are invalid.
    #[error(transparent)]
    Xds(#[from] XdsError),
    /// The store's address or certificates are invalid.
    #[error(transparent)]
    Store(#[from] StoreSetupError),
    /// The gRPC server cannot be started.
    #[error(transparent)]
    Grpc(#[from] ServerError),
    /// The admin API cannot be started.
    #[error(transparent)]
    Admin(#[from] AdminServerError),
    /// The exchange with other instances cannot be started.
    #[error(transparent)]
    Cluster(#[from] ClusterError),
    /// The HTTP server cannot be started.
    #[error(transparent)]
    Http(#[from] http::ListenError),
    /// The journal of overrides cannot be used.
    #[error(transparent)]
    Overrides(#[from] JournalError),
    /// Requests cannot be recorded.
    #[error("cannot record requests: record.dir or record.hash_key_file is not usable")]
    Record(#[source] io::Error),
    /// The key of the hash of values cannot be read.
    #[error("cannot hash values: decisions.hash_key_file is not usable")]
    HashKey(#[source] io::Error),
    /// The process itself cannot be set up: signals, the runtime, or its sockets.
    #[error("cannot set up the process")]
    Process(#[source] io::Error),
}
