//! [`Frames`]: the HTTP/2 frames of a client that makes unary gRPC calls.

use prost::Message;
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::RateLimitRequest,
};

use crate::h2load;

/// Types of HTTP/2 frames, and flags (RFC 9113, section 6).
const DATA: u8 = 0;
const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;
const END_STREAM: u8 = 1;
const END_HEADERS: u8 = 4;
const FRAME_HEADER_LEN: usize = 9;

/// Part of a response.
pub(crate) enum Response {
    /// A message has arrived.
    Message,
    /// The stream with this number has ended.
    End(u32),
}

/// Writes the frames of one connection, and reads those of the server.
pub(crate) struct Frames {
    /// Frames to send.
    pub(crate) output: Vec<u8>,
    next_stream: u32,
}

impl Frames {
    /// Creates the first frames of a connection.
    pub(crate) fn new() -> Self {
        let output = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_vec();
        let mut frames = Self { output, next_stream: 1 };
        frames.write(SETTINGS, 0, 0, &[]);
        // The window is large enough for all responses of a round.
        frames.write(WINDOW_UPDATE, 0, 0, &0x7000_0000_u32.to_be_bytes());
        frames
    }

    /// Writes a check of this user. Returns the number of its stream.
    pub(crate) fn request(&mut self, user: u32) -> u32 {
        let stream = self.next_stream;
        self.next_stream += 2;
        self.write(HEADERS, END_HEADERS, stream, &headers(stream == 1));
        let entry = Entry { key: "user".into(), value: format!("user{user}") };
        let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
        let message = RateLimitRequest { domain: "bench".into(), descriptors: vec![descriptor], hits_addend: 0 };
        self.write(DATA, END_STREAM, stream, &h2load::framed(&message.encode_to_vec()));
        stream
    }

    /// Removes the complete frames from `input` and appends the parts of responses. Writes the acknowledgements that
    /// the server expects.
    pub(crate) fn read(&mut self, input: &mut Vec<u8>, responses: &mut Vec<Response>) {
        let mut start = 0;
        while let Some(head) = input.get(start..start + FRAME_HEADER_LEN) {
            let [high, middle, low, kind, flags, stream @ ..] = *head.first_chunk::<FRAME_HEADER_LEN>().unwrap();
            let (length, stream) = (u32::from_be_bytes([0, high, middle, low]), u32::from_be_bytes(stream));
            let end = start + FRAME_HEADER_LEN + length as usize;
            if input.len() < end {
                break;
            }
            match kind {
                DATA => responses.push(Response::Message),
                HEADERS if flags & END_STREAM != 0 => responses.push(Response::End(stream)),
                SETTINGS | PING if flags & ACK == 0 => {
                    let payload = if kind == PING { &input[start + FRAME_HEADER_LEN..end] } else { &[] };
                    self.write(kind, ACK, 0, payload);
                }
                HEADERS | SETTINGS | PING | WINDOW_UPDATE => {}
                kind => panic!("unexpected frame of type {kind}"),
            }
            start = end;
        }
        input.drain(..start);
    }

    fn write(&mut self, kind: u8, flags: u8, stream: u32, payload: &[u8]) {
        self.output.extend_from_slice(&u32::try_from(payload.len()).unwrap().to_be_bytes()[1..]);
        self.output.extend_from_slice(&[kind, flags]);
        self.output.extend_from_slice(&stream.to_be_bytes());
        self.output.extend_from_slice(payload);
    }
}

/// Returns the header block of a request (RFC 7541). The first request of a connection adds its headers to the dynamic
/// table, and later requests refer to them by index.
fn headers(first: bool) -> Vec<u8> {
    const POST: u8 = 0x83;
    const HTTP: u8 = 0x86;
    let mut block = vec![POST, HTTP];
    if !first {
        // The header that was added first has the highest index.
        block.extend((62..66).rev().map(|index| 0x80 | index));
        return block;
    }
    let path = format!("/{}", h2load::METHOD);
    // Each name is an index in the static table or a string.
    let literals: [(Result<u8, &str>, &str); 4] =
        [(Ok(4), &path), (Ok(1), "bench"), (Ok(31), "application/grpc"), (Err("te"), "trailers")];
    for (name, value) in literals {
        block.push(0x40 | name.unwrap_or(0));
        for text in name.err().into_iter().chain([value]) {
            block.push(u8::try_from(text.len()).unwrap());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}
