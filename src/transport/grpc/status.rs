//! [`RequestError`]: the gRPC status of a failed call. Only this module maps errors of the service to gRPC codes.

use sluicegate_common::wire::Malformed;
use tonic::Code;

use crate::{engine::DecideError, service::CheckError};

/// The status of a call that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestError {
    pub(crate) code: Code,
    pub(crate) message: String,
}

impl RequestError {
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self { code: Code::InvalidArgument, message: message.into() }
    }

    pub(crate) fn exhausted(message: impl Into<String>) -> Self {
        Self { code: Code::ResourceExhausted, message: message.into() }
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self { code: Code::Unavailable, message: message.into() }
    }
}

impl From<Malformed> for RequestError {
    fn from(error: Malformed) -> Self {
        Self::invalid(format!("cannot decode the request: {error}"))
    }
}

impl From<CheckError> for RequestError {
    fn from(error: CheckError) -> Self {
        match error {
            CheckError::NoDomain | CheckError::NoDescriptors => Self::invalid(error.to_string()),
            CheckError::Undecided(DecideError::Store(_) | DecideError::NoRules) => {
                Self::unavailable(crate::errors::chain(&error))
            }
        }
    }
}
