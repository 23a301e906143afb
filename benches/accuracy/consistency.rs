//! Three instances that share one limit, for each consistency: the allowed proportion of the expected hits, and the
//! hits in the worst window. This runs the code of the service, in virtual time.

use std::{
    cell::Cell,
    rc::Rc,
    sync::{Arc, Mutex},
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate::{
    algorithm::{
        Algorithm, Consistency, MaxHits, Micros, Operation, State, fixed_window::FixedWindow, token_bucket::TokenBucket,
    },
    metrics::WorkerId,
    store::{Charge, CounterStore, Hit, Local, StepOutcome, StepOutcomes, Store, local},
};
use tokio::time::{Instant, sleep};

use super::traces::START;

const LIMIT: u32 = 2_000;
const WINDOW: Micros = Micros::from_secs(1);
const INSTANCES: usize = 3;
const SECONDS: u64 = 10;
/// Latency of a call to the store in each direction.
const ONE_WAY_LATENCY: Duration = Duration::from_micros(250);

/// Proportion of the load that each instance receives, by second.
type Shares = fn(u64) -> [f64; INSTANCES];

const LOADS: [(&str, Shares); 3] = [
    ("even", |_| [1.0 / 3.0; 3]),
    ("80/20", |_| [0.8, 0.1, 0.1]),
    ("moving", |second| {
        let mut shares = [0.05; INSTANCES];
        shares[second as usize % INSTANCES] = 0.9;
        shares
    }),
];

#[derive(Clone)]
struct Remote {
    started: Instant,
    state: Arc<Mutex<State>>,
}

impl Remote {
    fn now(&self) -> Micros {
        Micros::new(START + self.started.elapsed().as_micros() as u64)
    }
}

impl CounterStore for Remote {
    async fn step(&self, hits: &[Hit<'_>], _: Charge, _: Micros) -> StepOutcomes {
        sleep(ONE_WAY_LATENCY).await;
        let at = self.now();
        let count = |hit: &Hit<'_>| {
            let mut state = self.state.lock().unwrap();
            let allowed = hit.algorithm.step(&mut state, Operation { action: hit.action, cost: hit.cost, now: at });
            StepOutcome { allowed, action: hit.action, at, state: state.clone() }
        };
        let outcomes = hits.iter().map(|hit| Ok(count(hit))).collect();
        sleep(ONE_WAY_LATENCY).await;
        outcomes
    }
}

pub(crate) fn print() {
    println!(
        "\nThree instances, {LIMIT} a second, {SECONDS} s: allowed proportion of the expected hits, and hits in the worst window of 1 s, at 0.9 and 1.5 times the limit\n"
    );
    let titles: Vec<_> = LOADS.iter().map(|(name, _)| format!(" {name}, 0.9 | {name}, 1.5 |")).collect();
    println!("| rule |{}", titles.concat());
    println!("| --- |{}", " ---: |".repeat(2 * LOADS.len()));
    let fixed: Algorithm = FixedWindow::new(MaxHits::hard(LIMIT.into()), WINDOW, true).unwrap().into();
    let bucket: Algorithm = TokenBucket::new(LIMIT, WINDOW, MaxHits::hard(LIMIT.into()), false).unwrap().into();
    for (name, algorithm) in [("fixed_window", fixed), ("token_bucket", bucket)] {
        for consistency in Consistency::ALL {
            let cells = LOADS.iter().flat_map(|(_, shares)| {
                [0.9, 1.5].map(|load| {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
                    let (share, worst) = runtime.block_on(run(algorithm, consistency, *shares, load));
                    format!(" {:.1}%, {worst} |", share * 100.0)
                })
            });
            println!("| {name}, {} |{}", consistency.name(), cells.collect::<String>());
        }
    }
}

/// Returns the allowed proportion of the expected hits, and the hits in the worst second.
async fn run(algorithm: Algorithm, consistency: Consistency, shares: Shares, load: f64) -> (f64, usize) {
    let remote = Remote { started: Instant::now(), state: Arc::default() };
    let passed = Arc::new(Mutex::new(Vec::new()));
    let tasks = tokio::task::LocalSet::new();
    let requests = Rc::new(Cell::new(0_u64));
    for instance in 0..INSTANCES {
        let shared = local::Shared::new(
            &local::DenyCacheSettings::default(),
            &local::LeaseSettings::default(),
            &local::EventualSettings::default(),
            local::Clock::start(),
            local::Metrics::new(1),
        );
        let local = Local::new(remote.clone(), shared, WorkerId(0));
        let sweeper = local.clone();
        tasks.spawn_local(async move {
            for _ in 0..SECONDS * 40 {
                sleep(Duration::from_millis(25)).await;
                sweeper.sweep(Micros::ZERO).await;
            }
        });
        let (remote, passed, requests) = (remote.clone(), Arc::clone(&passed), Rc::clone(&requests));
        tasks.spawn_local(async move {
            let mut rng = StdRng::seed_from_u64(instance as u64);
            // Each iteration sends the requests of one millisecond.
            for millis in 0..SECONDS * 1_000 {
                sleep(Duration::from_millis(1)).await;
                let mean = load * f64::from(LIMIT) / 1_000.0 * shares(millis / 1_000)[instance];
                let calls = mean as u32 + u32::from(rng.random::<f64>() < mean.fract());
                requests.set(requests.get() + u64::from(calls));
                for _ in 0..calls {
                    let (local, remote, passed) = (local.clone(), remote.clone(), Arc::clone(&passed));
                    tokio::task::spawn_local(async move {
                        let hit = Hit { consistency, ..Hit::take(b"{d|k=v}", &algorithm, 1) };
                        let answer = local.apply(&[hit], Charge::Each, remote.now()).await.pop();
                        if answer.is_some_and(|answer| answer.is_ok_and(|answer| answer.decision.allowed)) {
                            passed.lock().unwrap().push(remote.now().get());
                        }
                    });
                }
            }
        });
    }
    tasks.await;
    let mut passed = passed.lock().unwrap().clone();
    passed.sort_unstable();
    // A token bucket is full at the start.
    let full = if algorithm.name() == Algorithm::DEFAULT.name { 0 } else { u64::from(LIMIT) };
    let expected = requests.get().min(u64::from(LIMIT) * SECONDS + full);
    // A fixed window is compared in its own windows, a token bucket in any second, which may also contain a burst.
    let worst = match full {
        0 => passed.chunk_by(|one, other| one / WINDOW.get() == other / WINDOW.get()).map(<[u64]>::len).max(),
        _ => {
            (0..passed.len()).map(|first| passed.partition_point(|at| *at < passed[first] + WINDOW.get()) - first).max()
        }
    };
    (passed.len() as f64 / expected as f64, worst.unwrap_or_default())
}
