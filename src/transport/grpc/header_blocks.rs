//! [`HeaderBlocks`]: measures the header blocks that a caller sends, and those of which the end is missing.
//!
//! The crate `h2` decodes headers as their frames arrive, and neither reports nor limits how long it keeps those
//! without a last frame.

/// Size of the preface of a connection in bytes (RFC 9113, section 3.4).
pub(super) const PREFACE_BYTES: usize = 24;
/// Size of the head of a frame in bytes (RFC 9113, section 4.1).
pub(super) const FRAME_HEAD_BYTES: usize = 9;
pub(super) const HEADERS: u8 = 1;
pub(super) const CONTINUATION: u8 = 9;
/// The flag of the last frame of a header block.
pub(super) const END_HEADERS: u8 = 4;

/// The position in the frames that a caller sends.
pub(super) struct HeaderBlocks {
    head: [u8; FRAME_HEAD_BYTES],
    /// Number of bytes of `head` that have arrived.
    received: usize,
    /// Number of bytes of the current payload that have not arrived.
    rest: usize,
    /// Whether the current frame is the last one of a header block.
    is_last: bool,
    unfinished_bytes: usize,
    /// Announced size in bytes of the largest header block since [`Self::take_largest`].
    largest: usize,
}

impl HeaderBlocks {
    /// Starts before the preface of a connection.
    pub(super) const fn new() -> Self {
        Self {
            head: [0; FRAME_HEAD_BYTES],
            received: 0,
            rest: PREFACE_BYTES,
            is_last: false,
            unfinished_bytes: 0,
            largest: 0,
        }
    }

    /// Returns the announced size of the header block that has not arrived completely, or 0.
    pub(super) const fn unfinished_bytes(&self) -> usize {
        self.unfinished_bytes
    }

    /// Returns the announced size of the largest header block in the bytes since the last call.
    pub(super) fn take_largest(&mut self) -> usize {
        std::mem::replace(&mut self.largest, self.unfinished_bytes)
    }

    /// Reads the next bytes of the connection.
    pub(super) fn read(&mut self, mut bytes: &[u8]) {
        while let Some(next) = bytes.get(self.rest..) {
            self.rest = 0;
            self.end_frame();
            // The usual case is a head in one piece.
            if self.received == 0
                && let Some((head, payload)) = next.split_first_chunk()
            {
                self.begin_frame(*head);
                bytes = payload;
                continue;
            }
            let copied = next.len().min(FRAME_HEAD_BYTES - self.received);
            self.head[self.received..self.received + copied].copy_from_slice(&next[..copied]);
            self.received += copied;
            if self.received < FRAME_HEAD_BYTES {
                return;
            }
            self.received = 0;
            self.begin_frame(self.head);
            bytes = &next[copied..];
        }
        self.rest -= bytes.len();
    }

    fn begin_frame(&mut self, head: [u8; FRAME_HEAD_BYTES]) {
        let [a, b, c, kind, flags, ..] = head;
        self.rest = u32::from_be_bytes([0, a, b, c]) as usize;
        if kind != HEADERS && kind != CONTINUATION {
            return;
        }
        self.unfinished_bytes += self.rest;
        self.largest = self.largest.max(self.unfinished_bytes);
        self.is_last = flags & END_HEADERS != 0;
    }

    fn end_frame(&mut self) {
        if self.is_last {
            self.is_last = false;
            self.unfinished_bytes = 0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: u8, flags: u8, payload: usize) -> Vec<u8> {
        let length = u32::try_from(payload).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, 1], &vec![HEADERS; payload]].concat()
    }

    #[test]
    fn a_block_is_unfinished_until_the_end_of_its_last_frame() {
        let data = 0;
        let frames = [
            (vec![b'P'; PREFACE_BYTES], 0),
            (frame(HEADERS, END_HEADERS, 40), 0),
            (frame(data, 0, 300), 0),
            (frame(HEADERS, 0, 100), 100),
            (frame(CONTINUATION, 0, 20), 120),
            (frame(CONTINUATION, 0, 0), 120),
            (frame(CONTINUATION, END_HEADERS, 20), 0),
            (frame(HEADERS, END_HEADERS, 0), 0),
            (frame(HEADERS, 1, 7), 7),
            (frame(CONTINUATION, END_HEADERS, 5)[..FRAME_HEAD_BYTES + 4].to_vec(), 12),
        ];
        for pieces in [1, 2, 9, 10, 1_000] {
            let mut blocks = HeaderBlocks::new();
            for (bytes, unfinished) in &frames {
                bytes.chunks(pieces).for_each(|piece| blocks.read(piece));
                assert_eq!(blocks.unfinished_bytes(), *unfinished, "pieces of {pieces} bytes");
            }
        }
        let all: Vec<u8> = frames.iter().flat_map(|(bytes, _)| bytes.clone()).collect();
        let mut blocks = HeaderBlocks::new();
        blocks.read(&all);
        assert_eq!(blocks.unfinished_bytes(), 12);
        assert_eq!((blocks.take_largest(), blocks.take_largest()), (140, 12));
    }
}
