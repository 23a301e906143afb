//! Formatting of errors with their causes. An error is formatted once, by the code that handles it.

use std::error::Error;

/// Returns the error and its causes in one line, separated by colons.
pub(crate) fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}
