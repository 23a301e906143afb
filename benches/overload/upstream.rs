//! Simulation of an upstream with a queue (M/M/c), random arrivals, and a concurrency limit in front of it. It runs in
//! virtual time, and is deterministic for each seed.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate_overload::adaptive::{Bounds, Estimate, Method, Sample, Window};

pub(crate) const SECOND: u64 = 1_000_000;

/// Load and capacity over time. The functions receive the time in seconds.
pub(crate) struct Scenario {
    pub(crate) name: &'static str,
    pub(crate) seconds: u64,
    /// Arrivals per second, of all fleets together.
    pub(crate) arrivals: fn(f64) -> f64,
    /// Number of requests that the upstream serves at once.
    pub(crate) servers: fn(f64) -> usize,
    /// Mean service time of a request, in seconds.
    pub(crate) service: fn(f64) -> f64,
    /// Number of fleets of callers, each with its own limit.
    pub(crate) fleets: usize,
}

/// Timeout of a caller in microseconds. The upstream processes the request even after it.
pub(crate) const CALLER_TIMEOUT: u64 = SECOND / 2;

/// Limit on the requests of a fleet in flight.
#[derive(Clone)]
pub(crate) enum Limit {
    Unlimited,
    Fixed(u32),
    Adaptive(Method, Bounds, Estimate, Window),
}

impl Limit {
    pub(crate) fn adaptive(method: Method) -> Self {
        let bounds = Bounds { timeout: CALLER_TIMEOUT, ..Bounds::default() };
        Self::Adaptive(method, bounds, Estimate::new(method, &bounds), Window::default())
    }

    pub(crate) fn current(&self) -> u32 {
        match self {
            Self::Unlimited => u32::MAX,
            Self::Fixed(limit) => *limit,
            Self::Adaptive(_, bounds, estimate, _) => estimate.limit(bounds),
        }
    }

    fn record(&mut self, sample: Sample, now: u64) {
        if let Self::Adaptive(method, bounds, estimate, window) = self
            && let Some(combined) = window.add(sample, now)
        {
            estimate.update(*method, bounds, combined, now);
        }
    }
}

/// Results of a run.
#[derive(Default)]
pub(crate) struct Run {
    /// Sum of the limits of all fleets, every tenth of a second.
    pub(crate) limits: Vec<f64>,
    /// Number of requests answered before their caller's timeout, per second.
    pub(crate) in_time: Vec<u32>,
    pub(crate) denied: u64,
    /// Number of requests answered after their caller's timeout.
    pub(crate) late: u64,
    /// Latencies of the requests answered in time, in microseconds.
    pub(crate) latencies: Vec<u64>,
}

impl Run {
    /// Returns the mean of the limit between two seconds.
    pub(crate) fn mean_limit(&self, from: usize, to: usize) -> f64 {
        let limits = &self.limits[10 * from..10 * to];
        limits.iter().sum::<f64>() / limits.len() as f64
    }

    /// Returns the standard deviation of the limit between two seconds, relative to its mean.
    pub(crate) fn spread(&self, from: usize, to: usize) -> f64 {
        let mean = self.mean_limit(from, to);
        let limits = &self.limits[10 * from..10 * to];
        let variance = limits.iter().map(|limit| (limit - mean).powi(2)).sum::<f64>() / limits.len() as f64;
        variance.sqrt() / mean
    }

    /// Returns the number of requests answered in time per second, between two seconds.
    pub(crate) fn goodput(&self, from: usize, to: usize) -> f64 {
        self.in_time[from..to].iter().map(|count| f64::from(*count)).sum::<f64>() / (to - from) as f64
    }

    /// Returns a percentile of the latencies in milliseconds; `fraction` is 0.5 for the median.
    pub(crate) fn percentile(&mut self, fraction: f64) -> f64 {
        self.latencies.sort_unstable();
        let index = ((self.latencies.len() as f64 * fraction) as usize).min(self.latencies.len().saturating_sub(1));
        self.latencies.get(index).map_or(0.0, |latency| *latency as f64 / 1_000.0)
    }
}

/// A request that the upstream serves or queues.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Request {
    fleet: usize,
    arrived: u64,
    in_flight: u32,
}

