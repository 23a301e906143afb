//! Concurrency limits over the wire: holders, lifetimes and releases of slots.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use tokio::task::JoinSet;

use crate::support::{
    DEADLINE, RedisServer, Server, descriptor,
    raw_client::{Answer, Client, Request},
    ring, rules, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: user
  rate_limit: {algorithm: concurrency, limit: 2, hold: 1h, holder: id, name: in-flight}
- key: brief
  rate_limit: {algorithm: concurrency, limit: 1, hold: 500ms, holder: id}
- key: nameless
  rate_limit: {algorithm: concurrency, limit: 2}
- key: many
  rate_limit: {algorithm: concurrency, limit: 20, holder: id}
- key: learns
  rate_limit: {algorithm: adaptive, method: aimd, ceiling: 100, initial: 10, hold: 1h, holder: id, name: learned}
";

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    let builder = Server::builder().rules(folder.path()).store(store);
    builder.set("response.headers", "true").set("response.header_style", "ietf-draft-11").start()
}

fn slot(key: &str, id: &str) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x"), ("id", id)]))
}

fn release(key: &str, id: &str) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x"), ("id", id)]).refund())
}

async fn check(client: &Client, request: Request) -> (bool, Option<u32>) {
    let answer: Answer = client.check(request).await.unwrap();
    (answer.allowed(), answer.remaining())
}

#[tokio::test]
async fn a_slot_belongs_to_one_holder() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = start(store);
        let client = server.client().await;
        assert_eq!(check(&client, slot("user", "1")).await, (true, Some(1)));
        assert_eq!(check(&client, slot("user", "2")).await, (true, Some(0)));
        let denied = client.check(slot("user", "3")).await.unwrap();
        let wait = denied.retry_after().unwrap();
        assert!(!denied.allowed() && wait > Duration::from_secs(3_590) && wait <= Duration::from_secs(3_600));
        let limit = denied.0.statuses[0].current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit, limit.name.as_str()), (2, 0, "in-flight"));
        // A repeated request of a holder has the same answer, a release without a slot frees nothing, and denials are
        // not cached.
        assert_eq!(check(&client, slot("user", "2")).await, (true, Some(0)));
        assert_eq!(check(&client, release("user", "3")).await, (true, Some(0)));
        assert_eq!(check(&client, release("user", "1")).await, (true, Some(1)));
        assert_eq!(check(&client, release("user", "1")).await, (true, Some(1)), "a second release");
        assert_eq!(check(&client, slot("user", "3")).await, (true, Some(0)));
        // The limit does not apply to requests without a holder, because they could not release a slot.
        let without_holder = client.check(Request::new("d").descriptor(descriptor(&[("user", "x")]))).await.unwrap();
        assert_eq!((without_holder.allowed(), without_holder.remaining()), (true, None));
        let headers = async |key| {
            let headers = client.check(slot(key, "3")).await.unwrap().0.response_headers_to_add;
            ["RateLimit-Policy", "RateLimit"]
                .map(|name| headers.iter().find(|header| header.key == name).unwrap().value.clone())
        };
        let [policy, limit] = headers("user").await;
        assert_eq!(policy, "\"in-flight\";q=2;qu=\"concurrent-requests\"");
        assert!(limit.starts_with("\"in-flight\";r=0;t=3"), "{limit}");
        // The headers contain the current value of an adaptive limit.
        let [policy, limit] = headers("learns").await;
        assert_eq!(policy, "\"learned\";q=10;qu=\"concurrent-requests\"");
        assert!(limit.starts_with("\"learned\";r=9;"), "{limit}");
    }
}

/// A denial is cached neither by the other instance nor by the client.
#[tokio::test]
async fn a_slot_that_another_instance_frees_is_available_immediately() {
    let redis = RedisServer::start();
    let (one, other) = (start(&redis.url()), start(&redis.url()));
    let (client, other_client) = (one.client().await, other.client().await);
    let library_client =
        sluicegate_client::Client::builder(format!("http://{}", one.grpc)).domain("d").timeout(DEADLINE);
    let library_client = library_client.connect_lazy().unwrap();
    let library_is_allowed =
        async || library_client.check([sluicegate_client::descriptor! { "user" => "x", "id" => "3" }]).await.allowed();
    for id in ["1", "2"] {
        assert!(check(&client, slot("user", id)).await.0);
    }
    assert!(!check(&client, slot("user", "3")).await.0 && !library_is_allowed().await);
    check(&other_client, release("user", "1")).await;
    assert!(library_is_allowed().await);
    assert!(check(&client, slot("user", "3")).await.0, "the new holder repeats its request");
}

