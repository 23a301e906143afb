//! Leases under a network and processes that fail, in virtual time: the code that the service runs, instances of it and a
//! store, with messages that are late, lost or answered in vain, instances that crash and come back, and limits that
//! change. A seed replays a run. A binary of its own: it takes all processors, and the other tests have deadlines.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate::{
    algorithm::{
        Action, Algorithm, Ask, Micros, Quota, State,
        fixed_window::FixedWindow,
        sliding_window::{Edge, SlidingWindow},
    },
    metrics::WorkerId,
    store::{Charge, Counted, Counters, Counts, Decider, Hit, Local, Store, StoreError, local},
};
use tokio::time::{Instant, sleep};

const RUNS: u64 = 5_000;
const KEY: &[u8] = b"{d|k=v}";
/// Of the window of every limit here.
const WINDOW: Duration = Duration::from_secs(1);
const START: u64 = 1_763_672_400_000_000;

/// What a network does to calls, one in so many.
#[derive(Clone, Copy)]
struct Network {
    late: u32,
    question_lost: u32,
    answer_lost: u32,
}

/// The store: the real algorithms, and a clock of its own.
struct World {
    began: Instant,
    random: Mutex<StdRng>,
    network: Network,
    state: Mutex<State>,
    /// What callers were told may pass: when, by the store's clock, and how much.
    passed: Mutex<Vec<(u64, u64)>>,
    /// How many of them were decided without asking.
    leased: AtomicU64,
}

impl World {
    fn store_time(&self) -> Micros {
        Micros::new(START + self.began.elapsed().as_micros() as u64)
    }

    fn one_in(&self, number: u32) -> bool {
        number > 0 && self.random.lock().unwrap().random_range(0..number) == 0
    }

    fn trip(&self) -> Duration {
        let micros = self.random.lock().unwrap().random_range(50..500);
        let late = if self.one_in(self.network.late) { self.random.lock().unwrap().random_range(1..400) } else { 0 };
        Duration::from_micros(micros) + Duration::from_millis(late)
    }
}

#[derive(Clone)]
struct Remote(Arc<World>);

