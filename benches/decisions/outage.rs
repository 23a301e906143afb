//! Latencies and errors while a Redis server or a master of a cluster is dead or frozen, with an open-loop load of
//! 5,000 requests per second.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use sluicegate::store::redis::topology::slots::slot;
use tokio::time::{MissedTickBehavior, interval};
use tonic::transport::Endpoint;

use super::{
    process::{Process, multi_host_url, signal},
    raw_client::{Client, Descriptor, Request},
};

const USERS: usize = 999;
const LIMIT: u32 = 4_000_000_000;
/// Requests per millisecond.
const BURST: usize = 5;

/// A completed request.
#[derive(Clone, Copy)]
struct Observation {
    started: Instant,
    user: usize,
    latency: Duration,
    /// Whether Redis decided the request, rather than `on_error`.
    decided: bool,
}

/// A thread that sends requests until the value is dropped.
struct Load {
    observations: Arc<Mutex<Vec<Observation>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(service: &Process) -> Self {
        let (observations, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (list, stopped, url) =
            (Arc::clone(&observations), Arc::clone(&stop), format!("http://{}", service.address));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut clients = Vec::new();
                for _ in 0..4 {
                    clients.push(
                        Client::connect(Endpoint::from_shared(url.clone()).unwrap().timeout(Duration::from_secs(1)))
                            .await
                            .unwrap(),
                    );
                }
                let mut ticks = interval(Duration::from_millis(1));
                ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
                let mut number = 0;
                while !stopped.load(Relaxed) {
                    ticks.tick().await;
                    for _ in 0..BURST {
                        number += 1;
                        tokio::spawn(send(clients[number % 4].clone(), number % USERS, Arc::clone(&list)));
                    }
                }
            });
        });
        Self { observations, stop, thread: Some(thread) }
    }

    /// Returns the requests of matching users that started from `from` until `to`.
    fn between(&self, from: Instant, to: Instant, matches: impl Fn(usize) -> bool) -> Vec<Observation> {
        let observations = self.observations.lock().unwrap();
        let in_range = |request: &&Observation| request.started >= from && request.started < to;
        observations.iter().filter(in_range).filter(|request| matches(request.user)).copied().collect()
    }

    /// Waits until Redis has decided all requests of matching users for 200 ms, and returns the start of that period.
    fn recovered_at(&self, from: Instant, matches: impl Fn(usize) -> bool) -> Instant {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let requests = self.between(from, Instant::now(), &matches);
            let last_failure = requests.iter().filter(|request| !request.decided).map(|request| request.started).max();
            let since = last_failure.unwrap_or(from);
            let requests = self.between(since, Instant::now(), &matches);
            let is_stable = requests.iter().any(|request| request.started > since + Duration::from_millis(200));
            if is_stable || Instant::now() > deadline {
                return since;
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        let _ = self.thread.take().map(std::thread::JoinHandle::join);
    }
}

async fn send(client: Client, user: usize, list: Arc<Mutex<Vec<Observation>>>) {
    let started = Instant::now();
    let user_entry = Descriptor::new().entry("user", format!("user{user}"));
    let answer = client.check(Request::new("bench").descriptor(user_entry)).await;
    let observation = Observation { started, user, latency: started.elapsed(), decided: answer.is_ok() };
    list.lock().unwrap().push(observation);
}

fn print_row(name: &str, requests: &[Observation]) {
    let mut millis: Vec<_> = requests.iter().map(|request| request.latency.as_secs_f64() * 1e3).collect();
    millis.sort_by(f64::total_cmp);
    let quantile = |q: f64| millis.get((millis.len() as f64 * q) as usize).copied().unwrap_or_default();
    let (p50, p99, p999) = (quantile(0.5), quantile(0.99), quantile(0.999));
    let undecided = requests.iter().filter(|request| !request.decided).count();
    let percent = undecided as f64 * 100.0 / requests.len().max(1) as f64;
    println!("| {name} | {} | {p50:.2} | {p99:.2} | {p999:.1} | {percent:.1}% |", requests.len());
}

fn wait(millis: u64) -> Instant {
    std::thread::sleep(Duration::from_millis(millis));
    Instant::now()
}

