//! Every algorithm through the real service: keywords of rules, contents of answers, and charges. The example rule
//! files are tested as well.

use std::time::Duration;

use sluicegate_proto::envoy::service::ratelimit::v3::rate_limit_response::Code;

use crate::support::{
    RedisServer, Server, descriptor,
    raw_client::{Answer, Client, Descriptor, Request},
    repository, request_for, rules,
};

/// The service with the same rules on each store.
struct BothStores {
    servers: Vec<(&'static str, Server)>,
    _redis: RedisServer,
}

impl BothStores {
    fn start(text: &str, settings: &[(&str, &str)]) -> Self {
        Self::start_folder(rules(&[("d.yaml", text)]).path(), settings)
    }

    fn start_folder(folder: &std::path::Path, settings: &[(&str, &str)]) -> Self {
        let redis = RedisServer::start();
        let start = |store: &str| {
            let builder = Server::builder().rules(folder).store(store);
            let builder = builder.set("response.headers", "true").set("response.dynamic_metadata", "true");
            settings.iter().fold(builder, |builder, (key, value)| builder.set(key, value)).start()
        };
        let servers = vec![("memory", start("memory")), ("redis", start(&redis.url()))];
        Self { servers, _redis: redis }
    }

    async fn clients(&self) -> Vec<(&'static str, Client, &Server)> {
        let mut clients = Vec::new();
        for (store, server) in &self.servers {
            clients.push((*store, server.client().await, server));
        }
        clients
    }
}

async fn check(client: &Client, request: Request) -> Answer {
    client.check(request).await.unwrap()
}

fn request_with_cost(entries: &[(&str, &str)], hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(entries).hits(hits))
}

/// Returns whether each status is OK, and its remaining hits.
fn statuses(answer: &Answer) -> Vec<(bool, u32)> {
    let statuses = answer.0.statuses.iter();
    statuses.map(|status| (status.code() == Code::Ok, status.limit_remaining)).collect()
}

fn header<'a>(answer: &'a Answer, name: &str) -> Option<&'a str> {
    let mut headers = answer.0.response_headers_to_add.iter();
    headers.find(|header| header.key == name).map(|header| header.value.as_str())
}

/// Returns how many single hits are allowed before the first denial.
async fn count_allowed(client: &Client, key: &str, value: &str) -> usize {
    for passed in 0..100 {
        if !check(client, request_for("d", &[(key, value)])).await.allowed() {
            return passed;
        }
    }
    panic!("{key} never denies");
}

const RULES: &str = "
domain: d
descriptors:
- key: fixed
  rate_limit: {unit: year, requests_per_unit: 5}
- key: fixed_uncounted
  rate_limit: {unit: year, requests_per_unit: 5, count_denied: false}
- key: first
  rate_limit: {unit: year, requests_per_unit: 5, window: first_request, count_denied: false}
- key: sliding
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: sliding_window}
- key: buckets
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: sliding_window, buckets: 6, edge: strict}
- key: log
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: sliding_log}
- key: tokens
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: token_bucket}
- key: leaky
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: leaky_bucket}
- key: gcra
  rate_limit: {unit: year, requests_per_unit: 100, algorithm: gcra, burst: 5}
- key: queue
  rate_limit: {unit: hour, requests_per_unit: 10, algorithm: leaky_bucket, burst: 1, queue: 2}
- key: warm
  rate_limit: {unit: hour, requests_per_unit: 5, algorithm: token_bucket, warm_up: 1h}
- key: spaced
  rate_limit: {unit: hour, requests_per_unit: 5, algorithm: sliding_log, min_interval: 1h}
- key: soft
  rate_limit: {unit: year, requests_per_unit: 10, algorithm: token_bucket, soft: 20%}
- key: address
  ip_prefix: {v4: 24, v6: 64}
  rate_limit: {unit: year, requests_per_unit: 2}
";

