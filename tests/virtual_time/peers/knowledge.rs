//! [`Knowledge`]: the hits of one counter that were delivered to one member, and bounds of the hits that still count.

use super::limit::{Limit, Model};

/// An upper bound that is unknown.
const UNKNOWN: u64 = u64::MAX / 4;

/// The effect of an operation on a counter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Effect {
    Hits(u64),
    Refund(u64),
    /// A denied hit that fills a bucket up to its capacity.
    Fill(u64),
}

/// The hits that were delivered to a member, with times by the member's clock.
#[derive(Clone, Debug, Default)]
pub(crate) struct Knowledge {
    /// Effects in the order of their times: hits at the time of admission, refunds at the time of application.
    lower: Vec<(u64, Effect)>,
    /// Hits at the time of application.
    upper: Vec<(u64, u64)>,
    /// Upper bound of the level of a bucket at `latest`.
    level: u64,
    /// The latest time of an application. Hits count there if the clock has stepped back.
    latest: u64,
    /// The latest time of an operation since the member's clock last stepped back. A peek writes a time, too, if it
    /// corrects a state that is too far ahead.
    latest_step: u64,
    /// Times besides these that the state may contain: from before the clock stepped back, and by other clocks, because
    /// copies are not converted.
    foreign: Vec<u64>,
    /// Times of a copy that were too far ahead to count. The hits of the copy can count when the clock comes near.
    far_ahead: Vec<u64>,
}

impl Knowledge {
    /// Adds an effect that was applied at `now` and happened at `since`.
    pub(crate) fn add(&mut self, limit: &Limit, effect: Effect, since: u64, now: u64) {
        self.add_lower(limit, effect, since, now);
        self.add_upper(limit, effect, now);
    }

    pub(crate) fn add_lower(&mut self, limit: &Limit, effect: Effect, since: u64, now: u64) {
        let time = if matches!(effect, Effect::Hits(_)) { since } else { now };
        let place = self.lower.partition_point(|(other, _)| *other <= time);
        self.lower.insert(place, (time, effect));
        if matches!(effect, Effect::Refund(_)) && limit.is_bucket() && level(limit, &self.lower, now) == 0 {
            // The state of an empty bucket is that of a new one: hits before are forgotten that arrive later.
            self.lower.clear();
        }
        if self.lower.len() > 400 {
            self.lower.retain(|(time, _)| time + limit.horizon() > now);
        }
    }

    pub(crate) fn add_upper(&mut self, limit: &Limit, effect: Effect, now: u64) {
        let time = now.max(self.latest);
        if limit.is_bucket() {
            let drained = self.level.saturating_sub((time - self.latest).saturating_mul(limit.requests));
            self.level = match (effect, limit.model) {
                // Rounded up to a microsecond.
                (Effect::Hits(hits), Model::WarmUp) => drained + 3 * hits * limit.hit_size() + limit.requests,
                (Effect::Hits(hits), _) => drained + hits * limit.hit_size(),
                (Effect::Refund(hits), _) => drained.saturating_sub(hits * limit.hit_size()),
                (Effect::Fill(hits), _) => fill(limit, drained, hits),
            };
        } else if let Effect::Hits(hits) = effect {
            self.upper.push((time, hits));
            if self.upper.len() > 400 {
                self.merge_expired(limit, now);
            }
        }
        self.latest = time;
    }

    /// Records an operation with or without an effect.
    pub(crate) fn step(&mut self, now: u64) {
        self.latest_step = self.latest_step.max(now);
    }

    /// Merges the hits of the upper model that have expired. They count again if the clock steps back.
    fn merge_expired(&mut self, limit: &Limit, now: u64) {
        let (expired, mut upper): (Vec<_>, Vec<_>) =
            self.upper.iter().copied().partition(|(time, _)| time + limit.horizon() <= now);
        if let Some(latest) = expired.iter().map(|(time, _)| *time).max() {
            upper.push((latest, expired.iter().map(|(_, hits)| hits).sum()));
        }
        self.upper = upper;
    }

    /// Records that the member's clock has stepped back. Nothing counts for certain then.
    pub(crate) fn step_clock_back(&mut self) {
        self.lower.clear();
        self.foreign.push(std::mem::take(&mut self.latest_step));
    }

