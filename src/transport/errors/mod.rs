//! Errors of callers: the status of a call that fails, and the number of errors of each kind.

mod caller_errors;
mod request_error;

pub use caller_errors::CallerErrors;
pub(crate) use request_error::RequestError;
