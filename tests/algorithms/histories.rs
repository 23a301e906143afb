//! Memory and Redis return the same decisions for the same operations at the same times, for every counter program. The
//! random histories contain costs, peeks, refunds, idle times, limits that change and clocks that jump.

use std::sync::Arc;

use proptest::{
    prelude::*,
    sample::select,
    strategy::{BoxedStrategy, ValueTree},
    test_runner::{Config, TestRunner},
};
use sluicegate::{
    algorithm::{
        Action, Algorithm, AlgorithmKind, Classes, CounterProgram, LimitSpec, Limiter as _, MAX_NUMBER, Micros,
        Operation, Program, RequestContext, Sample, State, WindowStart, assignments::Assignments,
        debt_bucket::DebtBucket, first_request::FirstRequestWindow, fixed_window::FixedWindow, penalty::Penalty,
        reports::UtilizationReports, scheduled_window::ScheduledWindow, sliding_window::WindowEdge,
    },
    store::{AnyStore, Charge, Counter, Hit, Memory, Store, memory},
};
use sluicegate_calendar::Period;
use sluicegate_overload::adaptive::Method;
use tokio::task::JoinSet;

use crate::{
    memcached,
    redis::stores::{connect, connect_with_deny_cache},
    support::{MemcachedServer, RedisCluster, RedisServer, Sentinels, ring, unwrap_decisions},
};

/// Histories per algorithm.
const HISTORIES: usize = 10_000;
/// Maximum number of concurrent histories, so that calls to Redis are pipelined.
const MAX_CONCURRENT: usize = 100;
/// A whole number of minutes and of hours.
const START: u64 = 1_763_672_400_000_000;
/// One minute before the tags of a fixed window of one minute restart.
const WRAP: u64 = 33 * 900_000 * 60_000_000 - 60_000_000;

/// One request: several hits on one counter.
#[derive(Clone, Debug)]
struct Step {
    /// Microseconds since the previous step; negative if the clock stepped back.
    elapsed: i64,
    /// Whether the second of the history's two limits applies: the limit changes during a history.
    changed: bool,
    /// Action, cost and context of each hit.
    hits: Vec<(Action, u64, RequestContext)>,
}

/// Microseconds between a roll back and the take that it undoes.
const ROLL_BACK_AGES: [u64; 5] = [0, 1, 1_000_000, 30_000_000, 60_000_000];

#[derive(Clone, Debug)]
struct History {
    start: u64,
    limits: [Program; 2],
    steps: Vec<Step>,
}

