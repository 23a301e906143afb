//! What a decision costs, beside a server that decides nothing. `make bench` runs it; it needs h2load and
//! redis-server. `ROUNDS=n` repeats the load tests (default 5); the medians are printed.
//!
//! Every server runs in a process of its own, and its CPU time is read from /proc: on a machine that is shared and
//! small, the wall clock says little. Rounds go through all servers in turn, so that a slow minute hits all of them.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

mod algorithms;
mod h2load;
mod in_process;
mod noop;
mod process;
mod users;

use mimalloc::MiMalloc;

use self::process::Process;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

const REQUESTS: u32 = 300_000;

/// What one load test shows.
#[derive(Clone, Copy, Default)]
struct Sample {
    per_second: f64,
    p50_micros: f64,
    p99_micros: f64,
    cpu_micros: f64,
}

fn main() {
    let word = std::env::args().nth(1).unwrap_or_default();
    match word.as_str() {
        "noop" => noop::serve(workers()),
        "entities" => algorithms::entities(std::env::args().nth(2).and_then(|place| place.parse().ok()).unwrap()),
        "algorithms" => algorithms::in_memory(),
        "scripts" => algorithms::in_redis(),
        _ => {
            load_tests();
            in_process::rules();
            algorithms::in_memory();
            algorithms::in_redis();
        }
    }
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

type Load = fn(&Process) -> (f64, f64, f64);

fn load_tests() {
    let rounds: usize = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(5);
    let redis = Process::redis();
    let rows: [(&str, Process, Load); 6] = [
        ("no-op tonic, one hot key", Process::bench(&["noop"]).listening(), h2load::run),
        ("memory, one hot key", Process::service("memory"), h2load::run),
        ("redis, one hot key", Process::service(&redis.url()), h2load::run),
        ("no-op tonic, 100,000 users", Process::bench(&["noop"]).listening(), users::run),
        ("memory, 100,000 users", Process::service("memory"), users::run),
        ("redis, 100,000 users", Process::service(&redis.url()), users::run),
    ];
    let mut samples = vec![Vec::new(); rows.len()];
    for _ in 0..=rounds {
        for ((_, process, load), samples) in rows.iter().zip(&mut samples) {
            let before = process.cpu_micros();
            let (per_second, p50_micros, p99_micros) = load(process);
            let cpu_micros = (process.cpu_micros() - before) / f64::from(REQUESTS);
            samples.push(Sample { per_second, p50_micros, p99_micros, cpu_micros });
        }
    }
    println!(
        "{workers} workers, 10 connections x 20 streams, {REQUESTS} requests a round, medians of {rounds} rounds\n",
        workers = workers()
    );
    println!("| server | calls/s | p50 us | p99 us | CPU us per decision | x no-op |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
    let mut floor = 0.0;
    for ((name, ..), samples) in rows.iter().zip(&samples) {
        // The first round warms up.
        let median = |field: fn(&Sample) -> f64| {
            let mut values: Vec<_> = samples.iter().skip(1).map(field).collect();
            values.sort_by(f64::total_cmp);
            values[values.len() / 2]
        };
        let cpu = median(|sample| sample.cpu_micros);
        if name.starts_with("no-op") {
            floor = cpu;
        }
        println!(
            "| {name} | {:.0} | {:.0} | {:.0} | {cpu:.2} | {:.2} |",
            median(|sample| sample.per_second),
            median(|sample| sample.p50_micros),
            median(|sample| sample.p99_micros),
            cpu / floor,
        );
    }
    println!();
}
