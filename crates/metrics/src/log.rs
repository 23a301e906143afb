//! Messages in the log: [`LogThrottle`] limits the messages about a repeated event, and [`chain`] formats an error with
//! its causes.

use std::{
    error::Error,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// Returns an error and its causes in one line, separated by colons.
///
/// An error is formatted once, by the code that handles it.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

/// Time without events after which the next event is logged again.
const QUIET_PERIOD: Duration = Duration::from_secs(10);

/// A filter that selects the first of many similar events for the log.
#[derive(Debug)]
pub struct LogThrottle {
    start: Instant,
    /// Milliseconds from the start to the latest event, plus one; 0 before the first.
    latest: AtomicU64,
}

impl Default for LogThrottle {
    fn default() -> Self {
        Self { start: Instant::now(), latest: AtomicU64::new(0) }
    }
}

impl LogThrottle {
    /// Records an event and returns whether to log it, because it is the first one after a quiet period.
    pub fn should_log(&self) -> bool {
        self.should_log_at(self.start.elapsed())
    }

    fn should_log_at(&self, now: Duration) -> bool {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX - 1) + 1;
        let latest = self.latest.swap(now, Relaxed);
        latest == 0 || now.saturating_sub(latest) > QUIET_PERIOD.as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_once_until_there_was_no_event_for_a_while() {
        let throttle = LogThrottle::default();
        let logs = |seconds| throttle.should_log_at(Duration::from_secs(seconds));
        assert_eq!([0, 0, 5, 15, 25, 36, 37].map(logs), [true, false, false, false, false, true, false]);
    }

    #[test]
    fn the_clock_starts_with_the_throttle() {
        let throttle = LogThrottle::default();
        assert!(throttle.should_log());
        // An event in the future, so that no time can pass until a message is due.
        assert!(throttle.should_log_at(Duration::from_secs(86_400)));
        assert!(!throttle.should_log());
    }
}
