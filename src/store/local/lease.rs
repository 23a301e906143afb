//! A part of one counter's quota, taken in advance and spent here without asking. No I/O; the time is passed in.
//!
//! What is taken is counted by the store as if it had been spent at once, so that all instances together never let more
//! through than the limit. It may be spent until the counter it was counted in ends ([`Algorithm::lease_ends`]): by the
//! store's clock, which is read after the question was sent, so that here a lease ends a moment early, never late. What
//! is not spent is given back as an undo of that take: when less is asked for than before, when the life is over, and at
//! the end of the process. An answer that is lost costs its lease; nothing is ever asked twice.
//!
//! Callers that want to admit hits by themselves get a part of what is held: a grant, which ends no later. It is as if
//! they had been spent; what a caller says that he has not used comes back, if the lease is still the same.
//!
//! How much is held follows the rate at which the entity is asked for here and what is free: a quarter of that at most,
//! so that the last hits of a limit are decided one by one, and nothing when it is not worth it.

use std::{num::NonZeroU32, time::Duration};

use smallvec::SmallVec;

use crate::{
    algorithm::{Action, Algorithm, Decision, Micros, Operation, State},
    store::{Grant, Hit, StepOutcome},
};

/// A lease is for so many slices of time, in each of which hits are counted.
const SLICES: u64 = 4;
/// A lease of fewer hits than this saves too little.
const LEAST: u64 = 32;
/// Of what remains a lease is so large a part.
const PART: u64 = 4;
/// A grant of fewer hits saves too little.
const LEAST_GRANT: u64 = 4;
/// Callers at most that hold something of an entity.
const MOST_GRANTS: usize = 64;

/// What an entity has in advance, and how often it is asked for.
#[derive(Default)]
pub(super) struct Lease {
    rate: DemandRate,
    held: Option<HeldHits>,
    /// A call that may bring more is under way.
    asking: bool,
    asked_for: Duration,
    /// What callers hold.
    granted: SmallVec<[ActiveGrant; 0]>,
}

/// What a caller holds.
struct ActiveGrant {
    id: u64,
    hits: u64,
    ends: Duration,
    /// When it was counted, and for how long that counts.
    counted: Micros,
    counts_until: Duration,
}

struct HeldHits {
    remaining: u64,
    /// Not spent from here on.
    ends: Duration,
    /// When it was taken: here, by the store's clock, and what it left of the counter.
    asked: Duration,
    at: Micros,
    state: State,
}

/// What has become of a grant.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct GrantReport {
    pub(super) spent: u64,
    /// Of those that were not, what is not lost.
    pub(super) returned: u64,
    pub(super) unused: Option<Return>,
}

/// To be given back: so much, of what was counted at that instant.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Return {
    pub(super) hits: u64,
    pub(super) taken_at: Micros,
}

impl Lease {
    /// A part of what is held, for a caller who wants so many hits, and no longer than that.
    pub(super) fn grant(
        &mut self,
        algorithm: &Algorithm,
        wants: u64,
        id: u64,
        now: Duration,
        longest: Duration,
    ) -> Option<Grant> {
        let held = self.held.as_mut()?;
        let hits = wants.min(held.remaining / 2);
        let life = held.ends.saturating_sub(now).min(longest);
        let fits = hits >= LEAST_GRANT && self.granted.len() < MOST_GRANTS && !life.is_zero();
        let hits = NonZeroU32::new(u32::try_from(hits).ok()?).filter(|_| fits)?;
        held.remaining -= u64::from(hits.get());
        let (counted, counts_until) = (held.at, held.counts_until(algorithm));
        self.granted.push(ActiveGrant { id, hits: hits.get().into(), ends: now + life, counted, counts_until });
        Some(Grant { hits, ttl: Micros::new(u64::try_from(life.as_micros()).ok()?), id })
    }

    /// A caller has done with a grant and has admitted so many of its hits. The others are held again, or to be given back.
    pub(super) fn report(&mut self, algorithm: &Algorithm, id: u64, spent: u64, now: Duration) -> Option<GrantReport> {
        let ActiveGrant { hits, counted, counts_until, .. } = self.remove_grant(id)?;
        let spent = spent.min(hits);
        let returned = if now < counts_until { hits - spent } else { 0 };
        let back = if returned > 0 { self.put_back(algorithm, returned, counted) } else { None };
        Some(GrantReport { spent, returned, unused: back })
    }

