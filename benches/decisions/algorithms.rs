//! Cost of each algorithm: time and bytes in memory, and CPU time in Redis relative to `INCRBY`.

use std::{hash::Hasher, hint::black_box, sync::Arc, time::Instant};

use siphasher::sip128::{Hasher128, SipHasher13};
use sluicegate::{
    algorithm::{
        Action, Algorithm, Classes, MaxHits, Micros, RequestContext, Sample,
        adaptive::Adaptive,
        concurrency::Concurrency,
        first_request::FirstRequestWindow,
        fixed_window::FixedWindow,
        gcra::Gcra,
        leaky_bucket::LeakyBucket,
        shares::Shares,
        sliding_log::SlidingLog,
        sliding_window::{SlidingWindow, WindowEdge},
        token_bucket::TokenBucket,
        warm_up::WarmUp,
    },
    metrics::WorkerId,
    store::{Charge, Counter, CounterStore as _, Hit, Memory, Redis, TimeSource, memory, redis},
};
use sluicegate_overload::adaptive::{Bounds, Method};
use tokio::task::JoinSet;

use super::{
    in_process::resident,
    process::{Process, multi_host_url},
};

const START: u64 = 1_763_672_400_000_000;
const USERS: usize = 100_000;

/// Returns all algorithms, each with its name and the bytes per entity that textbooks state, if any.
pub(crate) fn all() -> Vec<(&'static str, Algorithm, &'static str)> {
    let minute = Micros::from_secs(60);
    let max_hits = MaxHits::hard(100);
    let sliding = |buckets| SlidingWindow::new(max_hits, minute, buckets, WindowEdge::Weighted, false).unwrap().into();
    let log = |hits| SlidingLog::new(MaxHits::hard(hits), minute, Micros::ZERO, false).unwrap().into();
    vec![
        ("fixed_window", FixedWindow::new(max_hits, minute, true).unwrap().into(), "36"),
        ("fixed_window, window: first_request", FirstRequestWindow::new(max_hits, minute, true).unwrap().into(), ""),
        ("sliding_window", sliding(1), ""),
        ("sliding_window, buckets: 6", sliding(6), ""),
        ("sliding_window, buckets: 60", sliding(60), "1 600"),
        ("sliding_log of 3", log(3), "88"),
        ("sliding_log of 500", log(500), "12 000"),
        ("token_bucket", TokenBucket::new(100, minute, max_hits, false).unwrap().into(), ""),
        (
            "token_bucket, warm_up: 30s, burst: 100",
            WarmUp::new(100, minute, 100, Micros::from_secs(30), false).unwrap().into(),
            "",
        ),
        ("leaky_bucket, queue: 10", LeakyBucket::new(100, minute, MaxHits::hard(110), 100, false).unwrap().into(), ""),
        ("gcra", Gcra::new(100, minute, max_hits, false).unwrap().into(), ""),
    ]
}

/// Returns a cost with which one hit makes the state as long as possible.
fn filling_cost(name: &str) -> u64 {
    match name.rsplit_once("sliding_log of ") {
        Some((_, hits)) => hits.parse().unwrap(),
        None => 1,
    }
}

fn names() -> Vec<Vec<u8>> {
    (0..USERS).map(|user| format!("{{bench|user=user{user:06}}}xx").into_bytes()).collect()
}

