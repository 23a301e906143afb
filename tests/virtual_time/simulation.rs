//! Leases with failures of the network and of processes, in virtual time. The simulation runs the service's own code:
//! instances and a store. Messages are late, requests and answers are lost, instances stall, crash and return, and
//! limits change. A seed replays a run. The test is a separate binary because it uses all processors, and the other
//! tests have deadlines.
//!
//! The checks are the guarantees of each algorithm, applied to all hits that callers were allowed. Planted faults show
//! that the checks work: each of them must be found.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

use std::{
    cell::Cell,
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
        Action, Algorithm, Consistency, MaxHits, Micros, Operation, Program, State,
        fixed_window::FixedWindow,
        gcra::Gcra,
        sliding_log::SlidingLog,
        sliding_window::{SlidingWindow, WindowEdge},
        token_bucket::TokenBucket,
    },
    metrics::WorkerId,
    store::{
        Charge, Counter, CounterStore, Decider, Hit, HitDecision, HitDecisions, Local, StepOutcome, StepOutcomes,
        Store, StoreError, TimeSource, local,
    },
};
use sluicegate_client::simulation::{GrantCache, GrantFeedback};
use tokio::time::{Instant, sleep};

const RUNS: u64 = 10_000;
const KEYS: [&[u8]; 2] = [b"{d|k=v}", b"{d|k=w}"];
/// The names of the same counters in clients.
const NAMES: [&str; 2] = ["v", "w"];
/// The window of every limit.
const WINDOW: Duration = Duration::from_secs(1);
const START: u64 = 1_763_672_400_000_000;

/// A fault that is planted in a run.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    None,
    /// Hits taken for a lease drain as if they were spent immediately.
    NoEscrow,
    /// The end of a lease is determined by a clock that is not monotonic.
    WallClock,
    /// A lease contains twice the hits that were counted.
    DoubleGrant,
    /// Clients spend grants even after these have ended.
    EndlessGrant,
    /// Not a planted fault but a real event: the store loses the hits that it counted last.
    Failover,
}

/// Failures of the network. A value `n` affects one in `n` calls, and 0 affects none.
#[derive(Clone, Copy)]
struct Network {
    late: u32,
    request_lost: u32,
    answer_lost: u32,
    /// A client's reports about grants arrive again, later.
    duplicated: u32,
}

/// Hits that callers were allowed: the time by the store's clock, and the number.
type Passed = Vec<(u64, u64)>;

/// The state of a run: a store with the real algorithms and its own clock, the network, and the instances.
struct World {
    began: Instant,
    random: Mutex<StdRng>,
    network: Network,
    fault: Fault,
    /// State of each counter.
    states: Mutex<[State; 2]>,
    passed: Mutex<[Passed; 2]>,
    /// Number of requests that instances decided by a lease, without a call.
    leased: AtomicU64,
    /// Number of requests that clients admitted by a grant, without a call.
    granted: AtomicU64,
    /// The instances that run now.
    instances: Mutex<Vec<Local<Remote>>>,
    /// Hits that the store has counted, per counter.
    counted: Mutex<[u64; 2]>,
    /// Counted hits that a failover lost, per counter.
    lost: Mutex<[u64; 2]>,
    /// Hits that were allowed in excess of the guarantees.
    excess: AtomicU64,
}

tokio::task_local! {
    /// Hits of the current caller that the store has taken, per counter.
    static TAKEN: Cell<[u64; 2]>;
}

impl World {
    fn store_time(&self) -> Micros {
        Micros::new(START + self.began.elapsed().as_micros() as u64)
    }

    /// Returns the time of an instance's own clock, which repeatedly stands still for 300 ms.
    fn wall_time(&self) -> Micros {
        let elapsed = self.store_time().get() - START;
        let slot = elapsed / 300_000;
        Micros::new(START + if slot.is_multiple_of(2) { slot * 300_000 } else { elapsed })
    }

