//! [`repair`]: makes JSON readable that has strings with bytes which JSON does not allow.
//!
//! A gateway that builds JSON from headers can send bytes that are not UTF-8, control characters, halves of surrogate pairs
//! (`\ud800`), and a backslash before any other character. An error would let the request pass. Bytes that no string can
//! contain become characters of Unicode's private use area in the repaired text, and [`bytes_of`] returns the bytes of a
//! string that was read from it.

/// The first of the 256 characters that stand for bytes. They have four bytes in UTF-8, which begin with [`PLACEHOLDER`].
const FIRST: u32 = 0x10_FE00;
/// The first bytes of each character that stands for a byte: U+10FE00 to U+10FEFF.
const PLACEHOLDER: [u8; 2] = [0xF4, 0x8F];

/// Maximum number of values and names in a request. The largest valid one has 128 descriptors with 32 entries.
const MAX_VALUES: usize = 20_000;
/// Size in bytes up to which a request cannot have too many values.
const SMALL_BYTES: usize = 64 * 1024;

/// Returns whether a request has more values than any valid one. Reading it would need much more memory than its size.
pub(super) fn has_too_many_values(body: &[u8]) -> bool {
    if body.len() <= SMALL_BYTES {
        return false;
    }
    let mut scanner = Scanner::default();
    let mut values = 0;
    for byte in body {
        if scanner.is_outside(*byte) && matches!(byte, b',' | b'[' | b'{') {
            values += 1;
        }
    }
    values > MAX_VALUES
}

/// Position relative to the strings of a JSON text.
#[derive(Default)]
struct Scanner {
    in_string: bool,
    is_escaped: bool,
}

impl Scanner {
    /// Returns whether the next byte is outside of strings, and not a quotation mark.
    fn is_outside(&mut self, byte: u8) -> bool {
        if !self.in_string {
            self.in_string = byte == b'"';
            return !self.in_string;
        }
        if self.is_escaped {
            self.is_escaped = false;
        } else if byte == b'\\' {
            self.is_escaped = true;
        } else if byte == b'"' {
            self.in_string = false;
        }
        false
    }
}

/// Returns a text in which all strings can be read as JSON, independently of the bytes that they contain.
pub(super) fn repair(body: &[u8]) -> String {
    let mut text = String::with_capacity(body.len() + 16);
    let mut scanner = Scanner::default();
    for chunk in body.utf8_chunks() {
        repair_valid(chunk.valid(), &mut scanner, &mut text);
        for byte in chunk.invalid() {
            push_byte(*byte, &mut text);
        }
    }
    text
}

fn repair_valid(valid: &str, scanner: &mut Scanner, text: &mut String) {
    let mut rest = valid;
    while let Some(letter) = rest.chars().next() {
        let was_escaped = scanner.is_escaped;
        if letter.is_ascii() {
            scanner.is_outside(letter as u8);
        } else {
            scanner.is_escaped = false;
        }
        if scanner.in_string && scanner.is_escaped && !was_escaped {
            if let Some(unit) = surrogate(rest) {
                rest = &rest["\\uXXXX".len()..];
                scanner.is_escaped = false;
                match surrogate(rest).filter(|low| (0xDC00..0xE000).contains(low)) {
                    Some(low) if unit < 0xDC00 => {
                        rest = &rest["\\uXXXX".len()..];
                        let code = 0x1_0000 + ((unit - 0xD800) << 10) + (low - 0xDC00);
                        text.extend(char::from_u32(code));
                    }
                    // The three bytes that UTF-8 would have for it.
                    _ => {
                        for byte in [0xE0 | unit >> 12, 0x80 | unit >> 6 & 0x3F, 0x80 | unit & 0x3F] {
                            push_byte(byte as u8, text);
                        }
                    }
                }
                continue;
            }
            if !is_escape(rest) {
                scanner.is_escaped = false;
                text.push_str("\\\\");
                rest = &rest[1..];
                continue;
            }
        }
        rest = &rest[letter.len_utf8()..];
        match u32::from(letter) {
            code if (FIRST..FIRST + 256).contains(&code) => {
                for byte in letter.encode_utf8(&mut [0; 4]).bytes() {
                    push_byte(byte, text);
                }
            }
            code if scanner.in_string && code < 0x20 => text.push_str(&format!("\\u{code:04x}")),
            _ => text.push(letter),
        }
    }
}

