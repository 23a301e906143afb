//! The leases of this instance, by what their counters are found by.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{
    entities::Entities,
    hot_counters::HotCounters,
    lease::{GrantReport, Lease, Return},
    store_call::StoreCall,
};
use crate::{
    algorithm::{Action, Algorithm, Consistency, Decision, Micros},
    store::{Grant, Hit, StepOutcome},
};

/// Nobody has asked for so long: what is held is given back.
const IDLE_TIMEOUT: Duration = Duration::from_millis(50);
/// Slices in which an entity's hits are counted, in the life of a lease.
const INTERVALS_PER_TTL: u32 = 8;
/// As many as a lease is for: what is taken is spent before it ends.
const INTERVALS_PER_LEASE: u32 = 4;
/// Hits in a slice, from which on an entity is watched: with fewer no lease would be large enough.
const HOT_THRESHOLD: u64 = 8;

/// How quota is taken in advance.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A lease is for the hits of half this time, and asked for anew when half of it is spent.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub ttl: Duration,
    /// Entities at most that are watched for leasing, about 500 bytes each; 0: none, every hit asks the store.
    pub max_counters: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(1), max_counters: 65_536 }
    }
}

pub(super) struct Leases {
    entities: Entities<LeasedCounter>,
    hot_counters: HotCounters,
    ttl: Duration,
}

struct LeasedCounter {
    identity: u128,
    key: Box<[u8]>,
    per_second: bool,
    /// As the rule has it, and as a lease is taken of it.
    algorithm: Algorithm,
    leasing: Algorithm,
    /// In which its hits are counted.
    interval: Duration,
    lease: Lease,
}

/// A hit that was taken from a lease, and what its caller gets beside.
#[derive(Clone, Copy)]
pub(super) struct LeaseDecision {
    pub(super) decision: Decision,
    pub(super) grant: Option<Grant>,
}

impl LeaseDecision {
    /// The answer to the same question when nothing is taken.
    pub(super) fn unspent(self, hits: u64) -> Self {
        let Decision { remaining, used, .. } = self.decision;
        let decision =
            Decision { remaining: remaining.saturating_add(hits), used: used.saturating_sub(hits), ..self.decision };
        Self { decision, grant: None }
    }
}

/// What a lease pays of a hit: all of it, and then that is its answer; what there is, where that is less; or nothing.
#[derive(Clone, Copy, Default)]
pub(super) struct LeasePayment {
    pub(super) decision: Option<LeaseDecision>,
    pub(super) hits: u64,
    /// When that was counted.
    taken_at: Option<Micros>,
}

/// What leases pay of a request's hits, and what they want for it.
#[derive(Default)]
pub(super) struct LeasePayments {
    pub(super) payments: SmallVec<[LeasePayment; 2]>,
    pub(super) calls: SmallVec<[StoreCall; 1]>,
}

/// What is to be done by now.
#[derive(Default)]
pub(super) struct SweepResult {
    pub(super) calls: Vec<StoreCall>,
    /// Hits of grants of which nobody has said what became of them.
    pub(super) unreported: u64,
}

