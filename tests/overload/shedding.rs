//! Overload protection over the wire: shedding by class, denials that report it, elastic limits, and plans.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use sluicegate_client::shed::{DEFAULT_CLASSES, LoadShedder, Settings, Signal};
use sluicegate_proto::sluicegate::v1::{
    GetRequest, ReportRequest, Utilization, resource_service_client::ResourceServiceClient,
};
use tokio::task::JoinSet;

use crate::support::{
    RedisServer, Server, descriptor,
    raw_client::{Answer, Client, Request},
    ring, rules,
    server::{agent, get, post},
    wait_for, wait_for_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: fleet
  rate_limit: {capacity: 10, hold: 1h, holder: id, class: priority, reserve: {critical: 20%}}
- key: tenants
  rate_limit: {capacity: 100/h, class: tenant, shares: {gold: {min: 40}, free: {min: 10, max: 30}, other: {max: 20}}}
- key: backend
  rate_limit: {unit: year, requests_per_unit: 1, shed: true}
- key: own
  rate_limit: {unit: year, requests_per_unit: 1}
- key: report
  rate_limit: {unit: year, requests_per_unit: 10, elastic: {resource: db, up_to: 200%}}
";

fn start(store: &str) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    let builder = Server::builder().rules(folder.path()).store(store);
    builder.set("response.headers", "true").set("response.dynamic_metadata", "true").start()
}

fn request(entries: &[(&str, &str)]) -> Request {
    Request::new("d").descriptor(descriptor(entries))
}

async fn allowed(client: &Client, entries: &[(&str, &str)]) -> bool {
    client.check(request(entries)).await.unwrap().allowed()
}

/// Sends a request to `/json` and returns the status code, the header `Retry-After`, and the body.
fn check_by_json(server: &Server, descriptors: &[&[(&str, &str)]]) -> (u16, Option<String>, Value) {
    let entry = |(key, value): &(&str, &str)| json!({"key": key, "value": value});
    let descriptors: Vec<_> =
        descriptors.iter().map(|entries| json!({"entries": entries.iter().map(entry).collect::<Vec<_>>()})).collect();
    let body = json!({"domain": "d", "descriptors": descriptors}).to_string();
    let mut response = agent().post(server.url("/json")).send(body.as_bytes()).unwrap();
    let wait = response.headers().get("retry-after").map(|wait| wait.to_str().unwrap().to_owned());
    let text = response.body_mut().read_to_string().unwrap();
    (response.status().as_u16(), wait, serde_json::from_str(&text).unwrap())
}

#[tokio::test]
async fn a_reserve_is_available_to_its_class_and_other_classes_are_shed() {
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = start(store);
        let client = server.client().await;
        let mut id = 0;
        let mut take = async |priority: &str| {
            id += 1;
            let answer = client.check(request(&[("fleet", "api"), ("priority", priority), ("id", &id.to_string())]));
            answer.await.unwrap().allowed()
        };
        for priority in ["get", "post", "get", "test", "whatever", "", "get", "get"] {
            assert!(take(priority).await, "{store}: {priority}");
        }
        assert!(!take("get").await && !take("post").await, "{store}: other classes get four fifths");
        assert!(take("critical").await && take("critical").await && !take("critical").await, "{store}");
        // A critical request takes a released slot, and then all slots are in use again.
        let release = descriptor(&[("fleet", "api"), ("priority", "get"), ("id", "1")]).refund();
        client.check(Request::new("d").descriptor(release)).await.unwrap();
        assert!(take("critical").await && !take("get").await, "{store}");
        let (code, wait, answer) = check_by_json(&server, &[&[("fleet", "api"), ("priority", "get"), ("id", "x")]]);
        assert_eq!(code, 503);
        assert!(wait.unwrap().parse::<u64>().unwrap() > 3_500);
        assert_eq!(answer["dynamicMetadata"]["sluicegate.shed"], json!(true));
        assert_eq!(answer["dynamicMetadata"]["sluicegate.statuses"][0]["shed"], json!(true));
        let series = |class: &str, outcome: &str| {
            format!(
                "sluicegate_class_hits_total{{class=\"{class}\",domain=\"d\",key1=\"fleet\",outcome=\"{outcome}\"}}"
            )
        };
        let page = server.get("/metrics");
        let metric = |class: &str, outcome: &str| server.metric(&series(class, outcome));
        assert_eq!((metric("other", "allowed"), metric("other", "shed")), (8.0, 4.0), "{page}");
        assert_eq!((metric("critical", "allowed"), metric("critical", "shed")), (3.0, 1.0));
        let since = |class: &str| {
            server.metric(&format!(
                "sluicegate_shedding_since_timestamp_seconds{{class=\"{class}\",domain=\"d\",key1=\"fleet\"}}"
            ))
        };
        assert!(since("other") > 1.7e9 && since("critical") > 1.7e9);
        // With a reserve, every denial is overload, also if one class has all slots.
        for id in 0..10 {
            let id = id.to_string();
            assert!(
                allowed(&client, &[("fleet", "own"), ("priority", "critical"), ("id", &id)]).await,
                "{store}: {id}"
            );
        }
        let own = [("fleet", "own"), ("priority", "critical"), ("id", "x")];
        assert_eq!(check_by_json(&server, &[&own]).0, 503, "{store}");
    }
}

