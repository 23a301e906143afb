//! Traces of requests over time, the same in every run.

use rand::{RngExt, SeedableRng, rngs::StdRng};

use super::{LIMIT, WINDOW};

/// Start of all traces: a multiple of the window.
pub(crate) const START: u64 = 1_763_672_400_000_000;

#[derive(Clone, Copy)]
pub(crate) struct Request {
    pub(crate) at: u64,
    pub(crate) user: u32,
}

pub(crate) struct Trace {
    pub(crate) name: &'static str,
    pub(crate) description: &'static str,
    /// Whether denied requests count too.
    pub(crate) count_denied: bool,
    /// Requests in the order of time.
    pub(crate) requests: Vec<Request>,
}

pub(crate) fn all() -> Vec<Trace> {
    let mut rng = StdRng::seed_from_u64(1);
    let trace = |name, description, requests| Trace { name, description, count_denied: false, requests };
    let zipf = zipf(&mut rng);
    vec![
        trace(
            "steady",
            "one user at 1.2 times the limit, an hour, arrivals at random",
            arrivals(&mut rng, 3_600, |_| 1.2),
        ),
        trace("bursty", "one user, an hour: 150 requests within 2 s, then quiet for 20 to 80 s", bursty(&mut rng)),
        trace(
            "boundary",
            "an attacker who sends the limit just before each full minute and again just after",
            boundary(),
        ),
        Trace {
            name: "zipf",
            description: "100,000 users, Zipf with exponent 0.6, the busiest at 0.78 times the limit, and two abusers at 3 and 10 \
                    times the limit; four hours; denied requests count, as in the published figure",
            count_denied: true,
            requests: zipf.clone(),
        },
        trace("zipf-admitted", "the same requests; only allowed requests count", zipf),
        trace(
            "day-night",
            "one user, a day: from 0.2 times the limit at night to 1.8 times by day",
            arrivals(&mut rng, 86_400, |day| 1.0 - 0.8 * (day * std::f64::consts::TAU).cos()),
        ),
    ]
}

/// Returns Poisson arrivals of one user. `load` is the multiple of the limit by the elapsed part of the time, from 0 to
/// 1.
fn arrivals(rng: &mut StdRng, seconds: u64, load: fn(f64) -> f64) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut at = 0.0;
    let end = (seconds * 1_000_000) as f64;
    loop {
        let gap = WINDOW.get() as f64 / (f64::from(LIMIT) * load(at / end));
        at -= gap * (1.0 - rng.random::<f64>()).ln();
        if at >= end {
            return requests;
        }
        requests.push(Request { at: START + at as u64, user: 0 });
    }
}

fn bursty(rng: &mut StdRng) -> Vec<Request> {
    let mut requests = Vec::new();
    let mut at = START;
    while at < START + 3_600_000_000 {
        let mut burst: Vec<_> = (0..150).map(|_| at + rng.random_range(0..2_000_000)).collect();
        burst.sort_unstable();
        requests.extend(burst.into_iter().map(|at| Request { at, user: 0 }));
        at += rng.random_range(20_000_000..80_000_000);
    }
    requests
}

fn boundary() -> Vec<Request> {
    let minute = |minute: u64| {
        let edge = START + minute * 60_000_000;
        let before = (0..u64::from(LIMIT)).map(move |hit| edge - 1_000_000 + hit * 10_000);
        let after = (0..u64::from(LIMIT)).map(move |hit| edge + hit * 10_000);
        before.chain(after).map(|at| Request { at, user: 0 })
    };
    (1..60).flat_map(minute).collect()
}

fn zipf(rng: &mut StdRng) -> Vec<Request> {
    const USERS: u32 = 100_000;
    const ABUSERS: [f64; 2] = [3.0, 10.0];
    const MINUTES: f64 = 240.0;
    let mut requests = Vec::new();
    let users = (1..=USERS).map(|rank| 0.78 * f64::from(rank).powf(-0.6));
    for (user, load) in (0..).zip(users.chain(ABUSERS)) {
        let per_minute = f64::from(LIMIT) * load;
        let mut at = 0.0;
        loop {
            at -= 60e6 / per_minute * (1.0 - rng.random::<f64>()).ln();
            if at >= MINUTES * 60e6 {
                break;
            }
            requests.push(Request { at: START + at as u64, user });
        }
    }
    requests.sort_by_key(|request| request.at);
    requests
}
