//! What this instance asks of the store for itself.

use crate::{
    algorithm::{Action, Algorithm},
    store::Hit,
};

/// What is to be asked of one counter, or told or given back to it.
pub(super) struct StoreCall {
    pub(super) identity: u128,
    pub(super) key: Box<[u8]>,
    pub(super) per_second: bool,
    pub(super) algorithm: Algorithm,
    pub(super) action: Action,
    pub(super) hits: u64,
}

impl StoreCall {
    /// The hit that does it.
    pub(super) fn hit(&self) -> Hit<'_> {
        let hit = Hit::take(&self.key, &self.algorithm, self.hits);
        Hit { action: self.action, per_second: self.per_second, ..hit }
    }
}
