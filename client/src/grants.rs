//! [`Grants`]: hits that the service granted in advance. The client uses them without a call.
//!
//! A grant belongs to one descriptor. A check is answered from grants if each of its descriptors has a grant with
//! enough hits; otherwise no grant is used, and the service is called. The client never uses more hits than were
//! granted, and none after the grant has expired. A grant's lifetime is measured on this host's monotonic clock and
//! starts when the check that returned the grant was sent, which is before the service starts to measure.
//!
//! A client that requests grants sends feedback with each check: its recent demand, and how many hits it used of a
//! grant that has expired or was too small for the check. The unused hits become available to the service again.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use smallvec::SmallVec;

use crate::{
    check_request::{CheckRequest, Descriptor, Feedback, Identities},
    lock::lock,
    verdict::{DecidedBy, GrantOffer, Status, Verdict},
};

/// Maximum number of descriptors with grants. Grants of further descriptors are not used.
const MAX_DESCRIPTORS: usize = 16_384;
/// Number of separately locked parts of the table.
const SHARDS: usize = 16;
/// Maximum number of grants per descriptor.
const MAX_GRANTS: usize = 4;
/// Interval in which the hits of a descriptor are counted.
const INTERVAL: Duration = Duration::from_millis(100);
/// Minimum number of hits per interval for which a grant is requested.
const MIN_DEMAND: u64 = 8;
/// Time after which a response to a grant request is no longer expected.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(1);

/// Table of grants, by descriptor.
#[derive(Default)]
pub(crate) struct Grants {
    shards: [Mutex<Shard>; SHARDS],
    /// Number of descriptors in all shards.
    count: AtomicUsize,
    /// Whether the client requests grants and reports how it used them.
    sends_feedback: bool,
}

type Shard = HashMap<u128, EntityGrants>;

/// Grants and demand of one descriptor.
#[derive(Default)]
struct EntityGrants {
    grants: SmallVec<[Grant; 1]>,
    demand: Demand,
    /// Time at which the pending request for another grant was sent.
    requested_at: Option<Duration>,
}

struct Grant {
    domain: String,
    descriptor: Descriptor<'static>,
    hits: u64,
    remaining: u64,
    expires_at: Duration,
    id: Arc<str>,
    status: Status,
}

/// Hits that were taken from a grant of one descriptor.
struct TakenHits {
    status: Status,
    /// Time at which the grant expires.
    expires_at: Duration,
}

/// Grant with unused hits, to be returned to the service.
pub(crate) struct UnspentGrant {
    pub(crate) domain: String,
    pub(crate) descriptor: Descriptor<'static>,
    pub(crate) remaining: u64,
    pub(crate) feedback: Feedback,
}

/// Number of hits in the current interval and in the previous one.
#[derive(Default)]
struct Demand {
    interval: u64,
    hits: u64,
    previous: u64,
}

impl Demand {
    /// Returns the index of the interval that contains `now`.
    ///
    /// A division of 128 bits would take a tenth of the cost of a check from grants.
    fn interval_at(now: Duration) -> u64 {
        now.as_secs() * u64::from(1_000_000_000 / INTERVAL.subsec_nanos())
            + u64::from(now.subsec_nanos() / INTERVAL.subsec_nanos())
    }

    fn record(&mut self, hits: u64, now: Duration) {
        let interval = Self::interval_at(now);
        if interval != self.interval {
            self.previous = if interval == self.interval + 1 { self.hits } else { 0 };
            self.interval = interval;
            self.hits = 0;
        }
        self.hits = self.hits.saturating_add(hits);
    }

    /// Returns the number of hits that are expected per interval, or 0 if they are too few to request a grant.
    fn expected(&self) -> u64 {
        let hits = self.hits.max(self.previous);
        if hits < MIN_DEMAND { 0 } else { hits }
    }
}

/// Returns the identity and the cost of each descriptor.
fn hits(request: &CheckRequest<'_>, identities: &Identities) -> impl Iterator<Item = (u128, u64)> {
    identities.iter().copied().zip(request.costs())
}

impl Grants {
    pub(crate) fn new(sends_feedback: bool) -> Self {
        Self { sends_feedback, ..Self::default() }
    }

    /// Returns `true` if there are no grants and none are requested.
    pub(crate) fn is_empty(&self) -> bool {
        !self.sends_feedback && self.count.load(Relaxed) == 0
    }

