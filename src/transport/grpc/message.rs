//! Messages of gRPC: receives and splits them, and writes the status of a call.
//!
//! <https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md>: a message has a prefix of one byte (1 if the
//! message is compressed) and four bytes with its length. Requests may be compressed with gzip. Responses are never
//! compressed.

use std::{
    future::poll_fn,
    io::Read,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Bytes, BytesMut};
use flate2::read::GzDecoder;
use http::{HeaderMap, HeaderName, HeaderValue};
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use tokio::time::{Instant, Sleep, sleep};

use super::{
    input::{CALL_BYTES, Input, STALL_TIMEOUT},
    request_body::RequestBody,
};
use crate::{
    budget::{Exhausted, Reservation},
    transport::errors::RequestError,
};

/// Size in bytes of the prefix of a message: the compressed flag, and the length.
pub(in crate::transport) const PREFIX: usize = 5;
/// The first bytes of gzip data (RFC 1952).
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];
/// Size of the head and the tail of gzip data.
const MIN_GZIP_BYTES: usize = 18;
const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
/// ASCII characters that `grpc-message` must escape. `utf8_percent_encode` always escapes other characters.
const ESCAPED: &AsciiSet = &CONTROLS.add(b'%');

/// Size in bytes up to which a complete message is decided independently of the budget.
const SMALL_BYTES: usize = 64 * 1024;

/// A message without its prefix, with the memory that it occupies while its call waits.
pub(in crate::transport) struct Received {
    pub(in crate::transport) message: Bytes,
    /// Nothing for small messages.
    _memory: Option<Reservation>,
}

/// Receives the rest of a call's message. `received` is its first part.
///
/// The call is read to its end, so that the HTTP/2 stream closes cleanly.
pub(in crate::transport) async fn receive(
    received: Bytes,
    body: &mut RequestBody,
    max: usize,
    input: &Input,
) -> Result<Received, RequestError> {
    let mut message = received;
    let mut unfinished = None;
    if !body.is_complete() {
        let memory = unfinished.insert(Unfinished::new(input));
        message = memory.receive(message, body, max).await?;
    }
    let size = decompressed_size(&message, max)?;
    if size > SMALL_BYTES {
        let memory = unfinished.get_or_insert_with(|| Unfinished::new(input));
        poll_fn(|context| memory.poll_reserve(message.len() + size, context)).await?;
    }
    let message = unframe(&message, max)?;
    let memory = match unfinished {
        Some(Unfinished { mut memory, .. }) if message.len() > SMALL_BYTES => {
            memory.keep();
            Some(memory)
        }
        _ => None,
    };
    Ok(Received { message, _memory: memory })
}

/// The memory of a message that is not complete, and the time since its last bytes.
struct Unfinished {
    memory: Reservation,
    stall: Pin<Box<Sleep>>,
}

impl Unfinished {
    fn new(input: &Input) -> Self {
        Self { memory: input.message(), stall: Box::pin(sleep(STALL_TIMEOUT)) }
    }

    /// Receives a message to the end of its call.
    async fn receive(&mut self, received: Bytes, body: &mut RequestBody, max: usize) -> Result<Bytes, RequestError> {
        // Each byte is copied once, however small the frames are.
        let mut message = BytesMut::from(received);
        let mut unreleased = message.len();
        loop {
            check_sizes(&message, max)?;
            let stored = message.capacity();
            let next = poll_fn(|context| self.poll_data(stored, &mut unreleased, body, context)).await?;
            let Some(data) = next else {
                return Ok(message.freeze());
            };
            unreleased += data.len();
            message.extend_from_slice(&data);
        }
    }

    /// Reserves the memory of a message with `bytes` stored bytes.
    fn poll_reserve(&mut self, bytes: usize, context: &Context<'_>) -> Poll<Result<(), RequestError>> {
        let more = (CALL_BYTES + bytes).saturating_sub(self.memory.bytes());
        if more > 0 {
            return self.memory.poll_grow(more, context).map_err(RequestError::from);
        }
        match self.memory.poll_evicted(context) {
            Poll::Ready(error) => Poll::Ready(Err(RequestError::from(error))),
            Poll::Pending => Poll::Ready(Ok(())),
        }
    }

