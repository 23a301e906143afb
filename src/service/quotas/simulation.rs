//! Simulation of Envoys and of callers of other protocols, in virtual time, with the service's own code. They are spread
//! over three instances with one store.
//!
//! Envoy is modelled as the real one behaves (`tests/wire/quotas.rs` checks it): it reports every five seconds, keeps the
//! part of the tokens when a bucket is replaced, and admits no request without a valid quota.

use std::{cmp::Reverse, collections::BinaryHeap};

use futures_util::FutureExt;
use rand::{RngExt, SeedableRng, rngs::StdRng};
use smallvec::smallvec;

use super::*;
use crate::{
    engine::{Code, Descriptor, Request, TokenBucket},
    store::{Memory, memory},
};

const REPORT_INTERVAL: u64 = 5_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// A request arrives at an Envoy.
    Arrival(usize),
    /// An Envoy sends a report.
    Report(usize),
    /// A report with this number of admitted and denied requests reaches the stream with this number.
    Received(usize, u64, u64, u64, u64),
    /// An answer reaches the Envoy: the capacity, the tokens and the interval of its bucket, or 0 to deny everything, and
    /// the lifetime in seconds.
    Answer(usize, u64, (u32, u32, u32), u64),
    Tick(usize, u64),
    /// A stream has ended some time ago.
    Return(usize),
    /// A request of another protocol arrives.
    Check,
    /// An instance of the service crashes and restarts. Counters survive.
    Restart(usize),
    /// An Envoy restarts.
    EnvoyRestart(usize),
}

/// The conditions of a simulation.
struct Scenario {
    rule: String,
    /// Requests per second of each Envoy, before and after the middle of the simulation.
    demands: Vec<[f64; 2]>,
    /// Requests per second of other protocols.
    checks: f64,
    /// Whether messages are late, streams break, and both sides restart.
    faults: bool,
    seconds: u64,
}

impl Scenario {
    /// Envoys without faults and other callers.
    fn steady(rule: &str, demands: Vec<[f64; 2]>) -> Self {
        Self { rule: rule.to_owned(), demands, checks: 0.0, faults: false, seconds: 240 }
    }
}

struct Envoy {
    stream: u64,
    /// The instance of the last stream.
    instance: usize,
    session: Option<QuotaSession>,
    quota: Option<Quota>,
    tokens: f64,
    filled_at: u64,
    expires_at: u64,
    counts: (u64, u64),
    reported_at: u64,
    is_known: bool,
}

struct Simulation {
    scenario: Scenario,
    /// The instances of the service, which share their counters.
    instances: [Quotas; 3],
    clock: Arc<AtomicU64>,
    random: StdRng,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    sequence: u64,
    now: u64,
    envoys: Vec<Envoy>,
    closed: Vec<QuotaSession>,
    /// Time of each admitted request, and its Envoy; `None` for other protocols.
    admitted: Vec<(u64, Option<usize>)>,
    /// Requests that Envoys admitted while they had no stream, or that they reported on a stream that broke.
    unknown: Vec<u64>,
    streams: u64,
}

const START: u64 = tests::NOW.get();

impl Simulation {
    fn run(scenario: Scenario, seed: u64) -> Self {
        let clock = Arc::new(AtomicU64::new(START));
        let rules = format!("domain: api\ndescriptors: [{{key: user, rate_limit: {{{}}}}}]", scenario.rule);
        let engine = tests::engine(&rules);
        let instances = std::array::from_fn(|_| {
            let engine = Engine { local: Arc::new(Memory::new(&memory::Settings::default())), ..engine.clone() };
            Quotas::new(engine, Clock::Manual(Arc::clone(&clock)), Settings::default())
        });
        let envoys = scenario.demands.iter().map(|_| Envoy {
            stream: 0,
            instance: 0,
            session: None,
            quota: None,
            tokens: 0.0,
            filled_at: START,
            expires_at: 0,
            counts: (0, 0),
            reported_at: START,
            is_known: false,
        });
        let mut simulation = Self {
            envoys: envoys.collect(),
            scenario,
            instances,
            clock,
            random: StdRng::seed_from_u64(seed),
            events: BinaryHeap::new(),
            sequence: 0,
            now: START,
            closed: Vec::new(),
            admitted: Vec::new(),
            unknown: Vec::new(),
            streams: 0,
        };
        for index in 0..simulation.envoys.len() {
            simulation.next_arrival(index);
        }
        simulation.next_check();
        if simulation.scenario.faults {
            let half = simulation.scenario.seconds * 500_000;
            for instance in 0..simulation.instances.len() {
                let at = simulation.random.random_range(half..half * 3 / 2);
                simulation.schedule(at, Event::Restart(instance));
            }
            let envoy = simulation.random.random_range(0..simulation.envoys.len());
            let at = simulation.random.random_range(0..half);
            simulation.schedule(at, Event::EnvoyRestart(envoy));
        }
        let end = START + simulation.scenario.seconds * 1_000_000;
        while let Some(Reverse((at, _, event))) = simulation.events.pop() {
            if at >= end {
                break;
            }
            simulation.now = at;
            simulation.clock.store(at, Relaxed);
            simulation.handle(event);
        }
        simulation
    }

