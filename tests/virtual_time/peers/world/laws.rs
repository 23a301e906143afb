//! The laws: comparisons of decisions and counters with the models.

use super::{Checked, Effect, MemberState, Model, SECOND, START, World};

impl World {
    /// Compares a decision with the models before the hit.
    pub(super) fn check_decision(&mut self, member: usize, counter: usize, cost: u64, is_allowed: bool) -> Checked {
        let now = self.clock(member).get();
        let limit = self.limits[counter];
        let knowledge = &self.members[member].knowledge[counter];
        // A warm-up allows a request above the burst if there is no debt.
        let cost = if limit.model == Model::WarmUp { cost.min(limit.ceiling) } else { cost };
        let (size, room) = (limit.hit_size(), limit.ceiling * limit.hit_size());
        let lower = knowledge.lower_used(&limit, now);
        if is_allowed && lower + cost * size > room {
            return Err(format!("too much: {cost} hits are allowed at {lower} of {room} by {limit:?}"));
        }
        let upper = knowledge.upper_used(&limit, now);
        if !is_allowed && upper + cost * size <= room {
            return Err(format!("too little: {cost} hits are denied at {upper} of {room} by {limit:?}"));
        }
        let since = self.now.saturating_sub(self.max_staleness());
        let mut unknown = 0;
        for (index, counted) in self.counted.iter().enumerate().rev().take_while(|(_, counted)| counted.at >= since) {
            if let Effect::Hits(hits) = counted.effect
                && counted.owner != member
                && counted.counter == counter
            {
                unknown += hits;
                self.totals.unknown += u64::from(is_allowed && !self.members[member].known.contains(&index));
            }
        }
        let is_comparable = !(self.failures.refunds || limit.count_denied || limit.model == Model::WarmUp);
        if is_allowed && self.failures.are_absent() && is_comparable {
            let all = self.all[counter].lower_used(&limit, START + self.now);
            if all + cost * size > room + unknown * size {
                return Err(format!("too much altogether: {all} of {room}, {unknown} of them recent, {limit:?}"));
            }
        }
        Ok(())
    }

    /// Compares a counter with the models.
    pub(super) fn check_counter(&mut self, member: usize, counter: usize) -> Checked {
        let now = self.clock(member);
        let limit = self.limits[counter];
        let peek = self.counter(counter);
        let used = self.members[member].memory.decide(&peek.take(0).peek(), now).decision.used;
        self.members[member].knowledge[counter].step(now.get());
        let (lower, upper) = self.bounds(member, counter, now.get());
        if limit.model != Model::WarmUp && !(lower..=upper).contains(&used) {
            return Err(format!("member {member} counts {used} hits instead of {lower} to {upper} by {limit:?}"));
        }
        Ok(())
    }

    /// Returns how many hits count at least and at most.
    pub(super) fn bounds(&self, member: usize, counter: usize, now: u64) -> (u64, u64) {
        let (limit, knowledge) = (&self.limits[counter], &self.members[member].knowledge[counter]);
        let [lower, upper] = [knowledge.lower_used(limit, now), knowledge.upper_used(limit, now)];
        (lower.div_ceil(limit.hit_size()), upper.div_ceil(limit.hit_size()))
    }

    /// Checks that each member knows all hits of the others.
    pub(super) fn check_convergence(&mut self) -> Checked {
        self.now = self.end();
        let running = self.running();
        for member in running.iter().copied() {
            for counter in 0..self.limits.len() {
                self.check_counter(member, counter)?;
                let now = self.clock(member).get();
                let (lower, upper) = self.bounds(member, counter, now);
                self.totals.compared += 1;
                self.totals.exact += u64::from(lower == upper);
            }
            for (index, counted) in self.counted.iter().enumerate() {
                let owner = &self.members[counted.owner];
                let is_published = counted.sequence > 0 && owner.state == MemberState::Running;
                if is_published && !self.members[member].known.contains(&index) {
                    return Err(format!("member {member} never learns of {counted:?}"));
                }
                if owner.state == MemberState::Running && counted.sequence == 0 && !self.failures.refunds {
                    return Err(format!("never published: {counted:?}"));
                }
            }
            if self.is_verbose {
                println!("member {member}: {} of {} known", self.members[member].known.len(), self.counted.len());
            }
        }
        Ok(())
    }

    /// Checks that the full limit is available when all hits have drained.
    pub(super) fn check_drained(&mut self) -> Checked {
        let horizon = self.limits.iter().map(|limit| limit.horizon() + 60 * SECOND).max().unwrap_or_default();
        self.now += if self.failures.clocks { 400 * SECOND + 2 * horizon } else { horizon };
        for member in self.running() {
            for counter in 0..self.limits.len() {
                let (limit, now) = (self.limits[counter], self.clock(member));
                let peek = self.counter(counter);
                let used = self.members[member].memory.decide(&peek.take(0).peek(), now).decision.used;
                let (_, upper) = self.bounds(member, counter, now.get());
                if used > 0 && (upper == 0 || !self.failures.clocks) {
                    return Err(format!("{used} hits never drain at member {member}: {limit:?}"));
                }
            }
        }
        Ok(())
    }
}
