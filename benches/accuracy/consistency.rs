//! Three instances and one limit, by what its rule says of consistency: how much of what should pass does, and how much
//! passes in the worst window. The code that the service runs, in virtual time.

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
/// There, and back again.
const TRIP: Duration = Duration::from_micros(250);

/// Who gets how much of the load, at each second.
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
    began: Instant,
    state: Arc<Mutex<State>>,
}

impl Remote {
    fn now(&self) -> Micros {
        Micros::new(START + self.began.elapsed().as_micros() as u64)
    }
}

impl CounterStore for Remote {
    async fn step(&self, hits: &[Hit<'_>], _: Charge, _: Micros) -> StepOutcomes {
        sleep(TRIP).await;
        let at = self.now();
        let count = |hit: &Hit<'_>| {
            let mut state = self.state.lock().unwrap();
            let allowed = hit.algorithm.step(&mut state, Operation { action: hit.action, cost: hit.cost, now: at });
            StepOutcome { allowed, action: hit.action, at, state: state.clone() }
        };
        let counts = hits.iter().map(|hit| Ok(count(hit))).collect();
        sleep(TRIP).await;
        counts
    }
}

pub(crate) fn print() {
    println!(
        "\nThree instances, {LIMIT} a second, {SECONDS} s: what passed of what should, and the worst window of 1 s in hits, at 0.9 and 1.5 times the limit\n"
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

/// What passed of what should, and the most in any second.
async fn run(algorithm: Algorithm, consistency: Consistency, shares: Shares, load: f64) -> (f64, usize) {
    let remote = Remote { began: Instant::now(), state: Arc::default() };
    let passed = Arc::new(Mutex::new(Vec::new()));
    let tasks = tokio::task::LocalSet::new();
    let asked = Rc::new(Cell::new(0_u64));
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
        let (remote, passed, asked) = (remote.clone(), Arc::clone(&passed), Rc::clone(&asked));
        tasks.spawn_local(async move {
            let mut dice = StdRng::seed_from_u64(instance as u64);
            // Each millisecond what comes in it.
            for millis in 0..SECONDS * 1_000 {
                sleep(Duration::from_millis(1)).await;
                let mean = load * f64::from(LIMIT) / 1_000.0 * shares(millis / 1_000)[instance];
                let calls = mean as u32 + u32::from(dice.random::<f64>() < mean.fract());
                asked.set(asked.get() + u64::from(calls));
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
    // A bucket begins full.
    let full = if algorithm.name() == Algorithm::DEFAULT.name { 0 } else { u64::from(LIMIT) };
    let should = asked.get().min(u64::from(LIMIT) * SECONDS + full);
    // Of a fixed window, the windows of its own; of a bucket any second, which may have its burst besides.
    let worst = match full {
        0 => passed.chunk_by(|one, other| one / WINDOW.get() == other / WINDOW.get()).map(<[u64]>::len).max(),
        _ => {
            (0..passed.len()).map(|first| passed.partition_point(|at| *at < passed[first] + WINDOW.get()) - first).max()
        }
    };
    (passed.len() as f64 / should as f64, worst.unwrap_or_default())
}