    /// Returns `true` with a probability of `1 / number`, and never if `number` is 0.
    fn one_in(&self, number: u32) -> bool {
        number > 0 && self.random.lock().unwrap().random_range(0..number) == 0
    }

    /// Returns a random delay of one message.
    fn latency(&self) -> Duration {
        let micros = self.random.lock().unwrap().random_range(50..500);
        let late = if self.one_in(self.network.late) { self.random.lock().unwrap().random_range(1..400) } else { 0 };
        Duration::from_micros(micros) + Duration::from_millis(late)
    }

    fn step(&self, states: &mut [State; 2], hit: &Hit<&Counter>, action: Action, at: Micros) -> StepOutcome {
        let state = &mut states[counter_index(&hit.counter.name)];
        let (mut program, mut cost) = (hit.counter.program, hit.cost);
        let for_lease = action == Action::Take && hit.counter.consistency == Consistency::Exact;
        if self.fault == Fault::NoEscrow && matches!(program, Program::LeasedBucket(_)) {
            let peek = Operation { action: Action::Peek, cost: 0, now: at };
            let limit = program.apply(&mut State::default(), peek).remaining;
            program = bucket(limit).into();
        }
        if for_lease && self.fault == Fault::DoubleGrant {
            cost /= 2;
        }
        let allowed = program.step(state, Operation { action, cost, now: at });
        StepOutcome { allowed, action, at, state: state.clone() }
    }
}

fn counter_index(key: &[u8]) -> usize {
    KEYS.iter().position(|known| *known == key).unwrap()
}

#[derive(Clone)]
struct Remote(Arc<World>);

impl CounterStore for Remote {
    async fn step(&self, hits: &[Hit<&Counter>], charge: Charge, _: Micros) -> StepOutcomes {
        let world = &self.0;
        let failed = || hits.iter().map(|_| Err(StoreError::Timeout)).collect();
        sleep(world.latency()).await;
        if world.one_in(world.network.request_lost) {
            return failed();
        }
        let at = world.store_time();
        let outcomes: Vec<_> = {
            let mut states = world.states.lock().unwrap();
            let mut preview = states.clone();
            let denied =
                charge == Charge::All && hits.iter().any(|hit| !world.step(&mut preview, hit, hit.action, at).allowed);
            let action = |hit: &Hit<&Counter>| match hit.action {
                Action::Take if denied => Action::Peek,
                action => action,
            };
            let outcomes: Vec<_> = hits.iter().map(|hit| world.step(&mut states, hit, action(hit), at)).collect();
            for (hit, outcome) in hits.iter().zip(&outcomes).filter(|(_, outcome)| outcome.action == Action::Take) {
                world.counted.lock().unwrap()[counter_index(&hit.counter.name)] +=
                    if outcome.allowed { hit.cost } else { 0 };
            }
            outcomes
        };
        sleep(world.latency()).await;
        if world.one_in(world.network.answer_lost) {
            return failed();
        }
        for (hit, outcome) in hits.iter().zip(&outcomes) {
            if outcome.allowed && outcome.action == Action::Take {
                // Hits taken for a lease are not counted here, because no caller has been allowed them yet.
                let _ = TAKEN.try_with(|taken| {
                    let mut hits = taken.get();
                    hits[counter_index(&hit.counter.name)] += hit.cost;
                    taken.set(hits);
                    world.passed.lock().unwrap()[counter_index(&hit.counter.name)].push((at.get(), hit.cost));
                });
            }
        }
        outcomes.into_iter().map(Ok).collect()
    }

    /// No counter is deleted here.
    async fn delete(&self, _: &[u8], _: bool) -> Result<bool, StoreError> {
        Err(StoreError::Rejected)
    }
}

