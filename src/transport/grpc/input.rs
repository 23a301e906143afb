//! [`Input`]: the memory that one connection holds for unfinished messages, unread responses and open streams.

use std::{
    sync::OnceLock,
    task::{Context, Poll},
    time::Duration,
};

use super::Limits;
use crate::budget::{Budget, Exhausted, Reservation};

/// Memory of a call that waits, besides its message, in bytes: its stream in h2, its future and its headers.
pub(in crate::transport) const CALL_BYTES: usize = 4 * 1024;
/// Memory of a call to one of tonic's services, besides its message, in bytes.
pub(in crate::transport) const TONIC_CALL_BYTES: usize = 12 * 1024;
/// Time without further bytes after which an unfinished message is dropped.
pub(in crate::transport) const STALL_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum total size of the messages of a call to one of tonic's services.
pub(in crate::transport) const TONIC_BODY_BYTES: usize = 256 * 1024;
/// Maximum size of a message to one of tonic's services. tonic allocates the announced size of a message before its bytes
/// arrive, and no budget counts that memory.
pub(in crate::transport) const TONIC_MESSAGE_BYTES: usize = 16 * 1024;
/// Maximum memory of the messages of a connection. Larger if one message needs more.
const CONNECTION_BYTES: usize = 16 << 20;
/// Maximum number of open streams of a connection.
const MAX_STREAMS: usize = 256;

/// The budgets that all gRPC connections share.
#[derive(Clone)]
pub(in crate::transport) struct Budgets {
    pub(in crate::transport) messages: Budget,
    pub(in crate::transport) streams: Budget,
    /// Maximum memory of the messages of one connection.
    connection_bytes: usize,
}

impl Budgets {
    pub(in crate::transport) fn new(messages: Budget, streams: Budget, limits: &Limits) -> Self {
        let largest = limits.max_message_bytes.max(limits.max_frame_bytes);
        let connection_bytes = CONNECTION_BYTES.max(2 * largest + CALL_BYTES).min(messages.max_bytes());
        Self { messages, streams, connection_bytes }
    }
}

/// The shares of a connection in the budgets of all. Most connections have only complete messages, and need none.
pub(crate) struct Input {
    budgets: Budgets,
    messages: OnceLock<Budget>,
    streams: OnceLock<Budget>,
}

impl Input {
    pub(in crate::transport) const fn new(budgets: Budgets) -> Self {
        Self { budgets, messages: OnceLock::new(), streams: OnceLock::new() }
    }

    /// Creates a reservation for a message or a response.
    pub(in crate::transport) fn message(&self) -> Reservation {
        let Budgets { messages, connection_bytes, .. } = &self.budgets;
        self.messages.get_or_init(|| messages.share("connection", *connection_bytes)).reservation()
    }

    /// Reserves `bytes` bytes for a call that may last, such as a stream.
    pub(in crate::transport) fn stream(&self, bytes: usize) -> Hold {
        let all = &self.budgets.streams;
        let own = self.streams.get_or_init(|| all.share("streams of a connection", MAX_STREAMS * CALL_BYTES));
        Hold { memory: own.reservation(), bytes }
    }

    /// Reserves `bytes` bytes for a call that waits.
    pub(in crate::transport) fn call(&self, bytes: usize) -> Hold {
        Hold { memory: self.message(), bytes }
    }
}

/// A reservation for memory that is already in use, and is to be freed if others need it.
pub(in crate::transport) struct Hold {
    memory: Reservation,
    /// The size to reserve.
    bytes: usize,
}

impl Hold {
    /// Adds bytes to those that are to be reserved.
    pub(in crate::transport) fn add(&mut self, bytes: usize) {
        self.bytes += bytes;
    }

    /// Changes the size to reserve. A smaller size than the reserved one has no effect.
    pub(in crate::transport) fn set(&mut self, bytes: usize) {
        self.bytes = bytes;
    }

    /// Waits until the memory is reserved. Completes with an error if it is needed for others.
    pub(in crate::transport) fn poll_begin(&mut self, context: &Context<'_>) -> Poll<Result<(), Exhausted>> {
        match self.bytes.saturating_sub(self.memory.bytes()) {
            0 => Poll::Ready(Ok(())),
            more => self.memory.poll_grow(more, context),
        }
    }

    /// Reserves the memory, and completes if it is to be freed.
    pub(in crate::transport) fn poll_end(&mut self, context: &Context<'_>) -> Poll<Exhausted> {
        let more = self.bytes.saturating_sub(self.memory.bytes());
        if more == 0 {
            return self.memory.poll_evicted(context);
        }
        // The memory is in use while another holder is evicted for it.
        match self.memory.poll_grow(more, context) {
            Poll::Ready(Err(error)) => Poll::Ready(error),
            Poll::Ready(Ok(())) | Poll::Pending => Poll::Pending,
        }
    }
}
