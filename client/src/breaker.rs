//! Whether an endpoint is worth a call: no I/O, and time is passed in.

use std::{
    sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// Failures in a row that open it.
const FAILURES: u32 = 5;
/// It stays open for so long before one call is let through.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// And twice as long each time that one fails too, up to so long.
const LONGEST_PAUSE: Duration = Duration::from_secs(2);

/// ## Closed ⟶ Open
/// So many calls in a row failed: nobody calls any more.
///
/// ## Open ⟶ Closed
/// After a pause one call is let through. If it succeeds all are; if not the pause begins anew, twice as long. What was
/// under way when it opened and fails now changes nothing: of many calls at once all fail at once.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    /// In a row.
    failures: AtomicU32,
    /// In microseconds since the client began; 0 while it is closed.
    open_until: AtomicU64,
    /// The one call that was let through since it is open has no outcome yet.
    probing: AtomicBool,
}

impl Breaker {
    /// Whether a call may be made now. When it is open, `true` is the probe's, and nobody else's.
    pub(crate) fn admits(&self, now: Duration) -> bool {
        let open_until = self.open_until.load(Relaxed);
        if open_until == 0 {
            return true;
        }
        let until = micros(now + pause(self.failures.load(Relaxed)));
        let admits =
            micros(now) >= open_until && self.open_until.compare_exchange(open_until, until, Relaxed, Relaxed).is_ok();
        if admits {
            self.probing.store(true, Relaxed);
        }
        admits
    }

    /// Whether it would admit a call, without letting one through.
    pub(crate) fn may_admit(&self, now: Duration) -> bool {
        micros(now) >= self.open_until.load(Relaxed)
    }

    /// `true`: it was open, and closes by this.
    pub(crate) fn succeeded(&self) -> bool {
        if self.failures.load(Relaxed) == 0 {
            return false;
        }
        self.failures.store(0, Relaxed);
        self.probing.store(false, Relaxed);
        self.open_until.swap(0, Relaxed) > 0
    }

    /// `true`: it opens by this.
    pub(crate) fn failed(&self, now: Duration) -> bool {
        if self.open_until.load(Relaxed) > 0 && !self.probing.swap(false, Relaxed) {
            return false;
        }
        let failures = self.failures.fetch_add(1, Relaxed).saturating_add(1);
        if failures < FAILURES {
            return false;
        }
        self.open_until.swap(micros(now + pause(failures)), Relaxed) == 0
    }
}

fn pause(failures: u32) -> Duration {
    let doublings = failures.saturating_sub(FAILURES).min(16);
    FIRST_PAUSE.saturating_mul(1 << doublings).min(LONGEST_PAUSE)
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
    fn five_failures_in_a_row_open_it_and_one_success_closes_it() {
        let breaker = Breaker::default();
        for _ in 0..4 {
            assert!(!breaker.failed(at(1)));
        }
        assert!(!breaker.succeeded());
        for _ in 0..4 {
            assert!(!breaker.failed(at(1)) && breaker.admits(at(1)));
        }
        assert!(breaker.failed(at(1)), "the fifth");
        assert!(!breaker.admits(at(100)) && !breaker.may_admit(at(100)));
        assert!(!breaker.failed(at(50)), "it was open");
        assert!(breaker.succeeded() && breaker.admits(at(51)));
    }

    #[test]
    fn an_open_one_lets_one_call_through_after_each_pause() {
        let breaker = Breaker::default();
        (0..5).for_each(|_| {
            breaker.failed(at(0));
        });
        assert!(!breaker.admits(at(99)));
        assert!(breaker.may_admit(at(100)) && breaker.admits(at(100)));
        assert!(!breaker.admits(at(100)), "one, not two");
        breaker.failed(at(120));
        assert!(!breaker.admits(at(319)) && breaker.admits(at(320)), "twice as long");
        let mut now = at(320);
        for _ in 0..40 {
            breaker.failed(now);
            now += LONGEST_PAUSE;
            assert!(breaker.admits(now), "never longer than 2 s");
        }
        breaker.failed(now);
        assert!(!breaker.admits(now + at(1_999)), "nor shorter by now");
    }

    #[test]
    fn calls_that_were_under_way_when_it_opened_do_not_make_it_stay_open() {
        let breaker = Breaker::default();
        (0..100).for_each(|_| {
            breaker.failed(at(0));
        });
        assert!(!breaker.admits(at(99)) && breaker.admits(at(100)));
        // The probe, and one that was as late.
        assert!(!breaker.failed(at(110)) && !breaker.failed(at(111)));
        assert!(!breaker.admits(at(309)) && breaker.admits(at(310)));
        assert!(breaker.succeeded());
        (0..4).for_each(|_| assert!(!breaker.failed(at(400))));
        assert!(breaker.admits(at(400)) && breaker.failed(at(400)), "it counts from the beginning");
    }
}
