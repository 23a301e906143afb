//! [`Pauses`]: how long the process did not run, because of a CPU quota, `SIGSTOP`, or a busy or suspended machine.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use crate::{
    metrics::{Instrument, LogThrottle, Meter, Registrar},
    platform::process_cpu_time,
};

/// Interval at which a thread reads the clock.
const INTERVAL: Duration = Duration::from_millis(25);
/// Shortest pause that is counted.
const MIN_PAUSE: Duration = Duration::from_millis(20);

/// The pauses of the process.
#[derive(Clone, Default)]
pub struct Pauses(Arc<Counts>);

#[derive(Default)]
struct Counts {
    pauses: AtomicU64,
    micros: AtomicU64,
    log: LogThrottle,
}

impl Pauses {
    /// Measures at an interval how late the runtime of this thread wakes a task. Returns only on systems that do not
    /// report CPU time.
    pub async fn run(self) {
        let threads = match thread::available_parallelism() {
            Ok(threads) => threads.get() as u32,
            Err(_) => 1,
        };
        while let Some(used_before) = process_cpu_time() {
            let start = Instant::now();
            tokio::time::sleep(INTERVAL).await;
            let used = process_cpu_time().unwrap_or_default().saturating_sub(used_before);
            if let Some(pause) = pause(start.elapsed(), used, threads) {
                self.record(pause);
            }
        }
    }

    fn record(&self, pause: Duration) {
        self.0.pauses.fetch_add(1, Relaxed);
        self.0.micros.fetch_add(u64::try_from(pause.as_micros()).unwrap_or(u64::MAX), Relaxed);
        if self.0.log.should_log() {
            tracing::warn!(
                paused_ms = pause.as_millis(),
                "the process was paused, for example by a CPU quota: all calls waited, and answers that arrived during \
                 the pause are accepted"
            );
        }
    }

    /// Registers the metrics with `meter`.
    pub fn observe(&self, meter: &dyn Meter) {
        Registrar { meter, source: &self.0 }.counter(
            "sluicegate_process_pauses_total",
            "Number of times the process did not run for 20 ms or longer",
            |counts| counts.pauses.load(Relaxed),
        );
        let counts = Arc::clone(&self.0);
        meter.register(Instrument::f64_counter(
            "sluicegate_process_paused_seconds_total",
            "Seconds for which the process did not run, in pauses of 20 ms or longer",
            move |observer| observer.observe(counts.micros.load(Relaxed) as f64 / 1e6, []),
        ));
    }
}

/// Returns the length of a pause, if `elapsed` instead of [`INTERVAL`] passed because of one.
///
/// In a pause, no thread uses the CPU. If the process used it all the time, only the measuring thread did not get its turn.
fn pause(elapsed: Duration, used: Duration, threads: u32) -> Option<Duration> {
    let late = elapsed.saturating_sub(INTERVAL);
    let used_before_pause = INTERVAL * threads;
    let was_paused = late >= MIN_PAUSE && used <= used_before_pause + late / 2;
    was_paused.then_some(late)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_process_without_cpu_time_was_paused() {
        let millis = Duration::from_millis;
        for (elapsed, used, threads, expected) in [
            (25, 0, 1, None),
            (44, 0, 1, None),
            (45, 0, 1, Some(20)),
            (145, 0, 2, Some(120)),
            (145, 50, 2, Some(120)),
            (145, 110, 2, Some(120)),
            (145, 111, 2, None),
            (145, 290, 2, None),
        ] {
            let pause = pause(millis(elapsed), millis(used), threads);
            assert_eq!(pause, expected.map(millis), "{elapsed} ms, of which {used} used");
        }
    }

    #[test]
    fn pauses_are_added_up() {
        let pauses = Pauses::default();
        pauses.record(Duration::from_millis(20));
        pauses.record(Duration::from_millis(100));
        assert_eq!((pauses.0.pauses.load(Relaxed), pauses.0.micros.load(Relaxed)), (2, 120_000));
    }
}
