//! A lying member: it sends anything to honest members, as often as it wants.
//!
//! It can add hits to the counters that it names, as every member. The lies name other counters than the requests, so
//! that all laws must hold as without them. The positions of honest members are what it must not move.

use rand::RngExt;
use sluicegate::{
    algorithm::{Algorithm, LimitSpec, Micros, State},
    store::peers::{Batch, Change, CounterCopy, CounterDigest, Increment},
};

use super::{Checked, Fault, MILLISECOND, World, event::Event};

/// Epochs of the lying member. Honest ones are lower.
const EPOCHS: std::ops::Range<u64> = 1 << 40..(1 << 40) + 5;

impl World {
    /// Tells a random member a random lie, and checks that its counters are unchanged.
    pub(super) fn lie(&mut self) -> Checked {
        if self.now >= self.traffic_until {
            return Ok(());
        }
        let pause = self.liar_random.random_range(0..self.traffic_until / 50);
        self.schedule(pause.max(MILLISECOND), Event::Lie);
        let running = self.running();
        if running.is_empty() {
            return Ok(());
        }
        let to = running[self.liar_random.random_range(0..running.len())];
        self.totals.lies += 1;
        match self.liar_random.random_range(0..5) {
            0 => self.lie_about_hits(to),
            1 => self.lie_about_others(to),
            2 => self.lie_in_copy(to),
            3 => self.lie_in_pull(to),
            _ => {
                let epoch = self.liar_random.random_range(EPOCHS);
                self.members[to].peers.forget(epoch);
            }
        }
        (0..self.limits.len()).try_for_each(|counter| self.check_counter(to, counter))
    }

    /// Sends a batch of the lying member itself, at its position or anywhere else.
    fn lie_about_hits(&mut self, to: usize) {
        let now = self.clock(to);
        let origin = self.liar_random.random_range(EPOCHS);
        let position = self.members[to].peers.position(origin);
        let after = if self.liar_random.random() { position } else { self.any_number() };
        let until = if self.liar_random.random() { after.saturating_add(1) } else { self.any_number() };
        let batch = self.any_batch(origin, after, until, now);
        self.members[to].peers.apply(&batch, now);
    }

    /// Sends a batch of an honest member. It does not begin at the position, or does not move it.
    fn lie_about_others(&mut self, to: usize) {
        let now = self.clock(to);
        let other = self.liar_random.random_range(0..self.members.len());
        if other == to {
            return;
        }
        let origin = self.members[other].epoch;
        let position = self.members[to].peers.position(origin);
        let (after, until) = match self.liar_random.random_range(0..3) {
            _ if self.fault == Fault::LieBelieved => {
                (position, position.saturating_add(self.liar_random.random_range(1..9)))
            }
            0 => (position, self.liar_random.random_range(0..=position)),
            1 => (position.saturating_add(self.liar_random.random_range(1..9)), u64::MAX),
            _ => (position.wrapping_sub(1), u64::MAX),
        };
        let batch = self.any_batch(origin, after, until, now);
        self.members[to].peers.apply(&batch, now);
    }

    /// Sends copied counters with states that no algorithm writes, and positions of the lying member.
    fn lie_in_copy(&mut self, to: usize) {
        let now = self.clock(to);
        let mut copies = Vec::new();
        for _ in 0..self.liar_random.random_range(0..5) {
            let length = [0, 1, 8, 20, 300][self.liar_random.random_range(0..5)];
            let state: Vec<u8> = (0..length).map(|_| self.liar_random.random()).collect();
            let (counter, expires) = (self.any_counter(), self.liar_random.random());
            copies.push(CounterCopy { counter, state: State::from_bytes(&state), expires });
        }
        let mut positions = Vec::new();
        for epoch in EPOCHS {
            positions.push((epoch, self.any_number()));
        }
        positions.push((self.members[to].epoch, self.any_number()));
        let peers = &self.members[to].peers;
        peers.insert_copies(copies, now);
        peers.continue_from(EPOCHS.start, &positions, now);
    }

    /// Pulls from any position.
    fn lie_in_pull(&mut self, to: usize) {
        let now = self.clock(to);
        let (subscriber, after) = (self.liar_random.random_range(EPOCHS), self.any_number());
        let _ = self.members[to].peers.pull(subscriber, after, now);
    }

    fn any_number(&mut self) -> u64 {
        match self.liar_random.random_range(0..4) {
            0 => self.liar_random.random_range(0..50),
            1 => self.liar_random.random(),
            2 => u64::MAX,
            _ => 0,
        }
    }

    /// Returns a counter that no request names.
    fn any_counter(&mut self) -> CounterDigest {
        self.liar_random.random()
    }

    fn any_batch(&mut self, origin: u64, after: u64, until: u64, now: Micros) -> Batch {
        let mut increments = Vec::new();
        for _ in 0..self.liar_random.random_range(0..4) {
            let published_at = Micros::new(if self.liar_random.random() { now.get() } else { self.any_number() });
            let limits: Vec<Algorithm> = self.limits.iter().map(|limit| limit.algorithm).chain([absurd()]).collect();
            let mut changes = Vec::new();
            for _ in 0..self.liar_random.random_range(0..4) {
                changes.push(Change {
                    counter: self.any_counter(),
                    limit: self.liar_random.random_range(0..5),
                    hits: [1, -1, i64::MAX, i64::MIN, 0][self.liar_random.random_range(0..5)],
                    counted_at: Micros::new(if self.liar_random.random() { now.get() } else { self.any_number() }),
                });
            }
            let resets = vec![self.any_counter(); self.liar_random.random_range(0..3)];
            let sequence = self.any_number();
            let increment = Increment::new(sequence, published_at, limits, changes).with_resets(resets);
            increments.push(std::sync::Arc::new(increment));
        }
        let now = Micros::new(if self.liar_random.random() { now.get() } else { self.any_number() });
        Batch { origin, after, until, now, increments }
    }
}

/// Returns the largest limit that can be built.
fn absurd() -> Algorithm {
    let spec = LimitSpec { requests: u32::MAX.into(), window: Micros::from_secs(86_400), ..LimitSpec::default() };
    let kind = Algorithm::KINDS.iter().find(|kind| kind.name == "token_bucket").expect("the algorithm exists");
    (kind.build)(&spec).expect("the limit is valid")
}
