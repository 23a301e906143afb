//! Instances without a shared store that exchange the hits they count, over real connections.

/// The sum over all members in the console of one.
mod activity;
/// Copies of counters that a member needs later than at its start.
mod copy;
/// Every algorithm, refunds, and the law of a limit under load.
mod counting;
/// Parts of members that a test implements itself.
mod foreign_member;
/// Invalid settings, foreign certificates, garbage, and members that answer nonsense.
mod hostile;
/// A member that sends what no member sends.
mod liar;
/// [`Members`](members::Members): several running instances.
mod members;
/// Restarts, failures, and addresses of members.
mod membership;
/// Overrides and candidate rules without Redis.
mod overrides;
/// Members that cannot reach each other, in network namespaces.
mod partition;
/// Planned overrides without Redis.
mod planned;
/// `on_error: local` while Redis is down.
mod redis;
