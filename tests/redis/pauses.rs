//! A service that is paused, as by a CPU quota of its container: Redis did not fail meanwhile.

use std::{
    sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use crate::support::{Fault, Proxy, RedisServer, Server, request_for, rules, wait_for};

const RULES: &str = "
domain: d
descriptors:
- key: user
  rate_limit: {unit: year, requests_per_unit: 1000000}
";
const CALLERS: usize = 24;
/// Lengths of the pauses, in milliseconds.
const PAUSES: [u64; 2] = [250, 400];
const TIMEOUTS: &str = "sluicegate_store_errors_total{kind=\"timeout\"}";
const UNAVAILABLE: &str = "sluicegate_store_errors_total{kind=\"unavailable\"}";

/// The timeout is one that Redis does not exceed on a busy machine.
fn start(url: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(url).set("redis.timeout", "200ms").start()
}

/// Pauses a process several times, and lets it run as long as it was paused.
fn pause_repeatedly(server: &Server, pauses: usize) {
    for number in 0..pauses {
        let length = Duration::from_millis(PAUSES[number % PAUSES.len()]);
        server.signal("STOP");
        thread::sleep(length);
        server.signal("CONT");
        thread::sleep(length);
    }
}

/// Calls all the time while `during` runs. Returns the number of calls, and the errors.
fn call_during(server: &Server, during: impl FnOnce()) -> (usize, Vec<String>) {
    let is_over = AtomicBool::new(false);
    let calls = AtomicUsize::new(0);
    let errors = thread::scope(|scope| {
        let caller = |number: usize| {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (is_over, calls) = (&is_over, &calls);
            runtime.block_on(async move {
                let client = server.client().await;
                let mut errors = Vec::new();
                while !is_over.load(Relaxed) {
                    let answer = client.check(request_for("d", &[("user", &*number.to_string())])).await;
                    errors.extend(answer.err().map(|error| error.to_string()));
                    calls.fetch_add(1, Relaxed);
                }
                errors
            })
        };
        let callers: Vec<_> = (0..CALLERS).map(|number| scope.spawn(move || caller(number))).collect();
        during();
        is_over.store(true, Relaxed);
        callers.into_iter().flat_map(|caller| caller.join().unwrap()).collect()
    });
    (calls.into_inner(), errors)
}

/// Calls while a service with this Redis is paused for longer than the timeout. None fails.
fn assert_is_not_blamed(url: &str) -> Server {
    let server = start(url);
    wait_for("Redis to be connected", || server.get("/readyz").contains("redis, up").then_some(()));
    let (calls, errors) = call_during(&server, || pause_repeatedly(&server, 8));
    assert!(errors.is_empty(), "{} of {calls} calls failed: {}", errors.len(), errors[0]);
    assert!(calls > CALLERS * 8, "{calls} calls");
    assert_eq!((server.metric(TIMEOUTS), server.metric(UNAVAILABLE)), (0.0, 0.0));
    let log = server.log();
    assert!(!log.contains("is unavailable"), "{log}");
    server
}

#[test]
fn a_pause_of_the_service_is_no_failure_of_redis() {
    let redis = RedisServer::start();
    let server = assert_is_not_blamed(&redis.url());
    let pauses = server.metric("sluicegate_process_pauses_total");
    let seconds = server.metric("sluicegate_process_paused_seconds_total");
    // Eight pauses of 2.6 s together, each measured up to 25 ms too short. A busy machine adds others.
    assert!(pauses >= 8.0 && seconds >= 2.4, "{pauses} pauses of {seconds} s");
    let log = server.log();
    assert_eq!(log.matches("the process was paused").count(), 1, "{log}");
}

#[test]
fn a_pause_of_the_service_is_no_failure_of_a_slow_redis() {
    let redis = RedisServer::start();
    let proxy = Proxy::start(redis.port);
    proxy.set(Fault::Delay(Duration::from_millis(40)));
    assert_is_not_blamed(&proxy.url());
}

/// Each caller fails when Redis is stopped, and the outage is noticed, although the service is paused as well.
#[test]
fn a_stopped_redis_is_noticed_by_a_paused_service() {
    let redis = RedisServer::start();
    let server = start(&redis.url());
    wait_for("Redis to be connected", || server.get("/readyz").contains("redis, up").then_some(()));
    redis.freeze();
    let started = Instant::now();
    let (_, errors) = call_during(&server, || {
        pause_repeatedly(&server, 4);
        wait_for("the outage to be noticed", || (server.metric(UNAVAILABLE) > 0.0).then_some(()));
    });
    let time = started.elapsed();
    assert!(!errors.is_empty());
    // Pauses of 1.3 s and as much time between them, and three timeouts in a row, which can last three times as long.
    assert!(time < Duration::from_secs(20), "{time:?}");
    redis.thaw();
    wait_for("Redis to be connected", || server.get("/readyz").contains("redis, up").then_some(()));
}
