//! Benchmark of the cost of a decision, relative to a server that decides nothing.
//!
//! `make bench` runs it; it needs `h2load`, `redis-server` and `memcached`. `ROUNDS=n` sets the number of rounds of the
//! load tests (default 5); the medians are printed.
//!
//! `SLUICEGATE_BINARY` measures another build of the service. Its figures beside the no-op server, which is this
//! program, mean something only if both are release builds.
//!
//! Every server runs in its own process, and its CPU time is read from `/proc`, because the wall clock is unreliable on
//! a small, shared machine. Each round measures all servers in turn, so that a slow minute affects all of them.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

mod algorithms;
mod client;
mod connections;
mod frames;
mod h2load;
mod in_process;
mod latency;
mod layers;
mod noop;
mod outage;
mod overrides;
mod peers;
mod process;
mod quotas;
#[path = "../../tests/support/raw_client.rs"]
#[allow(dead_code, reason = "the tests use the other items")]
mod raw_client;
mod simulate;
mod threads;
mod users;

use mimalloc::MiMalloc;

use self::process::Process;

#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

const REQUESTS: u32 = 300_000;

/// Result of one load test.
#[derive(Clone, Copy, Default)]
struct Sample {
    per_second: f64,
    p50_micros: f64,
    p99_micros: f64,
    cpu_micros: f64,
}

fn main() {
    let name = std::env::args().nth(1).unwrap_or_default();
    match name.as_str() {
        "noop" => noop::serve(workers()),
        "entities" => algorithms::entities(std::env::args().nth(2).and_then(|index| index.parse().ok()).unwrap()),
        "algorithms" => algorithms::in_memory(),
        "scripts" => algorithms::in_redis(),
        "slots" => algorithms::slots(),
        "scripts-on-many" => algorithms::on_several_servers(),
        "topologies" => topologies(),
        "algorithms-on-redis" => algorithms_on_redis(),
        "consistency" => {
            consistency();
            popularity();
        }
        "outage" => outage::run(),
        "client" => client::run(),
        "client-calls" => {
            let argument = |index| std::env::args().nth(index).unwrap_or_default();
            client::calls(&argument(2), argument(3).parse().unwrap(), argument(4).parse().unwrap());
        }
        "latency" => latency::run(),
        "limits" => several_limits(),
        "memcached" => memcached(),
        "layers" => layers::run(),
        "overrides" => overrides::run(),
        "peers" => peers::run(),
        "quotas" => quotas::run(),
        "simulate" => simulate::run(),
        "threads" => threads::run(),
        "connections" => connections::run(),
        // Cargo passes `--bench` if there are no other arguments.
        "" | "--bench" => {
            topologies();
            algorithms_on_redis();
            consistency();
            several_limits();
            memcached();
            in_process::rules();
            algorithms::in_memory();
            algorithms::in_redis();
            algorithms::on_several_servers();
            algorithms::slots();
            layers::run();
            overrides::run();
            simulate::run();
            threads::run();
            connections::run();
            peers::run();
            quotas::run();
            client::run();
            latency::run();
            outage::run();
        }
        name => {
            let known = "topologies, algorithms-on-redis, consistency, limits, memcached, algorithms, scripts, scripts-on-many, slots, latency, layers, overrides, peers, quotas, simulate, threads, connections, client, outage";
            eprintln!("unknown benchmark {name}; expected one of: {known}");
        }
    }
}

fn workers() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}

/// A load test. Returns calls per second, and p50 and p99 in microseconds.
type Load = fn(&Process) -> (f64, f64, f64);
/// One row of a table: its name, the server and the load.
type Row = (String, Process, Load);

/// Compares stores and topologies on one hot key and on many users.
fn topologies() {
    let (single, ring, cluster) = (Process::redis(), Process::redis_ring(), Process::redis_cluster(false));
    let (ring, cluster) = (&process::multi_host_url("ring", &ring), &process::multi_host_url("cluster", &cluster));
    let mut rows = Vec::new();
    for (traffic, load) in [("one hot key", h2load::run as Load), ("100,000 users", users::run)] {
        let name = |server: &str| format!("{server}, {traffic}");
        rows.push((name("no-op tonic"), Process::bench(&["noop"]).listening(), load));
        rows.push((name("memory"), Process::service("memory"), load));
        rows.push((name("single Redis"), Process::service(&single.url()), load));
        rows.push((name("ring of three"), Process::service(ring), load));
        rows.push((name("cluster of three"), Process::service(cluster), load));
    }
    load_tests(&rows, &["no-op", "single"]);
}

