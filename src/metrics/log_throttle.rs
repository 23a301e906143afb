//! What goes wrong a thousand times a second is worth one line.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::{Duration, Instant},
};

/// An episode is over when nothing has happened for so long.
const QUIET: Duration = Duration::from_secs(10);

/// Tells the first of many like events from the rest.
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
    /// Notes an event; true when it begins an episode.
    pub fn should_log(&self) -> bool {
        self.begins_at(self.start.elapsed())
    }

    fn begins_at(&self, now: Duration) -> bool {
        let now = u64::try_from(now.as_millis()).unwrap_or(u64::MAX - 1) + 1;
        let latest = self.latest.swap(now, Relaxed);
        latest == 0 || now.saturating_sub(latest) > QUIET.as_millis() as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_episode_has_one_beginning_and_ends_when_it_is_quiet() {
        let episode = LogThrottle::default();
        let begins = |seconds| episode.begins_at(Duration::from_secs(seconds));
        assert_eq!([0, 0, 5, 15, 25, 36, 37].map(begins), [true, false, false, false, false, true, false]);
    }
}
