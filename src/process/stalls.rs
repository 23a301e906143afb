//! [`Stalls`]: how long the threads of the service did not get to their work.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use crate::metrics::{Instrument, Label, Meter};
use parking_lot::{Mutex, MutexGuard};

/// Interval at which the watchdog wakes on its thread. A later wake-up is a stall.
const INTERVAL: Duration = Duration::from_millis(100);
/// Minimum time for which the metric reports a stall.
const WINDOW: Duration = Duration::from_secs(60);

/// The longest stalls of every thread.
#[derive(Clone, Default)]
pub struct Stalls(Arc<Mutex<Vec<(String, Watchdog)>>>);

/// A watchdog of one thread, which measures its stalls.
#[derive(Clone)]
pub struct Watchdog(Arc<Mutex<State>>);

struct State {
    last_beat: Instant,
    window_start: Instant,
    /// The longest stall of the current window, and of the one before.
    longest: [Duration; 2],
}

impl Stalls {
    /// Adds a thread with a runtime, and returns its watchdog, which must [run](Watchdog::run) on this thread.
    #[must_use]
    pub fn add(&self, thread: &str) -> Watchdog {
        let watchdog = Watchdog::new(Instant::now());
        self.0.lock().push((thread.to_owned(), watchdog.clone()));
        watchdog
    }

    /// Registers the metric with `meter`.
    pub fn observe(&self, meter: &dyn Meter) {
        let stalls = self.clone();
        meter.register(Instrument::f64_gauge(
            "sluicegate_thread_stall_seconds",
            "Longest time for which a thread served nothing, in the last one to two minutes",
            move |observer| {
                for (thread, watchdog) in stalls.0.lock().iter() {
                    let longest = watchdog.longest(Instant::now());
                    observer.observe(longest.as_secs_f64(), [Label::new("thread", thread.clone())]);
                }
            },
        ));
    }
}

impl Watchdog {
    fn new(now: Instant) -> Self {
        Self(Arc::new(Mutex::new(State { last_beat: now, window_start: now, longest: [Duration::ZERO; 2] })))
    }

    /// Measures at an interval how late the runtime of this thread wakes a task. Never returns.
    pub async fn run(self) {
        self.beat(Instant::now());
        loop {
            tokio::time::sleep(INTERVAL).await;
            self.beat(Instant::now());
        }
    }

    fn beat(&self, now: Instant) {
        let mut state = self.state();
        state.advance(now);
        state.last_beat = now;
    }

    /// Returns the longest stall of this window and the one before, also if it has not ended.
    fn longest(&self, now: Instant) -> Duration {
        let mut state = self.state();
        state.advance(now);
        state.longest[0].max(state.longest[1])
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    fn advance(&mut self, now: Instant) {
        let late = now.saturating_duration_since(self.last_beat).saturating_sub(INTERVAL);
        let age = now.saturating_duration_since(self.window_start);
        if age >= WINDOW {
            let previous = if age < WINDOW * 2 { self.longest[0] } else { Duration::ZERO };
            self.longest = [Duration::ZERO, previous];
            self.window_start = now;
        }
        self.longest[0] = self.longest[0].max(late);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A watchdog with a time in milliseconds.
    struct Test {
        watchdog: Watchdog,
        start: Instant,
    }

    impl Test {
        fn new() -> Self {
            let start = Instant::now();
            Self { watchdog: Watchdog::new(start), start }
        }

        fn beat(&self, millis: u64) {
            self.watchdog.beat(self.start + Duration::from_millis(millis));
        }

        fn longest(&self, millis: u64) -> u128 {
            self.watchdog.longest(self.start + Duration::from_millis(millis)).as_millis()
        }
    }

    #[test]
    fn the_longest_stall_is_shown_for_at_least_a_minute() {
        let test = Test::new();
        test.beat(100);
        assert_eq!(test.longest(200), 0);
        test.beat(2_200);
        test.beat(2_300);
        assert_eq!(test.longest(2_300), 2_000);
        for beat in 24..1_190 {
            test.beat(beat * 100);
            assert_eq!(test.longest(beat * 100), 2_000, "after {beat} intervals");
        }
        for beat in 1_190..1_230 {
            test.beat(beat * 100);
        }
        assert_eq!(test.longest(122_900), 0);
    }

    #[test]
    fn a_stall_is_shown_before_it_ends() {
        let test = Test::new();
        test.beat(100);
        assert_eq!(test.longest(5_200), 5_000);
        assert_eq!(test.longest(200_200), 200_000);
    }

    #[tokio::test]
    async fn a_blocked_runtime_is_a_stall() {
        let watchdog = Watchdog::new(Instant::now());
        let running = tokio::spawn(watchdog.clone().run());
        tokio::task::yield_now().await;
        let blocked = Duration::from_millis(300);
        std::thread::sleep(blocked);
        tokio::time::sleep(INTERVAL).await;
        running.abort();
        assert!(watchdog.longest(Instant::now()) >= blocked - INTERVAL);
    }
}