fn instance(world: &Arc<World>, leases: bool) -> Local<Remote> {
    // There are at most two counters, and small tables are created faster.
    let deny_cache = local::DenyCacheSettings { max_entries: 64, ..local::DenyCacheSettings::default() };
    let settings =
        local::LeaseSettings { max_counters: if leases { 64 } else { 0 }, ..local::LeaseSettings::default() };
    let time_source = if world.fault == Fault::WallClock { TimeSource::Caller } else { TimeSource::Own };
    let shared = local::LocalState::new(
        &deny_cache,
        &settings,
        &local::EventualSettings::default(),
        time_source,
        local::Metrics::new(1),
    );
    Local::new(Remote(Arc::clone(world)), shared, WorkerId(0))
}

/// The guarantee of a limit.
#[derive(Clone, Copy, Debug)]
enum Guarantee {
    /// At most the limit in each window since the epoch.
    Windows,
    /// At most the limit in any time as long as a window.
    AnyWindow,
    /// At most the limit plus `t` times the limit in any time `t`.
    Envelope,
}

#[derive(Clone, Copy, Debug)]
struct Kind {
    guarantee: Guarantee,
    build: fn(u64, bool) -> Algorithm,
    /// Number of parts of a window in which hits are counted, if hits count from the time of their arrival.
    buckets: Option<u64>,
}

const LENGTH: Micros = Micros::new(WINDOW.as_micros() as u64);

fn bucket(limit: u64) -> Algorithm {
    TokenBucket::new(limit as u32, LENGTH, MaxHits::hard(limit), false).unwrap().into()
}

const KINDS: [Kind; 5] = [
    Kind {
        guarantee: Guarantee::Windows,
        build: |limit, denied| FixedWindow::new(MaxHits::hard(limit), LENGTH, denied).unwrap().into(),
        buckets: Some(1),
    },
    Kind {
        guarantee: Guarantee::AnyWindow,
        build: |limit, denied| {
            SlidingWindow::new(MaxHits::hard(limit), LENGTH, 4, WindowEdge::Strict, denied).unwrap().into()
        },
        buckets: Some(4),
    },
    Kind { guarantee: Guarantee::Envelope, build: |limit, _| bucket(limit), buckets: None },
    Kind {
        guarantee: Guarantee::Envelope,
        build: |limit, denied| Gcra::new(limit as u32, LENGTH, MaxHits::hard(limit), denied).unwrap().into(),
        buckets: None,
    },
    Kind {
        guarantee: Guarantee::AnyWindow,
        build: |limit, denied| {
            SlidingLog::new(MaxHits::hard(limit.min(1_000)), LENGTH, Micros::ZERO, denied).unwrap().into()
        },
        buckets: None,
    },
];

/// A limit, and the value to which it changes in the middle of a run.
#[derive(Clone, Copy, Debug)]
struct Limit {
    kind: Kind,
    hits: [u64; 2],
    count_denied: bool,
}

impl Limit {
    fn random(random: &mut StdRng) -> Self {
        let kind = KINDS[random.random_range(0..KINDS.len())];
        let hits = [random.random_range(150..1_000), random.random_range(150..1_000)];
        let hits = if random.random() { [hits[0]; 2] } else { hits };
        Self { kind, hits, count_denied: random.random() }
    }

    fn algorithm(&self, changed: bool) -> Algorithm {
        (self.kind.build)(self.hits[usize::from(changed)], self.count_denied)
    }

    /// Returns the number of allowed hits in excess of the guarantee.
    fn excess(&self, passed: &Passed) -> u64 {
        let limit = self.hits[0].max(self.hits[1]);
        match self.kind.guarantee {
            Guarantee::Windows => max_in_windows(passed).saturating_sub(limit),
            Guarantee::AnyWindow => max_in_any_window(passed).saturating_sub(limit),
            Guarantee::Envelope => overflow(passed, limit),
        }
    }
}

fn max_in_windows(passed: &Passed) -> u64 {
    let mut windows = BTreeMap::<u64, u64>::new();
    passed.iter().for_each(|(at, hits)| *windows.entry(at / LENGTH.get()).or_default() += hits);
    windows.into_values().max().unwrap_or_default()
}

