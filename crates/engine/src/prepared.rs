//! [`PreparedRequest`]: a request with the limits that it is charged to, between matching and the verdict.

use sluicegate_algorithm::{Action, Micros};
use sluicegate_store::{Charge, Counter, Hit, HitDecision, HitDecisions, Memory, StoreError};
use smallvec::SmallVec;

use super::{Descriptor, OverrideKind, Request, matching::AppliedLimit};

/// A request whose limits are known. The caller applies its hits to a store, and
/// [`Engine::finish`](super::Engine::finish) turns the answers into a verdict.
pub struct PreparedRequest<'s, 'd> {
    pub(super) request: &'s Request<'d>,
    pub(super) now: Micros,
    /// What happens to each descriptor.
    pub(super) descriptors: SmallVec<[PreparedDescriptor<'s, 'd>; 1]>,
    pub(super) charge: Charge,
    /// Whether an override denies the whole request, so that the other limits are only peeked.
    pub(super) is_denied_by_switch: bool,
}

/// What happens to one descriptor.
#[expect(clippy::large_enum_variant, reason = "nearly all descriptors have a limit")]
pub(super) enum PreparedDescriptor<'s, 'd> {
    /// No limit applies.
    NoLimit(Option<OverrideKind>),
    /// The rule or an override makes the descriptor unlimited.
    Unlimited(Option<OverrideKind>),
    /// An override denies every hit, and the store is not called.
    Denied(AppliedLimit<'s>),
    /// A counter in the store decides.
    Charged(ChargedLimit<'s, 'd>),
}

impl<'s> PreparedDescriptor<'s, '_> {
    /// Returns the limit that allows or denies the descriptor.
    pub(super) fn applied(&self) -> Option<&AppliedLimit<'s>> {
        match self {
            Self::NoLimit(_) | Self::Unlimited(_) => None,
            Self::Denied(applied) => Some(applied),
            Self::Charged(limit) => Some(&limit.applied),
        }
    }
}

/// A limit that a request is charged to: its descriptor, the hit on its counter, and the answer of the store.
pub(super) struct ChargedLimit<'s, 'd> {
    pub(super) descriptor: &'s Descriptor<'d>,
    pub(super) applied: AppliedLimit<'s>,
    /// The hit. Under [`Charge::All`] it includes the costs of later limits with the same counter.
    pub(super) hit: Hit,
    /// The index of the earlier descriptor whose hit includes this one.
    pub(super) included_in: Option<usize>,
    /// The id of a finished grant, and the number of its hits that the caller has admitted.
    pub(super) finished_grant: Option<(u64, u64)>,
    /// The answer, [`StoreError::Missing`] before it is known.
    pub(super) answer: Result<HitDecision, StoreError>,
}

impl ChargedLimit<'_, '_> {
    /// Returns whether the answer denies the whole request under [`Charge::All`].
    pub(super) fn denies_all(&self) -> bool {
        self.hit.is_denied_by(&self.answer)
    }
}

impl<'s, 'd> PreparedRequest<'s, 'd> {
    /// Returns whether no counter is needed for the verdict.
    #[must_use]
    pub fn needs_no_store(&self) -> bool {
        self.charged().next().is_none()
    }

    /// Returns the hits that a store has to apply in one call.
    #[must_use]
    pub fn hits(&self) -> SmallVec<[Hit<&Counter>; 1]> {
        let mut hits = SmallVec::new();
        for limit in self.charged() {
            if limit.included_in.is_none() {
                hits.push(limit.hit.borrowed());
            }
        }
        hits
    }

    /// Returns whether the store charges all of `hits` or none.
    #[must_use]
    pub fn charge_of(&self, hits: &[Hit<&Counter>]) -> Charge {
        // A single hit does not depend on the outcome of others.
        if hits.len() == 1 { Charge::Each } else { self.charge }
    }

    /// Sets the answers of the store to [`Self::hits`], in their order.
    pub fn set_answers(&mut self, answers: HitDecisions) {
        let mut answers = answers.into_iter();
        for index in 0..self.descriptors.len() {
            let PreparedDescriptor::Charged(limit) = &mut self.descriptors[index] else {
                continue;
            };
            let Some(first) = limit.included_in else {
                limit.answer = answers.next().unwrap_or_else(|| Err(StoreError::missing()));
                continue;
            };
            let PreparedDescriptor::Charged(first) = &self.descriptors[first] else {
                debug_assert!(false, "a hit is included in one that does not exist");
                continue;
            };
            // Only the first descriptor of a counter receives its grant.
            let answer = first.answer.map(|answer| HitDecision { grant: None, ..answer });
            if let PreparedDescriptor::Charged(limit) = &mut self.descriptors[index] {
                limit.answer = answer;
            }
        }
        debug_assert!(answers.next().is_none(), "a store has answered more hits than there were");
    }

    /// Applies the hits to counters in memory.
    pub fn apply_in(&mut self, memory: &Memory) {
        if self.charge == Charge::All {
            let hits = self.hits();
            let answers = memory.decide_all(&hits, self.charge_of(&hits), self.now);
            drop(hits);
            return self.set_answers(answers);
        }
        let now = self.now;
        for limit in self.charged_mut() {
            limit.answer = Ok(memory.decide(&limit.hit, now));
        }
    }

    /// Replaces takes by peeks, because an override denies the request already.
    pub(super) fn peek_only(&mut self) {
        self.is_denied_by_switch = true;
        self.charge = Charge::Each;
        for limit in self.charged_mut() {
            if limit.hit.action == Action::Take {
                limit.hit.action = Action::Peek;
            }
        }
    }

    /// Adds the cost of each hit to an earlier one on the same counter, because the hits of a call under [`Charge::All`]
    /// must name different counters.
    pub(super) fn join_hits_of_same_counters(&mut self) {
        for index in 1..self.descriptors.len() {
            let (earlier, later) = self.descriptors.split_at_mut(index);
            let PreparedDescriptor::Charged(limit) = &mut later[0] else {
                continue;
            };
            for (first, descriptor) in earlier.iter_mut().enumerate() {
                let PreparedDescriptor::Charged(other) = descriptor else {
                    continue;
                };
                let is_same = other.hit.counter.name == limit.hit.counter.name && other.hit.action == limit.hit.action;
                if is_same && other.included_in.is_none() {
                    other.hit.cost = other.hit.cost.saturating_add(limit.hit.cost);
                    limit.included_in = Some(first);
                    break;
                }
            }
        }
    }

    /// Returns the limits that are charged.
    pub(super) fn charged(&self) -> impl Iterator<Item = &ChargedLimit<'s, 'd>> {
        self.descriptors.iter().filter_map(|descriptor| match descriptor {
            PreparedDescriptor::Charged(limit) => Some(limit),
            _ => None,
        })
    }

    /// Returns the limits that are charged.
    pub(super) fn charged_mut(&mut self) -> impl Iterator<Item = &mut ChargedLimit<'s, 'd>> {
        self.descriptors.iter_mut().filter_map(|descriptor| match descriptor {
            PreparedDescriptor::Charged(limit) => Some(limit),
            _ => None,
        })
    }
}