    fn schedule(&mut self, delay: u64, event: Event) {
        self.sequence += 1;
        self.events.push(Reverse((self.now + delay, self.sequence, event)));
    }

    /// Schedules an event after half to one and a half of the mean time at this rate per second.
    fn schedule_at_rate(&mut self, rate: f64, event: Event) {
        let delay = self.random.random_range(0.5..1.5) / rate * 1e6;
        self.schedule(delay as u64, event);
    }

    fn next_arrival(&mut self, envoy: usize) {
        let is_late = self.now >= START + self.scenario.seconds * 500_000;
        let rate = self.scenario.demands[envoy][usize::from(is_late)].max(0.001);
        self.schedule_at_rate(rate, Event::Arrival(envoy));
    }

    fn next_check(&mut self) {
        if self.scenario.checks > 0.0 {
            self.schedule_at_rate(self.scenario.checks, Event::Check);
        }
    }

    /// Returns the time in which a message is delivered.
    fn delay(&mut self) -> u64 {
        let most = if self.scenario.faults && self.random.random_ratio(1, 20) { 1_500_000 } else { 3_000 };
        self.random.random_range(200..most)
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Arrival(index) => {
                self.arrive(index);
                self.next_arrival(index);
            }
            Event::Report(index) => {
                self.report(index);
                self.schedule(REPORT_INTERVAL, Event::Report(index));
            }
            Event::Received(index, stream, allowed, denied, elapsed) => {
                let envoy = &mut self.envoys[index];
                let Some(session) = envoy.session.as_mut().filter(|_| envoy.stream == stream) else {
                    return;
                };
                let usage =
                    Usage { bucket: bucket(), descriptor: None, allowed, denied, elapsed: Micros::from_secs(elapsed) };
                let actions = session.report("api", vec![usage]).now_or_never().unwrap().unwrap();
                self.answer(index, actions);
            }
            Event::Tick(index, stream) => {
                let envoy = &mut self.envoys[index];
                let Some(session) = envoy.session.as_mut().filter(|_| envoy.stream == stream) else {
                    return;
                };
                let actions = session.tick().now_or_never().unwrap();
                let wait = session.until_tick().as_micros() as u64;
                self.answer(index, actions);
                self.schedule(wait, Event::Tick(index, stream));
            }
            Event::Answer(index, stream, quota, ttl) if self.envoys[index].stream == stream => {
                self.envoys[index].replace(quota, ttl, self.now);
            }
            Event::Answer(..) => {}
            Event::Return(closed) => self.closed[closed].return_unused().now_or_never().unwrap(),
            Event::Check => {
                if self.check() {
                    self.admitted.push((self.now, None));
                }
                self.next_check();
            }
            Event::Restart(instance) => {
                // A process that crashes returns nothing.
                let envoys = self.envoys.iter_mut().filter(|envoy| envoy.instance == instance);
                envoys.for_each(|envoy| envoy.session = None);
            }
            Event::EnvoyRestart(index) => {
                self.close(index);
                self.forget_counts(index);
                let envoy = &mut self.envoys[index];
                (envoy.quota, envoy.counts, envoy.is_known) = (None, (0, 0), false);
            }
        }
    }

    fn arrive(&mut self, index: usize) {
        let now = self.now;
        let envoy = &mut self.envoys[index];
        let is_first = !mem::replace(&mut envoy.is_known, true);
        if envoy.admits(now) {
            envoy.counts.0 += 1;
            self.admitted.push((now, Some(index)));
            if envoy.session.is_none() {
                self.unknown.push(now);
            }
        } else {
            envoy.counts.1 += 1;
        }
        if is_first && !self.events.iter().any(|Reverse((_, _, event))| *event == Event::Report(index)) {
            envoy.reported_at = now;
            self.schedule(0, Event::Report(index));
        }
    }

    /// Sends a report, possibly on a new stream. With faults, the stream sometimes breaks, and the report does not arrive.
    fn report(&mut self, index: usize) {
        if !self.envoys[index].is_known {
            return;
        }
        if self.scenario.faults && self.random.random_ratio(1, 15) {
            self.close(index);
            self.forget_counts(index);
            self.envoys[index].reported_at = self.now;
            return;
        }
        if self.envoys[index].session.is_none() {
            self.streams += 1;
            let instance = self.random.random_range(0..self.instances.len());
            let session = self.instances[instance].session(Some(&format!("envoy-{index}")));
            let envoy = &mut self.envoys[index];
            (envoy.session, envoy.stream, envoy.instance) = (Some(session), self.streams, instance);
            self.schedule(0, Event::Tick(index, self.streams));
        }
        let delay = self.delay();
        let envoy = &mut self.envoys[index];
        let (allowed, denied) = mem::take(&mut envoy.counts);
        let elapsed = (self.now - envoy.reported_at) / 1_000_000;
        envoy.reported_at = self.now;
        let received = Event::Received(index, envoy.stream, allowed, denied, elapsed);
        self.schedule(delay, received);
    }

    /// Loses the counts since the last report.
    fn forget_counts(&mut self, index: usize) {
        let allowed = mem::take(&mut self.envoys[index].counts).0 as usize;
        let requests = self.admitted.iter().rev().filter(|(_, envoy)| *envoy == Some(index)).map(|(at, _)| *at);
        self.unknown.extend(requests.take(allowed));
    }

    fn close(&mut self, index: usize) {
        if let Some(mut session) = self.envoys[index].session.take()
            && let Some(wait) = session.close()
        {
            self.closed.push(session);
            self.schedule(wait.as_micros() as u64, Event::Return(self.closed.len() - 1));
        }
    }

    fn answer(&mut self, index: usize, actions: Vec<BucketAction>) {
        for action in actions {
            let BucketAction::Assign(_, quota, ttl) = action else {
                continue;
            };
            let quota = match quota {
                Quota::TokenBucket(TokenBucket { max_tokens, tokens, interval_secs }) => {
                    (max_tokens, tokens, interval_secs)
                }
                Quota::DenyAll => (0, 0, 0),
                Quota::AllowAll => panic!("the rule has a limit"),
            };
            let (delay, stream) = (self.delay(), self.envoys[index].stream);
            self.schedule(delay, Event::Answer(index, stream, quota, ttl.as_secs()));
        }
    }

    /// Returns whether a request of another protocol is allowed.
    fn check(&mut self) -> bool {
        let descriptor = Descriptor {
            entries: smallvec![Entry { key: "user", value: "a" }],
            hits: 1,
            refund: false,
            requested_limit: None,
        };
        let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: Vec::new() };
        let instance = self.random.random_range(0..self.instances.len());
        let engine = &self.instances[instance].engine;
        let verdict = engine.decide_in(engine.store.memory().unwrap(), &request, Micros::new(self.now)).unwrap();
        verdict.overall == Code::Ok
    }

    /// Returns the times of requests that the service could know, in order.
    fn known(&self) -> Vec<u64> {
        let mut unknown: HashMap<u64, usize> = HashMap::new();
        self.unknown.iter().for_each(|at| *unknown.entry(*at).or_default() += 1);
        let is_known = |at: &u64| match unknown.get_mut(at) {
            Some(count) if *count > 0 => {
                *count -= 1;
                false
            }
            _ => true,
        };
        self.admitted.iter().map(|(at, _)| *at).filter(is_known).collect()
    }

    /// Returns the largest number of requests in a fixed window of this length.
    fn most_per_window(&self, seconds: u64) -> usize {
        self.known()
            .chunk_by(|a, b| a / (seconds * 1_000_000) == b / (seconds * 1_000_000))
            .map(<[u64]>::len)
            .max()
            .unwrap()
    }

    /// Returns the largest number of requests in any time of this length.
    fn most_in_any(&self, seconds: u64) -> usize {
        let known = self.known();
        let until = |at: &u64| known.partition_point(|other| *other < at + seconds * 1_000_000);
        known.iter().enumerate().map(|(index, at)| until(at) - index).max().unwrap()
    }

    /// Returns the requests per second of each Envoy from `from` to `to`.
    fn rates(&self, from: u64, to: u64) -> Vec<f64> {
        let mut counts = vec![0_u32; self.envoys.len()];
        let time = START + from * 1_000_000..START + to * 1_000_000;
        for (at, envoy) in &self.admitted {
            if let Some(envoy) = envoy
                && time.contains(at)
            {
                counts[*envoy] += 1;
            }
        }
        counts.into_iter().map(|count| f64::from(count) / (to - from) as f64).collect()
    }

    /// Returns by how many requests a bucket of this rate and burst would have overflowed.
    fn excess_of_bucket(&self, rate: f64, burst: f64) -> f64 {
        let (mut level, mut last, mut most) = (0.0_f64, START, 0.0_f64);
        for at in self.known() {
            level = (level - rate * (at - last) as f64 / 1e6).max(0.0) + 1.0;
            last = at;
            most = most.max(level - burst);
        }
        most
    }
}