#[tokio::test]
async fn every_algorithm_allows_exactly_its_limit() {
    let both = BothStores::start(RULES, &[]);
    for (store, client, _) in both.clients().await {
        for key in ["fixed", "fixed_uncounted", "first", "sliding", "buckets", "log", "tokens", "leaky", "gcra"] {
            assert_eq!(count_allowed(&client, key, "one").await, 5, "{store}: {key}");
            // A denied cost takes nothing unless denials are counted. A cost above the limit is denied as a whole.
            let answer = check(&client, request_with_cost(&[(key, "other")], 6)).await;
            let remaining = if key == "fixed" { 0 } else { 5 };
            assert_eq!(statuses(&answer), [(false, remaining)], "{store}: {key}");
            assert_eq!(header(&answer, "Retry-After"), None, "{store}: {key}: the cost exceeds the limit");
            assert!(answer.0.statuses[0].duration_until_reset.unwrap().seconds >= 1, "{store}: {key}");
            if key != "fixed" {
                assert_eq!(
                    statuses(&check(&client, request_with_cost(&[(key, "other")], 5)).await),
                    [(true, 0)],
                    "{store}: {key}"
                );
                let refund = Request::new("d").descriptor(descriptor(&[(key, "other")]).hits(2).refund());
                assert_eq!(statuses(&check(&client, refund).await), [(true, 2)], "{store}: {key}");
                assert_eq!(
                    statuses(&check(&client, request_with_cost(&[(key, "other")], 0)).await),
                    [(true, 2)],
                    "{store}: {key}"
                );
            }
        }
        assert_eq!(
            count_allowed(&client, "warm", "x").await,
            1,
            "{store}: the second waits until the first is paid for"
        );
        assert_eq!(count_allowed(&client, "spaced", "x").await, 1, "{store}");
        assert_eq!(count_allowed(&client, "queue", "x").await, 3, "{store}: one continues, two wait");
    }
}

#[tokio::test]
async fn answers_contain_the_exact_numbers() {
    let both = BothStores::start(RULES, &[]);
    for (store, client, _) in both.clients().await {
        // 10 requests per hour are one every 360 s, and two may wait.
        let answers = [
            check(&client, request_for("d", &[("queue", "x")])).await,
            check(&client, request_for("d", &[("queue", "x")])).await,
            check(&client, request_for("d", &[("queue", "x")])).await,
            check(&client, request_for("d", &[("queue", "x")])).await,
        ];
        let exact = answers.each_ref().map(|answer| answer.exact().remove(0));
        let near = |span: Option<Duration>, seconds: u64| {
            let (min, max) = (Duration::from_secs(seconds - 20), Duration::from_secs(seconds));
            span.is_some_and(|span| span > min && span <= max)
        };
        assert_eq!((exact[0].allowed, exact[0].delay, exact[0].remaining), (true, None, Some(2)), "{store}");
        assert!(near(exact[1].delay, 360) && near(exact[2].delay, 720), "{store}: {exact:?}");
        assert_eq!(answers[2].delay(), exact[2].delay);
        assert!(!exact[3].allowed && near(exact[3].retry_after, 360), "{store}: {exact:?}");
        assert!(near(exact[3].reset, 1080) && exact[3].delay.is_none(), "{store}: {exact:?}");
        // The field contains the retry-after, not the reset, in whole seconds, rounded up.
        let seconds = answers[3].0.statuses[0].duration_until_reset.unwrap().seconds;
        assert!((340..=360).contains(&seconds), "{store}: {seconds}");
        assert_eq!(header(&answers[3], "Retry-After"), Some(seconds.to_string().as_str()), "{store}");
        assert_eq!(header(&answers[2], "Retry-After"), None, "{store}");
        let unlimited = check(&client, request_for("d", &[("unknown", "x")])).await.exact().remove(0);
        assert_eq!((unlimited.allowed, unlimited.remaining, unlimited.reset), (true, None, None), "{store}");
    }
}

#[tokio::test]
async fn a_soft_limit_allows_more_and_marks_the_answers() {
    let both = BothStores::start(RULES, &[]);
    for (store, client, server) in both.clients().await {
        for hit in 1..=13 {
            let answer = check(&client, request_for("d", &[("soft", "x")])).await;
            let exact = answer.exact().remove(0);
            assert_eq!((answer.allowed(), exact.soft), (hit <= 12, (11..=12).contains(&hit)), "{store}: hit {hit}");
            assert_eq!(header(&answer, "RateLimit-Soft"), exact.soft.then_some("exceeded"), "{store}: hit {hit}");
            assert_eq!(exact.remaining, Some(10_u32.saturating_sub(hit)), "{store}: hit {hit}");
        }
        let labels = "{domain=\"d\",key1=\"soft\"}";
        let metrics = server.get("/metrics");
        let count = |name: &str| server.metric(&format!("ratelimit_service_rate_limit_{name}{labels}"));
        assert_eq!((count("soft_limit"), count("within_limit"), count("over_limit")), (2.0, 12.0, 1.0), "{metrics}");
    }
}