fn max_in_any_window(passed: &Passed) -> u64 {
    let mut sorted = passed.to_vec();
    sorted.sort_unstable();
    let (mut first, mut sum, mut max) = (0, 0, 0);
    for (at, hits) in &sorted {
        sum += hits;
        while sorted[first].0 + LENGTH.get() <= *at {
            sum -= sorted[first].1;
            first += 1;
        }
        max = max.max(sum);
    }
    max
}

/// Returns by how many whole hits a bucket overflows that receives each hit at the time when it is allowed.
fn overflow(passed: &Passed, limit: u64) -> u64 {
    let mut sorted = passed.to_vec();
    sorted.sort_unstable();
    // The level is in millionths of a hit. As many of them drain per microsecond as hits per second.
    let (mut level, mut previous, mut max) = (0_u64, START, 0);
    for (at, hits) in sorted {
        level = level.saturating_sub((at - previous) * limit) + hits * LENGTH.get();
        (previous, max) = (at, max.max(level));
    }
    max.saturating_sub(limit * LENGTH.get()) / LENGTH.get()
}

/// The times of requests to an instance.
#[derive(Clone, Copy)]
enum Load {
    /// At random with `rate` requests per second, with pauses and bursts.
    Random { rate: u32 },
    /// The hardest case, repeatedly. The first instance sends few requests and pauses while it holds leases. When its
    /// spent hits have drained, the other instances, which do not lease, request all available hits. Then the first
    /// instance spends its leases. `pause` is in milliseconds.
    Tide { first: bool, pause: u64 },
}

impl Load {
    /// Returns the time until the next calls, and their number. Tokio's clock has a resolution of a millisecond here.
    fn next(self, world: &World) -> (Duration, u32) {
        let between = |from, to| world.random.lock().unwrap().random_range(from..to);
        match self {
            Self::Random { rate } => {
                let pause = if world.one_in(40) { between(10_000, 120_000) } else { 0 };
                let calls = if world.one_in(150) { between(50, 200) as u32 } else { 1 };
                (Duration::from_micros(between(0, u64::from(2_000_000 / rate)) + pause), calls)
            }
            Self::Tide { first, pause } => {
                const PERIOD: u64 = 600;
                let phase = world.began.elapsed().as_millis() as u64 % PERIOD;
                let active: &[(u64, u32)] = if first {
                    &[(1, 10), (4, 10), (8, 10), (pause, 100)]
                } else {
                    &[(pause - 5, 250), (pause - 3, 250)]
                };
                let next =
                    active.iter().find(|(at, _)| phase < *at).copied().unwrap_or((PERIOD + active[0].0, active[0].1));
                (Duration::from_millis(next.0 - phase), next.1)
            }
        }
    }
}

/// Sends requests to one instance until its end.
async fn send_requests(
    world: Arc<World>,
    local: Local<Remote>,
    limits: Arc<Vec<Limit>>,
    charge: Charge,
    load: Load,
    until: Duration,
) {
    while world.began.elapsed() < until {
        let (gap, calls) = load.next(&world);
        sleep(gap).await;
        // Callers do not wait for each other.
        for _ in 0..calls {
            let large = world.one_in(50);
            let cost = world.random.lock().unwrap().random_range(if large { 10..90 } else { 1..3 });
            let changed = world.began.elapsed() > until / 2;
            let (world, local, limits) = (Arc::clone(&world), local.clone(), Arc::clone(&limits));
            tokio::spawn(async move {
                let algorithms: Vec<_> = limits.iter().map(|limit| limit.algorithm(changed)).collect();
                decide(&world, &local, &algorithms, charge, cost, &[]).await;
            });
        }
    }
}

