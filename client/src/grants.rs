//! Hits that the service has handed out in advance: they are spent without asking.
//!
//! A grant is a descriptor's. A check is answered from grants if each of its descriptors has one with enough left; else
//! none of them is touched, and the service is asked. Never is more spent than was granted, nor after the grant's end: its
//! life is counted on this machine's own monotonic clock, from the moment at which the check that brought it was sent,
//! which is before the service began to count.
//!
//! A client that wants grants says with each check how many hits it has had lately, and what has become of the grant that
//! was not enough for this one, or has ended: what was not spent is the service's again.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use smallvec::SmallVec;

use crate::{
    check_request::{CheckRequest, Descriptor, Feedback, Identities},
    verdict::{DecidedBy, Status, Verdict},
};

/// Descriptors that are known at most: of a service that hands out more, the rest is not used.
const MOST: usize = 16_384;
/// Locks.
const PARTS: usize = 16;
/// Grants of one descriptor at most.
const MOST_GRANTS: usize = 4;
/// Hits are counted in slices of time. Of a descriptor that has had fewer in one, none are wanted.
const SLICE: Duration = Duration::from_millis(100);
const LEAST: u64 = 8;
/// An answer that has not come by then does not come.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a service grants: so many hits, for so long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GrantOffer {
    pub(crate) hits: u64,
    pub(crate) ttl: Duration,
    pub(crate) id: Arc<str>,
}

#[derive(Default)]
pub(crate) struct Grants {
    parts: [Mutex<Part>; PARTS],
    count: AtomicUsize,
    /// The service is told that grants are wanted.
    wants: bool,
}

type Part = HashMap<u128, EntityGrants>;

/// A descriptor, and what it has.
#[derive(Default)]
struct EntityGrants {
    grants: SmallVec<[Grant; 1]>,
    demand: Demand,
    /// Since when an answer is waited for that may bring more.
    asking: Option<Duration>,
}

struct Grant {
    domain: String,
    descriptor: Descriptor<'static>,
    hits: u64,
    left: u64,
    until: Duration,
    id: Arc<str>,
    status: Status,
}

/// Something left at the end.
pub(crate) struct UnspentGrant {
    pub(crate) domain: String,
    pub(crate) descriptor: Descriptor<'static>,
    pub(crate) left: u64,
    pub(crate) hold: Feedback,
}

/// Hits in this slice of time, and in the one before.
#[derive(Default)]
struct Demand {
    slice: u64,
    hits: u64,
    before: u64,
}

impl Demand {
    /// The number of the slice. In 64 bits: a division of 128 would be a tenth of a hit's cost.
    fn at(now: Duration) -> u64 {
        now.as_secs() * u64::from(1_000_000_000 / SLICE.subsec_nanos())
            + u64::from(now.subsec_nanos() / SLICE.subsec_nanos())
    }

    fn add(&mut self, hits: u64, now: Duration) {
        let slice = Self::at(now);
        if slice != self.slice {
            self.before = if slice == self.slice + 1 { self.hits } else { 0 };
            (self.slice, self.hits) = (slice, 0);
        }
        self.hits = self.hits.saturating_add(hits);
    }

    fn wanted(&self) -> u64 {
        let hits = self.hits.max(self.before);
        if hits < LEAST { 0 } else { hits }
    }
}

impl Grants {
    pub(crate) fn new(wants: bool) -> Self {
        Self { wants, ..Self::default() }
    }

    /// Whether nobody has any, nor wants any.
    pub(crate) fn is_empty(&self) -> bool {
        !self.wants && self.count.load(Relaxed) == 0
    }

    /// Takes the hits from the grants of all descriptors, if they have enough.
    pub(crate) fn spend(&self, ask: &CheckRequest<'_>, identities: &Identities, now: Duration) -> Option<Verdict> {
        if !ask.takes() || identities.is_empty() {
            return None;
        }
        let asked = || identities.iter().copied().zip(ask.costs());
        let mut verdict = Verdict::empty(true, DecidedBy::Grant);
        let mut ends = SmallVec::<[Duration; 2]>::new();
        for (status, end) in asked().map_while(|(identity, cost)| self.take(identity, cost, now)) {
            verdict.statuses.push(status);
            ends.push(end);
        }
        if ends.len() == identities.len() {
            return Some(verdict);
        }
        // One has none. What the others before it took goes back, unless it has been given away by now.
        for ((identity, cost), end) in asked().zip(&ends) {
            let mut part = self.part(identity);
            let grants = part.get_mut(&identity).map(|holder| &mut holder.grants);
            if let Some(grant) = grants.and_then(|grants| grants.iter_mut().find(|grant| grant.until == *end)) {
                grant.left = grant.left.saturating_add(cost).min(grant.hits);
            }
        }
        // Those behind it are asked for as well.
        for (identity, cost) in asked().skip(ends.len() + 1).filter(|_| self.wants) {
            if let Some(holder) = self.holder(&mut self.part(identity), identity, now) {
                holder.demand.add(cost, now);
            }
        }
        None
    }