    /// Takes the cost of each descriptor from its grants. Returns `None` and takes nothing if any descriptor has too
    /// few granted hits, or peeks or refunds.
    pub(crate) fn spend(&self, request: &CheckRequest<'_>, identities: &Identities, now: Duration) -> Option<Verdict> {
        if !request.only_takes() || identities.is_empty() {
            return None;
        }
        let mut verdict = Verdict::empty(true, DecidedBy::Grant);
        let mut expirations = SmallVec::<[Duration; 2]>::new();
        for (identity, cost) in hits(request, identities) {
            let Some(TakenHits { status, expires_at }) = self.take(identity, cost, now) else {
                break;
            };
            verdict.statuses.push(status);
            expirations.push(expires_at);
        }
        if expirations.len() == identities.len() {
            return Some(verdict);
        }
        // One descriptor has too few hits. Hits taken for the descriptors before it are put back, unless their grant
        // was returned to the service in the meantime.
        for ((identity, cost), expires_at) in hits(request, identities).zip(&expirations) {
            self.put_back(identity, cost, *expires_at);
        }
        if self.sends_feedback {
            // The descriptors after it were requested too, so their demand is recorded.
            for (identity, cost) in hits(request, identities).skip(expirations.len() + 1) {
                if let Some(entry) = self.entry(&mut self.shard(identity), identity, now) {
                    entry.demand.record(cost, now);
                }
            }
        }
        None
    }

    /// Puts hits back into the descriptor's grant with this expiry time, if there still is one.
    fn put_back(&self, identity: u128, cost: u64, expires_at: Duration) {
        let mut shard = self.shard(identity);
        let Some(entry) = shard.get_mut(&identity) else {
            return;
        };
        if let Some(grant) = entry.grants.iter_mut().find(|grant| grant.expires_at == expires_at) {
            grant.remaining = grant.remaining.saturating_add(cost).min(grant.hits);
        }
    }

    /// Takes hits from one grant of a descriptor. Records the demand if the client requests grants.
    fn take(&self, identity: u128, cost: u64, now: Duration) -> Option<TakenHits> {
        let mut shard = self.shard(identity);
        let entry = if self.sends_feedback {
            let entry = self.entry(&mut shard, identity, now)?;
            entry.demand.record(cost, now);
            entry
        } else {
            shard.get_mut(&identity)?
        };
        let grants = &mut entry.grants;
        if let Some(grant) = grants.iter_mut().find(|grant| now < grant.expires_at && grant.remaining >= cost) {
            grant.remaining -= cost;
            let status = Status { remaining: grant.remaining, ..grant.status.clone() };
            return Some(TakenHits { status, expires_at: grant.expires_at });
        }
        if !self.sends_feedback {
            // Usage is not reported, so expired grants are no longer needed.
            grants.retain(|grant| now < grant.expires_at);
            if grants.is_empty() {
                shard.remove(&identity);
                self.count.fetch_sub(1, Relaxed);
            }
        }
        None
    }

    /// Returns the feedback to send with a check. The list is empty if the client does not request grants, or if there
    /// is nothing to report.
    pub(crate) fn feedback(&self, request: &CheckRequest<'_>, now: Duration) -> Vec<Feedback> {
        if !self.sends_feedback || !request.only_takes() {
            return Vec::new();
        }
        let mut all = Vec::with_capacity(request.descriptors.len());
        for (identity, cost) in request.identities().zip(request.costs()) {
            all.push(self.feedback_for(identity, cost, now));
        }
        if all.iter().all(|feedback| *feedback == Feedback::default()) { Vec::new() } else { all }
    }

    /// Returns the feedback about one descriptor, and removes the grant that is reported as finished.
    fn feedback_for(&self, identity: u128, cost: u64, now: Duration) -> Feedback {
        let mut shard = self.shard(identity);
        let Some(EntityGrants { grants, demand, requested_at }) = shard.get_mut(&identity) else {
            return Feedback::default();
        };
        let finished = grants.iter().position(|grant| grant.expires_at <= now || grant.remaining < cost);
        let finished = finished.map(|index| grants.swap_remove(index));
        let finished_grant = finished.map(|grant| (grant.id, grant.hits - grant.remaining));
        // Only one check at a time requests a grant. Meanwhile, the service decides the other checks.
        let pending = requested_at.is_some_and(|since| now.saturating_sub(since) < RESPONSE_TIMEOUT);
        let available = grants.iter().filter(|grant| now < grant.expires_at).map(|grant| grant.remaining).sum();
        let full = grants.len() >= MAX_GRANTS;
        let demand = if pending || full { 0 } else { demand.expected().saturating_sub(available) };
        if demand > 0 {
            *requested_at = Some(now);
        }
        Feedback { demand, finished_grant, sample: None }
    }