impl Envoy {
    fn replace(&mut self, (max_tokens, tokens, interval_secs): (u32, u32, u32), ttl: u64, now: u64) {
        self.fill(now);
        self.expires_at = now + ttl * 1_000_000;
        if max_tokens == 0 {
            self.quota = Some(Quota::DenyAll);
            return;
        }
        let next = TokenBucket { max_tokens, tokens, interval_secs };
        self.tokens = match self.quota {
            Some(Quota::TokenBucket(former)) => self.tokens / f64::from(former.max_tokens) * f64::from(max_tokens),
            _ => max_tokens.into(),
        };
        self.quota = Some(Quota::TokenBucket(next));
    }

    fn fill(&mut self, now: u64) {
        if let Some(Quota::TokenBucket(bucket)) = self.quota {
            let filled = bucket.rate() * (now - self.filled_at) as f64 / 1e6;
            self.tokens = (self.tokens + filled).min(bucket.max_tokens.into());
        }
        self.filled_at = now;
    }

    fn admits(&mut self, now: u64) -> bool {
        self.fill(now);
        let has_token =
            matches!(self.quota, Some(Quota::TokenBucket(_))) && now < self.expires_at && self.tokens >= 1.0;
        if has_token {
            self.tokens -= 1.0;
        }
        has_token
    }
}

