//! [`Backpressure`]: a connection from which nothing is read while its caller does not read.
//!
//! Otherwise a caller that sends calls and never reads its socket would make the connection store their responses, which
//! flow control of HTTP/2 does not prevent: the caller can announce windows of any size.

use std::{
    io::{self, IoSlice},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    task::{Context, Poll},
};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream that is read only while it can be written.
pub(super) struct Backpressure<S> {
    stream: S,
    is_blocked: Arc<AtomicBool>,
}

impl<S> Backpressure<S> {
    /// Wraps a stream. The flag is true while data waits for the caller to read.
    pub(super) fn new(stream: S) -> (Self, Arc<AtomicBool>) {
        let is_blocked = Arc::new(AtomicBool::new(false));
        (Self { stream, is_blocked: Arc::clone(&is_blocked) }, is_blocked)
    }

    fn record<T>(&self, written: Poll<T>, context: &Context<'_>) -> Poll<T> {
        if written.is_pending() {
            self.is_blocked.store(true, Relaxed);
        } else if self.is_blocked.load(Relaxed) {
            self.is_blocked.store(false, Relaxed);
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
        if self.is_blocked.load(Relaxed) {
            return Poll::Pending;
        }
        Pin::new(&mut self.stream).poll_read(context, buffer)
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
    use futures_util::FutureExt;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    #[tokio::test]
    async fn nothing_is_read_while_data_waits_for_the_caller() {
        let (stream, mut caller) = duplex(4);
        let (mut stream, is_blocked) = Backpressure::new(stream);
        caller.write_all(b"call").await.unwrap();
        assert_eq!(stream.read_u8().await.unwrap(), b'c');
        assert!(stream.write_all(b"response").now_or_never().is_none(), "the caller does not read");
        assert!(is_blocked.load(Relaxed));
        assert!(stream.read_u8().now_or_never().is_none(), "although there is data");
        let mut read = [0; 4];
        caller.read_exact(&mut read).await.unwrap();
        stream.write_all(b"!").await.unwrap();
        assert!(!is_blocked.load(Relaxed));
        assert_eq!(stream.read_u8().await.unwrap(), b'a');
    }
}