/// A denial by the caller's own limit has status 429, even if another limit of the request sheds.
#[tokio::test]
async fn a_denial_reports_whether_it_is_due_to_overload() {
    let server = start("memory");
    let client = server.client().await;
    assert!(allowed(&client, &[("backend", "x")]).await && allowed(&client, &[("own", "x")]).await);
    let code = |descriptors: &[&[(&str, &str)]]| check_by_json(&server, descriptors).0;
    assert_eq!(code(&[&[("backend", "x")]]), 503);
    assert_eq!(code(&[&[("own", "x")]]), 429);
    assert_eq!(code(&[&[("own", "x")], &[("backend", "x")]]), 429);
    assert_eq!(code(&[&[("own", "y")], &[("backend", "x")]]), 503);
    let (_, wait, answer) = check_by_json(&server, &[&[("own", "x")]]);
    assert!(wait.is_some(), "response.headers is set, so each denial has its wait: {answer}");
    assert_eq!(answer["dynamicMetadata"]["sluicegate.shed"], Value::Null);
    // A denial above the maximum of a class is its own limit; a denial below is overload.
    for _ in 0..30 {
        assert!(allowed(&client, &[("tenants", "x"), ("tenant", "free")]).await);
    }
    assert_eq!(code(&[&[("tenants", "x"), ("tenant", "free")]]), 429);
    for _ in 0..70 {
        assert!(allowed(&client, &[("tenants", "x"), ("tenant", "gold")]).await);
    }
    assert_eq!(code(&[&[("tenants", "x"), ("tenant", "gold")]]), 503);
    assert_eq!(code(&[&[("tenants", "x"), ("tenant", "nobody")]]), 503);
    for (class, outcome, expected) in [("free", "denied", 1.0), ("free", "shed", 0.0), ("gold", "shed", 1.0)] {
        let labels = format!("class=\"{class}\",domain=\"d\",key1=\"tenants\",outcome=\"{outcome}\"");
        assert_eq!(server.metric(&format!("sluicegate_class_hits_total{{{labels}}}")), expected, "{class} {outcome}");
    }
    let limiter = sluicegate_client::Client::builder(format!("http://{}", server.grpc)).domain("d");
    let limiter = limiter.timeout(crate::support::DEADLINE).connect_lazy().unwrap();
    let shed = async |key: &str| limiter.check([sluicegate_client::Descriptor::new().entry(key, "x")]).await.shed();
    assert!(shed("backend").await && !shed("own").await);
}

