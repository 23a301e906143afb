//! [`SlidingWindow`]: time is divided into buckets of equal length, each with its number of hits. The current bucket and
//! the previous ones of one window's length count, the oldest of them weighted by its overlap with the window.
//!
//! With one bucket per window this is the well-known estimate (Cloudflare, 2017): 42 hits in the previous minute and
//! 18 in the current one make 42 · 45/60 + 18 = 49.5 after 15 s. The estimate assumes that hits were spread evenly over
//! the oldest bucket; with more buckets, that bucket and therefore the error are smaller. [`WindowEdge::Strict`]
//! counts the oldest bucket fully: then no window of that length ever exceeds the limit, and callers wait up to one
//! bucket longer.

use smallvec::{SmallVec, smallvec};

use super::{
    Action, Algorithm, Arguments, CLOCK_SLACK, CounterPart, CounterProgram, Decision, InvalidLimit, LimitSpec, Limiter,
    MaxHits, Micros, Operation, Program, State, drain_time::DrainTime, proportion,
};

/// Weight of the oldest bucket, of which the window covers only a part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WindowEdge {
    /// The covered part of the bucket, rounded up.
    #[default]
    Weighted,
    /// The whole bucket.
    Strict,
}

/// A limiter that allows at most `limit` hits in any window, by estimate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingWindow {
    max_hits: MaxHits,
    /// Duration of one bucket.
    bucket_width: Micros,
    buckets: u32,
    edge: WindowEdge,
    count_denied: bool,
    /// Duration of one bucket, as the state contains it.
    stored_width: DrainTime,
}

/// Maximum of a bucket, and of every limit, so that a bucket at its maximum denies all further hits.
const MAX_COUNT: u64 = u32::MAX as u64;
/// Length of the start and the duration of a bucket in bytes.
const HEADER_BYTES: usize = 12;
/// Length of a bucket, and of their sum, in bytes.
const COUNT_BYTES: usize = 4;

/// The beginning of a state.
struct Header {
    /// Start of the bucket that was current when the state was written, in microseconds since the Unix epoch.
    start: u64,
    /// Duration of one bucket.
    width: DrainTime,
}

impl Header {
    /// Reads the header; `None` for a new counter.
    fn read(state: &State) -> Option<Self> {
        let start = state.number::<7>(0)?;
        let mantissa = state.number::<4>(7)? as u32;
        let exponent = state.number::<1>(11)? as u8;
        Some(Self { start, width: DrainTime { mantissa, exponent } })
    }
}

/// The counts of the buckets at an instant.
#[derive(Clone, Debug)]
struct Window {
    /// Start of the current bucket, in microseconds since the Unix epoch.
    start: u64,
    /// Counts of `buckets + 1` buckets, the current one first.
    counts: SmallVec<[u64; 8]>,
    changed: bool,
}

impl SlidingWindow {
    /// Maximum number of buckets per window.
    pub const MAX_BUCKETS: u32 = 256;
    /// Maximum length of the window: ten years, so that Lua can exactly divide the product of a count and a duration.
    pub const MAX_WINDOW: Micros = Micros::from_secs(10 * 31_536_000);

    /// Creates a limiter.
    ///
    /// Returns `None` if the window is zero or exceeds [`Self::MAX_WINDOW`], or if the number of buckets is 0 or
    /// exceeds [`Self::MAX_BUCKETS`].
    #[must_use]
    pub fn new(max_hits: MaxHits, window: Micros, buckets: u32, edge: WindowEdge, count_denied: bool) -> Option<Self> {
        let fits = window > Micros::ZERO && window <= Self::MAX_WINDOW && (1..=Self::MAX_BUCKETS).contains(&buckets);
        if !fits {
            return None;
        }
        // A window that cannot be divided evenly becomes longer by less than a microsecond per bucket.
        let width = Micros::new(window.get().div_ceil(buckets.into()));
        let max_hits = max_hits.at_most(MAX_COUNT);
        Some(Self { max_hits, bucket_width: width, buckets, edge, count_denied, stored_width: DrainTime::new(width) })
    }

    /// Returns the position of the first bucket. If there are more than two buckets, their sum precedes them, so that
    /// Redis does not have to decode all of them. A sum that does not fit is stored as [`MAX_COUNT`].
    fn header_bytes(state: &State) -> usize {
        if state.as_bytes().len() > HEADER_BYTES + 2 * COUNT_BYTES { HEADER_BYTES + COUNT_BYTES } else { HEADER_BYTES }
    }

    /// Returns the counts of an unused counter.
    fn zero_counts(&self) -> SmallVec<[u64; 8]> {
        smallvec![0; self.buckets as usize + 1]
    }

