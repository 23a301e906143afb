//! A bad day: what callers see while Redis, or a master of a cluster, is dead or frozen, at 5,000 requests a second that
//! come whether or not those before were answered.

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
    plain::{Client, Descriptor, Request},
    process::{Process, many, signal},
};

const USERS: usize = 999;
const LIMIT: u32 = 4_000_000_000;
/// Five a millisecond.
const AT_ONCE: usize = 5;

/// One request: when it was asked, of which user, how long it took, and whether Redis decided it.
#[derive(Clone, Copy)]
struct Asked {
    at: Instant,
    user: usize,
    took: Duration,
    decided: bool,
}

/// Asks until it is dropped.
struct Load {
    asked: Arc<Mutex<Vec<Asked>>>,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start(service: &Process) -> Self {
        let (asked, stop) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (list, end, url) = (Arc::clone(&asked), Arc::clone(&stop), format!("http://{}", service.address));
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut clients = Vec::new();
                for _ in 0..4 {
                    clients.push(
                        Client::with(Endpoint::from_shared(url.clone()).unwrap().timeout(Duration::from_secs(1)))
                            .await
                            .unwrap(),
                    );
                }
                let mut ticks = interval(Duration::from_millis(1));
                ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
                let mut number = 0;
                while !end.load(Relaxed) {
                    ticks.tick().await;
                    for _ in 0..AT_ONCE {
                        number += 1;
                        tokio::spawn(ask(clients[number % 4].clone(), number % USERS, Arc::clone(&list)));
                    }
                }
            });
        });
        Self { asked, stop, thread: Some(thread) }
    }

    /// What was asked in a time, of some users.
    fn between(&self, from: Instant, to: Instant, of: impl Fn(usize) -> bool) -> Vec<Asked> {
        let asked = self.asked.lock().unwrap();
        asked.iter().filter(|it| it.at >= from && it.at < to && of(it.user)).copied().collect()
    }

    /// The first instant from which on all of these users' requests are decided for 200 ms.
    fn well_again(&self, from: Instant, of: impl Fn(usize) -> bool) -> Instant {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            let last = self.between(from, Instant::now(), &of).iter().filter(|it| !it.decided).map(|it| it.at).max();
            let since = last.unwrap_or(from);
            let later =
                self.between(since, Instant::now(), &of).iter().any(|it| it.at > since + Duration::from_millis(200));
            if later || Instant::now() > deadline {
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

async fn ask(client: Client, user: usize, list: Arc<Mutex<Vec<Asked>>>) {
    let at = Instant::now();
    let user_entry = Descriptor::new().entry("user", format!("user{user}"));
    let answer = client.check(Request::new("bench").descriptor(user_entry)).await;
    let asked = Asked { at, user, took: at.elapsed(), decided: answer.is_ok() };
    list.lock().unwrap().push(asked);
}

fn row(what: &str, asked: &[Asked]) {
    let mut took: Vec<_> = asked.iter().map(|it| it.took.as_secs_f64() * 1e3).collect();
    took.sort_by(f64::total_cmp);
    let at = |share: f64| took.get((took.len() as f64 * share) as usize).copied().unwrap_or_default();
    let undecided = asked.iter().filter(|it| !it.decided).count() as f64 * 100.0 / asked.len().max(1) as f64;
    println!("| {what} | {} | {:.2} | {:.2} | {:.1} | {undecided:.1}% |", asked.len(), at(0.5), at(0.99), at(0.999));
}

fn wait(millis: u64) -> Instant {
    std::thread::sleep(Duration::from_millis(millis));
    Instant::now()
}

fn head(title: &str) {
    println!("\n{title}\n\n| when | requests | p50 ms | p99 ms | p99.9 ms | by on_error |");
    println!("| --- | ---: | ---: | ---: | ---: | ---: |");
}

pub(crate) fn run() {
    single();
    cluster();
}

fn single() {
    head("One Redis, 5,000 requests/s");
    for (what, signals) in [("frozen", ("STOP", "CONT")), ("killed", ("KILL", ""))] {
        let mut redis = Process::redis();
        let service = Process::service_as_set(&redis.url());
        let load = Load::start(&service);
        let (start, began) = (wait(500), wait(2_000));
        signal(&redis, signals.0);
        let ended = wait(4_000);
        match signals.1 {
            "" => redis.restart_redis(),
            word => signal(&redis, word),
        }
        let back = Instant::now();
        let well = load.well_again(ended, |_| true);
        row("before", &load.between(start, began, |_| true));
        row(&format!("{what}, its first 100 ms"), &load.between(began, began + Duration::from_millis(100), |_| true));
        row(&format!("{what}, the rest of 4 s"), &load.between(began + Duration::from_millis(100), ended, |_| true));
        println!("| back to well: {:.0} ms | | | | | |", well.saturating_duration_since(back).as_secs_f64() * 1e3);
    }
}

fn cluster() {
    head("A cluster of three masters with a replica each, cluster-node-timeout 1 s; a master is killed");
    let nodes = Process::redis_cluster(true);
    let service = Process::service_as_set(&many("cluster", &nodes));
    let owner = |user: usize| usize::from(slot(format!("bench|user=user{user}").as_bytes())) * 3 / 16_384;
    let load = Load::start(&service);
    let (start, began) = (wait(1_000), wait(3_000));
    let (dead, replica) =
        (&nodes[0], nodes.iter().skip(3).find(|node| node.cli(&["role"]).contains(&nodes[0].port())).unwrap());
    signal(dead, "KILL");
    // Asked over one connection and now and then: a process for each question took a core from those who are measured.
    let mut asked = ::redis::Client::open(replica.url()).unwrap().get_connection().unwrap();
    while !is_master(&mut asked) {
        wait(2);
    }
    let promoted = Instant::now();
    let well = load.well_again(began, |user| owner(user) == 0);
    let end = wait(1_000);
    let healthy = |user| owner(user) != 0;
    row("before, all", &load.between(start, began, |_| true));
    row("healthy shards, until all is well", &load.between(began, well, healthy));
    row("the dead shard, until all is well", &load.between(began, well, |user| !healthy(user)));
    row("afterwards, all", &load.between(well, end, |_| true));
    println!(
        "\nPromoted {:.2} s after the kill; normal answers {:.0} ms after that.",
        (promoted - began).as_secs_f64(),
        well.saturating_duration_since(promoted).as_secs_f64() * 1e3
    );
    count(load, replica, owner);
}

/// What the dead master had counted and its replica had not heard of.
fn count(load: Load, replica: &Process, owner: impl Fn(usize) -> usize) {
    let asked = Arc::clone(&load.asked);
    drop(load);
    wait(200);
    let asked = asked.lock().unwrap();
    let decided = asked.iter().filter(|it| it.decided && owner(it.user) == 0).count() as i64;
    let counted: i64 = (0..USERS)
        .filter(|user| owner(*user) == 0)
        .map(|user| replica.cli(&["get", &format!("sluicegate:{{bench|user=user{user}}}fw:86400")]))
        .filter_map(|value| value.get(value.len().saturating_sub(10)..)?.parse::<i64>().ok())
        .sum();
    println!(
        "Of {decided} hits that were let through on its shard, {} are not counted (limit {LIMIT}).",
        decided - counted
    );
}

fn is_master(server: &mut ::redis::Connection) -> bool {
    let role: Vec<::redis::Value> = ::redis::cmd("ROLE").query(server).unwrap();
    matches!(role.first(), Some(::redis::Value::BulkString(role)) if role == b"master")
}
