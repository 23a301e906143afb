//! [`Shedder`]: sheds a growing share of requests on an overloaded host, the least important classes first, and
//! restores them slowly.
//!
//! Classes are ordered by importance, and the first class is never shed. One number, the *level*, determines how much
//! is shed: at 0 nothing, at 1 all of the last class, at 2 all of the last two classes, and in between a share of one
//! class. No class is shed while requests of a less important class are admitted.
//!
//! The level rises while the utilization is above [`Settings::shed_above`], faster with higher utilization, and falls
//! while it is below [`Settings::restore_below`]. In between it stays, which is the state of a host that sheds just
//! enough. The direction reverses only after the utilization has been beyond the other threshold without interruption
//! for [`Settings::stabilization`]. Noise therefore causes at most one reversal in that time.
//!
//! This follows Stripe's worker utilization shedder, with its constants, except for the stabilization and the slower
//! restoration.

use std::time::Duration;

/// Thresholds and reaction times of a [`Shedder`].
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Utilization below which less is shed; 0.7 by default.
    pub restore_below: f64,
    /// Utilization above which more is shed; 0.8 by default.
    pub shed_above: f64,
    /// Time for which the utilization must be beyond a threshold before the level changes direction; 28 s by default.
    pub stabilization: Duration,
    /// Time in which a whole class is shed at full utilization; 60 s by default.
    pub shed_time: Duration,
    /// Time in which a whole class is restored at zero utilization; 240 s by default.
    pub restore_time: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            restore_below: 0.7,
            shed_above: 0.8,
            stabilization: Duration::from_secs(28),
            shed_time: Duration::from_secs(60),
            restore_time: Duration::from_secs(240),
        }
    }
}

/// Load shedder of one host. Time is passed in, from any monotonic clock.
#[derive(Clone, Debug)]
pub struct Shedder {
    settings: Settings,
    classes: usize,
    level: f64,
    /// Direction in which the level moves or last moved.
    direction: Direction,
    /// Time for which the utilization has demanded the opposite direction without interruption.
    opposed_for: Duration,
    last_tick: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Up,
    Down,
}

/// Maximum time that a tick accounts for. If there was no tick for longer, the host was suspended.
const MAX_STEP: Duration = Duration::from_secs(5);

impl Shedder {
    /// Creates a shedder for this number of classes, at least two. The first class is never shed.
    #[must_use]
    pub fn new(classes: usize, settings: Settings) -> Self {
        Self {
            settings,
            classes: classes.max(2),
            level: 0.0,
            direction: Direction::Down,
            opposed_for: Duration::ZERO,
            last_tick: None,
        }
    }

    /// Updates the level with the recent utilization, where 1 is full utilization. To be called about once a second.
    pub fn tick(&mut self, now: Duration, utilization: f64) {
        let step = match self.last_tick {
            Some(last) => now.saturating_sub(last).min(MAX_STEP),
            None => Duration::ZERO,
        };
        self.last_tick = Some(now);
        let Settings { restore_below, shed_above, stabilization, shed_time, restore_time } = self.settings;
        let (direction, speed, class_time) = if utilization > shed_above {
            (Direction::Up, (utilization - shed_above) / (1.0 - shed_above).max(f64::EPSILON), shed_time)
        } else if utilization < restore_below {
            (Direction::Down, 1.0 - utilization / restore_below.max(f64::EPSILON), restore_time)
        } else {
            // A utilization between the thresholds interrupts a change of direction.
            self.opposed_for = Duration::ZERO;
            return;
        };
        if direction != self.direction {
            self.opposed_for += step;
            if self.opposed_for < stabilization {
                return;
            }
            self.direction = direction;
        }
        self.opposed_for = Duration::ZERO;
        let change = speed.clamp(0.0, 1.0) * step.as_secs_f64() / class_time.as_secs_f64().max(f64::EPSILON);
        let level = if direction == Direction::Up { self.level + change } else { self.level - change };
        self.level = level.clamp(0.0, self.max_level());
    }

    /// Returns the level at which only the first class is admitted.
    fn max_level(&self) -> f64 {
        (self.classes - 1) as f64
    }

    /// Returns how much is shed: 0 is nothing, 1 all of the last class, 2 all of the last two classes.
    #[must_use]
    pub fn level(&self) -> f64 {
        self.level
    }

    /// Returns the share of a class that is shed, from 0 to 1. An index beyond the last class counts as the last class.
    #[must_use]
    pub fn share(&self, class: usize) -> f64 {
        share(self.level, class, self.classes)
    }
}

