//! [`Fields`] and [`Writer`]: reader and writer of protobuf's wire format
//! (<https://protobuf.dev/programming-guides/encoding/>), for the few messages that are decoded and encoded hundreds of
//! thousands of times a second.
//!
//! Generated types own every string, and compute the length of every message before they encode it. Here, strings are
//! borrowed, and the length of a message is filled in when its end is known.
//!
//! Decoding has the same results as prost: unknown fields and groups are skipped, and truncated input or a wrong type
//! is an error. Tests compare both.

pub mod response_headers;

/// Maximum depth of nested groups that are skipped.
const MAX_GROUP_DEPTH: u32 = 100;

/// Reason why bytes are not a valid message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// The input ends inside a field.
    #[error("message is truncated")]
    Truncated,
    /// A number has more than 64 bits, or a tag has an invalid field number or wire type.
    #[error("message contains an invalid number or tag")]
    Number,
    /// A known field has the wrong wire type.
    #[error("message contains a field of the wrong type")]
    Type,
    /// A group ends without a start, does not end, or is nested too deeply.
    #[error("message contains an unbalanced group")]
    Group,
    /// A string is not valid UTF-8.
    #[error("message contains a string that is not UTF-8")]
    Text,
}

/// Iterator over the fields (number, value) of a message, in the order of the input.
#[derive(Clone, Debug)]
pub struct Fields<'m> {
    remaining: &'m [u8],
}

/// Value of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'m> {
    /// An integer, a boolean or a value of an enumeration.
    Number(u64),
    /// A string, bytes or a message.
    Bytes(&'m [u8]),
    /// A type that no known field has: a fixed-width number, or a group.
    Other,
}

impl<'m> Value<'m> {
    /// Returns the value as a number. Narrower integers are its lowest bits.
    ///
    /// # Errors
    ///
    /// Returns [`Malformed::Type`] if the value is no number.
    pub fn number(self) -> Result<u64, Malformed> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) | Self::Other => Err(Malformed::Type),
        }
    }

    /// Returns the value as bytes.
    ///
    /// # Errors
    ///
    /// Returns [`Malformed::Type`] if the value is not length-delimited.
    pub fn bytes(self) -> Result<&'m [u8], Malformed> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) | Self::Other => Err(Malformed::Type),
        }
    }

    /// Returns the value as a string.
    ///
    /// # Errors
    ///
    /// Returns [`Malformed::Type`] if the value is not length-delimited, and [`Malformed::Text`] if it is not UTF-8.
    pub fn text(self) -> Result<&'m str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed::Text)
    }

    /// Returns the fields of the value, which is a message.
    ///
    /// # Errors
    ///
    /// Returns [`Malformed::Type`] if the value is not length-delimited.
    pub fn message(self) -> Result<Fields<'m>, Malformed> {
        Ok(Fields::new(self.bytes()?))
    }
}

impl<'m> Fields<'m> {
    /// Creates an iterator over the fields of an encoded message.
    #[must_use]
    pub const fn new(message: &'m [u8]) -> Self {
        Self { remaining: message }
    }

    /// Reads a varint. Most have one byte, so longer ones are read in a separate function.
    #[inline]
    fn varint(&mut self) -> Result<u64, Malformed> {
        match self.remaining {
            [byte @ ..0x80, remaining @ ..] => {
                self.remaining = remaining;
                Ok(u64::from(*byte))
            }
            _ => self.long_varint(),
        }
    }

    #[inline(never)]
    fn long_varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0;
        for (index, byte) in self.remaining.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7F) << (7 * index);
            if *byte < 0x80 {
                // Only one bit of the tenth byte fits into 64 bits.
                if index == 9 && *byte > 1 {
                    return Err(Malformed::Number);
                }
                self.remaining = &self.remaining[index + 1..];
                return Ok(value);
            }
        }
        Err(if self.remaining.len() < 10 { Malformed::Truncated } else { Malformed::Number })
    }

    #[inline]
    fn take(&mut self, size: u64) -> Result<&'m [u8], Malformed> {
        let size = usize::try_from(size).map_err(|_| Malformed::Truncated)?;
        let (taken, remaining) = self.remaining.split_at_checked(size).ok_or(Malformed::Truncated)?;
        self.remaining = remaining;
        Ok(taken)
    }

    /// Reads the next field. The value is `None` at the end of a group. Inlining keeps the result in registers.
    #[inline(always)]
    fn field(&mut self, depth: u32) -> Result<(u32, Option<Value<'m>>), Malformed> {
        let key = u32::try_from(self.varint()?).map_err(|_| Malformed::Number)?;
        let field = key >> 3;
        if field == 0 {
            return Err(Malformed::Number);
        }
        let value = match key & 7 {
            0 => Value::Number(self.varint()?),
            2 => {
                let size = self.varint()?;
                Value::Bytes(self.take(size)?)
            }
            1 => self.take(8).map(|_| Value::Other)?,
            5 => self.take(4).map(|_| Value::Other)?,
            3 => self.skip_group(field, depth + 1).map(|()| Value::Other)?,
            4 => return Ok((field, None)),
            _ => return Err(Malformed::Number),
        };
        Ok((field, Some(value)))
    }

    /// Skips the rest of a group, including nested groups.
    #[inline(never)]
    fn skip_group(&mut self, group: u32, depth: u32) -> Result<(), Malformed> {
        if depth > MAX_GROUP_DEPTH {
            return Err(Malformed::Group);
        }
        loop {
            match self.field(depth)? {
                (_, Some(_)) => {}
                (field, None) if field == group => return Ok(()),
                (_, None) => return Err(Malformed::Group),
            }
        }
    }
}