pub(crate) fn run(scenario: &Scenario, limit: &Limit, seed: u64) -> Run {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut exponential = |mean: f64| -mean * (1.0 - rng.random::<f64>()).ln();
    let mut limits = vec![limit.clone(); scenario.fleets];
    let mut in_flight = vec![0_u32; scenario.fleets];
    let mut busy: BinaryHeap<Reverse<(u64, Request)>> = BinaryHeap::new();
    let mut queue = VecDeque::<Request>::new();
    let mut run = Run { in_time: vec![0; scenario.seconds as usize], ..Run::default() };
    let (mut next_arrival, mut arrivals, mut next_sample) = (0_u64, 0_usize, SECOND / 10);
    let seconds = |now: u64| now as f64 / SECOND as f64;
    loop {
        let next_completion = busy.peek().map_or(u64::MAX, |Reverse((completion, _))| *completion);
        let now = next_arrival.min(next_completion).min(next_sample);
        if now > scenario.seconds * SECOND || run.limits.len() as u64 == 10 * scenario.seconds {
            return run;
        }
        if now == next_sample {
            run.limits.push(limits.iter().map(|limit| f64::from(limit.current())).sum());
            next_sample += SECOND / 10;
        } else if now == next_completion {
            let Some(Reverse((_, request))) = busy.pop() else { continue };
            in_flight[request.fleet] -= 1;
            // A late response counts as dropped, like a timeout of the caller.
            let latency = now - request.arrived;
            let late = latency > CALLER_TIMEOUT;
            let sample = Sample { latency: latency as f64, in_flight: request.in_flight, dropped: late };
            limits[request.fleet].record(sample, now);
            if late {
                run.late += 1;
            } else {
                run.in_time[(now / SECOND) as usize] += 1;
                run.latencies.push(latency);
            }
        } else {
            let fleet = arrivals % scenario.fleets;
            arrivals += 1;
            if in_flight[fleet] < limits[fleet].current() {
                in_flight[fleet] += 1;
                queue.push_back(Request { fleet, arrived: now, in_flight: in_flight[fleet] });
            } else {
                run.denied += 1;
            }
            next_arrival = now + exponential(SECOND as f64 / (scenario.arrivals)(seconds(now))).max(1.0) as u64;
        }
        while busy.len() < (scenario.servers)(seconds(now)) {
            let Some(request) = queue.pop_front() else { break };
            let service_time = exponential((scenario.service)(seconds(now)) * SECOND as f64).max(1.0) as u64;
            busy.push(Reverse((now + service_time, request)));
        }
    }
}

/// Returns 50 servers. With a service time of a tenth of a second, their capacity is 500 requests per second.
fn fifty_servers(_: f64) -> usize {
    50
}

fn tenth_of_a_second(_: f64) -> f64 {
    0.1
}

/// Returns arrivals of 1.5 times the capacity.
fn excess_arrivals(_: f64) -> f64 {
    750.0
}

pub(crate) const SCENARIOS: [Scenario; 5] = [
    Scenario {
        name: "steady",
        seconds: 300,
        arrivals: excess_arrivals,
        servers: fifty_servers,
        service: tenth_of_a_second,
        fleets: 1,
    },
    Scenario {
        name: "step",
        seconds: 180,
        arrivals: excess_arrivals,
        servers: |second| if (60.0..120.0).contains(&second) { 25 } else { 50 },
        service: tenth_of_a_second,
        fleets: 1,
    },
    Scenario {
        name: "drift",
        seconds: 300,
        arrivals: excess_arrivals,
        servers: fifty_servers,
        service: |second| 0.1 + 0.1 * (second / 300.0),
        fleets: 1,
    },
    Scenario {
        name: "bursts",
        seconds: 180,
        arrivals: |second| if second % 4.0 < 2.0 { 1_500.0 } else { 100.0 },
        servers: fifty_servers,
        service: tenth_of_a_second,
        fleets: 1,
    },
    Scenario {
        name: "two-fleets",
        seconds: 300,
        arrivals: excess_arrivals,
        servers: fifty_servers,
        service: tenth_of_a_second,
        fleets: 2,
    },
];
