//! [`StoreCall`]: a call to the store in the background, for a lease or an eventual counter.

use sluicegate_store::Hit;

/// A background call that takes hits of one counter, reports them, returns them, or reads the counter's state.
pub(super) struct StoreCall {
    /// Keyed hash of the counter's name, by which this instance finds the counter.
    pub(super) identity: u128,
    /// The operation to send to the store.
    pub(super) hit: Hit,
}
