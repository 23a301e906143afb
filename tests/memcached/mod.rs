//! memcached as the store: exact limits, failures, and what operators see.

/// memcached killed, frozen, replaced, and full.
mod outage;
/// The items in memcached, and exact limits shared by many callers.
pub(crate) mod stores;