    /// Adds the upper bound of another member, whose clock can differ by any time.
    pub(crate) fn add_foreign(&mut self, limit: &Limit, other: &Self, now: u64) {
        self.foreign.extend(other.foreign.iter().chain([&other.latest, &other.latest_step]));
        // A time further ahead is ignored or corrected by the algorithm.
        let (plausible, far_ahead): (Vec<_>, Vec<_>) =
            self.foreign.iter().copied().partition(|time| *time <= latest_plausible(limit, now));
        self.far_ahead.extend(far_ahead);
        let time = plausible.into_iter().chain([self.latest, now]).max().unwrap_or_default();
        let level = self.known_upper(limit, time) + other.level.max(limit.max_level());
        self.upper.extend(other.upper.iter().map(|(_, hits)| (time, *hits)));
        self.upper.iter_mut().for_each(|(at, _)| *at = time);
        (self.level, self.latest) = (level, time);
    }

    /// Returns the number of hits that count at least, in units of [`Limit::hit_size`].
    pub(crate) fn lower_used(&self, limit: &Limit, now: u64) -> u64 {
        if limit.is_bucket() {
            return level(limit, &self.lower, now);
        }
        let hits = self.lower.iter().filter_map(|(time, effect)| match effect {
            Effect::Hits(hits) => Some((*time, *hits)),
            _ => None,
        });
        let refunds = self.lower.iter().filter_map(|(time, effect)| match effect {
            Effect::Refund(hits) if time + limit.horizon() > now => Some(*hits),
            _ => None,
        });
        count(limit, hits, now).saturating_sub(refunds.sum())
    }

    /// Returns the number of hits that count at most, in units of [`Limit::hit_size`].
    pub(crate) fn upper_used(&self, limit: &Limit, now: u64) -> u64 {
        let is_near = |time: &u64| *time > now && *time <= latest_plausible(limit, now);
        if self.far_ahead.iter().any(is_near) {
            return UNKNOWN;
        }
        self.known_upper(limit, now)
    }

    fn known_upper(&self, limit: &Limit, now: u64) -> u64 {
        if !limit.is_bucket() {
            return count(limit, self.upper.iter().copied(), now);
        }
        if now < self.latest {
            return self.level + (self.latest - now) * limit.requests;
        }
        self.level.saturating_sub((now - self.latest).saturating_mul(limit.requests))
    }
}

/// Returns the latest time at which hits in a state can still count at `now`.
fn latest_plausible(limit: &Limit, now: u64) -> u64 {
    now + limit.horizon() + 62 * 1_000_000
}

/// Counts the hits of a window or a log by its definition. Times after `now` count fully.
fn count(limit: &Limit, hits: impl Iterator<Item = (u64, u64)>, now: u64) -> u64 {
    match limit.model {
        Model::FixedWindow => {
            hits.filter(|(time, _)| time / limit.window >= now / limit.window).map(|(_, hits)| hits).sum()
        }
        Model::SlidingWindow { width, buckets, is_strict } => {
            let (start, elapsed) = (now - now % width, now % width);
            let oldest_start = start - buckets * width;
            let (mut newer, mut oldest) = (0, 0);
            for (time, hits) in hits.filter(|(time, _)| *time >= oldest_start) {
                *(if time < oldest_start + width { &mut oldest } else { &mut newer }) += hits;
            }
            newer + if is_strict { oldest } else { (oldest * (width - elapsed)).div_ceil(width) }
        }
        _ => {
            let used: u64 = hits.filter(|(time, _)| time + limit.window > now).map(|(_, hits)| hits).sum();
            used.min(limit.ceiling)
        }
    }
}

/// Returns the level of a bucket after these effects.
fn level(limit: &Limit, effects: &[(u64, Effect)], now: u64) -> u64 {
    let (mut level, mut at) = (0_u64, 0);
    for (time, effect) in effects {
        level = level.saturating_sub((time - at).saturating_mul(limit.requests));
        level = match effect {
            Effect::Hits(hits) => (level + hits * limit.hit_size()).min(limit.max_level()).max(level),
            Effect::Refund(hits) => level.saturating_sub(hits * limit.hit_size()),
            Effect::Fill(hits) => fill(limit, level, *hits),
        };
        at = *time;
    }
    level.saturating_sub(now.saturating_sub(at).saturating_mul(limit.requests))
}

fn fill(limit: &Limit, level: u64, hits: u64) -> u64 {
    level.max((level + hits * limit.hit_size()).min(limit.ceiling * limit.hit_size()))
}
