//! The names of counters and shards: unambiguous whatever a caller puts into a value, and readable.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// A raw `*` only ever stands in a pattern that values share; a raw `~` only before a digest.
pub const ESCAPED: &AsciiSet =
    &CONTROLS.add(b' ').add(b'%').add(b'{').add(b'}').add(b'|').add(b'=').add(b'*').add(b'~');
/// The same for a shared pattern, whose stars stay.
pub const ESCAPED_PATTERN: &AsciiSet = &ESCAPED.remove(b'*');

/// Appends the text; what has a meaning in a name is percent-encoded.
pub fn escape(name: &mut Vec<u8>, text: &str, set: &'static AsciiSet) {
    // Most values have nothing to escape; bytes above ASCII are letters and stay.
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'/' | b':')) {
        name.extend_from_slice(text.as_bytes());
        return;
    }
    for part in text.split_inclusive(|letter: char| !letter.is_ascii()) {
        let ascii = part.trim_end_matches(|letter: char| !letter.is_ascii());
        name.extend(utf8_percent_encode(ascii, set).flat_map(str::bytes));
        name.extend_from_slice(&part.as_bytes()[ascii.len()..]);
    }
}
