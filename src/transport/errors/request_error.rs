//! [`RequestError`]: the gRPC status of a failed call. Only this module maps errors of the service to gRPC codes.

use sluicegate_wire::Malformed;
use tonic::Code;

use crate::{budget::Exhausted, engine::DecideError, service::DecisionError, transport::texts::domain_of};

/// Kind of an error that a caller causes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorKind {
    /// The message cannot be decoded or decompressed.
    Malformed,
    /// The call or its message has a fault that only the configuration of a caller can cause, such as no domain.
    Invalid,
    /// The message is larger than the maximum.
    TooLarge,
    /// The compression, or the version of the protocol, is not supported.
    Unsupported,
    /// The message was not complete, and no further bytes arrived for too long.
    Stalled,
    /// The memory of the call was needed for others.
    Dropped,
}

impl ErrorKind {
    pub(super) const ALL: [Self; 6] =
        [Self::Malformed, Self::Invalid, Self::TooLarge, Self::Unsupported, Self::Stalled, Self::Dropped];

    /// Returns the label in the metric.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::Invalid => "invalid",
            Self::TooLarge => "too_large",
            Self::Unsupported => "unsupported",
            Self::Stalled => "stalled",
            Self::Dropped => "dropped",
        }
    }
}

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

    pub(crate) fn cancelled(message: impl Into<String>) -> Self {
        Self::new(Code::Cancelled, None, message)
    }

    pub(crate) fn unavailable(message: impl Into<String>) -> Self {
        Self::new(Code::Unavailable, None, message)
    }

    /// Adds the domain of the request that was not decided.
    pub(in crate::transport) fn with_domain_of(self, message: &[u8]) -> Self {
        Self { domain: Some(domain_of(message).into()), ..self }
    }
}

impl From<Malformed> for RequestError {
    fn from(error: Malformed) -> Self {
        Self::malformed(format!("cannot decode the request: {error}"))
    }
}

/// The memory of the call is needed for others.
impl From<Exhausted> for RequestError {
    fn from(error: Exhausted) -> Self {
        Self::new(Code::ResourceExhausted, Some(ErrorKind::Dropped), error.to_string())
    }
}

impl From<DecisionError> for RequestError {
    fn from(error: DecisionError) -> Self {
        match error {
            DecisionError::NoDomain | DecisionError::NoDescriptors => Self::invalid(error.to_string()),
            DecisionError::Undecided(DecideError::Store(_) | DecideError::NoRules) => {
                Self::unavailable(crate::metrics::chain(&error))
            }
        }
    }
}
