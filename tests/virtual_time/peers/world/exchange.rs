//! The exchange of the members: pulls, increments and copies.

use std::{collections::BTreeMap, ops::RangeInclusive, sync::Arc};

use sluicegate::{
    algorithm::Micros,
    store::peers::{Batch, CLOCK_AGREEMENT, Increment, Pull},
};

use super::{
    Checked, Counted, Effect, Fault, Limit, MAX_LATENCY, MemberState, World,
    event::{Copy, Event},
};

/// A counted operation that reaches another member.
#[derive(Clone, Copy)]
struct Delivered {
    index: usize,
    counted: Counted,
    /// The earliest time with which the operation can be published, by the origin's clock.
    stamp: u64,
}

impl World {
    pub(super) fn publish_at_interval(&mut self, member: usize) -> Checked {
        self.publish(member);
        if let MemberState::Leaving(deadline) = self.members[member].state {
            self.leave(member, deadline)?;
        }
        self.schedule(self.publish_interval, Event::Publish(member));
        Ok(())
    }

    pub(super) fn publish(&mut self, member: usize) {
        let now = self.clock(member);
        self.members[member].peers.publish(now);
        self.tag_published(member);
    }

    /// Records the sequence number of the operations that were published.
    pub(super) fn tag_published(&mut self, member: usize) {
        let member = &mut self.members[member];
        let sequence = *member.peers.published().borrow();
        let is_new = member.published.last_key_value().is_none_or(|(last, _)| *last < sequence);
        if sequence > 0 && is_new {
            let published = std::mem::take(&mut member.unpublished);
            published.iter().for_each(|index| self.counted[*index].sequence = sequence);
            member.published.insert(sequence, published);
        }
    }

    /// Ends a member if its hits are delivered or the deadline has passed.
    pub(super) fn leave(&mut self, member: usize, deadline: u64) -> Checked {
        let since = self.now.saturating_sub(2 * self.pull_interval);
        let local_since = self.clock(member) - Micros::new(self.now - since);
        let is_delivered = self.members[member].peers.is_delivered(local_since);
        if is_delivered && !self.failures.clocks {
            let hits: Vec<_> = self.members[member].published.values().flatten().copied().collect();
            let pulled = self.members[member].pulled_at.iter().filter(|(_, at)| **at >= since);
            for receiver in pulled.map(|(receiver, _)| &self.members[*receiver]) {
                if receiver.state != MemberState::Gone && !hits.iter().all(|index| receiver.known.contains(index)) {
                    return Err(format!("member {member} leaves before its hits are delivered"));
                }
            }
        }
        if is_delivered || self.now >= deadline {
            let epoch = self.members[member].epoch;
            self.members[member].state = MemberState::Gone;
            self.alive().into_iter().for_each(|other| self.members[other].peers.forget(epoch));
        }
        Ok(())
    }

    pub(super) fn pull_all(&mut self, member: usize) {
        for to in self.alive().into_iter().filter(|to| *to != member) {
            let epoch = self.members[to].epoch;
            let epoch =
                if self.fault == Fault::EpochIgnored { self.members[to].former_epoch.unwrap_or(epoch) } else { epoch };
            let after = self.members[member].peers.position(epoch);
            self.send(member, to, || Event::Pull { from: member, to, after });
        }
        self.schedule(self.pull_interval, Event::PullAll(member));
    }

    pub(super) fn answer(&mut self, from: usize, to: usize, after: u64) {
        let (epoch, now) = (self.members[from].epoch, self.clock(to));
        let answer = self.members[to].peers.pull(epoch, after, now);
        // A subscriber that needs a copy is not waited for.
        let subscriber = &mut self.members[to];
        match &answer {
            Pull::Copy => subscriber.pulled_at.remove(&from),
            Pull::Batch(_) | Pull::Nothing => subscriber.pulled_at.insert(from, self.now),
        };
        match answer {
            Pull::Batch(batch) => self.send(to, from, || Event::Batch { from: to, to: from, batch: batch.clone() }),
            Pull::Copy => self.send(to, from, || Event::CopyNeeded { member: from, source: to, after }),
            Pull::Nothing => {}
        }
    }

