//! [`Pace`] and [`Allowance`]: how much work one member can cause.

use std::time::Duration;

use tokio::time::Instant;

/// Time before which an answer without news is too early. Members wait a second for news before they send one.
const EARLY: Duration = Duration::from_millis(50);
/// Pause after an answer without news that was too early.
const EARLY_PAUSE: Duration = Duration::from_millis(100);
/// Time for which a member is not called, as a multiple of the time in which its last answer was handled.
const REST_FACTOR: u32 = 3;
/// Maximum pause.
const MAX_REST: Duration = Duration::from_secs(5);

/// Times of one call to a member and of the handling of its answer.
pub(super) struct Pace {
    called_at: Instant,
    answered_at: Instant,
}

impl Pace {
    /// Starts a call.
    pub(super) fn start() -> Self {
        let now = Instant::now();
        Self { called_at: now, answered_at: now }
    }

    /// Records that the answer has arrived, and will be handled now.
    pub(super) fn answered(&mut self) {
        self.answered_at = Instant::now();
    }

    /// Returns the pause before the next call. A member can thereby use a quarter of the time of a thread at most.
    pub(super) fn pause(&self, has_news: bool) -> Duration {
        let early = !has_news && self.answered_at - self.called_at < EARLY;
        let rest = self.answered_at.elapsed().saturating_mul(REST_FACTOR).min(MAX_REST);
        if early { rest.max(EARLY_PAUSE) } else { rest }
    }
}

/// An amount that a member may use, which is refilled at a constant rate.
pub(super) struct Allowance {
    available: f64,
    max: f64,
    per_second: f64,
    updated_at: Instant,
}

impl Allowance {
    /// Creates a full allowance.
    pub(super) fn new(max: f64, per_second: f64) -> Self {
        Self { available: max, max, per_second, updated_at: Instant::now() }
    }

    /// Uses an amount. Returns the time until the refill covers it, which is 0 if it was available.
    pub(super) fn take(&mut self, amount: f64) -> Duration {
        let now = Instant::now();
        let refilled = self.available + (now - self.updated_at).as_secs_f64() * self.per_second;
        self.available = refilled.min(self.max) - amount;
        self.updated_at = now;
        Duration::from_secs_f64((-self.available / self.per_second).max(0.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_member_rests_three_times_as_long_as_its_answer_was_handled() {
        let mut pace = Pace::start();
        tokio::time::advance(EARLY).await;
        pace.answered();
        tokio::time::advance(Duration::from_millis(40)).await;
        assert_eq!(pace.pause(true), Duration::from_millis(120));
        assert_eq!(pace.pause(false), Duration::from_millis(120));
        tokio::time::advance(Duration::from_secs(60)).await;
        assert_eq!(pace.pause(true), MAX_REST);
    }

    #[tokio::test(start_paused = true)]
    async fn answers_without_news_are_not_requested_at_once() {
        let mut pace = Pace::start();
        tokio::time::advance(EARLY - Duration::from_millis(1)).await;
        pace.answered();
        assert_eq!((pace.pause(true), pace.pause(false)), (Duration::ZERO, EARLY_PAUSE));
    }

    #[tokio::test(start_paused = true)]
    async fn an_allowance_is_refilled_up_to_its_maximum() {
        let mut allowance = Allowance::new(100.0, 10.0);
        assert_eq!(allowance.take(100.0), Duration::ZERO);
        assert_eq!(allowance.take(20.0), Duration::from_secs(2));
        tokio::time::advance(Duration::from_secs(2)).await;
        assert_eq!(allowance.take(0.0), Duration::ZERO);
        tokio::time::advance(Duration::from_secs(3_600)).await;
        assert_eq!((allowance.take(100.0), allowance.take(10.0)), (Duration::ZERO, Duration::from_secs(1)));
    }
}
