//! [`DenyCache`]: denials that are still valid, answered without calling the service.
//!
//! A denial is valid for the same descriptors and the same or a larger cost, until the first of its limits would allow
//! the request again. It is cached for at most one second, in addition to the second in which an operator's override
//! reaches all instances. Denials that the service made without its counters, denials with a rule's message, and
//! denials that can end at any time or count against the limit are not cached.

use std::{
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use sluicegate_cache::{Expiring, SetAssociativeCache};
use smallvec::SmallVec;

use crate::{
    check_request::{CheckRequest, Identities},
    verdict::{DecidedBy, Status, Verdict},
};

/// Number of refund counters. Each descriptor uses one of them, selected by its identity.
const REFUND_SLOTS: usize = 256;
/// Maximum age of a cached denial, and so the time until a limit that was raised in the service takes effect here.
const MAX_AGE: Duration = Duration::from_secs(1);

/// Cache of denials, by domain and descriptors.
pub(crate) struct DenyCache {
    denials: SetAssociativeCache<Denial>,
    /// Refund counters. A denial is invalid after a refund that changes the counter of one of its descriptors.
    refunds: Box<[AtomicU32; REFUND_SLOTS]>,
}

/// Result of a lookup.
pub(crate) enum Cached {
    Hit(Verdict),
    Miss(Lookup),
}

/// Identity of a request, and the number of refunds of its descriptors when it was looked up.
#[derive(Clone, Copy, Default)]
pub(crate) struct Lookup {
    identity: u128,
    refunds: u32,
}

struct Denial {
    refunds: u32,
    costs: SmallVec<[u64; 2]>,
    requested_at: Duration,
    expires_at: Duration,
    statuses: SmallVec<[Status; 1]>,
}

impl DenyCache {
    /// Creates a cache for about `max_entries` denials.
    pub(crate) fn new(max_entries: usize) -> Self {
        let refunds = Box::new([const { AtomicU32::new(0) }; REFUND_SLOTS]);
        Self { denials: SetAssociativeCache::new(max_entries), refunds }
    }

    /// Returns the cached denial of a request, or the [`Lookup`] to pass to [`insert`](Self::insert).
    ///
    /// A request that refunds hits invalidates the denials of its descriptors immediately, whether or not its call
    /// succeeds.
    pub(crate) fn get(&self, request: &CheckRequest<'_>, identities: &Identities, now: Duration) -> Cached {
        let mut identity = 0_u128;
        let mut refunds = 0_u32;
        for descriptor in identities {
            let counter = &self.refunds[*descriptor as usize % REFUND_SLOTS];
            if request.has_refund() {
                counter.fetch_add(1, Relaxed);
            }
            refunds = refunds.wrapping_add(counter.load(Relaxed));
            // The identity of the request combines those of all descriptors and depends on their order.
            identity = identity.rotate_left(1).wrapping_mul(0x9E37_79B9_7F4A_7C15_F39C_C060_5CED_C835) ^ descriptor;
        }
        let lookup = Lookup { identity, refunds };
        if !request.only_takes() {
            return Cached::Miss(lookup);
        }
        let verdict = self.denials.lookup(identity, |denial| {
            if denial.applies_to(request, refunds, now) { Some(denial.verdict_at(now)) } else { None }
        });
        match verdict {
            Some(verdict) => Cached::Hit(verdict),
            None => Cached::Miss(lookup),
        }
    }

    /// Invalidates denials that arrived while a refund was in progress: they may have been decided before it.
    pub(crate) fn record_refund(&self, request: &CheckRequest<'_>) {
        for descriptor in request.identities() {
            self.refunds[descriptor as usize % REFUND_SLOTS].fetch_add(1, Relaxed);
        }
    }

    /// Caches the verdict if it is a denial that may be cached. `requested_at` is when the check was sent.
    pub(crate) fn insert(&self, request: &CheckRequest<'_>, verdict: &Verdict, lookup: Lookup, requested_at: Duration) {
        if verdict.allowed || !request.only_takes() {
            return;
        }
        // The message of a rule contains the time to wait.
        if verdict.denial.is_some() {
            return;
        }
        let denied = verdict.statuses.iter().filter(|status| !status.allowed);
        if denied.clone().any(|status| status.denial_counts || status.fallback) {
            return;
        }
        // It is unknown which of the limits caused the denial, so the shortest time applies. An unknown time is the
        // shortest.
        let Some(retry_after) = denied.map(min_retry_after).min().flatten() else {
            return;
        };
        let denial = Denial {
            refunds: lookup.refunds,
            costs: request.costs().collect(),
            requested_at,
            expires_at: requested_at + retry_after.min(MAX_AGE),
            statuses: verdict.statuses.clone(),
        };
        self.denials.put(lookup.identity, denial);
    }
}

/// Returns the minimum time until the limit of a denied status allows the request. Returns `None` if it is unknown.
fn min_retry_after(status: &Status) -> Option<Duration> {
    let retry_after = status.retry_after?;
    if status.whole_seconds {
        // A time that was rounded up to whole seconds may be almost a second too long.
        return retry_after.checked_sub(Duration::from_secs(1));
    }
    Some(retry_after)
}

impl Expiring for Denial {
    fn expires_at(&self) -> Duration {
        self.expires_at
    }
}

impl Denial {
    /// Returns whether the denial is valid for a request of the same identity. `refunds` is the current number of refunds
    /// of its descriptors.
    fn applies_to(&self, request: &CheckRequest<'_>, refunds: u32, now: Duration) -> bool {
        now < self.expires_at
            && self.refunds == refunds
            && request.costs().zip(&self.costs).all(|(cost, denied)| cost >= *denied)
    }

    /// Returns the verdict with its times reduced by the age of the denial.
    fn verdict_at(&self, now: Duration) -> Verdict {
        let age = now.saturating_sub(self.requested_at);
        let mut statuses = self.statuses.clone();
        for status in &mut statuses {
            status.reduce_times(age);
        }
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

    fn request(descriptors: &[Descriptor<'static>], hits: u32) -> CheckRequest<'static> {
        CheckRequest {
            domain: "d".into(),
            descriptors: descriptors.iter().cloned().collect(),
            hits,
            traceparent: None,
            feedback: Vec::new(),
        }
    }

    fn user(name: &'static str) -> Descriptor<'static> {
        descriptor! { "user" => name }
    }

    fn denied(retry_after: &[Option<u64>]) -> Verdict {
        let status = |millis: &Option<u64>| Status { retry_after: millis.map(at), ..Status::default() };
        let statuses = retry_after.iter().map(status).collect();
        Verdict {
            allowed: false,
            by: DecidedBy::Server,
            statuses,
            headers: vec![("a".into(), "b".into())].into(),
            failure: None,
            denial: None,
        }
    }

    fn insert(cache: &DenyCache, request: &CheckRequest<'_>, verdict: &Verdict, now: Duration) {
        cache.insert(request, verdict, miss(cache, request), now);
    }

    /// Looks the request up at a time when all denials have expired.
    fn miss(cache: &DenyCache, request: &CheckRequest<'_>) -> Lookup {
        match cache.get(request, &request.identities().collect(), at(u64::MAX)) {
            Cached::Miss(lookup) => lookup,
            Cached::Hit(verdict) => panic!("{verdict:?}"),
        }
    }

    fn get(cache: &DenyCache, request: &CheckRequest<'_>, now: Duration) -> Option<Verdict> {
        match cache.get(request, &request.identities().collect(), now) {
            Cached::Hit(verdict) => Some(verdict),
            Cached::Miss(_) => None,
        }
    }

    #[test]
    fn a_denial_is_cached_until_it_expires_and_its_times_decrease() {
        let cache = DenyCache::new(100);
        let alice = request(&[user("alice")], 1);
        assert_eq!(get(&cache, &alice, at(0)), None);
        insert(&cache, &alice, &denied(&[Some(1_000)]), at(50));
        let verdict = get(&cache, &alice, at(300)).unwrap();
        assert_eq!(
            (verdict.decided_by(), verdict.allowed(), verdict.retry_after()),
            (DecidedBy::DenyCache, false, Some(at(750)))
        );
        assert_eq!(
            verdict.headers(),
            [("Retry-After".to_owned(), "1".to_owned())],
            "those of the service are out of date"
        );
        assert!(get(&cache, &alice, at(1_049)).is_some());
        assert_eq!(get(&cache, &alice, at(1_050)), None);
        // A longer retry-after is cached for a second only.
        insert(&cache, &alice, &denied(&[Some(60_000)]), at(2_000));
        assert_eq!(get(&cache, &alice, at(2_999)).unwrap().retry_after(), Some(at(59_001)));
        assert_eq!(get(&cache, &alice, at(3_000)), None);
        assert_eq!(get(&cache, &request(&[user("bob")], 1), at(300)), None);
        assert_eq!(get(&cache, &request(&[user("alice"), user("alice")], 1), at(300)), None);
    }

    #[test]
    fn a_denial_is_valid_for_equal_and_larger_costs() {
        let cache = DenyCache::new(100);
        insert(&cache, &request(&[user("alice"), user("x").hits(2)], 5), &denied(&[Some(1_000), None]), at(0));
        assert_eq!(
            get(&cache, &request(&[user("alice"), user("x").hits(2)], 5), at(1)),
            None,
            "one retry-after is unknown"
        );
        insert(&cache, &request(&[user("alice"), user("x").hits(2)], 5), &denied(&[Some(1_000), Some(10)]), at(0));
        let cached = |hits, own| get(&cache, &request(&[user("alice"), user("x").hits(own)], hits), at(1)).is_some();
        assert!(cached(5, 2) && cached(6, 9) && !cached(4, 2) && !cached(5, 1));
        let later = get(&cache, &request(&[user("alice"), user("x").hits(2)], 5), at(10));
        assert_eq!(later, None, "the second descriptor may be allowed again");
    }

    #[test]
    fn a_denial_that_may_be_wrong_later_is_not_cached() {
        let cache = DenyCache::new(100);
        let alice = request(&[user("alice")], 1);
        let status = Status { retry_after: Some(at(1_000)), ..Status::default() };
        for status in [
            Status { denial_counts: true, ..status.clone() },
            Status { fallback: true, ..status.clone() },
            Status { retry_after: None, ..status.clone() },
        ] {
            let verdict = Verdict { statuses: [status].into_iter().collect(), ..denied(&[]) };
            insert(&cache, &alice, &verdict, at(0));
            assert_eq!(get(&cache, &alice, at(1)), None, "{verdict:?}");
        }
        insert(&cache, &alice, &Verdict { allowed: true, ..denied(&[Some(1_000)]) }, at(0));
        assert_eq!(get(&cache, &alice, at(1)), None, "denied by a rule in shadow mode");
        let rounded =
            |seconds: u64| Status { whole_seconds: true, retry_after: Some(at(seconds * 1_000)), ..Status::default() };
        let rounded = |seconds| Verdict { statuses: [rounded(seconds)].into_iter().collect(), ..denied(&[]) };
        insert(&cache, &alice, &rounded(1), at(0));
        assert_eq!(get(&cache, &alice, at(0)), None, "almost the whole second may have passed");
        let bob = request(&[user("bob")], 1);
        insert(&cache, &bob, &rounded(2), at(0));
        assert_eq!((get(&cache, &bob, at(999)).is_some(), get(&cache, &bob, at(1_000))), (true, None));
        for descriptor in [user("alice").hits(0), user("alice").refund()] {
            let peek_or_refund = request(&[descriptor], 1);
            insert(&cache, &peek_or_refund, &denied(&[Some(1_000)]), at(0));
            assert_eq!((get(&cache, &peek_or_refund, at(1)), get(&cache, &alice, at(1))), (None, None));
        }
    }

    #[test]
    fn a_refund_invalidates_denials_from_before_and_during_it() {
        let cache = DenyCache::new(100);
        let (alice, both) = (request(&[user("alice")], 1), request(&[user("bob"), user("alice")], 1));
        insert(&cache, &alice, &denied(&[Some(1_000)]), at(0));
        insert(&cache, &both, &denied(&[Some(1_000), Some(1_000)]), at(0));
        let before = miss(&cache, &alice);
        assert_eq!(get(&cache, &request(&[user("alice").refund()], 1), at(0)), None);
        assert_eq!((get(&cache, &alice, at(1)), get(&cache, &both, at(1))), (None, None));
        cache.insert(&alice, &denied(&[Some(1_000)]), before, at(0));
        assert_eq!(get(&cache, &alice, at(1)), None);
        let meanwhile = miss(&cache, &alice);
        cache.record_refund(&request(&[user("alice").refund()], 1));
        cache.insert(&alice, &denied(&[Some(1_000)]), meanwhile, at(0));
        assert_eq!(get(&cache, &alice, at(1)), None);
    }

    #[test]
    fn the_reset_of_a_cached_denial_decreases_too() {
        let (cache, alice) = (DenyCache::new(100), request(&[user("alice")], 1));
        let mut verdict = denied(&[Some(1_000)]);
        verdict.statuses[0].reset = Some(at(5_000));
        insert(&cache, &alice, &verdict, at(50));
        assert_eq!(get(&cache, &alice, at(300)).unwrap().statuses()[0].reset, Some(at(4_750)));
    }
}
