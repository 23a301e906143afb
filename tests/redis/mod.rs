//! Redis as the store: state, topologies, failures, and decisions without a call to it.

/// `charge: all` for requests with limits on several servers.
mod charge_all;
mod credentials;
/// `consistency: eventual`.
mod eventual;
/// Redis behind a faulty network, and servers with unexpected replies.
mod faults;
/// Decisions without a call to Redis: the deny cache and leases.
pub(crate) mod leases_and_deny_cache;
/// Redis stopped, killed, frozen and flushed.
mod outage;
/// Overrides as Redis stores them.
mod override_store;
/// A service that is paused.
mod pauses;
/// `penalty`.
mod penalties;
/// Wrong passwords, certificates and ports.
mod setup_mistakes;
/// Rules with several limits.
mod several_limits;
/// The state in Redis, and exact limits shared by many callers.
pub(crate) mod stores;
/// Clusters, sentinels and rings: locations of counters, migrations and failovers.
mod topologies;
