//! [`Rejections`]: numbers of requests and responses that are too large, too slow, or do not fit into memory.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use axum::{
    http::{StatusCode, header::CONNECTION},
    response::{IntoResponse, Response},
};

use crate::metrics::LogThrottle;

/// Reason for which a request is rejected, or its response dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(in crate::transport) enum Rejection {
    #[error("the body of the request is too large")]
    TooLarge,
    #[error("the request was not received and answered in time")]
    TooSlow,
    #[error("the memory for unfinished input and unread responses is exhausted; try again later")]
    NoMemory,
    #[error("the response was not read")]
    Unread,
}

impl Rejection {
    pub(in crate::transport) const ALL: [Self; 4] = [Self::TooLarge, Self::TooSlow, Self::NoMemory, Self::Unread];

    /// Returns the value of the label `reason`.
    pub(in crate::transport) const fn name(self) -> &'static str {
        match self {
            Self::TooLarge => "too_large",
            Self::TooSlow => "too_slow",
            Self::NoMemory => "no_memory",
            Self::Unread => "unread",
        }
    }

    const fn code(self) -> StatusCode {
        match self {
            Self::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Self::TooSlow => StatusCode::REQUEST_TIMEOUT,
            Self::NoMemory | Self::Unread => StatusCode::SERVICE_UNAVAILABLE,
        }
    }

    /// Returns the status for callers that use gRPC.
    pub(super) fn status(self) -> tonic::Status {
        match self {
            Self::TooSlow => tonic::Status::deadline_exceeded(self.to_string()),
            Self::TooLarge | Self::NoMemory | Self::Unread => tonic::Status::resource_exhausted(self.to_string()),
        }
    }

    /// Returns the response. The connection ends, because the rest of the request is not read.
    pub(super) fn response(self) -> Response {
        (self.code(), [(CONNECTION, "close")], format!("{self}\n")).into_response()
    }
}

/// Numbers of rejected requests of a listener, by reason.
pub(in crate::transport) struct Rejections {
    listener: &'static str,
    counts: [AtomicU64; Rejection::ALL.len()],
    log: [LogThrottle; Rejection::ALL.len()],
}

impl Rejections {
    pub(super) fn new(listener: &'static str) -> Self {
        Self { listener, counts: Default::default(), log: Default::default() }
    }

    /// Returns the name of the listener.
    pub(in crate::transport) const fn listener(&self) -> &'static str {
        self.listener
    }

    /// Returns the number of rejected requests.
    pub(in crate::transport) fn count(&self, reason: Rejection) -> u64 {
        self.counts[reason as usize].load(Relaxed)
    }

    /// Counts a rejected request, and logs the first of an episode.
    pub(super) fn record(&self, reason: Rejection) {
        self.counts[reason as usize].fetch_add(1, Relaxed);
        if self.log[reason as usize].should_log() {
            tracing::warn!(
                listener = self.listener,
                reason = reason.name(),
                "rejecting requests or dropping responses: {reason}; sluicegate_http_rejected_requests_total counts \
                 them"
            );
        }
    }
}