/// With three instances and many callers, each class stays within its maximum, all classes stay within the capacity,
/// and each class gets its minimum.
#[tokio::test]
async fn shares_are_enforced_over_all_instances() {
    let redis = RedisServer::start();
    let (_nodes, ring) = ring(3);
    for url in [redis.url(), ring] {
        let servers = [start(&url), start(&url), start(&url)];
        let mut callers = JoinSet::new();
        for caller in 0..24 {
            let client = servers[caller % 3].client().await;
            let tenant = ["gold", "free", "stranger"][caller / 3 % 3];
            callers.spawn(async move {
                let mut hits = 0;
                for _ in 0..20 {
                    hits += u32::from(allowed(&client, &[("tenants", "x"), ("tenant", tenant)]).await);
                }
                (tenant, hits)
            });
        }
        let counts = callers.join_all().await;
        let total = |tenant| counts.iter().filter(|count| count.0 == tenant).map(|count| count.1).sum::<u32>();
        let [gold, free, stranger] = ["gold", "free", "stranger"].map(total);
        // The capacity is 100 per hour; at most one more becomes available during the test.
        assert!((100..=101).contains(&(gold + free + stranger)), "{gold} {free} {stranger}");
        assert!(gold >= 40 && (10..=30).contains(&free) && stranger <= 20, "{gold} {free} {stranger}");
    }
}

fn report(server: &Server, reporter: &str, utilization: f64, ttl: &str) -> (u16, String) {
    let body = json!({"reporter": reporter, "utilization": utilization, "ttl": ttl}).to_string();
    post(&server.url("/resources/db"), body.as_bytes())
}

/// Sends requests of a new user until one is denied. Returns the number of allowed requests, and how many of them are
/// marked as elastic.
async fn burst(client: &Client, user: &str) -> (usize, usize) {
    let mut answers: Vec<Answer> = Vec::new();
    loop {
        let answer = client.check(request(&[("report", user)])).await.unwrap();
        if !answer.allowed() {
            break;
        }
        // Limit and remaining do not include the elastic part.
        assert_eq!(answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit, 10);
        assert_eq!(answer.remaining(), Some(9_u32.saturating_sub(answers.len() as u32)));
        answers.push(answer);
    }
    let marked = |answer: &&Answer| {
        answer
            .0
            .response_headers_to_add
            .iter()
            .any(|header| header.key == "RateLimit-Soft" && header.value == "elastic")
    };
    (answers.len(), answers.iter().filter(marked).count())
}

