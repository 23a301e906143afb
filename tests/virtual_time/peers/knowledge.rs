//! [`Knowledge`]: the hits of one counter that were delivered to one member, and bounds of the hits that still count.

use super::limit::{Limit, Model};

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
    /// Times by other clocks that the state may contain, because copies are not converted.
    foreign: Vec<u64>,
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
                self.upper.retain(|(time, _)| time + limit.horizon() > now);
            }
        }
        self.latest = time;
    }

    /// Removes all hits from the lower model, because the member's clock has stepped back.
    pub(crate) fn forget_lower(&mut self) {
        self.lower.clear();
    }

    /// Adds the upper bound of another member, whose clock can differ by any time.
    pub(crate) fn add_foreign(&mut self, limit: &Limit, other: &Self, now: u64) {
        self.foreign.extend(other.foreign.iter().chain([&other.latest]));
        // A time further ahead is corrected by the algorithm.
        let plausible = self.foreign.iter().copied().filter(|time| *time <= now + limit.horizon() + 62_000_000);
        let time = plausible.chain([self.latest, now]).max().unwrap_or_default();
        let level = self.upper_used(limit, time) + other.level.max(limit.max_level());
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
        if !limit.is_bucket() {
            return count(limit, self.upper.iter().copied(), now);
        }
        if now < self.latest {
            return self.level + (self.latest - now) * limit.requests;
        }
        self.level.saturating_sub((now - self.latest).saturating_mul(limit.requests))
    }
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
