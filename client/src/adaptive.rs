//! [`AdaptiveLimit`]: a limit on the requests of this process in flight, adapted to their measured latency. It needs no
//! rate limit service.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

pub use sluicegate_overload::adaptive::{Bounds, Method};
use sluicegate_overload::adaptive::{Estimate, Sample, Window};

use crate::Outcome;

use crate::lock::lock;

/// Concurrency limit that adapts to the latency of the admitted requests.
///
/// A limit is cheap to clone. All clones share one limit.
///
/// # Examples
///
/// ```
/// use sluicegate_client::adaptive::{AdaptiveLimit, Bounds, Method};
///
/// let limit = AdaptiveLimit::new(Method::Vegas, Bounds::default());
/// if let Some(slot) = limit.try_acquire() {
///     // Do the work. Dropping the slot releases it and records the latency.
///     drop(slot);
/// }
/// assert_eq!(limit.in_flight(), 0);
/// ```
#[derive(Clone, Debug)]
pub struct AdaptiveLimit {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    method: Method,
    bounds: Bounds,
    started_at: Instant,
    limit: AtomicU32,
    in_flight: AtomicU32,
    learned: Mutex<(Estimate, Window)>,
}

impl AdaptiveLimit {
    /// Creates a limit that starts at [`Bounds::initial`].
    ///
    /// Inconsistent bounds are corrected: the floor is lowered to the ceiling, and the initial limit is moved between
    /// them.
    #[must_use]
    pub fn new(method: Method, bounds: Bounds) -> Self {
        let ceiling = bounds.ceiling.max(1);
        let floor = bounds.floor.clamp(1, ceiling);
        let bounds = Bounds { floor, ceiling, initial: bounds.initial.clamp(floor, ceiling), ..bounds };
        let estimate = Estimate::new(method, &bounds);
        let shared = Shared {
            method,
            bounds,
            started_at: Instant::now(),
            limit: AtomicU32::new(estimate.limit(&bounds)),
            in_flight: AtomicU32::new(0),
            learned: Mutex::new((estimate, Window::default())),
        };
        Self { shared: Arc::new(shared) }
    }

    /// Acquires a slot. Returns `None` if the limit is reached.
    #[must_use]
    pub fn try_acquire(&self) -> Option<Slot> {
        let limit = self.limit();
        // Comparison and increment are one atomic operation, so two callers cannot both take the last slot.
        let update = self
            .shared
            .in_flight
            .fetch_update(Relaxed, Relaxed, |in_flight| if in_flight < limit { Some(in_flight + 1) } else { None });
        let before = update.ok()?;
        Some(Slot {
            shared: Arc::clone(&self.shared),
            acquired_at: Instant::now(),
            in_flight: before + 1,
            latency: None,
            outcome: Outcome::Success,
        })
    }

    /// Returns the current limit: the maximum number of requests in flight.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.shared.limit.load(Relaxed)
    }

    /// Returns the number of requests in flight.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.shared.in_flight.load(Relaxed)
    }
}

/// Slot of an [`AdaptiveLimit`]. When it is dropped, it is released and its latency is recorded.
#[must_use = "a slot is released when it is dropped"]
#[derive(Debug)]
pub struct Slot {
    shared: Arc<Shared>,
    acquired_at: Instant,
    in_flight: u32,
    latency: Option<Duration>,
    outcome: Outcome,
}

