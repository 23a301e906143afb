//! Texts of callers that cannot be used as they are: [`readable`] replaces them in a request, and [`text_of`] in one
//! field.
//!
//! A string of a request may contain any bytes, because Envoy copies parts of headers and paths into it. If the service
//! responded with an error, Envoy would let the request pass. So bytes that are not UTF-8 are written as `\xff`, and a
//! backslash in the same text as `\\`. Different bytes thus stay different. A text that contains `\xff` itself, or the
//! bounded form of a long value, is written with doubled backslashes, too. All other texts stay as they are.

use std::{borrow::Cow, fmt::Write};

use sluicegate_wire::{Fields, Malformed, Value, Writer};

use crate::engine::{bounded, ends_like_bounded};

/// Returns the text that stands for the bytes of a caller.
pub(crate) fn text_of(bytes: &[u8]) -> Cow<'_, str> {
    match std::str::from_utf8(bytes) {
        Ok(text) if !is_ambiguous(text) => text.into(),
        Ok(_) | Err(_) => escaped(bytes).into(),
    }
}

/// Returns the domain of a `RateLimitRequest`, for the log.
pub(super) fn domain_of(message: &[u8]) -> String {
    let mut domain = String::new();
    for field in Fields::new(message) {
        let Ok((1, value)) = field else {
            continue;
        };
        domain = bounded(&text_of(value.bytes().unwrap_or_default())).into_owned();
    }
    domain
}

/// Returns whether a text looks like one that [`escaped`] or [`bounded`] wrote.
fn is_ambiguous(text: &str) -> bool {
    text.contains('\\') && (contains_escaped_byte(text) || ends_like_bounded(text))
}

fn contains_escaped_byte(text: &str) -> bool {
    text.as_bytes().windows(4).any(is_escaped_byte)
}

fn is_escaped_byte(four: &[u8]) -> bool {
    matches!(four, [b'\\', b'x', b'8' | b'9' | b'a'..=b'f', b'0'..=b'9' | b'a'..=b'f'])
}

fn escaped(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len() + 16);
    for chunk in bytes.utf8_chunks() {
        for letter in chunk.valid().chars() {
            if letter == '\\' {
                text.push('\\');
            }
            text.push(letter);
        }
        for byte in chunk.invalid() {
            // Writing to a string cannot fail.
            let _ = write!(text, "\\x{byte:02x}");
        }
    }
    text
}

/// A message of which [`rewrite`] knows the fields with texts.
#[derive(Clone, Copy)]
enum Kind {
    /// `RateLimitRequest`.
    Request,
    /// `RateLimitDescriptor`.
    Descriptor,
    /// `RateLimitDescriptor.Entry`.
    Entry,
}

/// The content of a field.
enum Content {
    Text,
    Message(Kind),
    Other,
}

impl Kind {
    const fn content(self, field: u32) -> Content {
        match (self, field) {
            (Self::Request, 1) | (Self::Entry, 1 | 2) => Content::Text,
            (Self::Request, 2) => Content::Message(Self::Descriptor),
            (Self::Descriptor, 1) => Content::Message(Self::Entry),
            _ => Content::Other,
        }
    }
}

/// Returns an encoded `RateLimitRequest` with the texts that [`text_of`] returns: nearly always the message itself.
///
/// # Errors
///
/// Returns an error if the message is malformed.
pub(crate) fn readable(message: &[u8]) -> Result<Cow<'_, [u8]>, Malformed> {
    if message.is_ascii() && !message.contains(&b'\\') || !needs_rewrite(message, Kind::Request)? {
        return Ok(message.into());
    }
    rewritten(message, &|bytes| text_of(bytes).into_owned()).map(Cow::Owned)
}

/// Returns an encoded `RateLimitRequest` in which each text is replaced by the one that `replace` returns.
///
/// # Errors
///
/// Returns an error if the message is malformed.
pub(crate) fn rewritten(message: &[u8], replace: &dyn Fn(&[u8]) -> String) -> Result<Vec<u8>, Malformed> {
    let mut bytes = Vec::with_capacity(2 * message.len());
    rewrite(message, Kind::Request, replace, &mut bytes)?;
    Ok(bytes)
}

fn needs_rewrite(message: &[u8], kind: Kind) -> Result<bool, Malformed> {
    for field in Fields::new(message) {
        let (field, value) = field?;
        let needs_rewrite = match kind.content(field) {
            Content::Text => matches!(text_of(value.bytes()?), Cow::Owned(_)),
            Content::Message(inner) => needs_rewrite(value.bytes()?, inner)?,
            Content::Other => false,
        };
        if needs_rewrite {
            return Ok(true);
        }
    }
    Ok(false)
}

