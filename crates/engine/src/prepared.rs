//! [`PreparedRequest`]: a request with the limits that it is charged to, between matching and the verdict.

use std::{ops::Range, ptr};

use sluicegate_algorithm::{Action, Micros};
use sluicegate_store::{Charge, Counter, Hit, HitDecision, HitDecisions, Memory, StoreError};
use smallvec::SmallVec;

use super::{
    Descriptor, OverrideKind, Request,
    matching::AppliedLimit,
    penalty::{self, PenaltyOfLimit},
};

/// A request whose limits are known. The caller applies its hits to a store, and
/// [`Engine::finish`](super::Engine::finish) turns the answers into a verdict.
pub struct PreparedRequest<'s, 'd> {
    pub(super) request: &'s Request<'d>,
    pub(super) now: Micros,
    /// The outcome of matching each descriptor. A rule with several limits has several outcomes, one after the other.
    pub(super) limits: SmallVec<[PreparedLimit<'s, 'd>; 1]>,
    pub(super) charge: Charge,
    /// Whether some limits are charged in groups: a rule has several limits, or a limit has a penalty.
    pub(super) has_groups: bool,
    /// Whether an override denies the whole request, so that the other limits are only peeked.
    pub(super) is_denied_by_switch: bool,
}

/// Hits that are applied in one call.
pub struct Part {
    /// Indices in the list of hits.
    pub hits: Range<usize>,
    /// Whether the store charges all of them or none.
    pub charge: Charge,
}

impl Part {
    fn new(hits: Range<usize>, charge: Charge) -> Self {
        // A single hit does not depend on the outcome of others.
        let charge = if hits.len() == 1 { Charge::Each } else { charge };
        Self { hits, charge }
    }
}

/// A limit of a descriptor.
pub(super) struct PreparedLimit<'s, 'd> {
    /// Index of the descriptor in the request.
    pub(super) descriptor: usize,
    pub(super) outcome: Prepared<'s, 'd>,
}

/// The outcome of matching a descriptor, for one limit.
#[expect(clippy::large_enum_variant, reason = "nearly all descriptors have a limit")]
pub(super) enum Prepared<'s, 'd> {
    /// No limit applies.
    NoLimit(Option<OverrideKind>),
    /// The rule or an override makes the descriptor unlimited.
    Unlimited(Option<OverrideKind>),
    /// An override denies every hit, and the store is not called.
    Denied(AppliedLimit<'s>),
    /// A counter in the store decides.
    Charged(ChargedLimit<'s, 'd>),
}

impl<'s> Prepared<'s, '_> {
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
    /// See [`AppliedLimit::is_grouped`].
    pub(super) is_grouped: bool,
    /// The hit. Under [`Charge::All`] it includes the costs of later limits with the same counter.
    pub(super) hit: Hit,
    /// The index of the earlier limit whose hit includes this one.
    pub(super) included_in: Option<usize>,
    /// The penalty; `None` if the limit has none, and for a refund.
    pub(super) penalty: Option<Box<PenaltyOfLimit>>,
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

    /// Returns the number of hits that a store has to apply for this limit.
    fn hit_count(&self) -> usize {
        match (self.included_in, &self.penalty) {
            (Some(_), _) => 0,
            (None, None) => 1,
            (None, Some(_)) => 2,
        }
    }

    /// Returns the penalty, if it begins with this request.
    fn begun_penalty(&self) -> Option<&PenaltyOfLimit> {
        let penalty = self.penalty.as_deref()?;
        if penalty.begins(self.hit.action, &self.answer) { Some(penalty) } else { None }
    }
}

impl<'s, 'd> PreparedRequest<'s, 'd> {
    /// Creates a request whose limits are not known yet. [`Engine::prepare`](super::Engine::prepare) finds them.
    #[must_use]
    pub fn new(request: &'s Request<'d>, now: Micros) -> Self {
        Self {
            request,
            now,
            limits: SmallVec::new(),
            charge: Charge::Each,
            has_groups: false,
            is_denied_by_switch: false,
        }
    }

    /// Returns whether no counter is needed for the verdict.
    #[must_use]
    pub fn needs_no_store(&self) -> bool {
        self.charged().next().is_none()
    }

    /// Returns the hits that a store has to apply.
    #[must_use]
    pub fn hits(&self) -> SmallVec<[Hit<&Counter>; 1]> {
        let mut hits = SmallVec::new();
        for limit in self.charged() {
            if limit.included_in.is_none() {
                hits.push(limit.hit.borrowed());
                if let Some(penalty) = &limit.penalty {
                    hits.push(penalty.hit.borrowed());
                }
            }
        }
        hits
    }

    /// Returns the parts of [`Self::hits`] that a store applies in one call each.
    ///
    /// The limits of a descriptor that are charged all or none are a part, and so is each other limit. There is only
    /// one part without such limits, and under [`Charge::All`].
    #[must_use]
    pub fn parts(&self) -> SmallVec<[Part; 1]> {
        let mut parts = SmallVec::<[Part; 1]>::new();
        if !self.has_groups || self.charge == Charge::All {
            let count = self.charged().map(ChargedLimit::hit_count).sum();
            parts.push(Part::new(0..count, self.charge));
            return parts;
        }
        let mut previous = None;
        let mut first = 0;
        for limit in self.charged() {
            let next = first + limit.hit_count();
            let is_next = match previous {
                Some(previous) => limit.is_grouped && ptr::addr_eq(previous, limit.descriptor),
                None => false,
            };
            previous = Some(limit.descriptor);
            match parts.last_mut() {
                Some(part) if is_next => part.hits.end = next,
                // Also a group of one limit takes nothing if it denies.
                _ if limit.is_grouped => parts.push(Part { hits: first..next, charge: Charge::All }),
                _ => parts.push(Part::new(first..next, Charge::Each)),
            }
            first = next;
        }
        parts
    }