/// An instance without Redis records the holders of slots, too.
#[tokio::test]
async fn without_redis_slots_belong_to_holders() {
    let mut redis = RedisServer::start();
    let text = RULES.replace("name: in-flight", "name: in-flight, on_error: local");
    let folder = rules(&[("d.yaml", &text)]);
    let server = Server::builder().rules(folder.path()).store(&redis.url()).start();
    let client = server.client().await;
    redis.kill();
    for id in ["1", "2"] {
        assert!(check(&client, slot("user", id)).await.0);
    }
    assert!(!check(&client, slot("user", "3")).await.0);
    check(&client, release("user", "3")).await;
    assert!(!check(&client, slot("user", "3")).await.0);
    check(&client, release("user", "2")).await;
    assert_eq!(check(&client, slot("user", "3")).await, (true, Some(0)));
}

#[tokio::test]
async fn without_holders_slots_are_counted() {
    let server = start("memory");
    let client = server.client().await;
    let take_one = || Request::new("d").descriptor(descriptor(&[("nameless", "x")]));
    let release_one = || Request::new("d").descriptor(descriptor(&[("nameless", "x")]).refund());
    for expected in [(true, Some(1)), (true, Some(0)), (false, Some(0))] {
        assert_eq!(check(&client, take_one()).await, expected);
    }
    assert_eq!(check(&client, release_one()).await, (true, Some(1)));
    assert_eq!(check(&client, take_one()).await, (true, Some(0)));
}

/// The slot of a crashed holder expires after `hold`, and not before.
#[tokio::test]
async fn a_slot_that_is_not_released_expires() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = start(store);
        let client = server.client().await;
        let taken = Instant::now();
        assert!(check(&client, slot("brief", "1")).await.0);
        wait_for_async("the slot to expire", async || check(&client, slot("brief", "2")).await.0.then_some(())).await;
        assert!(taken.elapsed() >= Duration::from_millis(500));
        // A holder that is alive renews its slot.
        let taken = Instant::now();
        wait_for_async("one second to pass", async || {
            assert!(check(&client, slot("brief", "2")).await.0);
            assert!(!check(&client, slot("brief", "3")).await.0);
            (taken.elapsed() > Duration::from_secs(1)).then_some(())
        })
        .await;
    }
}

/// With two instances, 64 callers and 20 slots, the callers themselves never count more than 20 requests in flight, and
/// all slots are free in the end.
#[tokio::test]
async fn requests_in_flight_never_exceed_the_limit() {
    let redis = RedisServer::start();
    let (_nodes, ring) = ring(3);
    for url in [redis.url(), ring] {
        let servers = [start(&url), start(&url)];
        let (in_flight, max_in_flight) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut callers = JoinSet::new();
        for caller in 0..64 {
            let client = servers[caller % 2].client().await;
            let (in_flight, max_in_flight) = (Arc::clone(&in_flight), Arc::clone(&max_in_flight));
            callers.spawn(async move {
                let mut passed = 0;
                for number in 0..50 {
                    let id = format!("{caller}-{number}");
                    if check(&client, slot("many", &id)).await.0 {
                        max_in_flight.fetch_max(in_flight.fetch_add(1, Relaxed) + 1, Relaxed);
                        tokio::task::yield_now().await;
                        in_flight.fetch_sub(1, Relaxed);
                        passed += 1;
                    }
                    // A caller releases its slot whether it was allowed or denied.
                    check(&client, release("many", &id)).await;
                }
                passed
            });
        }
        let passed: usize = callers.join_all().await.into_iter().sum();
        assert!(max_in_flight.load(Relaxed) <= 20 && passed > 64, "{max_in_flight:?} in flight, {passed} allowed");
        let client = servers[0].client().await;
        assert_eq!(check(&client, slot("many", "last")).await, (true, Some(19)));
    }
}