impl Counters for Remote {
    async fn count(&self, hits: &[Hit<'_>], _: Charge, _: Micros) -> Counts {
        let world = &self.0;
        let failed = || hits.iter().map(|_| Err(StoreError::Timeout)).collect();
        sleep(world.trip()).await;
        if world.one_in(world.network.question_lost) {
            return failed();
        }
        let at = world.store_time();
        let counts: Vec<_> = hits
            .iter()
            .map(|hit| {
                let mut state = world.state.lock().unwrap();
                let ask = Ask { action: hit.action, cost: hit.cost, now: at };
                let allowed = hit.algorithm.step(&mut state, ask);
                Counted { allowed, action: hit.action, at, state: state.clone() }
            })
            .collect();
        sleep(world.trip()).await;
        if world.one_in(world.network.answer_lost) {
            return failed();
        }
        for (hit, counted) in hits.iter().zip(&counts) {
            // Not what is taken in advance: only what callers ask for may be leased.
            if hit.leased && counted.allowed && hit.action == Action::Take {
                world.passed.lock().unwrap().push((at.get(), hit.cost));
            }
        }
        counts.into_iter().map(Ok).collect()
    }
}

fn instance(world: &Arc<World>) -> Local<Remote> {
    let (deny_cache, leases) = (local::DenyCacheSettings::default(), local::LeaseSettings::default());
    let shared = local::Shared::new(&deny_cache, &leases, local::Clock::start(), local::Metrics::new(1));
    Local::new(Remote(Arc::clone(world)), shared, WorkerId(0))
}

fn algorithm(strict: bool, count_denied: bool, limit: u64) -> Algorithm {
    let window = Micros::new(WINDOW.as_micros() as u64);
    if strict {
        SlidingWindow::new(Quota::hard(limit), window, 4, Edge::Strict, count_denied).unwrap().into()
    } else {
        FixedWindow::new(Quota::hard(limit), window, count_denied).unwrap().into()
    }
}

/// One caller after the other of one instance, for so long, at so many a second.
async fn call(world: Arc<World>, local: Local<Remote>, limits: [Algorithm; 2], rate: u32, until: Duration) {
    while world.began.elapsed() < until {
        let gap = world.random.lock().unwrap().random_range(0..2_000_000 / rate);
        sleep(Duration::from_micros(gap.into())).await;
        let cost = world.random.lock().unwrap().random_range(1..3);
        let algorithm = limits[usize::from(world.began.elapsed() > until / 2)];
        let (world, local) = (Arc::clone(&world), local.clone());
        // Callers do not wait for each other.
        tokio::spawn(async move {
            let hit = Hit { leased: true, ..Hit::take(KEY, &algorithm, cost) };
            let before = world.store_time();
            let answer = local.apply(&[hit], Charge::Each, before).await.pop().unwrap();
            if let Ok(answer) = answer
                && answer.decider == Decider::Lease
            {
                assert!(answer.decision.allowed);
                assert_eq!(world.store_time(), before, "nobody is asked");
                world.passed.lock().unwrap().push((before.get(), cost));
                world.leased.fetch_add(1, Relaxed);
            }
        });
    }
}

async fn sweep(local: Local<Remote>, life: Duration) {
    let began = Instant::now();
    while began.elapsed() < life {
        sleep(Duration::from_millis(25)).await;
        local.sweep(Micros::ZERO).await;
    }
}

/// The most that passed in any window, with the law of its algorithm.
fn most(passed: &[(u64, u64)], strict: bool) -> u64 {
    let window = WINDOW.as_micros() as u64;
    if !strict {
        let mut windows = BTreeMap::<u64, u64>::new();
        passed.iter().for_each(|(at, hits)| *windows.entry(at / window).or_default() += hits);
        return windows.into_values().max().unwrap_or_default();
    }
    let mut sorted = passed.to_vec();
    sorted.sort_unstable();
    let (mut first, mut sum, mut most) = (0, 0, 0);
    for (at, hits) in &sorted {
        sum += hits;
        while sorted[first].0 + window <= *at {
            sum -= sorted[first].1;
            first += 1;
        }
        most = most.max(sum);
    }
    most
}

/// What of all that passed still counts.
fn counted(passed: &[(u64, u64)], strict: bool, now: u64) -> u64 {
    let window = WINDOW.as_micros() as u64;
    let width = if strict { window / 4 } else { window };
    let since = now - now % width - if strict { window } else { 0 };
    passed.iter().filter(|(at, _)| *at >= since).map(|(_, hits)| hits).sum()
}

/// How many were decided, and how many of them without asking.
async fn run(seed: u64) -> [u64; 2] {
    let mut random = StdRng::seed_from_u64(seed);
    let (strict, count_denied) = (random.random(), random.random());
    let faults = if random.random() { [20, 30, 30] } else { [0, 0, 0] };
    let [late, question_lost, answer_lost] = faults;
    let (limit, other) = (random.random_range(150..1_500), random.random_range(150..1_500));
    let other = if random.random() { limit } else { other };
    let limits = [limit, other].map(|limit| algorithm(strict, count_denied, limit));
    let until = Duration::from_millis(random.random_range(300..1_800));
    let instances = random.random_range(1..5);
    let rates: Vec<u32> = (0..instances).map(|_| random.random_range(50..900)).collect();
    let crashes = random.random::<bool>();
    let world = Arc::new(World {
        began: Instant::now(),
        random: Mutex::new(random),
        network: Network { late, question_lost, answer_lost },
        state: Mutex::default(),
        passed: Mutex::default(),
        leased: AtomicU64::new(0),
    });
    let mut running = tokio::task::JoinSet::new();
    for rate in rates {
        let world = Arc::clone(&world);
        running.spawn(async move {
            // One that crashes is never swept again, and what it held is held by nobody; another takes its place.
            let crash = if crashes { until / 3 } else { until };
            for end in [crash, until] {
                let local = instance(&world);
                let life =
                    end.saturating_sub(world.began.elapsed()) + Duration::from_secs(if end == until { 1 } else { 0 });
                tokio::spawn(sweep(local.clone(), life));
                call(Arc::clone(&world), local.clone(), limits, rate, end).await;
                if end == until {
                    sleep(Duration::from_millis(500)).await;
                    local.give_all_back(Micros::ZERO).await;
                    break;
                }
            }
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
    // What was on its way has arrived, and what that brought is given back.
    sleep(Duration::from_millis(10)).await;
    if late == 0 && !crashes && !count_denied && limit == other {
        let now = world.store_time();
        let looks = Ask { action: Action::Peek, cost: 0, now };
        let used = limits[0].apply(&mut world.state.lock().unwrap().clone(), looks).used;
        assert_eq!(used, counted(&world.passed.lock().unwrap(), strict, now.get()), "seed {seed}: nothing is lost");
    }
    sleep(Duration::from_secs(1)).await;
    let passed = world.passed.lock().unwrap().clone();
    let most = most(&passed, strict);
    assert!(most <= limit.max(other), "seed {seed}: {most} passed of {limit}, {other}");
    // Nothing is lost for good: two windows later all of the limit is there.
    sleep(2 * WINDOW).await;
    let algorithm = limits[1];
    let ask = Ask { action: Action::Peek, cost: 0, now: world.store_time() };
    let decision = algorithm.apply(&mut world.state.lock().unwrap().clone(), ask);
    assert_eq!(decision.remaining, other, "seed {seed}");
    [passed.len() as u64, world.leased.load(Relaxed)]
}

#[test]
fn whatever_fails_no_window_has_more_than_its_limit() {
    let (seeds, passed, leased) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let replay = || {
        while let seed = seeds.fetch_add(1, Relaxed)
            && seed < RUNS
        {
            let runtime =
                tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
            let [all, of_leases] = runtime.block_on(run(seed));
            passed.fetch_add(all, Relaxed);
            leased.fetch_add(of_leases, Relaxed);
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(replay)));
    });
    let (passed, leased) = (passed.into_inner(), leased.into_inner());
    assert!(leased > passed / 10, "{leased} of {passed} were decided by leases");
}