    /// Returns the next data of a body. Fails if the memory is needed for others, or if no data arrives for too long.
    ///
    /// The caller may send more than has arrived only when the memory of the message, with `stored` bytes, is reserved.
    fn poll_data(
        &mut self,
        stored: usize,
        unreleased: &mut usize,
        body: &mut RequestBody,
        context: &mut Context<'_>,
    ) -> Poll<Result<Option<Bytes>, RequestError>> {
        let reserved = self.poll_reserve(stored, context)?;
        if reserved.is_ready() {
            body.release(mem::take(unreleased));
        }
        if let Poll::Ready(data) = body.poll_data(context) {
            self.stall.as_mut().reset(Instant::now() + STALL_TIMEOUT);
            return Poll::Ready(data.transpose().map_err(|error| failed_to_read(&error)));
        }
        ready!(reserved);
        if let Poll::Ready(error) = self.memory.poll_evicted(context) {
            return Poll::Ready(Err(RequestError::from(error)));
        }
        ready!(self.stall.as_mut().poll(context));
        let seconds = STALL_TIMEOUT.as_secs();
        let message = format!("the message is not complete, and no further bytes arrived for {seconds} s");
        Poll::Ready(Err(RequestError::stalled(message)))
    }
}

/// Returns a complete message without its prefix and without compression.
pub(in crate::transport) fn unframe(message: &Bytes, max: usize) -> Result<Bytes, RequestError> {
    check_sizes(message, max)?;
    let Some(size) = announced_size(message) else {
        return Err(RequestError::malformed("the call has no message"));
    };
    if message.len() != PREFIX + size {
        return Err(RequestError::malformed(format!(
            "the message has {} bytes, but its prefix announces {size}",
            message.len() - PREFIX
        )));
    }
    decompressed(message, max)
}

/// Writes the prefix of a message into the space that is reserved before it.
pub(in crate::transport) fn with_prefix(mut message: Vec<u8>) -> Bytes {
    let size = message.len().saturating_sub(PREFIX);
    // A response has one status per descriptor or check, so it is far smaller than 4 GiB.
    message[1..PREFIX].copy_from_slice(&u32::try_from(size).unwrap_or(u32::MAX).to_be_bytes());
    message.into()
}

/// Returns the status of a call if its request cannot be read.
pub(in crate::transport) fn failed_to_read(error: &h2::Error) -> RequestError {
    RequestError::cancelled(format!("reading the request failed: {error}"))
}

/// The messages of a stream of requests.
pub(in crate::transport) struct Messages {
    body: RequestBody,
    input: Arc<Input>,
    /// Received bytes that do not form a complete message yet.
    received: BytesMut,
    /// Number of received bytes that are not returned to the flow-control windows yet.
    unreleased: usize,
    /// The memory of the message that is not complete, or of the last one if it is large.
    unfinished: Option<Unfinished>,
}

impl Messages {
    pub(in crate::transport) fn new(body: RequestBody, input: Arc<Input>) -> Self {
        Self { body, input, received: BytesMut::new(), unreleased: 0, unfinished: None }
    }

    /// Completes if the memory of the unfinished message is needed for others. To be polled while messages are not.
    pub(in crate::transport) fn poll_evicted(&self, context: &Context<'_>) -> Poll<Exhausted> {
        match &self.unfinished {
            Some(unfinished) => unfinished.memory.poll_evicted(context),
            None => Poll::Pending,
        }
    }

    /// Returns the next message of at most `max` bytes without its prefix, or `None` at the end of the stream.
    pub(in crate::transport) async fn next(&mut self, max: usize) -> Result<Option<Bytes>, RequestError> {
        poll_fn(|context| self.poll_next(context, max)).await
    }

    /// Polls for the next message: [`Self::next`] without waiting.
    pub(in crate::transport) fn poll_next(
        &mut self,
        context: &mut Context<'_>,
        max: usize,
    ) -> Poll<Result<Option<Bytes>, RequestError>> {
        loop {
            if let Some(size) = complete_size(&self.received, max)? {
                return self.poll_take(size, context, max);
            }
            if self.received.is_empty() {
                // A stream can wait for long, so it keeps no buffer.
                self.received = BytesMut::new();
                self.unfinished = None;
                self.body.release(mem::take(&mut self.unreleased));
            } else {
                self.unfinished.get_or_insert_with(|| Unfinished::new(&self.input));
            }
            let stored = self.received.capacity();
            let data = match &mut self.unfinished {
                Some(unfinished) => {
                    ready!(unfinished.poll_data(stored, &mut self.unreleased, &mut self.body, context))?
                }
                None => ready!(self.body.poll_data(context)).transpose().map_err(|error| failed_to_read(&error))?,
            };
            match data {
                Some(data) => {
                    self.unreleased += data.len();
                    self.received.extend_from_slice(&data);
                }
                None if self.received.is_empty() => return Poll::Ready(Ok(None)),
                None => {
                    let incomplete = self.received.len();
                    return Poll::Ready(Err(RequestError::malformed(format!(
                        "the stream ended {incomplete} bytes into a message"
                    ))));
                }
            }
        }
    }

