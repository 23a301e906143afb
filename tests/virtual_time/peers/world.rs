//! [`World`]: the members, the network and the events of one scenario, and the checks of the laws.

mod event;
mod exchange;
mod failures;
mod laws;
mod lies;

use std::{
    collections::{BTreeMap, HashSet},
    sync::Arc,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate::{
    algorithm::{Action, Micros},
    store::{Charge, Counter, Hit, Memory, Peers, memory, peers::Metrics},
};

use self::event::Event;
use super::{
    knowledge::{Effect, Knowledge},
    limit::{Limit, Model},
};

const KEYS: [&[u8]; 2] = [b"{d|k=v}", b"{d|k=w}"];
const START: u64 = 1_763_672_400_000_000;
const MILLISECOND: u64 = 1_000;
const SECOND: u64 = 1_000_000;
const MAX_MEMBERS: usize = 9;
/// Maximum latency of a message that is not late.
const MAX_LATENCY: u64 = 3 * MILLISECOND;
/// Maximum sum of the jumps of a clock, in seconds.
const MAX_JUMP: i64 = 280;

/// A fault that is planted in a scenario.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Fault {
    None,
    /// A batch is applied again, as if it began at the receiver's position.
    AppliedTwice,
    /// A restarted member continues its former epoch.
    EpochIgnored,
    /// Times are not converted between the clocks of two members.
    ClockIgnored,
    /// The position moves past increments that are not applied.
    BatchSkipped,
    /// Increments are applied without their refunds.
    RefundsSkipped,
    /// A lying member sends batches of honest members that begin at the receiver's position.
    LieBelieved,
}

/// Numbers of the events that the scenarios contain.
#[derive(Clone, Debug, Default)]
pub(crate) struct Totals {
    pub(crate) allowed: u64,
    pub(crate) denied: u64,
    /// Decisions without knowledge of a hit that was admitted by another member.
    pub(crate) unknown: u64,
    /// Number of counters that were compared in the end, and of those for which the models leave one value.
    pub(crate) exact: u64,
    pub(crate) compared: u64,
    pub(crate) copies: u64,
    /// Increments older than a minute, which are merged.
    pub(crate) merged: u64,
    /// Messages of a lying member.
    pub(crate) lies: u64,
}

impl Totals {
    pub(crate) fn add(&mut self, other: &Self) {
        self.allowed += other.allowed;
        self.denied += other.denied;
        self.unknown += other.unknown;
        self.exact += other.exact;
        self.compared += other.compared;
        self.copies += other.copies;
        self.merged += other.merged;
        self.lies += other.lies;
    }
}

/// The failures of a scenario.
#[derive(Clone, Copy, Debug)]
struct Failures {
    late: bool,
    lossy: bool,
    restarts: bool,
    freezes: bool,
    cuts: bool,
    /// Whether links are cut for more than a minute.
    long_cuts: bool,
    clocks: bool,
    refunds: bool,
    /// Whether one member lies. The laws hold for the others as if there were none.
    liar: bool,
}

impl Failures {
    fn random(random: &mut StdRng) -> Self {
        let is_healthy = random.random_range(0..5) == 0;
        let mut one_in = |number: u32| !is_healthy && random.random_range(0..number) == 0;
        let long_cuts = one_in(12);
        Self {
            liar: false,
            late: one_in(2),
            lossy: one_in(2),
            restarts: one_in(2),
            freezes: one_in(4),
            cuts: one_in(3) || long_cuts,
            long_cuts,
            clocks: one_in(5),
            refunds: one_in(5),
        }
    }

    fn are_absent(&self) -> bool {
        let Self { late, lossy, restarts, freezes, cuts, clocks, .. } = *self;
        ![late, lossy, restarts, freezes, cuts, clocks].contains(&true)
    }
}

