//! Messages of gRPC: receives and splits them, and writes the status of a call.
//!
//! <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>: a message has a prefix of one byte (1 if the
//! message is compressed) and four bytes with its length. Requests may be compressed with gzip. Responses are never
//! compressed.

use std::{
    future::poll_fn,
    io::Read,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use flate2::read::GzDecoder;
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tonic::Code;

use super::{RequestError, request_body::RequestBody};

/// Size of the prefix of a message: the compressed flag, and the length.
pub(super) const PREFIX: usize = 5;
/// The first bytes of gzip data (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// ASCII characters that `grpc-message` must escape. `utf8_percent_encode` always escapes other characters.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Receives the rest of a call's message, and returns it without its prefix. `received` is the first part of it.
///
/// The call is read to its end, so that the HTTP/2 stream closes cleanly.
pub(super) async fn receive(received: Bytes, body: &mut RequestBody, max: usize) -> Result<Bytes, RequestError> {
    if body.is_complete() {
        return unframe(&received, max);
    }
    check_sizes(&received, max)?;
    // Each byte is copied once, however small the frames are.
    let mut message = BytesMut::from(received);
    while let Some(data) = poll_fn(|context| body.poll_data(context)).await {
        message.extend_from_slice(&data.map_err(|error| failed_to_read(&error))?);
        check_sizes(&message, max)?;
    }
    unframe(&message.freeze(), max)
}

/// Returns a message that is complete without its prefix.
pub(super) fn unframe(message: &Bytes, max: usize) -> Result<Bytes, RequestError> {
    check_sizes(message, max)?;
    let Some(size) = announced_size(message) else {
        return Err(RequestError::invalid("the call has no message"));
    };
    if message.len() != PREFIX + size {
        return Err(RequestError::invalid(format!(
            "the message has {} bytes, but its prefix announces {size}",
            message.len() - PREFIX
        )));
    }
    decompressed(message, max)
}

/// Writes the prefix of a message into the space that is reserved before it.
pub(super) fn with_prefix(mut message: Vec<u8>) -> Bytes {
    let size = message.len().saturating_sub(PREFIX);
    // A response has one status per descriptor or check, so it is far smaller than 4 GiB.
    message[1..PREFIX].copy_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
    message.into()
}

/// Returns the status of a call if its request cannot be read.
pub(super) fn failed_to_read(error: &h2::Error) -> RequestError {
    RequestError { code: Code::Cancelled, message: format!("reading the request failed: {error}") }
}

/// The messages of a stream of requests.
pub(super) struct Messages {
    body: RequestBody,
    /// Received bytes that do not form a complete message yet.
    received: BytesMut,
}

impl Messages {
    pub(super) fn new(body: RequestBody) -> Self {
        Self { body, received: BytesMut::new() }
    }

    /// Returns the next message of at most `max` bytes without its prefix, or `None` at the end of the stream.
    pub(super) async fn next(&mut self, max: usize) -> Result<Option<Bytes>, RequestError> {
        poll_fn(|context| self.poll_next(context, max)).await
    }

    /// See [`Self::next`].
    pub(super) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
        max: usize,
    ) -> Poll<Result<Option<Bytes>, RequestError>> {
        loop {
            if let Some(message) = split_message(&mut self.received, max)? {
                return Poll::Ready(Ok(Some(message)));
            }
            if self.received.is_empty() {
                // A stream can wait for long, so it keeps no buffer.
                self.received = BytesMut::new();
            }
            match ready!(self.body.poll_data(context)) {
                Some(data) => self.received.extend_from_slice(&data.map_err(|error| failed_to_read(&error))?),
                None if self.received.is_empty() => return Poll::Ready(Ok(None)),
                None => {
                    let incomplete = self.received.len();
                    return Poll::Ready(Err(RequestError::invalid(format!(
                        "the stream ended {incomplete} bytes into a message"
                    ))));
                }
            }
        }
    }
}

/// Removes the first message from a stream's bytes and returns it without its prefix. Returns `None` if it is
/// incomplete.
fn split_message(received: &mut BytesMut, max: usize) -> Result<Option<Bytes>, RequestError> {
    let Some(size) = announced_size(received) else {
        return Ok(None);
    };
    check_size(size, max)?;
    if received.len() < PREFIX + size {
        return Ok(None);
    }
    decompressed(&received.split_to(PREFIX + size).freeze(), max).map(Some)
}

/// Returns a message without its prefix and without compression.
///
/// The compression is detected by the first bytes of the message. The header `grpc-encoding` is not read, because that
/// would cost time in all uncompressed calls.
fn decompressed(message: &Bytes, max: usize) -> Result<Bytes, RequestError> {
    if message[0] == 0 {
        return Ok(message.slice(PREFIX..));
    }
    if message[0] > 1 || !message[PREFIX..].starts_with(&GZIP_MAGIC) {
        let message = "unsupported compressed message: only grpc-encoding gzip is supported".into();
        return Err(RequestError { code: Code::Unimplemented, message });
    }
    let mut data = Vec::new();
    // One byte above the maximum, to detect larger messages.
    let mut reader = GzDecoder::new(&message[PREFIX..]).take(max as u64 + 1);
    reader.read_to_end(&mut data).map_err(|error| RequestError::invalid(format!("invalid gzip data: {error}")))?;
    if data.len() > max {
        return Err(RequestError::exhausted(format!(
            "the decompressed message is larger than the maximum of {max} bytes"
        )));
    }
    Ok(data.into())
}

/// Rejects a message if its announced or its received size is too large.
fn check_sizes(message: &[u8], max: usize) -> Result<(), RequestError> {
    check_size(announced_size(message).unwrap_or_default().max(message.len().saturating_sub(PREFIX)), max)
}

pub(super) fn check_size(size: usize, max: usize) -> Result<(), RequestError> {
    if size > max {
        return Err(RequestError::exhausted(format!(
            "a message of {size} bytes is larger than the maximum of {max} bytes"
        )));
    }
    Ok(())
}

/// Returns the size that the prefix announces, or `None` if the prefix is incomplete.
fn announced_size(message: &[u8]) -> Option<usize> {
    let [_, a, b, c, d] = *message.first_chunk::<PREFIX>()?;
    usize::try_from(u32::from_be_bytes([a, b, c, d])).ok()
}

/// Returns the trailers of a call.
pub(super) fn trailers(end: &Result<(), RequestError>) -> HeaderMap {
    match end {
        Ok(()) => {
            let mut trailers = HeaderMap::with_capacity(1);
            trailers.insert(GRPC_STATUS, HeaderValue::from_static("0"));
            trailers
        }
        Err(error) => {
            let mut trailers = HeaderMap::with_capacity(2);
            write_status(&mut trailers, error);
            trailers
        }
    }
}

/// Writes the status of a failed call into its headers or trailers.
pub(super) fn write_status(headers: &mut HeaderMap, error: &RequestError) {
    headers.insert(GRPC_STATUS, HeaderValue::from(error.code as i32));
    let message = utf8_percent_encode(&error.message, ESCAPED).to_string();
    if let Ok(message) = HeaderValue::from_str(&message) {
        headers.insert(GRPC_MESSAGE, message);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_the_maximum_size_is_accepted() {
        assert!(check_size(5, 5).is_ok());
        assert_eq!(check_size(6, 5).unwrap_err().code, Code::ResourceExhausted);
    }
}
