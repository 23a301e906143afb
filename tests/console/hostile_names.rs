//! Names with markup, control characters, and thousands of characters. Callers choose the values in descriptors, so that
//! the console must show any value as text.

use serde_json::{Value, json};

use super::{open, send, sign_in};
use crate::support::{Browser, Operator, Server, operator::OPERATE, rules};

/// Names, and a part of the text that the console must show for each.
fn names() -> [(String, &'static str); 7] {
    [
        ("<img src=x onerror=window.isHostile=1>".into(), "<img src=x onerror=window.isHostile=1>"),
        ("<script>window.isHostile=1</script>".into(), "<script>window.isHostile=1</script>"),
        (
            "\"' onfocus='window.isHostile=1' autofocus x=\"`${window.isHostile=1}`".into(),
            "\"' onfocus='window.isHostile",
        ),
        ("gpj.exe\u{202e}txt".into(), "gpj.exe⟦U+202E⟧txt"),
        ("two\nlines\tand\u{1b}[31m".into(), "two⟦LF⟧lines⟦TAB⟧and⟦ESC⟧[31m"),
        (
            "javascript:window.isHostile=1 &lt;b&gt; %3Cb%3E #/?d=&".into(),
            "javascript:window.isHostile=1 &lt;b&gt; %3Cb%3E #/?d=&",
        ),
        (format!("long{}", "x".repeat(5_000)), "longxxxxxxxxxxxxxxx"),
    ]
}

/// Rules with all names as values, and one name as a key without a value.
fn hostile_rules() -> String {
    let mut text =
        "domain: shop\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 1 }\n".to_owned();
    for (name, _) in names() {
        // A string in JSON is one in YAML, too.
        text +=
            &format!("- key: path\n  value: {}\n  rate_limit: {{ unit: year, requests_per_unit: 1 }}\n", json!(name));
    }
    text
}

/// Checks that no name has become an element or has run as a script, and that no text is wider than the page.
fn check_page(browser: &Browser) {
    let result = browser.value(
        "[typeof window.isHostile, document.querySelectorAll('main img, main script, main b, main [onerror], main [onfocus]').length,\
          document.querySelectorAll('a[href^=\"javascript:\" i]').length, /[\\u202e\\u001b]/.test(document.body.innerText),\
          document.documentElement.scrollWidth <= innerWidth]",
    );
    let page = browser.value("location.hash");
    assert_eq!(result, json!(["undefined", 0, 0, false, true]), "{page}");
}

/// Returns the fragment of a page with one parameter.
fn page(name: &str, parameter: &str, value: &str) -> String {
    let value = percent_encoding::utf8_percent_encode(value, percent_encoding::NON_ALPHANUMERIC);
    format!("{name}?{parameter}={value}")
}

#[test]
fn names_are_shown_as_text_on_every_page() {
    let folder = rules(&[("shop.yaml", &hostile_rules())]);
    let builder = Server::builder().rules(folder.path()).store("memory").set("grpc.limits.max_text_bytes", "8192");
    let operator = Operator::with(builder);
    let server = &operator.server;
    for (name, _) in names() {
        assert_eq!(send(server, 3, "path", &name), 1, "{name}");
        assert_eq!(send(server, 4, "user", &name), 1, "{name}");
    }
    let browser = Browser::start();
    check_descriptors_and_rules(&browser, &operator);
    open(&browser, server, "now");
    browser.wait_for("document.querySelectorAll('[data-test=denied-rules] tbody tr').length === 5");
    browser.wait_for("document.querySelectorAll('[data-test=denied-entities] tbody tr').length === 5");
    check_page(&browser);
    // The link of a name leads to its counter.
    browser.click("[data-test=denied-entities] a");
    check_decision(&browser);
    open(&browser, server, "rules");
    for (_, shown) in names() {
        browser.wait_for_text("[data-test=rule-row]", &[shown]);
    }
    check_page(&browser);
    check_changes(&browser, &operator);
}

fn check_descriptors_and_rules(browser: &Browser, operator: &Operator) {
    let (_, rows) = operator.call(OPERATE, "ListRuleActivity", r#"{"rulesOnly": true, "order": "RULE_ORDER_FILE"}"#);
    let paths: Vec<_> = rows["rows"].as_array().unwrap().iter().map(|row| row["path"].as_str().unwrap()).collect();
    assert_eq!(paths.len(), names().len() + 1, "{rows}");
    for ((name, shown), path) in names().iter().zip(&paths[1..]) {
        let request: Value =
            json!({ "domain": "shop", "descriptors": [{ "entries": [{ "key": "user", "value": name }] }] });
        open(browser, &operator.server, &page("descriptor", "d", &request.to_string()));
        browser.wait_for_text("[data-test=descriptor] h2", &[shown]);
        check_decision(browser);
        open(browser, &operator.server, &page("rule", "path", path));
        browser.wait_for_text("h1", &[shown]);
        browser.wait_for_text("[data-test=facts]", &["3 requests, 2 denied"]);
        // The ranking contains no descriptors with more than 1,024 bytes.
        if name.len() < 1_000 {
            browser.wait_for_text("[data-test=rule-most-denied] tbody tr", &[shown]);
        }
        check_page(browser);
    }
}

/// Checks that the page “Descriptor” shows the decision. `Inspect` rejects descriptors with more than 1,024 bytes, so that
/// the page shows an error instead.
fn check_decision(browser: &Browser) {
    browser.expect_log("the server responded with a status of 400");
    let answer = browser.text("[data-test=decision], [data-test=descriptor] [data-test=alert]");
    assert!(answer.contains("would be denied") || answer.contains("at most 1024 bytes"), "{answer}");
    check_page(browser);
}

/// Overrides contain names and reasons: they appear in events, in the list of overrides and in the audit log.
fn check_changes(browser: &Browser, operator: &Operator) {
    for (name, _) in names() {
        // Names in overrides and reasons have at most 1,024 bytes.
        let name: String = name.chars().take(400).collect();
        let target = json!({ "limit": { "domain": "shop", "entries": [{ "key": "user", "value": name }] } });
        let change = json!({ "changes": [{ "target": target, "value": "5/minute" }], "reason": name });
        let (code, answer) = operator.call(OPERATE, "PutOverrides", &change.to_string());
        assert_eq!(code, 200, "{answer}");
    }
    open(browser, &operator.server, "now");
    open(browser, &operator.server, "change");
    sign_in(browser, OPERATE, "Operator: alice");
    for (_, shown) in names() {
        browser.wait_for_text("[data-test=overrides] tbody tr", &[shown]);
        browser.wait_for_text("[data-test=audit-entry]", &[shown]);
    }
    check_page(browser);
    // The preview and the confirmation of a removal name the target.
    browser.click("[data-test=remove-override]");
    browser.click("[data-test=apply]");
    browser.wait_for_text("[data-test=confirm-sentence]", &["Remove the limit set for shop user="]);
    check_page(browser);
    browser.click("[data-test=confirm]");
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    open(browser, &operator.server, "now");
    for (_, shown) in names() {
        browser.wait_for_text("[data-test=events] li", &[shown]);
    }
    check_page(browser);
}
