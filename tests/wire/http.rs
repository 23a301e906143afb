//! `/json`, `/metrics` and the other HTTP pages.

use crate::support::{
    Server, descriptor,
    raw_client::{Request, Unit},
    request_for, rules,
    server::{agent, get, post},
};
use std::collections::BTreeSet;

use serde_json::{Value, json};

#[tokio::test]
async fn json_decides_like_grpc() {
    let server = Server::builder().set("response.headers", "true").start();
    let post_json = |body: &Value| {
        let (code, text) = post(&server.url("/json"), body.to_string().as_bytes());
        (code, serde_json::from_str::<Value>(&text).unwrap_or(Value::String(text)))
    };
    let entries = json!([{"key": "user", "value": "bob"}]);
    let (code, answer) =
        post_json(&json!({"domain": "example", "descriptors": [{"entries": entries}], "hits_addend": 2}));
    assert_eq!(code, 200);
    assert_eq!(answer["overallCode"], "OK");
    let status = &answer["statuses"][0];
    assert_eq!(status["currentLimit"], json!({"requestsPerUnit": 3, "unit": "MINUTE"}));
    assert_eq!((&status["code"], &status["limitRemaining"]), (&json!("OK"), &json!(1)));
    let reset = status["durationUntilReset"].as_str().unwrap();
    assert!(reset.strip_suffix('s').unwrap().parse::<u32>().is_ok(), "{reset}");
    assert_eq!(answer["responseHeadersToAdd"][0], json!({"key": "RateLimit-Limit", "value": "3"}));
    let (code, answer) =
        post_json(&json!({"domain": "example", "descriptors": [{"entries": entries, "hitsAddend": "9"}]}));
    assert_eq!((code, &answer["overallCode"]), (429, &json!("OVER_LIMIT")));
    let limit = json!({"requestsPerUnit": 50, "unit": "HOUR", "unitMultiplier": 2});
    let (code, answer) =
        post_json(&json!({"domain": "example", "descriptors": [{"entries": entries, "limit": limit}]}));
    assert_eq!((code, &answer["statuses"][0]["currentLimit"]), (200, &limit));
}

/// A request that costs more than the limit can ever allow has the largest cost, and no `Retry-After`. Others have none.
/// Every header has the name that the settings give it, in the message and in the response to `/json` itself.
#[tokio::test]
async fn headers_have_the_names_of_the_settings() {
    let text = "domain: d\ndescriptors:\n- {key: user, rate_limit: {unit: year, requests_per_unit: 2, soft: 50%}}\n\
                - {key: guard, rate_limit: {unit: year, requests_per_unit: 1, visible: false}}\n";
    let folder = rules(&[("d.yaml", text)]);
    let names = ["limit", "remaining", "reset", "soft", "retry_after", "max_cost", "policy", "tightest_limit"];
    let mut server = Server::builder().rules(folder.path()).set("response.headers", "true");
    server = server.set("response.header_style", "both");
    for name in names {
        server = server.set(&format!("response.{name}_header"), &format!("X-{name}"));
    }
    let server = server.start();
    let check = |key: &str, hits: u32| {
        let entries = json!([{"key": key, "value": "x"}]);
        let body = json!({"domain": "d", "descriptors": [{"entries": entries}], "hits_addend": hits}).to_string();
        let mut response = agent().post(server.url("/json")).send(body.as_bytes()).unwrap();
        let mut own = BTreeSet::new();
        for name in names {
            if response.headers().contains_key(format!("x-{name}")) {
                own.insert(format!("X-{name}"));
            }
        }
        let answer: Value = serde_json::from_str(&response.body_mut().read_to_string().unwrap()).unwrap();
        let mut sent = BTreeSet::new();
        for header in answer["responseHeadersToAdd"].as_array().into_iter().flatten() {
            sent.insert(header["key"].as_str().unwrap().to_owned());
        }
        assert_eq!(own, sent, "{answer}");
        (response.status().as_u16(), sent)
    };
    let set = |names: &[&str]| -> BTreeSet<String> { names.iter().map(|name| format!("X-{name}")).collect() };
    let always = ["limit", "remaining", "reset", "policy", "tightest_limit"];
    assert_eq!(check("user", 2), (200, set(&always)));
    assert_eq!(check("user", 1), (200, set(&[&always[..], &["soft"]].concat())));
    assert_eq!(check("user", 1), (429, set(&[&always[..], &["retry_after"]].concat())));
    assert_eq!(check("user", 4), (429, set(&[&always[..], &["max_cost"]].concat())));
    // Nothing is said about a limit that is not visible, except when to try again.
    assert_eq!(check("guard", 1), (200, set(&[])));
    assert_eq!(check("guard", 1), (429, set(&["retry_after"])));
}