/// A counted operation.
#[derive(Clone, Copy, Debug)]
struct Counted {
    counter: usize,
    owner: usize,
    /// Effect at other members.
    effect: Effect,
    at: u64,
    /// Time by the owner's clock.
    local: u64,
    /// Sequence number of its increment; 0 if it has not been published.
    sequence: u64,
}

/// One start of an instance.
struct Member {
    memory: Arc<Memory>,
    peers: Arc<Peers>,
    epoch: u64,
    /// Epoch of the same instance before its restart.
    former_epoch: Option<u64>,
    /// Instance, by which links are cut.
    slot: usize,
    state: MemberState,
    frozen_until: u64,
    clock_offset: i64,
    /// Sum of the jumps of its clock.
    jumps: i64,
    /// The latest time of its clock.
    latest_clock: u64,
    unpublished: Vec<usize>,
    /// Operations of each increment.
    published: BTreeMap<u64, Vec<usize>>,
    known: HashSet<usize>,
    /// Operations that came with a copy and can be delivered again.
    copied: HashSet<usize>,
    knowledge: [Knowledge; 2],
    /// Members whose pull has arrived, and when.
    pulled_at: BTreeMap<usize, u64>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum MemberState {
    Joining,
    Running,
    /// Decides nothing, and publishes until its hits are delivered or until this time.
    Leaving(u64),
    Gone,
}

struct World {
    random: StdRng,
    /// Random numbers of the lying member. Without it, a seed has the same scenario.
    liar_random: StdRng,
    now: u64,
    failures: Failures,
    fault: Fault,
    limits: Vec<Limit>,
    charge: Charge,
    events: BTreeMap<(u64, u64), Event>,
    next_event: u64,
    next_epoch: u64,
    members: Vec<Member>,
    /// Time until which a link between two instances is cut, by direction.
    cut_until: [[u64; MAX_MEMBERS]; MAX_MEMBERS],
    /// End of the traffic.
    traffic_until: u64,
    publish_interval: u64,
    pull_interval: u64,
    /// Mean time between two requests.
    request_interval: u64,
    load: Load,
    counted: Vec<Counted>,
    /// All hits that were counted anywhere, per counter.
    all: [Knowledge; 2],
    totals: Totals,
    is_verbose: bool,
}

/// Distribution of requests to members.
#[derive(Clone, Copy, Debug)]
enum Load {
    Even,
    /// Nine of ten requests are sent to one member.
    Skewed,
    /// Nine of ten requests are sent to one member, another one every 300 ms.
    Moving,
}

type Checked = Result<(), String>;

/// Runs the scenario of a seed. Returns an error that names the broken law.
pub(crate) fn replay(seed: u64, fault: Fault, is_verbose: bool) -> Result<Totals, String> {
    let mut world = World::new(seed, fault, is_verbose);
    world.run()?;
    world.check_convergence()?;
    world.check_drained()?;
    Ok(world.totals)
}

impl World {
    fn new(seed: u64, fault: Fault, is_verbose: bool) -> Self {
        let mut random = StdRng::seed_from_u64(seed);
        let mut liar_random = StdRng::seed_from_u64(!seed);
        let failures = Failures { liar: liar_random.random_range(0..3) == 0, ..Failures::random(&mut random) };
        let seconds = [1, 10, 60][random.random_range(0..3)];
        let count = if random.random_range(0..3) == 0 { 2 } else { 1 };
        let mut limits: Vec<_> = (0..count).map(|_| Limit::random(&mut random, seconds)).collect();
        // A warm-up limits the hits of a merged increment to the maximum cost of a request.
        while failures.long_cuts && limits.iter().any(|limit| limit.model == Model::WarmUp) {
            limits = limits.iter().map(|_| Limit::random(&mut random, seconds)).collect();
        }
        let duration = if failures.long_cuts { 100 * SECOND } else { random.random_range(SECOND..4 * SECOND) };
        let slow = if failures.long_cuts { 10 } else { 1 };
        let charge = if random.random() { Charge::All } else { Charge::Each };
        let load = [Load::Even, Load::Skewed, Load::Moving][random.random_range(0..3)];
        let requests = random.random_range(100..800);
        if is_verbose {
            println!("{failures:?} {limits:?} {charge:?} {load:?}, {requests} requests in {duration} µs");
        }
        let mut world = Self {
            now: 0,
            failures,
            fault,
            limits,
            charge,
            events: BTreeMap::new(),
            next_event: 0,
            next_epoch: 1,
            members: Vec::new(),
            cut_until: Default::default(),
            traffic_until: duration,
            publish_interval: slow * random.random_range(10..100) * MILLISECOND,
            pull_interval: slow * random.random_range(20..150) * MILLISECOND,
            request_interval: duration / requests,
            load,
            counted: Vec::new(),
            all: Default::default(),
            totals: Totals::default(),
            is_verbose,
            random,
            liar_random,
        };
        for slot in 0..world.random.random_range(1..=MAX_MEMBERS) {
            let member = world.start(slot, None);
            world.members[member].state = MemberState::Running;
            world.begin(member);
        }
        world.schedule(0, Event::Request);
        world.schedule(50 * MILLISECOND, Event::Disturb);
        if failures.liar {
            world.schedule(MILLISECOND, Event::Lie);
        }
        world
    }