#[tokio::test]
async fn headers_can_follow_the_ietf_draft() {
    let both = BothStores::start(RULES, &[("response.header_style", "ietf-draft-11")]);
    for (store, client, _) in both.clients().await {
        let request =
            || Request::new("d").descriptor(descriptor(&[("gcra", "x")])).descriptor(descriptor(&[("log", "x")]));
        let answer = check(&client, request()).await;
        assert_eq!(header(&answer, "RateLimit-Limit"), None, "{store}");
        // A burst of 5 is available again after 5/100 of a year.
        let policy = r#""gcra";q=5;w=1576800, "log";q=5;w=31536000"#;
        assert_eq!(header(&answer, "RateLimit-Policy"), Some(policy), "{store}");
        assert_eq!(header(&answer, "RateLimit"), Some(r#""gcra";r=4;t=315360"#), "{store}: the next of 100 per year");
        for _ in 0..4 {
            check(&client, request()).await;
        }
        let denied = check(&client, request()).await;
        let limit = header(&denied, "RateLimit").unwrap();
        let seconds: u64 = limit.strip_prefix(r#""log";r=0;t="#).unwrap_or_else(|| panic!("{limit}")).parse().unwrap();
        let retry_after: u64 = header(&denied, "Retry-After").unwrap().parse().unwrap();
        assert!(seconds > 31_535_000 && seconds == retry_after, "{store}: {limit}, {retry_after}");
    }
}

#[tokio::test]
async fn addresses_are_counted_by_their_prefix() {
    let both = BothStores::start(RULES, &[]);
    for (store, client, _) in both.clients().await {
        for (address, expected) in [
            ("192.0.2.1", (true, 1)),
            ("::ffff:192.0.2.99", (true, 0)),
            ("192.0.2.200", (false, 0)),
            ("192.0.3.1", (true, 1)),
            ("2001:db8::1", (true, 1)),
            ("2001:DB8:0:0:ffff::1", (true, 0)),
            ("2001:db8:0:1::1", (true, 1)),
            ("no address", (true, 1)),
            ("nor this", (true, 1)),
        ] {
            assert_eq!(
                statuses(&check(&client, request_for("d", &[("address", address)])).await),
                [expected],
                "{store}: {address}"
            );
        }
    }
}

const CHARGE_ALL: &str = "
domain: d
charge: all
descriptors:
- key: wide
  rate_limit: {unit: year, requests_per_unit: 10, algorithm: token_bucket}
- key: narrow
  rate_limit: {unit: year, requests_per_unit: 2}
- key: dark
  shadow_mode: true
  rate_limit: {unit: year, requests_per_unit: 1}
- key: soft
  rate_limit: {unit: year, requests_per_unit: 1, soft: 100%}
";

#[tokio::test]
async fn charge_all_takes_from_all_limits_or_from_none() {
    let both = BothStores::start(CHARGE_ALL, &[]);
    for (store, client, server) in both.clients().await {
        let request = |hits| {
            let one = |key: &str| descriptor(&[(key, "x")]).hits(hits);
            Request::new("d").descriptor(one("wide")).descriptor(one("narrow")).descriptor(one("dark"))
        };
        assert_eq!(statuses(&check(&client, request(1)).await), [(true, 9), (true, 1), (true, 0)], "{store}");
        // A rule in shadow mode does not deny.
        assert_eq!(statuses(&check(&client, request(1)).await), [(true, 8), (true, 0), (true, 0)], "{store}");
        for _ in 0..3 {
            let answer = check(&client, request(1)).await;
            assert_eq!(statuses(&answer), [(true, 8), (false, 0), (true, 0)], "{store}: nothing is taken");
        }
        // The statistics do not count these hits as within a limit, and only the limit that denied them as over it.
        let count = |name: &str, key: &str| {
            server.metric(&format!("ratelimit_service_rate_limit_{name}{{domain=\"d\",key1=\"{key}\"}}"))
        };
        assert_eq!((count("within_limit", "wide"), count("over_limit", "narrow")), (2.0, 3.0), "{store}");
        assert_eq!((count("total_hits", "wide"), count("within_limit", "dark")), (5.0, 1.0), "{store}");
        // The counter of `narrow` does not contain the denied hits either.
        let refund = Request::new("d").descriptor(descriptor(&[("narrow", "x")]).hits(1).refund());
        assert_eq!(statuses(&check(&client, refund).await), [(true, 1)], "{store}");
        // A counter that a request uses twice is charged for the sum, or not at all.
        let twice = |hits| {
            let one = descriptor(&[("wide", "x")]).hits(hits);
            Request::new("d").descriptor(one.clone()).descriptor(one)
        };
        assert_eq!(statuses(&check(&client, twice(5)).await), [(false, 8), (false, 8)], "{store}");
        assert_eq!(statuses(&check(&client, twice(4)).await), [(true, 0), (true, 0)], "{store}");
        // A request with one limit is charged as with `each`: of a denied cost, the hits below the limit count as
        // within it.
        let alone = |hits| Request::new("d").descriptor(descriptor(&[("narrow", "alone")]).hits(hits));
        let (within, over) = (count("within_limit", "narrow"), count("over_limit", "narrow"));
        assert_eq!(statuses(&check(&client, alone(5)).await), [(false, 0)], "{store}");
        let counted = (count("within_limit", "narrow") - within, count("over_limit", "narrow") - over);
        assert_eq!(counted, (2.0, 3.0), "{store}");
        // A limit from which nothing is taken reports the decision for a take: the second hit would exceed the soft
        // limit.
        let soft = || Request::new("d").descriptor(descriptor(&[("soft", "x")]).hits(1));
        let taken = check(&client, soft().descriptor(descriptor(&[("wide", "soft")]).hits(1))).await;
        assert!(taken.allowed() && !taken.exact()[0].soft, "{store}");
        let denied = check(&client, soft().descriptor(descriptor(&[("narrow", "alone")]).hits(5))).await;
        assert!(!denied.allowed() && denied.exact()[0].soft, "{store}");
    }
}

/// Many concurrent callers use two limits in opposite order: neither limit is exceeded, and no caller blocks another
/// forever.
#[tokio::test]
async fn charge_all_is_atomic() {
    let text = "
domain: d
charge: all
descriptors:
- {key: a, rate_limit: {unit: year, requests_per_unit: 300, algorithm: token_bucket}}
- {key: b, rate_limit: {unit: year, requests_per_unit: 200, algorithm: sliding_window}}
";
    let both = BothStores::start(text, &[]);
    for (store, client, _) in both.clients().await {
        let mut callers = tokio::task::JoinSet::new();
        for caller in 0..64 {
            let client = client.clone();
            callers.spawn(async move {
                let keys = if caller % 2 == 0 { ["a", "b"] } else { ["b", "a"] };
                let mut passed = 0;
                for _ in 0..10 {
                    let request = keys
                        .iter()
                        .fold(Request::new("d"), |request, key| request.descriptor(descriptor(&[(key, "x")])));
                    passed += usize::from(check(&client, request).await.allowed());
                }
                passed
            });
        }
        assert_eq!(callers.join_all().await.into_iter().sum::<usize>(), 200, "{store}");
        let peek = Request::new("d")
            .descriptor(descriptor(&[("a", "x")]).hits(0))
            .descriptor(descriptor(&[("b", "x")]).hits(0));
        assert_eq!(
            statuses(&check(&client, peek).await),
            [(true, 100), (true, 0)],
            "{store}: denied requests took nothing"
        );
    }
}

#[tokio::test]
async fn the_example_rules_work_as_described() {
    let both = BothStores::start_folder(&repository("deploy/examples"), &[]);
    for (store, client, server) in both.clients().await {
        let page = server.get("/rlconfig");
        assert!(
            page.contains("plans.user.plan_pro: unit=SECOND algorithm=token_bucket requests_per_unit=1000"),
            "{page}"
        );
        for (plan, limit) in [("free", 50), ("standard", 500), ("pro", 1_000), ("gold", 50)] {
            let user = descriptor(&[("user", plan), ("plan", plan)]);
            let answer = check(&client, Request::new("plans").descriptor(user.hits(limit))).await;
            assert_eq!(answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit, limit as u32);
            assert!(answer.allowed(), "{store}: {plan}");
        }
        let known = check(&client, request_for("plans", &[("user", "acme")])).await;
        assert_eq!(known.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit, 1_000, "{store}");
        let export = |id| request_for("plans", &[("exporter", "alice"), ("plan", "free"), ("request_id", id)]);
        assert!(check(&client, export("1")).await.allowed() && !check(&client, export("2")).await.allowed(), "{store}");

        // Critical requests may use all slots, all other requests four fifths of them.
        let fleet = |priority, id: usize| {
            request_for("shedding", &[("fleet", "api"), ("priority", priority), ("request_id", &id.to_string())])
        };
        for id in 0..82 {
            assert_eq!(check(&client, fleet("get", id)).await.allowed(), id < 80, "{store}: {id}");
        }
        for id in 100..121 {
            assert_eq!(check(&client, fleet("critical", id)).await.allowed(), id < 120, "{store}: {id}");
        }
        let tenant = |tenant, hits| {
            Request::new("shedding").descriptor(descriptor(&[("upstream", "search"), ("tenant", tenant)]).hits(hits))
        };
        assert!(!check(&client, tenant("free", 301)).await.allowed(), "{store}: free's maximum");
        assert!(check(&client, tenant("free", 300)).await.allowed(), "{store}");
        assert!(check(&client, tenant("gold", 700)).await.allowed(), "{store}: the capacity that free does not use");
        assert!(check(&client, request_for("shedding", &[("report", "x")])).await.allowed(), "{store}");
        for id in 0..21 {
            let slot = request_for("shedding", &[("learned", "search"), ("holder", &id.to_string())]);
            assert_eq!(check(&client, slot).await.allowed(), id < 20, "{store}");
        }

        // Five attempts for one account are allowed. Then further attempts, which are denied and counted, keep it
        // closed.
        let guess = |name: &str, address: &str| {
            let (name, address) = (descriptor(&[("login_name", name)]), descriptor(&[("remote_address", address)]));
            Request::new("login").descriptor(name).descriptor(address)
        };
        for attempt in 1..=10 {
            let answer = check(&client, guess("alice", "2001:db8::1")).await;
            assert_eq!(answer.allowed(), attempt <= 5, "{store}: attempt {attempt}");
        }
        let answer = check(&client, guess("alice", "198.51.100.1")).await;
        assert_eq!(statuses(&answer)[0], (false, 0), "{store}: the account has the same limit from another address");
        // Ten more accounts from the same network are allowed. Then all attempts of the address, including denied ones,
        // have reached its limit.
        for attempt in 11..=30 {
            let answer = check(&client, guess(&format!("user{attempt}"), &format!("2001:db8::{attempt}"))).await;
            assert_eq!(answer.allowed(), attempt <= 20, "{store}: attempt {attempt}");
        }

        let request = |user: &str| {
            let address = descriptor(&[("remote_address", "203.0.113.7")]);
            Request::new("hybrid").descriptor(address).descriptor(descriptor(&[("user", user)]))
        };
        let mut passed = 0;
        while check(&client, request("alice")).await.allowed() {
            passed += 1;
        }
        assert!((20..60).contains(&passed), "{store}: a burst of 20, and the hits refilled in the meantime: {passed}");
        assert!(check(&client, request("bob")).await.allowed(), "{store}");

        let tokens = || descriptor(&[("model", "large"), ("user", "alice")]);
        let llm = |descriptor: Descriptor| Request::new("llm").descriptor(descriptor);
        assert!(check(&client, llm(tokens().hits(15_000))).await.allowed(), "{store}");
        assert!(!check(&client, llm(tokens().hits(15_000))).await.allowed(), "{store}");
        // The answer was short, so that the unused tokens are refunded.
        assert!(check(&client, llm(tokens().hits(12_000).refund())).await.allowed(), "{store}");
        assert!(check(&client, llm(tokens().hits(15_000))).await.allowed(), "{store}");

        let export = |id: &str| descriptor(&[("user", "alice"), ("request_id", id)]);
        let in_flight = |descriptor: Descriptor| Request::new("in-flight").descriptor(descriptor);
        for number in 0..20 {
            assert!(check(&client, in_flight(export(&number.to_string()))).await.allowed(), "{store}");
        }
        assert!(!check(&client, in_flight(export("20"))).await.allowed(), "{store}");
        assert!(check(&client, in_flight(export("7").refund())).await.allowed(), "{store}");
        assert!(check(&client, in_flight(export("20"))).await.allowed(), "{store}");
    }
}