    /// Stores the grants of a verdict. `sent_at` is when the check was sent.
    pub(crate) fn store(&self, request: &CheckRequest<'_>, verdict: &Verdict, sent_at: Duration) {
        self.request_finished(request);
        // A check that refunds hits has no use for grants.
        if request.has_refund() || verdict.statuses.iter().all(|status| status.grant.is_none()) {
            return;
        }
        for (descriptor, status) in request.descriptors.iter().zip(&verdict.statuses) {
            let Some(GrantOffer { hits, ttl, id }) = status.grant.clone() else {
                continue;
            };
            let expires_at = sent_at.saturating_add(ttl);
            let status = Status { allowed: true, retry_after: None, grant: None, ..status.clone() };
            let identity = request.identity_of(descriptor);
            let domain = request.domain.to_string();
            let descriptor = descriptor.owned();
            let mut shard = self.shard(identity);
            if let Some(entry) = self.entry(&mut shard, identity, sent_at)
                && entry.grants.len() < MAX_GRANTS
            {
                entry.grants.push(Grant { domain, descriptor, hits, remaining: hits, expires_at, id, status });
            }
        }
    }

    /// Records that a check has been answered or has failed, so that the next check may request a grant.
    pub(crate) fn request_finished(&self, request: &CheckRequest<'_>) {
        for (identity, feedback) in request.identities().zip(&request.feedback) {
            if feedback.demand > 0
                && let Some(entry) = self.shard(identity).get_mut(&identity)
            {
                entry.requested_at = None;
            }
        }
    }

    /// Removes all grants and returns those with unused hits, to be returned to the service.
    pub(crate) fn take_all(&self, now: Duration) -> Vec<UnspentGrant> {
        let mut all = Vec::new();
        for shard in &self.shards {
            let shard = std::mem::take(&mut *lock(shard));
            self.count.fetch_sub(shard.len(), Relaxed);
            for entry in shard.into_values() {
                for Grant { domain, descriptor, hits, remaining, expires_at, id, .. } in entry.grants {
                    // Feedback can return the hits of an expired grant, too. A refund cannot.
                    let is_returnable = self.sends_feedback || expires_at > now;
                    if remaining == 0 || !is_returnable {
                        continue;
                    }
                    let feedback = Feedback { demand: 0, finished_grant: Some((id, hits - remaining)), sample: None };
                    all.push(UnspentGrant { domain, descriptor, remaining, feedback });
                }
            }
        }
        all
    }

    /// Returns `true` if unused hits are returned as feedback, `false` if they are refunded.
    pub(crate) fn reports_usage(&self) -> bool {
        self.sends_feedback
    }