impl Leases {
    /// `None` where nothing is to be leased.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        (settings.max_counters > 0 && !settings.ttl.is_zero()).then(|| Self {
            entities: Entities::new(settings.max_counters),
            hot_counters: HotCounters::new(settings.ttl / INTERVALS_PER_TTL),
            ttl: settings.ttl,
        })
    }

    /// Takes the hits from leases, as far as those go.
    pub(super) fn spend(&self, hits: &[Hit<'_>], identities: &[u128], now: Duration) -> LeasePayments {
        let mut spent = LeasePayments::default();
        for (hit, identity) in hits.iter().zip(identities) {
            let leased = hit.consistency == Consistency::Leased && !hit.action.releases();
            let pay = |entity: &mut LeasedCounter| Some(entity.pay(hit, now, self.ttl, &mut spent.calls));
            let share = if leased { self.update(*identity, hit, now, pay) } else { None };
            spent.payments.push(share.unwrap_or_default());
        }
        spent
    }

    /// Puts back what was paid of a hit, because the rest could not be had; or else it is to be given back.
    pub(super) fn put_back(&self, identity: u128, rule: &Algorithm, share: &LeasePayment) -> Option<StoreCall> {
        let counted = share.taken_at.filter(|_| share.hits > 0)?;
        let unspend = |entity: &mut LeasedCounter| {
            if entity.algorithm != *rule {
                return None;
            }
            let grant = share.decision.and_then(|answer| answer.grant);
            let granted = grant.map_or(0, |grant| entity.lease.revoke(grant.id));
            let back = entity.lease.put_back(&entity.leasing, share.hits + granted, counted)?;
            Some(entity.return_call(&back))
        };
        self.entities.find(identity, unspend).flatten()
    }

    /// The store has decided a hit of an entity that may be leased: what to ask for now, if it is worth it.
    pub(super) fn consider_lease(&self, identity: u128, hit: &Hit<'_>, decision: &Decision) -> Option<StoreCall> {
        if hit.action != Action::Take || !decision.allowed {
            return None;
        }
        let learn = |entity: &mut LeasedCounter| {
            let is_same = entity.algorithm == *hit.algorithm;
            is_same.then(|| entity.lease.demand(decision.remaining)).and_then(|more| entity.take_call(more))
        };
        self.entities.find(identity, learn).flatten()
    }

    /// A caller has done with a grant: how many hits he has admitted, how many have come back, and what to do about those.
    pub(super) fn report(
        &self,
        identity: u128,
        id: u64,
        spent: u64,
        now: Duration,
    ) -> Option<(u64, u64, Option<StoreCall>)> {
        let report = |entity: &mut LeasedCounter| {
            let GrantReport { spent, returned, unused: back } = entity.lease.report(&entity.leasing, id, spent, now)?;
            Some((spent, returned, back.map(|back| entity.return_call(&back))))
        };
        self.entities.find(identity, report).flatten()
    }

    /// What has become of a question for a lease; what is to be given back because of it.
    pub(super) fn complete(
        &self,
        errand: &StoreCall,
        counted: Option<&StepOutcome>,
        asked: Duration,
    ) -> Option<StoreCall> {
        let granted = |entity: &mut LeasedCounter| {
            if entity.leasing != errand.algorithm {
                return None;
            }
            let Some(counted) = counted else {
                entity.lease.acquire_failed();
                return Some(None);
            };
            let back = entity.lease.acquired(&entity.leasing, errand.hits, counted.clone(), asked);
            Some(back.map(|back| entity.return_call(&back)))
        };
        self.entities.find(errand.identity, granted).flatten().unwrap_or_else(|| {
            // Its rule has changed meanwhile.
            let counted = counted.filter(|counted| counted.allowed)?;
            Some(StoreCall { key: errand.key.clone(), action: Action::RollBack(counted.at), ..*errand })
        })
    }

    /// What is to be given back by now; and entities that nobody asks for are forgotten.
    pub(super) fn sweep(&self, now: Duration) -> SweepResult {
        let (idle, forgotten) = (now.saturating_sub(IDLE_TIMEOUT), now.saturating_sub(self.ttl));
        let (mut errands, mut unreported) = (Vec::new(), 0);
        self.entities.retain(|entity| {
            // Whoever had it has had another life of it to say so.
            unreported += entity.lease.expire_grants(forgotten);
            errands.extend(entity.return_idle(now, idle));
            let excess = entity.lease.return_excess(now, entity.interval);
            errands.extend(excess.map(|back| entity.return_call(&back)));
            !entity.lease.is_idle(forgotten)
        });
        SweepResult { calls: errands, unreported }
    }

    /// All that is held, to be given back: nothing of it is spent any more.
    pub(super) fn drain(&self, now: Duration) -> Vec<StoreCall> {
        let mut errands = Vec::new();
        self.entities.retain(|entity| {
            errands.extend(entity.return_idle(now, Duration::MAX));
            false
        });
        errands
    }

    /// The entity, which is new if it has not been asked for often until now; `None` where it is not, where there is no room
    /// for more, and until what was leased under another rule has gone back.
    fn update<R>(
        &self,
        identity: u128,
        hit: &Hit<'_>,
        now: Duration,
        act: impl FnOnce(&mut LeasedCounter) -> Option<R>,
    ) -> Option<R> {
        let new = || {
            if self.hot_counters.record(identity, hit.cost, now) < HOT_THRESHOLD {
                return None;
            }
            let leasing = hit.algorithm.leasing()?;
            let life = Duration::from_micros(leasing.lease_lifetime().get());
            Some(LeasedCounter {
                identity,
                key: hit.key.into(),
                per_second: hit.per_second,
                algorithm: *hit.algorithm,
                leasing,
                interval: (self.ttl / INTERVALS_PER_TTL).min(life / INTERVALS_PER_LEASE),
                lease: Lease::default(),
            })
        };
        let act = |entity: &mut LeasedCounter| {
            // What was leased under the old rule goes back by itself: it is idle from now on.
            if entity.algorithm == *hit.algorithm { act(entity) } else { None }
        };
        self.entities.with(identity, new, act).flatten()
    }
}