    /// Sets the answers of the store to [`Self::hits`], in their order.
    pub fn set_answers(&mut self, answers: HitDecisions) {
        let mut answers = answers.into_iter();
        for index in 0..self.limits.len() {
            let Prepared::Charged(limit) = &mut self.limits[index].outcome else {
                continue;
            };
            let Some(first) = limit.included_in else {
                limit.answer = answers.next().unwrap_or_else(|| Err(StoreError::missing()));
                if let Some(penalty) = &mut limit.penalty {
                    let answer = answers.next().unwrap_or_else(|| Err(StoreError::missing()));
                    penalty.set_answer(answer, &mut limit.answer);
                }
                continue;
            };
            let Prepared::Charged(first) = &self.limits[first].outcome else {
                debug_assert!(false, "a hit is included in one that does not exist");
                continue;
            };
            // Only the first descriptor of a counter receives its grant.
            let answer = first.answer.map(|answer| HitDecision { grant: None, ..answer });
            if let Prepared::Charged(limit) = &mut self.limits[index].outcome {
                limit.answer = answer;
            }
        }
        debug_assert!(answers.next().is_none(), "a store has answered more hits than there were");
    }

    /// Applies the hits to counters in memory.
    pub fn apply_in(&mut self, memory: &Memory) {
        if self.charge == Charge::All || self.has_groups {
            let hits = self.hits();
            let mut answers = HitDecisions::new();
            for Part { hits: part, charge } in self.parts() {
                answers.extend(memory.decide_all(&hits[part], charge, self.now));
            }
            drop(hits);
            self.set_answers(answers);
            return self.begin_penalties_in(memory);
        }
        let now = self.now;
        for limit in self.charged_mut() {
            limit.answer = Ok(memory.decide(&limit.hit, now));
        }
    }

    /// Returns the hits that begin penalties, because their limits have denied the request.
    #[must_use]
    pub fn penalty_hits(&self) -> SmallVec<[Hit<&Counter>; 1]> {
        let mut hits = SmallVec::new();
        for limit in self.charged() {
            if let Some(penalty) = limit.begun_penalty() {
                hits.push(Hit { action: Action::Take, ..penalty.hit.borrowed() });
            }
        }
        hits
    }

    /// Sets the answers of the store to [`Self::penalty_hits`], in their order.
    pub fn set_penalty_answers(&mut self, answers: HitDecisions) {
        let mut answers = answers.into_iter();
        for limit in self.charged_mut() {
            if limit.begun_penalty().is_none() {
                continue;
            }
            // Without an answer the limit itself denies the hit.
            if let (Some(Ok(penalty)), Ok(answer)) = (answers.next(), &mut limit.answer) {
                penalty::deny(&mut answer.decision, penalty.decision.reset);
            }
        }
        debug_assert!(answers.next().is_none(), "a store has answered more hits than there were");
    }

    /// Begins the penalties of the limits that have denied the request, with counters in memory.
    fn begin_penalties_in(&mut self, memory: &Memory) {
        let hits = self.penalty_hits();
        if hits.is_empty() {
            return;
        }
        let answers = memory.decide_all(&hits, Charge::Each, self.now);
        drop(hits);
        self.set_penalty_answers(answers);
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

    /// Replaces the takes of a descriptor by peeks, because an override of one of its limits denies it already.
    pub(super) fn peek_only_of(&mut self, descriptor: usize) {
        for limit in &mut self.limits {
            if limit.descriptor == descriptor
                && let Prepared::Charged(limit) = &mut limit.outcome
                && limit.hit.action == Action::Take
            {
                limit.hit.action = Action::Peek;
            }
        }
    }

    /// Returns whether `limit` takes no hit because it is charged in a group, all or none, and a limit of the group
    /// denies.
    pub(super) fn is_denied_together(&self, limit: &ChargedLimit<'_, '_>) -> bool {
        if !limit.is_grouped {
            return false;
        }
        for other in self.charged() {
            if ptr::addr_eq(other.descriptor, limit.descriptor) && other.denies_all() {
                return true;
            }
        }
        false
    }

    /// Adds the cost of each hit to an earlier one on the same counter, because the hits of a call under [`Charge::All`]
    /// must name different counters.
    pub(super) fn join_hits_of_same_counters(&mut self) {
        for index in 1..self.limits.len() {
            let (earlier, later) = self.limits.split_at_mut(index);
            let Prepared::Charged(limit) = &mut later[0].outcome else {
                continue;
            };
            for (first, other) in earlier.iter_mut().enumerate() {
                let Prepared::Charged(other) = &mut other.outcome else {
                    continue;
                };
                let is_same = other.hit.counter.name == limit.hit.counter.name && other.hit.action == limit.hit.action;
                if is_same {
                    other.hit.cost = other.hit.cost.saturating_add(limit.hit.cost);
                    limit.included_in = Some(first);
                    break;
                }
            }
        }
    }

    /// Returns the limits that are charged.
    pub(super) fn charged(&self) -> impl Iterator<Item = &ChargedLimit<'s, 'd>> {
        self.limits.iter().filter_map(|limit| match &limit.outcome {
            Prepared::Charged(limit) => Some(limit),
            _ => None,
        })
    }

    /// Returns the limits that are charged.
    pub(super) fn charged_mut(&mut self) -> impl Iterator<Item = &mut ChargedLimit<'s, 'd>> {
        self.limits.iter_mut().filter_map(|limit| match &mut limit.outcome {
            Prepared::Charged(limit) => Some(limit),
            _ => None,
        })
    }
}
