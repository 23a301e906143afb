//! An upgrade from the last release and back while requests arrive. `SLUICEGATE_PREVIOUS=path` names the program of the
//! last release; without it, both versions are the present one.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    net::SocketAddr,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use sluicegate_client::{Client as StreamClient, descriptor};
use tokio::{runtime, task::JoinSet, time::sleep};
use tonic::transport::Endpoint;

use crate::support::{
    DEADLINE, Operator, RedisServer, Server,
    raw_client::Client,
    request_for, rules,
    server::{Builder, command, get},
    wait_for,
};

/// The key of each limit that requests count on.
const KEYS: [&str; 4] = ["window", "log", "bucket", "leased"];
/// Time between two requests of a caller.
const PACE: Duration = Duration::from_millis(4);
/// Hits that each limit allows during the test.
const LIMIT: u64 = 10_000;
const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: { unit: year, requests_per_unit: 10000 }
- key: log
  rate_limit: { unit: year, requests_per_unit: 10000, algorithm: sliding_window }
- key: bucket
  rate_limit: { unit: year, requests_per_unit: 10000, algorithm: token_bucket }
- key: leased
  rate_limit: { unit: year, requests_per_unit: 10000, consistency: leased }
- key: entity
  rate_limit: { unit: year, requests_per_unit: 10000 }
";

/// Requests of eight callers, sent to the instances that a load balancer knows.
#[derive(Default)]
struct Load {
    /// gRPC address of each instance.
    instances: Mutex<BTreeMap<usize, SocketAddr>>,
    admitted: Mutex<BTreeMap<&'static str, u64>>,
    sent: AtomicU64,
    /// Whether the limits are to be reached now. Until then, requests are paced, so that the limits last.
    is_fast: AtomicBool,
    is_finished: AtomicBool,
}

impl Load {
    fn add(&self, number: usize, operator: &Operator) {
        self.instances.lock().unwrap().insert(number, operator.server.grpc);
    }

    /// Sends requests until the end. Panics if one of them fails.
    fn start(self: &Arc<Self>) -> JoinHandle<()> {
        let this = Arc::clone(self);
        std::thread::spawn(move || {
            let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let mut callers = JoinSet::new();
                for key in KEYS {
                    callers.spawn(Arc::clone(&this).call(key));
                    callers.spawn(Arc::clone(&this).stream(key));
                }
                while let Some(ended) = callers.join_next().await {
                    ended.unwrap();
                }
            });
        })
    }

    /// Returns the instance for the next request, or `None` at the end.
    async fn next(&self, turn: &mut usize) -> Option<SocketAddr> {
        if !self.is_fast.load(Relaxed) {
            sleep(PACE).await;
        }
        self.sent.fetch_add(1, Relaxed);
        *turn += 1;
        let instances = self.instances.lock().unwrap();
        (!self.is_finished.load(Relaxed)).then(|| *instances.values().nth(*turn % instances.len()).unwrap())
    }

    fn count(&self, key: &'static str, allowed: bool) {
        *self.admitted.lock().unwrap().entry(key).or_default() += u64::from(allowed);
    }

    /// Sends requests by Envoy's protocol.
    async fn call(self: Arc<Self>, key: &'static str) {
        let (mut clients, mut turn) = (BTreeMap::new(), 0);
        while let Some(address) = self.next(&mut turn).await {
            if let Entry::Vacant(vacant) = clients.entry(address) {
                vacant.insert(
                    Client::connect(Endpoint::from_shared(format!("http://{address}")).unwrap()).await.unwrap(),
                );
            }
            self.count(key, clients[&address].check(request_for("d", &[(key, "x")])).await.unwrap().allowed());
        }
    }

    /// Sends checks on streams of `sluicegate.v1`.
    async fn stream(self: Arc<Self>, key: &'static str) {
        let (mut clients, mut turn) = (BTreeMap::new(), 0);
        while let Some(address) = self.next(&mut turn).await {
            let client = clients.entry(address).or_insert_with(|| {
                let client = StreamClient::builder(format!("http://{address}")).domain("d");
                client.timeout(DEADLINE).deny_cache(0).connect_lazy().unwrap()
            });
            self.count(key, client.check([descriptor! { key => "x" }]).without_fallback().await.unwrap().allowed());
        }
    }

    fn wait_for_requests(&self, more: u64) {
        let until = self.sent.load(Relaxed) + more;
        wait_for("more requests", || (self.sent.load(Relaxed) >= until).then_some(()));
    }
}

/// Starts an instance of the previous or of the present version.
fn start(redis: &RedisServer, folder: &std::path::Path, is_previous: bool) -> Operator {
    let builder = match std::env::var("SLUICEGATE_PREVIOUS") {
        Ok(path) if is_previous => {
            let mut previous = Command::new(path);
            previous.args(command().get_args()).args(["--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
            Server::from_command(previous)
        }
        _ => Server::builder(),
    };
    let with = |builder: Builder| builder.rules(folder).store(&redis.url()).set("shutdown.delay", "1s");
    Operator::with(with(builder).set("redis.timeout", "5s"))
}

#[test]
fn an_upgrade_and_a_rollback_fail_no_request_and_admit_none_too_many() {
    let (redis, folder, load) = (RedisServer::start(), rules(&[("d.yaml", RULES)]), Arc::new(Load::default()));
    let mut instances = vec![start(&redis, folder.path(), true), start(&redis, folder.path(), true)];
    for (number, instance) in instances.iter().enumerate() {
        load.add(number, instance);
    }
    let sending = load.start();
    instances[0].ctl(&["limit", "set", "d", "entity=a", "11/year"]);
    // Both instances are upgraded, and then rolled back.
    for (step, is_previous) in [false, false, true, true].into_iter().enumerate() {
        let number = step % 2;
        load.wait_for_requests(500);
        let new = start(&redis, folder.path(), is_previous);
        let old = std::mem::replace(&mut instances[number], new);
        old.server.signal("TERM");
        // The load balancer replaces the instance when it is no longer ready. Until then, it receives requests.
        let ready = old.server.url("/readyz");
        wait_for("the instance to become unready", || (get(&ready).0 == 503).then_some(()));
        load.add(number, &instances[number]);
        wait_for("the instance to stop", || old.server.log().contains("shutdown complete").then_some(()));
        assert!(!old.server.log().contains("did not finish"), "{}", old.server.log());
        // The overrides that both versions have set apply to all instances.
        let entity = format!("entity=e{step}");
        instances[number].ctl(&["limit", "set", "d", &entity, "7/year"]);
        for instance in &instances {
            wait_for("the overrides to arrive", || {
                let listed = instance.ctl(&["limit", "list"]);
                (listed.contains("entity=a") && listed.contains(&entity)).then_some(())
            });
        }
    }
    let admitted = load.admitted.lock().unwrap().clone();
    assert!(admitted.values().all(|admitted| *admitted < LIMIT), "the limits did not last: {admitted:?}");
    load.is_fast.store(true, Relaxed);
    wait_for("the limits to be reached", || {
        let admitted = load.admitted.lock().unwrap();
        KEYS.iter().all(|key| admitted.get(key) >= Some(&LIMIT)).then_some(())
    });
    load.wait_for_requests(1_000);
    load.is_finished.store(true, Relaxed);
    sending.join().expect("every request is answered");
    for (key, admitted) in &*load.admitted.lock().unwrap() {
        // A bucket of a year gains a hit every 3,154 s.
        let gained = if *key == "bucket" { 1 } else { 0 };
        assert!((LIMIT..=LIMIT + gained).contains(admitted), "{key}: {admitted} of {LIMIT} hits were admitted");
    }
}
