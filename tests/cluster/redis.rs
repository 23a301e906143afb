//! `on_error: local` with peers: while Redis is down, members count together.

use crate::{
    cluster::members::{Group, Members, hits_of},
    support::{RedisServer, wait_for_async},
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 300, on_error: local}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 300, algorithm: token_bucket, on_error: local}
";

#[tokio::test]
async fn members_without_redis_allow_the_limit_together() {
    let mut redis = RedisServer::start();
    let group = Group::new(3, RULES).with_store(&redis.url());
    let members = Members::of(group, |_, builder| builder.set("cluster.instances", "3")).await;
    let [one, other, third] = &members.all[..] else { unreachable!() };
    one.take("window", 1).await;
    assert_eq!(third.remaining("window").await, 299, "Redis counts");
    redis.kill();
    for key in ["window", "bucket"] {
        for member in &members.all {
            // Local counters are empty: Redis has counted until now.
            wait_for_async("the outage to be detected", async || {
                let remaining = member.client.check(hits_of(key, 0)).await.ok()?.remaining();
                (remaining == Some(300)).then_some(())
            })
            .await;
        }
        one.take(key, 150).await;
        other.wait_for_remaining(key, 150).await;
        other.take(key, 100).await;
        third.wait_for_remaining(key, 50).await;
        assert_eq!(third.exhaust(key).await, 50);
        members.wait_for_remaining(key, 0).await;
        for member in &members.all {
            assert!(!member.is_allowed(key, 1).await, "{key}");
        }
    }
}