fn rewrite(
    message: &[u8],
    kind: Kind,
    replace: &dyn Fn(&[u8]) -> String,
    bytes: &mut Vec<u8>,
) -> Result<(), Malformed> {
    for field in Fields::new(message) {
        let (field, value) = field?;
        // No known field has a higher number.
        let Some(number) = u8::try_from(field).ok().filter(|number| *number < 16) else {
            continue;
        };
        let mut inner = Vec::new();
        let inner = match (kind.content(field), value) {
            (Content::Text, value) => {
                inner = replace(value.bytes()?).into_bytes();
                &*inner
            }
            (Content::Message(kind), value) => {
                rewrite(value.bytes()?, kind, replace, &mut inner)?;
                &*inner
            }
            (Content::Other, Value::Bytes(other)) => other,
            (Content::Other, Value::Number(other)) => {
                Writer(bytes).optional(number, Some(other));
                continue;
            }
            (Content::Other, Value::Other) => continue,
        };
        // An empty field is written, too, because it replaces an earlier one.
        Writer(bytes).message(number, |message| message.0.extend_from_slice(inner));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;
    use sluicegate_proto::envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{Entry, RateLimitOverride},
        },
        service::ratelimit::v3::RateLimitRequest,
    };

    use super::*;
    use crate::engine::bounded;

    #[test]
    fn bytes_are_written_as_a_text_that_can_be_read_back() {
        for (bytes, expected) in [
            (&b"bob"[..], "bob"),
            ("日本".as_bytes(), "日本"),
            (b"C:\\temp", "C:\\temp"),
            (b"a\xff\\b", "a\\xff\\\\b"),
            ("é\u{0}".as_bytes(), "é\u{0}"),
            (b"\xed\xa0\x80", "\\xed\\xa0\\x80"),
            (b"a\\xff", "a\\\\xff"),
            (b"a\\x7f", "a\\x7f"),
            (b"a\\xFF", "a\\xFF"),
        ] {
            assert_eq!(text_of(bytes), expected, "{bytes:?}");
        }
    }

    #[test]
    fn a_text_like_a_bounded_value_differs_from_it() {
        let long = "x".repeat(2_000);
        let form = bounded(&long);
        let literal = text_of(form.as_bytes());
        assert_ne!(literal, form);
        assert_eq!(literal, form.replace('\\', "\\\\"));
        assert_ne!(bounded(&literal), form);
    }

    fn request(bytes: &[u8]) -> RateLimitRequest {
        RateLimitRequest::decode(bytes).unwrap()
    }

    #[test]
    fn only_texts_are_replaced() {
        let descriptor = RateLimitDescriptor {
            entries: vec![
                Entry { key: "a".into(), value: "some".into() },
                Entry { key: "b".into(), value: String::new() },
            ],
            limit: Some(RateLimitOverride { requests_per_unit: 3, unit: 2, unit_multiplier: Some(0) }),
            hits_addend: Some(0),
            is_negative_hits: true,
        };
        let plain = RateLimitRequest { domain: "d".into(), descriptors: vec![descriptor; 2], hits_addend: 7 };
        let message = plain.encode_to_vec();
        assert!(matches!(readable(&message), Ok(Cow::Borrowed(_))));
        // An unknown group, a field with a high number, and an empty domain that replaces the first one.
        let damaged = [&message[..], &[0x7B, 0x7C], &[0x82, 1, 1, b'x'], &[0x0A, 0]].concat();
        let position = damaged.windows(4).position(|four| four == b"some").unwrap();
        let mut damaged = damaged;
        damaged[position] = 0xff;
        let mut expected = plain;
        expected.domain = String::new();
        expected.descriptors[0].entries[0].value = "\\xffome".into();
        assert_eq!(request(&readable(&damaged).unwrap()), expected);
    }

    #[test]
    fn malformed_messages_are_rejected() {
        for message in [&[0x0A, 5, 0xff][..], &[0x12, 2, 0x0A, 0xff], &[0x08, 0xff]] {
            assert!(readable(message).is_err(), "{message:x?}");
        }
    }

    /// Bytes near all the forms that could be confused.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let digest = "~0123456789abcdef0123456789abcdef01234567";
        let parts = prop::sample::select(vec![
            &b"\\"[..],
            b"x",
            b"ff",
            b"8f",
            b"\xff",
            b"\x8f",
            digest.as_bytes(),
            b"a",
            "é".as_bytes(),
        ]);
        prop::collection::vec(parts, 0..5).prop_map(|parts| parts.concat())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 20_000, ..ProptestConfig::default() })]
        #[test]
        fn different_bytes_have_different_texts(one in bytes(), other in bytes()) {
            prop_assert_eq!(text_of(&one) == text_of(&other), one == other);
            prop_assert!(!ends_like_bounded(&text_of(&one)) || text_of(&one).contains("\\\\~"));
        }
    }
}