    fn remove_grant(&mut self, id: u64) -> Option<ActiveGrant> {
        let place = self.granted.iter().position(|granted| granted.id == id)?;
        Some(self.granted.swap_remove(place))
    }

    /// Takes a grant back that nobody has heard of: its hits.
    pub(super) fn revoke(&mut self, id: u64) -> u64 {
        self.remove_grant(id).map_or(0, |granted| granted.hits)
    }

    /// Hits of grants that are long over, and of which nobody has said what became of them.
    pub(super) fn expire_grants(&mut self, before: Duration) -> u64 {
        let mut hits = 0;
        self.granted.retain(|granted| {
            let over = granted.ends < before;
            hits += if over { granted.hits } else { 0 };
            !over
        });
        hits
    }

    /// Takes a hit from what is held; or, for a peek, says what that would do. With it, how much to ask for now.
    pub(super) fn spend(&mut self, hit: &Hit<'_>, now: Duration, slice: Duration) -> Option<(Decision, u64)> {
        let takes = hit.action == Action::Take;
        if takes {
            self.rate.add(hit.cost, now, slice);
            self.asked_for = now;
        }
        let held = self.held.as_mut().filter(|held| now < held.ends && held.remaining >= hit.cost)?;
        if takes {
            held.remaining -= hit.cost;
        }
        let left = held.remaining;
        let mut decision = held.explain(hit.algorithm, now);
        let more = if takes { self.demand(decision.remaining) } else { 0 };
        decision.remaining = decision.remaining.saturating_add(left);
        decision.used = decision.used.saturating_sub(left);
        Some((decision, more))
    }

    /// Takes all that is held, for a hit that costs more than that.
    pub(super) fn spend_all(&mut self, now: Duration) -> u64 {
        self.held.as_mut().filter(|held| now < held.ends).map_or(0, |held| std::mem::take(&mut held.remaining))
    }

    /// When what is held was counted: which lease a hit was spent from.
    pub(super) fn counted(&self) -> Option<Micros> {
        self.held.as_ref().map(|held| held.at)
    }

    /// Puts back what was just spent of what was counted then, because the rest of the request could not be had. Where
    /// nothing is held of that counter any more it is to be given back.
    pub(super) fn put_back(&mut self, algorithm: &Algorithm, hits: u64, counted: Micros) -> Option<Return> {
        let end = algorithm.lease_ends(counted);
        match self.held.as_mut().filter(|held| algorithm.lease_ends(held.at) == end) {
            Some(held) => {
                held.remaining = held.remaining.saturating_add(hits);
                None
            }
            None => Some(Return { hits, taken_at: counted }),
        }
    }

    /// How much to ask for, if anything, when so much remains in the store; then nobody else does until it is answered.
    pub(super) fn demand(&mut self, remaining: u64) -> u64 {
        let left = self.left();
        // Of all that is free, here and there, a part is held here: however often is asked for more.
        let most = self.wanted().min(remaining.saturating_add(left) / PART);
        if self.asking || left > most / 2 {
            return 0;
        }
        let more = most - left;
        self.asking = more >= LEAST;
        if self.asking { more } else { 0 }
    }

    /// The answer to that. What an earlier lease still has counts on, if it was counted in the same counter; else it is
    /// to be given back.
    pub(super) fn acquired(
        &mut self,
        algorithm: &Algorithm,
        hits: u64,
        counted: StepOutcome,
        asked: Duration,
    ) -> Option<Return> {
        self.asking = false;
        if !counted.allowed {
            return None;
        }
        let StepOutcome { at, state, .. } = counted;
        let end = algorithm.lease_ends(at);
        let mut held =
            HeldHits { remaining: hits, ends: asked + Duration::from_micros((end - at).get()), asked, at, state };
        match self.held.take() {
            Some(old) if algorithm.lease_ends(old.at) == end => {
                held.remaining += old.remaining;
                held.ends = held.ends.min(old.ends);
                self.held = Some(held);
                None
            }
            old => {
                self.held = Some(held);
                old.and_then(|old| old.back(algorithm, asked))
            }
        }
    }