fn counters(names: &[Vec<u8>], algorithm: &Algorithm) -> Vec<Counter> {
    names.iter().map(|name| Counter::new(&**name, *algorithm)).collect()
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Measures the time per decision and the bytes per entity in memory.
pub(crate) fn in_memory() {
    println!("\nIn memory: nanoseconds per decision (medians of 9 rounds), bytes per entity\n");
    println!("| algorithm | one hot key | 1000 users | {USERS} users | bytes | textbook |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let names = names();
    let [hot, thousand, all_users] = [1, 1_000, USERS].map(|users| time_hashing(&names[..users]));
    println!("| (reading and hashing the key) | {hot:.0} | {thousand:.0} | {all_users:.0} | | |");
    for (index, (name, algorithm, textbook)) in all().iter().enumerate() {
        // The hot key gets a hit every 0.1 s of its clock, six times its limit. Each user gets one every minute.
        let [hot, thousand, all_users] =
            [(1, 100_000), (1_000, 60_000), (USERS, 600)].map(|(users, step)| time(algorithm, &names[..users], step));
        print!("| {name} | {hot:.0} | {thousand:.0} | {all_users:.0} | ");
        let bytes = Process::bench(&["entities", &index.to_string()]).line();
        println!("{bytes} | {textbook} |");
    }
}

/// Measures the time without any algorithm. With many users most of it is waiting for their names from memory.
fn time_hashing(names: &[Vec<u8>]) -> f64 {
    let round = || {
        let started = Instant::now();
        for decision in 0..DECISIONS {
            let mut hasher = SipHasher13::new_with_key(&[7; 16]);
            hasher.write(&names[decision * 7_919 % names.len()]);
            black_box(hasher.finish128());
        }
        started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64
    };
    median((0..9).map(|_| round()))
}

/// Number of decisions in one round.
const DECISIONS: usize = 200_000;

fn time(algorithm: &Algorithm, names: &[Vec<u8>], step: u64) -> f64 {
    let store = Memory::new(&memory::Settings::default());
    let counters = counters(names, algorithm);
    let mut now = START;
    let mut rounds = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        for decision in 0..DECISIONS {
            // The stride visits all users and never the same cache line twice in a row.
            let counter = &counters[decision * 7_919 % names.len()];
            now += step;
            black_box(store.decide(&counter.take(1), Micros::new(now)));
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64);
    }
    median(rounds)
}

/// Measures taking and returning a slot of a concurrency limit while `held` others are held: the time in memory, and
/// Redis' CPU time per operation relative to a sliding log with as many hits.
pub(crate) fn slots() {
    println!("\nSlots of a concurrency limit, compared with a sliding log with as many hits (medians of 9 rounds)\n");
    println!("| held | memory: ns, take and return | Redis: us per operation | log in Redis: us | x the log |");
    println!("| ---: | ---: | ---: | ---: | ---: |");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    for held in [3, 20, 100] {
        let pair = time_slots(held);
        let [slot, log] = runtime.block_on(slots_in_redis(held));
        println!("| {held} | {pair:.0} | {slot:.2} | {log:.2} | {:.2} |", slot / log);
    }
    let classes = Classes::new(&[(0, 1_000_000), (100_000, 1_000_000), (200_000, 900_000), (0, 500_000)], 1_000_000);
    let classes = classes.unwrap();
    let shares: Algorithm = Shares::new(1_000_000, Micros::from_secs(1), classes).unwrap().into();
    let bounds = Bounds { initial: 100, ..Bounds::default() };
    let adaptive: Algorithm = Adaptive::new(Method::Vegas, bounds, Micros::from_secs(3_600)).unwrap().into();
    println!("\nshares of four classes, in memory: {:.0} ns", time_shares(&shares));
    println!("an adaptive limit, take and return in memory with 20 held: {:.0} ns\n", time_pairs(adaptive, 20));
}

fn time_shares(shares: &Algorithm) -> f64 {
    let store = Memory::new(&memory::Settings::default());
    let mut counter = Counter::new(b"{bench|user=user}sh", *shares);
    let mut rounds = Vec::new();
    for round in 0..9 {
        let started = Instant::now();
        for number in 0..DECISIONS as u64 {
            let context = RequestContext { class: (number % 4) as u8, ..RequestContext::default() };
            counter.program = shares.with_context(context).into();
            let now = Micros::new(START + (round * DECISIONS as u64 + number) * 3);
            black_box(store.decide(&counter.take(1), now));
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64);
    }
    median(rounds)
}

/// Returns a holder. Consecutive numbers differ in many bits, as digests do.
fn holder_of(number: u64) -> RequestContext {
    RequestContext { holder: number * 0x1_0000_0001, ..RequestContext::default() }
}

fn time_slots(held: u64) -> f64 {
    time_pairs(Concurrency::new(MaxHits::hard(held + 1), Micros::from_secs(3_600)).unwrap().into(), held)
}

/// Measures taking and returning a slot in memory while `held` others are held.
fn time_pairs(rule: Algorithm, held: u64) -> f64 {
    let sample = Some(Sample { latency: Micros::new(1_000), dropped: false });
    let (store, now) = (Memory::new(&memory::Settings::default()), Micros::new(START));
    let mut counter = Counter::new(b"{bench|user=user}cc", rule);
    for holder in 1..=held {
        counter.program = rule.with_context(holder_of(holder)).into();
        assert!(store.decide(&counter.take(1), now).decision.allowed);
    }
    let mut rounds = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        for number in 0..DECISIONS as u64 {
            counter.program = rule.with_context(holder_of(held + 1 + number)).into();
            black_box(store.decide(&counter.take(1), now));
            counter.program = rule.with_context(RequestContext { sample, ..holder_of(held + 1 + number) }).into();
            black_box(store.decide(&Hit { action: Action::Refund, ..counter.take(1) }, now));
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64);
    }
    median(rounds)
}

