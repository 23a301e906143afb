//! [`DivisibleLimit`]: the numbers of a limit that is divided into token buckets, and the hits that are counted in
//! advance for them.
//!
//! Rates and shares are estimates, and calculated in `f64`. What a bucket can admit, and so what is counted, is calculated
//! in whole millionths of a token, and a bucket that could admit more than is free is not sent.

use std::num::NonZeroU32;

use sluicegate_algorithm::{Algorithm, MAX_NUMBER, Micros, assignments::Assignments};

use super::HeldQuota;
use crate::matching::AppliedLimit;

/// A number of tokens, in millionths: no part of a token is lost, and none is counted twice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Tokens(u64);

impl Tokens {
    /// More tokens than any bucket contains.
    pub(super) const MAX: Self = Self(u64::MAX);
    const MILLION: u64 = 1_000_000;

    pub(super) const fn whole(tokens: u64) -> Self {
        Self(tokens.saturating_mul(Self::MILLION))
    }

    /// Returns the whole tokens.
    const fn floor(self) -> u64 {
        self.0 / Self::MILLION
    }

    pub(super) const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Subtracts other tokens, down to none.
    pub(super) const fn minus(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    fn as_f64(self) -> f64 {
        self.0 as f64 / Self::MILLION as f64
    }
}

/// A token bucket. Each request takes one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    /// Capacity of the bucket.
    pub max_tokens: u32,
    /// Number of tokens that are added in each interval.
    pub tokens: u32,
    /// Length of the interval in seconds.
    pub interval_secs: u32,
}

impl TokenBucket {
    /// Creates a bucket that gets at most `rate` tokens per second, with a precision of a thousandth.
    fn new(max_tokens: u64, rate: f64) -> Self {
        let interval_secs = (TOKENS_PER_INTERVAL / rate.max(MIN_RATE)).ceil().max(1.0);
        let tokens = (rate * interval_secs) as u32;
        let max_tokens = u32::try_from(max_tokens).unwrap_or(u32::MAX).max(1);
        Self { max_tokens, tokens: tokens.max(1), interval_secs: interval_secs as u32 }
    }

    /// Returns the bucket, with a token less per interval if Envoy would take it for `former`, because Envoy ignores a
    /// different interval.
    fn after(self, former: Option<Self>) -> Self {
        if let Some(former) = former
            && (former.max_tokens, former.tokens) == (self.max_tokens, self.tokens)
            && former.interval_secs != self.interval_secs
        {
            return Self { tokens: self.tokens.saturating_sub(1).max(1), ..self };
        }
        self
    }

    /// Returns the tokens per second.
    #[must_use]
    pub fn rate(&self) -> f64 {
        f64::from(self.tokens) / f64::from(self.interval_secs)
    }

    /// Returns the tokens of a full bucket.
    pub(super) fn full(&self) -> Tokens {
        Tokens::whole(self.max_tokens.into())
    }

    /// Returns the tokens that are added in this time, rounded up to a millionth.
    pub(super) fn added(&self, time: Micros) -> Tokens {
        let millionths = (u128::from(self.tokens) * u128::from(time.get())).div_ceil(self.interval_secs.max(1).into());
        Tokens(u64::try_from(millionths).unwrap_or(u64::MAX))
    }

    /// Returns the largest number of requests that the bucket admits in this time if it contains `tokens` before.
    pub(super) fn max_admitted(&self, tokens: Tokens, time: Micros) -> u64 {
        tokens.min(self.full()).plus(self.added(time)).floor()
    }

    /// Returns the largest possible number of tokens after Envoy has replaced `former`, which contained `tokens`.
    /// Without a former bucket, this one is full; otherwise it is filled to the same part as the former one.
    pub(super) fn tokens_after(&self, former: Option<Self>, tokens: Tokens) -> Tokens {
        let Some(former) = former else {
            return self.full();
        };
        let scaled = u128::from(tokens.0) * u128::from(self.max_tokens);
        let kept = scaled.div_ceil(former.max_tokens.max(1).into());
        Tokens(u64::try_from(kept).unwrap_or(u64::MAX)).min(self.full())
    }

    /// Returns the largest number of requests that the bucket admits in this time after it has replaced `former`, which
    /// contained `tokens`.
    pub(super) fn max_admitted_after(&self, former: Option<Self>, tokens: Tokens, time: Micros) -> u64 {
        self.max_admitted(self.tokens_after(former, tokens), time)
    }