    /// There was no answer to it.
    pub(super) fn acquire_failed(&mut self) {
        self.asking = false;
    }

    /// What to give back by now, because it is more than will be asked for soon.
    pub(super) fn return_excess(&mut self, now: Duration, slice: Duration) -> Option<Return> {
        self.rate.add(0, now, slice);
        let wanted = self.wanted();
        let held = self.held.as_mut().filter(|held| now < held.ends && held.remaining > 2 * wanted + LEAST)?;
        let hits = held.remaining - wanted;
        held.remaining = wanted;
        Some(Return { hits, taken_at: held.at })
    }

    /// What to give back by now, because it has ended or nobody has asked since `idle_since`.
    pub(super) fn return_idle(&mut self, algorithm: &Algorithm, now: Duration, idle_since: Duration) -> Option<Return> {
        let over = self.held.as_ref().is_some_and(|held| now >= held.ends || self.asked_for < idle_since);
        self.held.take_if(|_| over)?.back(algorithm, now)
    }

    /// Nothing is held, nothing on its way, and nobody has asked for so long: there is nothing to know.
    pub(super) fn is_idle(&self, since: Duration) -> bool {
        self.held.is_none() && !self.asking && self.granted.is_empty() && self.asked_for < since
    }

    fn wanted(&self) -> u64 {
        self.rate.per_slice().saturating_mul(SLICES)
    }

    fn left(&self) -> u64 {
        self.held.as_ref().map_or(0, |held| held.remaining)
    }
}

impl HeldHits {
    /// What is left, unless the counter that it was taken from says nothing any more.
    fn back(self, algorithm: &Algorithm, now: Duration) -> Option<Return> {
        let counts = now < self.counts_until(algorithm);
        (self.remaining > 0 && counts).then_some(Return { hits: self.remaining, taken_at: self.at })
    }

    /// When the counter says nothing any more.
    fn counts_until(&self, algorithm: &Algorithm) -> Duration {
        self.asked + Duration::from_micros((algorithm.expires(&self.state, self.at) - self.at).get())
    }

    /// The counter as it is now if nobody else has asked, with all of the lease counted.
    fn explain(&self, algorithm: &Algorithm, now: Duration) -> Decision {
        algorithm.explain(&self.state, Operation { action: Action::Peek, cost: 0, now: self.store_time(now) }, true)
    }

    /// The latest that the store's clock can show.
    fn store_time(&self, now: Duration) -> Micros {
        let age = now.saturating_sub(self.asked).as_micros();
        self.at + Micros::new(u64::try_from(age).unwrap_or(u64::MAX))
    }
}

/// Hits per slice of time: what the slices before say, smoothed, or this one, if it has more already.
#[derive(Default)]
struct DemandRate {
    slice: u64,
    hits: u64,
    /// In sixteenths.
    before: u64,
}

impl DemandRate {
    fn add(&mut self, hits: u64, now: Duration, slice: Duration) {
        let number = (now.as_micros() / slice.as_micros().max(1)) as u64;
        let passed = number.saturating_sub(self.slice);
        if passed > 0 {
            self.before = (self.before + self.hits.saturating_mul(16)) / 2;
            self.before = self.before.checked_shr(u32::try_from(passed - 1).unwrap_or(u32::MAX)).unwrap_or(0);
            (self.slice, self.hits) = (number, 0);
        }
        self.hits = self.hits.saturating_add(hits);
    }

