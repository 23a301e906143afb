//! [`ReadBudget`]: the total bytes of unfinished responses of members that this instance holds.
//!
//! A member can begin a message of [`MAX_MESSAGE_BYTES`](super::MAX_MESSAGE_BYTES) and never end it. Each follower
//! therefore adds the bytes that it receives to a common budget, and subtracts them when a message is handled.

use std::{
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    task::{Context, Poll, ready},
};

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tonic::{Status, body::Body, transport::Channel};
use tower_service::Service;

/// Maximum total number of bytes of unfinished responses of members.
const MAX_BYTES: usize = 64 << 20;
/// Number of bytes that a response may have although the budget is exhausted. Almost all responses are shorter.
const ALWAYS_ALLOWED_BYTES: usize = 4 << 20;

/// The total bytes of unfinished responses of members.
#[derive(Default)]
pub(super) struct ReadBudget {
    used: AtomicUsize,
}

/// The bytes that one sequence of calls has received and not handled yet.
pub(super) struct Received {
    budget: Arc<ReadBudget>,
    bytes: AtomicUsize,
}

impl Received {
    pub(super) fn new(budget: &Arc<ReadBudget>) -> Arc<Self> {
        Arc::new(Self { budget: Arc::clone(budget), bytes: AtomicUsize::new(0) })
    }

    /// Adds received bytes. Returns whether the budget suffices.
    fn add(&self, bytes: usize) -> bool {
        let own = self.bytes.fetch_add(bytes, Relaxed) + bytes;
        let all = self.budget.used.fetch_add(bytes, Relaxed) + bytes;
        own <= ALWAYS_ALLOWED_BYTES || all <= MAX_BYTES
    }

    /// Returns the bytes to the budget, because a message has been handled.
    pub(super) fn clear(&self) {
        self.budget.used.fetch_sub(self.bytes.swap(0, Relaxed), Relaxed);
    }
}

impl Drop for Received {
    fn drop(&mut self) {
        self.clear();
    }
}

/// A connection with responses that count against the budget.
#[derive(Clone)]
pub(super) struct MeteredChannel {
    channel: Channel,
    received: Arc<Received>,
}

impl MeteredChannel {
    pub(super) const fn new(channel: Channel, received: Arc<Received>) -> Self {
        Self { channel, received }
    }
}

impl Service<http::Request<Body>> for MeteredChannel {
    type Response = http::Response<MeteredBody>;
    type Error = tonic::transport::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.channel.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let received = Arc::clone(&self.received);
        let response = self.channel.call(request);
        Box::pin(async move { Ok(response.await?.map(|body| MeteredBody { body, received })) })
    }
}

/// The body of a response.
pub(super) struct MeteredBody {
    body: Body,
    received: Arc<Received>,
}

impl http_body::Body for MeteredBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        let bytes = match &frame {
            Some(Ok(frame)) => frame.data_ref().map(Bytes::len).unwrap_or_default(),
            _ => 0,
        };
        if !self.received.add(bytes) {
            let error = Status::resource_exhausted("unfinished responses of all members have more than 64 MiB");
            return Poll::Ready(Some(Err(error)));
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_responses_exhaust_the_budget_and_short_ones_are_always_received() {
        let budget = Arc::default();
        let long: Vec<_> = (0..4).map(|_| Received::new(&budget)).collect();
        for received in &long {
            assert!(received.add(MAX_BYTES / 4));
        }
        assert!(!long[0].add(1));
        let short = Received::new(&budget);
        assert!(short.add(ALWAYS_ALLOWED_BYTES) && !short.add(1));
        short.clear();
        assert!(short.add(ALWAYS_ALLOWED_BYTES));
        drop(long);
        assert!(short.add(MAX_BYTES / 2));
        drop(short);
        assert_eq!(budget.used.load(Relaxed), 0);
    }
}