    /// Returns whether both buckets admit nearly the same, so that one need not replace the other.
    fn is_similar(&self, other: &Self) -> bool {
        are_close(self.max_tokens.into(), other.max_tokens.into(), 2.0) && are_close(self.rate(), other.rate(), 1.25)
    }
}

/// Returns whether each number is at most the other one times `ratio`.
fn are_close(a: f64, b: f64, ratio: f64) -> bool {
    a <= b * ratio && b <= a * ratio
}

/// When the hits of a quota are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Prepayment {
    /// The hits of the quota's whole lifetime, before the quota is sent: for fixed windows of at least
    /// [`MIN_LIFETIMES`] lifetimes.
    Lifetime,
    /// The hits of each window, just before the window begins: for shorter fixed windows.
    Window,
    /// The hits of each second, before the second begins, even if the counter goes into debt: for buckets, and for
    /// shorter windows and logs of other kinds.
    Second,
    /// The hits of each second, before the second begins, if they are free: for longer windows and logs of other kinds.
    FreeSecond,
}

/// The numbers of a limit that can be divided.
#[derive(Clone, Copy, Debug)]
pub(super) struct DivisibleLimit {
    pub(super) requests: u64,
    pub(super) window: Micros,
    burst: u64,
    pub(super) prepayment: Prepayment,
}

/// Demand of a caller until it is known: an eighth of the limit.
const FIRST_DEMAND: u64 = Assignments::WHOLE / 8;
/// Smallest number of tokens per interval, so that a rate has the precision of a thousandth.
const TOKENS_PER_INTERVAL: f64 = 1_000.0;
/// Lowest rate of a token bucket, per second: one token in eleven days.
const MIN_RATE: f64 = 1e-6;
/// Smallest capacity of a token bucket, if the burst permits it. A bucket of one token is full while the next request
/// arrives, and loses tokens.
const MIN_TOKENS: u64 = 2;
/// Number of quota lifetimes that a window must have, so that its quotas are counted for their whole lifetime.
const MIN_LIFETIMES: u64 = 2;
/// Divisor for the burst of a quota that is counted for its whole lifetime: a quarter of its share of the unused hits.
const BURST_DIVISOR: u64 = 4;
/// Time in which a caller may use up its part of the unused hits, in addition to a quota's lifetime.
const SPENDING_TIME: Micros = Micros::from_secs(5);
/// Time for which a caller keeps its quota although the limit is used up.
const MAX_UNPAID_TIME: Micros = Micros::from_secs(2);
/// Factor by which the rate of a quota may exceed its caller's demand, where other callers leave hits unused.
const HEADROOM: f64 = 1.25;

/// Returns the hits of a limit in one second, rounded up. The product of the largest limit does not fit into 64 bits.
fn hits_per_second(requests: u64, window: Micros) -> u64 {
    let hits = (u128::from(requests) * 1_000_000).div_ceil(window.get().max(1).into());
    u64::try_from(hits).unwrap_or(u64::MAX)
}

impl DivisibleLimit {
    /// Returns the numbers of a limit for quotas that last `ttl`. Returns `None` if the limit is not a rate, delays
    /// requests, or allows debt.
    pub(super) fn new(applied: &AppliedLimit<'_>, ttl: Micros) -> Option<Self> {
        let algorithm = applied.limit.algorithm();
        let spec = algorithm.spec().filter(|spec| spec.queue.is_none() && spec.debt.is_none())?;
        let requests = applied.limit.requests();
        let window = applied.limit.measure().window();
        let is_long = window.get() >= MIN_LIFETIMES * ttl.get();
        let prepayment = match algorithm {
            Algorithm::FixedWindow(_) if is_long => Prepayment::Lifetime,
            Algorithm::FixedWindow(_) => Prepayment::Window,
            _ if is_long && spec.burst.is_none() => Prepayment::FreeSecond,
            _ => Prepayment::Second,
        };
        let burst = match (spec.burst, prepayment) {
            (Some(burst), _) => burst,
            (None, Prepayment::Lifetime) => requests,
            // The hits of a second.
            (None, _) => hits_per_second(requests, window).max(MIN_TOKENS).min(requests),
        };
        Some(Self { requests, window, burst, prepayment })
    }

    /// Returns the demand in millionths of the limit.
    pub(super) fn demand(&self, per_second: Option<f64>) -> u64 {
        let Some(per_second) = per_second else {
            return FIRST_DEMAND;
        };
        ((per_second / self.rate() * Assignments::WHOLE as f64) as u64).min(Assignments::WHOLE)
    }

