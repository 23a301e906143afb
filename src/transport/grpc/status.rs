//! Errors as gRPC says them. The only place that knows which error is which code.

use sluicegate_common::wire::Malformed;
use tonic::Code;

use crate::{engine::DecideError, service::CheckError};

/// A call that gets a status instead of an answer.
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
}

/// Of the message that nearly all calls have.
impl From<Malformed> for RequestError {
    fn from(error: Malformed) -> Self {
        Self::invalid(format!("this is not a RateLimitRequest: {error}"))
    }
}

impl From<CheckError> for RequestError {
    fn from(error: CheckError) -> Self {
        match error {
            CheckError::NoDomain | CheckError::NoDescriptors => Self::invalid(error.to_string()),
            CheckError::Undecided(DecideError::Store(_) | DecideError::NoRules) => {
                Self { code: Code::Unavailable, message: crate::errors::chain(&error) }
            }
        }
    }
}