/// Generates few distinct times between steps. Most of them are the edge of a window or one microsecond off, where
/// off-by-one errors occur.
fn elapsed() -> impl Strategy<Value = i64> {
    let spans = [0_i64, 1, 1_000_000, 7_500_000, 15_000_000, 30_000_000, 59_999_999, 60_000_000, 120_000_000];
    prop_oneof![
        6 => Just(0_i64),
        12 => (select(spans.to_vec()), -1_i64..2).prop_map(|(span, offset)| (span + offset).max(0)),
        3 => 0_i64..200_000_000,
        1 => select(vec![-1_i64, -999_999, -5_000_000, -30_000_000, -60_000_000, -61_000_000, -200_000_000]),
        1 => select(vec![
            3_600_000_000_i64,
            86_400_000_000,
            31_536_000_000_000,
            -1_800_000_000,
            -3_600_000_000,
            -6_840_000_000,
            -86_400_000_000,
        ]),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let roll_back = select(ROLL_BACK_AGES.to_vec()).prop_map(|age| Action::RollBack(Micros::new(age)));
    let action =
        prop_oneof![6 => Just(Action::Take), 1 => Just(Action::Peek), 1 => Just(Action::Refund), 1 => roll_back];
    let cost = prop_oneof![12 => 0_u64..6, 1 => 6_u64..200, 1 => Just(MAX_NUMBER), 1 => Just(u64::MAX)];
    // A search for the bytes of one of these holders could match in the middle of another holder.
    let context = (select(vec![0_u64, 1, 256, 65_536]), 0_u8..4).prop_map(|(holder, class)| RequestContext {
        holder,
        class,
        entity: holder * 100,
        ..RequestContext::default()
    });
    let hits = prop::collection::vec((action, cost, context), 1..3);
    (elapsed(), prop::bool::weighted(0.2), hits).prop_map(|(elapsed, changed, hits)| Step { elapsed, changed, hits })
}

fn histories(limit: &BoxedStrategy<Program>) -> impl Strategy<Value = History> {
    let limits = (limit.clone(), limit.clone()).prop_map(|(one, other)| [one, other]);
    let start = prop_oneof![9 => Just(START), 1 => Just(WRAP)];
    (start, limits, prop::collection::vec(step(), 1..16)).prop_map(|(start, limits, steps)| History {
        start,
        limits,
        steps,
    })
}

/// Generates the programs that are no limits.
fn other_programs() -> [BoxedStrategy<Program>; 4] {
    let buckets = limits(Algorithm::kind("token_bucket").unwrap());
    let leases = buckets.prop_filter_map("leases of this bucket would end immediately", |bucket| bucket.leasing());
    let reports = |ttl| UtilizationReports::new(Micros::from_secs(ttl)).into();
    let assignments = |(ttl, held)| Assignments::new(Micros::from_secs(ttl)).with_held(held).into();
    let penalty = |(shortest, longer)| {
        let shortest = Micros::from_secs(shortest);
        Penalty::new(shortest, shortest + Micros::from_secs(longer)).unwrap().into()
    };
    [
        leases.boxed(),
        (select(vec![1_u64, 60]), select(vec![0_u64, 59, 600])).prop_map(penalty).boxed(),
        select(vec![1_u64, 10, 3_600]).prop_map(reports).boxed(),
        (select(vec![1_u64, 10, 300]), select(vec![0, 3, 1_000_000])).prop_map(assignments).boxed(),
    ]
}

/// Generates the uses of a limit: exactly, for leases, and for hits that other instances have already allowed.
fn uses(kind: AlgorithmKind) -> BoxedStrategy<Program> {
    let any_use = (limits(kind), 0_u32..10).prop_map(|(limit, choice)| match choice {
        0..3 => limit.leasing().unwrap_or(limit.into()),
        3 => limit.recording().into(),
        _ => limit.into(),
    });
    any_use.boxed()
}

/// Generates limits of one kind, with every keyword that belongs to it.
fn limits(kind: AlgorithmKind) -> BoxedStrategy<Algorithm> {
    let requests = prop_oneof![
        8 => 1_u64..12,
        1 => select(vec![100, 600, 1_000_003, u32::MAX.into(), 4_999_999_999, MAX_NUMBER - 1, MAX_NUMBER]),
    ];
    let window = select(vec![1_u64, 15, 60, 60, 60, 3_600, 31_536_000]);
    let percent = select(vec![None, None, None, Some(10), Some(50)]);
    let numbers = (requests, window, percent, any::<bool>(), 0_u32..9, 0_u32..9);
    let limits = numbers.prop_filter_map(
        "the numbers are not a valid limit",
        move |(requests, window, soft, denied, first, second)| {
            let if_chosen = |keyword: &str, chosen: bool| chosen && kind.keywords.contains(&keyword);
            let spec = LimitSpec {
                requests,
                window: Micros::from_secs(window),
                buckets: if_chosen("buckets", first > 4).then_some(second + 1),
                edge: if_chosen("edge", first % 2 == 0).then_some(WindowEdge::Strict),
                burst: if_chosen("burst", first > 2).then_some(u64::from(second) + 1),
                debt: (kind.name == DebtBucket::NAME).then_some(u64::from(second) + 1),
                queue: if_chosen("queue", second > 2).then_some(first),
                warm_up: kind.name.contains("warm_up").then_some(Micros::new(1 + u64::from(second) * 30_000_001)),
                count_denied: Some(denied),
                min_interval: if_chosen("min_interval", first > 4).then_some(Micros::new(u64::from(second) * 100_000)),
                soft: soft.filter(|_| !kind.name.contains("warm_up")),
                method: if_chosen("method", true).then(|| Method::ALL[second as usize % 3]),
                floor: if_chosen("floor", first > 2).then_some(first % 3),
                phase: (kind.name == ScheduledWindow::NAME && first < 4).then_some(Micros::ZERO),
                period: (kind.name == ScheduledWindow::NAME && first > 5).then_some(Period::Hour),
                window_start: (kind.name == ScheduledWindow::NAME && (4..6).contains(&first))
                    .then_some(WindowStart::Epoch),
                timeout: if_chosen("timeout", first > 4).then_some(Micros::new(1_500_000)),
                ..LimitSpec::default()
            };
            let spec = if if_chosen("shares", first > 3 || kind.name == "shares") {
                with_classes(spec, first, second)?
            } else {
                spec
            };
            let is_adaptive = kind.keywords.contains(&"method");
            let spec = if is_adaptive { LimitSpec { soft: None, count_denied: None, ..spec } } else { spec };
            let limit = (kind.build)(&spec).ok()?;
            // A limit that is too large for one algorithm is counted by another one, on another counter.
            if limit.name() == kind.name { Some(limit) } else { None }
        },
    );
    limits.boxed()
}

/// Adds three or four classes with different minimums. Returns `None` if they do not fit into the capacity.
fn with_classes(spec: LimitSpec, first: u32, second: u32) -> Option<LimitSpec> {
    let capacity = u32::try_from(spec.requests).ok()?;
    let twentieths = |number: u32| (u64::from(capacity) * u64::from(number) / 20) as u32;
    let mut shares =
        vec![(twentieths(first), twentieths(first) + 1), (twentieths(second), capacity), (0, twentieths(10).max(1))];
    if first.is_multiple_of(2) {
        shares.push((twentieths(1), capacity));
    }
    let classes = Classes::new(&shares, capacity).ok()?;
    Some(LimitSpec { classes: Some(classes), soft: None, count_denied: None, ..spec })
}

/// Returns the program for one caller, if it distinguishes callers.
pub(super) fn with_context(program: &Program, context: RequestContext) -> Program {
    match *program {
        Program::Limit(limit) => limit.with_context(context).into(),
        Program::UtilizationReports(reports) => reports.with_reporter(context.holder).into(),
        Program::Assignments(assignments) => assignments.with_caller(context.holder).into(),
        Program::LeasedBucket(_) | Program::Penalty(_) => *program,
    }
}

async fn decide(store: &AnyStore, key: &str, program: &Program, step: &Step, now: u64) -> Vec<String> {
    let mut hits = Vec::new();
    for (action, cost, context) in &step.hits {
        let action = match action {
            Action::RollBack(age) => Action::RollBack(Micros::new(now) - *age),
            action => *action,
        };
        // Takes of one cost count ahead.
        let counter = Counter::new(key, with_context(program, *context));
        hits.push(Hit { action, is_ahead: *cost == 3, ..Hit::take(counter, *cost) });
    }
    let hits: Vec<_> = hits.iter().map(Hit::borrowed).collect();
    let decisions = unwrap_decisions(store.apply(&hits, Charge::Each, Micros::new(now)).await);
    decisions.iter().map(|decision| format!("{decision:?}")).collect()
}

/// Runs one history in memory and in another store. The error contains the first decision that differs.
async fn compare(store: AnyStore, key: String, history: History) -> Result<(), String> {
    let memory = AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())));
    let mut now = history.start;
    for (number, step) in history.steps.iter().enumerate() {
        now = now.saturating_add_signed(step.elapsed);
        let program = &history.limits[usize::from(step.changed)];
        let in_memory = decide(&memory, &key, program, step, now).await;
        let in_store = decide(&store, &key, program, step, now).await;
        if in_memory != in_store {
            return Err(format!("memory {in_memory:#?}\nstore {in_store:#?}\nat step {number} of {history:#?}"));
        }
    }
    Ok(())
}

