//! Fuzz target: token files.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use super::auth;

/// Parses a token file. The reason of a rejection must not contain a token.
pub fn token_file(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    if let Err(reason) = auth::parse(&text) {
        for word in text.split_whitespace().filter(|word| word.len() >= 16) {
            assert!(!reason.contains(word), "{reason}");
        }
    }
}
