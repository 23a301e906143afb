//! What each algorithm costs: time and bytes in memory, and inside Redis beside INCRBY.

use std::{hash::Hasher, hint::black_box, sync::Arc, time::Instant};

use siphasher::sip128::{Hasher128, SipHasher13};
use sluicegate::{
    algorithm::{
        Action, Algorithm, Classes, MaxHits, Micros, RequestContext, Sample,
        adaptive::Adaptive,
        concurrency::Concurrency,
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
    store::{
        self, Charge, CounterStore as _, Hit, Memory, Redis, memory,
        redis::{self, Time},
    },
};
use sluicegate_common::adaptive::{Bounds, Method};
use tokio::task::JoinSet;

use super::{
    in_process::resident,
    process::{Process, many},
};

const START: u64 = 1_763_672_400_000_000;
const USERS: usize = 100_000;

/// With what the textbook has for it, in bytes of an entity.
pub(crate) fn all() -> Vec<(&'static str, Algorithm, &'static str)> {
    let minute = Micros::from_secs(60);
    let quota = MaxHits::hard(100);
    let sliding = |buckets| SlidingWindow::new(quota, minute, buckets, WindowEdge::Weighted, false).unwrap().into();
    let log = |hits| SlidingLog::new(MaxHits::hard(hits), minute, Micros::ZERO, false).unwrap().into();
    vec![
        ("fixed_window", FixedWindow::new(quota, minute, true).unwrap().into(), "36"),
        ("sliding_window", sliding(1), ""),
        ("sliding_window, buckets: 6", sliding(6), ""),
        ("sliding_window, buckets: 60", sliding(60), "1 600"),
        ("sliding_log of 3", log(3), "88"),
        ("sliding_log of 500", log(500), "12 000"),
        ("token_bucket", TokenBucket::new(100, minute, quota, false).unwrap().into(), ""),
        (
            "token_bucket, warm_up: 30s, burst: 100",
            WarmUp::new(100, minute, 100, Micros::from_secs(30), false).unwrap().into(),
            "",
        ),
        ("leaky_bucket, queue: 10", LeakyBucket::new(100, minute, MaxHits::hard(110), 100, false).unwrap().into(), ""),
        ("gcra", Gcra::new(100, minute, quota, false).unwrap().into(), ""),
    ]
}

/// A cost that makes a state as long as it gets.
fn filling(name: &str) -> u64 {
    match name.rsplit_once("sliding_log of ") {
        Some((_, hits)) => hits.parse().unwrap(),
        None => 1,
    }
}

fn names() -> Vec<Vec<u8>> {
    (0..USERS).map(|user| format!("{{bench|user=user{user:06}}}xx").into_bytes()).collect()
}

fn hit<'h>(key: &'h [u8], algorithm: &'h Algorithm, cost: u64) -> Hit<'h> {
    Hit::take(key, algorithm, cost)
}

pub(crate) fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Nanoseconds of a decision and bytes of an entity, in memory.
pub(crate) fn in_memory() {
    println!("\nIn memory: nanoseconds per decision (medians of 9 rounds), bytes per entity\n");
    println!("| algorithm | one hot key | 1000 users | {USERS} users | bytes | textbook |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let names = names();
    let [hot, some, many] = [1, 1_000, USERS].map(|users| hashing(&names[..users]));
    println!("| (the key read and hashed) | {hot:.0} | {some:.0} | {many:.0} | | |");
    for (place, (name, algorithm, textbook)) in all().iter().enumerate() {
        // The hot key is asked every 0.1 s of its clock: six times its limit. A user comes every minute.
        let [hot, some, many] =
            [(1, 100_000), (1_000, 60_000), (USERS, 600)].map(|(users, step)| time(algorithm, &names[..users], step));
        print!("| {name} | {hot:.0} | {some:.0} | {many:.0} | ");
        let bytes = Process::bench(&["entities", &place.to_string()]).line();
        println!("{bytes} | {textbook} |");
    }
}

/// What is there without any algorithm: most of it, for many users, is waiting for their names.
fn hashing(names: &[Vec<u8>]) -> f64 {
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

/// In one round.
const DECISIONS: usize = 200_000;

fn time(algorithm: &Algorithm, names: &[Vec<u8>], step: u64) -> f64 {
    let store = Memory::new(&memory::Settings::default());
    let mut now = START;
    let mut rounds = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        for decision in 0..DECISIONS {
            // A stride that meets everybody and no cache line twice in a row.
            let key = &names[decision * 7_919 % names.len()];
            now += step;
            black_box(store.apply(&[hit(key, algorithm, 1)], Charge::Each, Micros::new(now)));
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64);
    }
    median(rounds)
}

/// Nanoseconds of a slot that is taken and given back while so many others are held, in memory; and the CPU time that
/// Redis spends on one of the two, beside a log that has as many hits.
pub(crate) fn slots() {
    println!("\nSlots: of a concurrency limit, beside a sliding log with as many hits (medians of 9 rounds)\n");
    println!("| held | in memory: ns, taken and given back | Redis: us, one of these | the log: us | x the log |");
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
    let learns: Algorithm = Adaptive::new(Method::Vegas, bounds, Micros::from_secs(3_600)).unwrap().into();
    println!("\nshares of four classes, in memory: {:.0} ns", time_shares(&shares));
    println!("an adaptive limit, taken and given back in memory with 20 held: {:.0} ns\n", time_pairs(learns, 20));
}

fn time_shares(shares: &Algorithm) -> f64 {
    let store = Memory::new(&memory::Settings::default());
    let mut rounds = Vec::new();
    for round in 0..9 {
        let started = Instant::now();
        for number in 0..DECISIONS as u64 {
            let rule = shares.with_context(RequestContext { class: (number % 4) as u8, ..RequestContext::default() });
            let now = Micros::new(START + (round * DECISIONS as u64 + number) * 3);
            black_box(store.apply(&[hit(b"{bench|user=user}sh", &rule, 1)], Charge::Each, now));
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64);
    }
    median(rounds)
}

/// Names as far apart as digests are.
fn holder_of(number: u64) -> RequestContext {
    RequestContext { holder: number * 0x1_0000_0001, ..RequestContext::default() }
}

fn time_slots(held: u64) -> f64 {
    time_pairs(Concurrency::new(MaxHits::hard(held + 1), Micros::from_secs(3_600)).unwrap().into(), held)
}

/// Of a slot that is taken and given back while so many others are held.
fn time_pairs(rule: Algorithm, held: u64) -> f64 {
    let sample = Some(Sample { latency: Micros::new(1_000), dropped: false });
    let (store, now) = (Memory::new(&memory::Settings::default()), Micros::new(START));
    let key = b"{bench|user=user}cc";
    for holder in 1..=held {
        let rule = rule.with_context(holder_of(holder));
        assert!(store.apply(&[hit(key, &rule, 1)], Charge::Each, now)[0].is_ok());
    }
    let mut rounds = Vec::new();
    for _ in 0..9 {
        let started = Instant::now();
        for number in 0..DECISIONS as u64 {
            let rule = rule.with_context(holder_of(held + 1 + number));
            black_box(store.apply(&[hit(key, &rule, 1)], Charge::Each, now));
            let rule = rule.with_context(RequestContext { sample, ..holder_of(held + 1 + number) });
            let back = Hit { action: Action::Refund, ..hit(key, &rule, 1) };
            black_box(store.apply(&[back], Charge::Each, now));
        }
        rounds.push(started.elapsed().as_secs_f64() * 1e9 / DECISIONS as f64);
    }
    median(rounds)
}

/// Of a slot, and of a hit of a log.
async fn slots_in_redis(held: u64) -> [f64; 2] {
    let server = Process::redis();
    let redis = connect(&server.url(), Time::Server).await;
    let hold = Micros::from_secs(3_600);
    let slots: Algorithm = Concurrency::new(MaxHits::hard(held + 1), hold).unwrap().into();
    let log: Algorithm = SlidingLog::new(MaxHits::hard(held + 1), hold, Micros::ZERO, false).unwrap().into();
    let names = &names()[..1_000];
    for name in names {
        let log = hit(name, &log, held);
        let key = [name.as_slice(), b"cc"].concat();
        let rules: Vec<_> = (1..=held).map(|holder| slots.with_context(holder_of(holder))).collect();
        let hits: Vec<_> = rules.iter().map(|rule| hit(&key, rule, 1)).chain([log]).collect();
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
                    let hits: Vec<_> = keys.iter().map(|key| hit(key, rule, 1)).collect();
                    black_box(redis.step(&hits, Charge::Each, Micros::new(START)).await);
                    let back: Vec<_> = hits.iter().map(|hit| Hit { action: Action::Refund, ..*hit }).collect();
                    black_box(redis.step(&back, Charge::Each, Micros::new(START)).await);
                }
            }
            samples.push((server.cpu_micros() - before) / (40 * keys.len()) as f64);
        }
    }
    samples.map(median)
}

