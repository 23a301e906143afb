//! [`Frames`]: a connection that sends and reads single HTTP/2 frames (RFC 9113), for what no client library would send.

use std::net::SocketAddr;

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{
        TcpStream,
        tcp::{OwnedReadHalf, OwnedWriteHalf},
    },
    time::timeout,
};

use super::{DEADLINE, Server};

pub(crate) const DATA: u8 = 0;
pub(crate) const HEADERS: u8 = 1;
pub(crate) const RST_STREAM: u8 = 3;
pub(crate) const SETTINGS: u8 = 4;
pub(crate) const PING: u8 = 6;
pub(crate) const GOAWAY: u8 = 7;
pub(crate) const CONTINUATION: u8 = 9;

/// The flag of a reply to `SETTINGS` or `PING`.
pub(crate) const ACK: u8 = 1;
/// The flag of the last frame of a direction of a stream.
pub(crate) const END_STREAM: u8 = 1;
/// The flag of the last frame with headers.
pub(crate) const END_HEADERS: u8 = 4;

/// The preface and empty settings.
pub(crate) const GREETING: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// The preface and settings without a window for responses.
pub(crate) const GREETING_WITHOUT_WINDOW: &[u8] =
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\x06\x04\0\0\0\0\0\0\x04\0\0\0\0";

/// A received frame.
#[derive(Debug)]
pub(crate) struct Frame {
    pub(crate) kind: u8,
    pub(crate) flags: u8,
    pub(crate) stream: u32,
    pub(crate) payload: Vec<u8>,
}

impl Frame {
    /// Returns the error code of a `RST_STREAM` or `GOAWAY` frame.
    pub(crate) fn error_code(&self) -> u32 {
        let start = if self.kind == GOAWAY { 4 } else { 0 };
        u32::from_be_bytes(self.payload[start..start + 4].try_into().unwrap())
    }
}

/// Encodes a frame.
pub(crate) fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Encodes the headers of a gRPC call with HPACK (RFC 7541), without its dynamic table.
pub(crate) fn call_headers(path: &str) -> Vec<u8> {
    // The indices of the static table: POST, http, `:path`, `content-type`.
    let (method, scheme, path_name, content_type) = (0x83, 0x86, 0x04, [0x0f, 0x10]);
    let literal = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    [&[method, scheme, path_name], &literal(path)[..], &content_type, &literal("application/grpc")].concat()
}

/// Encodes the headers of a request for a page with HPACK, without its dynamic table.
pub(crate) fn get_headers(path: &str) -> Vec<u8> {
    // The indices of the static table: GET, http, `:path`.
    [&[0x82, 0x86, 0x04, u8::try_from(path.len()).unwrap()], path.as_bytes()].concat()
}

/// A connection after its preface.
pub(crate) struct Frames {
    reader: OwnedReadHalf,
    writer: OwnedWriteHalf,
}

impl Frames {
    /// Connects to the gRPC listener.
    pub(crate) async fn connect(server: &Server) -> Self {
        Self::connect_to(server.grpc).await
    }

    /// Connects to any listener.
    pub(crate) async fn connect_to(addr: SocketAddr) -> Self {
        let (reader, mut writer) = TcpStream::connect(addr).await.unwrap().into_split();
        writer.write_all(GREETING).await.unwrap();
        Self { reader, writer }
    }

    /// Sends bytes. Returns whether the service still accepts them.
    pub(crate) async fn send(&mut self, bytes: &[u8]) -> bool {
        timeout(DEADLINE, self.writer.write_all(bytes)).await.expect("the service to read").is_ok()
    }

    /// Sends a call with a complete message.
    pub(crate) async fn send_call(&mut self, stream: u32, path: &str, message: &[u8]) {
        let headers = frame(HEADERS, END_HEADERS, stream, &call_headers(path));
        assert!(self.send(&[headers, frame(DATA, END_STREAM, stream, message)].concat()).await);
    }

    /// Returns the next frame, or `None` if the connection is closed.
    pub(crate) async fn next(&mut self) -> Option<Frame> {
        let read = async {
            let mut head = [0; 9];
            self.reader.read_exact(&mut head).await.ok()?;
            let [a, b, c, kind, flags, stream @ ..] = head;
            let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
            self.reader.read_exact(&mut payload).await.ok()?;
            Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
        };
        timeout(DEADLINE, read).await.expect("a frame, or the end of the connection")
    }

    /// Returns the next frame that meets a condition.
    pub(crate) async fn next_with(&mut self, condition: impl Fn(&Frame) -> bool) -> Frame {
        loop {
            let frame = self.next().await.expect("the connection was closed");
            if condition(&frame) {
                return frame;
            }
        }
    }

    /// Returns all frames until the connection is closed.
    pub(crate) async fn rest(&mut self) -> Vec<Frame> {
        let mut frames = Vec::new();
        while let Some(frame) = self.next().await {
            frames.push(frame);
        }
        frames
    }

    pub(crate) fn split(self) -> (OwnedReadHalf, OwnedWriteHalf) {
        (self.reader, self.writer)
    }
}