/// Returns whether a fixed window of the history counts denials. Such a window cannot count denials from the deny
/// cache, and the missing hits become visible because histories refund hits that were never taken.
fn counts_denials(history: &History) -> bool {
    let counts = |limit: &Program| limit.denial_counts(&State::default(), Micros::new(history.start));
    let tags = [FixedWindow::TAG, FirstRequestWindow::TAG, ScheduledWindow::TAG];
    let is_window = |limit: &Program| tags.contains(&limit.tag());
    history.limits.iter().any(|limit| is_window(limit) && counts(limit))
}

async fn assert_stores_agree(limit: BoxedStrategy<Program>, url: &str, histories_each: usize) {
    // Redis's own clock advances between two steps of the same time: a state that ends microseconds later must not
    // expire in the meantime.
    let jitter = std::time::Duration::from_secs(86_400);
    let without_cache = AnyStore::Redis(connect(url, jitter).await);
    let with_cache = AnyStore::Redis(connect_with_deny_cache(url, jitter).await);
    assert_agrees_with_memory(limit, &without_cache, &with_cache, histories_each).await;
}

/// Compares the decisions of random histories in memory and in another store. The store with a deny cache is used for
/// histories whose limits do not count denied hits.
async fn assert_agrees_with_memory(
    limit: BoxedStrategy<Program>,
    without_cache: &AnyStore,
    with_cache: &AnyStore,
    histories_each: usize,
) {
    let strategy = histories(&limit);
    let mut runner = TestRunner::new(Config::default());
    let mut running = JoinSet::new();
    for number in 0..histories_each {
        let history = strategy.new_tree(&mut runner).unwrap().current();
        let store = if counts_denials(&history) { without_cache } else { with_cache };
        running.spawn(compare(store.clone(), format!("history{number}"), history));
        while running.len() >= MAX_CONCURRENT {
            running.join_next().await.unwrap().unwrap().unwrap_or_else(|difference| panic!("{difference}"));
        }
    }
    for outcome in running.join_all().await {
        outcome.unwrap_or_else(|difference| panic!("{difference}"));
    }
}