    /// And when that grant ends. Somebody asks, which is counted if grants are wanted.
    fn take(&self, identity: u128, cost: u64, now: Duration) -> Option<(Status, Duration)> {
        let mut part = self.part(identity);
        let holder = if self.wants {
            let holder = self.holder(&mut part, identity, now)?;
            holder.demand.add(cost, now);
            holder
        } else {
            part.get_mut(&identity)?
        };
        let grants = &mut holder.grants;
        if let Some(grant) = grants.iter_mut().find(|grant| now < grant.until && grant.left >= cost) {
            grant.left -= cost;
            return Some((Status { remaining: grant.left, ..grant.status.clone() }, grant.until));
        }
        if !self.wants {
            // Nobody is told what became of it.
            grants.retain(|grant| now < grant.until);
            if grants.is_empty() {
                part.remove(&identity);
                self.count.fetch_sub(1, Relaxed);
            }
        }
        None
    }

    /// What to say with a check that is asked now: nothing, unless grants are wanted.
    pub(crate) fn holds(&self, ask: &CheckRequest<'_>, now: Duration) -> Vec<Feedback> {
        if !self.wants || !ask.takes() {
            return Vec::new();
        }
        let hold = |(identity, cost): (u128, u64)| {
            let mut part = self.part(identity);
            let Some(EntityGrants { grants, demand, asking }) = part.get_mut(&identity) else {
                return Feedback::default();
            };
            let done = grants.iter().position(|grant| grant.until <= now || grant.left < cost);
            let reports = done.map(|place| grants.swap_remove(place)).map(|grant| (grant.id, grant.hits - grant.left));
            // One asks for more, while the others are answered by the service.
            let asked = asking.is_some_and(|since| now.saturating_sub(since) < PATIENCE);
            let left = grants.iter().filter(|grant| now < grant.until).map(|grant| grant.left).sum();
            let full = grants.len() >= MOST_GRANTS;
            let wants = if asked || full { 0 } else { demand.wanted().saturating_sub(left) };
            if wants > 0 {
                *asking = Some(now);
            }
            Feedback { demand: wants, reports, sample: None }
        };
        let holds: Vec<_> = ask.identities().zip(ask.costs()).map(hold).collect();
        if holds.iter().all(|hold| *hold == Feedback::default()) { Vec::new() } else { holds }
    }

    /// Keeps what an answer grants. `since`: when it was asked.
    pub(crate) fn keep(&self, ask: &CheckRequest<'_>, verdict: &Verdict, since: Duration) {
        self.answered(ask);
        // Whoever gives back wants nothing in return.
        if ask.gives_back() || verdict.statuses.iter().all(|status| status.grant.is_none()) {
            return;
        }
        for ((descriptor, status), identity) in ask.descriptors.iter().zip(&verdict.statuses).zip(ask.identities()) {
            let Some(GrantOffer { hits, ttl: life, id }) = status.grant.clone() else {
                continue;
            };
            let until = since.saturating_add(life);
            let status = Status { allowed: true, retry_after: None, grant: None, ..status.clone() };
            let (domain, descriptor) = (ask.domain.to_string(), descriptor.owned());
            let mut part = self.part(identity);
            let grants = self.holder(&mut part, identity, since).map(|holder| &mut holder.grants);
            if let Some(grants) = grants.filter(|grants| grants.len() < MOST_GRANTS) {
                grants.push(Grant { domain, descriptor, hits, left: hits, until, id, status });
            }
        }
    }

    /// A check has its answer, or none will come: the next one may ask for more.
    pub(crate) fn answered(&self, ask: &CheckRequest<'_>) {
        for (identity, hold) in ask.identities().zip(&ask.holds) {
            if hold.demand > 0
                && let Some(holder) = self.part(identity).get_mut(&identity)
            {
                holder.asking = None;
            }
        }
    }

