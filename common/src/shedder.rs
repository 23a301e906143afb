//! Which requests a box that is too busy turns away: the least important first, more and more of them, and back slowly.
//!
//! The classes stand in the order of their importance; the first is never turned away. How much is shed is one number, the
//! *level*: at 0 nothing is, at 1 all of the last class, at 2 all of the last two, and in between a part of one. So no class
//! is shed while a less important one passes.
//!
//! The level rises while the box is busier than [`Settings::busy`], the faster the busier, and falls while it is less busy
//! than [`Settings::calm`]. In between it stays: that is where a box is that sheds as much as it has to. It turns round only
//! after the box has been on the other side for as long as [`Settings::patience`] without a break; so there is no more than
//! one reversal in that time, whatever noise there is.
//!
//! After Stripe's worker utilization shedder, whose constants these are, but for the patience and the slower way back.

use std::time::Duration;

/// When a box is busy, and how fast it reacts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Settings {
    /// Below this utilization less is shed.
    pub calm: f64,
    /// Above this one more is.
    pub busy: f64,
    /// For so long it has to be busy, or calm, before the level turns round.
    pub patience: Duration,
    /// A box with nothing to spare turns a class away in this time.
    pub shed_in: Duration,
    /// A box with nothing to do takes a class back in this time.
    pub restore_in: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            calm: 0.7,
            busy: 0.8,
            patience: Duration::from_secs(28),
            shed_in: Duration::from_secs(60),
            restore_in: Duration::from_secs(240),
        }
    }
}

/// How much one box sheds. Time is passed in, from any clock that does not step back.
#[derive(Clone, Debug)]
pub struct Shedder {
    settings: Settings,
    classes: usize,
    level: f64,
    /// The way the level moves, or last moved.
    way: Way,
    /// For how long the box has been on the other side, without a break.
    opposed: Duration,
    last: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Up,
    Down,
}

/// A box that was not looked at for longer has been asleep: what it missed does not count.
const LONGEST_STEP: Duration = Duration::from_secs(5);

impl Shedder {
    /// Of so many classes, the first of which is never shed; at least two.
    #[must_use]
    pub fn new(classes: usize, settings: Settings) -> Self {
        Self { settings, classes: classes.max(2), level: 0.0, way: Way::Down, opposed: Duration::ZERO, last: None }
    }

    /// How busy the box has been lately: 1 is with nothing to spare. To be said about once a second.
    pub fn tick(&mut self, now: Duration, utilization: f64) {
        let step = self.last.map_or(Duration::ZERO, |last| now.saturating_sub(last)).min(LONGEST_STEP);
        self.last = Some(now);
        let Settings { calm, busy, patience, shed_in, restore_in } = self.settings;
        let (way, force, full) = if utilization > busy {
            (Way::Up, (utilization - busy) / (1.0 - busy).max(f64::EPSILON), shed_in)
        } else if utilization < calm {
            (Way::Down, 1.0 - utilization / calm.max(f64::EPSILON), restore_in)
        } else {
            // Neither: whoever wants to turn round starts over.
            self.opposed = Duration::ZERO;
            return;
        };
        if way != self.way {
            self.opposed += step;
            if self.opposed < patience {
                return;
            }
            self.way = way;
        }
        self.opposed = Duration::ZERO;
        let moved = force.clamp(0.0, 1.0) * step.as_secs_f64() / full.as_secs_f64().max(f64::EPSILON);
        let level = if way == Way::Up { self.level + moved } else { self.level - moved };
        self.level = level.clamp(0.0, self.most());
    }

    /// The level at which only the first class passes.
    fn most(&self) -> f64 {
        (self.classes - 1) as f64
    }

    /// How much is shed.
    #[must_use]
    pub fn level(&self) -> f64 {
        self.level
    }

    /// The part of a class that is turned away, from 0 to 1; classes beyond the last are as the last.
    #[must_use]
    pub fn share(&self, class: usize) -> f64 {
        share(self.level, class, self.classes)
    }
}

/// The part of a class that is turned away at a level.
#[must_use]
pub fn share(level: f64, class: usize, classes: usize) -> f64 {
    if class == 0 {
        return 0.0;
    }
    let below = classes.saturating_sub(1).saturating_sub(class);
    (level - below as f64).clamp(0.0, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Ticks each second; the level after them.
    fn run(shedder: &mut Shedder, from: u64, seconds: u64, utilization: f64) -> f64 {
        (from..from + seconds).for_each(|second| shedder.tick(Duration::from_secs(second), utilization));
        shedder.level()
    }

    fn shares(shedder: &Shedder) -> [f64; 4] {
        [0, 1, 2, 3].map(|class| (shedder.share(class) * 100.0).round() / 100.0)
    }

    #[test]
    fn the_least_important_go_first_and_the_first_never() {
        let mut shedder = Shedder::new(4, Settings::default());
        assert_eq!(run(&mut shedder, 0, 28, 1.0), 0.0, "a moment of load is none");
        run(&mut shedder, 28, 31, 1.0);
        assert_eq!(shares(&shedder), [0.0, 0.0, 0.0, 0.52]);
        run(&mut shedder, 59, 60, 1.0);
        assert_eq!(shares(&shedder), [0.0, 0.0, 0.52, 1.0]);
        run(&mut shedder, 119, 600, 1.0);
        assert_eq!((shares(&shedder), shedder.level()), ([0.0, 1.0, 1.0, 1.0], 3.0));
        assert_eq!(shedder.share(9), 1.0);
    }

    #[test]
    fn it_stays_where_it_has_to_be_and_comes_back_slowly() {
        let mut shedder = Shedder::new(4, Settings::default());
        run(&mut shedder, 0, 59, 1.0);
        let level = shedder.level();
        assert_eq!(run(&mut shedder, 59, 3_600, 0.75), level, "between calm and busy");
        assert_eq!(run(&mut shedder, 3_659, 27, 0.0), level);
        // A break: the wait begins anew.
        run(&mut shedder, 3_686, 1, 0.75);
        assert_eq!(run(&mut shedder, 3_687, 27, 0.0), level);
        let after = run(&mut shedder, 3_714, 60, 0.0);
        assert!(after > level - 0.27 && after < level - 0.2, "{level} {after}");
        assert_eq!(run(&mut shedder, 3_774, 240, 0.0), 0.0);
    }

    #[test]
    fn a_box_that_slept_has_not_been_busy() {
        let mut shedder = Shedder::new(2, Settings { patience: Duration::ZERO, ..Settings::default() });
        shedder.tick(Duration::ZERO, 1.0);
        shedder.tick(Duration::from_secs(3_600), 1.0);
        assert!((shedder.level() - 5.0 / 60.0).abs() < 1e-9, "{}", shedder.level());
        // Whatever nonsense it is told.
        for nonsense in [f64::NAN, f64::INFINITY, -f64::INFINITY, -1.0, 1e300] {
            shedder.tick(Duration::from_secs(3_601), nonsense);
            shedder.tick(Duration::ZERO, nonsense);
            assert!((0.0..=1.0).contains(&shedder.level()));
        }
    }
}