    /// Removes the first message, of this size with its prefix, and returns it. The memory of a large one stays reserved
    /// until the next message is asked for.
    fn poll_take(
        &mut self,
        size: usize,
        context: &Context<'_>,
        max: usize,
    ) -> Poll<Result<Option<Bytes>, RequestError>> {
        let decompressed_bytes = decompressed_size(&self.received[..size], max)?;
        if decompressed_bytes > SMALL_BYTES {
            let unfinished = self.unfinished.get_or_insert_with(|| Unfinished::new(&self.input));
            ready!(unfinished.poll_reserve(self.received.capacity() + decompressed_bytes, context))?;
            unfinished.memory.keep();
        } else {
            self.unfinished = None;
        }
        let message = decompressed(&self.received.split_to(size).freeze(), max)?;
        Poll::Ready(Ok(Some(message)))
    }
}

/// Returns the size of the first message of a stream's bytes with its prefix, or `None` if it is incomplete.
fn complete_size(received: &[u8], max: usize) -> Result<Option<usize>, RequestError> {
    let Some(size) = announced_size(received) else {
        return Ok(None);
    };
    check_size(size, max)?;
    Ok((received.len() >= PREFIX + size).then_some(PREFIX + size))
}

/// Returns a message without its prefix and without compression.
///
/// The compression is detected by the first bytes of the message. The header `grpc-encoding` is not read, because that
/// would cost time in all uncompressed calls.
fn decompressed(message: &Bytes, max: usize) -> Result<Bytes, RequestError> {
    if message[0] == 0 {
        return Ok(message.slice(PREFIX..));
    }
    let size = decompressed_size(message, max)?;
    let mut data = Vec::with_capacity(size);
    // One byte more, to detect larger messages.
    let mut reader = GzDecoder::new(&message[PREFIX..]).take(size as u64 + 1);
    reader.read_to_end(&mut data).map_err(|error| RequestError::malformed(format!("invalid gzip data: {error}")))?;
    if data.len() != size {
        return Err(RequestError::malformed("invalid gzip data: its size is not the announced one"));
    }
    Ok(data.into())
}

/// Returns the size of a message after decompression, which gzip writes at its end (RFC 1952: `ISIZE`).
fn decompressed_size(message: &[u8], max: usize) -> Result<usize, RequestError> {
    let size = message.len().saturating_sub(PREFIX);
    if message.first().is_none_or(|compressed| *compressed == 0) {
        return Ok(size);
    }
    if message[0] > 1 || !message.get(PREFIX..).is_some_and(|data| data.starts_with(&GZIP_MAGIC)) {
        let message = "unsupported compressed message: only grpc-encoding gzip is supported";
        return Err(RequestError::unsupported(message));
    }
    let size = match message.last_chunk() {
        Some(size) if message.len() >= PREFIX + MIN_GZIP_BYTES => u32::from_le_bytes(*size) as usize,
        _ => return Err(RequestError::malformed("invalid gzip data: it is truncated")),
    };
    if size > max {
        return Err(RequestError::too_large(format!(
            "the decompressed message of {size} bytes is larger than the maximum of {max} bytes"
        )));
    }
    Ok(size)
}

/// Rejects a message if its announced or its received size is too large.
fn check_sizes(message: &[u8], max: usize) -> Result<(), RequestError> {
    check_size(announced_size(message).unwrap_or_default().max(message.len().saturating_sub(PREFIX)), max)
}

pub(in crate::transport) fn check_size(size: usize, max: usize) -> Result<(), RequestError> {
    if size > max {
        return Err(RequestError::too_large(format!(
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
pub(in crate::transport) fn trailers(end: &Result<(), RequestError>) -> HeaderMap {
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
pub(in crate::transport) fn write_status(headers: &mut HeaderMap, error: &RequestError) {
    headers.insert(GRPC_STATUS, HeaderValue::from(error.code as i32));
    let message = utf8_percent_encode(&error.message, ESCAPED).to_string();
    if let Ok(message) = HeaderValue::from_str(&message) {
        headers.insert(GRPC_MESSAGE, message);
    }
}

#[cfg(test)]
mod tests {
    use tonic::Code;

    use super::*;

    #[test]
    fn a_message_of_the_maximum_size_is_accepted() {
        assert!(check_size(5, 5).is_ok());
        assert_eq!(check_size(6, 5).unwrap_err().code, Code::ResourceExhausted);
    }
}