    fn window(&self, state: &State, now: Micros) -> Window {
        let buckets = self.buckets as usize;
        let start = (now - now % self.bucket_width).get();
        let Some(stored) = Header::read(state) else {
            return Window { start, counts: self.zero_counts(), changed: false };
        };
        let header = Self::header_bytes(state);
        let counts = (0..).map_while(|index| state.number::<COUNT_BYTES>(header + COUNT_BYTES * index));
        let stored_count = state.as_bytes().len().saturating_sub(header) / COUNT_BYTES;
        if stored.width != self.stored_width || stored_count != buckets + 1 {
            // The window was changed: all hits that still count are counted as if they had arrived now.
            let age = now.get().saturating_sub(stored.start) / stored.width.micros().max(1);
            let still_in_window = counts.take((stored_count as u64).saturating_sub(age) as usize);
            let mut merged = self.zero_counts();
            merged[0] = still_in_window.sum::<u64>().min(self.max_hits.ceiling()).min(MAX_COUNT);
            return Window { start, counts: merged, changed: true };
        }
        if stored.start > start {
            // The clock stepped back: the buckets stay unchanged until it has caught up. If a wrong clock was far
            // ahead, they become the buckets of now.
            let ahead = stored.start.saturating_sub(now.get());
            let plausible = ahead <= CLOCK_SLACK.get().max(self.bucket_width.get());
            let start = if plausible { stored.start } else { start };
            return Window { start, counts: counts.collect(), changed: !plausible };
        }
        let elapsed = ((start - stored.start) / self.bucket_width.get()).min(buckets as u64 + 1) as usize;
        let counts = std::iter::repeat_n(0, elapsed).chain(counts).take(buckets + 1).collect();
        Window { start, counts, changed: false }
    }

    /// Returns the bucket that contains an instant, or an empty slice if it has expired.
    fn bucket_of<'c>(&self, window: &'c mut Window, instant: Micros) -> &'c mut [u64] {
        let Some(elapsed) = window.start.checked_sub((instant - instant % self.bucket_width).get()) else {
            return &mut [];
        };
        let index = (elapsed / self.bucket_width.get()) as usize;
        window.counts.get_mut(index..=index).unwrap_or_default()
    }

    /// Returns the number of hits that count at `at`, which is not before the start of the current bucket.
    fn used(&self, window: &Window, at: u64) -> u64 {
        let Some((oldest, newer)) = window.counts.split_last() else {
            return 0;
        };
        let newer: u64 = newer.iter().sum();
        let width = self.bucket_width.get();
        match self.edge {
            WindowEdge::Strict => newer + oldest,
            WindowEdge::Weighted => newer + proportion::ceil(*oldest, width - (at - window.start), width),
        }
    }

    /// Returns the time in microseconds from `at`, which is not before the current bucket, until at most `room` hits
    /// count.
    fn wait(&self, window: &Window, at: u64, room: u64) -> u64 {
        let width = self.bucket_width.get();
        let elapsed = at - window.start;
        let mut counted: u64 = window.counts.iter().sum();
        // After `steps` more bucket durations, this is the oldest bucket.
        for (steps, oldest) in window.counts.iter().rev().enumerate() {
            counted -= oldest;
            let begins = steps as u64 * width;
            match self.edge {
                WindowEdge::Strict if counted + oldest <= room => return begins.saturating_sub(elapsed),
                WindowEdge::Weighted if counted <= room => {
                    let covered = proportion::floor(room - counted, width, *oldest);
                    let covered = if *oldest == 0 { width } else { covered.min(width) };
                    return (begins + width - covered).saturating_sub(elapsed);
                }
                WindowEdge::Strict | WindowEdge::Weighted => {}
            }
        }
        window.counts.len() as u64 * width - elapsed
    }

    /// Returns the time from `now`, which may be before the current bucket, until no more than `room` hits count.
    fn time_until(&self, window: &Window, now: Micros, room: u64) -> Micros {
        let at = now.get().max(window.start);
        Micros::new(at - now.get() + self.wait(window, at, room))
    }
}