/// Sends one request to one instance and records its allowed hits.
async fn decide(
    world: &World,
    local: &Local<Remote>,
    algorithms: &[Algorithm],
    charge: Charge,
    cost: u64,
    feedback: &[GrantFeedback],
) -> HitDecisions {
    let demand = |index: usize| feedback.get(index).map_or(0, |feedback| feedback.0);
    let counter = |(algorithm, key): (&Algorithm, &[u8])| Counter {
        consistency: Consistency::Leased,
        ..Counter::new(key, *algorithm)
    };
    let counters: Vec<_> = algorithms.iter().zip(KEYS).map(counter).collect();
    let hit = |(index, counter): (usize, _)| Hit { demand: demand(index), ..Hit::take(counter, cost) };
    let hits: Vec<_> = counters.iter().enumerate().map(hit).collect();
    report(world, local, &counters, feedback);
    let before = world.store_time();
    let answers = TAKEN.scope(Cell::default(), async {
        let answers = local.apply(&hits, charge, world.wall_time()).await;
        (answers, TAKEN.get().get())
    });
    let (answers, taken) = answers.await;
    let passes = |answer: &Result<HitDecision, StoreError>| answer.is_ok_and(|answer| answer.decision.allowed);
    let all_pass = answers.iter().all(passes);
    for (hit, answer) in hits.iter().zip(&answers) {
        // Hits that the store has not taken are paid from a lease.
        let paid = hit.cost - taken[counter_index(&hit.counter.name)];
        if paid > 0 && passes(answer) && (charge == Charge::Each || all_pass) {
            world.passed.lock().unwrap()[counter_index(&hit.counter.name)].push((before.get(), paid));
            world.leased.fetch_add(1, Relaxed);
        }
        let alone = answer.is_ok_and(|answer| answer.decider == Decider::Lease) && hits.len() == 1;
        assert!(!alone || all_pass && world.store_time() == before, "a lease decides without a call");
    }
    answers
}

/// Reports the grants that a client has finished.
fn report(world: &World, local: &Local<Remote>, counters: &[Counter], feedback: &[GrantFeedback]) {
    for (counter, (_, reports)) in counters.iter().zip(feedback) {
        if let Some((id, spent)) = reports {
            local.report(counter, *id, *spent, world.wall_time());
        }
    }
}

/// Runs a client until its end. It admits hits by grants if it can. Otherwise it calls one instance, or at times the
/// next one.
async fn client(
    world: Arc<World>,
    limits: Arc<Vec<Limit>>,
    charge: Charge,
    (home, load): (usize, Load),
    until: Duration,
) {
    // The client's clock has another origin.
    let clock_offset = Duration::from_secs(world.random.lock().unwrap().random_range(0..1_000_000));
    let clock = {
        let world = Arc::clone(&world);
        move || clock_offset + world.began.elapsed()
    };
    let names = &NAMES[..limits.len()];
    let mut grants = Arc::new(GrantCache::default());
    let choose_instance = |world: &World| {
        let instances = world.instances.lock().unwrap();
        let index = if world.one_in(world.network.late) { home + 1 } else { home };
        instances[index % instances.len()].clone()
    };
    while world.began.elapsed() < until {
        let (gap, calls) = load.next(&world);
        sleep(gap).await;
        if world.one_in(world.network.late) && world.one_in(20) {
            // The client crashes and loses its grants.
            grants = Arc::new(GrantCache::default());
        }
        for _ in 0..calls {
            let cost = world.random.lock().unwrap().random_range(1..3);
            let sent = clock();
            if grants.spend(names, cost, sent) {
                let now = world.store_time().get();
                world.passed.lock().unwrap()[..names.len()]
                    .iter_mut()
                    .for_each(|passed| passed.push((now, cost.into())));
                world.granted.fetch_add(1, Relaxed);
                continue;
            }
            let feedback = grants.feedback(names, cost, sent);
            let (world, limits, grants, local) =
                (Arc::clone(&world), Arc::clone(&limits), Arc::clone(&grants), choose_instance(&world));
            let changed = world.began.elapsed() > until / 2;
            tokio::spawn(async move {
                sleep(world.latency()).await;
                if world.one_in(world.network.request_lost) {
                    return;
                }
                let algorithms: Vec<_> = limits.iter().map(|limit| limit.algorithm(changed)).collect();
                let answers = decide(&world, &local, &algorithms, charge, cost.into(), &feedback).await;
                sleep(world.latency()).await;
                if world.one_in(world.network.duplicated) {
                    let counters = algorithms.iter().zip(KEYS).map(|(rule, key)| Counter::new(key, *rule));
                    report(&world, &local, &counters.collect::<Vec<_>>(), &feedback);
                }
                if world.one_in(world.network.answer_lost) {
                    return;
                }
                let granted = |answer: &Result<HitDecision, StoreError>| {
                    let grant = answer.ok()?.grant?;
                    let extra_ttl = if world.fault == Fault::EndlessGrant { WINDOW } else { Duration::ZERO };
                    Some((grant.hits.get().into(), extra_ttl + Duration::from_micros(grant.ttl.get()), grant.id))
                };
                let granted: Vec<_> = answers.iter().map(granted).collect();
                grants.store(names, &feedback, &granted, sent);
            });
        }
    }
    // Messages in transit arrive, and the remaining grants are returned.
    sleep(Duration::from_millis(5)).await;
    let local = choose_instance(&world);
    let algorithms: Vec<_> = limits.iter().map(|limit| limit.algorithm(true)).collect();
    for (name, id, spent) in grants.return_all(clock()) {
        let index = NAMES.iter().position(|known| *known == name).unwrap();
        local.report(&Counter::new(KEYS[index], algorithms[index]), id, spent, world.wall_time());
    }
}

