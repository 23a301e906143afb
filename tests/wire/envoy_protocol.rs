//! Envoy's rate limit protocol over the wire. Every case runs with the memory store and with a real Redis.

use std::collections::BTreeMap;

use sluicegate_proto::envoy::service::ratelimit::v3::{
    RateLimitResponse, rate_limit_response::Code, rate_limit_service_client::RateLimitServiceClient,
};

use crate::support::{
    RedisServer, Server, descriptor,
    raw_client::{Answer, Client, Descriptor, Request, Unit},
    request_for, rules,
};

const RULES: &str = "
domain: d
descriptors:
- key: few
  rate_limit: {unit: year, requests_per_unit: 3, name: few}
  metadata: {plan: basic}
- key: none
  rate_limit: {unit: year, requests_per_unit: 0}
- key: many
  rate_limit: {unit: year, unit_multiplier: 2, requests_per_unit: 4294967295}
- key: free
  rate_limit: {unlimited: true}
- key: allowed
- key: shadow
  shadow_mode: true
  rate_limit: {unit: year, requests_per_unit: 1}
  metadata: {team: edge, deep: {a: 1}}
- key: quota
  quota_mode: true
  rate_limit: {unit: year, requests_per_unit: 1}
- key: strict
  rate_limit: {unit: year, requests_per_unit: 1, replaces: [{name: few}]}