/// Compares all algorithms on one Redis server.
///
/// Identical processes differ by up to 10% for their whole lifetime, depending on the location of their memory. Each
/// round therefore starts new processes.
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

/// Compares decisions without a call to Redis with decisions by Redis and by the memory store.
fn consistency() {
    const LIMIT: &str = "unit: day, requests_per_unit: 4000000000";
    const ONE_A_DAY: &str = "unit: day, requests_per_unit: 1";
    let leased = format!("{LIMIT}, consistency: leased");
    let servers: [Process; 4] = std::array::from_fn(|_| Process::redis());
    let [one, two, three, four] = servers.each_ref().map(Process::url);
    let rows: Vec<Row> = [
        ("memory, allowed", Process::service_with("memory", LIMIT)),
        ("exact, allowed", Process::service_with(&one, LIMIT)),
        ("leased, allowed", Process::service_with(&two, &leased)),
        ("memory, denied", Process::service_with("memory", ONE_A_DAY)),
        ("exact, denied", Process::service_with(&three, ONE_A_DAY)),
        ("deny cache, denied", Process::service_with_deny_cache(&four, ONE_A_DAY)),
    ]
    .map(|(name, process)| (name.to_owned(), process, h2load::run as Load))
    .into();
    load_tests(&rows, &["memory"]);
    let names = ["exact, allowed", "leased, allowed", "exact, denied", "deny cache, denied"];
    for (name, redis) in names.iter().zip(&servers) {
        let stats = redis.cli(&["info", "commandstats"]);
        let calls =
            stats.split_once("cmdstat_evalsha:calls=").and_then(|(_, stats)| stats.split(',').next()?.parse().ok());
        let decisions = f64::from(REQUESTS) * (rounds() + 1) as f64;
        println!("{name}: {:.5} calls to Redis per decision", calls.unwrap_or(0.0) / decisions);
    }
    println!();
}

/// Compares rules of several limits with a rule of one, in memory and in Redis.
fn several_limits() {
    let mut limits = vec!["{algorithm: gcra, unit: second, requests_per_unit: 1000000}".to_owned()];
    for (number, unit) in ["day", "month", "hour", "minute", "week", "year", "second"].iter().enumerate() {
        limits.push(format!("{{unit: {unit}, requests_per_unit: 4000000000, name: further_{number}}}"));
    }
    let mut rows: Vec<Row> = Vec::new();
    let mut servers = Vec::new();
    for number in [1, 3, 8] {
        let process = Process::service_with_limits("memory", &limits[..number]);
        rows.push((format!("memory, limits: {number}"), process, users::run));
    }
    for number in [1, 3, 8] {
        let redis = Process::redis();
        let process = Process::service_with_limits(&redis.url(), &limits[..number]);
        rows.push((format!("single Redis, limits: {number}"), process, users::run));
        servers.push(redis);
    }
    let before: Vec<f64> = servers.iter().map(Process::cpu_micros).collect();
    load_tests(&rows, &["memory, limits: 1", "single Redis, limits: 1"]);
    let decisions = f64::from(REQUESTS) * (rounds() + 1) as f64;
    for (((name, ..), redis), before) in rows[3..].iter().zip(&servers).zip(before) {
        println!("{name}: {:.2} us of Redis' CPU time per decision", (redis.cpu_micros() - before) / decisions);
    }
    println!();
}

