//! [`Failure`]: kinds of failures of a memcached server.

use std::{error::Error, io};

use sluicegate_store::{
    StoreError,
    health::{FailureKind, MetricText},
};

/// Reason why a server did not execute a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Failure {
    /// The connection failed.
    Io,
    /// TLS cannot be established: only one side uses it, or one does not trust the other's certificate.
    Tls,
    /// The server did not answer within the deadline.
    Timeout,
    /// The reply was not one of the protocol, for example because the server is older than 1.6.
    InvalidReply,
    /// The server has rejected a command, or an item contains other data than a counter.
    Rejected,
}

impl FailureKind for Failure {
    const ALL: &'static [Self] = &[Self::Io, Self::Tls, Self::Timeout, Self::InvalidReply, Self::Rejected];
    const SOFTWARE: &'static str = "memcached";
    const FAILURES: MetricText = MetricText {
        name: "sluicegate_memcached_failures_total",
        description: "Number of failed calls and failed attempts to connect to memcached, by kind",
    };
    const UP: MetricText = MetricText {
        name: "sluicegate_memcached_up",
        description: "Whether every worker is connected to the memcached server (1) or not (0)",
    };
    const ROLLBACK_FAILURES: MetricText = MetricText {
        name: "sluicegate_memcached_rollback_failures_total",
        description: "Number of takes of denied requests in memcached that could not be rolled back",
    };

    fn kind(self) -> &'static str {
        match self {
            Self::Io => "io",
            Self::Tls => "tls",
            Self::Timeout => "timeout",
            Self::InvalidReply => "invalid_reply",
            Self::Rejected => "rejected",
        }
    }

    fn needs_operator(self) -> bool {
        matches!(self, Self::Tls | Self::InvalidReply)
    }
}

impl Failure {
    pub(crate) fn of(error: &io::Error) -> Self {
        if error.get_ref().is_some_and(<dyn Error + Send + Sync>::is::<rustls::Error>) {
            return Self::Tls;
        }
        match error.kind() {
            io::ErrorKind::TimedOut => Self::Timeout,
            io::ErrorKind::InvalidData => Self::InvalidReply,
            _ => Self::Io,
        }
    }

    /// Returns the error for the caller of the store.
    pub(crate) fn error(self) -> StoreError {
        match self {
            Self::Io | Self::Tls | Self::InvalidReply => StoreError::Broken,
            Self::Timeout => StoreError::Timeout,
            Self::Rejected => StoreError::Rejected,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_a_failure_and_the_error_of_the_caller_follow_from_the_error() {
        let tls = io::Error::new(io::ErrorKind::InvalidData, rustls::Error::DecryptError);
        for (error, kind, of_caller) in [
            (io::ErrorKind::TimedOut.into(), "timeout", StoreError::Timeout),
            (io::ErrorKind::InvalidData.into(), "invalid_reply", StoreError::Broken),
            (io::ErrorKind::UnexpectedEof.into(), "io", StoreError::Broken),
            (tls, "tls", StoreError::Broken),
        ] {
            let failure = Failure::of(&error);
            assert_eq!((failure.kind(), failure.error()), (kind, of_caller));
        }
    }
}
