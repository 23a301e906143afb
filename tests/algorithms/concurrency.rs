//! Concurrency limits over the wire: who holds a slot, for how long, and what frees it.

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
    plain::{Answer, Client, Request},
    ring, rules, until_async,
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
    let builder = Server::builder().rules(folder.path()).store(store).set("redis.timeout", "20s");
    builder.set("response.headers", "true").set("response.header_style", "ietf-draft-11").start()
}

fn slot(key: &str, id: &str) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x"), ("id", id)]))
}

fn release(key: &str, id: &str) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x"), ("id", id)]).give_back())
}

async fn ask(client: &Client, request: Request) -> (bool, Option<u32>) {
    let answer: Answer = client.check(request).await.unwrap();
    (answer.allowed(), answer.remaining())
}

#[tokio::test]
async fn a_slot_is_its_holders() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = start(store);
        let client = server.client().await;
        assert_eq!(ask(&client, slot("user", "1")).await, (true, Some(1)));
        assert_eq!(ask(&client, slot("user", "2")).await, (true, Some(0)));
        let refused = client.check(slot("user", "3")).await.unwrap();
        let wait = refused.retry_after().unwrap();
        assert!(!refused.allowed() && wait > Duration::from_secs(3_590) && wait <= Duration::from_secs(3_600));
        let limit = refused.0.statuses[0].current_limit.as_ref().unwrap();
        assert_eq!((limit.requests_per_unit, limit.unit, limit.name.as_str()), (2, 0, "in-flight"));
        // Asked again by who has one it is the same; by who had none, nothing is freed; and there is no memory of a refusal.
        assert_eq!(ask(&client, slot("user", "2")).await, (true, Some(0)));
        assert_eq!(ask(&client, release("user", "3")).await, (true, Some(0)));
        assert_eq!(ask(&client, release("user", "1")).await, (true, Some(1)));
        assert_eq!(ask(&client, release("user", "1")).await, (true, Some(1)), "twice");
        assert_eq!(ask(&client, slot("user", "3")).await, (true, Some(0)));
        // Nobody could give it back.
        let nobody = client.check(Request::new("d").descriptor(descriptor(&[("user", "x")]))).await.unwrap();
        assert_eq!((nobody.allowed(), nobody.remaining()), (true, None));
        let headers = async |key| {
            let headers = client.check(slot(key, "3")).await.unwrap().0.response_headers_to_add;
            ["RateLimit-Policy", "RateLimit"]
                .map(|name| headers.iter().find(|header| header.key == name).unwrap().value.clone())
        };
        let [policy, limit] = headers("user").await;
        assert_eq!(policy, "\"in-flight\";q=2;qu=\"concurrent-requests\"");
        assert!(limit.starts_with("\"in-flight\";r=0;t=3"), "{limit}");
        // What is learned is told as it is now.
        let [policy, limit] = headers("learns").await;
        assert_eq!(policy, "\"learned\";q=10;qu=\"concurrent-requests\"");
        assert!(limit.starts_with("\"learned\";r=9;"), "{limit}");
    }
}

/// A refusal is not remembered, neither there nor in the client.
#[tokio::test]
async fn a_slot_that_another_instance_frees_is_free_at_once() {
    let redis = RedisServer::start();
    let (one, other) = (start(&redis.url()), start(&redis.url()));
    let (client, elsewhere) = (one.client().await, other.client().await);
    let ours = sluicegate_client::Client::builder(format!("http://{}", one.grpc)).domain("d").deadline(DEADLINE);
    let ours = ours.connect_lazy().unwrap();
    let wanted = async || ours.check([sluicegate_client::descriptor! { "user" => "x", "id" => "3" }]).await.allowed();
    for id in ["1", "2"] {
        assert!(ask(&client, slot("user", id)).await.0);
    }
    assert!(!ask(&client, slot("user", "3")).await.0 && !wanted().await);
    ask(&elsewhere, release("user", "1")).await;
    assert!(wanted().await);
    assert!(ask(&client, slot("user", "3")).await.0, "the same once more");
}

/// By itself an instance knows whose slots they are, too.
#[tokio::test]
async fn without_redis_slots_have_names() {
    let mut redis = RedisServer::start();
    let text = RULES.replace("name: in-flight", "name: in-flight, on_error: local");
    let folder = rules(&[("d.yaml", &text)]);
    let server = Server::builder().rules(folder.path()).store(&redis.url()).start();
    let client = server.client().await;
    redis.kill();
    for id in ["1", "2"] {
        assert!(ask(&client, slot("user", id)).await.0);
    }
    assert!(!ask(&client, slot("user", "3")).await.0);
    ask(&client, release("user", "3")).await;
    assert!(!ask(&client, slot("user", "3")).await.0);
    ask(&client, release("user", "2")).await;
    assert_eq!(ask(&client, slot("user", "3")).await, (true, Some(0)));
}

#[tokio::test]
async fn without_names_slots_are_counted() {
    let server = start("memory");
    let client = server.client().await;
    let nameless = || Request::new("d").descriptor(descriptor(&[("nameless", "x")]));
    let back = || Request::new("d").descriptor(descriptor(&[("nameless", "x")]).give_back());
    for expected in [(true, Some(1)), (true, Some(0)), (false, Some(0))] {
        assert_eq!(ask(&client, nameless()).await, expected);
    }
    assert_eq!(ask(&client, back()).await, (true, Some(1)));
    assert_eq!(ask(&client, nameless()).await, (true, Some(0)));
}

/// A holder that has crashed gives nothing back: its slot ends, and not before.
#[tokio::test]
async fn a_slot_that_nobody_gives_back_ends() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = start(store);
        let client = server.client().await;
        let taken = Instant::now();
        assert!(ask(&client, slot("brief", "1")).await.0);
        until_async("its end", async || ask(&client, slot("brief", "2")).await.0.then_some(())).await;
        assert!(taken.elapsed() >= Duration::from_millis(500));
        // Whoever lives renews.
        let taken = Instant::now();
        until_async("a while", async || {
            assert!(ask(&client, slot("brief", "2")).await.0);
            assert!(!ask(&client, slot("brief", "3")).await.0);
            (taken.elapsed() > Duration::from_secs(1)).then_some(())
        })
        .await;
    }
}

/// Two instances, 64 callers, twenty slots: never more than twenty at once, counted where the work is done; and in the
/// end all of them are free.
#[tokio::test]
async fn never_more_at_once_than_the_limit() {
    let redis = RedisServer::start();
    let (_nodes, ring) = ring(3);
    for url in [redis.url(), ring] {
        let servers = [start(&url), start(&url)];
        let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let mut callers = JoinSet::new();
        for caller in 0..64 {
            let client = servers[caller % 2].client().await;
            let (now, most) = (Arc::clone(&now), Arc::clone(&most));
            callers.spawn(async move {
                let mut passed = 0;
                for number in 0..50 {
                    let id = format!("{caller}-{number}");
                    if ask(&client, slot("many", &id)).await.0 {
                        most.fetch_max(now.fetch_add(1, Relaxed) + 1, Relaxed);
                        tokio::task::yield_now().await;
                        now.fetch_sub(1, Relaxed);
                        passed += 1;
                    }
                    // Refused or not: whoever is done says so.
                    ask(&client, release("many", &id)).await;
                }
                passed
            });
        }
        let passed: usize = callers.join_all().await.into_iter().sum();
        assert!(most.load(Relaxed) <= 20 && passed > 64, "{most:?} at once, {passed} passed");
        let client = servers[0].client().await;
        assert_eq!(ask(&client, slot("many", "last")).await, (true, Some(19)));
    }
}
