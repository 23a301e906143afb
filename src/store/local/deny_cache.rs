//! Refusals that still hold: what a counter has refused, it refuses until something drains or its window ends, and
//! others can only add to it. So nobody needs to be asked.
//!
//! What is remembered is the counter itself, as the refusal left it, and how the store's clock stood. The next hit is
//! held against it by the same arithmetic as in the store: larger costs and smaller ones are decided rightly, and the
//! numbers of the answer are those that the store would give. Only a refusal is answered; what would pass asks the store,
//! and so does another limit, and one that has changed.
//!
//! Nothing is remembered where a refused hit would change something (`count_denied`). Where something is given back by
//! this instance, what is known of that counter ends; where another one gives back, after `max_age`. Give back only what
//! has passed: a hit that was refused from here has never been counted.
//!
//! A refusal ages from when it was asked for, which is before the store's clock was read: it ends a moment early, never
//! late.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use sluicegate_common::{Ending, Ways};
use smallvec::SmallVec;

use crate::{
    algorithm::{Action, Algorithm, Ask, Decision, Micros, State},
    store::{Counted, Hit},
};

/// Counters are told apart by so many kinds where something is given back to them.
const REFUNDS: usize = 256;

/// How much is remembered.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// Refusals at most, about 250 bytes each; 0: none, every hit asks the store.
    pub max_entities: usize,
    /// For so long at most: until then a refund by another instance goes unnoticed.
    #[serde(with = "crate::duration")]
    pub max_age: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_entities: 65_536, max_age: Duration::from_secs(1) }
    }
}

/// What is known of the hits of a request.
pub(super) type Known = SmallVec<[Option<Decision>; 2]>;

/// What it takes to learn from their answers.
pub(super) type Questions = SmallVec<[Question; 2]>;

/// What tells a counter from all others, and how often something was given back to its kind before it was asked.
#[derive(Clone, Copy)]
pub(super) struct Question {
    identity: u128,
    refunds: u32,
}

struct Refusal {
    algorithm: Algorithm,
    refunds: u32,
    /// When it was asked for, here.
    asked: Duration,
    ends: Duration,
    /// When it was decided, by the store's clock.
    at: Micros,
    state: State,
}

impl Ending for Refusal {
    fn ends(&self) -> Duration {
        self.ends
    }

    fn bytes(&self) -> usize {
        self.state.as_bytes().len()
    }
}

pub(super) struct DenyCache {
    refusals: Ways<Refusal>,
    refunds: [AtomicU32; REFUNDS],
    max_age: Duration,
}

impl DenyCache {
    /// `None` where nothing is to be remembered.
    pub(super) fn new(settings: &Settings) -> Option<Self> {
        let remembers = settings.max_entities > 0 && !settings.max_age.is_zero();
        remembers.then(|| Self {
            refusals: Ways::new(settings.max_entities),
            refunds: [const { AtomicU32::new(0) }; REFUNDS],
            max_age: settings.max_age,
        })
    }

    /// To be asked before anything is looked up. A hit that gives back ends what is known of its counter, from now on.
    pub(super) fn questions(&self, hits: &[Hit<'_>], identities: &[u128]) -> Questions {
        let question = |(hit, identity): (&Hit<'_>, &u128)| {
            if hit.action.gives() {
                self.refunded(*identity);
            }
            Question { identity: *identity, refunds: self.refunds_of(*identity).load(Relaxed) }
        };
        hits.iter().zip(identities).map(question).collect()
    }

    /// Something has been given back: what was known of the counter does not hold any more.
    pub(super) fn refunded(&self, identity: u128) {
        self.refunds_of(identity).fetch_add(1, Relaxed);
    }

    /// The refusals that still hold; `None` when there are none.
    pub(super) fn known(&self, hits: &[Hit<'_>], questions: &Questions, now: Duration) -> Option<Known> {
        let mut known: Option<Known> = None;
        for (place, (hit, question)) in hits.iter().zip(questions).enumerate() {
            // A hit before it in this request may change the counter.
            let asked = |before: &usize| known.as_ref().is_none_or(|known| known[*before].is_none());
            let same = |before: &usize| questions[*before].identity == question.identity;
            if let Some(decision) = self.get(hit, question, now)
                && !(0..place).any(|before| same(&before) && asked(&before))
            {
                known.get_or_insert_with(|| Known::from_elem(None, hits.len()))[place] = Some(decision);
            }
        }
        known
    }

    fn get(&self, hit: &Hit<'_>, question: &Question, now: Duration) -> Option<Decision> {
        if hit.action.gives() {
            return None;
        }
        self.refusals.look(question.identity, |refusal| {
            let holds = now >= refusal.asked && now < refusal.ends && refusal.refunds == question.refunds;
            if !holds || refusal.algorithm != *hit.algorithm {
                return None;
            }
            let age = (now - refusal.asked).as_micros();
            let at = refusal.at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX));
            let state = &mut refusal.state;
            let passes = hit.algorithm.step(state, Ask { action: Action::Peek, cost: hit.cost, now: at });
            let counts = hit.action == Action::Take && hit.algorithm.refusal_counts(state, at);
            (!passes && !counts).then(|| hit.algorithm.explain(state, hit.ask(at), false))
        })
    }

    /// Remembers what the store has refused; the answer to the hit. `asked`: when the store was asked.
    pub(super) fn learn(&self, hit: &Hit<'_>, question: Question, counted: Counted, asked: Duration) -> Decision {
        let decision = counted.explain(hit);
        if hit.action.gives() {
            // A refusal that overtook it does not hold either.
            self.refunded(question.identity);
        } else if counted.allowed || hit.algorithm.refusal_counts(&counted.state, counted.at) {
            // The counter is not what it was when it refused something else.
            self.refusals.remove(question.identity);
        } else {
            let (Counted { at, state, .. }, Question { identity, refunds }) = (counted, question);
            let ends = asked.saturating_add(self.max_age);
            self.refusals.put(identity, Refusal { algorithm: *hit.algorithm, refunds, asked, ends, at, state });
        }
        decision
    }

    fn refunds_of(&self, identity: u128) -> &AtomicU32 {
        &self.refunds[identity as usize % REFUNDS]
    }
}