impl CounterProgram for SlidingWindow {
    const TAG: &'static str = "sw";
    const SCRIPT: &'static str = include_str!("script.lua");
    const ARGUMENTS: &'static [&'static str] =
        &["cost", "ceiling", "width", "buckets", "strict", "slack", "mantissa", "exponent", "count_denied"];

    fn arguments(&self, operation: Operation) -> Arguments {
        let width = self.bucket_width.get();
        let is_strict = self.edge == WindowEdge::Strict;
        let DrainTime { mantissa, exponent } = self.stored_width;
        smallvec![
            operation.cost.min(MaxHits::MAX_SHORT + 1),
            self.max_hits.ceiling(),
            width,
            self.buckets.into(),
            is_strict.into(),
            CLOCK_SLACK.get().max(width),
            mantissa.into(),
            exponent.into(),
            self.count_denied.into()
        ]
    }

    fn step(&self, state: &mut State, operation: Operation) -> bool {
        let mut window = self.window(state, operation.now);
        let cost = operation.cost.min(MaxHits::MAX_SHORT + 1);
        let mut allowed = true;
        if operation.action.releases() {
            let mut remaining = cost;
            let counts = match operation.action {
                Action::RollBack(taken) => self.bucket_of(&mut window, taken),
                _ => &mut window.counts,
            };
            for count in counts {
                let removed = remaining.min(*count);
                *count -= removed;
                remaining -= removed;
            }
            window.changed |= remaining < cost;
        } else {
            allowed = self.used(&window, operation.now.get().max(window.start)) + cost <= self.max_hits.ceiling();
            if operation.action == Action::Take && (allowed || self.count_denied) {
                window.counts[0] = (window.counts[0] + cost).min(MAX_COUNT);
                window.changed = true;
            }
        }
        if window.changed {
            state.clear();
        }
        let sum: u64 = window.counts.iter().sum();
        if window.changed && sum > 0 {
            state.push::<7>(window.start);
            state.push::<4>(self.stored_width.mantissa.into());
            state.push::<1>(self.stored_width.exponent.into());
            if window.counts.len() > 2 {
                state.push::<COUNT_BYTES>(sum.min(MAX_COUNT));
            }
            for count in &window.counts {
                state.push::<COUNT_BYTES>(*count);
            }
        }
        allowed
    }

    fn explain(&self, state: &State, operation: Operation, allowed: bool) -> Decision {
        let window = self.window(state, operation.now);
        let at = operation.now.get().max(window.start);
        let used = self.used(&window, at);
        let limit = self.max_hits.limit();
        let reset = if used > 0 { self.time_until(&window, operation.now, 0) } else { Micros::ZERO };
        let next = if used > 0 && limit > 0 {
            self.time_until(&window, operation.now, used.min(limit) - 1)
        } else {
            Micros::ZERO
        };
        let retry_after = match self.max_hits.ceiling().checked_sub(operation.cost) {
            Some(room) if !allowed => Some(self.time_until(&window, operation.now, room)),
            Some(_) | None => None,
        };
        Decision {
            allowed,
            soft: allowed && operation.is_soft(used, self.max_hits),
            remaining: self.max_hits.remaining(used),
            used,
            reset,
            next,
            retry_after,
            ..Decision::default()
        }
    }

    fn counts_denied(&self) -> bool {
        self.count_denied
    }

    fn lease_ends(&self, _state: &State, counted: Micros) -> Micros {
        counted - counted % self.bucket_width + self.bucket_width
    }

    fn expires(&self, state: &State, now: Micros) -> Micros {
        let window = self.window(state, now);
        Micros::new(window.start + (u64::from(self.buckets) + 1) * self.bucket_width.get())
    }
}

impl Limiter for SlidingWindow {
    const NAME: &'static str = "sliding_window";
    const KEYWORDS: &'static [&'static str] = &["buckets", "edge"];

    fn build(spec: &LimitSpec) -> Result<Algorithm, InvalidLimit> {
        let buckets = spec.buckets.unwrap_or(1);
        if !(1..=Self::MAX_BUCKETS).contains(&buckets) {
            return Err(InvalidLimit { keyword: "buckets", reason: "buckets must be from 1 to 256" });
        }
        let max_hits = spec.max_hits(spec.short_requests()?.into());
        if max_hits.ceiling() > MAX_COUNT {
            let reason = "a sliding_window, with the part above its soft limit, must be at most 4294967295";
            return Err(InvalidLimit { keyword: "soft", reason });
        }
        let edge = spec.edge.unwrap_or_default();
        let limiter = Self::new(max_hits, spec.window, buckets, edge, spec.counts_denied());
        Ok(limiter.ok_or(InvalidLimit::WINDOW)?.into())
    }

    fn spec(&self) -> Option<LimitSpec> {
        Some(LimitSpec {
            requests: self.max_hits.limit(),
            window: Micros::new(self.bucket_width.get() * u64::from(self.buckets)),
            buckets: Some(self.buckets),
            edge: Some(self.edge),
            soft: self.max_hits.percent(),
            count_denied: Some(self.count_denied),
            ..LimitSpec::default()
        })
    }

    fn parts(&self, state: &State, now: Micros) -> Vec<CounterPart> {
        let Window { start, counts, .. } = self.window(state, now);
        let width = self.bucket_width.get();
        let mut parts = Vec::new();
        for (age, hits) in counts.iter().enumerate().rev() {
            if *hits > 0 {
                let from = start.saturating_sub(age as u64 * width);
                let until = from + (u64::from(self.buckets) + 1) * width;
                parts.push(CounterPart { from: Micros::new(from), until: Micros::new(until), hits: *hits });
            }
        }
        parts
    }

    fn leasing(&self) -> Option<Program> {
        Some(Self { max_hits: MaxHits::hard(self.max_hits.limit()), count_denied: false, ..*self }.into())
    }

    fn recording(&self) -> Algorithm {
        Self { count_denied: true, ..*self }.into()
    }

    fn has_expired(&self, counted: Micros, now: Micros) -> bool {
        let start = counted - counted % self.bucket_width;
        start + Micros::new((u64::from(self.buckets) + 1) * self.bucket_width.get()) <= now
    }

    fn is_ahead(&self, state: &State, now: Micros) -> bool {
        state.number::<7>(0).is_some_and(|start| start > now.get())
    }
}

#[cfg(test)]
mod tests;
