//! The leases of this instance, by what their counters are found by.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;

use super::{
    entities::Entities,
    errand::Errand,
    heat::Heat,
    lease::{Back, Lease, Reported},
};
use crate::{
    algorithm::{Action, Algorithm, Consistency, Decision, Micros},
    store::{Counted, Grant, Hit},
};

/// Nobody has asked for so long: what is held is given back.
const IDLE: Duration = Duration::from_millis(50);
/// Slices in which an entity's hits are counted, in the life of a lease.
const SLICES: u32 = 8;
/// As many as a lease is for: what is taken is spent before it ends.
const SLICES_OF_LIFE: u32 = 4;
/// Hits in a slice, from which on an entity is watched: with fewer no lease would be large enough.
const OFTEN: u64 = 8;

/// How quota is taken in advance.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// A lease is for the hits of half this time, and asked for anew when half of it is spent.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub ttl: Duration,
    /// Entities at most that are watched for leasing, about 500 bytes each; 0: none, every hit asks the store.
    pub max_entities: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(1), max_entities: 65_536 }
    }
}

pub(super) struct Leases {
    entities: Entities<Entity>,
    heat: Heat,
    ttl: Duration,
}

struct Entity {
    identity: u128,
    key: Box<[u8]>,
    per_second: bool,
    /// As the rule has it, and as a lease is taken of it.
    algorithm: Algorithm,
    leasing: Algorithm,
    /// In which its hits are counted.
    slice: Duration,
    lease: Lease,
}

/// A hit that was taken from a lease, and what its caller gets beside.
#[derive(Clone, Copy)]
pub(super) struct Spend {
    pub(super) decision: Decision,
    pub(super) grant: Option<Grant>,
}

