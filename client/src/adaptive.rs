//! Adaptive concurrency without a service: how many requests of this process may be in flight follows what latency says.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::{Duration, Instant, SystemTime},
};

pub use sluicegate_common::adaptive::{Bounds, Method};
use sluicegate_common::adaptive::{Estimate, Sample, Window};

use crate::Outcome;

/// A limit that learns from what it lets through. Cheap to clone; all clones are one limit.
///
/// ```
/// use sluicegate_client::adaptive::{AdaptiveLimit, Bounds, Method};
///
/// let limit = AdaptiveLimit::new(Method::Vegas, Bounds::default());
/// if let Some(slot) = limit.try_acquire() {
///     // Here it runs.
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
    began: Instant,
    limit: AtomicU32,
    in_flight: AtomicU32,
    learned: Mutex<(Estimate, Window)>,
}

impl AdaptiveLimit {
    /// Bounds that are not in order are put in order: the ceiling counts most.
    #[must_use]
    pub fn new(method: Method, bounds: Bounds) -> Self {
        let ceiling = bounds.ceiling.max(1);
        let floor = bounds.floor.clamp(1, ceiling);
        let bounds = Bounds { floor, ceiling, initial: bounds.initial.clamp(floor, ceiling), ..bounds };
        let estimate = Estimate::new(method, &bounds);
        let shared = Shared {
            method,
            bounds,
            began: Instant::now(),
            limit: AtomicU32::new(estimate.limit(&bounds)),
            in_flight: AtomicU32::new(0),
            learned: Mutex::new((estimate, Window::default())),
        };
        Self { shared: Arc::new(shared) }
    }

    /// A slot, if one is free.
    #[must_use]
    pub fn try_acquire(&self) -> Option<Slot> {
        let limit = self.limit();
        // One step for both: two callers never have the last one.
        let free = |in_flight: u32| (in_flight < limit).then_some(in_flight + 1);
        let before = self.shared.in_flight.fetch_update(Relaxed, Relaxed, free).ok()?;
        Some(Slot {
            shared: Arc::clone(&self.shared),
            began: Instant::now(),
            in_flight: before + 1,
            latency: None,
            outcome: Outcome::Success,
        })
    }

    /// How many may be in flight now.
    #[must_use]
    pub fn limit(&self) -> u32 {
        self.shared.limit.load(Relaxed)
    }

    /// How many are.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.shared.in_flight.load(Relaxed)
    }
}

/// A place among those that are in flight. Dropped, it is free, and what it took is learned.
#[must_use = "dropped, it is free again"]
#[derive(Debug)]
pub struct Slot {
    shared: Arc<Shared>,
    began: Instant,
    in_flight: u32,
    latency: Option<Duration>,
    outcome: Outcome,
}

impl Slot {
    /// How what it was held for has ended; [`Outcome::Success`] if nobody says otherwise. By a panic it has failed.
    pub fn ended(&mut self, outcome: Outcome) {
        self.outcome = outcome;
    }

    /// It has taken until now, and not until the slot is dropped: for what answers first and goes on for a while then.
    pub fn answered(&mut self) {
        self.latency.get_or_insert_with(|| self.began.elapsed());
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let Shared { method, bounds, began, limit, in_flight, learned } = &*self.shared;
        in_flight.fetch_sub(1, Relaxed);
        if self.outcome == Outcome::Failed || std::thread::panicking() {
            return;
        }
        let latency = self.latency.unwrap_or_else(|| self.began.elapsed());
        let dropped = matches!(self.outcome, Outcome::TimedOut | Outcome::Dropped);
        let sample =
            Sample { latency: (latency.as_nanos() as f64 / 1_000.0).max(0.001), in_flight: self.in_flight, dropped };
        let (estimate, window) = &mut *learned.lock().unwrap_or_else(PoisonError::into_inner);
        let now = u64::try_from(began.elapsed().as_micros()).unwrap_or(u64::MAX);
        if let Some(all) = window.add(sample, now) {
            estimate.update(*method, bounds, all, wall_clock());
            limit.store(estimate.limit(bounds), Relaxed);
        }
    }
}

/// All who share an upstream measure at the same time: by what they all know.
#[allow(clippy::disallowed_methods, reason = "the clock on the wall is the only one that processes share")]
fn wall_clock() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn never_more_are_in_flight_than_the_limit() {
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
    fn bounds_are_put_in_order() {
        let limit = |floor, ceiling, initial| {
            AdaptiveLimit::new(Method::Vegas, Bounds { floor, ceiling, initial, ..Bounds::default() }).limit()
        };
        assert_eq!([limit(0, 0, 0), limit(9, 5, 7), limit(2, 5, 9), limit(2, 5, 1)], [1, 5, 5, 2]);
    }

    #[test]
    fn what_is_dropped_makes_it_fall_and_what_failed_says_nothing() {
        let run = |outcome| {
            let limit = AdaptiveLimit::new(Method::Aimd, Bounds { initial: 100, ..Bounds::default() });
            let deadline = Instant::now() + Duration::from_secs(2);
            while limit.limit() == 100 && Instant::now() < deadline {
                let mut slots: Vec<_> = (0..60).filter_map(|_| limit.try_acquire()).collect();
                slots.iter_mut().for_each(|slot| slot.ended(outcome));
            }
            limit.limit()
        };
        assert_eq!(
            [Outcome::Dropped, Outcome::TimedOut, Outcome::Failed, Outcome::Success].map(run),
            [90, 90, 100, 101]
        );
    }
}