#[tokio::test]
async fn a_request_that_never_fits_has_the_largest_cost() {
    let text = "domain: d\ndescriptors:\n\
                - {key: window, rate_limit: {unit: year, requests_per_unit: 5}}\n\
                - {key: bucket, rate_limit: {unit: year, requests_per_unit: 9, algorithm: token_bucket, burst: 7}}\n";
    let folder = rules(&[("d.yaml", text)]);
    let server =
        Server::builder().rules(folder.path()).set("response.headers", "true").set("response.dynamic_metadata", "true");
    let server = server.start();
    let check = |key: &str, hits: u32| {
        let entries = json!([{"key": key, "value": "x"}]);
        let body = json!({"domain": "d", "descriptors": [{"entries": entries}], "hits_addend": hits}).to_string();
        let mut response = agent().post(server.url("/json")).send(body.as_bytes()).unwrap();
        let max_cost = response.headers().get("ratelimit-max-cost").map(|cost| cost.to_str().unwrap().to_owned());
        let text = response.body_mut().read_to_string().unwrap();
        (response.status().as_u16(), max_cost, serde_json::from_str::<Value>(&text).unwrap())
    };
    let header = |answer: &Value, name: &str| {
        let headers = answer["responseHeadersToAdd"].as_array().unwrap();
        headers.iter().find(|header| header["key"] == name).map(|header| header["value"].as_str().unwrap().to_owned())
    };
    for (key, hits, expected) in [("window", 6, "5"), ("bucket", 8, "7")] {
        let (code, max_cost, answer) = check(key, hits);
        assert_eq!((code, max_cost.as_deref()), (429, Some(expected)), "{answer}");
        assert_eq!(header(&answer, "RateLimit-Max-Cost").as_deref(), Some(expected), "{answer}");
        assert_eq!(header(&answer, "Retry-After"), None, "{answer}");
        assert_eq!(answer["dynamicMetadata"]["sluicegate.statuses"][0]["never_fits"], true, "{answer}");
    }
    // The denied hits of a fixed window count, so it is full.
    let (code, max_cost, answer) = check("window", 5);
    assert_eq!((code, max_cost), (429, None), "{answer}");
    assert_eq!(header(&answer, "RateLimit-Max-Cost"), None, "{answer}");
    assert!(header(&answer, "Retry-After").is_some(), "{answer}");
    assert_eq!(check("bucket", 7).0, 200);
}

#[test]
fn a_denied_request_receives_a_problem_description_if_it_accepts_one() {
    let text = "domain: d\ndescriptors:\n\
                - {key: user, rate_limit: {unit: year, requests_per_unit: 1}}\n\
                - {key: told, rate_limit: {unit: year, requests_per_unit: 1, denial: {message: used up, status: 402}}}\n";
    let folder = rules(&[("d.yaml", text)]);
    let server = Server::builder().rules(folder.path()).start();
    let check = |key: &str, hits: u32, accept: &str| {
        let body =
            json!({"domain": "d", "descriptors": [{"entries": [{"key": key, "value": "x"}]}], "hits_addend": hits});
        let request = agent().post(server.url("/json")).header("accept", accept);
        let mut response = request.send(body.to_string().as_bytes()).unwrap();
        let kind = response.headers()["content-type"].to_str().unwrap().to_owned();
        let text = response.body_mut().read_to_string().unwrap();
        (response.status().as_u16(), kind, serde_json::from_str::<Value>(&text).unwrap())
    };
    let accept = "text/html, application/problem+json;q=0.9";
    let (code, kind, answer) = check("user", 1, accept);
    assert_eq!((code, kind.as_str(), &answer["overallCode"]), (200, "application/json", &json!("OK")));
    let (code, kind, problem) = check("user", 1, accept);
    assert_eq!((code, kind.as_str()), (429, "application/problem+json"));
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!((&problem["title"], &problem["status"]), (&json!("Too many requests"), &json!(429)));
    assert!(problem["detail"].as_str().unwrap().starts_with("Retry in "), "{problem}");
    let (code, _, problem) = check("told", 2, accept);
    assert_eq!((code, &problem["detail"], &problem["status"]), (402, &json!("used up"), &json!(402)));
    assert_eq!(check("user", 2, accept).2["detail"], "A request of this cost will not be allowed.");
    for accept in ["*/*", "application/json"] {
        let (code, kind, answer) = check("user", 1, accept);
        assert_eq!((code, kind.as_str(), &answer["overallCode"]), (429, "application/json", &json!("OVER_LIMIT")));
    }
}

#[tokio::test]
async fn an_error_has_status_500() {
    let server = Server::builder().store("redis://127.0.0.1:1").start();
    let body = r#"{"domain":"example","descriptors":[{"entries":[{"key":"user","value":"x"}]}]}"#;
    let (code, text) = post(&server.url("/json"), body.as_bytes());
    assert_eq!(code, 500);
    assert!(text.contains("store is unavailable"), "{text}");
}

#[tokio::test]
async fn pages_report_the_state_of_the_service() {
    let server = Server::builder().start();
    assert_eq!(get(&server.url("/healthcheck")), (200, "OK".into()));
    assert_eq!(get(&server.url("/readyz")), (200, "ready\nstore: memory\n".into()));
    assert_eq!(get(&server.url("/nowhere")).0, 404);
    let page = server.get("/rlconfig");
    let line = "example.user_alice: unit=MINUTE requests_per_unit=5, shadow_mode: false, quota_mode: false\n";
    assert!(page.starts_with("# loaded 20") && page.contains(line), "{page}");
}