    /// Returns the end of the scenario. All links have worked without traffic for some intervals then.
    fn end(&self) -> u64 {
        self.traffic_until + SECOND + 4 * (self.publish_interval + self.pull_interval)
    }

    fn run(&mut self) -> Checked {
        let end = self.end();
        while let Some(((at, _), event)) = self.events.pop_first() {
            if at > end {
                break;
            }
            self.now = at;
            self.handle(event)?;
        }
        Ok(())
    }

    fn handle(&mut self, event: Event) -> Checked {
        // A frozen member handles the received messages when it continues.
        if let Some(member) = event.member()
            && self.members[member].frozen_until > self.now
        {
            let until = self.members[member].frozen_until;
            self.schedule(until - self.now, event);
            return Ok(());
        }
        if event.member().is_some_and(|member| self.members[member].state == MemberState::Gone) {
            return Ok(());
        }
        match event {
            Event::Request => return self.request(),
            Event::Publish(member) => return self.publish_at_interval(member),
            Event::PullAll(member) => self.pull_all(member),
            Event::Pull { from, to, after } => self.answer(from, to, after),
            Event::Batch { from, to, batch } => return self.apply(from, to, &batch),
            Event::CopyNeeded { member, source, after } => {
                if self.members[member].peers.position(self.members[source].epoch) == after {
                    self.send(member, source, || Event::CopyRequest { from: member, to: source, after: Some(after) });
                }
            }
            Event::CopyRequest { from, to, after } => {
                let now = self.clock(to);
                let positions = self.members[to].peers.copy_positions(now);
                self.tag_published(to);
                // Other hits are counted until the parts are read.
                let delay = self.random.random_range(0..20 * MILLISECOND);
                self.schedule(delay, Event::CopyParts { from, to, positions, after });
            }
            Event::CopyParts { from, to, positions, after } => self.send_copy(from, to, &positions, after),
            Event::CopyArrives { to, copy } => return self.insert_copy(to, *copy),
            Event::CopyTimeout { member, attempt } => self.join(member, attempt),
            Event::Disturb => self.disturb(),
            Event::Lie => return self.lie(),
        }
        Ok(())
    }

    fn schedule(&mut self, delay: u64, event: Event) {
        self.next_event += 1;
        self.events.insert((self.now + delay, self.next_event), event);
    }

    fn one_in(&mut self, number: u32) -> bool {
        self.random.random_range(0..number) == 0
    }