/// Resident bytes of an entity that has been asked for all it may, in a process that has nothing else.
pub(crate) fn entities(place: usize) {
    let (name, algorithm, _) = &all()[place];
    let (entities, cost) = if name.ends_with("500") { (20_000, 500) } else { (1_000_000, filling(name)) };
    let store = Memory::new(&memory::Settings::default());
    let take = |user: usize| {
        let key = format!("{{bench|user=user{user}}}xx");
        black_box(store.apply(&[hit(key.as_bytes(), algorithm, cost)], Charge::Each, Micros::new(START)));
    };
    take(0);
    let before = resident();
    (0..entities).for_each(take);
    assert_eq!(store.usage().counters, entities as u64);
    println!("{:.0}", (resident() - before) / entities as f64);
}

/// Redis' own CPU time per decision beside that of an INCRBY, and its bytes per entity.
pub(crate) fn in_redis() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(compare_in_redis());
}

/// The same for a few, over several servers.
pub(crate) fn in_many() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let single = vec![Process::redis()];
    let (ring, cluster) = (Process::redis_ring(), Process::redis_cluster(false));
    for (topology, servers) in [("single", single), ("ring", ring), ("cluster", cluster)] {
        runtime.block_on(compare_in_many(topology, &servers));
    }
}

/// The same over several servers: the CPU time of all of them.
async fn compare_in_many(topology: &str, servers: &[Process]) {
    let url = if servers.len() == 1 { servers[0].url() } else { many(topology, servers) };
    let (shared, single) = (connect(&url, Time::Server).await, connect(&url, Time::Caller).await);
    let names = names();
    let flush = || servers.iter().for_each(|server| drop(server.cli(&["flushall"])));
    let spent = || servers.iter().map(Process::cpu_micros).sum::<f64>();
    println!("\nIn Redis, {topology}, {} servers: CPU time of all per decision\n", servers.len());
    println!("| algorithm | us, 64 at once | us, alone in a call |");
    println!("| --- | ---: | ---: |");
    // The others differ from these as they do on one server.
    let some = ["fixed_window", "sliding_window", "sliding_log of 3", "token_bucket"];
    for (name, algorithm, _) in all().into_iter().filter(|(name, ..)| some.contains(name)) {
        let mut medians = Vec::new();
        for (redis, together) in [(&shared, 64), (&single, 1)] {
            let mut rounds = Vec::new();
            for _ in 0..3 {
                flush();
                decide(redis, &algorithm, &names, together, 1).await;
                let before = spent();
                decide(redis, &algorithm, &names, together, 1).await;
                rounds.push((spent() - before) / (USERS * PASSES) as f64);
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
    let shared = connect(&server.url(), Time::Server).await;
    // With a clock of their own calls are not joined.
    let single = connect(&server.url(), Time::Caller).await;
    let mut plain = ::redis::Client::open(server.url()).unwrap().get_multiplexed_async_connection().await.unwrap();
    let all = all();
    let mut baseline = Vec::new();
    let mut samples = vec![(Vec::new(), Vec::new()); all.len()];
    let mut bytes = Vec::new();
    for round in 0..=ROUNDS {
        // Keys that are there: most of a counter's hits find it so.
        flush(&mut plain).await;
        incrby_all(&mut plain, &names).await;
        let incrby = cpu(&server, incrby_all(&mut plain, &names)).await;
        if round > 0 {
            baseline.push(incrby);
        }
        for ((name, algorithm, _), (many, one)) in all.iter().zip(&mut samples) {
            flush(&mut plain).await;
            let before = used(&mut plain).await;
            if round == 0 {
                decide(&shared, algorithm, &names, 64, filling(name)).await;
                bytes.push((used(&mut plain).await - before) / USERS as f64);
                continue;
            }
            decide(&shared, algorithm, &names, 64, 1).await;
            many.push(cpu(&server, decide(&shared, algorithm, &names, 64, 1)).await);
            flush(&mut plain).await;
            decide(&single, algorithm, &names, 1, 1).await;
            one.push(cpu(&server, decide(&single, algorithm, &names, 1, 1)).await);
        }
    }
    let incrby = median(baseline);
    println!(
        "\nIn Redis: its own CPU time per decision, {USERS} keys, medians of {ROUNDS} rounds; INCRBY takes {incrby:.2} us.\n"
    );
    println!("| algorithm | us, 64 in a call | x INCRBY's rate | us, alone in a call | x INCRBY's rate | bytes |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    for (((name, ..), (many, one)), bytes) in all.iter().zip(samples).zip(bytes) {
        let (many, one) = (median(many), median(one));
        println!("| {name} | {many:.2} | {:.2} | {one:.2} | {:.2} | {bytes:.0} |", incrby / many, incrby / one);
    }
}

async fn connect(url: &str, time: Time) -> Redis {
    let settings = redis::Settings { timeout: std::time::Duration::from_secs(20), ..redis::Settings::default() };
    let setup = redis::Setup::new(url, &settings, time, store::Metrics::new(1)).unwrap();
    setup.follow();
    let redis = setup.connect(WorkerId(0));
    assert!(redis.wait_until_up(std::time::Duration::from_secs(20)).await);
    redis
}

async fn flush(connection: &mut ::redis::aio::MultiplexedConnection) {
    let _: () = ::redis::cmd("FLUSHALL").query_async(connection).await.unwrap();
}

async fn used(connection: &mut ::redis::aio::MultiplexedConnection) -> f64 {
    let info: String = ::redis::cmd("INFO").arg("memory").query_async(connection).await.unwrap();
    let line = info.lines().find_map(|line| line.strip_prefix("used_memory_dataset:")).unwrap();
    line.trim().parse().unwrap()
}

/// Microseconds of the server's CPU time per key, while something asks for each of them once.
async fn cpu(server: &Process, work: impl Future<Output = ()>) -> f64 {
    let before = server.cpu_micros();
    work.await;
    (server.cpu_micros() - before) / (USERS * PASSES) as f64
}

/// Every key is met so often in one measurement.
const PASSES: usize = 2;

async fn incrby_all(connection: &mut ::redis::aio::MultiplexedConnection, names: &[Vec<u8>]) {
    for _ in 0..PASSES {
        for some in names.chunks(64) {
            let mut pipe = ::redis::pipe();
            for name in some {
                pipe.cmd("INCRBY").arg(name).arg(1);
            }
            let _: Vec<i64> = pipe.query_async(connection).await.unwrap();
        }
    }
}

async fn decide(redis: &Redis, algorithm: &Algorithm, names: &[Vec<u8>], together: usize, cost: u64) {
    let algorithm = Arc::new(*algorithm);
    let names: Arc<[Vec<u8>]> = names.into();
    let mut under_way = JoinSet::new();
    for pass in 0..PASSES as u64 {
        for start in (0..names.len()).step_by(together) {
            let (redis, algorithm, names) = (redis.clone(), Arc::clone(&algorithm), Arc::clone(&names));
            under_way.spawn(async move {
                let keys = names[start..].iter().take(together);
                let hits: Vec<_> = keys.map(|key| hit(key, &algorithm, cost)).collect();
                let answers = redis.step(&hits, Charge::Each, Micros::new(START + pass * 1_000_000)).await;
                assert!(answers.iter().all(Result::is_ok));
            });
            if under_way.len() * together >= 128 {
                under_way.join_next().await.unwrap().unwrap();
            }
        }
    }
    under_way.join_all().await;
}
