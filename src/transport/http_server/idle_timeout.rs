//! [`IdleTimeout`]: a stream that fails when no bytes were received or sent for a while.
//!
//! `tokio-io-timeout` has separate timeouts for reading and writing. It would end a stream of events to a caller that
//! sends nothing.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

/// A stream with a timeout for the time since the last byte in either direction.
pub(super) struct IdleTimeout<S> {
    stream: Pin<Box<S>>,
    timeout: Duration,
    timer: Pin<Box<Sleep>>,
}

impl<S> IdleTimeout<S> {
    pub(super) fn new(stream: S, timeout: Duration) -> Self {
        Self { stream: Box::pin(stream), timeout, timer: Box::pin(sleep(timeout)) }
    }

    /// Restarts the timer after progress, and fails if there was none for too long.
    fn check<T>(&mut self, poll: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.timer.as_mut().reset(Instant::now() + self.timeout);
            return poll;
        }
        match self.timer.as_mut().poll(context) {
            Poll::Ready(()) => Poll::Ready(Err(io::ErrorKind::TimedOut.into())),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl<S: AsyncRead> AsyncRead for IdleTimeout<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let poll = self.stream.as_mut().poll_read(context, buffer);
        self.check(poll, context)
    }
}

impl<S: AsyncWrite> AsyncWrite for IdleTimeout<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let poll = self.stream.as_mut().poll_write(context, bytes);
        self.check(poll, context)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        // A flush with nothing to send is no progress, so it does not restart the timer.
        self.stream.as_mut().poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream.as_mut().poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = self.stream.as_mut().poll_write_vectored(context, buffers);
        self.check(poll, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, BufWriter, duplex},
        time::timeout,
    };

    use super::*;

    const TIMEOUT: Duration = Duration::from_secs(90);

    #[tokio::test(start_paused = true)]
    async fn a_stream_without_bytes_fails() {
        let (stream, _peer) = duplex(64);
        let started = Instant::now();
        let error = IdleTimeout::new(stream, TIMEOUT).read_u8().await.unwrap_err();
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 90));
    }

    #[tokio::test(start_paused = true)]
    async fn sent_bytes_keep_a_stream_open_that_receives_nothing() {
        let (stream, mut peer) = duplex(64);
        let (mut reader, mut writer) = tokio::io::split(IdleTimeout::new(stream, TIMEOUT));
        let started = Instant::now();
        let reading = tokio::spawn(async move { reader.read_u8().await.map_err(|error| error.kind()) });
        for _ in 0..5 {
            sleep(Duration::from_secs(60)).await;
            writer.write_u8(1).await.unwrap();
            peer.read_u8().await.unwrap();
        }
        assert_eq!(reading.await.unwrap(), Err(io::ErrorKind::TimedOut));
        assert_eq!(started.elapsed().as_secs(), 5 * 60 + 90);
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_reads_nothing_fails_the_stream() {
        let (stream, _peer) = duplex(4);
        let error = IdleTimeout::new(stream, TIMEOUT).write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn buffered_bytes_are_flushed_and_the_end_is_sent() {
        let (stream, mut peer) = duplex(64);
        let mut stream = IdleTimeout::new(BufWriter::new(stream), TIMEOUT);
        stream.write_u8(7).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(timeout(TIMEOUT, peer.read_u8()).await.unwrap().unwrap(), 7);
        stream.shutdown().await.unwrap();
        assert_eq!(timeout(TIMEOUT, peer.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
    }
}
