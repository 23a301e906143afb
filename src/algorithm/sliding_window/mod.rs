//! Sliding window: the current counter, those of the last `buckets` before it, and the oldest of them by what of it
//! still lies in the window.
//!
//! With one counter per window it is the classic estimate (Cloudflare, 2017): 42 in the minute before, 18 in this one,
//! and 15 s into it make 42 · 45/60 + 18 = 49.5. It assumes that hits were spread evenly over the oldest counter;
//! more counters make that counter smaller and the error with it. [`Edge::Strict`] counts the oldest whole: then no
//! window of the length ever holds more than the limit, and callers wait up to one counter longer.

use smallvec::{SmallVec, smallvec};

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, Decision, InvalidLimit, LimitSpec, Limiter, MaxHits, Micros, Operation,
    State, drain_time::DrainTime, proportion,
};

/// How the oldest counter, which the window covers in part, counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowEdge {
    /// By the part that the window covers, rounded up.
    #[default]
    Weighted,
    /// Whole.
    Strict,
}

/// At most `limit` hits in any window, by estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    max_hits: MaxHits,
    /// Of one counter.
    bucket_width: Micros,
    buckets: u32,
    edge: WindowEdge,
    count_denied: bool,
    /// The width as it stands in the state.
    drain_time: DrainTime,
}

/// A counter stops here, above every limit.
const MOST: u64 = u32::MAX as u64;

/// The counters as of an instant.
#[derive(Clone, Debug)]
struct WindowCounters {
    /// When the current one began.
    start: u64,
    /// The current one first; `buckets + 1` of them.
    counts: SmallVec<[u64; 8]>,
    changed: bool,
}

impl SlidingWindow {
    /// Counters per window at most.
    pub const MAX_BUCKETS: u32 = 256;
    /// The longest window: ten years, so that a count times a part of it can be divided exactly in Lua.
    pub const MAX_WINDOW: Micros = Micros::from_secs(10 * 31_536_000);

    /// `None` for a window of no length or a longer one than [`Self::LONGEST`], and for no counters or more than
    /// [`Self::MOST_BUCKETS`].
    #[must_use]
    pub fn new(quota: MaxHits, window: Micros, buckets: u32, edge: WindowEdge, count_denied: bool) -> Option<Self> {
        let fits = window > Micros::ZERO && window <= Self::MAX_WINDOW && (1..=Self::MAX_BUCKETS).contains(&buckets);
        fits.then(|| {
            // A window that cannot be divided evenly becomes longer, by less than a microsecond per counter.
            let width = Micros::new(window.get().div_ceil(buckets.into()));
            Self {
                max_hits: quota,
                bucket_width: width,
                buckets,
                edge,
                count_denied,
                drain_time: DrainTime::new(width),
            }
        })
    }

    fn counters(&self, state: &State, now: Micros) -> WindowCounters {
        let buckets = self.buckets as usize;
        let start = (now - now % self.bucket_width).get();
        let empty = || smallvec![0; buckets + 1];
        let (Some(stored), Some(mantissa), Some(exponent)) =
            (state.number::<7>(0), state.number::<4>(7), state.number::<1>(11))
        else {
            return WindowCounters { start, counts: empty(), changed: false };
        };
        let tempo = DrainTime { mantissa: mantissa as u32, exponent: exponent as u8 };
        let counts = (0..).map_while(|place| state.number::<4>(12 + 4 * place));
        if tempo != self.drain_time || state.as_bytes().len() != 12 + 4 * (buckets + 1) {
            // The window was changed: all that still counted counts as if it had come just now.
            let age = now.get().saturating_sub(stored) / tempo.micros().max(1);
            let known = (state.as_bytes().len() as u64).saturating_sub(12) / 4;
            let alive = counts.take(known.saturating_sub(age) as usize);
            let mut moved: SmallVec<_> = empty();
            moved[0] = alive.sum::<u64>().min(self.max_hits.ceiling()).min(MOST);
            return WindowCounters { start, counts: moved, changed: true };
        }
        if stored > start {
            // The clock stepped back: the counters stay what they are until it has caught up. One that was far ahead
            // is not believed, and they become those of now.
            let ahead = stored.saturating_sub(now.get());
            let believed = ahead <= CLOCK_SLACK.get().max(self.bucket_width.get());
            let start = if believed { stored } else { start };
            return WindowCounters { start, counts: counts.collect(), changed: !believed };
        }
        let passed = ((start - stored) / self.bucket_width.get()).min(buckets as u64 + 1) as usize;
        let counts = std::iter::repeat_n(0, passed).chain(counts).take(buckets + 1).collect();
        WindowCounters { start, counts, changed: false }
    }

