//! What a decision costs, beside a server that decides nothing. `make bench` runs it; it needs h2load and
//! redis-server. `ROUNDS=n` repeats the load tests (default 5); the medians are printed.
//!
//! Every server runs in a process of its own, and its CPU time is read from /proc: on a machine that is shared and
//! small, the wall clock says little. Rounds go through all servers in turn, so that a slow minute hits all of them.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

mod algorithms;
mod client;
mod h2load;
mod in_process;
mod layers;
mod noop;
mod outage;
mod overrides;
#[path = "../../tests/support/plain.rs"]
#[allow(dead_code, reason = "the tests use the rest")]
mod plain;
mod process;
mod simulate;
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
        "slots" => algorithms::slots(),
        "scripts-on-many" => algorithms::in_many(),
        "topologies" => topologies(),
        "algorithms-on-redis" => algorithms_on_redis(),
        "consistency" => {
            consistency();
            popularity();
        }
        "outage" => outage::run(),
        "client" => client::run(),
        "layers" => layers::run(),
        "overrides" => overrides::run(),
        "simulate" => simulate::run(),
        // What cargo itself says last when nobody says a word.
        "" | "--bench" => {
            topologies();
            algorithms_on_redis();
            consistency();
            in_process::rules();
            algorithms::in_memory();
            algorithms::in_redis();
            algorithms::in_many();
            algorithms::slots();
            layers::run();
            overrides::run();
            simulate::run();
            consistency();
            popularity();
            client::run();
            outage::run();
        }
        word => {
            let known = "topologies, algorithms-on-redis, consistency, algorithms, scripts, scripts-on-many, slots, layers, overrides, simulate, client, outage";
            eprintln!("there is no benchmark named {word}; there are {known}");
        }
    }
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

type Load = fn(&Process) -> (f64, f64, f64);
/// What it is called, what is asked, and how.
type Row = (String, Process, Load);

/// One server of everything, on one hot key and on many users.
fn topologies() {
    let (single, ring, cluster) = (Process::redis(), Process::redis_ring(), Process::redis_cluster(false));
    let (ring, cluster) = (&process::many("ring", &ring), &process::many("cluster", &cluster));
    let mut rows = Vec::new();
    for (what, load) in [("one hot key", h2load::run as Load), ("100,000 users", users::run)] {
        let name = |server: &str| format!("{server}, {what}");
        rows.push((name("no-op tonic"), Process::bench(&["noop"]).listening(), load));
        rows.push((name("memory"), Process::service("memory"), load));
        rows.push((name("single Redis"), Process::service(&single.url()), load));
        rows.push((name("ring of three"), Process::service(ring), load));
        rows.push((name("cluster of three"), Process::service(cluster), load));
    }
    load_tests(&rows, &["no-op", "single"]);
}

/// Every algorithm on one Redis. Two processes that are the same differ by up to a tenth, by where their memory lies, as
/// long as they live: so each round has new ones.
fn algorithms_on_redis() {
    let redis = Process::redis();
    let limits = [
        "algorithm: fixed_window, unit: day, requests_per_unit: 4000000000",
        "algorithm: sliding_window, unit: day, requests_per_unit: 4000000000",
        "algorithm: sliding_window, buckets: 6, unit: day, requests_per_unit: 4000000000",
        "algorithm: sliding_log, unit: second, requests_per_unit: 100",
        "algorithm: token_bucket, unit: day, requests_per_unit: 4000000000",
        "algorithm: token_bucket, warm_up: 30s, unit: second, requests_per_unit: 100",
        "algorithm: leaky_bucket, queue: 10, unit: day, requests_per_unit: 4000000000",
        "algorithm: gcra, unit: day, requests_per_unit: 4000000000",
    ];
    let start = || {
        let noop = ("no-op tonic, one hot key".into(), Process::bench(&["noop"]).listening(), h2load::run as Load);
        let service = |limit: &&str| {
            let name = limit.split(", unit").next().unwrap_or_default().to_owned();
            (name, Process::service_with(&redis.url(), limit), h2load::run as Load)
        };
        std::iter::once(noop).chain(limits.iter().map(service)).collect()
    };
    let mut rows: Vec<Row> = start();
    let mut samples = measure(&rows, 1);
    for _ in 1..rounds() {
        rows = start();
        for (all, round) in samples.iter_mut().zip(measure(&rows, 1)) {
            all.extend(round);
        }
    }
    show(&rows, &samples, &["no-op"]);
}

