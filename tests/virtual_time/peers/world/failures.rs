//! Failures of members, links and clocks.

use std::collections::HashSet;

use rand::RngExt;

use super::{Knowledge, MAX_JUMP, MAX_MEMBERS, MILLISECOND, MemberState, SECOND, World, event::Event};

impl World {
    pub(super) fn disturb(&mut self) {
        if self.now >= self.traffic_until {
            return;
        }
        self.schedule(self.traffic_until / 20, Event::Disturb);
        let alive = self.running();
        let failures = self.failures;
        if alive.is_empty() {
            return;
        }
        let member = alive[self.random.random_range(0..alive.len())];
        if failures.restarts && self.one_in(4) {
            self.replace(member);
        }
        if failures.freezes && self.one_in(4) {
            let pause = self.random.random_range(50..1_500) * MILLISECOND;
            self.members[member].frozen_until = (self.now + pause).min(self.traffic_until);
        }
        let is_first = self.now < self.traffic_until / 5;
        if failures.cuts && if failures.long_cuts { is_first } else { self.one_in(4) } {
            let longest = if failures.long_cuts { 65 * SECOND..90 * SECOND } else { 50 * MILLISECOND..SECOND };
            let until = self.now + self.random.random_range(longest);
            self.cut_links(until);
        }
        if failures.clocks && self.one_in(8) {
            let range = MAX_JUMP * SECOND as i64;
            let jump = self.random.random_range(-range..range);
            let member = &mut self.members[member];
            // Instances forget each other if a clock jumps by ten minutes altogether.
            if (member.jumps + jump).abs() < range {
                member.jumps += jump;
                member.clock_offset += jump;
                if jump < 0 {
                    member.knowledge.iter_mut().for_each(Knowledge::step_clock_back);
                }
            }
        }
    }

    /// Crashes a member, lets it leave, or starts another one.
    pub(super) fn replace(&mut self, member: usize) {
        let slot = self.members[member].slot;
        match self.random.random_range(0..3) {
            0 => {
                let epoch = self.members[member].epoch;
                self.members[member].state = MemberState::Gone;
                let restarted = self.start(slot, Some(epoch));
                let pause = self.random.random_range(10 * MILLISECOND..SECOND);
                self.schedule(pause, Event::CopyTimeout { member: restarted, attempt: 0 });
            }
            1 => {
                self.members[member].state = MemberState::Leaving(self.now + SECOND);
                self.publish(member);
            }
            _ => {
                let used: HashSet<_> = self.alive().into_iter().map(|member| self.members[member].slot).collect();
                if let Some(slot) = (0..MAX_MEMBERS).find(|slot| !used.contains(slot)) {
                    let joined = self.start(slot, None);
                    self.join(joined, 0);
                }
            }
        }
    }

    /// Cuts random links, the links of one instance, or those between two halves, in one or both directions.
    pub(super) fn cut_links(&mut self, until: u64) {
        let (shape, is_one_way, chosen) =
            (self.random.random_range(0..3), self.random.random::<bool>(), self.random.random_range(0..MAX_MEMBERS));
        for from in 0..MAX_MEMBERS {
            for to in 0..MAX_MEMBERS {
                let is_cut = match shape {
                    0 => self.one_in(3),
                    1 => from == chosen || to == chosen && !is_one_way,
                    _ => from <= chosen && to > chosen || from > chosen && to <= chosen && !is_one_way,
                };
                if is_cut {
                    self.cut_until[from][to] = until;
                }
            }
        }
    }
}
