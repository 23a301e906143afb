//! [`IdleTimeout`]: a stream that fails when no bytes were received or sent for a while, or when the head of a request
//! is not complete in time.
//!
//! The timeout of hyper for heads also ends connections that wait for their next request, and it does not end those
//! that have sent nothing yet.
//!
//! `tokio-io-timeout` has separate timeouts for reading and writing. It would end a stream of events to a caller that
//! sends nothing.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, AtomicU64, Ordering::Relaxed},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};

/// First bytes of an HTTP/2 connection. No method of HTTP/1 begins with them.
const HTTP2_PREFACE: &[u8] = b"PRI";

/// The requests of a connection. The head of each ends a wait.
#[derive(Default)]
pub(super) struct Requests {
    begun: AtomicU64,
    in_progress: AtomicU32,
}

/// A request in progress.
pub(super) struct RequestGuard(Arc<Requests>);

impl Requests {
    /// Records a request with a complete head.
    pub(super) fn begin(self: &Arc<Self>) -> RequestGuard {
        self.begun.fetch_add(1, Relaxed);
        self.in_progress.fetch_add(1, Relaxed);
        RequestGuard(Arc::clone(self))
    }
}

impl Drop for RequestGuard {
    fn drop(&mut self) {
        self.0.in_progress.fetch_sub(1, Relaxed);
    }
}

/// A stream with a timeout for the time since the last byte in either direction, and one for the heads of requests.
pub(super) struct IdleTimeout<S> {
    stream: Pin<Box<S>>,
    timeout: Duration,
    head_timeout: Duration,
    requests: Arc<Requests>,
    /// `None` while no head is expected.
    head: Option<ExpectedHead>,
    protocol: Protocol,
    last_byte: Instant,
    timer: Pin<Box<Sleep>>,
}

/// A wait for the head of a request.
#[derive(Clone, Copy)]
struct ExpectedHead {
    end: Instant,
    /// Number of requests that had begun when the wait began.
    requests_before: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Protocol {
    Unknown,
    Http1,
    /// Frames that belong to no head can arrive at any time.
    Http2,
}

impl<S> IdleTimeout<S> {
    pub(super) fn new(stream: S, timeout: Duration, head_timeout: Duration, requests: Arc<Requests>) -> Self {
        let now = Instant::now();
        Self {
            stream: Box::pin(stream),
            timeout,
            head_timeout,
            requests,
            // The first head is expected immediately.
            head: Some(ExpectedHead { end: now + head_timeout, requests_before: 0 }),
            protocol: Protocol::Unknown,
            last_byte: now,
            timer: Box::pin(sleep(head_timeout)),
        }
    }

    /// Records received bytes.
    fn receive(&mut self, bytes: &[u8]) {
        if self.protocol == Protocol::Unknown && !bytes.is_empty() {
            let is_http2 = bytes.starts_with(HTTP2_PREFACE);
            self.protocol = if is_http2 { Protocol::Http2 } else { Protocol::Http1 };
        }
        if self.protocol == Protocol::Http2 {
            self.head = None;
            return;
        }
        let begun = self.requests.begun.load(Relaxed);
        let is_expected = self.head.is_some_and(|head| head.requests_before == begun);
        if !is_expected && self.requests.in_progress.load(Relaxed) == 0 && !bytes.is_empty() {
            self.head = Some(ExpectedHead { end: Instant::now() + self.head_timeout, requests_before: begun });
        }
    }

