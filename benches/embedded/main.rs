//! Benchmark of rate limits in the caller's process: Sluicegate's engine and its memory store compared with governor and
//! throttlecrab.
//!
//! `cargo bench --bench embedded` prints the CPU time per decision and the memory per key. `ROUNDS=n` sets the number
//! of rounds (default 3).
//!
//! All limiters have the same GCRA limit, by a key that the loop writes into a buffer before each decision. The limit
//! is so high that it allows every hit, and so slow that no counter expires: each decision changes the state of a
//! counter. Each limiter reads the clock as its users do.
//!
//! Each measurement runs in its own process with the system's allocator, one after the other. Each round measures all
//! limiters in turn, so that a slow minute affects all of them.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

use std::{
    fs,
    hint::black_box,
    num::NonZeroU32,
    process::Command,
    sync::Mutex,
    thread,
    time::{Duration, SystemTime},
};

use governor::Quota;
use rustix::time::{ClockId, clock_gettime};
use sluicegate_algorithm::{MaxHits, Micros, gcra::Gcra};
use sluicegate_engine::{Clock, RateLimiter};
use sluicegate_store::{Counter, Memory, memory};
use throttlecrab::{AdaptiveStore, PeriodicStore, RateLimiter as Throttlecrab, Store};

/// Decisions of all threads in one pass.
const DECISIONS: usize = 1_000_000;
/// Passes of a process that count. The first pass does not.
const PASSES: usize = 3;
/// The limit of each key: one hit a minute, and a burst of all hits of the benchmark.
const BURST: u32 = 40_000_000;
/// More than the number of keys, as keys are not spread evenly over the shards of the store.
const MAX_COUNTERS: usize = 12_000_000;

/// The keys of each case, and the name of the case.
const CASES: [(usize, &str); 3] = [(1, "one hot key"), (100_000, "100,000 keys"), (10_000_000, "10 million keys")];