/// What is decided without asking Redis, beside what is asked, and the store in memory.
fn consistency() {
    const LIMIT: &str = "unit: day, requests_per_unit: 4000000000";
    const NONE: &str = "unit: day, requests_per_unit: 1";
    let leased = format!("{LIMIT}, consistency: leased");
    let servers: [Process; 4] = std::array::from_fn(|_| Process::redis());
    let [one, two, three, four] = servers.each_ref().map(Process::url);
    let rows: Vec<Row> = [
        ("memory, passes", Process::service_with("memory", LIMIT)),
        ("exact, passes", Process::service_with(&one, LIMIT)),
        ("leased, passes", Process::service_with(&two, &leased)),
        ("memory, refused", Process::service_with("memory", NONE)),
        ("exact, refused", Process::service_with(&three, NONE)),
        ("deny cache, refused", Process::service_remembering(&four, NONE)),
    ]
    .map(|(name, process)| (name.to_owned(), process, h2load::run as Load))
    .into();
    load_tests(&rows, &["memory"]);
    let names = ["exact, passes", "leased, passes", "exact, refused", "deny cache, refused"];
    for (name, redis) in names.iter().zip(&servers) {
        let stats = redis.cli(&["info", "commandstats"]);
        let calls =
            stats.split_once("cmdstat_evalsha:calls=").and_then(|(_, rest)| rest.split(',').next()?.parse().ok());
        let decisions = f64::from(REQUESTS) * (rounds() + 1) as f64;
        println!("{name}: {:.5} calls to Redis per decision", calls.unwrap_or(0.0) / decisions);
    }
    println!();
}

/// A hundred thousand users, of whom some are much more popular: how much is decided here, and what Redis has to do.
fn popularity() {
    const LIMIT: &str = "unit: day, requests_per_unit: 4000000000";
    let words = ["exact", "leased", "eventual"];
    let servers: [Process; 3] = std::array::from_fn(|_| Process::redis());
    let mut rows: Vec<Row> = vec![("memory, Zipf".into(), Process::service_with("memory", LIMIT), users::zipf as Load)];
    for (word, redis) in words.iter().zip(&servers) {
        let limit = format!("{LIMIT}, consistency: {word}");
        rows.push((format!("{word}, Zipf"), Process::service_with(&redis.url(), &limit), users::zipf));
    }
    let before = servers.each_ref().map(Process::cpu_micros);
    load_tests(&rows, &["memory"]);
    let decisions = f64::from(REQUESTS) * (rounds() + 1) as f64;
    for (((name, service, _), redis), before) in rows[1..].iter().zip(&servers).zip(before) {
        let here =
            service.metric("sluicegate_lease_decisions_total") + service.metric("sluicegate_eventual_decisions_total");
        let cpu = (redis.cpu_micros() - before) / decisions;
        println!(
            "{name}: {:.0}% decided without asking, {cpu:.2} us of Redis' CPU time per decision",
            here / decisions * 100.0
        );
    }
    println!();
}

fn rounds() -> usize {
    std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(5)
}

fn load_tests(rows: &[Row], floors: &[&str]) {
    show(rows, &measure(rows, rounds()), floors);
}

/// So many samples of each row, after a first round that warms up.
fn measure(rows: &[Row], rounds: usize) -> Vec<Vec<Sample>> {
    let mut samples = vec![Vec::new(); rows.len()];
    for round in 0..=rounds {
        for ((_, process, load), samples) in rows.iter().zip(&mut samples) {
            let before = process.cpu_micros();
            let (per_second, p50_micros, p99_micros) = load(process);
            let cpu_micros = (process.cpu_micros() - before) / f64::from(REQUESTS);
            if round > 0 {
                samples.push(Sample { per_second, p50_micros, p99_micros, cpu_micros });
            }
        }
    }
    samples
}

/// `floors`: how the names of those rows begin that the next ones are held against, round by round: what else the machine
/// does changes from one to the next.
fn show(rows: &[Row], samples: &[Vec<Sample>], floors: &[&str]) {
    println!(
        "{workers} workers, 10 connections x 20 streams, {REQUESTS} requests a round, medians of {rounds} rounds\n",
        workers = workers(),
        rounds = rounds()
    );
    println!("| server | calls/s | p50 us | p99 us | CPU us per decision | x {} |", floors.join(" | x "));
    println!("| --- | ---: | ---: | ---: | ---: |{}", " ---: |".repeat(floors.len()));
    let mut against: Vec<Vec<f64>> = Vec::new();
    for ((name, ..), samples) in rows.iter().zip(samples) {
        let of = |field: fn(&Sample) -> f64| samples.iter().map(field);
        let cpu: Vec<f64> = of(|sample| sample.cpu_micros).collect();
        print!(
            "| {name} | {:.0} | {:.0} | {:.0} | {:.2} |",
            algorithms::median(of(|sample| sample.per_second)),
            algorithms::median(of(|sample| sample.p50_micros)),
            algorithms::median(of(|sample| sample.p99_micros)),
            algorithms::median(cpu.iter().copied()),
        );
        if let Some(place) = floors.iter().position(|floor| name.starts_with(floor)) {
            against.truncate(place);
            against.push(cpu.clone());
        }
        let ratio = |floor: &Vec<f64>| algorithms::median(cpu.iter().zip(floor).map(|(cpu, floor)| cpu / floor));
        for place in 0..floors.len() {
            print!(" {} |", against.get(place).map(|floor| format!("{:.2}", ratio(floor))).unwrap_or_default());
        }
        println!();
    }
    println!();
}