    /// All that is left, to be given back: nothing of it is spent any more.
    pub(crate) fn take_all(&self, now: Duration) -> Vec<UnspentGrant> {
        let mut all = Vec::new();
        for part in &self.parts {
            let part = std::mem::take(&mut *part.lock().unwrap_or_else(PoisonError::into_inner));
            self.count.fetch_sub(part.len(), Relaxed);
            let alive = part.into_values().flat_map(|holder| holder.grants);
            // Whoever is told can give back what has ended, too.
            all.extend(alive.filter(|grant| grant.left > 0 && (self.wants || grant.until > now)).map(|grant| {
                let Grant { domain, descriptor, hits, left, id, .. } = grant;
                UnspentGrant {
                    domain,
                    descriptor,
                    left,
                    hold: Feedback { demand: 0, reports: Some((id, hits - left)), sample: None },
                }
            }));
        }
        all
    }

    /// Whether what is left is told rather than given back as hits of its own.
    pub(crate) fn are_told(&self) -> bool {
        self.wants
    }

    /// The descriptor's, which is new if nobody has asked for it lately; none where there is no room for it.
    fn holder<'p>(&self, part: &'p mut Part, identity: u128, now: Duration) -> Option<&'p mut EntityGrants> {
        if part.len() >= MOST / PARTS && !part.contains_key(&identity) {
            let before = part.len();
            let slice = Demand::at(now);
            part.retain(|_, holder| {
                holder.grants.retain(|grant| now < grant.until);
                !holder.grants.is_empty() || holder.demand.slice + 1 >= slice && self.wants
            });
            self.count.fetch_sub(before - part.len(), Relaxed);
            if part.len() >= MOST / PARTS {
                return None;
            }
        }
        Some(part.entry(identity).or_insert_with(|| {
            self.count.fetch_add(1, Relaxed);
            EntityGrants::default()
        }))
    }

    fn part(&self, identity: u128) -> MutexGuard<'_, Part> {
        self.parts[identity as usize % PARTS].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::descriptor;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn ask(users: &[&'static str], hits: u32) -> CheckRequest<'static> {
        let descriptors = users.iter().map(|user| descriptor! { "user" => *user }).collect();
        CheckRequest { domain: "d".into(), descriptors, hits, traceparent: None, holds: Vec::new() }
    }

    fn granted(offers: &[Option<(u64, u64)>]) -> Verdict {
        let offer = |(hits, life)| GrantOffer { hits, ttl: at(life), id: "7".into() };
        let status =
            |grant: &Option<(u64, u64)>| Status { allowed: true, grant: grant.map(offer), ..Status::default() };
        Verdict { statuses: offers.iter().map(status).collect(), ..Verdict::empty(true, DecidedBy::Server) }
    }

    fn spend(grants: &Grants, ask: &CheckRequest<'_>, now: Duration) -> Option<u64> {
        let verdict = grants.spend(ask, &ask.identities().collect(), now)?;
        assert_eq!((verdict.decided_by(), verdict.allowed()), (DecidedBy::Grant, true));
        verdict.statuses().iter().map(|status| status.remaining).min()
    }

    #[test]
    fn a_grant_is_spent_to_the_last_hit_and_no_further() {
        let grants = Grants::default();
        assert!(grants.is_empty());
        grants.keep(&ask(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        assert_eq!(spend(&grants, &ask(&["a"], 3), at(1)), Some(2));
        assert_eq!(spend(&grants, &ask(&["a"], 3), at(1)), None, "3 of 2");
        assert_eq!(spend(&grants, &ask(&["a"], 2), at(1)), Some(0));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(1)), None);
        assert_eq!(spend(&grants, &ask(&["b"], 1), at(1)), None);
    }

    #[test]
    fn it_ends_by_the_clock_of_the_moment_it_was_asked() {
        let grants = Grants::default();
        grants.keep(&ask(&["a"], 1), &granted(&[Some((5, 1_000))]), at(100));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(1_099)), Some(4));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(1_100)), None);
        assert!(grants.is_empty(), "it is forgotten");
    }

    #[test]
    fn all_descriptors_have_a_grant_or_none_is_touched() {
        let grants = Grants::default();
        grants.keep(&ask(&["a", "b"], 1), &granted(&[Some((5, 1_000)), None]), at(0));
        assert_eq!(spend(&grants, &ask(&["a", "b"], 2), at(1)), None);
        grants.keep(&ask(&["b"], 1), &granted(&[Some((3, 1_000))]), at(0));
        assert_eq!(spend(&grants, &ask(&["a", "b"], 2), at(1)), Some(1));
        assert_eq!(spend(&grants, &ask(&["a", "b"], 2), at(1)), None);
        assert_eq!(spend(&grants, &ask(&["a"], 3), at(1)), Some(0), "the three that were not touched");
    }

    #[test]
    fn each_of_several_grants_has_an_end_of_its_own() {
        let grants = Grants::default();
        grants.keep(&ask(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        grants.keep(&ask(&["a"], 1), &granted(&[Some((4, 5_000))]), at(500));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(999)), Some(4));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(1_000)), Some(3), "of the second");
        assert_eq!(spend(&grants, &ask(&["a"], 4), at(1_000)), None, "what is left of the first has ended");
        assert_eq!(spend(&grants, &ask(&["a"], 3), at(5_499)), Some(0));
        for _ in 0..10 {
            grants.keep(&ask(&["b"], 1), &granted(&[Some((1, 1_000))]), at(0));
        }
        let spent = (0..10).filter(|_| spend(&grants, &ask(&["b"], 1), at(1)).is_some()).count();
        assert_eq!(spent, MOST_GRANTS, "and there are not without number");
    }

    #[test]
    fn the_service_is_told_what_is_wanted_and_what_was_spent() {
        let grants = Grants::new(true);
        let alice = ask(&["a"], 3);
        let holds = |now| grants.holds(&alice, at(now));
        let hold = |wants, reports: Option<(&str, u64)>| Feedback {
            demand: wants,
            reports: reports.map(|(id, n)| (id.into(), n)),
            sample: None,
        };
        assert_eq!(spend(&grants, &alice, at(0)), None);
        assert_eq!(holds(0), [], "3 hits are few");
        assert_eq!((spend(&grants, &alice, at(50)), spend(&grants, &alice, at(99))), (None, None));
        assert_eq!(holds(99), [hold(9, None)]);
        grants.keep(&alice, &granted(&[Some((10, 1_000))]), at(99));
        assert_eq!(spend(&grants, &alice, at(150)), Some(7));
        let asked =
            |alice: &CheckRequest<'static>, wants| CheckRequest { holds: vec![hold(wants, None)], ..alice.clone() };
        grants.answered(&asked(&alice, 9));
        assert_eq!(holds(150), [hold(2, None)], "as in the slice before, less what is there");
        assert_eq!((spend(&grants, &alice, at(150)), spend(&grants, &alice, at(150))), (Some(4), Some(1)));
        assert_eq!(spend(&grants, &alice, at(150)), None);
        assert_eq!(holds(150), [hold(0, Some(("7", 9)))], "another check has asked for more");
        assert_eq!(holds(150), [], "it is told once");
        grants.answered(&asked(&alice, 0));
        assert_eq!(holds(150), [], "that was not the answer");
        grants.answered(&asked(&alice, 2));
        assert_eq!(holds(150), [hold(12, None)]);
        assert_eq!((holds(1_149), holds(1_150)), (Vec::new(), vec![hold(12, None)]), "no answer comes any more");
        grants.keep(&asked(&alice, 12), &granted(&[Some((10, 1_000))]), at(150));
        assert_eq!(spend(&grants, &alice, at(1_150)), None, "it has ended");
        assert_eq!(holds(1_150), [hold(0, Some(("7", 0)))], "and it was quiet for long");
        assert_eq!(Grants::default().holds(&alice, at(0)), [], "nobody wants any");
    }

    #[test]
    fn what_is_left_is_given_back_once() {
        let grants = Grants::default();
        grants.keep(&ask(&["a", "b"], 1), &granted(&[Some((5, 1_000)), Some((7, 10))]), at(0));
        assert_eq!(spend(&grants, &ask(&["a"], 2), at(1)), Some(3));
        let all = grants.take_all(at(20));
        let all: Vec<_> = all.into_iter().map(|rest| (rest.domain, rest.descriptor, rest.left, rest.hold)).collect();
        let hold = Feedback { demand: 0, reports: Some(("7".into(), 2)), sample: None };
        assert_eq!(all, [("d".to_owned(), descriptor! { "user" => "a" }, 3, hold)]);
        assert!(grants.is_empty() && grants.take_all(at(20)).is_empty());
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(21)), None);
    }

    #[test]
    fn looks_and_refunds_are_asked() {
        let grants = Grants::default();
        grants.keep(&ask(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        let mut look = ask(&["a"], 1);
        look.descriptors[0] = look.descriptors[0].clone().hits(0);
        assert_eq!(spend(&grants, &look, at(1)), None);
    }

    #[test]
    fn there_are_no_more_than_a_bounded_number() {
        let grants = Grants::default();
        for number in 0..MOST as u64 + 10 {
            let descriptors = std::iter::once(descriptor! { "user" => number.to_string() }).collect();
            let ask = CheckRequest { domain: "d".into(), descriptors, hits: 1, traceparent: None, holds: Vec::new() };
            grants.keep(&ask, &granted(&[Some((5, 1_000))]), at(0));
        }
        let kept = grants.take_all(at(1)).len();
        assert!((MOST / 2..=MOST).contains(&kept), "{kept}");
    }
}
