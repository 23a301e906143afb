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
        tracing::warn!(
            limit,
            configured,
            max,
            "grpc.max_connections reduced to fit the limit of open files; raise that limit (ulimit -n, LimitNOFILE)"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn listeners_get_their_shares_of_the_limit_of_open_files() {
        let limit = rlimit::increase_nofile_limit(u64::MAX).ok().and_then(|limit| usize::try_from(limit).ok());
        let limit = limit.unwrap_or(DEFAULT_LIMIT);
        let addr = Some(std::net::SocketAddr::from(([127, 0, 0, 1], 0)));
        for (debug_addr, metrics_addr, http_listeners) in
            [(None, None, 1), (addr, None, 2), (None, addr, 2), (addr, addr, 3)]
        {
            let mut settings = Settings::default();
            (settings.http.debug_addr, settings.http.metrics_addr) = (debug_addr, metrics_addr);
            settings.http.max_connections = usize::MAX;
            settings.admin.max_connections = usize::MAX;
            settings.grpc.max_connections = usize::MAX;
            divide(&mut settings);
            let share = limit / 16;
            assert_eq!((settings.http.max_connections, settings.admin.max_connections), (share, share));
            assert_eq!(settings.grpc.max_connections, limit - limit / 4 - (http_listeners + 1) * share);
        }
    }

    #[test]
    fn lower_numbers_of_connections_are_unchanged() {
        let mut settings = Settings::default();
        settings.http.max_connections = 3;
        settings.admin.max_connections = 2;
        settings.grpc.max_connections = 1;
        divide(&mut settings);
        assert_eq!((settings.http.max_connections, settings.admin.max_connections), (3, 2));
        assert_eq!(settings.grpc.max_connections, 1);
    }
}
