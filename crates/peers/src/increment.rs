//! [`Increment`] and [`Batch`]: the messages of the exchange, independent of their encoding.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use sluicegate_algorithm::{Algorithm, Micros};
use sluicegate_store::memory::Change;

use super::CounterDigest;

/// The hits that one instance has counted in an interval. An increment can be understood without the previous ones.
#[derive(Debug)]
pub struct Increment {
    /// Sequence number, one more than that of the previous increment. A merged increment has that of its last part.
    pub sequence: u64,
    /// Time at which it was published, by the origin's clock.
    pub published_at: Micros,
    /// Limits that counted the hits.
    pub limits: Vec<Algorithm>,
    /// Counters that an operator has reset, before the changes.
    pub resets: Vec<CounterDigest>,
    /// Changed counters.
    pub changes: Vec<Change>,
    /// Encoded form, which all subscribers share.
    encoded: OnceLock<Bytes>,
}

impl Increment {
    /// Creates an increment.
    #[must_use]
    pub const fn new(sequence: u64, published_at: Micros, limits: Vec<Algorithm>, changes: Vec<Change>) -> Self {
        Self { sequence, published_at, limits, resets: Vec::new(), changes, encoded: OnceLock::new() }
    }

    /// Returns the increment with these resets.
    #[must_use]
    pub fn with_resets(self, resets: Vec<CounterDigest>) -> Self {
        Self { resets, ..self }
    }

    /// Returns the encoded form, which `encode` creates at the first call.
    pub fn encoded(&self, encode: impl FnOnce(&Self) -> Bytes) -> Bytes {
        self.encoded.get_or_init(|| encode(self)).clone()
    }
}

/// Increments of one instance between two positions.
#[derive(Clone, Debug)]
pub struct Batch {
    /// Epoch of the origin.
    pub origin: u64,
    /// Position before the batch.
    pub after: u64,
    /// Position after the batch.
    pub until: u64,
    /// Time at which the batch was sent, by the origin's clock.
    pub now: Micros,
    /// The increments, the oldest first.
    pub increments: Vec<Arc<Increment>>,
}