    /// Returns the share of a caller's quota in millionths of the limit, or 0 without a token bucket.
    pub(super) fn share(&self, held: &HeldQuota) -> u64 {
        match held.token_bucket() {
            Some(bucket) => self.demand(Some(bucket.rate())),
            None => 0,
        }
    }

    /// Returns the hits per second.
    fn rate(&self) -> f64 {
        self.requests as f64 / seconds(self.window).max(1e-6)
    }

    /// Returns the token bucket of a share, in millionths. Its capacity grows by at most `remaining`, the unused hits.
    pub(super) fn token_bucket(&self, share: u64, former: Option<TokenBucket>, remaining: u64) -> TokenBucket {
        let whole = Assignments::WHOLE;
        let smallest = MIN_TOKENS.min(self.burst);
        let former_tokens: u64 = match former {
            Some(former) => former.max_tokens.into(),
            None => 0,
        };
        let part = (u128::from(self.burst) * u128::from(share) / u128::from(whole)) as u64;
        let max_tokens = part.min(former_tokens.saturating_add(remaining)).max(smallest);
        let next = TokenBucket::new(max_tokens, self.rate() * share as f64 / whole as f64);
        // Only the capacity would change: the burst of shares that other callers have or leave.
        if let Some(former) = former
            && (former.tokens, former.interval_secs) == (next.tokens, next.interval_secs)
            && former.is_similar(&next)
        {
            return former;
        }
        next.after(former)
    }

    /// Returns the token bucket of a share, in millionths, if all its requests are counted in advance. Returns `None`
    /// if the share is 0 or nothing is free.
    ///
    /// `free` is the number of unused hits, including those that are counted for this caller already. `tokens` is the
    /// largest possible number of tokens in the former bucket, and `lifetime` the time for which hits are counted.
    pub(super) fn counted_token_bucket(
        &self,
        share: u64,
        former: Option<TokenBucket>,
        free: u64,
        tokens: Tokens,
        demand: Option<f64>,
        lifetime: Micros,
    ) -> Option<TokenBucket> {
        if share == 0 || free == 0 {
            return None;
        }
        let share = share as f64 / Assignments::WHOLE as f64;
        let smallest = MIN_TOKENS.min(free).max(1);
        let part = self.burst.min(free) as f64 * share;
        let mut rate = self.rate() * share;
        if let Some(demand) = demand {
            // Hits that others have not used until now may be used faster.
            let unused = part / seconds(lifetime + SPENDING_TIME);
            rate = rate.max(unused.min(HEADROOM * demand));
        }
        let burst = (part as u64 / BURST_DIVISOR).max(smallest);
        let first_tokens = TokenBucket::new(burst, rate).tokens_after(former, tokens);
        let affordable = (free as f64 - first_tokens.as_f64()) / seconds(lifetime).max(1.0);
        let next = TokenBucket::new(burst, rate.min(affordable));
        if let Some(kept) = former
            && kept.is_similar(&next)
            && kept.max_admitted_after(former, tokens, lifetime) <= free
        {
            return Some(kept);
        }
        let next = next.after(former);
        if next.max_admitted_after(former, tokens, lifetime) <= free { Some(next) } else { None }
    }
}

/// Hits that have been counted in advance for a caller, and that it has not reported yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Prepaid {
    /// Number of hits; negative if requests could not be counted.
    pub(super) hits: i64,
    /// Hash of the counter's name; `None` if no hits are counted in advance.
    pub(super) counter: Option<NonZeroU32>,
    /// End of the window in which the hits are counted; `None` if they are counted for the next second, because the limit
    /// is no fixed window.
    pub(super) window_end: Option<Micros>,
    /// Time at which hits that the quota does not need are returned, in seconds since the Unix epoch; 0 if it needs all.
    pub(super) returned_at: u32,
}

impl Prepaid {
    /// Removes reported requests.
    pub fn spend(&mut self, requests: u64) {
        self.hits = self.hits.saturating_sub_unsigned(requests.min(MAX_NUMBER));
    }

    /// Sets a negative number to 0, and returns it as a positive one.
    pub(super) fn take_debt(&mut self) -> u64 {
        let debt = self.hits.min(0).unsigned_abs();
        self.hits = self.hits.max(0);
        debt
    }

