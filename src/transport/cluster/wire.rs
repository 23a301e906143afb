//! [`count_fields`]: the number of items in an encoded message, before it is decoded.
//!
//! An empty item takes two bytes on the wire and 30 to 200 bytes in memory, so the size of a message alone does not
//! bound the memory of the decoded one.

use sluicegate_wire::{Fields, Value};

/// Error returned when an encoded message is malformed or has too many items.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum WireError {
    /// The bytes are no protobuf message.
    #[error("message is not valid protobuf")]
    Malformed,
    /// The message has more items than a member ever sends.
    #[error("message has more than {0} items")]
    TooManyItems(usize),
}

/// Counts the fields of a message with numbers in `numbers`, and fails above `max`. Calls `inspect` for each of them
/// that has contents.
pub(super) fn count_fields(
    bytes: &[u8],
    numbers: &[u32],
    max: usize,
    mut inspect: impl FnMut(&[u8]) -> Result<(), WireError>,
) -> Result<usize, WireError> {
    let mut count = 0;
    for field in Fields::new(bytes) {
        let (number, value) = field.map_err(|_| WireError::Malformed)?;
        if !numbers.contains(&number) {
            continue;
        }
        count += 1;
        if count > max {
            return Err(WireError::TooManyItems(max));
        }
        if let Value::Bytes(contents) = value {
            inspect(contents)?;
        }
    }
    Ok(count)
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use sluicegate_proto::sluicegate::cluster::v1 as proto;

    use super::*;

    fn count(bytes: &[u8], numbers: &[u32], max: usize) -> Result<usize, WireError> {
        count_fields(bytes, numbers, max, |_| Ok(()))
    }

    #[test]
    fn fields_of_every_type_are_counted_by_their_numbers() {
        let increments = vec![vec![1; 300].into(), Vec::new().into()];
        let message =
            proto::PullResponse { origin: u64::MAX, joined: true, now_us: 1, increments, ..Default::default() };
        let bytes = message.encode_to_vec();
        assert_eq!(count(&bytes, &[6], 2), Ok(2));
        assert_eq!(count(&bytes, &[1, 5], 9), Ok(2));
        assert_eq!(count(&bytes, &[6], 1), Err(WireError::TooManyItems(1)));
        // Fixed-size fields, which this protocol does not have, are skipped.
        let unknown = [&[0x79, 1, 2, 3, 4, 5, 6, 7, 8][..], &[0x7d, 1, 2, 3, 4], &bytes].concat();
        assert_eq!(count(&unknown, &[6, 15], 9), Ok(4));
    }

    #[test]
    fn the_contents_of_counted_fields_are_inspected() {
        let message = proto::PullResponse { increments: vec![vec![7; 5].into()], origin: 3, ..Default::default() };
        let mut seen = Vec::new();
        let counted = count_fields(&message.encode_to_vec(), &[6], 9, |contents| {
            seen.push(contents.to_vec());
            Ok(())
        });
        assert_eq!((counted, seen), (Ok(1), vec![vec![7; 5]]));
    }

    #[test]
    fn truncated_and_invalid_bytes_are_rejected() {
        let bytes = proto::PullResponse { increments: vec![vec![1; 9].into()], ..Default::default() }.encode_to_vec();
        for length in 1..bytes.len() {
            assert_eq!(count(&bytes[..length], &[6], 9), Err(WireError::Malformed), "{length}");
        }
        for invalid in [&[0xff; 12][..], &[0x33], &[0x34, 0], &[0x32, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f]] {
            assert_eq!(count(invalid, &[6], 9), Err(WireError::Malformed), "{invalid:?}");
        }
    }
}