#[tokio::test]
async fn an_elastic_limit_follows_the_spare_capacity_of_its_resource() {
    let redis = RedisServer::start();
    let (one, other) = (start(&redis.url()), start(&redis.url()));
    let client = other.client().await;
    let metric = || other.metric("sluicegate_resource_utilization{resource=\"db\"}");
    assert_eq!(burst(&client, "before").await, (10, 0), "there is no report");
    assert_eq!(report(&one, "db-1", 0.2, "1h"), (200, r#"{"reporters":1,"max":0.2,"mean":0.2}"#.into()));
    wait_for("the report at the other instance", || (metric() == 0.2).then_some(()));
    assert_eq!(burst(&client, "idle").await, (20, 10));
    // The highest reported utilization counts, and the limit shrinks accordingly.
    assert_eq!(report(&one, "db-2", 0.7, "1h").1, r#"{"reporters":2,"max":0.7,"mean":0.45}"#);
    wait_for("the report at the other instance", || (metric() == 0.7).then_some(()));
    assert_eq!(burst(&client, "half").await, (15, 5));
    report(&one, "db-2", 0.95, "3s");
    wait_for("the report at the other instance", || (metric() == 0.95).then_some(()));
    assert_eq!(burst(&client, "busy").await, (10, 0));
    // Denials are not cached, so they end as soon as there is spare capacity.
    let limiter = sluicegate_client::Client::builder(format!("http://{}", other.grpc)).domain("d");
    let limiter = limiter.timeout(crate::support::DEADLINE).connect_lazy().unwrap();
    let is_allowed = async || limiter.check([sluicegate_client::descriptor! { "report" => "busy" }]).await.allowed();
    assert!(!is_allowed().await && !is_allowed().await);
    wait_for_async("the denial to end", async || is_allowed().await.then_some(())).await;
    wait_for("the report to expire", || (metric() == 0.2).then_some(()));
    assert_eq!(burst(&client, "again").await, (20, 10));
    drop(redis);
    wait_for("the utilization without a store", || (metric() == 1.0).then_some(()));
}

#[tokio::test]
async fn resources_are_reported_by_both_protocols_and_invalid_reports_are_rejected() {
    let server = start("memory");
    let url = format!("http://{}", server.grpc);
    let mut grpc =
        wait_for_async("a connection", async || ResourceServiceClient::connect(url.clone()).await.ok()).await;
    let get_request = |resource: &str| GetRequest { resource: resource.into() };
    assert_eq!(grpc.get(get_request("cache")).await.unwrap().into_inner(), Utilization::default());
    let report_request = |reporter: &str, utilization| ReportRequest {
        resource: "cache".into(),
        reporter: reporter.into(),
        utilization,
        ttl_us: 60_000_000,
    };
    grpc.report(report_request("a", 0.5)).await.unwrap();
    let both = grpc.report(report_request("b", 7.0)).await.unwrap().into_inner();
    assert_eq!(both, Utilization { reporters: 2, max: 1.0, mean: 0.75 });
    assert_eq!(get(&server.url("/resources/cache")), (200, r#"{"reporters":2,"max":1.0,"mean":0.75}"#.into()));
    assert_eq!(get(&server.url("/resources/nothing")), (200, r#"{"reporters":0}"#.into()));
    let day = 86_400_000_000;
    for invalid in [
        ReportRequest { resource: String::new(), ..report_request("a", 0.5) },
        ReportRequest { resource: "x".repeat(257), ..report_request("a", 0.5) },
        report_request("", 0.5),
        report_request("a", f64::NAN),
        report_request("a", -0.1),
        report_request("a", f64::INFINITY),
        ReportRequest { ttl_us: 0, ..report_request("a", 0.5) },
        ReportRequest { ttl_us: day, ..report_request("a", 0.5) },
    ] {
        assert_eq!(grpc.report(invalid.clone()).await.unwrap_err().code(), tonic::Code::InvalidArgument, "{invalid:?}");
    }
    for body in [
        "",
        "{}",
        r#"{"reporter":"a","utilization":"much","ttl":"1s"}"#,
        r#"{"reporter":"a","utilization":0.5,"ttl":"soon"}"#,
    ] {
        let (code, text) = post(&server.url("/resources/db"), body.as_bytes());
        assert_eq!(code, 400, "{body}: {text}");
    }
    assert_eq!(
        report(&server, "a", -1.0, "1s"),
        (400, "utilization must be a number of at least 0; numbers above 1 count as 1\n".into())
    );
    assert_eq!(report(&server, "a", 0.5, "2h").0, 400);
    // A resource has at most 1,000 reporters; two exist already.
    let mut calls = JoinSet::new();
    for number in 0..1_100 {
        let mut grpc = grpc.clone();
        let report = report_request(&format!("reporter-{number}"), 0.1);
        calls.spawn(async move { grpc.report(report).await.map(drop).map_err(|error| error.code()) });
    }
    let outcomes = calls.join_all().await;
    let rejected = outcomes.iter().filter(|outcome| **outcome == Err(tonic::Code::ResourceExhausted)).count();
    assert_eq!((rejected, outcomes.iter().filter(|outcome| outcome.is_ok()).count()), (102, 998));
}

const PLANS: &str = "
domain: d
plans:
  default: free
  limits:
    free: {calls: {unit: year, requests_per_unit: 2}, jobs: {algorithm: concurrency, limit: 1, holder: id}}
    pro: {calls: {unit: year, requests_per_unit: 5, name: pro}, jobs: {algorithm: concurrency, limit: 2, holder: id}}
    all: {calls: {unlimited: true}, jobs: {algorithm: concurrency, limit: 9, holder: id}}
  entities:
    user: {bob: pro}
descriptors:
- key: user
  rate_limit: {by_plan: calls}
- key: worker
  rate_limit: {by_plan: jobs}
";

#[tokio::test]
async fn a_plan_comes_from_the_request_or_from_the_table() {
    let folder = rules(&[("d.yaml", PLANS)]);
    let redis = RedisServer::start();
    for store in ["memory", &redis.url()] {
        let server = Server::start(folder.path(), store);
        let client = server.client().await;
        let limit = async |entries: &[(&str, &str)]| {
            let answer = client.check(request(entries)).await.unwrap();
            answer.0.statuses[0]
                .current_limit
                .as_ref()
                .map(|limit| (limit.requests_per_unit, answer.remaining().unwrap()))
        };
        assert_eq!(limit(&[("user", "alice")]).await, Some((2, 1)));
        assert_eq!(limit(&[("user", "alice"), ("plan", "pro")]).await, Some((5, 3)), "used hits remain counted");
        assert_eq!(limit(&[("user", "alice"), ("plan", "all")]).await, None);
        assert_eq!(limit(&[("user", "bob")]).await, Some((5, 4)));
        assert_eq!(
            limit(&[("user", "bob"), ("plan", "free")]).await,
            Some((2, 0)),
            "the plan in the request takes precedence"
        );
        assert_eq!(limit(&[("user", "carol"), ("plan", "gold")]).await, Some((2, 1)));
        assert_eq!(server.metric("sluicegate_plan_not_found_total"), 1.0);
        assert_eq!(limit(&[("worker", "w"), ("id", "1")]).await, Some((1, 0)));
        assert_eq!(limit(&[("worker", "w"), ("plan", "pro"), ("id", "2")]).await, Some((2, 0)));
        let shown = server.get("/rlconfig");
        assert!(shown.contains("d.user.plan_pro: unit=YEAR requests_per_unit=5"), "{shown}");
        let hits = "ratelimit_service_rate_limit_total_hits{domain=\"d\",key1=\"user\",key2=\"plan_pro\"}";
        assert_eq!(server.metric(hits), 2.0);
    }
}

/// The holder is not part of a label, even with `detailed_metric`; otherwise each request would create a series.
#[tokio::test]
async fn statistics_contain_plans_but_not_holders() {
    let text = PLANS.replace("- key: user\n", "- key: user\n  detailed_metric: true\n");
    let text = text.replace("- key: worker\n", "- key: worker\n  detailed_metric: true\n");
    let folder = rules(&[("d.yaml", &text)]);
    let server = Server::start(folder.path(), "memory");
    let client = server.client().await;
    for id in ["1", "2", "3"] {
        allowed(&client, &[("worker", "w"), ("plan", "pro"), ("id", id)]).await;
    }
    allowed(&client, &[("user", "bob")]).await;
    let hits = |key1: &str| {
        server.metric(&format!(
            "ratelimit_service_rate_limit_total_hits{{domain=\"d\",key1=\"{key1}\",key2=\"plan_pro\"}}"
        ))
    };
    assert_eq!((hits("worker_w"), hits("user_bob")), (3.0, 1.0), "{}", server.get("/metrics"));
    assert_eq!(server.metric("sluicegate_metric_dynamic_series"), 20.0);
}

/// Metrics add up rules with the same labels, and a level of a rule may have the name of a class.
#[tokio::test]
async fn classes_of_rules_with_equal_labels_are_added_up() {
    let text = "
domain: d
descriptors:
- key: a
  rate_limit: {unit: year, requests_per_unit: 1, shed: true}
  descriptors:
  - key: all
    rate_limit: {unit: year, requests_per_unit: 1}
    descriptors:
    - key: x
      rate_limit: {unit: year, requests_per_unit: 1, shed: true}
    - key: y
      rate_limit: {unit: year, requests_per_unit: 1, shed: true}
";
    let folder = rules(&[("d.yaml", text)]);
    let server = Server::start(folder.path(), "memory");
    let client = server.client().await;
    for entries in [&[("a", "1")][..], &[("a", "1"), ("all", "1")]] {
        assert!(allowed(&client, entries).await && !allowed(&client, entries).await);
    }
    for last in ["x", "y"] {
        assert!(allowed(&client, &[("a", "1"), ("all", "1"), (last, "1")]).await);
    }
    let series = |labels: &str| format!("sluicegate_class_hits_total{{class=\"all\",domain=\"d\",key1=\"a\"{labels}}}");
    let metric = |labels: &str| server.metric(&series(labels));
    assert_eq!((metric(",outcome=\"allowed\""), metric(",outcome=\"shed\"")), (1.0, 1.0));
    assert_eq!(
        metric(",key2=\"all\",outcome=\"allowed\""),
        2.0,
        "the two inner rules count, and the one above them does not"
    );
}

/// The slots of classes also become free after `hold`.
#[tokio::test]
async fn slots_of_a_class_expire_without_a_release() {
    let text = RULES.replace("hold: 1h", "hold: 300ms");
    let folder = rules(&[("d.yaml", &text)]);
    let server = Server::start(folder.path(), "memory");
    let client = server.client().await;
    for id in 0..8 {
        assert!(allowed(&client, &[("fleet", "api"), ("priority", "get"), ("id", &id.to_string())]).await);
    }
    let is_allowed =
        async || allowed(&client, &[("fleet", "api"), ("priority", "get"), ("id", "again")]).await.then_some(());
    let answer = client.check(request(&[("fleet", "api"), ("priority", "get"), ("id", "9")])).await.unwrap();
    assert!(answer.allowed() || answer.retry_after().unwrap() <= Duration::from_secs(1));
    wait_for_async("the slots to expire", is_allowed).await;
}

/// Hosts report their utilization, and a gateway sheds accordingly. Without the service, the level of the gateway does
/// not change.
#[tokio::test]
async fn a_gateway_sheds_by_the_reported_utilization_of_hosts() {
    let server = start("memory");
    let client = sluicegate_client::Client::builder(format!("http://{}", server.grpc)).domain("d");
    let client = client.timeout(Duration::from_millis(500)).connect_lazy().unwrap();
    let settings = Settings { stabilization: Duration::ZERO, shed_time: Duration::from_secs(2), ..Settings::default() };
    let full = LoadShedder::new(Signal::WorkerUtilization(2)).report_to(client.clone(), "hosts", "host-1");
    let idle = LoadShedder::new(Signal::WorkerUtilization(2)).report_to(client.clone(), "hosts", "host-2");
    let gateway = LoadShedder::with_classes(
        Signal::ReportedUtilization(client.clone(), "hosts".into()),
        DEFAULT_CLASSES,
        settings,
    );
    assert!(gateway.admit(3, 1).is_some() && idle.admit(0, 1).is_some());
    let _full_load: Vec<_> = (0..4).map(|key| full.admit(0, key)).collect();
    let both = async || client.utilization("hosts").await.ok().filter(|reported| reported.reporters == 2);
    let reported = wait_for_async("reports of both hosts", both).await;
    assert_eq!((reported.max, reported.mean), (1.0, 0.5), "twice the capacity is a utilization of 1");
    wait_for_async("the utilization at the gateway", async || (gateway.utilization() == 0.5).then_some(())).await;
    assert_eq!(gateway.level(), 0.0);
    let _more_load: Vec<_> = (0..4).map(|key| idle.admit(0, key)).collect();
    wait_for_async("the gateway to shed", async || (gateway.level() > 0.3).then_some(())).await;
    drop(server);
    let unknown = async || (gateway.utilization() == 0.75).then_some(gateway.level());
    let level = wait_for_async("the utilization without reports", unknown).await;
    let start = Instant::now();
    wait_for_async("3 seconds", async || {
        assert_eq!(gateway.level(), level);
        (start.elapsed() > Duration::from_secs(3)).then_some(())
    })
    .await;
}
