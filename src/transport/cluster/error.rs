//! [`FollowError`]: the error of calls to another instance.

use std::{io, path::PathBuf, time::Duration};

use tonic::Code;

use super::{message::MessageError, violation::Violation};

/// Error returned when an instance cannot be followed.
#[derive(Debug, thiserror::Error)]
pub(super) enum FollowError {
    #[error("cannot connect")]
    Connect(#[from] tonic::transport::Error),
    #[error("call failed: {}", .0.message())]
    Call(#[from] tonic::Status),
    #[error("no response within {0:?}")]
    Timeout(Duration),
    #[error("cannot read {}", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("invalid message")]
    Message(#[from] MessageError),
    #[error("protocol violation")]
    Violation(#[from] Violation),
}

impl FollowError {
    /// Returns the violation of the protocol by the instance; `None` if it is only unavailable.
    pub(super) fn violation(&self) -> Option<Violation> {
        match self {
            Self::Violation(violation) => Some(*violation),
            Self::Message(_) => Some(Violation::Message),
            // Also the status that tonic gives to messages above the maximum size.
            Self::Call(status) if status.code() == Code::OutOfRange => Some(Violation::Message),
            Self::Connect(_) | Self::Call(_) | Self::Timeout(_) | Self::File { .. } => None,
        }
    }
}