const RULES: &str = "
domain: d
descriptors:
- key: plain
  rate_limit: {unit: year, requests_per_unit: 10}
- key: shadow
  value: v
  shadow_mode: true
  rate_limit: {unit: year, requests_per_unit: 1}
- key: detailed
  detailed_metric: true
  rate_limit: {unit: year, requests_per_unit: 10}
- key: outer
  value_to_metric: true
  descriptors:
  - key: inner
    value: a*
    descriptors:
    - key: third
      rate_limit: {unit: year, requests_per_unit: 10}
";

/// Metrics have the names and labels of envoyproxy/ratelimit's exporter, so that its dashboards continue to work.
#[tokio::test]
async fn statistics_have_the_names_of_envoyproxy_ratelimit() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("telemetry.max_dynamic_series", "30").start();
    let client = server.client().await;
    let check = async |entries: &[(&str, &str)], hits| {
        client.check(Request::new("d").descriptor(descriptor(entries).hits(hits))).await.unwrap();
    };
    check(&[("plain", "x")], 8).await;
    check(&[("plain", "x")], 5).await;
    check(&[("shadow", "v")], 3).await;
    check(&[("outer", "o"), ("inner", "ab"), ("third", "x")], 2).await;
    check(&[("outer", "o"), ("inner", "ac"), ("third", "y")], 1).await;
    for user in ["a", "10.0.0.1", "b", "c", "d"] {
        check(&[("detailed", user)], 1).await;
    }
    client.check(request_for("unknown", &[("x", "y")])).await.unwrap();
    let overridden = Request::new("d").descriptor(descriptor(&[("o", "v")]).limit(1, Unit::Hour, None));
    client.check(overridden).await.unwrap();
    assert!(client.check(Request::new("")).await.is_err());
    for (series, expected) in [
        ("total_hits{domain=\"d\",key1=\"plain\"}", 13.0),
        ("within_limit{domain=\"d\",key1=\"plain\"}", 10.0),
        ("near_limit{domain=\"d\",key1=\"plain\"}", 2.0),
        ("over_limit{domain=\"d\",key1=\"plain\"}", 3.0),
        ("shadow_mode{domain=\"d\",key1=\"shadow_v\"}", 2.0),
        ("total_hits{domain=\"d\",key1=\"outer_o\",key2=\"inner_a*\"}", 3.0),
        ("total_hits{domain=\"d\",key1=\"detailed_a\"}", 1.0),
        ("total_hits{domain=\"d\",key1=\"detailed_10_0_0_1\"}", 1.0),
        ("total_hits{domain=\"other\",key1=\"other\"}", 4.0),
    ] {
        let series = format!("ratelimit_service_rate_limit_{series}");
        assert_eq!(server.metric(&series), expected, "{series} in\n{}", server.get("/metrics"));
    }
    for (series, expected) in [
        ("sluicegate_metric_series_overflow_hits_total", 4.0),
        ("sluicegate_metric_dynamic_series", 30.0),
        ("sluicegate_domain_not_found_total", 1.0),
        ("ratelimit_service_config_load_success", 1.0),
        ("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}", 12.0),
        ("ratelimit_service_response_time_seconds_count{grpc_method=\"ShouldRateLimit\"}", 12.0),
        ("ratelimit_service_response_time_seconds_bucket{grpc_method=\"ShouldRateLimit\",le=\"+Inf\"}", 12.0),
        ("ratelimit_service_should_rate_limit_error{err_type=\"service_error\"}", 1.0),
        ("sluicegate_memory_counters", 10.0),
        ("sluicegate_grpc_connections", 1.0),
    ] {
        assert_eq!(server.metric(series), expected, "{series} in\n{}", server.get("/metrics"));
    }
    let stats = server.get("/stats");
    assert!(stats.lines().any(|line| line.starts_with("sluicegate_memory_counters: 10")), "{stats}");
    assert!(!stats.contains("# "), "{stats}");
}

/// OpenTelemetry would merge all series above 2,000 into one; the rule statistics avoid that.
#[tokio::test]
async fn statistics_of_3000_rules_stay_separate() {
    let rule = |number| format!("- key: key{number}\n  rate_limit: {{unit: year, requests_per_unit: 1}}\n");
    let text = format!("domain: d\ndescriptors:\n{}", (0..3_000).map(rule).collect::<String>());
    let server = Server::start(rules(&[("d.yaml", &text)]).path(), "memory");
    let client = server.client().await;
    for first in (0..3_000).step_by(100) {
        let numbers = first..first + 100;
        let request = numbers.fold(Request::new("d"), |request, number| {
            request.descriptor(descriptor(&[(&format!("key{number}"), "x")]))
        });
        assert!(client.check(request).await.unwrap().allowed());
    }
    let metrics = server.get("/metrics");
    let series = metrics.lines().filter(|line| line.starts_with("ratelimit_service_rate_limit_total_hits{"));
    assert_eq!(series.count(), 3_000);
}
