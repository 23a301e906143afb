//! An upstream with a queue (M/M/c), callers at random, and limits before it: in virtual time, the same for the same seed.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate_common::adaptive::{Bounds, Estimate, Method, Sample, Window};

pub(crate) const SECOND: u64 = 1_000_000;

/// What happens to the upstream and to those who ask it.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) seconds: u64,
    /// At a second: how many requests arrive a second, from all fleets together.
    pub(crate) arrivals: fn(f64) -> f64,
    /// How many the upstream serves at once.
    pub(crate) servers: fn(f64) -> usize,
    /// How long it takes for one, on average, in seconds.
    pub(crate) service: fn(f64) -> f64,
    /// Those who ask, each with a limit of its own.
    pub(crate) fleets: usize,
}

/// A caller has gone when it took longer, in microseconds; the upstream works for him all the same.
pub(crate) const PATIENCE: u64 = SECOND / 2;

/// How many of a fleet may be in flight.
#[derive(Clone)]
pub(crate) enum Limit {
    Unlimited,
    Fixed(u32),
    Learning(Method, Bounds, Estimate, Window),
}

impl Limit {
    pub(crate) fn learning(method: Method) -> Self {
        let bounds = Bounds { timeout: PATIENCE, ..Bounds::default() };
        Self::Learning(method, bounds, Estimate::new(method, &bounds), Window::default())
    }

    pub(crate) fn now(&self) -> u32 {
        match self {
            Self::Unlimited => u32::MAX,
            Self::Fixed(limit) => *limit,
            Self::Learning(_, bounds, estimate, _) => estimate.limit(bounds),
        }
    }

    fn learn(&mut self, sample: Sample, now: u64) {
        if let Self::Learning(method, bounds, estimate, window) = self
            && let Some(all) = window.add(sample, now)
        {
            estimate.update(*method, bounds, all, now);
        }
    }
}

/// What came of it, by the second.
#[derive(Default)]
pub(crate) struct Run {
    /// Of all fleets together, at the end of each tenth of a second.
    pub(crate) limits: Vec<f64>,
    /// Requests that were answered while their caller waited, in each second.
    pub(crate) good: Vec<u32>,
    pub(crate) refused: u64,
    pub(crate) late: u64,
    /// Of those that were answered in time, in microseconds.
    pub(crate) latencies: Vec<u64>,
}

impl Run {
    /// The mean of the limits between two seconds.
    pub(crate) fn limit(&self, from: usize, to: usize) -> f64 {
        let limits = &self.limits[10 * from..10 * to];
        limits.iter().sum::<f64>() / limits.len() as f64
    }

    /// How far they are from that, as a part of it.
    pub(crate) fn spread(&self, from: usize, to: usize) -> f64 {
        let mean = self.limit(from, to);
        let limits = &self.limits[10 * from..10 * to];
        let variance = limits.iter().map(|limit| (limit - mean).powi(2)).sum::<f64>() / limits.len() as f64;
        variance.sqrt() / mean
    }

    /// Answered in time each second, between two seconds.
    pub(crate) fn goodput(&self, from: usize, to: usize) -> f64 {
        self.good[from..to].iter().map(|good| f64::from(*good)).sum::<f64>() / (to - from) as f64
    }

    pub(crate) fn percentile(&mut self, part: f64) -> f64 {
        self.latencies.sort_unstable();
        let place = ((self.latencies.len() as f64 * part) as usize).min(self.latencies.len().saturating_sub(1));
        self.latencies.get(place).map_or(0.0, |latency| *latency as f64 / 1_000.0)
    }
}

/// A request in the upstream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Request {
    fleet: usize,
    arrived: u64,
    in_flight: u32,
}

pub(crate) fn run(scenario: &Scenario, limit: &Limit, seed: u64) -> Run {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut exponential = |mean: f64| -mean * (1.0 - dice.random::<f64>()).ln();
    let mut limits = vec![limit.clone(); scenario.fleets];
    let mut in_flight = vec![0_u32; scenario.fleets];
    let mut busy: BinaryHeap<Reverse<(u64, Request)>> = BinaryHeap::new();
    let mut queue = VecDeque::<Request>::new();
    let mut run = Run { good: vec![0; scenario.seconds as usize], ..Run::default() };
    let (mut arrival, mut turn, mut look) = (0_u64, 0_usize, SECOND / 10);
    let at = |now: u64| now as f64 / SECOND as f64;
    loop {
        let done = busy.peek().map_or(u64::MAX, |Reverse((done, _))| *done);
        let now = arrival.min(done).min(look);
        if now > scenario.seconds * SECOND || run.limits.len() as u64 == 10 * scenario.seconds {
            return run;
        }
        if now == look {
            run.limits.push(limits.iter().map(|limit| f64::from(limit.now())).sum());
            look += SECOND / 10;
        } else if now == done {
            let Some(Reverse((_, request))) = busy.pop() else { continue };
            in_flight[request.fleet] -= 1;
            // Whoever has gone has been told that it took too long.
            let latency = now - request.arrived;
            let late = latency > PATIENCE;
            let sample = Sample { latency: latency as f64, in_flight: request.in_flight, dropped: late };
            limits[request.fleet].learn(sample, now);
            if late {
                run.late += 1;
            } else {
                run.good[(now / SECOND) as usize] += 1;
                run.latencies.push(latency);
            }
        } else {
            let fleet = turn % scenario.fleets;
            turn += 1;
            if in_flight[fleet] < limits[fleet].now() {
                in_flight[fleet] += 1;
                queue.push_back(Request { fleet, arrived: now, in_flight: in_flight[fleet] });
            } else {
                run.refused += 1;
            }
            arrival = now + exponential(SECOND as f64 / (scenario.arrivals)(at(now))).max(1.0) as u64;
        }
        while busy.len() < (scenario.servers)(at(now)) {
            let Some(request) = queue.pop_front() else { break };
            let took = exponential((scenario.service)(at(now)) * SECOND as f64).max(1.0) as u64;
            busy.push(Reverse((now + took, request)));
        }
    }
}

/// Fifty at once, a tenth of a second each: 500 a second.
fn fifty(_: f64) -> usize {
    50
}

fn tenth(_: f64) -> f64 {
    0.1
}

fn half_as_many_again(_: f64) -> f64 {
    750.0
}

pub(crate) const SCENARIOS: [Scenario; 5] = [
    Scenario { name: "steady", seconds: 300, arrivals: half_as_many_again, servers: fifty, service: tenth, fleets: 1 },
    Scenario {
        name: "step",
        seconds: 180,
        arrivals: half_as_many_again,
        servers: |second| if (60.0..120.0).contains(&second) { 25 } else { 50 },
        service: tenth,
        fleets: 1,
    },
    Scenario {
        name: "drift",
        seconds: 300,
        arrivals: half_as_many_again,
        servers: fifty,
        service: |second| 0.1 + 0.1 * (second / 300.0),
        fleets: 1,
    },
    Scenario {
        name: "bursts",
        seconds: 180,
        arrivals: |second| if second % 4.0 < 2.0 { 1_500.0 } else { 100.0 },
        servers: fifty,
        service: tenth,
        fleets: 1,
    },
    Scenario {
        name: "two-fleets",
        seconds: 300,
        arrivals: half_as_many_again,
        servers: fifty,
        service: tenth,
        fleets: 2,
    },
];