    /// Returns the time of a member's clock.
    fn clock(&mut self, member: usize) -> Micros {
        let now = self.now;
        let member = &mut self.members[member];
        let clock = (START + now).saturating_add_signed(member.clock_offset);
        member.latest_clock = member.latest_clock.max(clock);
        Micros::new(clock)
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|member| self.members[*member].state != MemberState::Gone).collect()
    }

    fn running(&self) -> Vec<usize> {
        (0..self.members.len()).filter(|member| self.members[*member].state == MemberState::Running).collect()
    }

    /// Sends a message, which can be lost, late or duplicated.
    fn send(&mut self, from: usize, to: usize, event: impl Fn() -> Event) {
        let (from, to) = (self.members[from].slot, self.members[to].slot);
        let is_quiet = self.now >= self.traffic_until;
        if self.cut_until[from][to] > self.now && !is_quiet {
            return;
        }
        let is_lossy = self.failures.lossy && !is_quiet;
        if is_lossy && self.one_in(8) {
            return;
        }
        for _ in 0..if is_lossy && self.one_in(8) { 2 } else { 1 } {
            let is_late = self.failures.late && !is_quiet && self.one_in(6);
            let late = if is_late { self.random.random_range(0..400 * MILLISECOND) } else { 0 };
            let latency = self.random.random_range(100..MAX_LATENCY);
            self.schedule(latency + late, event());
        }
    }

    // Members.

    fn start(&mut self, slot: usize, former_epoch: Option<u64>) -> usize {
        // A table grows slowly, and there are at most two counters.
        let memory = Arc::new(Memory::exchanged(&memory::Settings { max_counters: 100_000 }));
        let epoch = self.next_epoch;
        self.next_epoch += 1;
        let is_apart = self.failures.clocks;
        let day = 86_400 * SECOND as i64;
        let clock_offset = match self.random.random_range(0..3) {
            _ if !is_apart => 0,
            0 => self.random.random_range(-day..day),
            1 => self.random.random_range(-90 * SECOND as i64..90 * SECOND as i64),
            _ => self.random.random_range(-(SECOND as i64)..SECOND as i64),
        };
        self.members.push(Member {
            peers: Peers::with_epoch(Arc::clone(&memory), Metrics::new(), epoch),
            memory,
            epoch,
            former_epoch,
            slot,
            state: MemberState::Joining,
            frozen_until: 0,
            clock_offset,
            jumps: 0,
            latest_clock: 0,
            unpublished: Vec::new(),
            published: BTreeMap::new(),
            known: HashSet::new(),
            copied: HashSet::new(),
            knowledge: Default::default(),
            pulled_at: BTreeMap::new(),
        });
        self.members.len() - 1
    }

    /// Schedules the tasks of a member.
    fn begin(&mut self, member: usize) {
        let (publish, pull) =
            (self.random.random_range(0..self.publish_interval), self.random.random_range(0..self.pull_interval));
        self.schedule(publish, Event::Publish(member));
        self.schedule(pull, Event::PullAll(member));
    }

    /// Requests a copy from a random member. After three attempts the member begins without a copy.
    fn join(&mut self, member: usize, attempt: u32) {
        if self.members[member].state != MemberState::Joining {
            return;
        }
        let sources = self.running();
        if sources.is_empty() || attempt >= 3 {
            self.members[member].state = MemberState::Running;
            self.begin(member);
            return;
        }
        let source = sources[self.random.random_range(0..sources.len())];
        self.send(member, source, || Event::CopyRequest { from: member, to: source, after: None });
        self.schedule(900 * MILLISECOND, Event::CopyTimeout { member, attempt: attempt + 1 });
    }

    // Traffic.