/// Returns Redis' CPU time per operation of a slot and of a hit of a sliding log, in microseconds.
async fn slots_in_redis(held: u64) -> [f64; 2] {
    let server = Process::redis();
    let redis = connect(&server.url(), TimeSource::Own).await;
    let hold = Micros::from_secs(3_600);
    let slots: Algorithm = Concurrency::new(MaxHits::hard(held + 1), hold).unwrap().into();
    let log: Algorithm = SlidingLog::new(MaxHits::hard(held + 1), hold, Micros::ZERO, false).unwrap().into();
    let names = &names()[..1_000];
    for name in names {
        let log = Counter::new(&**name, log);
        let key = [name.as_slice(), b"cc"].concat();
        let held: Vec<_> =
            (1..=held).map(|holder| Counter::new(&*key, slots.with_context(holder_of(holder)))).collect();
        let hits: Vec<_> = held.iter().map(|slot| slot.take(1)).chain([log.take(held.len() as u64)]).collect();
        assert!(redis.step(&hits, Charge::Each, Micros::new(START)).await.iter().all(Result::is_ok));
    }
    let keys: Vec<_> = names.iter().map(|name| [name.as_slice(), b"cc"].concat()).collect();
    let mut samples = [Vec::new(), Vec::new()];
    for round in 0..10_u64 {
        let holder = slots.with_context(holder_of(held + 1 + round));
        for ((rule, keys), samples) in [(&holder, keys.as_slice()), (&log, names)].into_iter().zip(&mut samples) {
            let before = server.cpu_micros();
            for _ in 0..20 {
                for keys in keys.chunks(50) {
                    let counters = counters(keys, rule);
                    let hits: Vec<_> = counters.iter().map(|counter| counter.take(1)).collect();
                    black_box(redis.step(&hits, Charge::Each, Micros::new(START)).await);
                    let refunds: Vec<_> = hits.iter().map(|hit| Hit { action: Action::Refund, ..*hit }).collect();
                    black_box(redis.step(&refunds, Charge::Each, Micros::new(START)).await);
                }
            }
            samples.push((server.cpu_micros() - before) / (40 * keys.len()) as f64);
        }
    }
    samples.map(median)
}

