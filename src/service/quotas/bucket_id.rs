//! [`BucketId`]: the name of a bucket.

use std::{fmt, iter};

use smallvec::SmallVec;

use crate::rules::Entry;

/// The name of a bucket: keys with their values, in ascending order of the keys.
///
/// Names of up to 16 bytes need no allocation, because a stream can have many buckets. Each key and value is stored after
/// its length, which has one byte, or five if it is 255 or more.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct BucketId(SmallVec<[u8; 16]>);

/// Stands before a length of four bytes.
const LONG: u8 = u8::MAX;
/// Stands after the entries of a name that cannot be sent back. No entry begins like this: short lengths have one byte.
const UNREADABLE: [u8; 5] = [LONG, 0, 0, 0, 0];

impl BucketId {
    /// Returns whether there are no entries.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the size of the name in bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.0.len()
    }

    /// Marks the name of a bucket as unreadable, because the name that its caller uses is not UTF-8 and cannot be sent back.
    #[must_use]
    pub fn into_unreadable(mut self) -> Self {
        self.0.extend_from_slice(&UNREADABLE);
        self
    }

    /// Returns whether the entries are the caller's own, so that it recognises the name in an answer.
    #[must_use]
    pub fn is_readable(&self) -> bool {
        !self.0.ends_with(&UNREADABLE)
    }

    /// Returns the keys with their values.
    pub fn entries(&self) -> impl Iterator<Item = Entry<'_>> {
        let mut rest = &*self.0;
        let mut next = move || {
            let (length, tail) = match rest.split_first()? {
                (&LONG, tail) => tail.split_first_chunk().map(|(length, tail)| (u32::from_le_bytes(*length), tail))?,
                (length, tail) => (u32::from(*length), tail),
            };
            let (text, tail) = tail.split_at_checked(length as usize)?;
            rest = tail;
            str::from_utf8(text).ok()
        };
        iter::from_fn(move || Some(Entry { key: next()?, value: next()? }))
    }
}

/// Creates a name of keys with their values, which must be in ascending order of the keys. Each text has less than 4 GiB.
impl<T: AsRef<str>> FromIterator<(T, T)> for BucketId {
    fn from_iter<I: IntoIterator<Item = (T, T)>>(entries: I) -> Self {
        let mut bytes = SmallVec::new();
        for (key, value) in entries {
            for text in [key.as_ref(), value.as_ref()] {
                match u8::try_from(text.len()) {
                    Ok(length) if length < LONG => bytes.push(length),
                    _ => {
                        bytes.push(LONG);
                        bytes.extend_from_slice(&u32::try_from(text.len()).unwrap_or(u32::MAX).to_le_bytes());
                    }
                }
                bytes.extend_from_slice(text.as_bytes());
            }
        }
        bytes.shrink_to_fit();
        Self(bytes)
    }
}

impl fmt::Debug for BucketId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_map().entries(self.entries().map(|entry| (entry.key, entry.value))).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unreadable_name_has_the_same_entries_and_is_another_name() {
        let texts = ["", "x", &"x".repeat(255)];
        for entries in texts.iter().flat_map(|key| texts.iter().map(move |value| [(*key, *value)])) {
            let id: BucketId = entries.into_iter().collect();
            let unreadable = id.clone().into_unreadable();
            assert_eq!((id.is_readable(), unreadable.is_readable()), (true, false), "{entries:?}");
            assert_ne!(id, unreadable);
            assert_eq!(id.entries().collect::<Vec<_>>(), unreadable.entries().collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_name_has_the_entries_of_which_it_was_made() {
        let texts = [254, 255, 256, 70_000].map(|length| "x".repeat(length));
        let long = texts.iter().map(|text| (&**text, &**text)).collect();
        for entries in [vec![], vec![("", "")], vec![("user", "alice")], vec![("a", "ä"), ("b", "")], long] {
            let id: BucketId = entries.iter().copied().collect();
            assert_eq!(id.is_empty(), entries.is_empty());
            assert_eq!(id.entries().map(|entry| (entry.key, entry.value)).collect::<Vec<_>>(), entries);
        }
        let [one, other] = [[("a", "bc")], [("ab", "c")]].map(BucketId::from_iter);
        assert_ne!(one, other);
        assert_eq!(format!("{one:?}"), r#"{"a": "bc"}"#);
    }
}
