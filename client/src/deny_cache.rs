//! Refusals that still hold: nobody needs to be asked what the answer is known to be.
//!
//! A refusal holds until the first of its limits would let the same request pass, for the same or a larger cost; but for no
//! longer than a second, in which an operator's word is in force everywhere. What the service decided without its counters,
//! and refusals that count, are not remembered.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use sluicegate_common::{Expiring, SetAssociativeCache};
use smallvec::SmallVec;

use crate::{
    check_request::{CheckRequest, Identities},
    verdict::{DecidedBy, Status, Verdict},
};

/// Refunds are told apart by so many kinds.
const REFUNDS: usize = 256;
/// Until then a limit that was raised elsewhere goes unnoticed.
const MAX_AGE: Duration = Duration::from_secs(1);

pub(crate) struct DenyCache {
    refusals: SetAssociativeCache<Denial>,
    /// How often something was given back to descriptors of each kind: a refusal from before does not hold.
    refunds: Box<[AtomicU32; REFUNDS]>,
}

/// What is known of a question.
pub(crate) enum Cached {
    Answer(Verdict),
    Nothing(Lookup),
}

/// What tells a question from all others, and how often something was given back to its descriptors before it was asked.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lookup {
    identity: u128,
    refunds: u32,
}

struct Denial {
    refunds: u32,
    costs: SmallVec<[u64; 2]>,
    since: Duration,
    until: Duration,
    statuses: SmallVec<[Status; 1]>,
}

impl DenyCache {
    /// Of about so many refusals.
    pub(crate) fn new(refusals: usize) -> Self {
        Self { refusals: SetAssociativeCache::new(refusals), refunds: Box::new([const { AtomicU32::new(0) }; REFUNDS]) }
    }

    /// The refusal of this question that still holds, or else what `put` will want to know. A question that gives back
    /// ends what is known of its descriptors: from now on, whether it comes about or not.
    pub(crate) fn get(&self, ask: &CheckRequest<'_>, identities: &Identities, now: Duration) -> Cached {
        let (mut identity, mut refunds) = (0_u128, 0_u32);
        for one in identities {
            let kind = &self.refunds[*one as usize % REFUNDS];
            if ask.gives_back() {
                kind.fetch_add(1, Relaxed);
            }
            refunds = refunds.wrapping_add(kind.load(Relaxed));
            // Of all descriptors together, in their order.
            identity = identity.rotate_left(1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835) ^ one;
        }
        let question = Lookup { identity, refunds };
        if !ask.takes() {
            return Cached::Nothing(question);
        }
        let answer = self.refusals.look(identity, |refusal| {
            let costs = ask.costs().zip(&refusal.costs).all(|(cost, refused)| cost >= *refused);
            let holds = now < refusal.until && costs && refusal.refunds == refunds;
            holds.then(|| refusal.at(now))
        });
        answer.map_or(Cached::Nothing(question), Cached::Answer)
    }

    /// Something has been given back: a refusal that overtook it does not hold either.
    pub(crate) fn refunded(&self, ask: &CheckRequest<'_>) {
        for one in ask.identities() {
            self.refunds[one as usize % REFUNDS].fetch_add(1, Relaxed);
        }
    }

    /// Remembers a refusal, if it is one that holds. `since`: when it was asked.
    pub(crate) fn put(&self, ask: &CheckRequest<'_>, verdict: &Verdict, question: Lookup, since: Duration) {
        let refusals = || verdict.statuses.iter().filter(|status| !status.allowed);
        if verdict.allowed || !ask.takes() || refusals().any(|status| status.refusal_counts || status.fallback) {
            return;
        }
        // What was rounded up to a second may be all but a second less.
        let wait = |status: &Status| match status.coarse {
            true => status.retry_after?.checked_sub(Duration::from_secs(1)),
            false => status.retry_after,
        };
        // The first that would pass may have been the one that mattered.
        let Some(wait) = refusals().map(wait).min().flatten() else {
            return;
        };
        let refusal = Denial {
            refunds: question.refunds,
            costs: ask.costs().collect(),
            since,
            until: since + wait.min(MAX_AGE),
            statuses: verdict.statuses.clone(),
        };
        self.refusals.put(question.identity, refusal);
    }
}