/// Returns the share of a class that is shed at a level, from 0 to 1.
#[must_use]
pub fn share(level: f64, class: usize, classes: usize) -> f64 {
    if class == 0 {
        return 0.0;
    }
    let less_important = classes.saturating_sub(1).saturating_sub(class);
    (level - less_important as f64).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks once per second and returns the level afterwards.
    fn run(shedder: &mut Shedder, from: u64, seconds: u64, utilization: f64) -> f64 {
        (from..from + seconds).for_each(|second| shedder.tick(Duration::from_secs(second), utilization));
        shedder.level()
    }

    fn shares(shedder: &Shedder) -> [f64; 4] {
        [0, 1, 2, 3].map(|class| (shedder.share(class) * 100.0).round() / 100.0)
    }

    #[test]
    fn the_least_important_class_is_shed_first_and_the_first_class_never() {
        let mut shedder = Shedder::new(4, Settings::default());
        assert_eq!(run(&mut shedder, 0, 28, 1.0), 0.0, "a short overload sheds nothing");
        run(&mut shedder, 28, 31, 1.0);
        assert_eq!(shares(&shedder), [0.0, 0.0, 0.0, 0.52]);
        run(&mut shedder, 59, 60, 1.0);
        assert_eq!(shares(&shedder), [0.0, 0.0, 0.52, 1.0]);
        run(&mut shedder, 119, 600, 1.0);
        assert_eq!((shares(&shedder), shedder.level()), ([0.0, 1.0, 1.0, 1.0], 3.0));
        assert_eq!(shedder.share(9), 1.0);
    }

    #[test]
    fn the_level_stays_between_the_thresholds_and_falls_slowly() {
        let mut shedder = Shedder::new(4, Settings::default());
        run(&mut shedder, 0, 59, 1.0);
        let level = shedder.level();
        assert_eq!(run(&mut shedder, 59, 3_600, 0.75), level, "between the thresholds");
        assert_eq!(run(&mut shedder, 3_659, 27, 0.0), level);
        // An interruption restarts the stabilization.
        run(&mut shedder, 3_686, 1, 0.75);
        assert_eq!(run(&mut shedder, 3_687, 27, 0.0), level);
        let after = run(&mut shedder, 3_714, 60, 0.0);
        assert!(after > level - 0.27 && after < level - 0.2, "{level} {after}");
        assert_eq!(run(&mut shedder, 3_774, 240, 0.0), 0.0);
    }

    #[test]
    fn a_pause_between_ticks_counts_as_the_maximum_step() {
        let mut shedder = Shedder::new(2, Settings { stabilization: Duration::ZERO, ..Settings::default() });
        shedder.tick(Duration::ZERO, 1.0);
        shedder.tick(Duration::from_secs(3_600), 1.0);
        assert!((shedder.level() - 5.0 / 60.0).abs() < 1e-9, "{}", shedder.level());
        // Invalid utilizations keep the level within its bounds.
        for invalid in [f64::NAN, f64::INFINITY, -f64::INFINITY, -1.0, 1e300] {
            shedder.tick(Duration::from_secs(3_601), invalid);
            shedder.tick(Duration::ZERO, invalid);
            assert!((0.0..=1.0).contains(&shedder.level()));
        }
    }

    #[test]
    fn the_speed_follows_the_distance_from_the_threshold() {
        let mut shedder = Shedder::new(4, Settings { stabilization: Duration::ZERO, ..Settings::default() });
        let mut change = |from, utilization| {
            let before = shedder.level();
            (run(&mut shedder, from, 60, utilization) - before) * 60.0
        };
        // The first tick has no time before it.
        assert!((change(0, 0.9) - 29.5).abs() < 1e-6, "half of the distance to full utilization");
        assert!((change(60, 1.0) - 60.0).abs() < 1e-6);
        assert!((change(120, 0.35) + 7.5).abs() < 1e-6, "half of the distance to zero utilization");
        assert!((change(180, 0.0) + 15.0).abs() < 1e-6);
    }

    #[test]
    fn a_utilization_at_a_threshold_interrupts_a_change_of_direction() {
        let mut shedder = Shedder::new(4, Settings::default());
        run(&mut shedder, 0, 28, 0.8);
        assert_eq!(run(&mut shedder, 28, 27, 1.0), 0.0);
        let level = run(&mut shedder, 55, 30, 1.0);
        assert!(level > 0.4, "{level}");
        run(&mut shedder, 85, 28, 0.7);
        assert_eq!(run(&mut shedder, 113, 27, 0.0), level);
    }
}
