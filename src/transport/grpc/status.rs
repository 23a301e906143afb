//! [`RequestError`]: the gRPC status of a failed call. Only this module maps errors of the service to gRPC codes.

use sluicegate_wire::Malformed;
use tonic::Code;

use super::caller_errors::{ErrorKind, domain_of};
use crate::{engine::DecideError, service::CheckError};

/// The status of a call that fails.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct RequestError {
    pub(crate) code: Code,
    pub(crate) message: String,
    /// The kind of the caller's error; `None` if the service failed, or if the caller is gone.
    pub(crate) kind: Option<ErrorKind>,
    /// The domain of the request, if it is known.
    pub(crate) domain: Option<Box<str>>,
}

impl RequestError {
    fn new(code: Code, kind: Option<ErrorKind>, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), kind, domain: None }
    }

    pub(crate) fn malformed(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, Some(ErrorKind::Malformed), message)
    }

    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, Some(ErrorKind::Invalid), message)
    }

    pub(crate) fn too_large(message: impl Into<String>) -> Self {
        Self::new(Code::ResourceExhausted, Some(ErrorKind::TooLarge), message)
    }

    pub(crate) fn unsupported(message: impl Into<String>) -> Self {
        Self::new(Code::Unimplemented, Some(ErrorKind::Unsupported), message)
    }

    pub(crate) fn stalled(message: impl Into<String>) -> Self {
        Self::new(Code::DeadlineExceeded, Some(ErrorKind::Stalled), message)
    }

    pub(crate) fn dropped(message: impl Into<String>) -> Self {
        Self::new(Code::ResourceExhausted, Some(ErrorKind::Dropped), message)
    }

    pub(crate) fn cancelled(message: impl Into<String>) -> Self {
        Self::new(Code::Cancelled, None, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Code::Unavailable, None, message)
    }

    /// Adds the domain of the request that was not decided.
    pub(super) fn with_domain_of(self, message: &[u8]) -> Self {
        Self { domain: Some(domain_of(message).into()), ..self }
    }
}

impl From<Malformed> for RequestError {
    fn from(error: Malformed) -> Self {
        Self::malformed(format!("cannot decode the request: {error}"))
    }
}

impl From<CheckError> for RequestError {
    fn from(error: CheckError) -> Self {
        match error {
            CheckError::NoDomain | CheckError::NoDescriptors => Self::invalid(error.to_string()),
            CheckError::Undecided(DecideError::Store(_) | DecideError::NoRules) => {
                Self::unavailable(crate::metrics::chain(&error))
            }
        }
    }
}