/// Prints the resident bytes per entity with a full state, in a process that does nothing else.
pub(crate) fn entities(index: usize) {
    let (name, algorithm, _) = &all()[index];
    let (entities, cost) = if name.ends_with("500") { (20_000, 500) } else { (1_000_000, filling_cost(name)) };
    let store = Memory::new(&memory::Settings::default());
    let take = |user: usize| {
        let key = format!("{{bench|user=user{user}}}xx");
        black_box(store.decide(&Counter::new(key, *algorithm).take(cost), Micros::new(START)));
    };
    take(0);
    let before = resident();
    (0..entities).for_each(take);
    assert_eq!(store.usage().counters, entities as u64);
    println!("{:.0}", (resident() - before) / entities as f64);
}

/// Measures Redis' CPU time per decision relative to an `INCRBY`, and its bytes per entity.
pub(crate) fn in_redis() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(compare_in_redis());
}

/// Measures the CPU time per decision of some algorithms on several Redis servers.
pub(crate) fn on_several_servers() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let single = vec![Process::redis()];
    let (ring, cluster) = (Process::redis_ring(), Process::redis_cluster(false));
    for (topology, servers) in [("single", single), ("ring", ring), ("cluster", cluster)] {
        runtime.block_on(measure_topology(topology, &servers));
    }
}

/// Prints the total CPU time of these servers per decision.
async fn measure_topology(topology: &str, servers: &[Process]) {
    let url = if servers.len() == 1 { servers[0].url() } else { multi_host_url(topology, servers) };
    let (shared, single) = (connect(&url, TimeSource::Own).await, connect(&url, TimeSource::Caller).await);
    let names = names();
    let flush = || servers.iter().for_each(|server| drop(server.cli(&["flushall"])));
    let total_cpu = || servers.iter().map(Process::cpu_micros).sum::<f64>();
    println!("\nIn Redis, {topology}, {} servers: CPU time of all per decision\n", servers.len());
    println!("| algorithm | us, 64 in a call | us, alone in a call |");
    println!("| --- | ---: | ---: |");
    // The other algorithms differ from these as they do on one server.
    let selected = ["fixed_window", "sliding_window", "sliding_log of 3", "token_bucket"];
    for (name, algorithm, _) in all().into_iter().filter(|(name, ..)| selected.contains(name)) {
        let mut medians = Vec::new();
        for (redis, hits_per_request) in [(&shared, 64), (&single, 1)] {
            let mut rounds = Vec::new();
            for _ in 0..3 {
                flush();
                decide(redis, &algorithm, &names, hits_per_request, 1).await;
                let before = total_cpu();
                decide(redis, &algorithm, &names, hits_per_request, 1).await;
                rounds.push((total_cpu() - before) / (USERS * PASSES) as f64);
            }
            medians.push(median(rounds));
        }
        println!("| {name} | {:.2} | {:.2} |", medians[0], medians[1]);
    }
}

const ROUNDS: usize = 5;

async fn compare_in_redis() {
    let server = Process::redis();
    let names = names();
    let shared = connect(&server.url(), TimeSource::Own).await;
    // Requests that pass their own time do not share calls.
    let single = connect(&server.url(), TimeSource::Caller).await;
    let mut plain = ::redis::Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap();
    // Calls with one decision each take most of the time, and full logs most of the memory.
    let few_names = &names[..USERS / 5];
    let all = all();
    let mut baseline = Vec::new();
    let mut samples = vec![(Vec::new(), Vec::new()); all.len()];
    let mut bytes = Vec::new();
    for round in 0..=ROUNDS {
        // The keys exist before the measurement, as for most hits of a counter.
        flush(&mut plain).await;
        incrby_all(&mut plain, &names).await;
        let incrby = cpu(&server, names.len(), incrby_all(&mut plain, &names)).await;
        if round > 0 {
            baseline.push(incrby);
        }
        for ((name, algorithm, _), (shared_micros, single_micros)) in all.iter().zip(&mut samples) {
            flush(&mut plain).await;
            let before = dataset_bytes(&mut plain).await;
            if round == 0 {
                decide(&shared, algorithm, few_names, 64, filling_cost(name)).await;
                bytes.push((dataset_bytes(&mut plain).await - before) / few_names.len() as f64);
                continue;
            }
            decide(&shared, algorithm, &names, 64, 1).await;
            shared_micros.push(cpu(&server, names.len(), decide(&shared, algorithm, &names, 64, 1)).await);
            flush(&mut plain).await;
            decide(&single, algorithm, few_names, 1, 1).await;
            single_micros.push(cpu(&server, few_names.len(), decide(&single, algorithm, few_names, 1, 1)).await);
        }
    }
    let incrby = median(baseline);
    println!(
        "\nIn Redis: its own CPU time per decision, {USERS} keys, medians of {ROUNDS} rounds; INCRBY takes {incrby:.2} us.\n"
    );
    println!("| algorithm | us, 64 in a call | x INCRBY's rate | us, alone in a call | x INCRBY's rate | bytes |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for (((name, ..), (shared, single)), bytes) in all.iter().zip(samples).zip(bytes) {
        let (shared, single) = (median(shared), median(single));
        let (x_shared, x_single) = (incrby / shared, incrby / single);
        println!("| {name} | {shared:.2} | {x_shared:.2} | {single:.2} | {x_single:.2} | {bytes:.0} |");
    }
}

