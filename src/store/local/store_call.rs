//! [`StoreCall`]: a call to the store in the background, for a lease or an eventual counter.

use crate::{
    algorithm::{Action, Algorithm},
    store::Hit,
};

/// A background call that takes hits of one counter, reports them, returns them, or reads the counter's state.
pub(super) struct StoreCall {
    /// Keyed hash of the counter's name, by which this instance finds the counter.
    pub(super) identity: u128,
    pub(super) key: Box<[u8]>,
    pub(super) per_second: bool,
    pub(super) algorithm: Algorithm,
    pub(super) action: Action,
    pub(super) hits: u64,
}

impl StoreCall {
    /// Returns the operation to send to the store.
    pub(super) fn hit(&self) -> Hit<'_> {
        let hit = Hit::take(&self.key, &self.algorithm, self.hits);
        Hit { action: self.action, per_second: self.per_second, ..hit }
    }
}
