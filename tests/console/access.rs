//! Tokens, roles, and the settings of the console.

use serde_json::{Value, json};

use super::{call, folder, open, send, sign_in};
use crate::support::{
    Browser, Operator, Server,
    browser::key,
    operator::{OPERATE, READ},
    server::{agent, get},
};

/// Starts an instance on which callers without a token may read no names, with requests of `bob` in all places.
fn start(folder: &tempfile::TempDir) -> Operator {
    let builder = Server::builder().rules(folder.path()).store("memory").set("console.entities", "token");
    let operator = Operator::with(builder);
    assert_eq!(send(&operator.server, 20, "user", "bob"), 5);
    operator.ctl(&["limit", "set", "shop", "user=bob", "3/year", "--reason", "bob again"]);
    operator
}

const INSPECT: &str = r#"{"descriptor": {"domain": "shop", "entries": [{"key": "user", "value": "bob"}]}}"#;

#[test]
fn without_a_token_no_names_are_shown_and_no_changes_are_possible() {
    let folder = folder();
    let operator = start(&folder);
    let server = &operator.server;
    let browser = Browser::start();
    for (page, sign) in [
        ("now", "[data-test=denied-rules] tbody tr"),
        ("rules", "[data-test=rule-row]"),
        ("rule?path=shop.user", "[data-test=facts]"),
        ("change", "[data-test=public-state]"),
        ("simulate", "[data-test=simulate-form]"),
    ] {
        open(&browser, server, page);
        browser.text(sign);
        // The event about the limit of bob is shown without the name, the reason and the operator.
        let text =
            browser.value("document.body.innerText + document.querySelector('[data-test=announcer]').textContent");
        for name in ["bob", "alice"] {
            assert!(!text.as_str().unwrap().contains(name), "{page}: {text}");
        }
    }
    browser.wait_for_text("[data-test=needs-read]", &["Simulations need a token"]);
    assert_eq!(browser.text("[data-test=role]"), "Not signed in");
    open(&browser, server, "now");
    browser.wait_for_text("[data-test=needs-read]", &["console.entities"]);
    browser.wait_for_text("[data-test=events] li", &["Limit"]);
    open(&browser, server, "descriptor?d=shop%20user%3Dbob");
    browser.wait_for_text("[data-test=needs-read]", &["console.entities"]);
    assert_eq!(browser.count("[data-test=counter], [data-test=decision]"), 0);
    open(&browser, server, "descriptor?d=bob");
    browser.wait_for_text("[data-test=needs-read]", &["console.entities"]);
    assert_eq!(browser.count("[data-test=customer]"), 0);
    check_read_only(&browser, server, "use “Sign in with a token”");
    // The service enforces the role, not the page.
    assert_eq!(call(server, "Inspect", &[], INSPECT).0, 403);
    for method in
        ["ListTopEntities", "FindEntities", "ListOverrides", "ListAuditLog", "GetRuleUsage", "Simulate", "PutOverrides"]
    {
        assert_eq!(call(server, method, &[], "{}").0, 403, "{method}");
    }
}

/// Checks that the page “Change” explains how to get the role, and that its forms are disabled.
fn check_read_only(browser: &Browser, server: &Server, explanation: &str) {
    for tab in ["limit", "switch"] {
        open(browser, server, &format!("change?tab={tab}"));
        browser.wait_for_text("[data-test=needs-operate]", &[explanation]);
        assert_eq!(browser.count(&format!("[data-test={tab}-form] [data-test=preview]:disabled")), 1);
        assert_eq!(browser.count("input[name=reason]:not(:disabled)"), 0, "{tab}");
    }
    assert_eq!(browser.count("[data-test=remove-override], [data-test=undo-entry]"), 0);
}

#[test]
fn a_token_gives_the_role_that_the_token_file_states() {
    let folder = folder();
    let operator = start(&folder);
    let server = &operator.server;
    let browser = Browser::start();
    open(&browser, server, "now");
    browser.expect_log("the server responded with a status of 401");
    browser.click("[data-test=sign-in]");
    browser.type_into("input[name=token]", "wrong-0123456789abcdef\u{e007}");
    browser.wait_for_text("[data-test=sign-in-dialog] [data-test=alert]", &["This token is not known."]);
    assert_eq!(browser.text("[data-test=role]"), "Not signed in");
    browser.press(&key::ESCAPE.to_string());
    browser.wait_until_gone("dialog");
    sign_in(&browser, READ, "Read only: eve");
    browser.wait_for_text("[data-test=denied-entities] tbody tr", &["shop user=bob", "15"]);
    browser.wait_for_text("[data-test=events] li", &["bob", "alice", "bob again"]);
    check_read_only(&browser, server, "Your token can only read.");
    browser.wait_for_text("[data-test=overrides] tbody tr", &["shop user=bob", "3/year"]);
    assert_eq!(call(server, "PutOverrides", &[("authorization", &format!("Bearer {READ}"))], "{}").0, 403);
    // The token survives a reload, but is stored nowhere else than in the tab.
    browser.reload();
    browser.wait_for_text("[data-test=role]", &["Read only: eve"]);
    let stored = browser
        .value("[localStorage.length, sessionStorage.length, document.cookie, location.href.includes('0123456789')]");
    assert_eq!(stored, json!([0, 1, "", false]));
    browser.click("[data-test=sign-out]");
    browser.wait_for_text("[data-test=role]", &["Not signed in"]);
    browser.wait_until_gone("[data-test=overrides]");
    assert_eq!(browser.value("sessionStorage.length"), 0);
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.wait_until_gone("[data-test=needs-operate]");
    assert_eq!(browser.count("[data-test=remove-override]:not(:disabled)"), 1);
    assert!(!server.log().contains("0123456789abcdef"), "tokens are never logged");
}