/// Compares decisions by memcached with those by Redis, of a limit that memcached counts itself and of one that is read
/// and written.
fn memcached() {
    let limits = [
        "algorithm: fixed_window, unit: day, requests_per_unit: 4000000000",
        "algorithm: gcra, unit: day, requests_per_unit: 4000000000",
    ];
    let mut rows: Vec<Row> = Vec::new();
    let mut servers = Vec::new();
    for limit in limits {
        let algorithm = limit.split(", unit").next().unwrap_or_default();
        let (redis, memcached) = (Process::redis(), Process::memcached());
        let memcached_url = format!("memcached://{}", memcached.address);
        for (traffic, load) in [("one hot key", h2load::run as Load), ("100,000 users", users::run)] {
            let name = |store: &str| format!("{store}, {algorithm}, {traffic}");
            rows.push((name("single Redis"), Process::service_with(&redis.url(), limit), load));
            rows.push((name("memcached"), Process::service_with(&memcached_url, limit), load));
        }
        servers.push((redis, memcached));
    }
    let cpu = |(redis, memcached): &(Process, Process)| (redis.cpu_micros(), memcached.cpu_micros());
    let before: Vec<(f64, f64)> = servers.iter().map(cpu).collect();
    load_tests(&rows, &["single Redis"]);
    // Two rows use each server.
    let decisions = 2.0 * f64::from(REQUESTS) * (rounds() + 1) as f64;
    for ((limit, server), before) in limits.iter().zip(&servers).zip(before) {
        let (redis, memcached) = cpu(server);
        let redis = (redis - before.0) / decisions;
        let memcached = (memcached - before.1) / decisions;
        println!("{limit}: {redis:.2} us of Redis' and {memcached:.2} us of memcached's CPU time per decision");
    }
    println!();
}

/// Measures decisions without Redis and the load on Redis for 100,000 users with a Zipf distribution.
fn popularity() {
    const LIMIT: &str = "unit: day, requests_per_unit: 4000000000";
    let modes = ["exact", "leased", "eventual"];
    let servers: [Process; 3] = std::array::from_fn(|_| Process::redis());
    let mut rows: Vec<Row> = vec![("memory, Zipf".into(), Process::service_with("memory", LIMIT), users::zipf as Load)];
    for (mode, redis) in modes.iter().zip(&servers) {
        let limit = format!("{LIMIT}, consistency: {mode}");
        rows.push((format!("{mode}, Zipf"), Process::service_with(&redis.url(), &limit), users::zipf));
    }
    let before = servers.each_ref().map(Process::cpu_micros);
    load_tests(&rows, &["memory"]);
    let decisions = f64::from(REQUESTS) * (rounds() + 1) as f64;
    for (((name, service, _), redis), before) in rows[1..].iter().zip(&servers).zip(before) {
        let local =
            service.metric("sluicegate_lease_decisions_total") + service.metric("sluicegate_eventual_decisions_total");
        let cpu = (redis.cpu_micros() - before) / decisions;
        println!(
            "{name}: {:.0}% decided without Redis, {cpu:.2} us of Redis' CPU time per decision",
            local / decisions * 100.0
        );
    }
    println!();
}

fn rounds() -> usize {
    std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(5)
}

fn load_tests(rows: &[Row], baselines: &[&str]) {
    show(rows, &measure(rows, rounds()), baselines);
}

/// Takes `rounds` samples of each row, after one round as warm-up.
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

/// Prints a table. Rows are compared with the last row above them whose name begins with one of `baselines`.
///
/// The ratios are computed per round, because the other load of the machine changes from round to round.
fn show(rows: &[Row], samples: &[Vec<Sample>], baselines: &[&str]) {
    println!(
        "{workers} workers, 10 connections x 20 streams, {REQUESTS} requests a round, medians of {rounds} rounds\n",
        workers = workers(),
        rounds = rounds()
    );
    println!("| server | calls/s | p50 us | p99 us | CPU us per decision | x {} |", baselines.join(" | x "));
    println!("| --- | ---: | ---: | ---: | ---: |{}", " ---: |".repeat(baselines.len()));
    let mut baseline_cpu: Vec<Vec<f64>> = Vec::new();
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
        if let Some(index) = baselines.iter().position(|baseline| name.starts_with(baseline)) {
            baseline_cpu.truncate(index);
            baseline_cpu.push(cpu.clone());
        }
        let ratio = |other: &Vec<f64>| algorithms::median(cpu.iter().zip(other).map(|(cpu, other)| cpu / other));
        for index in 0..baselines.len() {
            print!(" {} |", baseline_cpu.get(index).map(|other| format!("{:.2}", ratio(other))).unwrap_or_default());
        }
        println!();
    }
    println!();
}
