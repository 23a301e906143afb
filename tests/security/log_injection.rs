//! Names and values of callers, operators, rule files and control planes cannot imitate a log event or control a terminal:
//! each event is one line without control characters, in every format.

use std::fs;

use serde_json::{Value, json};
use sluicegate_proto::ratelimit::config::ratelimit::v3::{
    RateLimitConfig, RateLimitDescriptor, RateLimitPolicy, RateLimitUnit,
};

use crate::support::{
    Operator, RedisServer, Server,
    control_plane::ControlPlane,
    operator::OPERATE,
    request_for, rules,
    server::{agent, post},
    wait_for,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
const FORMATS: [&str; 3] = ["text", "json", "logstash"];
/// A text that is an event in the formats `text` and `json` after its first line, and that clears a terminal.
const HOSTILE: &str = "x\n2001-01-01T00:00:00.000000Z  INFO sluicegate::audit: forged\r\n\
                       {\"timestamp\":\"2001-01-01T00:00:00Z\",\"level\":\"INFO\",\"message\":\"forged\"}\n\
                       \u{1b}[2J\u{1b}]0;title\u{7}\u{9b}31m\u{7f}\u{0}\t";

/// Checks that each line of a log is an event that the service wrote, and that hostile text is part of at least one.
fn assert_one_line_per_event(log: &str, format: &str) {
    assert!(log.contains("forged"), "{format}: no event contains the hostile text:\n{log}");
    for line in log.lines() {
        assert!(!line.contains(char::is_control), "{format}: {line:?}");
        let year = match format {
            "text" => line.get(..4).unwrap_or_default().to_owned(),
            _ => {
                let event: Value =
                    serde_json::from_str(line).unwrap_or_else(|error| panic!("{format}: {error}: {line}"));
                let time = event.get("timestamp").or_else(|| event.get("@timestamp"));
                time.and_then(Value::as_str).unwrap_or_default().chars().take(4).collect()
            }
        };
        let is_event = year.len() == 4 && year.chars().all(|digit| digit.is_ascii_digit()) && year != "2001";
        assert!(is_event, "{format}: not an event of the service: {line:?}");
    }
}

/// Callers and operators: descriptors, headers, paths, reasons, names of entities and of files.
#[tokio::test]
async fn callers_and_operators_cannot_forge_log_events() {
    for format in FORMATS {
        let folder = rules(&[("api.yaml", RULES)]);
        let builder = Server::builder().rules(folder.path()).set("telemetry.log.level", "debug,hyper=trace,h2=debug");
        let operator = Operator::with(builder.set("telemetry.log.format", format));
        let server = &operator.server;
        let client = server.client().await;
        for (domain, key, value) in [("api", "user", HOSTILE), ("api", HOSTILE, "x"), (HOSTILE, "user", "x")] {
            client.check(request_for(domain, &[(key, value)])).await.unwrap();
        }
        let body = json!({"domain": "api", "descriptors": [{"entries": [{"key": "user", "value": HOSTILE}]}]});
        assert_eq!(post(&server.url("/json"), body.to_string().as_bytes()).0, 200);
        let invalid = json!({"domain": HOSTILE, HOSTILE: HOSTILE});
        assert_eq!(post(&server.url("/json"), invalid.to_string().as_bytes()).0, 400);
        let path = server.url("/x%0A2001-01-01%1B%5B2J?a%0Ab");
        // HTTP permits a tab in the value of a header, and bytes above 127.
        let request = agent().get(&path).header("user-agent", "a\tb").header("x-request-id", "\u{9b}31m");
        assert_eq!(request.call().unwrap().status().as_u16(), 404);

        let target = |name: &str| json!({"limit": {"domain": name, "entries": [{"key": name, "value": name}]}});
        let put = |target: Value, value: &str| {
            let body = json!({"reason": HOSTILE, "changes": [{"target": target, "value": value}]});
            operator.call(OPERATE, "PutOverrides", &body.to_string()).0
        };
        assert_eq!(put(target(HOSTILE), "5/second"), 200);
        assert_eq!(put(target("a"), HOSTILE), 400);
        assert_eq!(put(json!({"switch": {"domain": HOSTILE}}), "off"), 200);
        let switch = json!({"thisInstance": true, "reason": HOSTILE,
            "changes": [{"target": {"switch": {"domain": HOSTILE}}, "value": "off"}]});
        assert_eq!(operator.call(OPERATE, "PutOverrides", &switch.to_string()).0, 200);
        let files = json!({"reason": HOSTILE, "files": [{"name": HOSTILE, "text": format!("{HOSTILE}: [")}]});
        assert_eq!(operator.call(OPERATE, "UploadCandidate", &files.to_string()).0, 400);
        let reset =
            json!({"reason": HOSTILE, "descriptor": {"domain": "api", "entries": [{"key": "user", "value": HOSTILE}]}});
        assert_eq!(operator.call(OPERATE, "ResetCounter", &reset.to_string()).0, 200);
        server.signal("TERM");
        wait_for("the shutdown", || server.log().contains("shutdown complete").then_some(()));
        assert_one_line_per_event(&server.log(), format);
    }
}

/// Errors about rule files and rules of a control plane consist of several lines.
#[tokio::test]
async fn rules_cannot_forge_log_events() {
    for format in FORMATS {
        let folder = rules(&[("api.yaml", RULES)]);
        let server = Server::builder().rules(folder.path()).set("telemetry.log.format", format).start();
        let name = format!("{}.yaml", HOSTILE.replace(['/', '\0'], ""));
        let key = serde_json::to_string(HOSTILE).unwrap();
        fs::write(folder.path().join(&name), format!("domain: other\n{key}: 1\n{key}2: 2\n")).unwrap();
        wait_for("the rejected file", || server.log().contains("cannot load the changed rules").then_some(()));
        assert_one_line_per_event(&server.log(), format);

        let mut plane = ControlPlane::start();
        let descriptor = RateLimitDescriptor {
            key: HOSTILE.into(),
            value: HOSTILE.into(),
            rate_limit: Some(RateLimitPolicy { unit: RateLimitUnit::Unknown.into(), ..RateLimitPolicy::default() }),
            ..RateLimitDescriptor::default()
        };
        let descriptors = vec![descriptor];
        plane.set(
            "1",
            &[RateLimitConfig { name: HOSTILE.into(), domain: HOSTILE.into(), descriptors, sluicegate: None }],
        );
        let server = Server::builder()
            .set("telemetry.log.format", format)
            .set("rules.xds.server", &format!("http://{}", plane.address()))
            .set("rules.xds.start_without_rules", "true")
            .start();
        wait_for("the rejected rules", || server.log().contains("forged").then_some(()));
        assert_one_line_per_event(&server.log(), format);
    }
}

/// An error that Redis itself formulates.
#[tokio::test]
async fn redis_cannot_forge_log_events() {
    for format in FORMATS {
        let redis = RedisServer::start();
        // The error contains the name of the user.
        redis.cli(&["ACL", "SETUSER", "app\u{1b}[2J", "on", "nopass", "~*", "+@all", "-evalsha"]);
        let folder = rules(&[("api.yaml", RULES)]);
        let address = format!("redis://app%1B%5B2J:x@127.0.0.1:{}", redis.port);
        let builder = Server::builder().rules(folder.path()).store(&address);
        let server = builder.set("telemetry.log.format", format).start();
        let _ = server.client().await.check(request_for("api", &[("user", HOSTILE)])).await;
        wait_for("the rejected call", || server.log().contains("rejects calls").then_some(()));
        let log = server.log();
        assert!(log.contains("has no permissions"), "{log}");
        assert!(log.lines().all(|line| !line.contains(char::is_control)), "{format}: {log:?}");
    }
}