impl Slot {
    /// Sets the outcome of the work; [`Outcome::Success`] by default. After a panic, the outcome is
    /// [`Outcome::Failed`].
    pub fn set_outcome(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// Records the latency from acquiring the slot until now. Without this call, the latency extends until the slot is
    /// dropped.
    ///
    /// This is useful if the response starts long before the slot is dropped, as with streamed bodies.
    pub fn record_latency(&mut self) {
        self.latency.get_or_insert_with(|| self.acquired_at.elapsed());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Shared { method, bounds, started_at, limit, in_flight, learned } = &*self.shared;
        in_flight.fetch_sub(1, Relaxed);
        if self.outcome == Outcome::Failed || std::thread::panicking() {
            return;
        }
        let latency = self.latency.unwrap_or_else(|| self.acquired_at.elapsed());
        let dropped = matches!(self.outcome, Outcome::TimedOut | Outcome::Dropped);
        let sample =
            Sample { latency: (latency.as_nanos() as f64 / 1_000.0).max(0.001), in_flight: self.in_flight, dropped };
        let (estimate, window) = &mut *lock(learned);
        let now = u64::try_from(started_at.elapsed().as_micros()).unwrap_or(u64::MAX);
        if let Some(combined) = window.add(sample, now) {
            estimate.update(*method, bounds, combined, wall_clock_us());
            limit.store(estimate.limit(bounds), Relaxed);
        }
    }
}

/// Returns the wall-clock time in microseconds since the Unix epoch.
///
/// All processes that share an upstream must measure the upstream's latency without load at the same time.
#[allow(clippy::disallowed_methods, reason = "processes share no other clock")]
fn wall_clock_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_in_flight_never_exceeds_the_limit() {
        let limit = AdaptiveLimit::new(Method::Aimd, Bounds { initial: 3, ..Bounds::default() });
        let slots: Vec<_> = std::iter::from_fn(|| limit.try_acquire()).collect();
        assert_eq!((slots.len(), limit.in_flight(), limit.limit()), (3, 3, 3));
        drop(slots);
        assert_eq!(limit.in_flight(), 0);
        let threads: Vec<_> = (0..4)
            .map(|_| {
                let limit = limit.clone();
                std::thread::spawn(move || {
                    for _ in 0..10_000 {
                        let slot = limit.try_acquire();
                        assert!(limit.in_flight() <= limit.limit() + 4);
                        drop(slot);
                    }
                })
            })
            .collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert_eq!(limit.in_flight(), 0);
    }

    #[test]
    fn inconsistent_bounds_are_corrected() {
        let limit = |floor, ceiling, initial| {
            AdaptiveLimit::new(Method::Vegas, Bounds { floor, ceiling, initial, ..Bounds::default() }).limit()
        };
        assert_eq!([limit(0, 0, 0), limit(9, 5, 7), limit(2, 5, 9), limit(2, 5, 1)], [1, 5, 5, 2]);
    }

    #[test]
    fn dropped_requests_lower_the_limit_and_failed_ones_are_ignored() {
        let run = |outcome| {
            let limit = AdaptiveLimit::new(Method::Aimd, Bounds { initial: 100, ..Bounds::default() });
            let deadline = Instant::now() + Duration::from_secs(2);
            while limit.limit() == 100 && Instant::now() < deadline {
                let mut slots: Vec<_> = (0..60).filter_map(|_| limit.try_acquire()).collect();
                slots.iter_mut().for_each(|slot| slot.set_outcome(outcome));
            }
            limit.limit()
        };
        assert_eq!(
            [Outcome::Dropped, Outcome::TimedOut, Outcome::Failed, Outcome::Success].map(run),
            [90, 90, 100, 101]
        );
    }

    #[test]
    fn a_slot_reports_its_latency_and_the_number_in_flight() {
        let limit = AdaptiveLimit::new(Method::Aimd, Bounds { initial: 100, ..Bounds::default() });
        let (mut first, mut second) = (limit.try_acquire().unwrap(), limit.try_acquire().unwrap());
        first.record_latency();
        assert!(first.latency.is_some());
        second.latency = Some(Duration::from_millis(2));
        second.record_latency();
        drop(second);
        let window = limit.shared.learned.lock().unwrap().1;
        assert_eq!((window.sum, window.count, window.in_flight), (2_000.0, 1, 2));
    }

    #[test]
    fn the_wall_clock_counts_microseconds_since_1970() {
        assert!(wall_clock_us() > 1_700_000_000_000_000);
    }
}