    fn request(&mut self) -> Checked {
        if self.now >= self.traffic_until {
            return Ok(());
        }
        let pause = self.random.random_range(0..=2 * self.request_interval);
        self.schedule(pause, Event::Request);
        let now = self.now;
        let running: Vec<_> =
            self.running().into_iter().filter(|member| self.members[*member].frozen_until <= now).collect();
        if running.is_empty() {
            return Ok(());
        }
        let favourite = match self.load {
            Load::Even => None,
            Load::Skewed => Some(0),
            Load::Moving => Some((now / 300_000) as usize),
        };
        let favourite = favourite.filter(|_| !self.one_in(10));
        let index = favourite.unwrap_or_else(|| self.random.random_range(0..running.len())) % running.len();
        let burst = if self.one_in(20) { self.random.random_range(2..10) } else { 1 };
        for _ in 0..burst {
            self.decide(running[index])?;
        }
        Ok(())
    }

    /// Returns a counter in the stores of the members.
    pub(super) fn counter(&self, counter: usize) -> Counter {
        Counter::new(KEYS[counter], self.limits[counter].algorithm)
    }

    /// Decides one request, and compares the decision with the models.
    fn decide(&mut self, member: usize) -> Checked {
        let cost = if self.one_in(10) { self.random.random_range(2..5) } else { 1 };
        let now = self.clock(member);
        let count = if self.charge == Charge::All { self.limits.len() } else { 1 };
        let first = if count == 1 { self.random.random_range(0..self.limits.len()) } else { 0 };
        let counters: Vec<_> = (first..first + count).collect();
        let may_refund = counters.iter().all(|counter| self.has_admitted(member, *counter));
        let is_refund = self.failures.refunds && may_refund && self.one_in(15);
        let (action, cost) = if is_refund { (Action::Refund, 1) } else { (Action::Take, cost) };
        let named: Vec<_> = counters.iter().map(|counter| self.counter(*counter)).collect();
        let hits: Vec<_> = named.iter().map(|counter| Hit { action, ..counter.take(cost) }).collect();
        let decisions = self.members[member].memory.decide_all(&hits, self.charge, now);
        let decisions: Vec<_> = decisions.into_iter().map(|decision| decision.unwrap().decision).collect();
        let is_denied = decisions.iter().any(|decision| !decision.allowed);
        for (counter, decision) in counters.into_iter().zip(decisions) {
            if action == Action::Take {
                self.check_decision(member, counter, cost, decision.allowed)?;
                *if decision.allowed { &mut self.totals.allowed } else { &mut self.totals.denied } += 1;
            }
            let limit = self.limits[counter];
            let is_peek = self.charge == Charge::All && is_denied;
            let effects = match (action, decision.allowed) {
                (Action::Refund, _) => Some((Effect::Refund(cost), Effect::Refund(cost))),
                (_, true) if !is_peek => Some((Effect::Hits(cost), Effect::Hits(cost))),
                (_, false) if !is_peek && limit.count_denied => {
                    let own = if limit.model == Model::Bucket { Effect::Fill(cost) } else { Effect::Hits(cost) };
                    Some((own, Effect::Hits(cost)))
                }
                _ => None,
            };
            if let Some((own, effect)) = effects {
                self.count(member, counter, own, effect);
            }
            self.check_counter(member, counter)?;
        }
        Ok(())
    }

    /// Returns whether a member has counted hits of a counter recently.
    fn has_admitted(&self, member: usize, counter: usize) -> bool {
        let is_own = |counted: &Counted| counted.owner == member && counted.counter == counter;
        self.counted.iter().rev().take(20).any(|counted| is_own(counted) && counted.at + SECOND / 5 > self.now)
    }

    fn count(&mut self, member: usize, counter: usize, own: Effect, effect: Effect) {
        let local = self.clock(member).get();
        let (limit, index) = (self.limits[counter], self.counted.len());
        self.counted.push(Counted { counter, owner: member, effect, at: self.now, local, sequence: 0 });
        self.all[counter].add(&limit, own, START + self.now, START + self.now);
        let member = &mut self.members[member];
        member.knowledge[counter].add(&limit, own, local, local);
        member.unpublished.push(index);
        member.known.insert(index);
    }
}