    pub(super) fn apply(&mut self, from: usize, to: usize, batch: &Batch) -> Checked {
        let now = self.clock(to);
        let mut received = batch.clone();
        let is_hit = self.one_in(20);
        match self.fault {
            Fault::EpochIgnored => {
                received.origin = self.members[from].former_epoch.unwrap_or(received.origin);
            }
            Fault::ClockIgnored => received.now = now,
            Fault::BatchSkipped if is_hit => received.increments.clear(),
            Fault::RefundsSkipped => received.increments.iter_mut().for_each(remove_refunds),
            _ => {}
        }
        if self.members[to].peers.apply(&received, now) {
            self.deliver(from, to, batch, now.get())?;
        }
        if self.fault == Fault::AppliedTwice && is_hit {
            let after = self.members[to].peers.position(batch.origin);
            received.until += after - received.after;
            received.after = after;
            self.members[to].peers.apply(&received, now);
        }
        (0..self.limits.len()).try_for_each(|counter| self.check_counter(to, counter))
    }

    /// Adds the hits of an applied batch to the models of the receiver.
    ///
    /// An increment contains the sum of its hits and refunds. In the lower model its refunds come last, and in the
    /// upper model first: a refund of an empty counter has no effect. The increments are applied one by one: if a
    /// refund has emptied a bucket, an old hit of the next increment only counts as far as it has not drained since its
    /// admission.
    fn deliver(&mut self, from: usize, to: usize, batch: &Batch, now: u64) -> Checked {
        self.totals.merged += u64::from(is_old(batch));
        // The time by which hits can have expired at the origin, or at a receiver whose clock agrees.
        let mut expiry_clock = self.members[from].latest_clock;
        if now.abs_diff(batch.now.get()) <= CLOCK_AGREEMENT.get() {
            expiry_clock = expiry_clock.max(now);
        }
        let mut after = batch.after;
        for increment in &batch.increments {
            let delivered = self.delivered(from, after + 1..=increment.sequence);
            let (refunds, hits): (Vec<_>, Vec<_>) =
                delivered.into_iter().partition(|delivered| matches!(delivered.counted.effect, Effect::Refund(_)));
            for operation in refunds.iter().chain(&hits) {
                self.deliver_upper(to, operation, expiry_clock, now);
            }
            for operation in hits.iter().chain(&refunds) {
                self.deliver_lower(from, to, operation, expiry_clock, now)?;
            }
            after = increment.sequence;
        }
        Ok(())
    }

    /// Returns the operations of one increment.
    ///
    /// An increment contains only the time of the last operation. It is earlier than those of the others if the clock
    /// has stepped back in between.
    fn delivered(&self, from: usize, sequences: RangeInclusive<u64>) -> Vec<Delivered> {
        let mut delivered = Vec::new();
        let mut earliest = [u64::MAX; 2];
        for index in self.members[from].published.range(sequences).rev().flat_map(|(_, all)| all.iter().rev()) {
            let counted = self.counted[*index];
            let stamp = &mut earliest[counted.counter];
            *stamp = counted.local.min(*stamp);
            delivered.push(Delivered { index: *index, counted, stamp: *stamp });
        }
        delivered.reverse();
        delivered
    }

    fn deliver_upper(&mut self, to: usize, delivered: &Delivered, expiry_clock: u64, now: u64) {
        let counted = &delivered.counted;
        let limit = self.limits[counted.counter];
        // A merged increment that no longer counts is dropped with its refunds.
        let may_be_dropped =
            matches!(counted.effect, Effect::Refund(_)) && has_expired(&limit, delivered.stamp, expiry_clock);
        if !may_be_dropped {
            self.members[to].knowledge[counted.counter].add_upper(&limit, counted.effect, now);
        }
    }