    /// Records progress, and fails if there was none for too long.
    fn check<T>(&mut self, poll: Poll<io::Result<T>>, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.last_byte = Instant::now();
            return poll;
        }
        let begun = self.requests.begun.load(Relaxed);
        self.head = self.head.filter(|head| head.requests_before == begun);
        let mut end = self.last_byte + self.timeout;
        if let Some(head) = self.head {
            end = end.min(head.end);
        }
        if self.timer.deadline() != end {
            self.timer.as_mut().reset(end);
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
        let filled = buffer.filled().len();
        let poll = self.stream.as_mut().poll_read(context, buffer);
        if matches!(poll, Poll::Ready(Ok(()))) {
            self.receive(&buffer.filled()[filled..]);
        }
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
    const HEAD_TIMEOUT: Duration = Duration::from_secs(10);

    /// A stream of HTTP/1 after the response to the first request.
    fn idle<S>(stream: S) -> IdleTimeout<S> {
        let requests = Arc::new(Requests::default());
        drop(requests.begin());
        IdleTimeout::new(stream, TIMEOUT, HEAD_TIMEOUT, requests)
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_without_bytes_fails() {
        let (stream, _peer) = duplex(64);
        let started = Instant::now();
        let error = idle(stream).read_u8().await.unwrap_err();
        assert_eq!((error.kind(), started.elapsed().as_secs()), (io::ErrorKind::TimedOut, 90));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_request_is_expected_soon() {
        let (stream, _peer) = duplex(64);
        let started = Instant::now();
        let mut stream = IdleTimeout::new(stream, TIMEOUT, HEAD_TIMEOUT, Arc::default());
        assert_eq!(stream.read_u8().await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        assert_eq!(started.elapsed().as_secs(), 10);
    }

    #[tokio::test(start_paused = true)]
    async fn the_bytes_of_a_head_do_not_extend_its_time() {
        let (stream, mut peer) = duplex(64);
        let requests = Arc::new(Requests::default());
        let mut stream = IdleTimeout::new(stream, TIMEOUT, HEAD_TIMEOUT, Arc::clone(&requests));
        let reading = tokio::spawn(async move {
            loop {
                if let Err(error) = stream.read_u8().await {
                    return (error.kind(), Instant::now());
                }
            }
        });
        sleep(Duration::from_secs(5)).await;
        peer.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
        // The head is read before its request begins.
        tokio::task::yield_now().await;
        drop(requests.begin());
        // The next request begins after a while, and its head is not completed.
        sleep(Duration::from_secs(60)).await;
        let started = Instant::now();
        for _ in 0..4 {
            peer.write_u8(b'G').await.unwrap();
            sleep(Duration::from_secs(3)).await;
        }
        let (error, ended) = reading.await.unwrap();
        assert_eq!((error, (ended - started).as_secs()), (io::ErrorKind::TimedOut, 10));
    }

    #[tokio::test(start_paused = true)]
    async fn the_body_of_a_request_is_no_head() {
        let (stream, mut peer) = duplex(64);
        let requests = Arc::new(Requests::default());
        let mut stream = IdleTimeout::new(stream, TIMEOUT, HEAD_TIMEOUT, Arc::clone(&requests));
        peer.write_u8(b'P').await.unwrap();
        stream.read_u8().await.unwrap();
        let _request = requests.begin();
        peer.write_u8(b'x').await.unwrap();
        stream.read_u8().await.unwrap();
        let started = Instant::now();
        assert!(stream.read_u8().await.is_err());
        assert_eq!(started.elapsed().as_secs(), 90);
    }

    #[tokio::test(start_paused = true)]
    async fn frames_of_http2_are_no_heads() {
        let (stream, mut peer) = duplex(64);
        let mut stream = IdleTimeout::new(stream, TIMEOUT, HEAD_TIMEOUT, Arc::default());
        peer.write_all(b"PRI * HTTP/2.0").await.unwrap();
        stream.read_exact(&mut [0; 14]).await.unwrap();
        sleep(Duration::from_secs(60)).await;
        peer.write_u8(0).await.unwrap();
        stream.read_u8().await.unwrap();
        let started = Instant::now();
        assert!(stream.read_u8().await.is_err());
        assert_eq!(started.elapsed().as_secs(), 90);
    }

    #[tokio::test(start_paused = true)]
    async fn sent_bytes_keep_a_stream_open_that_receives_nothing() {
        let (stream, mut peer) = duplex(64);
        let (mut reader, mut writer) = tokio::io::split(idle(stream));
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
        let error = idle(stream).write_all(&[0; 64]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test(start_paused = true)]
    async fn buffered_bytes_are_flushed_and_the_end_is_sent() {
        let (stream, mut peer) = duplex(64);
        let mut stream = idle(BufWriter::new(stream));
        stream.write_u8(7).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(timeout(TIMEOUT, peer.read_u8()).await.unwrap().unwrap(), 7);
        stream.shutdown().await.unwrap();
        assert_eq!(timeout(TIMEOUT, peer.read(&mut [0; 1])).await.unwrap().unwrap(), 0);
    }
}