impl<'m> Iterator for Fields<'m> {
    type Item = Result<(u32, Value<'m>), Malformed>;

    #[inline(always)]
    fn next(&mut self) -> Option<Self::Item> {
        if self.remaining.is_empty() {
            return None;
        }
        let field = self.field(0).and_then(|(field, value)| Ok((field, value.ok_or(Malformed::Group)?)));
        if field.is_err() {
            self.remaining = &[];
        }
        Some(field)
    }
}

/// Writer of protobuf fields with field numbers below 16.
#[derive(Debug)]
pub struct Writer<'o>(pub &'o mut Vec<u8>);

impl Writer<'_> {
    /// Writes a number. 0 is omitted.
    pub fn number(&mut self, field: u8, value: u64) {
        self.optional(field, (value != 0).then_some(value));
    }

    /// Writes a number if there is one. 0 is not omitted.
    pub fn optional(&mut self, field: u8, value: Option<u64>) {
        if let Some(value) = value {
            self.0.push(field << 3);
            self.varint(value);
        }
    }

    /// Writes a string. An empty string is omitted.
    pub fn text(&mut self, field: u8, text: &str) {
        if !text.is_empty() {
            self.0.push(field << 3 | 2);
            self.varint(text.len() as u64);
            self.0.extend_from_slice(text.as_bytes());
        }
    }

    /// Writes a message with the fields that `write` writes.
    pub fn message(&mut self, field: u8, write: impl FnOnce(&mut Self)) {
        self.0.push(field << 3 | 2);
        // Most messages are short, so one byte is reserved for the length. A longer length moves the message.
        let position = self.0.len();
        self.0.push(0);
        write(self);
        let size = self.0.len() - position - 1;
        if size < 0x80 {
            self.0[position] = size as u8;
        } else {
            let mut length = Vec::new();
            Writer(&mut length).varint(size as u64);
            self.0.splice(position..=position, length);
        }
    }

    /// Writes a varint: seven bits per byte, the lowest first. The highest bit of a byte is set if more bytes follow.
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(message: &[u8]) -> Result<Vec<(u32, Value<'_>)>, Malformed> {
        Fields::new(message).collect()
    }

    #[test]
    fn written_fields_are_read_back() {
        for number in [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            let mut message = Vec::new();
            Writer(&mut message).optional(15, Some(number));
            assert_eq!(fields(&message), Ok(vec![(15, Value::Number(number))]), "{number}");
        }
        // The inner message adds two bytes to the size.
        for size in [0, 1, 0x7D, 0x7E, 0x7F, 0x80, 0x3FFF, 0x4000] {
            let (text, mut message) = ("x".repeat(size), Vec::new());
            Writer(&mut message).message(1, |inner| {
                inner.number(1, 0);
                inner.text(2, "");
                inner.message(3, |inner| inner.text(4, &text));
                inner.number(5, 6);
            });
            let [(1, Value::Bytes(outer))] = fields(&message).unwrap()[..] else { panic!("{message:x?}") };
            let [(3, Value::Bytes(inner)), (5, Value::Number(6))] = fields(outer).unwrap()[..] else {
                panic!("{outer:x?}")
            };
            let texts: Vec<_> = fields(inner).unwrap().into_iter().map(|(_, value)| value.text()).collect();
            assert_eq!(texts, if size == 0 { vec![] } else { vec![Ok(text.as_str())] });
        }
    }

    #[test]
    fn malformed_input_is_reported() {
        use Malformed::{Group, Number, Truncated, Type};
        let nested = |depth: usize| [vec![0x0B; depth], vec![0x0C; depth]].concat();
        assert_eq!(fields(&nested(100)), Ok(vec![(1, Value::Other)]));
        for (message, error) in [
            (&[0x08][..], Truncated),
            (&[0x80], Truncated),
            (&[0x0A, 2, b'x'], Truncated),
            (&[0x0A, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1], Truncated),
            (&[0x09, 1, 2, 3, 4, 5, 6, 7], Truncated),
            (&[0x0D, 1, 2, 3], Truncated),
            (&[0x0B, 0x08, 1], Truncated),
            (&[0x0B, 0x14], Group),
            (&[0x0C], Group),
            (&nested(101), Group),
            (&[0x00, 1], Number),
            (&[0x0E], Number),
            (&[0x0F], Number),
            (&[0x88, 0x80, 0x80, 0x80, 0x10, 1], Number),
            (&[0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 2], Number),
            (&[0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF], Truncated),
            (&[0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF], Number),
            (&[0x08, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 0xFF, 1], Number),
        ] {
            assert_eq!(fields(message), Err(error), "{message:x?}");
        }
        assert_eq!(fields(&[0x0A, 1, 0xFF]).unwrap()[0].1.text(), Err(Malformed::Text));
        for value in [Value::Number(1), Value::Other] {
            assert_eq!((value.bytes(), value.text()), (Err(Type), Err(Type)));
        }
        assert_eq!((Value::Bytes(b"").number(), Value::Other.number()), (Err(Type), Err(Type)));
    }
}
