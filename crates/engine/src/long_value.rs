//! [`bounded`]: the form in which long values are shown and stored.
//!
//! Rules match the whole value, however long it is. Names of counters, overrides, top entities, metrics and recordings
//! contain its first 128 bytes and a digest instead, so that a caller cannot make the service keep long texts, and every
//! page shows the same text. An operator can use this form wherever the value itself is accepted.

use std::{borrow::Cow, fmt::Write};

use sha2::{Digest, Sha256};

/// Maximum length of a value that is shown and stored as it is, in bytes.
pub const MAX_PLAIN_BYTES: usize = 1_024;
/// Maximum length of the readable beginning of a longer value, in bytes.
const READABLE_BYTES: usize = 128;
/// Length of the digest: 160 bits, so that finding two values with the same digest is infeasible.
const DIGEST_BYTES: usize = 20;
/// Stands between the beginning and the digest.
const SEPARATOR: &str = "\\~";

/// Returns the value, or `BEGINNING\~DIGEST` if it is longer than 1,024 bytes. The digest has 40 hexadecimal digits.
#[must_use]
pub fn bounded(value: &str) -> Cow<'_, str> {
    if value.len() <= MAX_PLAIN_BYTES {
        return value.into();
    }
    let end = (0..=READABLE_BYTES).rev().find(|end| value.is_char_boundary(*end)).unwrap_or_default();
    let beginning = &value[..end];
    // A backslash before the separator would be ambiguous.
    let mut text = beginning.trim_end_matches('\\').to_owned();
    text += SEPARATOR;
    for byte in &Sha256::digest(value)[..DIGEST_BYTES] {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    text.into()
}

/// Returns whether a value ends like the bounded form of another one.
///
/// Such a value of a caller must be changed before it is used, since it would share the counter of the other.
#[must_use]
pub fn ends_like_bounded(value: &str) -> bool {
    let Some((before, digest)) = value.rsplit_once('~') else {
        return false;
    };
    before.ends_with('\\') && digest.len() == 2 * DIGEST_BYTES && digest.bytes().all(is_hex_digit)
}

/// Returns whether a byte is a hexadecimal digit as it appears in a digest, in lower case.
fn is_hex_digit(byte: u8) -> bool {
    byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_value_is_replaced_by_its_beginning_and_a_digest() {
        let longest = "x".repeat(MAX_PLAIN_BYTES);
        assert_eq!(bounded(&longest), longest);
        let long = bounded(&(longest.clone() + "y")).into_owned();
        assert_eq!(long, format!("{}\\~1fd11f583bfc927746c1c0dc8b31ca8ceb679d26", &longest[..READABLE_BYTES]));
        assert_ne!(long, bounded(&(longest + "z")), "the whole value counts");
        assert!(ends_like_bounded(&long));
        assert_eq!(bounded(&long), long, "the form is its own form");
    }

    #[test]
    fn the_beginning_ends_at_a_character_and_without_a_backslash() {
        for (beginning, expected) in
            [("é".repeat(600), 128), (format!("x{}", "é".repeat(600)), 127), ("\\".repeat(1_100), 0)]
        {
            let form = bounded(&beginning).into_owned();
            assert_eq!(form.find(SEPARATOR), Some(expected), "{form}");
        }
    }

    #[test]
    fn only_a_digest_after_the_separator_ends_like_the_form() {
        let digest = "0123456789abcdef0123456789abcdef01234567";
        for (value, expected) in [
            (format!("x\\~{digest}"), true),
            (format!("\\~{digest}"), true),
            (format!("\\\\~{digest}"), true),
            (format!("x~{digest}"), false),
            (format!("x\\~{digest}0"), false),
            (format!("x\\~{}", &digest[1..]), false),
            (format!("x\\~{}", digest.replace('a', "A")), false),
            (String::new(), false),
        ] {
            assert_eq!(ends_like_bounded(&value), expected, "{value}");
        }
    }
}