fn bucket() -> BucketId {
    BucketId::from_iter([("user", "a")])
}

/// Rules with a limit of ten requests per second for each Envoy.
fn rules(envoys: usize) -> Vec<String> {
    let (second, minute) = (10 * envoys, 600 * envoys);
    let mut rules = vec![
        format!("unit: second, requests_per_unit: {second}"),
        format!("unit: minute, requests_per_unit: {minute}"),
        format!("unit: second, requests_per_unit: {second}, algorithm: token_bucket"),
        format!("unit: minute, requests_per_unit: {minute}, algorithm: gcra, burst: {second}"),
        format!("unit: second, requests_per_unit: {second}, algorithm: sliding_window"),
        format!("unit: minute, requests_per_unit: {minute}, algorithm: sliding_window"),
    ];
    if minute <= 1_000 {
        rules.push(format!("unit: minute, requests_per_unit: {minute}, algorithm: sliding_log"));
    }
    rules
}

#[test]
fn envoys_use_the_whole_limit() {
    for envoys in [1, 2, 5, 20, 100] {
        for rule in rules(envoys) {
            let rates = Simulation::run(Scenario::steady(&rule, vec![[20.0; 2]; envoys]), 1).rates(120, 240);
            let (sum, squares): (f64, f64) = (rates.iter().sum(), rates.iter().map(|rate| rate * rate).sum());
            // Jain, Chiu and Hawe: A Quantitative Measure of Fairness, 1984.
            let (utilization, fairness) = (sum / (10 * envoys) as f64, sum * sum / squares / envoys as f64);
            assert!(utilization >= 0.97 && fairness >= 0.98, "{rule}, {envoys} Envoys: {utilization} {fairness}");
        }
    }
}

