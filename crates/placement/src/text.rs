//! [`escape`]: percent-encoding for the names of counters and shards, so that they are unambiguous and readable.

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};

/// Characters that are escaped in keys and values. An unescaped `*` occurs only in patterns that several values share,
/// an unescaped `~` only before a digest.
pub const ESCAPED: &AsciiSet =
    &CONTROLS.add(b' ').add(b'%').add(b'{').add(b'}').add(b'|').add(b'=').add(b'*').add(b'~');
/// Characters that are escaped in shared patterns: as [`ESCAPED`], without `*`.
pub const ESCAPED_PATTERN: &AsciiSet = &ESCAPED.remove(b'*');

/// Appends `text` to `name` and percent-encodes the characters of `set` in it.
pub fn escape(name: &mut Vec<u8>, text: &str, set: &'static AsciiSet) {
    // Most values contain nothing to escape. Characters beyond ASCII are never escaped.
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'/' | b':')) {
        name.extend_from_slice(text.as_bytes());
        return;
    }
    for part in text.split_inclusive(|character: char| !character.is_ascii()) {
        let ascii = part.trim_end_matches(|character: char| !character.is_ascii());
        name.extend(utf8_percent_encode(ascii, set).flat_map(str::bytes));
        name.extend_from_slice(&part.as_bytes()[ascii.len()..]);
    }
}
