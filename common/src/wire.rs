//! Protobuf's wire format (<https://protobuf.dev/programming-guides/encoding/>), for the few messages that are read and
//! written hundreds of thousands of times a second. Generated types own every text they hold and measure every message
//! before they write it; here texts are borrowed, and a message's length is filled in when its end is known.
//!
//! What is read means what prost makes of it: fields that are not known are passed over, groups too, and what is cut
//! off or of a wrong type is an error. Tests hold one against the other.

/// Groups inside each other that are passed over; more are an error.
const DEPTH: u32 = 100;

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    /// They end inside a field.
    #[error("it is cut off")]
    Truncated,
    /// A number of more than 64 bits, or a field without a number or a type.
    #[error("a number or a tag in it is malformed")]
    Number,
    /// A known field of another type.
    #[error("a field has the wrong type")]
    Type,
    /// A group that ends without having begun, or the other way round.
    #[error("its groups do not match")]
    Group,
    /// A text that is no UTF-8.
    #[error("a text is not UTF-8")]
    Text,
}

/// The fields of a message, in the order in which they were written.
#[derive(Clone, Debug)]
pub struct Fields<'m> {
    rest: &'m [u8],
}

/// What a field holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Value<'m> {
    /// An integer, a boolean or a word of an enumeration.
    Number(u64),
    /// A text, bytes or a message.
    Bytes(&'m [u8]),
    /// Of a type that no field that is read here has: a fixed number, or a group.
    Other,
}

impl<'m> Value<'m> {
    /// A number, if it is one. Narrower integers are its last bits.
    pub fn number(self) -> Result<u64, Malformed> {
        match self {
            Self::Number(number) => Ok(number),
            Self::Bytes(_) | Self::Other => Err(Malformed::Type),
        }
    }

    /// Bytes, if it is that.
    pub fn bytes(self) -> Result<&'m [u8], Malformed> {
        match self {
            Self::Bytes(bytes) => Ok(bytes),
            Self::Number(_) | Self::Other => Err(Malformed::Type),
        }
    }

    /// A text, if it is one.
    pub fn text(self) -> Result<&'m str, Malformed> {
        std::str::from_utf8(self.bytes()?).map_err(|_| Malformed::Text)
    }

    /// A message's fields, if it is one.
    pub fn message(self) -> Result<Fields<'m>, Malformed> {
        Ok(Fields::of(self.bytes()?))
    }
}

impl<'m> Fields<'m> {
    /// Of a message.
    #[must_use]
    pub const fn of(message: &'m [u8]) -> Self {
        Self { rest: message }
    }

    /// Most are of one byte.
    #[inline]
    fn varint(&mut self) -> Result<u64, Malformed> {
        match self.rest {
            [byte @ ..0x80, rest @ ..] => {
                self.rest = rest;
                Ok(u64::from(*byte))
            }
            _ => self.long_varint(),
        }
    }

    #[inline(never)]
    fn long_varint(&mut self) -> Result<u64, Malformed> {
        let mut value = 0;
        for (place, byte) in self.rest.iter().take(10).enumerate() {
            value |= u64::from(byte & 0x7F) << (7 * place);
            if *byte < 0x80 {
                // The tenth has one bit left.
                if place == 9 && *byte > 1 {
                    return Err(Malformed::Number);
                }
                self.rest = &self.rest[place + 1..];
                return Ok(value);
            }
        }
        Err(if self.rest.len() < 10 { Malformed::Truncated } else { Malformed::Number })
    }

    #[inline]
    fn take(&mut self, size: u64) -> Result<&'m [u8], Malformed> {
        let size = usize::try_from(size).map_err(|_| Malformed::Truncated)?;
        let (taken, rest) = self.rest.split_at_checked(size).ok_or(Malformed::Truncated)?;
        self.rest = rest;
        Ok(taken)
    }

    /// The next field; `None` inside for the end of a group. Where it is inlined nothing of the answer is kept in memory.
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
            3 => self.pass_group(field, depth + 1).map(|()| Value::Other)?,
            4 => return Ok((field, None)),
            _ => return Err(Malformed::Number),
        };
        Ok((field, Some(value)))
    }

    #[inline(never)]
    fn pass_group(&mut self, group: u32, depth: u32) -> Result<(), Malformed> {
        if depth > DEPTH {
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
        if self.rest.is_empty() {
            return None;
        }
        let field = self.field(0).and_then(|(field, value)| Ok((field, value.ok_or(Malformed::Group)?)));
        if field.is_err() {
            self.rest = &[];
        }
        Some(field)
    }
}

/// Writes fields with numbers below 16.
#[derive(Debug)]
pub struct Writer<'o>(pub &'o mut Vec<u8>);

impl Writer<'_> {
    /// A number; 0 is left out.
    pub fn number(&mut self, field: u8, value: u64) {
        self.optional(field, (value != 0).then_some(value));
    }

    /// A number that is there or not: 0 is something else than none.
    pub fn optional(&mut self, field: u8, value: Option<u64>) {
        if let Some(value) = value {
            self.0.push(field << 3);
            self.varint(value);
        }
    }

    /// A text; an empty one is left out.
    pub fn text(&mut self, field: u8, text: &str) {
        if !text.is_empty() {
            self.0.push(field << 3 | 2);
            self.varint(text.len() as u64);
            self.0.extend_from_slice(text.as_bytes());
        }
    }

    /// A message of what is written meanwhile.
    pub fn message(&mut self, field: u8, write: impl FnOnce(&mut Self)) {
        self.0.push(field << 3 | 2);
        // Most messages are short: room for a length of one byte, and a longer one moves what was written.
        let place = self.0.len();
        self.0.push(0);
        write(self);
        let size = self.0.len() - place - 1;
        if size < 0x80 {
            self.0[place] = size as u8;
        } else {
            let (bytes, len) = varint(size as u64);
            self.0.splice(place..=place, bytes[..len].iter().copied());
        }
    }

    fn varint(&mut self, value: u64) {
        if value < 0x80 {
            self.0.push(value as u8);
        } else {
            let (bytes, len) = varint(value);
            self.0.extend_from_slice(&bytes[..len]);
        }
    }
}

/// Seven bits in each byte, the lowest first; the highest bit says that there are more.
const fn varint(mut value: u64) -> ([u8; 10], usize) {
    let mut bytes = [0; 10];
    let mut len = 0;
    while value >= 0x80 {
        bytes[len] = value as u8 | 0x80;
        value >>= 7;
        len += 1;
    }
    bytes[len] = value as u8;
    (bytes, len + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(message: &[u8]) -> Result<Vec<(u32, Value<'_>)>, Malformed> {
        Fields::of(message).collect()
    }

    #[test]
    fn what_is_written_is_read() {
        for number in [0, 1, 0x7F, 0x80, 0x3FFF, 0x4000, u64::from(u32::MAX), 1 << 63, u64::MAX] {
            let mut message = Vec::new();
            Writer(&mut message).optional(15, Some(number));
            assert_eq!(fields(&message), Ok(vec![(15, Value::Number(number))]), "{number}");
        }
        // The inner message has two bytes more.
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
    fn what_is_no_message_says_why() {
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