#[test]
fn envoys_with_little_demand_get_it_while_others_want_more() {
    for envoys in [2, 5, 20, 100] {
        for rule in rules(envoys) {
            let demands = (0..envoys).map(|index| [if index % 2 == 0 { 4.0 } else { 30.0 }; 2]).collect();
            let rates = Simulation::run(Scenario::steady(&rule, demands), 1).rates(120, 240);
            let utilization = rates.iter().sum::<f64>() / (10 * envoys) as f64;
            let least = rates.iter().step_by(2).fold(f64::INFINITY, |least, rate| least.min(*rate));
            // At the end of a longer window, all hits are used.
            let expected = if rule.contains("minute") && !rule.contains("burst") { 2.0 } else { 3.4 };
            assert!(utilization >= 0.97 && least >= expected, "{rule}, {envoys} Envoys: {utilization} {least}");
        }
    }
}

#[test]
fn shares_follow_a_changed_demand() {
    for rule in rules(10) {
        let demands = (0..10).map(|index| if index < 5 { [16.0, 2.0] } else { [2.0, 16.0] }).collect();
        let simulation = Simulation::run(Scenario::steady(&rule, demands), 1);
        // The former shares are free when their quotas have ended, a report and 17 seconds after the change.
        for (from, busy) in [(60, 0..5), (145, 5..10)] {
            let rates = simulation.rates(from, from + 60);
            let admitted: f64 = rates[busy].iter().sum();
            assert!(admitted >= 0.95 * 80.0, "{rule}: {rates:?}");
        }
    }
}

/// An Envoy may use its former share until that is free for others.
#[test]
fn the_limit_is_used_while_shares_move() {
    for rule in rules(10) {
        let demands = (0..10).map(|index| if index < 5 { [20.0; 2] } else { [0.5, 20.0] }).collect();
        let admitted: f64 = Simulation::run(Scenario::steady(&rule, demands), 1).rates(120, 150).iter().sum();
        assert!(admitted >= 90.0, "{rule}: {admitted}");
    }
}

#[test]
fn callers_of_both_protocols_together_keep_the_limit() {
    for (envoys, faults, checks, seed) in [1, 5, 20].into_iter().flat_map(|envoys| {
        [
            (envoys, false, 0.5, 1),
            (envoys, false, 2.0, 1),
            (envoys, false, 20.0, 1),
            (envoys, true, 0.5, 1),
            (envoys, true, 2.0, 2),
            (envoys, true, 20.0, 3),
        ]
    }) {
        let (limit, number) = ((10 * envoys) as f64, envoys as f64);
        for rule in rules(envoys) {
            let demands = vec![[20.0; 2]; envoys];
            let scenario = Scenario { checks: checks * limit, faults, ..Scenario::steady(&rule, demands) };
            let simulation = Simulation::run(scenario, seed);
            let is_minute = rule.contains("minute") && !rule.contains("burst");
            // The largest number of requests, and the law.
            let (most, law) = match rule.contains("algorithm") {
                // Until the next second, or the end of a message's delivery, an Envoy can use its share.
                _ if !is_minute => (simulation.excess_of_bucket(limit, limit), 2.0 * number + limit),
                // Windows begin slightly early.
                false => (simulation.most_per_window(60) as f64, 60.0 * limit + 0.05 * checks * limit),
                true => {
                    let late = if faults { 10.0 } else { 4.0 };
                    (simulation.most_in_any(60) as f64, (60.0 + late) * limit + 2.0 * number)
                }
            };
            if !rule.contains("algorithm") && !is_minute {
                let law = 2.0 * (limit + number) + 0.05 * checks * limit;
                let most = simulation.most_per_window(1) as f64;
                assert!(
                    most <= law,
                    "{rule}, {envoys} Envoys, {checks}, {faults}: {most} in a second instead of {law}"
                );
            }
            assert!(most <= law, "{rule}, {envoys} Envoys, {checks}, {faults}: {most} instead of {law}");
            assert!(simulation.admitted.len() as f64 >= 0.7 * 240.0 * limit, "{rule}: {}", simulation.admitted.len());
        }
    }
}