fn print_header(title: &str) {
    println!("\n{title}\n\n| period | requests | p50 ms | p99 ms | p99.9 ms | by on_error |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
}

pub(crate) fn run() {
    single();
    cluster();
}

fn single() {
    print_header("One Redis, 5,000 requests/s");
    for (state, signals) in [("frozen", ("STOP", "CONT")), ("killed", ("KILL", ""))] {
        let mut redis = Process::redis();
        let service = Process::service_with_defaults(&redis.url());
        let load = Load::start(&service);
        let (start, began) = (wait(500), wait(2_000));
        signal(&redis, signals.0);
        let ended = wait(4_000);
        match signals.1 {
            "" => redis.restart_redis(),
            name => signal(&redis, name),
        }
        let restarted = Instant::now();
        let recovered = load.recovered_at(ended, |_| true);
        print_row("before", &load.between(start, began, |_| true));
        let first = began + Duration::from_millis(100);
        print_row(&format!("{state}, first 100 ms"), &load.between(began, first, |_| true));
        print_row(&format!("{state}, remainder of 4 s"), &load.between(first, ended, |_| true));
        let millis = recovered.saturating_duration_since(restarted).as_secs_f64() * 1e3;
        println!("| recovery: {millis:.0} ms | | | | | |");
    }
}

fn cluster() {
    print_header("A cluster of three masters with a replica each, cluster-node-timeout 1 s; a master is killed");
    let nodes = Process::redis_cluster(true);
    let service = Process::service_with_defaults(&multi_host_url("cluster", &nodes));
    let owner = |user: usize| usize::from(slot(format!("bench|user=user{user}").as_bytes())) * 3 / 16_384;
    let load = Load::start(&service);
    let (start, began) = (wait(1_000), wait(3_000));
    let (dead, replica) =
        (&nodes[0], nodes.iter().skip(3).find(|node| node.cli(&["role"]).contains(&nodes[0].port())).unwrap());
    signal(dead, "KILL");
    // One connection is polled at intervals, because a `redis-cli` process per poll would take a core from the servers.
    let mut connection = ::redis::Client::open(replica.url()).unwrap().get_connection().unwrap();
    while !is_master(&mut connection) {
        wait(2);
    }
    let promoted = Instant::now();
    let recovered = load.recovered_at(began, |user| owner(user) == 0);
    let end = wait(1_000);
    let healthy = |user| owner(user) != 0;
    print_row("before, all", &load.between(start, began, |_| true));
    print_row("healthy shards, until recovery", &load.between(began, recovered, healthy));
    print_row("the dead shard, until recovery", &load.between(began, recovered, |user| !healthy(user)));
    print_row("after recovery, all", &load.between(recovered, end, |_| true));
    println!(
        "\nThe replica was promoted {:.2} s after the kill; normal answers followed {:.0} ms later.",
        (promoted - began).as_secs_f64(),
        recovered.saturating_duration_since(promoted).as_secs_f64() * 1e3
    );
    print_lost_hits(load, replica, owner);
}

/// Prints the number of hits that the dead master had counted and not replicated.
fn print_lost_hits(load: Load, replica: &Process, owner: impl Fn(usize) -> usize) {
    let observations = Arc::clone(&load.observations);
    drop(load);
    wait(200);
    let observations = observations.lock().unwrap();
    let decided = observations.iter().filter(|request| request.decided && owner(request.user) == 0).count() as i64;
    let counted: i64 = (0..USERS)
        .filter(|user| owner(*user) == 0)
        .map(|user| replica.cli(&["get", &format!("sluicegate:{{bench|user=user{user}}}fw:86400")]))
        .filter_map(|value| value.get(value.len().saturating_sub(10)..)?.parse::<i64>().ok())
        .sum();
    println!(
        "Of {decided} hits that were allowed on its shard, {} are not counted (limit {LIMIT}).",
        decided - counted
    );
}

fn is_master(server: &mut ::redis::Connection) -> bool {
    let role: Vec<::redis::Value> = ::redis::cmd("ROLE").query(server).unwrap();
    matches!(role.first(), Some(::redis::Value::BulkString(role)) if role == b"master")
}
