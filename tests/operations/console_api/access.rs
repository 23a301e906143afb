//! The role of callers.

use serde_json::Value;

use super::{Updates, ask, call};
use crate::support::{
    Operator, Server,
    operator::{OPERATE, READ},
    rules,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
const SWITCH: &str =
    r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "shadow"}], "reason": "why"}"#;
const ENTITY: &str = r#"{"descriptor": {"domain": "api", "entries": [{"key": "user", "value": "bob"}]}}"#;
/// Methods that return names of entities or operators, with a valid request.
const PRIVATE: [(&str, &str); 7] = [
    ("Inspect", ENTITY),
    ("ListTopEntities", "{}"),
    ("GetRuleUsage", r#"{"path": "api.user"}"#),
    ("ListOverrides", "{}"),
    ("ListAuditLog", "{}"),
    ("GetCandidate", "{}"),
    ("Simulate", "{}"),
];

fn role(server: &Server, headers: &[(&str, &str)]) -> String {
    call(server, "GetSession", "{}", headers).1["role"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn callers_from_elsewhere_receive_no_names() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let elsewhere = [("x-forwarded-for", "192.0.2.1")];
    assert_eq!(ask(server, "bob"), 200);
    assert_eq!(operator.call(OPERATE, "PutOverrides", SWITCH).0, 200);
    for (method, body) in PRIVATE {
        let (code, answer) = call(server, method, body, &elsewhere);
        assert_eq!((code, answer["code"].as_str()), (403, Some("PERMISSION_DENIED")), "{method}: {answer}");
        // Without recorded requests, a simulation is rejected for all roles.
        let (code, answer) = call(server, method, body, &[]);
        assert!(code == 200 || method == "Simulate" && code == 400, "{method}: {answer}");
    }
    let health = |headers| call(server, "GetHealth", "{}", headers).1["switches"][0].clone();
    assert_eq!((&health(&elsewhere)["value"], &health(&elsewhere)["author"]), (&"shadow".into(), &Value::Null));
    assert_eq!((&health(&[])["author"], &health(&[])["reason"]), (&"alice".into(), &"why".into()));
    let event = |headers| {
        let is_switch = |event: &&Value| event["kind"] == "EVENT_KIND_SWITCH";
        let updates = Updates::watch(server, "{}", headers);
        let update =
            updates.find(|update| update["events"].as_array().into_iter().flatten().any(|one| is_switch(&one)));
        update["events"].as_array().unwrap().iter().find(is_switch).unwrap().clone()
    };
    let (public, local) = (event(&elsewhere), event(&[]));
    assert_eq!((&public["author"], &public["reason"]), (&Value::Null, &Value::Null), "{public}");
    assert_eq!((&local["author"], &local["reason"]), (&"alice".into(), &"why".into()), "{local}");
}

#[test]
fn a_token_gives_its_role_on_the_http_listener() {
    let folder = rules(&[("api.yaml", RULES)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let bearer = |token: &str| format!("Bearer {token}");
    let (read, operate) = (bearer(READ), bearer(OPERATE));
    let with = |token: &str| role(server, &[("authorization", token), ("x-forwarded-for", "192.0.2.1")]);
    assert_eq!((with(&read), with(&operate)), ("read".into(), "operate".into()));
    assert_eq!(role(server, &[("x-forwarded-for", "192.0.2.1")]), "public");
    let (code, answer) = call(server, "GetSession", "{}", &[("authorization", "Bearer unknown-0123456789")]);
    assert_eq!((code, answer["message"].as_str()), (401, Some("the token is not in admin.token_file")));
    let put = |headers: &[(&str, &str)]| call(server, "PutOverrides", SWITCH, headers);
    for headers in [&[][..], &[("authorization", read.as_str())]] {
        let (code, answer) = put(headers);
        assert_eq!(code, 403, "{answer}");
    }
    assert_eq!(put(&[("authorization", operate.as_str())]).0, 200);
}

#[test]
fn without_the_admin_api_the_console_is_read_only() {
    let folder = rules(&[("api.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    let (code, answer) = call(&server, "GetSession", "{}", &[]);
    assert_eq!((code, &answer["role"], &answer["acceptsTokens"]), (200, &"read".into(), &Value::Null));
    let (code, answer) = call(&server, "GetSession", "{}", &[("authorization", "Bearer any-0123456789abcdef")]);
    assert!(code == 401 && answer["message"].as_str().unwrap().contains("the admin API is off"), "{answer}");
    let (code, answer) = call(&server, "PutOverrides", SWITCH, &[]);
    assert!(code == 403 && answer["message"].as_str().unwrap().contains("role operate"), "{answer}");
}
