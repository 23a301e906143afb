//! [`Output`]: the state that all responses on one connection use.

use std::{
    sync::Arc,
    task::{Context, Poll, Wake, Waker, ready},
};

use tokio::sync::Semaphore;

use super::{
    idle_timeout::Requests,
    rejections::{Rejection, Rejections},
};
use crate::{
    budget::{Budget, Reservation},
    transport::connections::OpenConnection,
};

/// Context of the responses of a connection.
pub(super) struct Output {
    pub(super) budget: Budget,
    pub(super) rejections: Arc<Rejections>,
    pub(super) open_connection: Arc<OpenConnection>,
    pub(super) requests: Arc<Requests>,
    /// Bounds the number of waits for a reservation, on all connections of the listener.
    pub(super) waiting: Arc<Semaphore>,
}

impl Output {
    /// Closes the connection because its caller does not read a response.
    pub(super) fn close_unread(&self) {
        self.rejections.record(Rejection::Unread);
        self.open_connection.close();
    }

    /// Reserves bytes for a part of a response. A part that is larger than the budget gets the whole budget.
    pub(super) fn poll_grow(
        self: &Arc<Self>,
        reservation: &mut Reservation,
        bytes: usize,
        context: &Context<'_>,
    ) -> Poll<Result<(), Rejection>> {
        let bytes = bytes.min(self.budget.max_bytes());
        if ready!(reservation.poll_grow(bytes, context)).is_err() {
            return Poll::Ready(Err(Rejection::NoMemory));
        }
        // From now on, an eviction closes the connection.
        let waker = Waker::from(Arc::clone(self));
        match reservation.poll_evicted(&Context::from_waker(&waker)) {
            Poll::Ready(_) => Poll::Ready(Err(Rejection::Unread)),
            Poll::Pending => Poll::Ready(Ok(())),
        }
    }
}

/// Closes the connection, because the reservation of a response was evicted.
impl Wake for Output {
    fn wake(self: Arc<Self>) {
        self.close_unread();
    }
}
