//! [`AnyAuthority`]: a stream of a Unix socket on which `:authority` can be a path.
//!
//! gRPC in Python sends the escaped path of the socket, `run%2Fgrpc.sock`, and in Java the path itself. The crate `h2`
//! resets such a call before it is accepted, because the type `http::uri::Authority` allows neither percent signs nor
//! slashes, although the authority means nothing on a Unix socket. So its bytes are changed as they are read. Each
//! character is replaced by one of the same length in HPACK (RFC 7541), so that neither the frames nor the sizes in the
//! dynamic table change.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::header_blocks::{CONTINUATION, END_HEADERS, FRAME_HEAD_BYTES, HEADERS, PREFACE_BYTES};

/// The flag of a frame with padding.
const PADDED: u8 = 0x8;
/// The flag of a `HEADERS` frame with a priority, and the size of a priority in bytes.
const PRIORITY: u8 = 0x20;
const PRIORITY_BYTES: usize = 5;

/// The index of `:authority` in the static table.
const AUTHORITY: u8 = 1;
/// The name as a literal, as gRPC in C++ sends it, and in the Huffman code.
const NAME: &[u8] = b":authority";
const HUFFMAN_NAME: &[u8] = &[0xb8, 0x3b, 0x53, 0x39, 0xec, 0x32, 0x7d, 0x7f];

/// A stream that replaces the characters of authorities which `h2` rejects.
pub(in crate::transport) struct AnyAuthority<S> {
    stream: S,
    frames: Frames,
    /// The last byte that was read, which is not passed on yet: a character of an authority begins in it, and may have to
    /// be replaced when the next byte arrives.
    held: Option<u8>,
}