impl Expiring for Denial {
    fn ends(&self) -> Duration {
        self.until
    }
}

impl Denial {
    /// The verdict as it is now.
    fn at(&self, now: Duration) -> Verdict {
        let past = now.saturating_sub(self.since);
        let left = |time: Option<Duration>| time.map(|time| time.saturating_sub(past));
        let later = |status: &Status| Status {
            reset: left(status.reset),
            retry_after: left(status.retry_after),
            ..status.clone()
        };
        let statuses = self.statuses.iter().map(later).collect();
        Verdict { statuses, ..Verdict::empty(false, DecidedBy::DenyCache) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Descriptor, descriptor};

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn ask(descriptors: &[Descriptor<'static>], hits: u32) -> CheckRequest<'static> {
        CheckRequest {
            domain: "d".into(),
            descriptors: descriptors.iter().cloned().collect(),
            hits,
            traceparent: None,
            holds: Vec::new(),
        }
    }

    fn user(name: &'static str) -> Descriptor<'static> {
        descriptor! { "user" => name }
    }

    fn refused(waits: &[Option<u64>]) -> Verdict {
        let status = |wait: &Option<u64>| Status { retry_after: wait.map(at), ..Status::default() };
        let statuses = waits.iter().map(status).collect();
        Verdict {
            allowed: false,
            by: DecidedBy::Server,
            statuses,
            headers: vec![("a".into(), "b".into())],
            failure: None,
        }
    }

    fn remember(cache: &DenyCache, ask: &CheckRequest<'_>, verdict: &Verdict, now: Duration) {
        cache.put(ask, verdict, question(cache, ask), now);
    }

    /// At a time when nothing is known.
    fn question(cache: &DenyCache, ask: &CheckRequest<'_>) -> Lookup {
        match cache.get(ask, &ask.identities().collect(), at(u64::MAX)) {
            Cached::Nothing(question) => question,
            Cached::Answer(verdict) => panic!("{verdict:?}"),
        }
    }

    fn get(cache: &DenyCache, ask: &CheckRequest<'_>, now: Duration) -> Option<Verdict> {
        match cache.get(ask, &ask.identities().collect(), now) {
            Cached::Answer(verdict) => Some(verdict),
            Cached::Nothing(_) => None,
        }
    }

    #[test]
    fn a_refusal_holds_until_its_time_and_says_what_is_left_of_it() {
        let cache = DenyCache::new(100);
        let alice = ask(&[user("alice")], 1);
        assert_eq!(get(&cache, &alice, at(0)), None);
        remember(&cache, &alice, &refused(&[Some(1_000)]), at(50));
        let answer = get(&cache, &alice, at(300)).unwrap();
        assert_eq!(
            (answer.decided_by(), answer.allowed(), answer.retry_after()),
            (DecidedBy::DenyCache, false, Some(at(750)))
        );
        assert_eq!(answer.headers(), []);
        assert!(get(&cache, &alice, at(1_049)).is_some());
        assert_eq!(get(&cache, &alice, at(1_050)), None);
        // However long the service says.
        remember(&cache, &alice, &refused(&[Some(60_000)]), at(2_000));
        assert_eq!(get(&cache, &alice, at(2_999)).unwrap().retry_after(), Some(at(59_001)));
        assert_eq!(get(&cache, &alice, at(3_000)), None);
        assert_eq!(get(&cache, &ask(&[user("bob")], 1), at(300)), None);
        assert_eq!(get(&cache, &ask(&[user("alice"), user("alice")], 1), at(300)), None);
    }

    #[test]
    fn it_holds_for_the_same_and_for_larger_costs() {
        let cache = DenyCache::new(100);
        remember(&cache, &ask(&[user("alice"), user("x").hits(2)], 5), &refused(&[Some(1_000), None]), at(0));
        assert_eq!(
            get(&cache, &ask(&[user("alice"), user("x").hits(2)], 5), at(1)),
            None,
            "one never passes: not known"
        );
        remember(&cache, &ask(&[user("alice"), user("x").hits(2)], 5), &refused(&[Some(1_000), Some(10)]), at(0));
        let known = |hits, own| get(&cache, &ask(&[user("alice"), user("x").hits(own)], hits), at(1)).is_some();
        assert!(known(5, 2) && known(6, 9) && !known(4, 2) && !known(5, 1));
        let later = get(&cache, &ask(&[user("alice"), user("x").hits(2)], 5), at(10));
        assert_eq!(later, None, "the first of them would pass");
    }

    #[test]
    fn what_may_be_otherwise_is_not_remembered() {
        let cache = DenyCache::new(100);
        let alice = ask(&[user("alice")], 1);
        let status = Status { retry_after: Some(at(1_000)), ..Status::default() };
        for status in [
            Status { refusal_counts: true, ..status.clone() },
            Status { fallback: true, ..status.clone() },
            Status { retry_after: None, ..status.clone() },
        ] {
            let verdict = Verdict { statuses: [status].into_iter().collect(), ..refused(&[]) };
            remember(&cache, &alice, &verdict, at(0));
            assert_eq!(get(&cache, &alice, at(1)), None, "{verdict:?}");
        }
        remember(&cache, &alice, &Verdict { allowed: true, ..refused(&[Some(1_000)]) }, at(0));
        assert_eq!(get(&cache, &alice, at(1)), None, "a shadow rule's");
        let coarse =
            |seconds: u64| Status { coarse: true, retry_after: Some(at(seconds * 1_000)), ..Status::default() };
        let of = |seconds| Verdict { statuses: [coarse(seconds)].into_iter().collect(), ..refused(&[]) };
        remember(&cache, &alice, &of(1), at(0));
        assert_eq!(get(&cache, &alice, at(0)), None, "it may be all but over");
        let bob = ask(&[user("bob")], 1);
        remember(&cache, &bob, &of(2), at(0));
        assert_eq!((get(&cache, &bob, at(999)).is_some(), get(&cache, &bob, at(1_000))), (true, None));
        for look in [user("alice").hits(0), user("alice").refund()] {
            let look = ask(&[look], 1);
            remember(&cache, &look, &refused(&[Some(1_000)]), at(0));
            assert_eq!((get(&cache, &look, at(1)), get(&cache, &alice, at(1))), (None, None));
        }
    }

    #[test]
    fn a_refund_ends_it_also_one_that_overtakes_the_refusal() {
        let cache = DenyCache::new(100);
        let (alice, both) = (ask(&[user("alice")], 1), ask(&[user("bob"), user("alice")], 1));
        remember(&cache, &alice, &refused(&[Some(1_000)]), at(0));
        remember(&cache, &both, &refused(&[Some(1_000), Some(1_000)]), at(0));
        let before = question(&cache, &alice);
        assert_eq!(get(&cache, &ask(&[user("alice").refund()], 1), at(0)), None);
        assert_eq!((get(&cache, &alice, at(1)), get(&cache, &both, at(1))), (None, None));
        cache.put(&alice, &refused(&[Some(1_000)]), before, at(0));
        assert_eq!(get(&cache, &alice, at(1)), None);
        let meanwhile = question(&cache, &alice);
        cache.refunded(&ask(&[user("alice").refund()], 1));
        cache.put(&alice, &refused(&[Some(1_000)]), meanwhile, at(0));
        assert_eq!(get(&cache, &alice, at(1)), None);
    }
}