#[tokio::test]
async fn memory_and_redis_agree_on_random_histories_of_every_program() {
    let limits = Algorithm::KINDS.iter().map(|kind| uses(*kind));
    for program in limits.chain(other_programs()) {
        let server = RedisServer::start();
        assert_stores_agree(program, &server.url(), HISTORIES).await;
    }
}

#[tokio::test]
async fn memory_and_memcached_agree_on_random_histories_of_every_program() {
    let limits = Algorithm::KINDS.iter().map(|kind| uses(*kind));
    for program in limits.chain(other_programs()) {
        let server = MemcachedServer::at(START);
        let without_cache = AnyStore::Memcached(memcached::stores::connect(&server.url()).await);
        let with_cache = AnyStore::Memcached(memcached::stores::connect_with_deny_cache(&server.url()).await);
        assert_agrees_with_memory(program, &without_cache, &with_cache, HISTORIES / 10).await;
    }
}

/// Generates requests that start and end in batches, each with a latency: enough for many steps of an adaptive limit.
fn batches(kind: AlgorithmKind) -> impl Strategy<Value = History> {
    let batch = (1_usize..40, 1_u64..700_000, prop::bool::weighted(0.1), 0_i64..2_500_000);
    let limits = (uses(kind), uses(kind)).prop_map(|(one, other)| [one, other]);
    (limits, prop::collection::vec(batch, 20..60)).prop_map(|(limits, batches)| {
        let steps = batches.into_iter().enumerate().flat_map(|(number, (size, latency, dropped, elapsed))| {
            let hits = move |action, latency: u64| {
                let holders = 1..=size as u64;
                let sample = move |holder| Some(Sample { latency: Micros::new(latency + holder), dropped });
                holders
                    .map(move |holder| {
                        (action, 1, RequestContext { holder, sample: sample(holder), ..RequestContext::default() })
                    })
                    .collect()
            };
            let changed = number % 7 == 6;
            let start = Step { elapsed, changed, hits: hits(Action::Take, latency) };
            [start, Step { elapsed: latency as i64, changed, hits: hits(Action::Refund, latency) }]
        });
        History { start: START, limits, steps: steps.collect() }
    })
}

#[tokio::test]
async fn adaptive_limits_learn_the_same_in_memory_and_in_redis() {
    let server = RedisServer::start();
    let kind = Algorithm::kind("adaptive").unwrap();
    let redis = connect(&server.url(), std::time::Duration::from_secs(3_600)).await;
    let mut runner = TestRunner::new(Config::default());
    let mut running = JoinSet::new();
    for number in 0..200 {
        let history = batches(kind).new_tree(&mut runner).unwrap().current();
        running.spawn(compare(AnyStore::Redis(redis.clone()), format!("batches{number}"), history));
    }
    for outcome in running.join_all().await {
        outcome.unwrap_or_else(|difference| panic!("{}", &difference[..difference.len().min(3_000)]));
    }
}

/// Demands are of the same order as the limit, so that shares depend on each other. At times, the lifetime of assignments
/// changes, and callers have a share that the store does not know.
#[tokio::test]
async fn memory_and_redis_divide_a_limit_into_the_same_shares() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), std::time::Duration::from_secs(3_600)).await;
    let hit = (prop_oneof![9 => Just(Action::Take), 1 => Just(Action::Refund)], 0..600_000_u64, 1..6_u64);
    let elapsed = select(vec![0_i64, 1_000_000, 2_500_000, 5_000_000]);
    let step =
        (hit, elapsed, proptest::bool::weighted(0.1)).prop_map(|((action, demand, holder), elapsed, changed)| {
            let context = RequestContext { holder, ..RequestContext::default() };
            Step { elapsed, changed, hits: vec![(action, demand, context)] }
        });
    let limits =
        [(10, 0), (4, 150_000)].map(|(ttl, held)| Assignments::new(Micros::from_secs(ttl)).with_held(held).into());
    let histories = proptest::collection::vec(step, 60).prop_map(move |steps| History { start: START, limits, steps });
    let (mut runner, mut running) = (TestRunner::new(Config::default()), JoinSet::new());
    for number in 0..200 {
        let history = histories.new_tree(&mut runner).unwrap().current();
        running.spawn(compare(AnyStore::Redis(redis.clone()), format!("shares{number}"), history));
    }
    for outcome in running.join_all().await {
        outcome.unwrap_or_else(|difference| panic!("{}", &difference[..difference.len().min(3_000)]));
    }
}