    /// Returns the descriptor's entry, and creates it if necessary. Returns `None` if the shard is full even after its
    /// unused entries were removed.
    fn entry<'s>(&self, shard: &'s mut Shard, identity: u128, now: Duration) -> Option<&'s mut EntityGrants> {
        if shard.len() >= MAX_DESCRIPTORS / SHARDS && !shard.contains_key(&identity) {
            let before = shard.len();
            let interval = Demand::interval_at(now);
            shard.retain(|_, entry| {
                entry.grants.retain(|grant| now < grant.expires_at);
                !entry.grants.is_empty() || entry.demand.interval + 1 >= interval && self.sends_feedback
            });
            self.count.fetch_sub(before - shard.len(), Relaxed);
            if shard.len() >= MAX_DESCRIPTORS / SHARDS {
                return None;
            }
        }
        Some(shard.entry(identity).or_insert_with(|| {
            self.count.fetch_add(1, Relaxed);
            EntityGrants::default()
        }))
    }

    fn shard(&self, identity: u128) -> MutexGuard<'_, Shard> {
        lock(&self.shards[identity as usize % SHARDS])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn request(users: &[&'static str], hits: u32) -> CheckRequest<'static> {
        let descriptors = users.iter().map(|user| descriptor! { "user" => *user }).collect();
        CheckRequest { domain: "d".into(), descriptors, hits, traceparent: None, feedback: Vec::new() }
    }

    fn granted(offers: &[Option<(u64, u64)>]) -> Verdict {
        let offer = |(hits, ttl)| GrantOffer { hits, ttl: at(ttl), id: "7".into() };
        let status =
            |grant: &Option<(u64, u64)>| Status { allowed: true, grant: grant.map(offer), ..Status::default() };
        Verdict { statuses: offers.iter().map(status).collect(), ..Verdict::empty(true, DecidedBy::Server) }
    }

    fn spend(grants: &Grants, request: &CheckRequest<'_>, now: Duration) -> Option<u64> {
        let verdict = grants.spend(request, &request.identities().collect(), now)?;
        assert_eq!((verdict.decided_by(), verdict.allowed()), (DecidedBy::Grant, true));
        verdict.statuses().iter().map(|status| status.remaining).min()
    }

    #[test]
    fn a_grant_is_spent_to_the_last_hit_and_no_further() {
        let grants = Grants::default();
        assert!(grants.is_empty());
        grants.store(&request(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        assert_eq!(spend(&grants, &request(&["a"], 3), at(1)), Some(2));
        assert_eq!(spend(&grants, &request(&["a"], 3), at(1)), None, "3 of 2");
        assert_eq!(spend(&grants, &request(&["a"], 2), at(1)), Some(0));
        assert_eq!(spend(&grants, &request(&["a"], 1), at(1)), None);
        assert_eq!(spend(&grants, &request(&["b"], 1), at(1)), None);
    }

    #[test]
    fn a_grant_expires_its_lifetime_after_the_check_was_sent() {
        let grants = Grants::default();
        grants.store(&request(&["a"], 1), &granted(&[Some((5, 1_000))]), at(100));
        assert_eq!(spend(&grants, &request(&["a"], 1), at(1_099)), Some(4));
        assert_eq!(spend(&grants, &request(&["a"], 1), at(1_100)), None);
        assert!(grants.is_empty(), "the expired grant is removed");
    }

    #[test]
    fn no_grant_is_used_unless_all_descriptors_have_one() {
        let grants = Grants::default();
        grants.store(&request(&["a", "b"], 1), &granted(&[Some((5, 1_000)), None]), at(0));
        assert_eq!(spend(&grants, &request(&["a", "b"], 2), at(1)), None);
        grants.store(&request(&["b"], 1), &granted(&[Some((3, 1_000))]), at(0));
        assert_eq!(spend(&grants, &request(&["a", "b"], 2), at(1)), Some(1));
        assert_eq!(spend(&grants, &request(&["a", "b"], 2), at(1)), None);
        assert_eq!(spend(&grants, &request(&["a"], 3), at(1)), Some(0), "the three unused hits");
    }

    #[test]
    fn several_grants_of_a_descriptor_expire_separately() {
        let grants = Grants::default();
        grants.store(&request(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        grants.store(&request(&["a"], 1), &granted(&[Some((4, 5_000))]), at(500));
        assert_eq!(spend(&grants, &request(&["a"], 1), at(999)), Some(4));
        assert_eq!(spend(&grants, &request(&["a"], 1), at(1_000)), Some(3), "from the second");
        assert_eq!(spend(&grants, &request(&["a"], 4), at(1_000)), None, "the rest of the first grant has expired");
        assert_eq!(spend(&grants, &request(&["a"], 3), at(5_499)), Some(0));
        for _ in 0..10 {
            grants.store(&request(&["b"], 1), &granted(&[Some((1, 1_000))]), at(0));
        }
        let spent = (0..10).filter(|_| spend(&grants, &request(&["b"], 1), at(1)).is_some()).count();
        assert_eq!(spent, MAX_GRANTS, "further grants are not stored");
    }

    #[test]
    fn feedback_contains_the_demand_and_the_used_hits() {
        let grants = Grants::new(true);
        let alice = request(&["a"], 3);
        let sent = |now| grants.feedback(&alice, at(now));
        let feedback = |demand, finished: Option<(&str, u64)>| Feedback {
            demand,
            finished_grant: finished.map(|(id, used)| (id.into(), used)),
            sample: None,
        };
        assert_eq!(spend(&grants, &alice, at(0)), None);
        assert_eq!(sent(0), [], "3 hits are too few");
        assert_eq!((spend(&grants, &alice, at(50)), spend(&grants, &alice, at(99))), (None, None));
        assert_eq!(sent(99), [feedback(9, None)]);
        grants.store(&alice, &granted(&[Some((10, 1_000))]), at(99));
        assert_eq!(spend(&grants, &alice, at(150)), Some(7));
        let requested = |alice: &CheckRequest<'static>, demand| CheckRequest {
            feedback: vec![feedback(demand, None)],
            ..alice.clone()
        };
        grants.request_finished(&requested(&alice, 9));
        assert_eq!(sent(150), [feedback(2, None)], "the previous interval's demand less the available hits");
        assert_eq!((spend(&grants, &alice, at(150)), spend(&grants, &alice, at(150))), (Some(4), Some(1)));
        assert_eq!(spend(&grants, &alice, at(150)), None);
        assert_eq!(sent(150), [feedback(0, Some(("7", 9)))], "another check has requested a grant");
        assert_eq!(sent(150), [], "usage is reported once");
        grants.request_finished(&requested(&alice, 0));
        assert_eq!(sent(150), [], "this check had not requested a grant");
        grants.request_finished(&requested(&alice, 2));
        assert_eq!(sent(150), [feedback(12, None)]);
        assert_eq!((sent(1_149), sent(1_150)), (Vec::new(), vec![feedback(12, None)]), "the request timed out");
        grants.store(&requested(&alice, 12), &granted(&[Some((10, 1_000))]), at(150));
        assert_eq!(spend(&grants, &alice, at(1_150)), None, "the grant has expired");
        assert_eq!(sent(1_150), [feedback(0, Some(("7", 0)))], "there was no recent demand");
        assert_eq!(Grants::default().feedback(&alice, at(0)), [], "grants are not requested");
    }

    #[test]
    fn unused_hits_are_returned_once() {
        let grants = Grants::default();
        grants.store(&request(&["a", "b"], 1), &granted(&[Some((5, 1_000)), Some((7, 10))]), at(0));
        assert_eq!(spend(&grants, &request(&["a"], 2), at(1)), Some(3));
        let all = grants.take_all(at(20));
        let all = all.into_iter().map(|grant| (grant.domain, grant.descriptor, grant.remaining, grant.feedback));
        let feedback = Feedback { demand: 0, finished_grant: Some(("7".into(), 2)), sample: None };
        assert_eq!(all.collect::<Vec<_>>(), [("d".to_owned(), descriptor! { "user" => "a" }, 3, feedback)]);
        assert!(grants.is_empty() && grants.take_all(at(20)).is_empty());
        assert_eq!(spend(&grants, &request(&["a"], 1), at(21)), None);
    }

    #[test]
    fn a_peek_is_not_answered_from_grants() {
        let grants = Grants::default();
        grants.store(&request(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        let mut peek = request(&["a"], 1);
        peek.descriptors[0] = peek.descriptors[0].clone().hits(0);
        assert_eq!(spend(&grants, &peek, at(1)), None);
    }

    #[test]
    fn the_number_of_descriptors_is_bounded() {
        let grants = Grants::default();
        for number in 0..MAX_DESCRIPTORS as u64 + 10 {
            let descriptors = std::iter::once(descriptor! { "user" => number.to_string() }).collect();
            let request =
                CheckRequest { domain: "d".into(), descriptors, hits: 1, traceparent: None, feedback: Vec::new() };
            grants.store(&request, &granted(&[Some((5, 1_000))]), at(0));
        }
        let stored = grants.take_all(at(1)).len();
        assert!((MAX_DESCRIPTORS / 2..=MAX_DESCRIPTORS).contains(&stored), "{stored}");
    }

    /// Returns requests for one more descriptor than a shard has room for.
    fn requests_of_one_shard() -> Vec<CheckRequest<'static>> {
        let request = |number: u64| {
            let descriptors = std::iter::once(descriptor! { "user" => number.to_string() }).collect();
            CheckRequest { domain: "d".into(), descriptors, hits: 1, traceparent: None, feedback: Vec::new() }
        };
        let is_in_first_shard = |request: &CheckRequest<'static>| {
            request.identities().all(|identity| (identity as usize).is_multiple_of(SHARDS))
        };
        (0..).map(request).filter(is_in_first_shard).take(MAX_DESCRIPTORS / SHARDS + 1).collect()
    }

    #[test]
    fn a_full_table_removes_expired_grants() {
        let (grants, requests) = (Grants::new(true), requests_of_one_shard());
        let (new, old) = requests.split_last().unwrap();
        for (index, request) in old.iter().enumerate() {
            let ttl = if index % 2 == 0 { 1_000 } else { 10_000 };
            grants.store(request, &granted(&[Some((5, ttl))]), at(0));
        }
        let remaining = |now| {
            grants.store(new, &granted(&[Some((5, 10_000))]), at(now));
            spend(&grants, new, at(now))
        };
        assert_eq!((remaining(999), remaining(1_000)), (None, Some(4)));
        assert_eq!(grants.count.load(Relaxed), old.len() / 2 + 1);
    }

    #[test]
    fn a_full_table_keeps_descriptors_that_were_used_in_the_previous_interval() {
        let (grants, requests) = (Grants::new(true), requests_of_one_shard());
        let (new, old) = requests.split_last().unwrap();
        for request in old {
            assert_eq!(spend(&grants, request, at(100)), None);
        }
        let count = |now| {
            assert_eq!(spend(&grants, new, at(now)), None);
            grants.count.load(Relaxed)
        };
        assert_eq!((count(299), count(300)), (old.len(), 1));
    }

    #[test]
    fn other_descriptors_do_not_remove_a_grant_whose_usage_was_not_reported() {
        let (grants, requests) = (Grants::new(true), requests_of_one_shard());
        grants.store(&requests[0], &granted(&[Some((5, 100))]), at(0));
        assert_eq!(spend(&grants, &requests[1], at(1_000)), None);
        let finished_grant = Some(("7".into(), 0));
        assert_eq!(grants.feedback(&requests[0], at(1_000)), [Feedback { finished_grant, ..Feedback::default() }]);
    }

    #[test]
    fn a_grant_is_requested_for_eight_hits_per_interval() {
        let demand = |hits| {
            let (grants, alice) = (Grants::new(true), request(&["a"], hits));
            assert_eq!(spend(&grants, &alice, at(0)), None);
            grants.feedback(&alice, at(0)).first().map(|feedback| feedback.demand)
        };
        assert_eq!((demand(7), demand(8)), (None, Some(8)));
    }

    #[test]
    fn a_grant_is_finished_if_it_is_too_small_or_expired() {
        let (grants, both) = (Grants::new(true), request(&["a", "b"], 3));
        grants.store(&request(&["a"], 1), &granted(&[Some((3, 1_000))]), at(0));
        assert_eq!(spend(&grants, &both, at(1)), None, "the second descriptor has no grant");
        assert_eq!(grants.feedback(&both, at(1)), [], "the grant has exactly enough hits");
        let (grants, alice) = (Grants::new(true), request(&["a"], 8));
        for _ in 0..2 {
            grants.store(&alice, &granted(&[Some((10, 1_000))]), at(0));
        }
        assert_eq!(spend(&grants, &alice, at(1_000)), None, "both grants have expired");
        let finished_grant = Some(("7".into(), 0));
        assert_eq!(grants.feedback(&alice, at(1_000)), [Feedback { demand: 8, finished_grant, sample: None }]);
    }

    #[test]
    fn a_status_from_a_grant_is_allowed_and_has_no_retry_after() {
        let (grants, alice) = (Grants::default(), request(&["a"], 1));
        let mut verdict = granted(&[Some((5, 1_000))]);
        verdict.statuses[0].allowed = false;
        verdict.statuses[0].retry_after = Some(at(7));
        grants.store(&alice, &verdict, at(0));
        let verdict = grants.spend(&alice, &alice.identities().collect(), at(1)).unwrap();
        assert_eq!(verdict.statuses(), [Status { allowed: true, remaining: 4, ..Status::default() }]);
    }

    #[test]
    fn neither_used_nor_expired_hits_are_refunded() {
        let grants = Grants::default();
        grants.store(&request(&["a", "b"], 1), &granted(&[Some((5, 1_000)), Some((7, 10))]), at(0));
        assert_eq!(spend(&grants, &request(&["a"], 5), at(1)), Some(0));
        assert!(grants.take_all(at(10)).is_empty());
        assert!(!grants.reports_usage() && Grants::new(true).reports_usage());
    }
}