impl LeasedCounter {
    fn pay(
        &mut self,
        hit: &Hit<'_>,
        now: Duration,
        longest: Duration,
        errands: &mut SmallVec<[StoreCall; 1]>,
    ) -> LeasePayment {
        let takes = hit.action == Action::Take;
        let Some((decision, more)) = self.lease.spend(hit, now, self.interval) else {
            let paid = if takes { self.lease.spend_all(now) } else { 0 };
            return LeasePayment { decision: None, hits: paid, taken_at: self.lease.counted() };
        };
        errands.extend(self.take_call(more));
        // Nobody guesses the number of another caller's grant.
        let wants = takes && hit.demand > 0;
        let grant = wants.then(|| self.lease.grant(&self.leasing, hit.demand, rand::random(), now, longest)).flatten();
        let paid = if takes { hit.cost } else { 0 };
        LeasePayment { decision: Some(LeaseDecision { decision, grant }), hits: paid, taken_at: self.lease.counted() }
    }

    fn take_call(&self, hits: u64) -> Option<StoreCall> {
        let Self { identity, per_second, leasing, .. } = *self;
        let take = Action::Take;
        (hits > 0).then(|| StoreCall {
            identity,
            key: self.key.clone(),
            per_second,
            algorithm: leasing,
            action: take,
            hits,
        })
    }

    fn return_idle(&mut self, now: Duration, idle_since: Duration) -> Option<StoreCall> {
        let back = self.lease.return_idle(&self.algorithm, now, idle_since)?;
        Some(self.return_call(&back))
    }

    fn return_call(&self, back: &Return) -> StoreCall {
        let Self { identity, per_second, leasing, .. } = *self;
        let action = Action::RollBack(back.taken_at);
        StoreCall { identity, key: self.key.clone(), per_second, algorithm: leasing, action, hits: back.hits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        algorithm::{MaxHits, Operation, State, fixed_window::FixedWindow},
        store::Hit,
    };

    /// The rest of the request could not be had: nobody gets what was granted beside.
    #[test]
    fn what_was_paid_comes_back_with_what_was_granted() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let rule: Algorithm = FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap().into();
        let hit = Hit { consistency: Consistency::Leased, demand: 5, ..Hit::take(b"k", &rule, 10) };
        let spend = || leases.spend(&[hit], &[1], Duration::from_millis(1)).payments[0];
        assert!(spend().decision.is_none(), "nothing is held yet");
        let decision = Decision { allowed: true, remaining: 990, ..Decision::default() };
        let errand = leases.consider_lease(1, &hit, &decision).unwrap();
        let (mut state, at) = (State::default(), Micros::from_secs(1));
        let allowed = errand.algorithm.step(&mut state, Operation { action: Action::Take, cost: errand.hits, now: at });
        let counted = StepOutcome { allowed, action: Action::Take, at, state };
        assert!(leases.complete(&errand, Some(&counted), Duration::from_millis(1)).is_none());

        let share = spend();
        let granted = share.decision.and_then(|answer| answer.grant).map(|grant| grant.hits.get());
        assert_eq!((share.hits, granted), (10, Some(5)));
        assert!(leases.put_back(1, &rule, &share).is_none(), "it goes back to where it came from");
        let back: Vec<u64> = leases.drain(Duration::from_millis(2)).iter().map(|errand| errand.hits).collect();
        assert_eq!(back, [errand.hits]);
    }

    /// What was asked for under another rule is nobody's, and goes back as it was taken.
    #[test]
    fn what_is_granted_to_a_rule_that_has_changed_is_given_back() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let rule: Algorithm = FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap().into();
        let errand = StoreCall {
            identity: 1,
            key: Box::from(*b"k"),
            per_second: true,
            algorithm: rule,
            action: Action::Take,
            hits: 10,
        };
        let at = Micros::from_secs(1);
        let counted = |allowed| StepOutcome { allowed, action: Action::Take, at, state: State::default() };
        let back = |allowed| leases.complete(&errand, Some(&counted(allowed)), Duration::from_millis(1));
        let given = back(true).unwrap();
        let hit = given.hit();
        assert_eq!((hit.action, hit.cost, hit.key, hit.per_second), (Action::RollBack(at), 10, b"k".as_slice(), true));
        assert!(back(false).is_none());
    }
}