/// A limiter: its name, and a function that measures it with a number of keys.
type Limiter = (&'static str, fn(usize) -> Sample);

const LIMITERS: [Limiter; 6] = [
    ("(writing the key)", |keys| share(keys, || |key: &String| !black_box(key).is_empty())),
    ("`RateLimiter::check`, one rule", check),
    ("`Memory::decide`, no rules", decide),
    ("governor", governor),
    ("throttlecrab, `PeriodicStore`", |keys| throttlecrab(|| PeriodicStore::builder().capacity(keys).build(), keys)),
    ("throttlecrab, `AdaptiveStore`", |keys| throttlecrab(|| AdaptiveStore::builder().capacity(keys).build(), keys)),
];

/// Result of one process.
#[derive(Clone, Copy)]
struct Sample {
    /// Nanoseconds of CPU per decision, of one thread and of two.
    nanos: [f64; 2],
    bytes_per_key: f64,
}

fn main() {
    let arguments: Vec<usize> = std::env::args().skip(1).filter_map(|argument| argument.parse().ok()).collect();
    if let &[limiter, keys] = arguments.as_slice() {
        let Sample { nanos: [one, two], bytes_per_key } = LIMITERS[limiter].1(keys);
        println!("{one} {two} {bytes_per_key}");
        return;
    }
    let rounds = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(3);
    let cores = thread::available_parallelism().map_or(1, usize::from);
    let mut samples: [[Vec<Sample>; LIMITERS.len()]; CASES.len()] = Default::default();
    for _ in 0..rounds {
        for ((keys, _), samples) in CASES.iter().zip(&mut samples) {
            for (limiter, samples) in samples.iter_mut().enumerate() {
                samples.push(measure(limiter, *keys));
            }
        }
    }
    println!(
        "\nRate limits in the caller's process: ns of CPU per decision, {cores} cores, medians of {rounds} rounds\n"
    );
    print!("| limiter |");
    CASES.iter().for_each(|(_, case)| print!(" {case}, 1 thread | 2 threads¹ |"));
    println!("\n| --- |{}", " ---: | ---: |".repeat(CASES.len()));
    for (limiter, (name, _)) in LIMITERS.iter().enumerate() {
        print!("| {name} |");
        for samples in &samples {
            let nanos = |threads: usize| median(samples[limiter].iter().map(|sample| sample.nanos[threads]));
            print!(" {:.0} | {:.0} |", nanos(0), nanos(1));
        }
        println!();
    }
    println!("\n¹ throttlecrab: in a mutex, as two threads cannot share it otherwise.\n");
    let [.., (keys, case)] = CASES;
    println!("| limiter | bytes per key, {case} |\n| --- | ---: |");
    for (samples, (name, _)) in samples[CASES.len() - 1].iter().zip(LIMITERS).skip(1) {
        println!("| {name} | {:.0} |", median(samples.iter().map(|sample| sample.bytes_per_key)));
    }
    println!("\nKeys such as {:?}.\n", key_of(&mut String::new(), keys - 1));
}

/// Measures one limiter in a process of its own.
fn measure(limiter: usize, keys: usize) -> Sample {
    let program = std::env::current_exe().unwrap();
    let output = Command::new(program).args([limiter.to_string(), keys.to_string()]).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let numbers: Vec<f64> =
        String::from_utf8(output.stdout).unwrap().split_whitespace().map(|number| number.parse().unwrap()).collect();
    Sample { nanos: [numbers[0], numbers[1]], bytes_per_key: numbers[2] }
}

fn check(keys: usize) -> Sample {
    let rules = format!(
        "domain: api
descriptors:
- key: user
  rate_limit: {{ unit: minute, requests_per_unit: 1, algorithm: gcra, burst: {BURST} }}"
    );
    let limiter = RateLimiter::builder().max_counters(MAX_COUNTERS).rules(&rules).unwrap();
    let sample = share(keys, || |key: &String| !limiter.check("api", &[("user", key)]).is_denied());
    assert_eq!(limiter.usage().counters, keys as u64);
    sample
}

fn decide(keys: usize) -> Sample {
    let limit = Gcra::new(1, Micros::from_secs(60), MaxHits::hard(BURST.into()), false).unwrap();
    let store = Memory::new(&memory::Settings { max_counters: MAX_COUNTERS });
    let sample = share(keys, || {
        let (store, mut counter) = (&store, Counter::new(Vec::new(), limit));
        move |key: &String| {
            counter.name.clear();
            counter.name.extend_from_slice(key.as_bytes());
            store.decide(&counter.take(1), Clock::System.now()).decision.allowed
        }
    });
    assert_eq!(store.usage().counters, keys as u64);
    sample
}

fn governor(keys: usize) -> Sample {
    let quota = Quota::with_period(Duration::from_secs(60)).unwrap().allow_burst(NonZeroU32::new(BURST).unwrap());
    let limiter = governor::RateLimiter::keyed(quota);
    let sample = share(keys, || |key: &String| limiter.check_key(key).is_ok());
    assert_eq!(limiter.len(), keys);
    sample
}

/// Measures throttlecrab with a store that has room for all keys from the beginning: while the table of an
/// `AdaptiveStore` grows, it would search all keys for expired ones at each decision.
fn throttlecrab<S: Store + Send>(store: impl Fn() -> S, keys: usize) -> Sample {
    let before = resident();
    let mut limiter = Throttlecrab::new(store());
    let take = |limiter: &mut Throttlecrab<S>, key: &str| {
        limiter.rate_limit(key, BURST.into(), 1, 60, 1, now()).is_ok_and(|(allowed, _)| allowed)
    };
    let mut alone = |key: &String| take(&mut limiter, key);
    create(keys, &mut alone);
    let bytes_per_key = (resident() - before) / keys as f64;
    let one = time(keys, [alone]);
    let shared = Mutex::new(limiter);
    let two = time(keys, [0, 1].map(|_| |key: &String| take(&mut shared.lock().unwrap(), key)));
    Sample { nanos: [one, two], bytes_per_key }
}

/// Measures a limiter that threads can share. `new` returns a function that takes a hit, for one thread.
fn share<A: FnMut(&String) -> bool + Send>(keys: usize, new: impl Fn() -> A) -> Sample {
    let before = resident();
    create(keys, &mut new());
    let bytes_per_key = (resident() - before) / keys as f64;
    Sample { nanos: [time(keys, [new()]), time(keys, [new(), new()])], bytes_per_key }
}

/// Takes the first hit of each key.
fn create(keys: usize, take: &mut impl FnMut(&String) -> bool) {
    let mut key = String::new();
    (0..keys).for_each(|index| assert!(take(key_of(&mut key, index))));
}

/// Returns the nanoseconds of CPU per decision, if each of the functions is called by its own thread.
fn time<A: FnMut(&String) -> bool + Send, const THREADS: usize>(keys: usize, mut takes: [A; THREADS]) -> f64 {
    let mut pass = || {
        let before = cpu_nanos();
        thread::scope(|scope| {
            for (thread, take) in takes.iter_mut().enumerate() {
                scope.spawn(move || {
                    let mut key = String::new();
                    for decision in 0..DECISIONS / THREADS {
                        // The stride visits all keys, in another place for each thread.
                        let index = (thread * 104_729 + decision * 7_919) % keys;
                        assert!(take(key_of(&mut key, index)));
                    }
                });
            }
        });
        (cpu_nanos() - before) / DECISIONS as f64
    };
    pass();
    median((0..PASSES).map(|_| pass()))
}

/// Writes a key into a buffer.
fn key_of(buffer: &mut String, index: usize) -> &String {
    buffer.clear();
    buffer.push_str("user");
    buffer.push_str(itoa::Buffer::new().format(index));
    buffer
}

#[expect(clippy::disallowed_methods, reason = "throttlecrab reads no clock")]
fn now() -> SystemTime {
    SystemTime::now()
}

fn cpu_nanos() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Returns the resident memory of this process in bytes.
fn resident() -> f64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}

fn median(values: impl IntoIterator<Item = f64>) -> f64 {
    let mut values: Vec<f64> = values.into_iter().collect();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
