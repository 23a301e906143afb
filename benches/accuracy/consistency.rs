//! Three instances that share one limit, for each consistency in Redis and as peers without Redis: the allowed proportion of the expected hits, and the
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
    store::{
        AnyStore, Charge, Counter, CounterStore, Hit, HitDecisions, Local, Memory, Peers, StepOutcome, StepOutcomes,
        Store, StoreError, TimeSource, local, memory,
        peers::{self, Pull},
    },
};
use tokio::time::{Instant, sleep};

use super::traces::START;

const LIMIT: u32 = 2_000;
const WINDOW: Micros = Micros::from_secs(1);
const INSTANCES: usize = 3;
const SECONDS: u64 = 10;
/// Interval at which peers publish their hits.
const SYNC: Duration = Duration::from_millis(100);
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
    async fn step(&self, hits: &[Hit<&Counter>], _: Charge, _: Micros) -> StepOutcomes {
        sleep(ONE_WAY_LATENCY).await;
        let at = self.now();
        let count = |hit: &Hit<&Counter>| {
            let mut state = self.state.lock().unwrap();
            let allowed =
                hit.counter.program.step(&mut state, Operation { action: hit.action, cost: hit.cost, now: at });
            StepOutcome { allowed, action: hit.action, at, state: state.clone() }
        };
        let outcomes = hits.iter().map(|hit| Ok(count(hit))).collect();
        sleep(ONE_WAY_LATENCY).await;
        outcomes
    }

    async fn delete(&self, _: &[u8], _: bool) -> Result<bool, StoreError> {
        *self.state.lock().unwrap() = State::default();
        Ok(true)
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
        for consistency in Consistency::ALL.map(Some).into_iter().chain([None]) {
            let cells = LOADS.iter().flat_map(|(_, shares)| {
                [0.9, 1.5].map(|load| {
                    let runtime =
                        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
                    let (share, worst) = runtime.block_on(run(algorithm, consistency, *shares, load));
                    format!(" {:.1}%, {worst} |", share * 100.0)
                })
            });
            let consistency = consistency.map_or("peers", Consistency::name);
            println!("| {name}, {consistency} |{}", cells.collect::<String>());
        }
    }
}

/// One instance: in front of Redis, or a peer with its own counters.
#[derive(Clone)]
enum Member {
    Redis(Local<Remote>),
    Peer(AnyStore),
}

impl Member {
    async fn apply(&self, hit: Hit<&Counter>, now: Micros) -> HitDecisions {
        match self {
            Self::Redis(local) => local.apply(&[hit], Charge::Each, now).await,
            Self::Peer(store) => store.apply(&[hit], Charge::Each, now).await,
        }
    }
}

/// Starts instances that share a counter in Redis.
fn start_in_redis(remote: &Remote, tasks: &tokio::task::LocalSet) -> Vec<Member> {
    let instance = |_| {
        let shared = local::LocalState::new(
            &local::DenyCacheSettings::default(),
            &local::LeaseSettings::default(),
            &local::EventualSettings::default(),
            TimeSource::Own,
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
        Member::Redis(local)
    };
    (0..INSTANCES).map(instance).collect()
}

/// Starts instances that exchange hits. Each publishes at its own time.
fn start_as_peers(clock: &Remote, tasks: &tokio::task::LocalSet) -> Vec<Member> {
    let memory = || Arc::new(Memory::exchanged(&memory::Settings { max_counters: 1_000 }));
    let stores: Vec<_> = (0..INSTANCES).map(|_| memory()).collect();
    let peers: Vec<_> = (1..)
        .zip(&stores)
        .map(|(epoch, store)| Peers::with_epoch(Arc::clone(store), peers::Metrics::new(), epoch))
        .collect();
    for (index, peer) in peers.iter().enumerate() {
        let (clock, publisher) = (clock.clone(), Arc::clone(peer));
        tasks.spawn_local(async move {
            sleep(SYNC / INSTANCES as u32 * index as u32).await;
            for _ in 0..SECONDS * 10 {
                sleep(SYNC).await;
                publisher.publish(clock.now());
            }
        });
    }
    for (origin, subscriber) in peers.iter().flat_map(|origin| peers.iter().map(move |other| (origin, other))) {
        if !Arc::ptr_eq(origin, subscriber) {
            tasks.spawn_local(follow(clock.clone(), Arc::clone(origin), Arc::clone(subscriber)));
        }
    }
    stores.into_iter().map(|store| Member::Peer(AnyStore::Memory(store))).collect()
}

/// Pulls the increments of `origin` until the end of the run.
async fn follow(clock: Remote, origin: Arc<Peers>, subscriber: Arc<Peers>) {
    let mut published = origin.published();
    while clock.started.elapsed() < Duration::from_secs(SECONDS) {
        sleep(ONE_WAY_LATENCY).await;
        let after = subscriber.position(origin.epoch());
        match origin.pull(subscriber.epoch(), after, clock.now()) {
            Pull::Batch(batch) => {
                sleep(ONE_WAY_LATENCY).await;
                subscriber.apply(&batch, clock.now());
            }
            Pull::Nothing | Pull::Copy => drop(tokio::time::timeout(SYNC, published.changed()).await),
        }
    }
}

/// Returns the allowed proportion of the expected hits, and the hits in the worst second.
async fn run(algorithm: Algorithm, consistency: Option<Consistency>, shares: Shares, load: f64) -> (f64, usize) {
    let remote = Remote { started: Instant::now(), state: Arc::default() };
    let passed = Arc::new(Mutex::new(Vec::new()));
    let tasks = tokio::task::LocalSet::new();
    let requests = Rc::new(Cell::new(0_u64));
    let members = match consistency {
        Some(_) => start_in_redis(&remote, &tasks),
        None => start_as_peers(&remote, &tasks),
    };
    for (instance, member) in members.into_iter().enumerate() {
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
                    let (member, remote, passed) = (member.clone(), remote.clone(), Arc::clone(&passed));
                    tokio::task::spawn_local(async move {
                        let consistency = consistency.unwrap_or_default();
                        let counter = Counter { consistency, ..Counter::new(b"{d|k=v}", algorithm) };
                        let answer = member.apply(counter.take(1), remote.now()).await.pop();
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
