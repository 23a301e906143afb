//! [`Breaker`]: circuit breaker of an endpoint. It does no I/O, and the time is passed in.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Number of consecutive failures that open the breaker.
const FAILURE_THRESHOLD: u32 = 5;
/// Time for which the breaker is open before the first probe. It doubles with each failed probe.
const INITIAL_PAUSE: Duration = Duration::from_millis(100);
/// Maximum time between two probes.
const MAX_PAUSE: Duration = Duration::from_secs(2);

/// Circuit breaker: after repeated failures, an endpoint is not called for a while.
///
/// ## Closed ⟶ Open
/// [`FAILURE_THRESHOLD`] consecutive calls failed. No more calls are admitted.
///
/// ## Open ⟶ Closed
/// After a pause, one call is admitted as a probe. If it succeeds, the breaker closes; if it fails, the pause starts
/// again and is twice as long. Failures of calls that were in progress when the breaker opened are ignored, because
/// concurrent calls fail together.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// Number of consecutive failures.
    failures: AtomicU32,
    /// Time of the next probe, in microseconds since the client's start; 0 while the breaker is closed.
    open_until: AtomicU64,
    /// Whether a probe is in progress.
    probing: AtomicBool,
}

impl Breaker {
    /// Returns `true` if a call may be made now. While the breaker is open, only one caller gets `true`, for the probe.
    pub(crate) fn try_admit(&self, now: Duration) -> bool {
        let open_until = self.open_until.load(Relaxed);
        if open_until == 0 {
            return true;
        }
        let next_probe = micros(now + pause(self.failures.load(Relaxed)));
        let admitted = micros(now) >= open_until
            && self.open_until.compare_exchange(open_until, next_probe, Relaxed, Relaxed).is_ok();
        if admitted {
            self.probing.store(true, Relaxed);
        }
        admitted
    }

    /// Returns `true` if [`try_admit`](Self::try_admit) would admit a call now. Changes nothing.
    pub(crate) fn would_admit(&self, now: Duration) -> bool {
        micros(now) >= self.open_until.load(Relaxed)
    }

    /// Records a successful call. Returns `true` if the breaker was open and this closes it.
    pub(crate) fn record_success(&self) -> bool {
        if self.failures.load(Relaxed) == 0 {
            return false;
        }
        self.failures.store(0, Relaxed);
        self.probing.store(false, Relaxed);
        self.open_until.swap(0, Relaxed) > 0
    }

    /// Records a failed call. Returns `true` if this opens the breaker.
    pub(crate) fn record_failure(&self, now: Duration) -> bool {
        if self.open_until.load(Relaxed) > 0 && !self.probing.swap(false, Relaxed) {
            return false;
        }
        let failures = self.failures.fetch_add(1, Relaxed).saturating_add(1);
        if failures < FAILURE_THRESHOLD {
            return false;
        }
        self.open_until.swap(micros(now + pause(failures)), Relaxed) == 0
    }
}

/// Returns how long the breaker is open after this number of consecutive failures.
fn pause(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(FAILURE_THRESHOLD).min(16);
    INITIAL_PAUSE.saturating_mul(1 << doublings).min(MAX_PAUSE)
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn at(millis: u64) -> Duration {
        Duration::from_millis(millis)
    }

    #[test]
    fn five_consecutive_failures_open_the_breaker_and_a_success_closes_it() {
        let breaker = Breaker::default();
        for _ in 0..4 {
            assert!(!breaker.record_failure(at(1)));
        }
        assert!(!breaker.record_success());
        for _ in 0..4 {
            assert!(!breaker.record_failure(at(1)) && breaker.try_admit(at(1)));
        }
        assert!(breaker.record_failure(at(1)), "the fifth");
        assert!(!breaker.try_admit(at(100)) && !breaker.would_admit(at(100)));
        assert!(!breaker.record_failure(at(50)), "the breaker was open");
        assert!(breaker.record_success() && breaker.try_admit(at(51)));
    }

    #[test]
    fn an_open_breaker_admits_one_probe_after_each_pause() {
        let breaker = Breaker::default();
        (0..5).for_each(|_| {
            breaker.record_failure(at(0));
        });
        assert!(!breaker.try_admit(at(99)));
        assert!(breaker.would_admit(at(100)) && breaker.try_admit(at(100)));
        assert!(!breaker.try_admit(at(100)), "only one probe at a time");
        breaker.record_failure(at(120));
        assert!(!breaker.try_admit(at(319)) && breaker.try_admit(at(320)), "twice as long");
        let mut now = at(320);
        for _ in 0..40 {
            breaker.record_failure(now);
            now += MAX_PAUSE;
            assert!(breaker.try_admit(now), "never longer than 2 s");
        }
        breaker.record_failure(now);
        assert!(!breaker.try_admit(now + at(1_999)), "the pause stays at its maximum");
    }

    #[test]
    fn failures_of_calls_in_progress_when_it_opened_are_ignored() {
        let breaker = Breaker::default();
        (0..100).for_each(|_| {
            breaker.record_failure(at(0));
        });
        assert!(!breaker.try_admit(at(99)) && breaker.try_admit(at(100)));
        // The probe fails, and so does another late call.
        assert!(!breaker.record_failure(at(110)) && !breaker.record_failure(at(111)));
        assert!(!breaker.try_admit(at(309)) && breaker.try_admit(at(310)));
        assert!(breaker.record_success());
        (0..4).for_each(|_| assert!(!breaker.record_failure(at(400))));
        assert!(breaker.try_admit(at(400)) && breaker.record_failure(at(400)), "the count starts at zero");
    }
}