async fn connect(url: &str, time: TimeSource) -> Redis {
    let settings = redis::Settings { timeout: std::time::Duration::from_secs(20), ..redis::Settings::default() };
    let setup = redis::Setup::new(url, &settings, time, redis::Metrics::new(1)).unwrap();
    tokio::spawn(setup.follow());
    let redis = setup.connect(WorkerId(0));
    assert!(redis.wait_until_up(std::time::Duration::from_secs(20)).await);
    redis
}

async fn flush(connection: &mut ::redis::aio::MultiplexedConnection) {
    let _: () = ::redis::cmd("FLUSHALL").query_async(connection).await.unwrap();
}

async fn dataset_bytes(connection: &mut ::redis::aio::MultiplexedConnection) -> f64 {
    let info: String = ::redis::cmd("INFO").arg("memory").query_async(connection).await.unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory_dataset:")).unwrap();
    line.trim().parse().unwrap()
}

/// Returns the server's CPU time in microseconds per hit, while `work` hits each of `keys` keys [`PASSES`] times.
async fn cpu(server: &Process, keys: usize, work: impl Future<Output = ()>) -> f64 {
    let before = server.cpu_micros();
    work.await;
    (server.cpu_micros() - before) / (keys * PASSES) as f64
}

/// Number of hits per key in one measurement.
const PASSES: usize = 2;

async fn incrby_all(connection: &mut ::redis::aio::MultiplexedConnection, names: &[Vec<u8>]) {
    for _ in 0..PASSES {
        for chunk in names.chunks(64) {
            let mut pipe = ::redis::pipe();
            for name in chunk {
                pipe.cmd("INCRBY").arg(name).arg(1);
            }
            let _: Vec<i64> = pipe.query_async(connection).await.unwrap();
        }
    }
}

async fn decide(redis: &Redis, algorithm: &Algorithm, names: &[Vec<u8>], hits_per_request: usize, cost: u64) {
    let counters: Arc<[Counter]> = counters(names, algorithm).into();
    let mut in_flight = JoinSet::new();
    for pass in 0..PASSES as u64 {
        for start in (0..names.len()).step_by(hits_per_request) {
            let (redis, counters) = (redis.clone(), Arc::clone(&counters));
            in_flight.spawn(async move {
                let counters = counters[start..].iter().take(hits_per_request);
                let hits: Vec<_> = counters.map(|counter| counter.take(cost)).collect();
                let answers = redis.step(&hits, Charge::Each, Micros::new(START + pass * 1_000_000)).await;
                assert!(answers.iter().all(Result::is_ok));
            });
            if in_flight.len() * hits_per_request >= 128 {
                in_flight.join_next().await.unwrap().unwrap();
            }
        }
    }
    in_flight.join_all().await;
}