impl<S> AnyAuthority<S> {
    pub(in crate::transport) fn new(stream: S) -> Self {
        Self { stream, frames: Frames::new(), held: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AnyAuthority<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if buffer.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        let start = buffer.filled().len();
        loop {
            let held = this.held.take();
            buffer.put_slice(held.as_slice());
            let before = buffer.filled().len();
            let result = Pin::new(&mut this.stream).poll_read(context, buffer);
            if !matches!(result, Poll::Ready(Ok(()))) {
                buffer.set_filled(start);
                this.held = held;
                return result;
            }
            let read = &mut buffer.filled_mut()[start..];
            this.frames.read(read, before - start);
            // Without new bytes, the stream has ended or the buffer is full.
            let has_new = start + read.len() > before;
            this.held = match read.last() {
                Some(last) if has_new && this.frames.is_inside_code() => Some(*last),
                _ => return Poll::Ready(Ok(())),
            };
            let end = buffer.filled().len() - 1;
            buffer.set_filled(end);
            // No bytes would mean the end of the stream.
            if end > start {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AnyAuthority<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// The position in the frames that a caller sends.
struct Frames {
    head: [u8; FRAME_HEAD_BYTES],
    /// Number of bytes of `head` that have arrived.
    received: usize,
    /// Whether the next byte is the length of the padding.
    has_pad_length: bool,
    /// Numbers of bytes of the payload that have not arrived: before, in and after the header block.
    prefix: usize,
    block: usize,
    padding: usize,
    /// Whether the frame is the last one of a header block.
    is_last: bool,
    fields: Fields,
}

impl Frames {
    /// Starts before the preface of a connection.
    fn new() -> Self {
        Self {
            head: [0; FRAME_HEAD_BYTES],
            received: FRAME_HEAD_BYTES,
            has_pad_length: false,
            prefix: PREFACE_BYTES,
            block: 0,
            padding: 0,
            is_last: false,
            fields: Fields::default(),
        }
    }

    /// Reads and changes the bytes of the connection from `at` on. Those before it were read.
    fn read(&mut self, bytes: &mut [u8], mut at: usize) {
        while at < bytes.len() {
            let left = bytes.len() - at;
            if self.received < FRAME_HEAD_BYTES {
                self.head[self.received] = bytes[at];
                self.received += 1;
                at += 1;
                if self.received == FRAME_HEAD_BYTES {
                    self.begin_frame();
                }
            } else if self.has_pad_length {
                self.has_pad_length = false;
                self.padding = usize::from(bytes[at]);
                self.block = self.block.saturating_sub(self.padding);
                at += 1;
            } else if self.prefix > 0 {
                let skipped = self.prefix.min(left);
                self.prefix -= skipped;
                at += skipped;
            } else if self.block > 0 {
                let end = at + self.block.min(left);
                self.block -= end - at;
                while at < end {
                    self.fields.read(bytes, at);
                    at += 1;
                }
            } else {
                let skipped = self.padding.min(left);
                self.padding -= skipped;
                at += skipped;
            }
            let is_complete = !self.has_pad_length && self.prefix + self.block + self.padding == 0;
            if self.received == FRAME_HEAD_BYTES && is_complete {
                self.received = 0;
                self.fields.end_frame(self.is_last);
            }
        }
    }

    fn begin_frame(&mut self) {
        let [a, b, c, kind, flags, ..] = self.head;
        let length = u32::from_be_bytes([0, a, b, c]) as usize;
        self.is_last = false;
        if kind != HEADERS && kind != CONTINUATION {
            self.prefix = length;
            return;
        }
        self.is_last = flags & END_HEADERS != 0;
        self.block = length;
        if kind == HEADERS && flags & PADDED != 0 && length > 0 {
            self.has_pad_length = true;
            self.block -= 1;
        }
        if kind == HEADERS && flags & PRIORITY != 0 {
            self.prefix = PRIORITY_BYTES.min(self.block);
            self.block -= self.prefix;
        }
    }

    /// Returns whether the last byte belongs to a character that can be changed with the next byte.
    fn is_inside_code(&self) -> bool {
        self.block > 0 && self.fields.is_inside_code()
    }
}

/// The meaning of the next byte of a header block.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Step {
    /// The first byte of a field.
    #[default]
    Field,
    /// A further byte of an index.
    Index { before_value: bool },
    /// The first byte of the length of a text.
    Length,
    /// A further byte of a length, with its place in bits.
    LongLength { shift: u32 },
    /// A byte of a text.
    Text,
}

/// The position in the fields of a header block (RFC 7541, section 6).
#[derive(Default)]
struct Fields {
    step: Step,
    /// Whether the text is a name, and not a value.
    is_name: bool,
    is_huffman: bool,
    /// Whether the text is the value of `:authority`, or the same as its name so far.
    is_authority: bool,
    /// Number of bytes of the text that have arrived, and that have not.
    position: usize,
    rest: usize,
    code: HuffmanCode,
}

impl Fields {
    /// Reads the byte at `at`, and changes it if it belongs to an authority.
    fn read(&mut self, bytes: &mut [u8], at: usize) {
        let byte = bytes[at];
        match self.step {
            Step::Field => self.begin_field(byte),
            Step::Index { before_value } => {
                if byte & 0x80 == 0 {
                    self.step = if before_value { Step::Length } else { Step::Field };
                }
            }
            Step::Length => {
                self.is_huffman = byte & 0x80 != 0;
                self.rest = usize::from(byte & 0x7f);
                if self.rest == 0x7f {
                    self.step = Step::LongLength { shift: 0 };
                } else {
                    self.begin_text();
                }
            }
            Step::LongLength { shift } => {
                // More than 28 bits are an error for h2.
                let part = usize::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
                self.rest = self.rest.saturating_add(part);
                self.step = Step::LongLength { shift: shift + 7 };
                if byte & 0x80 == 0 {
                    self.begin_text();
                }
            }
            Step::Text => self.read_text(bytes, at),
        }
    }

    fn begin_field(&mut self, byte: u8) {
        // An indexed field, a literal that the caller's table stores, a new size of the table, or another literal.
        let (mask, is_literal) = match byte {
            0x80.. => (0x7f, false),
            0x40.. => (0x3f, true),
            0x20.. => (0x1f, false),
            _ => (0x0f, true),
        };
        let index = byte & mask;
        self.is_name = is_literal && index == 0;
        self.is_authority = self.is_name || is_literal && index == AUTHORITY;
        if index == mask {
            self.step = Step::Index { before_value: is_literal };
        } else if is_literal {
            self.step = Step::Length;
        }
    }

    fn begin_text(&mut self) {
        self.step = Step::Text;
        self.position = 0;
        self.code = HuffmanCode::default();
        if self.rest == 0 {
            self.end_text();
        }
    }

    fn read_text(&mut self, bytes: &mut [u8], at: usize) {
        let byte = bytes[at];
        if self.is_name {
            let name = if self.is_huffman { HUFFMAN_NAME } else { NAME };
            self.is_authority &= name.get(self.position) == Some(&byte);
        } else if self.is_authority && self.is_huffman {
            self.code.read(bytes, at);
        } else if self.is_authority && !byte.is_ascii_alphanumeric() && !matches!(byte, b'-' | b'.' | b'_') {
            bytes[at] = b'-';
        }
        self.position += 1;
        self.rest -= 1;
        if self.rest == 0 {
            self.end_text();
        }
    }

    fn end_text(&mut self) {
        if !self.is_name {
            self.step = Step::Field;
            return;
        }
        let name = if self.is_huffman { HUFFMAN_NAME } else { NAME };
        self.is_authority &= self.position == name.len();
        self.is_name = false;
        self.step = Step::Length;
    }

    /// Prepares for the next frame. After the last frame of a header block, a new field begins. Otherwise a field may
    /// continue in it, but a character that the frames divide is not replaced.
    fn end_frame(&mut self, is_last: bool) {
        if is_last {
            self.step = Step::Field;
        } else if self.is_inside_code() {
            // Frames divide the code. No client divides a value that is as short as a path.
            self.is_authority = false;
        }
    }

    fn is_inside_code(&self) -> bool {
        let is_value = self.step == Step::Text && !self.is_name;
        is_value && self.is_authority && self.is_huffman && self.code.can_be_replaced()
    }
}

/// The number of bits of the codes up to 15 bits, and the first number that is not a code of this length (RFC 7541,
/// appendix B). Longer codes belong to characters that no path has without an escape.
const CODE_ENDS: [(u32, u32); 10] = [
    (5, 0x0a),
    (6, 0x2e),
    (7, 0x7c),
    (8, 0xfe),
    (10, 0x3fd),
    (11, 0x7fd),
    (12, 0xffc),
    (13, 0x1ffe),
    (14, 0x3ffe),
    (15, 0x7fff),
];
/// The codes that are replaced: the length in bits, the code, and the code of `-` or `B` in its place. The codes of
/// `@`, `[` and `]` can begin two bytes before their end, and are not changed: only tools that are given such an
/// authority encode it.
const REPLACED_CODES: [(u32, u32, u32); 4] = [
    // A space, `%` and `/`.
    (6, 0x14, 0x16),
    (6, 0x15, 0x16),
    (6, 0x18, 0x16),
    // A colon.
    (7, 0x5c, 0x5d),
];
/// The length of the longest code that is replaced.
const MAX_REPLACED_BITS: u32 = 7;

/// The bits of a character in the Huffman code that have arrived.
#[derive(Default)]
struct HuffmanCode {
    bits: u32,
    length: u32,
}

impl HuffmanCode {
    /// Reads the bits of the byte at `at`. Replaces codes in it, which may begin in the byte before it.
    fn read(&mut self, bytes: &mut [u8], at: usize) {
        for shift in (0..8).rev() {
            // Codes of more than 15 bits are not distinguished, so nothing after them is changed.
            if self.length > 15 {
                return;
            }
            self.bits = self.bits << 1 | u32::from(bytes[at] >> shift & 1);
            self.length += 1;
            let is_complete = CODE_ENDS.iter().any(|(length, end)| *length == self.length && self.bits < *end);
            if !is_complete {
                continue;
            }
            for (length, code, replacement) in REPLACED_CODES {
                if (length, code) == (self.length, self.bits) {
                    change(bytes, at, (code ^ replacement) << shift);
                }
            }
            *self = Self::default();
        }
    }

    fn can_be_replaced(&self) -> bool {
        self.length > 0 && self.length < MAX_REPLACED_BITS
    }
}

/// Inverts bits of the byte at `at` and of the one before it.
fn change(bytes: &mut [u8], at: usize, bits: u32) {
    let [.., before, last] = bits.to_be_bytes();
    bytes[at] ^= last;
    if let Some(byte) = at.checked_sub(1).and_then(|at| bytes.get_mut(at)) {
        *byte ^= before;
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncWriteExt, copy, duplex, sink, split};

    use super::*;

    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
    const PATH: &str = "%2Frun%2Fgrpc.sock";
    /// `PATH` and `/tmp/s:o:c` in the Huffman code.
    const HUFFMAN_PATH: &[u8] = &[0x54, 0x58, 0x6c, 0xb6, 0xa5, 0x45, 0x86, 0x6b, 0x2b, 0x22, 0xe8, 0x39, 0x3a, 0xff];
    const HUFFMAN_COLONS: &[u8] = &[0x61, 0x34, 0xd6, 0xc2, 0x2e, 0x1e, 0xe1, 0x3f];

    fn frame(kind: u8, flags: u8, stream: u8, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags, 0, 0, 0, stream], payload].concat()
    }

    fn text(is_huffman: bool, text: &[u8]) -> Vec<u8> {
        let flag = if is_huffman { 0x80 } else { 0 };
        [&[flag | u8::try_from(text.len()).unwrap()], text].concat()
    }

    /// Headers of a call with an authority: POST, http, `:path` with percent signs, and a header.
    fn block(authority: &[u8]) -> Vec<u8> {
        [&[0x83, 0x86, 0x04], &text(false, b"/a%2Fb")[..], authority, &[0x0f, 0x10], &text(false, b"x/y%")].concat()
    }

    /// Returns the authorities of the calls that a server accepts, if each read has at most `piece` bytes.
    async fn authorities(bytes: &[u8], piece: usize, calls: usize) -> Vec<String> {
        let (stream, caller) = duplex(piece);
        let (mut reader, mut writer) = split(caller);
        tokio::spawn(async move { copy(&mut reader, &mut sink()).await });
        let bytes = [PREFACE, bytes].concat();
        tokio::spawn(async move {
            writer.write_all(&bytes).await.unwrap();
            // Until the end of the test.
            std::future::pending::<()>().await;
        });
        let mut connection = h2::server::handshake(AnyAuthority::new(stream)).await.unwrap();
        let mut all = Vec::new();
        while all.len() < calls {
            let (request, _) = connection.accept().await.unwrap().unwrap();
            assert_eq!((request.uri().path(), request.headers()["content-type"].as_bytes()), ("/a%2Fb", &b"x/y%"[..]));
            all.push(request.uri().authority().unwrap().to_string());
        }
        all
    }

    #[tokio::test]
    async fn an_escaped_path_is_an_authority_in_each_form_of_hpack() {
        let last = END_HEADERS | 1;
        let literal = text(false, PATH.as_bytes());
        let huffman = text(true, HUFFMAN_PATH);
        for (authority, expected) in [
            ([&[0x41], &literal[..]].concat(), "-2Frun-2Fgrpc.sock"),
            ([&[0x01], &literal[..]].concat(), "-2Frun-2Fgrpc.sock"),
            ([&[0x11], &huffman[..]].concat(), "-2Frun-2Fgrpc.sock"),
            ([&[0x41], &huffman[..]].concat(), "-2Frun-2Fgrpc.sock"),
            ([&[0x40], &text(false, NAME)[..], &literal].concat(), "-2Frun-2Fgrpc.sock"),
            ([&[0x00], &text(true, HUFFMAN_NAME)[..], &huffman].concat(), "-2Frun-2Fgrpc.sock"),
            ([&[0x41], &text(true, HUFFMAN_COLONS)[..]].concat(), "-tmp-sBoBc"),
            ([&[0x41], &text(false, b"(unix)/tmp/s:o:c")[..]].concat(), "-unix--tmp-s-o-c"),
            ([&[0x41], &text(false, b"localhost")[..]].concat(), "localhost"),
        ] {
            for piece in [1, 2, 3, 7, 9, 64, 4_096] {
                let calls = frame(HEADERS, last, 1, &block(&authority));
                assert_eq!(
                    authorities(&calls, piece, 1).await,
                    [expected],
                    "{authority:x?} in pieces of {piece} bytes"
                );
            }
        }
    }

    /// Frames with a priority and padding, frames of other kinds, and blocks of several frames.
    #[tokio::test]
    async fn authorities_are_found_in_all_frames() {
        let literal = [&[0x41], &text(false, PATH.as_bytes())[..]].concat();
        let headers = block(&literal);
        let padded = [&[3, 0, 0, 0, 0, 16], &headers[..], b"A%%"].concat();
        let (first, rest) = headers.split_at(20);
        // The dynamic table contains the authority.
        let indexed = block(&[0xbe]);
        let bytes = [
            frame(6, 0, 0, b"\x41\x03%%%%%%"),
            frame(HEADERS, PADDED | PRIORITY | END_HEADERS, 1, &padded),
            frame(0, 1, 1, b"\x41\x02%%"),
            frame(HEADERS, END_HEADERS | 1, 3, &indexed),
            frame(HEADERS, 1, 5, first),
            frame(CONTINUATION, END_HEADERS, 5, rest),
            frame(HEADERS, END_HEADERS | 1, 7, &indexed),
        ];
        for piece in [1, 5, 4_096] {
            assert_eq!(
                authorities(&bytes.concat(), piece, 4).await,
                ["-2Frun-2Fgrpc.sock"; 4],
                "pieces of {piece} bytes"
            );
        }
    }
}
