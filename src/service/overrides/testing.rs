//! Members for unit tests and models: instances with overrides, a clock that is set by hand, and no rules.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use super::{
    ChangeInfo, MemberExchange, OverrideSync, Replication, Settings, journal::JournalReplication,
    redis::RedisReplication,
};
use crate::{
    engine::{Statistics, StatisticsSettings},
    rules::{Options, source::Source},
    service::{Clock, reload::RulesInForce},
    store::overrides::{Journal, OverrideStore},
};
use parking_lot::Mutex;

/// Creates a member with a journal in memory.
pub(super) fn member() -> Arc<OverrideSync> {
    member_with(Journal::new(None))
}

/// Creates a member with this journal.
pub(super) fn member_with(journal: Journal) -> Arc<OverrideSync> {
    member_of(OverrideStore::Journal(Arc::new(Mutex::new(journal))))
}

/// Creates an instance with this store.
pub(super) fn member_of(store: OverrideStore) -> Arc<OverrideSync> {
    let clock = Clock::Manual(Arc::new(AtomicU64::new(1_763_672_400_000_000)));
    let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 70, near_limit_ratio: 0.8 });
    let options = Options::default();
    let source = Source::BuiltIn(Vec::new());
    let in_force = RulesInForce::start(source, options, clock.clone(), statistics, Arc::default()).unwrap();
    OverrideSync::new(store, Settings::default(), options, clock, in_force, None)
}

/// Returns the exchange of a member.
pub(super) fn exchange(member: &OverrideSync) -> MemberExchange {
    member.member_exchange().unwrap()
}

/// Returns the journal of a member.
pub(super) fn journal(member: &OverrideSync) -> &Arc<JournalReplication> {
    let Replication::Journal(journal) = &member.replication else { panic!("the instance has a journal") };
    journal
}

/// Returns the replication of an instance with Redis.
pub(super) fn redis(instance: &OverrideSync) -> &RedisReplication {
    let Replication::Redis(redis) = &instance.replication else { panic!("the instance has Redis") };
    redis
}

/// Moves the clock of a member.
pub(super) fn advance(member: &OverrideSync, micros: u64) {
    let Clock::Manual(clock) = &member.context.clock else { panic!("the clock is set by hand") };
    clock.fetch_add(micros, Relaxed);
}

pub(super) fn by_alice() -> ChangeInfo {
    ChangeInfo { author: "alice".into(), ..ChangeInfo::default() }
}
