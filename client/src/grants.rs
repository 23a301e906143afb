//! Hits that the service has handed out in advance: they are spent without asking.
//!
//! A grant is a descriptor's. A check is answered from grants if all its descriptors have one with enough left; else
//! none of them is touched, and the service is asked. Never is more spent than was granted, nor after the grant's end: its
//! life is counted on this machine's own monotonic clock, from the moment at which the check that brought it was sent,
//! which is before the service began to count.

use std::{
    collections::HashMap,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use smallvec::SmallVec;

use crate::{
    ask::{Ask, Descriptor, Identities},
    verdict::{By, Status, Verdict},
};

/// Grants that are held at most: of a service that hands out more, the rest is not used.
const MOST: usize = 16_384;
/// Locks.
const PARTS: usize = 16;

/// What a service grants: so many hits, for so long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) hits: u64,
    pub(crate) life: Duration,
}

#[derive(Default)]
pub(crate) struct Grants {
    parts: [Mutex<HashMap<u128, Grant>>; PARTS],
    count: AtomicUsize,
}

struct Grant {
    domain: String,
    descriptor: Descriptor<'static>,
    left: u64,
    until: Duration,
    status: Status,
}

impl Grants {
    /// Whether there are any.
    pub(crate) fn is_empty(&self) -> bool {
        self.count.load(Relaxed) == 0
    }

    /// Takes the hits from the grants of all descriptors, if they have enough.
    pub(crate) fn spend(&self, ask: &Ask<'_>, identities: &Identities, now: Duration) -> Option<Verdict> {
        if !ask.takes() || identities.is_empty() {
            return None;
        }
        let mut verdict = Verdict::empty(true, By::Grant);
        let mut ends = SmallVec::<[Duration; 2]>::new();
        for (place, (identity, cost)) in identities.iter().zip(ask.costs()).enumerate() {
            let Some((status, end)) = self.take(*identity, cost, now) else {
                // What the others took goes back, unless another grant stands there by now.
                for ((identity, cost), end) in identities.iter().zip(ask.costs()).take(place).zip(ends) {
                    if let Some(grant) = self.part(*identity).get_mut(identity).filter(|grant| grant.until == end) {
                        grant.left = grant.left.saturating_add(cost);
                    }
                }
                return None;
            };
            verdict.statuses.push(status);
            ends.push(end);
        }
        Some(verdict)
    }

    /// And when that grant ends.
    fn take(&self, identity: u128, cost: u64, now: Duration) -> Option<(Status, Duration)> {
        let mut part = self.part(identity);
        let grant = part.get_mut(&identity)?;
        if now >= grant.until {
            part.remove(&identity);
            self.count.fetch_sub(1, Relaxed);
            return None;
        }
        grant.left = grant.left.checked_sub(cost)?;
        Some((Status { remaining: grant.left, ..grant.status.clone() }, grant.until))
    }

    /// Keeps what an answer grants. `since`: when it was asked. What was left of an earlier grant counts on, until the
    /// earlier of both ends.
    pub(crate) fn keep(&self, ask: &Ask<'_>, verdict: &Verdict, since: Duration) {
        // Whoever gives back wants nothing in return.
        if ask.gives_back() || verdict.statuses.iter().all(|status| status.grant.is_none()) {
            return;
        }
        for ((descriptor, status), identity) in ask.descriptors.iter().zip(&verdict.statuses).zip(ask.identities()) {
            let Some(Offer { hits, life }) = status.grant else {
                continue;
            };
            let mut part = self.part(identity);
            let until = since.saturating_add(life);
            if let Some(grant) = part.get_mut(&identity) {
                // What has ended by now is worth nothing more.
                let left = if grant.until > since { grant.left } else { 0 };
                grant.until = if left > 0 { grant.until.min(until) } else { until };
                grant.left = left.saturating_add(hits);
            } else if self.count.load(Relaxed) < MOST {
                self.count.fetch_add(1, Relaxed);
                let status = Status { allowed: true, retry_after: None, grant: None, ..status.clone() };
                let (domain, descriptor) = (ask.domain.to_string(), descriptor.owned());
                part.insert(identity, Grant { domain, descriptor, left: hits, until, status });
            }
        }
    }

    /// All that is left, to be given back: nothing of it is spent any more.
    pub(crate) fn take_all(&self, now: Duration) -> Vec<(String, Descriptor<'static>, u64)> {
        let mut all = Vec::new();
        for part in &self.parts {
            let part = std::mem::take(&mut *part.lock().unwrap_or_else(PoisonError::into_inner));
            self.count.fetch_sub(part.len(), Relaxed);
            let alive = part.into_values().filter(|grant| grant.left > 0 && grant.until > now);
            all.extend(alive.map(|grant| (grant.domain, grant.descriptor, grant.left)));
        }
        all
    }

    fn part(&self, identity: u128) -> MutexGuard<'_, HashMap<u128, Grant>> {
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

    fn ask(users: &[&'static str], hits: u32) -> Ask<'static> {
        let descriptors = users.iter().map(|user| descriptor! { "user" => *user }).collect();
        Ask { domain: "d".into(), descriptors, hits, traceparent: None }
    }

    fn granted(offers: &[Option<(u64, u64)>]) -> Verdict {
        let offer = |(hits, life)| Offer { hits, life: at(life) };
        let status =
            |grant: &Option<(u64, u64)>| Status { allowed: true, grant: grant.map(offer), ..Status::default() };
        Verdict { statuses: offers.iter().map(status).collect(), ..Verdict::empty(true, By::Server) }
    }

    fn spend(grants: &Grants, ask: &Ask<'_>, now: Duration) -> Option<u64> {
        let verdict = grants.spend(ask, &ask.identities().collect(), now)?;
        assert_eq!((verdict.by(), verdict.allowed()), (By::Grant, true));
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
    fn a_second_grant_adds_to_the_first_and_lives_no_longer() {
        let grants = Grants::default();
        grants.keep(&ask(&["a"], 1), &granted(&[Some((5, 1_000))]), at(0));
        grants.keep(&ask(&["a"], 1), &granted(&[Some((5, 5_000))]), at(500));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(999)), Some(9));
        assert_eq!(spend(&grants, &ask(&["a"], 1), at(1_000)), None);
        // Of one that has ended nothing is left.
        grants.keep(&ask(&["b"], 1), &granted(&[Some((5, 1_000))]), at(0));
        grants.keep(&ask(&["b"], 1), &granted(&[Some((2, 1_000))]), at(1_000));
        assert_eq!(spend(&grants, &ask(&["b"], 2), at(1_999)), Some(0));
    }

    #[test]
    fn what_is_left_is_given_back_once() {
        let grants = Grants::default();
        grants.keep(&ask(&["a", "b"], 1), &granted(&[Some((5, 1_000)), Some((7, 10))]), at(0));
        assert_eq!(spend(&grants, &ask(&["a"], 2), at(1)), Some(3));
        let all = grants.take_all(at(20));
        assert_eq!(all, [("d".to_owned(), descriptor! { "user" => "a" }, 3)]);
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
            let ask = Ask { domain: "d".into(), descriptors, hits: 1, traceparent: None };
            grants.keep(&ask, &granted(&[Some((5, 1_000))]), at(0));
        }
        assert_eq!(grants.take_all(at(1)).len(), MOST);
    }
}