impl Spend {
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
pub(super) struct Share {
    pub(super) answer: Option<Spend>,
    pub(super) paid: u64,
    /// When that was counted.
    counted: Option<Micros>,
}

/// What leases pay of a request's hits, and what they want for it.
#[derive(Default)]
pub(super) struct Spent {
    pub(super) shares: SmallVec<[Share; 2]>,
    pub(super) errands: SmallVec<[Errand; 1]>,
}

/// What is to be done by now.
#[derive(Default)]
pub(super) struct Swept {
    pub(super) errands: Vec<Errand>,
    /// Hits of grants of which nobody has said what became of them.
    pub(super) unreported: u64,
}

impl Leases {
    /// `None` where nothing is to be leased.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        (settings.max_entities > 0 && !settings.ttl.is_zero()).then(|| Self {
            entities: Entities::new(settings.max_entities),
            heat: Heat::new(settings.ttl / SLICES),
            ttl: settings.ttl,
        })
    }

    /// Takes the hits from leases, as far as those go.
    pub(super) fn spend(&self, hits: &[Hit<'_>], identities: &[u128], now: Duration) -> Spent {
        let mut spent = Spent::default();
        for (hit, identity) in hits.iter().zip(identities) {
            let leased = hit.consistency == Consistency::Leased && !hit.action.gives();
            let pay = |entity: &mut Entity| Some(entity.pay(hit, now, self.ttl, &mut spent.errands));
            let share = if leased { self.with(*identity, hit, now, pay) } else { None };
            spent.shares.push(share.unwrap_or_default());
        }
        spent
    }

    /// Puts back what was paid of a hit, because the rest could not be had; or else it is to be given back.
    pub(super) fn unspend(&self, identity: u128, rule: &Algorithm, share: &Share) -> Option<Errand> {
        let counted = share.counted.filter(|_| share.paid > 0)?;
        let unspend = |entity: &mut Entity| {
            if entity.algorithm != *rule {
                return None;
            }
            let grant = share.answer.and_then(|answer| answer.grant);
            let granted = grant.map_or(0, |grant| entity.lease.revoke(grant.id));
            let back = entity.lease.unspend(&entity.leasing, share.paid + granted, counted)?;
            Some(entity.back(&back))
        };
        self.entities.find(identity, unspend).flatten()
    }

    /// The store has decided a hit of an entity that may be leased: what to ask for now, if it is worth it.
    pub(super) fn learn(&self, identity: u128, hit: &Hit<'_>, decision: &Decision) -> Option<Errand> {
        if hit.action != Action::Take || !decision.allowed {
            return None;
        }
        let learn = |entity: &mut Entity| {
            let is_same = entity.algorithm == *hit.algorithm;
            is_same.then(|| entity.lease.more(decision.remaining)).and_then(|more| entity.errand(more))
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
    ) -> Option<(u64, u64, Option<Errand>)> {
        let report = |entity: &mut Entity| {
            let Reported { spent, returned, back } = entity.lease.report(&entity.leasing, id, spent, now)?;
            Some((spent, returned, back.map(|back| entity.back(&back))))
        };
        self.entities.find(identity, report).flatten()
    }

    /// What has become of a question for a lease; what is to be given back because of it.
    pub(super) fn answered(&self, errand: &Errand, counted: Option<&Counted>, asked: Duration) -> Option<Errand> {
        let granted = |entity: &mut Entity| {
            if entity.leasing != errand.algorithm {
                return None;
            }
            let Some(counted) = counted else {
                entity.lease.not_granted();
                return Some(None);
            };
            let back = entity.lease.granted(&entity.leasing, errand.hits, counted.clone(), asked);
            Some(back.map(|back| entity.back(&back)))
        };
        self.entities.find(errand.identity, granted).flatten().unwrap_or_else(|| {
            // Its rule has changed meanwhile.
            let counted = counted.filter(|counted| counted.allowed)?;
            Some(Errand { key: errand.key.clone(), action: Action::Undo(counted.at), ..*errand })
        })
    }

    /// What is to be given back by now; and entities that nobody asks for are forgotten.
    pub(super) fn sweep(&self, now: Duration) -> Swept {
        let (idle, forgotten) = (now.saturating_sub(IDLE), now.saturating_sub(self.ttl));
        let (mut errands, mut unreported) = (Vec::new(), 0);
        self.entities.retain(|entity| {
            // Whoever had it has had another life of it to say so.
            unreported += entity.lease.unreported(forgotten);
            errands.extend(entity.give_back(now, idle));
            let excess = entity.lease.give_excess(now, entity.slice);
            errands.extend(excess.map(|back| entity.back(&back)));
            !entity.lease.is_idle(forgotten)
        });
        Swept { errands, unreported }
    }

    /// All that is held, to be given back: nothing of it is spent any more.
    pub(super) fn take_all(&self, now: Duration) -> Vec<Errand> {
        let mut errands = Vec::new();
        self.entities.retain(|entity| {
            errands.extend(entity.give_back(now, Duration::MAX));
            false
        });
        errands
    }

    /// The entity, which is new if it has not been asked for often until now; `None` where it is not, where there is no room
    /// for more, and until what was leased under another rule has gone back.
    fn with<R>(
        &self,
        identity: u128,
        hit: &Hit<'_>,
        now: Duration,
        act: impl FnOnce(&mut Entity) -> Option<R>,
    ) -> Option<R> {
        let new = || {
            if self.heat.add(identity, hit.cost, now) < OFTEN {
                return None;
            }
            let leasing = hit.algorithm.leasing()?;
            let life = Duration::from_micros(leasing.lease_life().get());
            Some(Entity {
                identity,
                key: hit.key.into(),
                per_second: hit.per_second,
                algorithm: *hit.algorithm,
                leasing,
                slice: (self.ttl / SLICES).min(life / SLICES_OF_LIFE),
                lease: Lease::default(),
            })
        };
        let act = |entity: &mut Entity| {
            // What was leased under the old rule goes back by itself: it is idle from now on.
            if entity.algorithm == *hit.algorithm { act(entity) } else { None }
        };
        self.entities.with(identity, new, act).flatten()
    }
}

impl Entity {
    fn pay(&mut self, hit: &Hit<'_>, now: Duration, longest: Duration, errands: &mut SmallVec<[Errand; 1]>) -> Share {
        let takes = hit.action == Action::Take;
        let Some((decision, more)) = self.lease.spend(hit, now, self.slice) else {
            let paid = if takes { self.lease.spend_all(now) } else { 0 };
            return Share { answer: None, paid, counted: self.lease.counted() };
        };
        errands.extend(self.errand(more));
        // Nobody guesses the number of another caller's grant.
        let wants = takes && hit.wants > 0;
        let grant = wants.then(|| self.lease.grant(&self.leasing, hit.wants, rand::random(), now, longest)).flatten();
        let paid = if takes { hit.cost } else { 0 };
        Share { answer: Some(Spend { decision, grant }), paid, counted: self.lease.counted() }
    }

    fn errand(&self, hits: u64) -> Option<Errand> {
        let Self { identity, per_second, leasing, .. } = *self;
        let take = Action::Take;
        (hits > 0).then(|| Errand {
            identity,
            key: self.key.clone(),
            per_second,
            algorithm: leasing,
            action: take,
            hits,
        })
    }

    fn give_back(&mut self, now: Duration, idle_since: Duration) -> Option<Errand> {
        let back = self.lease.give_back(&self.algorithm, now, idle_since)?;
        Some(self.back(&back))
    }

    fn back(&self, back: &Back) -> Errand {
        let Self { identity, per_second, leasing, .. } = *self;
        let action = Action::Undo(back.counted);
        Errand { identity, key: self.key.clone(), per_second, algorithm: leasing, action, hits: back.hits }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        algorithm::{Ask, Quota, State, fixed_window::FixedWindow},
        store::Hit,
    };

    /// The rest of the request could not be had: nobody gets what was granted beside.
    #[test]
    fn what_was_paid_comes_back_with_what_was_granted() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let rule: Algorithm = FixedWindow::new(Quota::hard(1_000), Micros::from_secs(60), true).unwrap().into();
        let hit = Hit { consistency: Consistency::Leased, wants: 5, ..Hit::take(b"k", &rule, 10) };
        let spend = || leases.spend(&[hit], &[1], Duration::from_millis(1)).shares[0];
        assert!(spend().answer.is_none(), "nothing is held yet");
        let decision = Decision { allowed: true, remaining: 990, ..Decision::default() };
        let errand = leases.learn(1, &hit, &decision).unwrap();
        let (mut state, at) = (State::default(), Micros::from_secs(1));
        let allowed = errand.algorithm.step(&mut state, Ask { action: Action::Take, cost: errand.hits, now: at });
        let counted = Counted { allowed, action: Action::Take, at, state };
        assert!(leases.answered(&errand, Some(&counted), Duration::from_millis(1)).is_none());

        let share = spend();
        let granted = share.answer.and_then(|answer| answer.grant).map(|grant| grant.hits.get());
        assert_eq!((share.paid, granted), (10, Some(5)));
        assert!(leases.unspend(1, &rule, &share).is_none(), "it goes back to where it came from");
        let back: Vec<u64> = leases.take_all(Duration::from_millis(2)).iter().map(|errand| errand.hits).collect();
        assert_eq!(back, [errand.hits]);
    }

    /// What was asked for under another rule is nobody's, and goes back as it was taken.
    #[test]
    fn what_is_granted_to_a_rule_that_has_changed_is_given_back() {
        let leases = Leases::new(&Settings::default()).unwrap();
        let rule: Algorithm = FixedWindow::new(Quota::hard(1_000), Micros::from_secs(60), true).unwrap().into();
        let errand = Errand {
            identity: 1,
            key: Box::from(*b"k"),
            per_second: true,
            algorithm: rule,
            action: Action::Take,
            hits: 10,
        };
        let at = Micros::from_secs(1);
        let counted = |allowed| Counted { allowed, action: Action::Take, at, state: State::default() };
        let back = |allowed| leases.answered(&errand, Some(&counted(allowed)), Duration::from_millis(1));
        let given = back(true).unwrap();
        let hit = given.hit();
        assert_eq!((hit.action, hit.cost, hit.key, hit.per_second), (Action::Undo(at), 10, b"k".as_slice(), true));
        assert!(back(false).is_none());
    }
}