    /// The counter that an instant was counted in, if it is still there.
    fn counter_of<'c>(&self, counters: &'c mut WindowCounters, instant: Micros) -> &'c mut [u64] {
        let passed = counters.start.checked_sub((instant - instant % self.bucket_width).get());
        let place = passed.map_or(usize::MAX, |passed| (passed / self.bucket_width.get()) as usize);
        counters.counts.get_mut(place..).and_then(|counts| counts.get_mut(..1)).unwrap_or_default()
    }

    /// What counts at an instant, which is not before the current counter's start.
    fn used(&self, counters: &WindowCounters, at: u64) -> u64 {
        let (oldest, whole) = counters.counts.split_last().map_or((0, [].as_slice()), |(last, rest)| (*last, rest));
        let whole: u64 = whole.iter().sum();
        let width = self.bucket_width.get();
        match self.edge {
            WindowEdge::Strict => whole + oldest,
            WindowEdge::Weighted => whole + proportion::ceil(oldest, width - (at - counters.start), width),
        }
    }

    /// How long until no more than `room` counts.
    fn wait(&self, counters: &WindowCounters, at: u64, room: u64) -> u64 {
        let (width, into) = (self.bucket_width.get(), at - counters.start);
        let mut whole: u64 = counters.counts.iter().sum();
        // After so many more counters the oldest is the next one towards the current.
        for (passed, oldest) in counters.counts.iter().rev().enumerate() {
            whole -= oldest;
            let begins = passed as u64 * width;
            match self.edge {
                WindowEdge::Strict if whole + oldest <= room => return begins.saturating_sub(into),
                WindowEdge::Weighted if whole <= room => {
                    let covered = proportion::floor(room - whole, width, *oldest);
                    let covered = if *oldest == 0 { width } else { covered.min(width) };
                    return (begins + width - covered).saturating_sub(into);
                }
                WindowEdge::Strict | WindowEdge::Weighted => {}
            }
        }
        counters.counts.len() as u64 * width - into
    }
}

impl Limiter for SlidingWindow {
    const NAME: &'static str = "sliding_window";
    const KEYWORDS: &'static [&'static str] = &["buckets", "edge"];
    const TAG: &'static str = "sw";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "width", "buckets", "strict", "slack", "mantissa", "exponent", "count_denied"];

    fn build(shape: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let buckets = shape.buckets.unwrap_or(1);
        if !(1..=Self::MAX_BUCKETS).contains(&buckets) {
            return Err(InvalidLimit { keyword: "buckets", reason: "buckets must be from 1 to 256" });
        }
        let (quota, edge) = (shape.max_hits(shape.requests.into()), shape.edge.unwrap_or_default());
        let rule = Self::new(quota, shape.window, buckets, edge, shape.counts_denied());
        Ok(rule.ok_or(InvalidLimit::WINDOW)?.into())
    }

    fn arguments(&self, ask: Operation) -> Arguments {
        let (ceiling, width, buckets) = (self.max_hits.ceiling(), self.bucket_width.get(), self.buckets.into());
        let (strict, slack) = (u64::from(self.edge == WindowEdge::Strict), CLOCK_SLACK.get().max(width));
        let DrainTime { mantissa, exponent } = self.drain_time;
        let denied = self.count_denied.into();
        smallvec![
            ask.cost.min(MaxHits::MAX + 1),
            ceiling,
            width,
            buckets,
            strict,
            slack,
            mantissa.into(),
            exponent.into(),
            denied
        ]
    }

    fn step(&self, state: &mut State, ask: Operation) -> bool {
        let mut counters = self.counters(state, ask.now);
        let cost = ask.cost.min(MaxHits::MAX + 1);
        let mut allowed = true;
        if ask.action.releases() {
            let mut left = cost;
            let counts = match ask.action {
                Action::RollBack(taken) => self.counter_of(&mut counters, taken),
                _ => &mut counters.counts,
            };
            for count in counts {
                let given = left.min(*count);
                (*count, left) = (*count - given, left - given);
            }
            counters.changed |= left < cost;
        } else {
            allowed = self.used(&counters, ask.now.get().max(counters.start)) + cost <= self.max_hits.ceiling();
            if ask.action == Action::Take && (allowed || self.count_denied) {
                counters.counts[0] = (counters.counts[0] + cost).min(MOST);
                counters.changed = true;
            }
        }
        if counters.changed {
            state.clear();
        }
        if counters.changed && counters.counts.iter().any(|count| *count > 0) {
            state.push::<7>(counters.start);
            state.push::<4>(self.drain_time.mantissa.into());
            state.push::<1>(self.drain_time.exponent.into());
            counters.counts.iter().for_each(|count| state.push::<4>(*count));
        }
        allowed
    }

    fn explain(&self, state: &State, ask: Operation, allowed: bool) -> Decision {
        let counters = self.counters(state, ask.now);
        let at = ask.now.get().max(counters.start);
        let until = |room| Micros::new(at - ask.now.get() + self.wait(&counters, at, room));
        let used = self.used(&counters, at);
        let limit = self.max_hits.limit();
        let room = self.max_hits.ceiling().checked_sub(ask.cost);
        Decision {
            allowed,
            soft: allowed && ask.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset: if used > 0 { until(0) } else { Micros::ZERO },
            next: if used > 0 && limit > 0 { until(used.min(limit) - 1) } else { Micros::ZERO },
            retry_after: if allowed { None } else { room.map(until) },
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    fn leasing(&self) -> Option<Algorithm> {
        Some(Self { max_hits: MaxHits::hard(self.max_hits.limit()), count_denied: false, ..*self }.into())
    }

    fn lease_ends(&self, counted: Micros) -> Micros {
        counted - counted % self.bucket_width + self.bucket_width
    }

    fn counting(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let counters = self.counters(state, now);
        Micros::new(counters.start + (u64::from(self.buckets) + 1) * self.bucket_width.get())
    }
}

#[cfg(test)]
mod tests;