    /// Returns how many hits are missing.
    pub(super) fn missing(&self, needed: u64) -> u64 {
        (to_signed(needed) - self.hits).max(0).unsigned_abs()
    }

    /// Returns whether the quota must end, because more hits are missing than the bucket admits in [`MAX_UNPAID_TIME`].
    /// Fewer can be missing for a moment: a full log has free hits again within a second.
    pub(super) fn is_used_up(&self, bucket: &TokenBucket, needed: u64) -> bool {
        self.missing(needed) > bucket.max_admitted(Tokens::default(), MAX_UNPAID_TIME)
    }

    /// Adds hits that were counted.
    pub(super) fn add(&mut self, hits: u64) {
        self.hits = self.hits.saturating_add_unsigned(hits);
    }

    /// Returns the end of the fixed window in which the hits are counted; `None` if the limit is no fixed window.
    #[must_use]
    pub fn window_end(&self) -> Option<Micros> {
        self.window_end
    }

    /// Returns whether there are hits that can be returned, because their window has not ended.
    #[must_use]
    pub fn is_returnable(&self, now: Micros) -> bool {
        self.hits > 0 && self.window_end.is_some_and(|end| now < end)
    }

    /// Returns the number of prepaid hits to refund now: all above `needed` after a delay, in which a former quota could use
    /// them, and otherwise none. The delay ends at the `delay_end` of the call that begins it, and begins again if
    /// `is_changed`.
    pub(super) fn unneeded(&mut self, needed: u64, is_changed: bool, now: Micros, delay_end: Micros) -> u64 {
        let unneeded = (self.hits - to_signed(needed)).max(0).unsigned_abs();
        if unneeded == 0 {
            self.returned_at = 0;
        } else if is_changed || self.returned_at == 0 {
            self.returned_at = delay_end.ceil_secs() as u32;
        } else if now.floor_secs() >= self.returned_at.into() {
            self.returned_at = 0;
            return unneeded;
        }
        0
    }
}

pub(super) fn to_signed(number: u64) -> i64 {
    i64::try_from(number.min(MAX_NUMBER)).unwrap_or(i64::MAX)
}

fn seconds(time: Micros) -> f64 {
    time.get() as f64 / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hits_of_a_second_are_exact_up_to_the_largest_limit() {
        for (requests, seconds, expected) in [
            (60, 60, 1),
            (61, 60, 2),
            (9_007_199_254_740_991, 1, 9_007_199_254_740_991),
            (9_007_199_254_740_991, 3_600, 2_501_999_792_984),
        ] {
            assert_eq!(hits_per_second(requests, Micros::from_secs(seconds)), expected);
        }
    }

    #[test]
    fn a_bucket_that_differs_only_in_the_interval_gets_a_token_less() {
        let bucket = |max_tokens, tokens, interval_secs| TokenBucket { max_tokens, tokens, interval_secs };
        for (next, former, sent) in [
            (bucket(5, 10, 3), Some(bucket(5, 10, 2)), bucket(5, 9, 3)),
            (bucket(5, 1, 3), Some(bucket(5, 1, 2)), bucket(5, 1, 3)),
            (bucket(5, 10, 3), Some(bucket(5, 10, 3)), bucket(5, 10, 3)),
            (bucket(5, 10, 3), Some(bucket(6, 10, 2)), bucket(5, 10, 3)),
            (bucket(5, 10, 3), Some(bucket(5, 11, 2)), bucket(5, 10, 3)),
            (bucket(5, 10, 3), None, bucket(5, 10, 3)),
        ] {
            assert_eq!(next.after(former), sent, "{former:?}");
        }
    }

    #[test]
    fn hits_are_returned_when_no_former_quota_can_need_them() {
        let mut prepaid = Prepaid { hits: 10, ..Prepaid::default() };
        let delay = Micros::from_secs(17);
        for (second, needed, is_changed, returned) in [
            (1, 4, false, 0),
            (17, 4, false, 0),
            (18, 4, false, 6),
            // Each changed quota begins the delay again.
            (20, 4, true, 0),
            (36, 5, true, 0),
            (37, 5, false, 0),
            (53, 5, false, 5),
            // The quota needs all hits in the meantime.
            (60, 4, true, 0),
            (65, 10, false, 0),
            (77, 4, false, 0),
            (94, 4, false, 6),
        ] {
            let now = Micros::from_secs(second);
            assert_eq!(prepaid.unneeded(needed, is_changed, now, now + delay), returned, "{second}");
        }
    }
}
