//! [`Bucket`]: the state of one bucket of a session's caller.

use crate::{
    algorithm::assignments::Assignments,
    engine::{Assignment, DELIVERY_TIME, HeldQuota, Micros, Quota, REVIEW_TIME},
};

/// Shortest time between two reports from which a rate is computed.
const MIN_ELAPSED: Micros = Micros::new(500_000);
/// Value of [`Bucket::review_after`] if no review is planned.
const NEVER: u32 = u32::MAX;

/// A bucket that the caller reports.
pub(super) struct Bucket {
    pub(super) held: HeldQuota,
    /// Time of the last request in seconds, rounded up.
    used_at: u32,
    /// Requests per second in the last report, and in the one before; NaN if there was none.
    rates: [f32; 2],
    /// Milliseconds from the last report until the quota is to be computed again, or [`NEVER`].
    review_after: u32,
}

impl Bucket {
    /// Creates a bucket. If `elapsed` is above 0, the caller reported it on an earlier stream, and probably has a quota.
    pub(super) fn new(now: Micros, elapsed: Micros, lifetime: Micros) -> Self {
        let ends_at = if elapsed > Micros::ZERO { now + lifetime } else { now };
        let held = HeldQuota { reported_at: now - elapsed, ends_at, ..HeldQuota::default() };
        Self { held, used_at: now.ceil_secs() as u32, rates: [f32::NAN; 2], review_after: NEVER }
    }

    /// Returns whether the caller keeps the quota of an earlier stream for now, because that quota has not ended and
    /// `assignment` has no share.
    pub(super) fn keeps_former(&self, assignment: &Assignment, now: Micros) -> bool {
        self.held.quota.is_none() && now < self.held.ends_at && assignment.share == Some(0)
    }

    /// Returns whether the last request was more than `timeout` ago.
    pub(super) fn is_idle(&self, timeout: Micros, now: Micros) -> bool {
        now - Micros::from_secs(self.used_at.into()) > timeout
    }

    /// Returns the requests per second that are expected: the larger number of the last two reports.
    pub(super) fn demand(&self) -> Option<f64> {
        let [last, former] = self.rates;
        Some(last.max(former).into()).filter(|rate: &f64| !rate.is_nan())
    }

    /// Returns the rest of the quota's lifetime if it need not be extended now: the caller had much fewer requests than
    /// before and than the quota allows, and the quota lasts until the next report. If the next report is similar, the
    /// quota ends, and its share is free sooner.
    pub(super) fn unextended_lifetime(&self, elapsed: Micros, now: Micros) -> Option<Micros> {
        let Some(Quota::TokenBucket(bucket)) = self.held.quota else {
            return None;
        };
        let [last, former] = self.rates;
        let is_low = last < former / 2.0 && f64::from(last) < bucket.rate() / 2.0;
        let next_report = DELIVERY_TIME + Micros::new(elapsed.get() * 3 / 2);
        let rest = self.held.ends_at - now;
        (is_low && rest >= next_report.max(Assignments::REDUCTION_TIME)).then_some(rest)
    }

    /// Sets when the quota is to be computed again without a report.
    pub(super) fn review_at(&mut self, at: Option<Micros>) {
        let after = at.map(|at| (at - self.held.reported_at).get() / 1_000);
        self.review_after = after.and_then(|millis| u32::try_from(millis).ok()).unwrap_or(NEVER);
    }

    /// Returns whether the quota is to be computed again without a report.
    pub(super) fn is_review_due(&self, now: Micros) -> bool {
        self.review_after != NEVER && now >= self.held.reported_at + Micros::new(1_000 * u64::from(self.review_after))
    }

    /// Returns whether the quota was not extended by the last report, and ends soon.
    pub(super) fn is_renewal_due(&self, lifetime: Micros, now: Micros) -> bool {
        let held = &self.held;
        held.ends_at < held.reported_at + lifetime && held.ends_at <= now + DELIVERY_TIME + REVIEW_TIME
    }

    /// Records a report, and returns the time since the last one.
    pub(super) fn record(&mut self, requests: u64, now: Micros) -> Micros {
        let elapsed = now - self.held.reported_at;
        self.used_at = if requests > 0 { now.ceil_secs() as u32 } else { self.used_at };
        if elapsed >= MIN_ELAPSED {
            let rate = (requests as f64 / elapsed.get() as f64 * 1e6) as f32;
            self.rates = [rate, self.rates[0]];
        }
        elapsed
    }
}
