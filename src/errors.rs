//! How an error with its causes reads: once, where it is handled.

use std::error::Error;

/// The error and its causes in one line, separated by colons.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
