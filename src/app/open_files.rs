//! Fits the connection limits of all listeners to the limit of open files.

use crate::settings::Settings;

/// Limit that is assumed if the system does not report one.
const DEFAULT_LIMIT: usize = 1_024;

/// Raises the process's limit of open files as far as the system allows, and divides it among the listeners.
///
/// A quarter of the limit is reserved for connections to Redis and for files. The HTTP listeners and the admin API get
/// at most a sixteenth each, and gRPC gets the remainder. Settings with lower values are unchanged.
pub(super) fn divide(settings: &mut Settings) {
    let limit = rlimit::increase_nofile_limit(u64::MAX).ok().and_then(|limit| usize::try_from(limit).ok());
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    settings.http.max_connections = settings.http.max_connections.min(limit / 16);
    settings.admin.max_connections = settings.admin.max_connections.min(limit / 16);
    let http_listeners =
        1 + usize::from(settings.http.debug_addr.is_some()) + usize::from(settings.http.metrics_addr.is_some());
    let reserved = limit / 4 + http_listeners * settings.http.max_connections + settings.admin.max_connections;
    let max = limit - reserved;
    if settings.grpc.max_connections > max {
        let configured = std::mem::replace(&mut settings.grpc.max_connections, max);
        tracing::warn!(limit, configured, max, "grpc.max_connections reduced to fit the limit of open files");
    }
}