/// Returns whether the text begins with an escape sequence of JSON (RFC 8259, section 7).
fn is_escape(text: &str) -> bool {
    match text.as_bytes() {
        [_, b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't', ..] => true,
        [_, b'u', a, b, c, d, ..] => [a, b, c, d].iter().all(|digit| digit.is_ascii_hexdigit()),
        _ => false,
    }
}

/// Returns the code of a surrogate that is written as `\ud800` at the beginning of the text.
fn surrogate(text: &str) -> Option<u32> {
    let digits = text.strip_prefix("\\u")?.get(..4)?;
    if !digits.bytes().all(|digit| digit.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, 16).ok().filter(|code| (0xD800..0xE000).contains(code))
}

fn push_byte(byte: u8, text: &mut String) {
    text.extend(char::from_u32(FIRST + u32::from(byte)));
}

/// Returns the bytes of a string that was read from a repaired text.
pub(super) fn bytes_of(text: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text;
    while let Some((first, after)) = rest.split_first() {
        match rest {
            [a, b, c @ 0xB8..=0xBB, d, after @ ..] if [*a, *b] == PLACEHOLDER => {
                bytes.push((c - 0xB8) << 6 | d & 0x3F);
                rest = after;
            }
            _ => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns the bytes of the only string in a JSON text.
    fn read(body: &[u8]) -> Vec<u8> {
        let text: Vec<String> = serde_json::from_str(&repair(body)).unwrap();
        bytes_of(text[0].as_bytes())
    }

    #[test]
    fn strings_with_any_bytes_can_be_read() {
        for (body, expected) in [
            (&b"[\"plain\"]"[..], &b"plain"[..]),
            (b"[\"a\xffb\"]", b"a\xffb"),
            (b"[\"a\nb\t\x01\"]", b"a\nb\t\x01"),
            (br#"["a\ud800b"]"#, b"a\xed\xa0\x80b"),
            (br#"["\uDFFF"]"#, b"\xed\xbf\xbf"),
            (br#"["\ud83d\ude00"]"#, "😀".as_bytes()),
            (br#"["\ud83d\ud83d\ude00"]"#, b"\xed\xa0\xbd\xf0\x9f\x98\x80"),
            (br#"["\\ud800"]"#, b"\\ud800"),
            (br#"["\"\\"]"#, b"\"\\"),
            (b"[\"\\x\\u12\\\xff\"]", b"\\x\\u12\\\xff"),
            ("[\"\u{10FE41}\u{10FEFF}\"]".as_bytes(), "\u{10FE41}\u{10FEFF}".as_bytes()),
            (b"[\n\t\"x\"\r\n]", b"x"),
        ] {
            assert_eq!(read(body), expected, "{}", String::from_utf8_lossy(body));
        }
    }

    proptest! {
        #[test]
        fn the_bytes_of_a_string_are_read_back(bytes in prop::collection::vec(any::<u8>(), 0..20)) {
            let mut body = b"[\"".to_vec();
            for byte in &bytes {
                if matches!(byte, b'"' | b'\\') {
                    body.push(b'\\');
                }
                body.push(*byte);
            }
            body.extend_from_slice(b"\"]");
            prop_assert_eq!(read(&body), bytes);
        }
    }

    #[test]
    fn values_outside_of_strings_are_counted() {
        let long = format!("[\"{}\"]", ",[{".repeat(100_000));
        assert!(!has_too_many_values(long.as_bytes()));
        assert!(has_too_many_values(format!("[{}]", "{},".repeat(30_000)).as_bytes()));
        assert!(has_too_many_values(format!("[\"\\\"\"{}]", ",1".repeat(40_000)).as_bytes()));
        assert!(!has_too_many_values(format!("[{}1]", "1,".repeat(15_000)).as_bytes()), "small");
    }
}
