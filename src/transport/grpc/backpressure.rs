//! [`Backpressure`]: a connection that is read no faster than its calls are decided and its responses are read.
//!
//! Otherwise a caller could make the crate `h2` store memory that no budget counts:
//!
//! - responses, by never reading its socket. Flow control of HTTP/2 does not prevent this: the caller can announce
//!   windows of any size. A call whose response is not read ends after `grpc.send_timeout` (`http2.rs`).
//! - the headers of calls that are not accepted yet, which decompress to a hundred times their size.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use super::header_blocks::HeaderBlocks;

/// Number of bytes after which a connection is not read until the calls in these bytes are accepted. More than a batch
/// of usual calls.
const MAX_READ_BYTES: usize = 8 * 1024;

/// The same as [`MAX_READ_BYTES`], after headers of more than this number of bytes. A byte can stand for a header,
/// which takes a fifth of a microsecond to decode. The calls of other connections wait meanwhile.
const MAX_HEAVY_READ_BYTES: usize = 1024;

/// A stream that is read only while it can be written, and in parts.
pub(super) struct Backpressure<S> {
    stream: S,
    blocks: HeaderBlocks,
    /// Number of bytes after which the stream is not read until the calls in these bytes are accepted.
    max_read_bytes: usize,
    state: Arc<State>,
}

/// State of a stream that it shares with the connection on top of it.
#[derive(Default)]
pub(super) struct State {
    is_blocked: AtomicBool,
    read_bytes: AtomicUsize,
    /// Whether reading was refused because of `read_bytes`.
    is_refused: AtomicBool,
    unfinished_head_bytes: AtomicUsize,
}

impl State {
    /// Returns whether data waits for the caller to read.
    pub(super) fn is_blocked(&self) -> bool {
        self.is_blocked.load(Relaxed)
    }

    /// Returns the compressed size of the headers that are not complete.
    pub(super) fn unfinished_head_bytes(&self) -> usize {
        self.unfinished_head_bytes.load(Relaxed)
    }

    /// Permits to read the next part, because all calls that were read are accepted.
    pub(super) fn read_on(&self, context: &Context<'_>) {
        self.read_bytes.store(0, Relaxed);
        if self.is_refused.load(Relaxed) {
            self.is_refused.store(false, Relaxed);
            // Reading was refused without a wake-up.
            context.waker().wake_by_ref();
        }
    }
}

impl<S> Backpressure<S> {
    pub(super) fn new(stream: S) -> (Self, Arc<State>) {
        let state = Arc::new(State::default());
        let blocks = HeaderBlocks::new();
        (Self { stream, blocks, max_read_bytes: MAX_READ_BYTES, state: Arc::clone(&state) }, state)
    }

    fn record<T>(&self, written: Poll<T>, context: &Context<'_>) -> Poll<T> {
        if written.is_pending() {
            self.state.is_blocked.store(true, Relaxed);
        } else if self.state.is_blocked() {
            self.state.is_blocked.store(false, Relaxed);
            // Reading was refused without a wake-up.
            context.waker().wake_by_ref();
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Backpressure<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let read_bytes = this.state.read_bytes.load(Relaxed);
        if read_bytes >= this.max_read_bytes {
            this.state.is_refused.store(true, Relaxed);
            return Poll::Pending;
        }
        if this.state.is_blocked() {
            return Poll::Pending;
        }
        let before = buffer.filled().len();
        if this.max_read_bytes < MAX_READ_BYTES {
            let mut part = ReadBuf::new(buffer.initialize_unfilled_to(this.max_read_bytes.min(buffer.remaining())));
            ready!(Pin::new(&mut this.stream).poll_read(context, &mut part))?;
            let read = part.filled().len();
            buffer.advance(read);
        } else {
            ready!(Pin::new(&mut this.stream).poll_read(context, buffer))?;
        }
        let bytes = &buffer.filled()[before..];
        this.blocks.read(bytes);
        let is_heavy = this.blocks.take_largest() > MAX_HEAVY_READ_BYTES;
        this.max_read_bytes = if is_heavy { MAX_HEAVY_READ_BYTES } else { MAX_READ_BYTES };
        this.state.read_bytes.store(read_bytes + bytes.len(), Relaxed);
        this.state.unfinished_head_bytes.store(this.blocks.unfinished_bytes(), Relaxed);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Backpressure<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.record(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.record(written, context)
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

#[cfg(test)]
mod tests {
    use std::task::Waker;

    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn nothing_is_read_while_data_waits_for_the_caller() {
        let (stream, mut caller) = duplex(4);
        let (mut stream, state) = Backpressure::new(stream);
        caller.write_all(b"call").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'c');
        assert!(stream.write_all(b"response").now_or_never().is_none(), "the caller does not read");
        assert!(state.is_blocked());
        assert!(stream.read_u8().now_or_never().is_none(), "although there is data");
        let mut read = [0; 4];
        caller.read_exact(&mut read).await.unwrap();
        stream.write_all(b"!").await.unwrap();
        assert!(!state.is_blocked());
        assert_eq!(stream.read_u8().await.unwrap(), b'a');
    }

    #[tokio::test]
    async fn the_next_part_is_read_after_the_calls_of_the_last_one_were_accepted() {
        let (stream, mut caller) = duplex(3 * MAX_READ_BYTES);
        let (mut stream, state) = Backpressure::new(stream);
        caller.write_all(&vec![0; 2 * MAX_READ_BYTES]).await.unwrap();
        let mut part = vec![0; MAX_READ_BYTES];
        stream.read_exact(&mut part).await.unwrap();
        assert!(stream.read_u8().now_or_never().is_none(), "although there is data");
        state.read_on(&Context::from_waker(Waker::noop()));
        assert_eq!(stream.read_u8().await.unwrap(), 0);
    }

    #[tokio::test]
    async fn the_parts_are_small_after_large_headers() {
        let (stream, mut caller) = duplex(4 * MAX_READ_BYTES);
        let (mut stream, state) = Backpressure::new(stream);
        let headers = |size: u16| {
            let [a, b] = size.to_be_bytes();
            [&[0, a, b, 1, 4, 0, 0, 0, 1], &vec![b'h'; size.into()][..]].concat()
        };
        let (large, usual) = (headers(3_000), headers(100).repeat(100));
        caller.write_all(&[&[b'P'; 24][..], &large, &usual].concat()).await.unwrap();
        let mut sizes = Vec::new();
        let mut size = stream.read(&mut [0; 1_100]).await.unwrap();
        for _ in 0..4 {
            while let Some(read) = stream.read(&mut [0; MAX_READ_BYTES]).now_or_never() {
                size += read.unwrap();
            }
            sizes.push(size);
            size = 0;
            state.read_on(&Context::from_waker(Waker::noop()));
        }
        // The large headers end in the third part, and the rest of the last turn has usual ones.
        let small = MAX_HEAVY_READ_BYTES;
        assert_eq!(sizes, [1_100, small, small, small + MAX_READ_BYTES]);
    }
}