    fn deliver_lower(&mut self, from: usize, to: usize, delivered: &Delivered, expiry_clock: u64, now: u64) -> Checked {
        let Delivered { index, counted, stamp } = *delivered;
        let limit = self.limits[counted.counter];
        let origin_clock = self.members[from].latest_clock;
        let receiver = &mut self.members[to];
        let is_new = receiver.known.insert(index);
        if !is_new && !receiver.copied.remove(&index) {
            return Err(format!("hits are applied twice: {counted:?}"));
        }
        // After a copy, a refund can be applied twice.
        if is_new && !has_expired(&limit, stamp, expiry_clock) || matches!(counted.effect, Effect::Refund(_)) {
            let age = (self.now - counted.at).max(origin_clock - stamp);
            receiver.knowledge[counted.counter].add_lower(&limit, counted.effect, now - age, now);
        }
        let staleness = self.now - counted.at;
        if self.failures.are_absent() && !self.failures.refunds && staleness > self.max_staleness() {
            return Err(format!("hits are known only after {staleness} µs, without any failure"));
        }
        Ok(())
    }

    /// Returns the time after which a hit is known everywhere if nothing fails.
    pub(super) fn max_staleness(&self) -> u64 {
        self.publish_interval + self.pull_interval + 3 * MAX_LATENCY
    }

    pub(super) fn send_copy(&mut self, from: usize, to: usize, positions: &[(u64, u64)], after: Option<u64>) {
        let source = &self.members[to];
        let counters: Vec<_> = (0..).map_while(|part| source.peers.copy_part(part)).flatten().collect();
        let (known, knowledge) = (source.known.clone(), source.knowledge.clone());
        self.send(to, from, || Event::CopyArrives {
            to: from,
            copy: Box::new(Copy {
                source: to,
                after,
                positions: positions.to_vec(),
                counters: counters.clone(),
                known: known.clone(),
                knowledge: knowledge.clone(),
            }),
        });
    }

    pub(super) fn insert_copy(&mut self, to: usize, copy: Copy) -> Checked {
        let now = self.clock(to);
        let is_joining = self.members[to].state == MemberState::Joining;
        let source_epoch = self.members[copy.source].epoch;
        let adopted: BTreeMap<u64, u64> = copy
            .positions
            .iter()
            .copied()
            .filter(|(epoch, _)| *epoch == source_epoch || self.members[to].peers.position(*epoch) == 0)
            .collect();
        let is_needed = match copy.after {
            None => is_joining,
            Some(after) => !is_joining && self.members[to].peers.position(source_epoch) == after,
        };
        if !is_needed {
            return Ok(());
        }
        self.totals.copies += 1;
        let member = &mut self.members[to];
        member.peers.insert_copies(copy.counters, now);
        member.peers.continue_from(source_epoch, &copy.positions, now);
        let is_exact = is_joining && !self.failures.clocks;
        for (index, counted) in self.counted.iter().enumerate() {
            let is_included = adopted
                .get(&self.members[counted.owner].epoch)
                .is_some_and(|position| (1..=*position).contains(&counted.sequence));
            let member = &mut self.members[to];
            if is_included {
                member.known.insert(index);
            } else if is_joining && copy.known.contains(&index) {
                member.known.insert(index);
                member.copied.insert(index);
            }
        }
        for (counter, limit) in self.limits.iter().enumerate() {
            let knowledge = &mut self.members[to].knowledge[counter];
            if is_exact {
                *knowledge = copy.knowledge[counter].clone();
            } else {
                knowledge.add_foreign(limit, &copy.knowledge[counter], now.get());
            }
        }
        if is_joining {
            self.members[to].state = MemberState::Running;
            self.begin(to);
        }
        (0..self.limits.len()).try_for_each(|counter| self.check_counter(to, counter))
    }
}

fn remove_refunds(increment: &mut Arc<Increment>) {
    let Increment { sequence, published_at, limits, changes, .. } = &**increment;
    let changes = changes.iter().copied().filter(|change| change.hits > 0).collect();
    *increment = Arc::new(Increment::new(*sequence, *published_at, limits.clone(), changes));
}

/// Returns whether an operation with this time no longer counts by a clock, so that it may have been dropped.
fn has_expired(limit: &Limit, stamp: u64, clock: u64) -> bool {
    if limit.is_bucket() {
        return stamp + limit.horizon() <= clock;
    }
    limit.algorithm.has_expired(Micros::new(stamp), Micros::new(clock))
}

/// Returns whether a batch contains increments that are no longer kept for all subscribers.
fn is_old(batch: &Batch) -> bool {
    batch.increments.first().is_some_and(|first| batch.now - first.published_at > Micros::from_secs(60))
}