/// Makes a replica that lags the master.
async fn fail_over(world: Arc<World>, until: Duration) {
    let (when, lag) = {
        let mut random = world.random.lock().unwrap();
        (until.mul_f64(random.random_range(0.2..0.7)), Duration::from_millis(random.random_range(5..50)))
    };
    sleep(when).await;
    let (states, counted) = (world.states.lock().unwrap().clone(), *world.counted.lock().unwrap());
    sleep(lag).await;
    let now = *world.counted.lock().unwrap();
    *world.states.lock().unwrap() = states;
    *world.lost.lock().unwrap() = [0, 1].map(|index| now[index] - counted[index]);
}

/// Returns idle leases of an instance at intervals. An instance that stalls for a while does so later.
async fn sweep(world: Arc<World>, local: Local<Remote>, duration: Duration) {
    let began = Instant::now();
    while began.elapsed() < duration {
        let pause = if world.network.late > 0 && world.one_in(20) { 300 } else { 25 };
        sleep(Duration::from_millis(pause)).await;
        local.sweep(world.wall_time()).await;
    }
}

/// Returns the maximum number of allowed hits that still count.
fn counted(limit: &Limit, passed: &Passed, now: u64) -> u64 {
    let window = LENGTH.get();
    match limit.kind.buckets {
        Some(buckets) => {
            let width = window / buckets;
            let since = now - now % width - if buckets > 1 { window } else { 0 };
            passed.iter().filter(|(at, _)| *at >= since).map(|(_, hits)| hits).sum()
        }
        // Each hit counts as if it had arrived at the end of its lease, at most a quarter of a window later.
        None => {
            let max_delay = match limit.kind.guarantee {
                Guarantee::Envelope => window / 4,
                _ => window / 10,
            };
            passed.iter().filter(|(at, _)| at + window + max_delay >= now).map(|(_, hits)| hits).sum()
        }
    }
}

