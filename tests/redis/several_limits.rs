//! Rules with several limits, which are charged together or not at all, while Redis nodes die.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::Duration,
};

use tokio::task::JoinSet;

use crate::support::{
    RedisCluster, RedisServer, Server, descriptor,
    raw_client::{Client, ExactStatus, Request},
    request_for, ring, rules,
};

const RULES: &str = "
domain: d
descriptors:
- key: user
  rate_limits:
  - { unit: year, requests_per_unit: 5, name: window }
  - { unit: year, requests_per_unit: 8, name: bucket, algorithm: token_bucket }
  - { unit: year, requests_per_unit: 20, name: calendar, window: calendar }
";
const LIMITS: [(&str, u32); 3] = [("window", 5), ("bucket", 8), ("calendar", 20)];
/// Requests for each entity: more than the smallest limit.
const REQUESTS: usize = 7;
const CALLERS: usize = 50;

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    Server::builder().rules(folder.path()).store(store).set("response.dynamic_metadata", "true").start()
}

/// Returns the hits that each limit of an entity has counted, or `None` if Redis does not answer.
async fn used(client: &Client, user: &str) -> Option<[u32; 3]> {
    let peek = Request::new("d").descriptor(descriptor(&[("user", user)]).hits(0));
    let answer = client.check(peek).await.ok()?;
    let status = answer.exact().remove(0);
    let all: Vec<&ExactStatus> = std::iter::once(&status).chain(&status.others).collect();
    Some(LIMITS.map(|(name, limit)| {
        let status = all.iter().find(|status| status.name.as_deref() == Some(name)).expect(name);
        limit - status.remaining.unwrap()
    }))
}

/// Sends requests for each of `entities`, calls `disturb` after a third of them, and returns the number of errors.
async fn send_all(server: &Server, entities: usize, disturb: impl FnOnce()) -> u32 {
    let errors = Arc::new(AtomicU32::new(0));
    let sent = Arc::new(AtomicU32::new(0));
    let mut callers = JoinSet::new();
    for caller in 0..CALLERS {
        let client = server.client().await;
        let errors = Arc::clone(&errors);
        let sent = Arc::clone(&sent);
        callers.spawn(async move {
            for number in (caller..entities * REQUESTS).step_by(CALLERS) {
                let user = format!("u{}", number % entities);
                if client.check(request_for("d", &[("user", &user)])).await.is_err() {
                    errors.fetch_add(1, Relaxed);
                }
                sent.fetch_add(1, Relaxed);
            }
        });
    }
    while (sent.load(Relaxed) as usize) < entities * REQUESTS / 3 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    disturb();
    callers.join_all().await;
    errors.load(Relaxed)
}

/// Asserts that the limits of every entity have counted the same hits. Returns how many entities have used the smallest up.
async fn assert_all_or_nothing(server: &Server, entities: usize) -> usize {
    let client = server.client().await;
    let mut used_up = 0;
    for number in 0..entities {
        let user = format!("u{number}");
        let counted = loop {
            match used(&client, &user).await {
                Some(counted) => break counted,
                None => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        };
        assert_eq!(counted, [counted[0]; 3], "{user}");
        assert!(counted[0] <= LIMITS[0].1);
        used_up += usize::from(counted[0] == LIMITS[0].1);
    }
    used_up
}

#[tokio::test]
async fn all_limits_of_an_entity_count_the_same_requests() {
    let redis = RedisServer::start();
    let (_nodes, ring) = ring(3);
    for store in ["memory", &redis.url(), &ring] {
        let server = start(store);
        let errors = send_all(&server, 1_000, || {}).await;
        assert_eq!((errors, assert_all_or_nothing(&server, 1_000).await), (0, 1_000), "{store}");
    }
}

#[tokio::test]
async fn ten_thousand_entities_are_charged_all_or_nothing_while_a_master_dies() {
    let mut cluster = RedisCluster::with(3, 1, &[]);
    let server = start(&cluster.url());
    let errors = send_all(&server, 10_000, || cluster.nodes[0].kill()).await;
    assert!(errors > 0, "requests to the dead master fail");
    let used_up = assert_all_or_nothing(&server, 10_000).await;
    assert!(used_up > 5_000, "{used_up}");
}