- key: file
  value: files/*
  share_threshold: true
  rate_limit: {unit: year, requests_per_unit: 2}
- key: file
  value: own/*
  rate_limit: {unit: year, requests_per_unit: 1}
";

/// A running service on each store, with the settings of the case.
struct Both {
    servers: Vec<(&'static str, Server)>,
    _redis: RedisServer,
}

impl Both {
    fn start(settings: &[(&str, &str)]) -> Self {
        let redis = RedisServer::start();
        let rules = rules(&[("d.yaml", RULES)]);
        let start = |store: &str| {
            let builder = Server::builder().rules(rules.path()).store(store);
            settings.iter().fold(builder, |builder, (key, value)| builder.set(key, value)).start()
        };
        let servers = vec![("memory", start("memory")), ("redis", start(&redis.url()))];
        Self { servers, _redis: redis }
    }

    async fn clients(&self) -> Vec<(&'static str, Client)> {
        let mut clients = Vec::new();
        for (store, server) in &self.servers {
            clients.push((*store, server.client().await));
        }
        clients
    }
}

async fn check(client: &Client, request: Request) -> Answer {
    client.check(request).await.unwrap()
}

/// Returns the overall decision, and the decision and remaining of each status.
fn brief(answer: &Answer) -> (bool, Vec<(bool, u32)>) {
    let statuses = answer.0.statuses.iter();
    (answer.allowed(), statuses.map(|status| (status.code() == Code::Ok, status.limit_remaining)).collect())
}

#[tokio::test]
async fn hits_are_counted_and_denied_above_the_limit() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        for (cost, expected) in
            [(1, (true, 2)), (0, (true, 2)), (2, (true, 0)), (0, (true, 0)), (1, (false, 0)), (0, (false, 0))]
        {
            let request = Request::new("d").descriptor(descriptor(&[("few", "x")]).hits(cost));
            let answer = check(&client, request).await;
            assert_eq!(brief(&answer), (expected.0, vec![expected]), "{store}, {cost} hits");
            let limit = answer.0.statuses[0].current_limit.clone().unwrap();
            assert_eq!(
                (limit.requests_per_unit, limit.unit, limit.name.as_str(), limit.unit_multiplier),
                (3, 6, "few", None)
            );
            let reset = answer.0.statuses[0].duration_until_reset.unwrap();
            assert!((1..=31_536_000).contains(&reset.seconds) && reset.nanos == 0);
        }
        assert_eq!(
            brief(&check(&client, request_for("d", &[("few", "y")])).await),
            (true, vec![(true, 2)]),
            "{store}: each value has its own counter"
        );
        assert_eq!(
            brief(&check(&client, request_for("d", &[("none", "x")])).await),
            (false, vec![(false, 0)]),
            "{store}"
        );
    }
}

/// Headers such as `date` and `content-length` would add work to every response.
#[tokio::test]
async fn a_response_has_only_the_headers_of_grpc() {
    let server = Server::builder().start();
    let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
    let answer = service.should_rate_limit(request_for("example", &[("user", "bob")]).into_message()).await.unwrap();
    let mut names: Vec<_> = answer.metadata().as_ref().keys().map(http::HeaderName::as_str).collect();
    names.sort_unstable();
    assert_eq!(names, ["content-type", "grpc-status"]);
}

#[tokio::test]
async fn descriptors_without_a_limit_are_allowed() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        for (request, remaining) in [
            (request_for("elsewhere", &[("few", "x")]), 0),
            (request_for("d", &[("unknown", "x")]), 0),
            (request_for("d", &[("allowed", "x")]), 0),
            (request_for("d", &[("few", "x"), ("deeper", "y")]), 0),
            (request_for("d", &[]), 0),
            (request_for("d", &[("free", "x")]), u32::MAX),
        ] {
            let answer = check(&client, request.clone()).await;
            assert_eq!(brief(&answer), (true, vec![(true, remaining)]), "{store}: {request:?}");
            assert!(
                answer.0.statuses[0].current_limit.is_none() && answer.0.statuses[0].duration_until_reset.is_none()
            );
        }
    }
}

#[tokio::test]
async fn a_refund_never_exceeds_the_full_limit() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        let few = || descriptor(&[("few", "x")]);
        for (descriptor, expected) in [
            (few().hits(5), (false, 0)),
            (few().hits(3).refund(), (true, 1)),
            (few().hits(1), (true, 0)),
            (few().hits(u64::MAX).refund(), (true, 3)),
            (few(), (true, 2)),
            (few().hits(2).refund(), (true, 3)),
        ] {
            let answer = check(&client, Request::new("d").descriptor(descriptor.clone())).await;
            assert_eq!(brief(&answer), (expected.0, vec![expected]), "{store}: {descriptor:?}");
        }
    }
    for (store, server) in &both.servers {
        let hits =
            |count: &str| server.metric(&format!("ratelimit_service_rate_limit_{count}{{domain=\"d\",key1=\"few\"}}"));
        assert_eq!(hits("total_hits"), 7.0, "{store}: refunds are not among them");
        assert!(hits("total_negative_hits") > 5.0, "{store}");
    }
}

#[tokio::test]
async fn every_number_of_hits_is_valid() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        for (hits, expected) in [
            (4_294_967_295, (true, 0)),
            (1, (false, 0)),
            (u64::MAX, (false, 0)),
            (u64::MAX, (false, 0)),
            (1 << 53, (false, 0)),
        ] {
            let answer = check(&client, Request::new("d").descriptor(descriptor(&[("many", "x")]).hits(hits))).await;
            assert_eq!(brief(&answer), (expected.0, vec![expected]), "{store}: {hits} hits");
            let limit = answer.0.statuses[0].current_limit.clone().unwrap();
            assert_eq!(limit.unit_multiplier, Some(2));
        }
        let request = Request::new("d").descriptor(descriptor(&[("many", "x")]).hits(u64::MAX).refund());
        assert_eq!(brief(&check(&client, request).await), (true, vec![(true, u32::MAX)]), "{store}");
    }
}

#[tokio::test]
async fn one_request_counts_several_descriptors() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        let request = Request::new("d")
            .hits(2)
            .descriptor(descriptor(&[("few", "x")]))
            .descriptor(descriptor(&[("few", "x")]))
            .descriptor(descriptor(&[("few", "y")]).hits(1))
            .descriptor(descriptor(&[("unknown", "z")]));
        let answer = check(&client, request).await;
        let expected = vec![(true, 1), (false, 0), (true, 2), (true, 0)];
        assert_eq!(brief(&answer), (false, expected), "{store}: the same descriptor twice takes twice");
    }
}

#[tokio::test]
async fn shadow_mode_quota_mode_replaces_and_shared_wildcards_are_applied() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        for expected in [0, 0] {
            assert_eq!(
                brief(&check(&client, request_for("d", &[("shadow", "x")])).await),
                (true, vec![(true, expected)]),
                "{store}"
            );
        }
        let quota = |a: &str, b: &str| {
            Request::new("d").descriptor(descriptor(&[("quota", a)])).descriptor(descriptor(&[("quota", b)]))
        };
        assert!(check(&client, quota("a", "b")).await.allowed(), "{store}");
        assert!(
            check(&client, quota("a", "c")).await.allowed(),
            "{store}: only one of two quota rules is over its limit"
        );
        assert!(!check(&client, quota("a", "b")).await.allowed(), "{store}: both quota rules are over their limits");
        let replaced =
            Request::new("d").descriptor(descriptor(&[("few", "r")])).descriptor(descriptor(&[("strict", "r")]));
        assert_eq!(brief(&check(&client, replaced).await), (true, vec![(true, 0), (true, 0)]), "{store}");
        assert_eq!(
            brief(&check(&client, request_for("d", &[("few", "r")])).await),
            (true, vec![(true, 2)]),
            "{store}: a replaced limit counts nothing"
        );
        for (value, expected) in [
            ("files/a", (true, 1)),
            ("files/b", (true, 0)),
            ("files/*", (false, 0)),
            ("own/a", (true, 0)),
            ("own/b", (true, 0)),
        ] {
            let answer = check(&client, request_for("d", &[("file", value)])).await;
            assert_eq!(brief(&answer), (expected.0, vec![expected]), "{store}: {value}");
        }
    }
}

#[tokio::test]
async fn a_requested_limit_replaces_the_rule_and_uses_its_counter() {
    let both = Both::start(&[]);
    for (store, client) in both.clients().await {
        let few = |limit| Request::new("d").descriptor(descriptor(&[("few", "o")]).limit(limit, Unit::Year, None));
        for _ in 0..3 {
            check(&client, request_for("d", &[("few", "o")])).await;
        }
        let answer = check(&client, few(5)).await;
        assert_eq!(
            brief(&answer),
            (true, vec![(true, 1)]),
            "{store}: of 5 hits, 3 were taken under the rule and 1 now"
        );
        let limit = answer.0.statuses[0].current_limit.clone().unwrap();
        assert_eq!((limit.requests_per_unit, limit.name.as_str()), (5, ""));
        let unmatched = Descriptor::new().entry("nothing", "x").limit(1, Unit::Hour, Some(3));
        let answer = check(&client, Request::new("d").descriptor(unmatched.clone())).await;
        assert_eq!(answer.0.statuses[0].current_limit.clone().unwrap().unit_multiplier, Some(3), "{store}");
        assert!(!check(&client, Request::new("d").descriptor(unmatched)).await.allowed(), "{store}");
        let elsewhere = Descriptor::new().entry("few", "x").limit(0, Unit::Hour, None);
        assert!(check(&client, Request::new("elsewhere").descriptor(elsewhere)).await.allowed(), "{store}");
    }
}

fn headers(response: &RateLimitResponse) -> BTreeMap<&str, &str> {
    response.response_headers_to_add.iter().map(|header| (header.key.as_str(), header.value.as_str())).collect()
}

#[tokio::test]
async fn headers_and_metadata_are_added_if_configured() {
    let settings =
        [("response.headers", "true"), ("response.limit_header", "X-Limit"), ("response.dynamic_metadata", "true")];
    let both = Both::start(&settings);
    for (store, client) in both.clients().await {
        let request = Request::new("d")
            .descriptor(descriptor(&[("few", "h")]))
            .descriptor(descriptor(&[("shadow", "h")]).hits(0))
            .descriptor(descriptor(&[("many", "h")]));
        let answer = check(&client, request).await.0;
        let headers = headers(&answer);
        assert_eq!((headers["X-Limit"], headers["RateLimit-Remaining"]), ("1", "1"), "{store}: the minimum remaining");
        assert!(headers["RateLimit-Reset"].parse::<u32>().unwrap() > 0);
        let metadata = format!("{:?}", answer.dynamic_metadata.unwrap());
        for part in ["\"domain\"", "few=h", "hitsAddend", "\"team\"", "\"edge\"", "\"plan\""] {
            assert!(metadata.contains(part), "{store}: {part} in {metadata}");
        }
        // The metadata also contains the requested limit and the cost.
        let own = descriptor(&[("own", "h")]).limit(7, Unit::Hour, None);
        let answer = check(&client, Request::new("d").descriptor(own).hits(3)).await.0;
        let metadata = format!("{:?}", answer.dynamic_metadata.unwrap());
        for part in ["requests_per_unit:7 unit:HOUR", "\"hitsAddend\": Value { kind: Some(NumberValue(3.0)) }"] {
            assert!(metadata.contains(part), "{store}: {part} in {metadata}");
        }
        // The metadata of a rule that denies is not added.
        let denied = check(&client, request_for("d", &[("few", "h")]).hits(9)).await.0;
        let metadata = format!("{:?}", denied.dynamic_metadata);
        assert!(denied.dynamic_metadata.is_some() && !metadata.contains("\"plan\""), "{store}: {metadata}");
        let unlimited = check(&client, request_for("d", &[("free", "h")])).await.0;
        assert!(unlimited.response_headers_to_add.is_empty(), "{store}");
    }
}

#[tokio::test]
async fn global_modes_apply_to_all_rules() {
    let shadow = Both::start(&[("decisions.shadow_mode", "true")]);
    for (store, client) in shadow.clients().await {
        assert_eq!(
            brief(&check(&client, request_for("d", &[("none", "x")])).await),
            (true, vec![(false, 0)]),
            "{store}"
        );
    }
    for (store, server) in &shadow.servers {
        assert_eq!(server.metric("ratelimit_service_global_shadow_mode"), 1.0, "{store}");
    }
    let quota = Both::start(&[("decisions.quota_mode", "true")]);
    for (store, client) in quota.clients().await {
        let none = || descriptor(&[("none", "x")]);
        let one = Request::new("d").descriptor(none()).descriptor(descriptor(&[("few", "x")]));
        assert!(check(&client, one).await.allowed(), "{store}");
        let free = Request::new("d").descriptor(none()).descriptor(descriptor(&[("unmatched", "x")]));
        assert!(check(&client, free).await.allowed(), "{store}");
        let all = Request::new("d").descriptor(none()).descriptor(none());
        assert!(!check(&client, all).await.allowed(), "{store}");
    }
}
