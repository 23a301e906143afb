//! [`CallerErrors`]: errors of callers, each kind counted and logged once per episode.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use crate::metrics::LogThrottle;

/// Counts the errors of callers.
#[derive(Default)]
pub(super) struct CallerErrors {
    protocol: AtomicU64,
    log_protocol: LogThrottle,
    unread: AtomicU64,
    log_unread: LogThrottle,
}

impl CallerErrors {
    /// Returns the number of connections that were closed because the caller violated HTTP/2 or exceeded its limits.
    pub(super) fn protocol(&self) -> u64 {
        self.protocol.load(Relaxed)
    }

    /// Returns the number of responses that were dropped because the caller did not read them.
    pub(super) fn unread(&self) -> u64 {
        self.unread.load(Relaxed)
    }

    /// Counts a response that was dropped because the caller did not read it.
    pub(super) fn record_unread(&self) {
        self.unread.fetch_add(1, Relaxed);
        if self.log_unread.should_log() {
            tracing::warn!(
                "a caller does not read responses; each is dropped after grpc.send_timeout, and counted by \
                 sluicegate_grpc_unread_responses_total"
            );
        }
    }

    /// Counts the error of a connection if it made this side close the connection.
    pub(super) fn record_protocol(&self, error: &h2::Error) {
        if !(error.is_go_away() && error.is_library()) {
            return;
        }
        self.protocol.fetch_add(1, Relaxed);
        if self.log_protocol.should_log() {
            tracing::warn!(
                reason = %error,
                "closing connections that violate HTTP/2 or exceed its limits; \
                 sluicegate_grpc_protocol_errors_total counts them"
            );
        }
    }
}