    fn per_slice(&self) -> u64 {
        self.hits.max(self.before / 16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{
        MaxHits,
        fixed_window::FixedWindow,
        sliding_window::{SlidingWindow, WindowEdge},
    };

    const SLICE: Duration = Duration::from_millis(125);
    /// So long before the end of a minute, by the store's clock.
    const BEFORE: u64 = 10_000;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    fn fixed() -> Algorithm {
        FixedWindow::new(MaxHits::hard(1_000), Micros::from_secs(60), true).unwrap().into()
    }

    fn sliding() -> Algorithm {
        SlidingWindow::new(MaxHits::hard(1_000), Micros::from_secs(120), 2, WindowEdge::Strict, false).unwrap().into()
    }

    /// What a store answers to a lease of so much, so many milliseconds after the first could be asked for.
    fn counted(algorithm: &Algorithm, hits: u64, millis: u64) -> StepOutcome {
        let (mut state, now) = (State::default(), Micros::new((60_000_000 - BEFORE * 1_000) + millis * 1_000));
        let allowed = algorithm.step(&mut state, Operation { action: Action::Take, cost: hits, now });
        StepOutcome { allowed, action: Action::Take, at: now, state }
    }

    fn held(algorithm: &Algorithm, hits: u64) -> Lease {
        let mut lease = Lease::default();
        assert_eq!(lease.acquired(algorithm, hits, counted(algorithm, hits, 0), Duration::ZERO), None);
        lease
    }

    fn take(lease: &mut Lease, algorithm: &Algorithm, cost: u64, now: Duration) -> Option<(u64, u64)> {
        let decision = lease.spend(&Hit::take(b"k", algorithm, cost), now, SLICE)?.0;
        assert!(decision.allowed && !decision.soft && decision.retry_after.is_none());
        Some((decision.remaining, decision.used))
    }

    #[test]
    fn a_lease_is_spent_to_the_last_hit_and_its_counters_end() {
        let rule = fixed();
        let mut lease = held(&rule, 10);
        assert_eq!(take(&mut lease, &rule, 4, at(1)), Some((996, 4)));
        assert_eq!(take(&mut lease, &rule, 7, at(1)), None, "6 are left");
        let look = Hit { action: Action::Peek, ..Hit::take(b"k", &rule, 6) };
        assert_eq!(lease.spend(&look, at(1), SLICE).map(|(decision, more)| (decision.remaining, more)), Some((996, 0)));
        let just = at(BEFORE) - Duration::from_micros(1);
        assert_eq!(take(&mut lease, &rule, 5, just), Some((991, 9)));
        assert_eq!(take(&mut lease, &rule, 1, at(BEFORE)), None, "the window may have ended");
        assert_eq!((lease.spend_all(at(BEFORE)), lease.spend_all(just), lease.spend_all(just)), (0, 1, 0));
    }

    #[test]
    fn what_was_spent_in_vain_comes_back_to_its_own_lease() {
        let rule = fixed();
        let mut lease = held(&rule, 10);
        let first = lease.counted().unwrap();
        assert_eq!(lease.spend_all(at(1)), 10);
        // More of the same counter has come meanwhile.
        assert_eq!(lease.acquired(&rule, 7, counted(&rule, 17, 5), at(5)), None);
        assert_eq!(lease.put_back(&rule, 10, first), None);
        assert_eq!(take(&mut lease, &rule, 17, at(6)).map(|(_, used)| used), Some(17));
        // And of the next window.
        assert_eq!(lease.acquired(&rule, 7, counted(&rule, 7, BEFORE + 1), at(BEFORE + 1)), None);
        assert_eq!(lease.put_back(&rule, 10, first), Some(Return { hits: 10, taken_at: first }));
        assert_eq!(lease.spend_all(at(BEFORE + 1)), 7);
        assert_eq!(Lease::default().put_back(&rule, 10, first), Some(Return { hits: 10, taken_at: first }));
    }

    #[test]
    fn it_grows_with_the_rate_and_shrinks_with_what_remains() {
        let rule = fixed();
        let mut lease = Lease::default();
        assert_eq!(lease.demand(1_000), 0, "nobody asks");
        for _ in 0..8 {
            assert_eq!(take(&mut lease, &rule, 1, at(0)), None);
        }
        assert_eq!(lease.demand(4 * LEAST - 1), 0, "too little is left");
        assert_eq!(lease.demand(1_000), 8 * SLICES);
        assert_eq!(lease.demand(1_000), 0, "somebody has asked already");
        lease.acquire_failed();
        assert_eq!(lease.demand(130), 32, "a quarter");
        assert_eq!(lease.acquired(&rule, 32, counted(&rule, 2_000, 0), at(0)), None);
        assert_eq!(take(&mut lease, &rule, 1, at(0)), None, "it was refused");
        // The next slices: what was, smoothed.
        take(&mut lease, &rule, 20, at(125));
        assert_eq!(lease.demand(1_000), 20 * SLICES);
        lease.acquire_failed();
        take(&mut lease, &rule, 1, at(250));
        assert_eq!(lease.demand(1_000), (20 + 4) / 2 * SLICES);
        lease.acquire_failed();
        take(&mut lease, &rule, 1, at(2_000));
        assert_eq!(lease.demand(1_000), 0, "it was quiet for long");
        // Of what is free, a quarter is held, however often is asked for more.
        let mut lease = held(&rule, 100);
        take(&mut lease, &rule, 60, at(0));
        lease.acquire_failed();
        assert_eq!((lease.demand(240), lease.demand(320)), (0, (320 + 40) / 4 - 40), "40 are left");
    }

    #[test]
    fn the_next_is_asked_for_when_half_is_spent() {
        let rule = fixed();
        let mut lease = held(&rule, 100);
        let mut more = |cost| lease.spend(&Hit::take(b"k", &rule, cost), at(0), SLICE).map(|(_, more)| more);
        assert_eq!((more(20), more(13)), (Some(0), Some(0)), "33 in a slice, 132 wanted, 67 left");
        assert_eq!(more(1), Some(136 - 66));
        assert_eq!(more(1), Some(0));
    }

    fn grant(lease: &mut Lease, rule: &Algorithm, wants: u64, id: u64, now: Duration) -> Option<(u32, u64)> {
        let grant = lease.grant(rule, wants, id, now, Duration::from_secs(1))?;
        Some((grant.hits.get(), grant.ttl.get() / 1_000))
    }

    fn report(lease: &mut Lease, rule: &Algorithm, id: u64, spent: u64, now: Duration) -> Option<(u64, u64)> {
        lease.report(rule, id, spent, now).map(|reported| {
            assert_eq!(reported.unused, None);
            (reported.spent, reported.returned)
        })
    }

    #[test]
    fn what_callers_hold_is_spent_and_comes_back_once() {
        let rule = fixed();
        let mut lease = held(&rule, 100);
        assert_eq!(grant(&mut lease, &rule, LEAST_GRANT - 1, 1, at(0)), None, "too few to be worth it");
        assert_eq!(grant(&mut lease, &rule, 20, 1, at(0)), Some((20, 1_000)));
        assert_eq!(grant(&mut lease, &rule, 1_000, 2, at(0)), Some((40, 1_000)), "half at most");
        assert_eq!(report(&mut lease, &rule, 1, 15, at(1)), Some((15, 5)));
        assert_eq!(report(&mut lease, &rule, 1, 0, at(1)), None, "once");
        assert_eq!(report(&mut lease, &rule, 2, 1_000, at(1)), Some((40, 0)), "no more than were granted");
        assert_eq!(take(&mut lease, &rule, 45, at(1)).map(|(_, used)| used), Some(100), "all are spent");
        assert_eq!(take(&mut lease, &rule, 1, at(1)), None);
        assert!(grant(&mut held(&rule, 100), &rule, 20, 7, at(0)).is_some());
        let mut lease = held(&rule, 1_000);
        let grants = (0..100).filter(|id| grant(&mut lease, &rule, 10, *id, at(0)).is_some()).count();
        assert_eq!((grants, lease.revoke(0), lease.revoke(0)), (MOST_GRANTS, 10, 0));
    }

    #[test]
    fn what_callers_hold_ends_with_the_lease_and_is_waited_for() {
        let rule = fixed();
        let mut lease = held(&rule, 100);
        assert_eq!(grant(&mut lease, &rule, 8, 1, at(0)), Some((8, 1_000)));
        assert_eq!(grant(&mut lease, &rule, 8, 2, at(BEFORE - 300)), Some((8, 300)));
        assert_eq!(grant(&mut lease, &rule, 8, 3, at(BEFORE)), None);
        assert_eq!(report(&mut lease, &rule, 2, 0, at(BEFORE)), Some((0, 0)), "of a window that has ended nothing");
        assert!(!lease.is_idle(Duration::MAX), "the first may be told of");
        assert_eq!(
            (lease.expire_grants(at(1_000)), lease.expire_grants(at(1_001)), lease.expire_grants(at(2_000))),
            (0, 8, 0)
        );
    }

    /// In a sliding window what has been counted counts on after the lease's end.
    #[test]
    fn what_callers_have_not_spent_comes_back_late() {
        let rule = sliding();
        let mut lease = held(&rule, 100);
        let counted = lease.counted().unwrap();
        for id in 1..=3 {
            assert!(grant(&mut lease, &rule, 8, id, at(0)).is_some());
        }
        assert_eq!(report(&mut lease, &rule, 1, 2, at(BEFORE + 1)), Some((2, 6)));
        let back = lease.return_idle(&rule, at(BEFORE + 1), at(0));
        assert_eq!(back, Some(Return { hits: 76 + 6, taken_at: counted }));
        let back = Some(Return { hits: 8, taken_at: counted });
        assert_eq!(
            lease.report(&rule, 2, 0, at(BEFORE + 2)),
            Some(GrantReport { spent: 0, returned: 8, unused: back })
        );
        assert_eq!(report(&mut lease, &rule, 3, 0, at(BEFORE + 200_000)), Some((0, 0)), "it counts no more");
    }

    #[test]
    fn what_is_more_than_is_asked_for_goes_back() {
        let rule = fixed();
        let mut lease = held(&rule, 500);
        take(&mut lease, &rule, 50, at(0));
        assert_eq!(lease.return_excess(at(1), SLICE), Some(Return { hits: 250, taken_at: Micros::from_secs(50) }));
        assert_eq!(lease.return_excess(at(1), SLICE), None, "200 are wanted, and 200 are left");
        // From slice to slice half as many.
        take(&mut lease, &rule, 1, at(125));
        assert_eq!(lease.return_excess(at(126), SLICE), None);
        take(&mut lease, &rule, 1, at(250));
        take(&mut lease, &rule, 1, at(375));
        assert_eq!(lease.return_excess(at(376), SLICE).map(|back| back.hits), Some(197 - 4 * 7), "7 a slice by now");
        assert_eq!(held(&rule, 500).return_excess(at(BEFORE), SLICE), None, "it has ended");
    }

    #[test]
    fn what_was_counted_in_one_counter_is_one_lease() {
        let rule = fixed();
        let mut lease = held(&rule, 10);
        // Asked for at 5 ms, when the store's clock said 3: it may be so much ahead.
        assert_eq!(lease.acquired(&rule, 10, counted(&rule, 10, 3), at(5)), None);
        assert_eq!(take(&mut lease, &rule, 20, at(BEFORE)), None, "the earlier of both ends");
        assert!(take(&mut lease, &rule, 20, at(BEFORE) - Duration::from_micros(1)).is_some());
        for (rule, expected) in
            [(fixed(), None), (sliding(), Some(Return { hits: 10, taken_at: Micros::from_secs(50) }))]
        {
            let mut lease = held(&rule, 10);
            let next = counted(&rule, 7, BEFORE + 1);
            assert_eq!(lease.acquired(&rule, 7, next, at(BEFORE + 1)), expected, "of a window that has ended nothing");
            assert_eq!(take(&mut lease, &rule, 8, at(BEFORE + 1)), None);
            assert!(take(&mut lease, &rule, 7, at(BEFORE + 1)).is_some());
        }
    }

    #[test]
    fn what_nobody_asks_for_is_given_back_once() {
        let rule = fixed();
        let mut lease = held(&rule, 10);
        take(&mut lease, &rule, 3, at(100));
        assert_eq!(lease.return_idle(&rule, at(150), at(100)), None);
        assert!(!lease.is_idle(at(101)), "something is held");
        let back = Some(Return { hits: 7, taken_at: Micros::from_secs(50) });
        assert_eq!(lease.return_idle(&rule, at(151), at(101)), back);
        assert_eq!((lease.return_idle(&rule, at(151), at(101)), take(&mut lease, &rule, 1, at(151))), (None, None));
        assert!(lease.is_idle(at(152)) && !lease.is_idle(at(151)));
        assert_eq!(held(&rule, 10).return_idle(&rule, at(BEFORE), at(0)), None, "the window has ended");
        let mut lease = held(&sliding(), 10);
        take(&mut lease, &sliding(), 10, at(0));
        assert_eq!(lease.return_idle(&sliding(), at(BEFORE), at(0)), None, "all was spent");
        let back = Some(Return { hits: 10, taken_at: Micros::from_secs(50) });
        assert_eq!(held(&sliding(), 10).return_idle(&sliding(), at(BEFORE), at(0)), back, "it still counts");
        lease.demand(1_000);
        assert!(!lease.is_idle(at(BEFORE)), "an answer may come");
    }
}