#[test]
fn a_token_that_is_removed_from_the_file_signs_the_operator_out() {
    let folder = folder();
    let operator = start(&folder);
    let browser = Browser::start();
    open(&browser, &operator.server, "now");
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.expect_log("the server responded with a status of 401");
    operator.replace_tokens(&format!("read {READ} eve\n"));
    browser.reload();
    browser.wait_for_text("[data-test=role]", &["Not signed in"]);
    assert_eq!(browser.value("sessionStorage.length"), 0);
    browser.wait_for("document.querySelector('[data-test=banner]').textContent === ''");
}

#[test]
fn the_admin_listener_shows_nothing_before_the_operator_signs_in() {
    let folder = folder();
    let operator = start(&folder);
    let browser = Browser::start();
    browser.expect_log("the server responded with a status of 401");
    browser.open(&format!("{}/#/change", operator.addr));
    browser.wait_for_text("[data-test=needs-token]", &["Sign in with a token"]);
    assert_eq!(browser.text("[data-test=banner]"), "");
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.wait_for_text("[data-test=overrides] tbody tr", &["shop user=bob", "3/year"]);
    assert_eq!(browser.text("[data-test=banner]"), "");
    browser.click("[data-test=sign-out]");
    browser.text("[data-test=needs-token]");
    browser.wait_until_gone("[data-test=overrides]");
}

#[test]
fn without_the_admin_api_the_page_is_read_only() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    assert_eq!(send(&server, 7, "user", "bob"), 5);
    let browser = Browser::start();
    open(&browser, &server, "now");
    browser.wait_for_text("[data-test=denied-entities] tbody tr", &["shop user=bob", "2"]);
    browser.wait_for_text("[data-test=role]", &["Read only"]);
    assert_eq!(browser.count("[data-test=sign-in], [data-test=sign-out]"), 0);
    check_read_only(&browser, &server, "The admin API is off, so this console is read-only.");
    let answer = call(
        &server,
        "PutOverrides",
        &[],
        r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "off"}]}"#,
    );
    assert_eq!(answer.0, 403, "{answer:?}");
    assert_eq!(call(&server, "GetSession", &[("authorization", &format!("Bearer {OPERATE}"))], "{}").0, 401);
}

/// Returns the role of a caller without a token, and checks that its access to names agrees.
fn role(server: &Server, headers: &[(&str, &str)]) -> String {
    let (code, text) = call(server, "GetSession", headers, "{}");
    assert_eq!(code, 200, "{text}");
    let session: Value = serde_json::from_str(&text).unwrap();
    let role = session["role"].as_str().unwrap().to_owned();
    let (code, text) = call(server, "Inspect", headers, INSPECT);
    assert_eq!((code == 200, text.contains("bob")), (role == "read", role == "read"), "{role} {code}: {text}");
    role
}

#[test]
fn the_settings_decide_who_reads_names_and_whether_there_is_a_console() {
    let folder = folder();
    let start =
        |key: &str, value: &str| Operator::with(Server::builder().rules(folder.path()).store("memory").set(key, value));
    let forwarded = [("x-forwarded-for", "203.0.113.7")];
    for (entities, local, by_proxy) in
        [("local", "read", "public"), ("token", "public", "public"), ("all", "read", "read")]
    {
        let operator = start("console.entities", entities);
        assert_eq!(role(&operator.server, &[]), local, "{entities}");
        assert_eq!(role(&operator.server, &forwarded), by_proxy, "{entities}");
    }
    let operator = start("console.enabled", "false");
    let server = &operator.server;
    assert_eq!(get(&server.url("/openapi.json")).0, 404);
    for path in ["/", "/console/app.js"] {
        assert_eq!(get(&server.url(path)).0, 404, "{path}");
        let request = agent().get(format!("{}{path}", operator.addr));
        let mut response = request.header("authorization", format!("Bearer {OPERATE}")).call().unwrap();
        // On the admin listener, an unknown path is an unknown gRPC method: an empty response with status 200.
        assert_eq!(response.body_mut().read_to_string().unwrap(), "", "{path}");
    }
    assert_eq!(call(server, "GetSession", &[], "{}").0, 404);
    assert_eq!(call(server, "Inspect", &[], INSPECT).0, 404);
    // The rest of the service is unchanged.
    assert_eq!(get(&server.url("/healthcheck")).0, 200);
    assert_eq!(send(server, 1, "user", "bob"), 1);
    assert_eq!(operator.call(READ, "Inspect", INSPECT).0, 200);
}