/// Runs the simulation of a seed. Returns the numbers of allowed requests, of those decided by leases and by grants,
/// and of excess hits, or an error that names the broken guarantee.
async fn run(seed: u64, fault: Fault) -> Result<[u64; 4], String> {
    let mut random = StdRng::seed_from_u64(seed);
    let failures = if random.random() { [20, 30, 30, 10] } else { [0; 4] };
    let [late, request_lost, answer_lost, duplicated] = failures;
    let count = if random.random_range(0..3) == 0 { 2 } else { 1 };
    let limits: Arc<Vec<Limit>> = Arc::new((0..count).map(|_| Limit::random(&mut random)).collect());
    let charge = if random.random() { Charge::All } else { Charge::Each };
    let until = Duration::from_millis(random.random_range(200..1_300));
    let instances = random.random_range(1..5);
    let tide = random.random_range(0..3) == 0;
    // Shorter than a lease, about as long, or longer.
    let pause = [30..55, 200..300, 300..500][random.random_range(0..3)].clone();
    let pause = random.random_range(pause);
    let load = |random: &mut StdRng, number| {
        if tide {
            Load::Tide { first: number == 0, pause }
        } else {
            Load::Random { rate: random.random_range(50..900) }
        }
    };
    let loads: Vec<_> = (0..instances).map(|number| load(&mut random, number)).collect();
    let crashes = random.random::<bool>();
    let clients = if random.random_range(0..3) == 0 { random.random_range(1..5) } else { 0 };
    // In a tide, only the first instance leases.
    let clients: Vec<_> = (0..clients).map(|home| (if tide { 0 } else { home }, load(&mut random, 0))).collect();
    let world = Arc::new(World {
        began: Instant::now(),
        random: Mutex::new(random),
        network: Network { late, request_lost, answer_lost, duplicated },
        fault,
        states: Mutex::default(),
        passed: Mutex::default(),
        leased: AtomicU64::new(0),
        granted: AtomicU64::new(0),
        instances: Mutex::default(),
        counted: Mutex::default(),
        lost: Mutex::default(),
        excess: AtomicU64::new(0),
    });
    if fault == Fault::Failover {
        tokio::spawn(fail_over(Arc::clone(&world), until));
    }
    let leases = |load: &Load| !matches!(load, Load::Tide { first: false, .. });
    *world.instances.lock().unwrap() = loads.iter().map(|load| instance(&world, leases(load))).collect();
    let mut running = tokio::task::JoinSet::new();
    for client in clients {
        running.spawn(self::client(Arc::clone(&world), Arc::clone(&limits), charge, client, until));
    }
    for (index, load) in loads.into_iter().enumerate() {
        let (world, limits) = (Arc::clone(&world), Arc::clone(&limits));
        running.spawn(async move {
            // A crashed instance never returns its leases, and another instance replaces it.
            let crash = if crashes { until / 3 } else { until };
            for end in [crash, until] {
                let local = world.instances.lock().unwrap()[index].clone();
                let duration =
                    end.saturating_sub(world.began.elapsed()) + Duration::from_secs(if end == until { 1 } else { 0 });
                tokio::spawn(sweep(Arc::clone(&world), local.clone(), duration));
                send_requests(Arc::clone(&world), local.clone(), Arc::clone(&limits), charge, load, end).await;
                if end == until {
                    sleep(Duration::from_millis(500)).await;
                    local.return_all(world.wall_time()).await;
                    break;
                }
                world.instances.lock().unwrap()[index] = instance(&world, leases(&load));
            }
        });
    }
    while let Some(ended) = running.join_next().await {
        ended.unwrap();
    }
    // Messages in transit have arrived, and the leases that they contained are returned.
    sleep(Duration::from_millis(10)).await;
    for (index, limit) in limits.iter().enumerate() {
        if late > 0 || crashes || limit.count_denied || limit.hits[0] != limit.hits[1] || fault != Fault::None {
            continue;
        }
        let now = world.store_time();
        let peek = Operation { action: Action::Peek, cost: 0, now };
        let used = limit.algorithm(true).apply(&mut world.states.lock().unwrap()[index].clone(), peek).used;
        let counted = counted(limit, &world.passed.lock().unwrap()[index], now.get());
        if used > counted || limit.kind.buckets.is_some() && used != counted {
            return Err(format!("hits are lost: {used} hits count, {counted} were allowed, {limit:?}"));
        }
    }
    sleep(Duration::from_secs(1)).await;
    let passed = world.passed.lock().unwrap().clone();
    let lost = *world.lost.lock().unwrap();
    for ((limit, passed), lost) in limits.iter().zip(&passed).zip(lost) {
        let excess = limit.excess(passed);
        if excess > lost {
            return Err(format!("{excess} hits were allowed in excess: {limit:?}"));
        }
        world.excess.fetch_add(excess, Relaxed);
    }
    // No hits are lost permanently: two windows later, the full limit is available.
    sleep(2 * WINDOW).await;
    check_full_limits(&world, &limits)?;
    let passed = passed.iter().map(Vec::len).sum::<usize>() as u64;
    Ok([passed, world.leased.load(Relaxed), world.granted.load(Relaxed), world.excess.load(Relaxed)])
}