/// Writes a state of a token bucket as another program could: leased parts of any size.
fn broken_leases(now: u64, sizes: &[u64], fractions: u32) -> Vec<u8> {
    let number = |number: u64, length: usize| number.to_le_bytes()[..length].to_vec();
    let level = [number(now + 1_000_000, 7), number(fractions.into(), 4), number(60_000_000, 4), number(0, 1)].concat();
    let part = |(index, size): (usize, &u64)| {
        [number(now + 250_000 * (1 + index as u64), 7), number(*size, 7), number(fractions.into(), 4)].concat()
    };
    [level, sizes.iter().enumerate().flat_map(part).collect()].concat()
}

#[tokio::test]
async fn memory_and_redis_reduce_leases_that_are_larger_than_a_bucket() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), std::time::Duration::from_secs(3_600)).await;
    let write = "return redis.call('SET', KEYS[1], (ARGV[1]:gsub('..', function(byte) \
                 return string.char(tonumber(byte, 16)) end)))";
    let read = "return ((redis.call('GET', KEYS[1]) or ''):gsub('.', function(byte) \
                return string.format('%02x', byte:byte()) end))";
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    for requests in [7, 60, 600] {
        let spec = LimitSpec { requests, window: Micros::from_secs(60), ..LimitSpec::default() };
        let bucket = Algorithm::kind("token_bucket").unwrap().build;
        let limit = bucket(&spec).unwrap();
        let (direct, leasing) = (Program::Limit(limit), limit.leasing().unwrap());
        let sizes: [&[u64]; 4] =
            [&[59_000_000], &[30_000_000, 31_000_000, 1], &[20_000_000; 4], &[MAX_NUMBER, 5, MAX_NUMBER, MAX_NUMBER]];
        for (sizes, fractions) in sizes.into_iter().flat_map(|sizes| [(sizes, 0), (sizes, 1), (sizes, u32::MAX)]) {
            let bytes = broken_leases(START, sizes, fractions);
            for (program, later) in [(direct, 0), (leasing, 0), (direct, 700_000)] {
                let store = AnyStore::Redis(redis.clone());
                let step =
                    |action| Step { elapsed: 0, changed: false, hits: vec![(action, 1, RequestContext::default())] };
                decide(&store, "broken", &direct, &step(Action::Take), START).await;
                let key = server.cli(&["keys", "*"]);
                assert_eq!(server.cli(&["eval", write, "1", &key, &hex(&bytes)]), "OK");
                let mut state = State::from_bytes(&bytes);
                for action in [Action::Peek, Action::Take, Action::Refund, Action::Peek] {
                    let now = START + later;
                    let decision = program.apply(&mut state, Operation { action, cost: 1, now: Micros::new(now) });
                    let in_redis = decide(&store, "broken", &program, &step(action), now).await;
                    let case = format!("{action:?}, {requests}, {sizes:?}, {fractions}");
                    assert_eq!(in_redis, [format!("{decision:?}")], "{case}");
                    assert_eq!(server.cli(&["eval", read, "1", &key]), hex(state.as_bytes()), "{case}");
                    assert!(program.expires(&state, Micros::new(now)) <= Micros::new(now + 122_000_000));
                }
                server.cli(&["flushall"]);
            }
        }
    }
}

#[tokio::test]
async fn memory_and_every_topology_agree_on_random_histories() {
    let (cluster, sentinels, (nodes, ring)) = (RedisCluster::start(), Sentinels::start(None, None), ring(3));
    let limits = Algorithm::KINDS.iter().map(|kind| uses(*kind));
    for program in limits.chain(other_programs()) {
        for url in [cluster.url(), sentinels.url(), ring.clone()] {
            assert_stores_agree(program.clone(), &url, HISTORIES / 10).await;
        }
        let servers = cluster.nodes.iter().chain(&nodes).chain(&sentinels.servers[..1]);
        servers.for_each(|server| assert_eq!(server.cli(&["flushall"]), "OK"));
    }
}