/// Checks that the full limit of every counter is available.
fn check_full_limits(world: &World, limits: &[Limit]) -> Result<(), String> {
    for (index, limit) in limits.iter().enumerate() {
        let peek = Operation { action: Action::Peek, cost: 0, now: world.store_time() };
        let state = &mut world.states.lock().unwrap()[index].clone();
        let (remaining, full) = (
            limit.algorithm(true).apply(state, peek).remaining,
            limit.algorithm(true).apply(&mut State::default(), peek).remaining,
        );
        if remaining != full {
            return Err(format!("only {remaining} of {full} hits are available in the end: {limit:?}"));
        }
    }
    Ok(())
}

fn replay(seed: u64, fault: Fault) -> Result<[u64; 4], String> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    runtime.block_on(run(seed, fault))
}

#[test]
fn no_failure_breaks_a_guarantee() {
    // The environment variable SEED sets the first seed.
    let first = std::env::var("SEED").map_or(0, |seed| seed.parse().expect("SEED is a number"));
    let (seeds, totals) = (AtomicU64::new(first), [const { AtomicU64::new(0) }; 4]);
    let replay_some = || {
        while let seed = seeds.fetch_add(1, Relaxed)
            && seed < first + RUNS
        {
            let ended = replay(seed, Fault::None).unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
            for (total, one) in totals.iter().zip(ended) {
                total.fetch_add(one, Relaxed);
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(replay_some)));
    });
    let [passed, leased, granted, _] = totals.map(AtomicU64::into_inner);
    println!("{passed} requests allowed, {leased} of them by leases and {granted} by grants");
    assert!(leased > passed / 10 && granted > passed / 100, "{leased} by leases and {granted} by grants of {passed}");
}

/// Each planted fault breaks a guarantee in some run, which proves that the checks work.
#[test]
fn planted_faults_are_found() {
    for fault in [Fault::NoEscrow, Fault::WallClock, Fault::DoubleGrant, Fault::EndlessGrant] {
        let found = (0..1_000).find_map(|seed| Some((seed, replay(seed, fault).err()?)));
        let (seed, broken) = found.unwrap_or_else(|| panic!("{fault:?} was not found"));
        println!("{fault:?}: seed {seed}: {broken}");
    }
}

/// With leases as well, the excess is at most the hits counted during the replication lag (docs/guides/redis.md).
#[test]
fn a_failover_exceeds_limits_by_at_most_the_lost_hits() {
    let runs =
        (0..500).map(|seed| replay(seed, Fault::Failover).unwrap_or_else(|broken| panic!("seed {seed}: {broken}")));
    let (mut passed, mut excess, mut max_excess) = (0, 0, 0);
    for [run_passed, _, _, run_excess] in runs {
        (passed, excess, max_excess) = (passed + run_passed, excess + run_excess, max_excess.max(run_excess));
    }
    println!("{excess} excess hits in 500 failovers, at most {max_excess} in one, and {passed} requests allowed");
    assert!(excess > 0, "no failover caused excess hits");
}
