//! Forms: lists of existing names, unknown names, ends, plans, resets and refunds.

use serde_json::json;

use super::{changes::apply, folder, open, request, send, sign_in};
use crate::support::{
    Browser, Operator,
    operator::{OPERATE, READ},
    rules,
};

const PLANS: &str = "domain: shop\nplans:\n  default: free\n  limits:\n\
                     \x20   free: { calls: { unit: year, requests_per_unit: 2 } }\n\
                     \x20   pro: { calls: { unit: year, requests_per_unit: 4000 } }\n\
                     descriptors:\n- key: tenant\n  rate_limit: { by_plan: calls }\n";

/// Waits until a list has a value, and returns all of its values.
fn values(browser: &Browser, list: &str, value: &str) -> Vec<String> {
    let options = format!("[...document.querySelectorAll('datalist#{list} option')].map(({{ value }}) => value)");
    browser.wait_for(&format!("{options}.includes({})", json!(value)));
    let found = browser.value(&options);
    found.as_array().unwrap().iter().map(|value| value.as_str().unwrap().to_owned()).collect()
}

fn signed_in(operator: &Operator, page: &str) -> Browser {
    let browser = Browser::start();
    open(&browser, &operator.server, page);
    sign_in(&browser, OPERATE, "Operator: alice");
    // A preview is a change that the service rejects.
    browser.expect_log("the server responded with a status of 4");
    browser
}

#[test]
fn a_name_that_the_rules_do_not_have_is_an_error_with_a_way_to_continue() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let browser = signed_in(&operator, "change?tab=switch");
    assert_eq!(values(&browser, "list-domain", "shop"), ["shop"]);
    browser.type_into("input[name=domain]", "shop");
    assert_eq!(values(&browser, "list-rule", "user"), ["user", "path", "plan_free"]);
    browser.type_into("input[name=rule]", "usr");
    browser.type_into("input[name=reason]", "incident 8");
    browser.click("[data-test=preview]");
    let problem = browser.wait_for_text("[data-test=change-steps] [data-test=alert]", &["has no rule \"usr\""]);
    assert_eq!(problem, "Domain \"shop\" has no rule \"usr\"; did you mean \"user\"?");
    assert_eq!(browser.count("[data-test=apply]"), 0);
    browser.click("[data-test=apply-anyway]");
    apply(&browser, "[data-test=apply]", "Set the switch of rule usr of domain shop to “shadow mode”, until");
    browser.wait_for_text("[data-test=warning]", &["has no rule \"usr\""]);
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    assert_eq!(list["overrides"][0]["target"]["switch"]["rule"]["rule"], "usr", "{list}");
    // An end is suggested.
    assert!(list["overrides"][0]["until"].is_string(), "{list}");
}

#[test]
fn a_preview_changes_nothing() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let browser = signed_in(&operator, "change?tab=limit");
    assert_eq!(values(&browser, "list-domain", "shop"), ["shop"]);
    browser.type_into("input[name=domain]", "shop");
    assert_eq!(values(&browser, "list-Key-1", "plan"), ["user", "path", "plan"]);
    browser.type_into("input[name=key]", "plan");
    assert_eq!(values(&browser, "list-Value-1", "free"), ["free"]);
    browser.type_into("input[name=value]", "free");
    // The console prints separators of thousands, and reads them.
    browser.type_into("input[name=limit]", "1,000,000/year");
    browser.type_into("input[name=reason]", "free trial");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=before-after]", &["the rule applies: 50 per year", "1000000/year until"]);
    browser.wait_for("document.querySelector('[data-test=apply]:not(:disabled)')");
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    assert!(list["overrides"].is_null(), "{list}");
    let (_, log) = operator.call(READ, "ListAuditLog", "{}");
    assert!(log["entries"].is_null(), "{log}");
    // Other mistakes than names have no way to continue.
    browser.click("select[name=end] option[value=at]");
    set_time(&browser, "end-at", "2020-01-01T00:00");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=change-steps] [data-test=alert]", &["limit|shop|plan=free"]);
    assert_eq!(browser.count("[data-test=apply], [data-test=apply-anyway]"), 0);
}

/// Sets a field of a date and a time, whose keyboard input depends on the browser's language.
fn set_time(browser: &Browser, name: &str, time: &str) {
    let script = format!(
        "const field = document.querySelector('input[name={name}]'); field.value = '{time}';\
         field.dispatchEvent(new Event('input', {{ bubbles: true }}))"
    );
    browser.run(&script, &json!([]));
}

#[test]
fn an_override_that_begins_later_is_planned_listed_and_removed() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let browser = signed_in(&operator, "change?tab=limit&domain=shop&entries=[[\"user\",\"bob\"]]&limit=2%2Fyear");
    browser.type_into("input[name=reason]", "sale");
    browser.click("select[name=begin] option[value=at]");
    set_time(&browser, "begin-at", "2098-12-24T06:00");
    browser.fill("input[name=end-amount]", "3");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=before-after]", &["shop user=bob", "none", "2/year", "24 December 2098"]);
    apply(&browser, "[data-test=apply]", "Set the limit of shop user=bob to 2/year, from 24 December 2098");
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    assert_eq!(request(server, "user", "bob"), (200, 5), "not in force yet");
    browser.wait_for_text("[data-test=overrides]", &["1 planned override", "planned from 24 December 2098"]);
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    let planned = &list["overrides"][0];
    let [from, until] = [&planned["target"]["planned"]["from"], &planned["until"]].map(|time| time.as_str().unwrap());
    let seconds = |time: &str| humantime::parse_rfc3339(time).unwrap();
    let length = seconds(until).duration_since(seconds(from)).unwrap();
    assert_eq!(length.as_secs(), 3 * 3_600, "the end counts from the beginning: {list}");
    // The descriptor's own page mentions it, too.
    open(&browser, server, "descriptor?d=shop%20user%3Dbob");
    browser.wait_for_text("[data-test=planned-overrides]", &["shop user=bob", "2/year", "from 24 December 2098"]);
    open(&browser, server, "change");
    browser.click("[data-test=remove-override]");
    apply(&browser, "[data-test=apply]", "Remove the planned limit set for shop user=bob");
    browser.wait_for_text("[data-test=overrides]", &["No override is set"]);
    browser.wait_for_text("[data-test=audit-entry]", &["sale"]);
}

#[test]
fn a_budget_is_shown_in_its_currency() {
    let budget = "domain: shop\ndescriptors:\n- key: team\n  rate_limit: \
                  { unit: year, requests_per_unit: 1_250_000_000, currency: USD, cost_per_hit: 1_500_000 }\n";
    let folder = rules(&[("shop.yaml", budget)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(request(server, "team", "search"), (200, 1_250_000_000));
    let browser = signed_in(&operator, "descriptor?d=shop%20team%3Dsearch");
    browser.wait_for_text("[data-test=matched-rule]", &["1250.00 USD per year"]);
    assert_eq!(browser.text("[data-test=used]"), "1.50 USD");
    assert_eq!(browser.text("[data-test=remaining]"), "1,248.50 USD");
    let text = operator.ctl(&["inspect", "shop", "team=search"]);
    assert!(text.contains("limit 1250.00 USD per year; used 1.50 USD, remaining 1248.50 USD"), "{text}");
}

#[test]
fn a_plan_is_assigned_and_holds_on_the_wire() {
    let folder = rules(&[("shop.yaml", PLANS)]);
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(send(server, 3, "tenant", "acme"), 2);
    let browser = signed_in(&operator, "change?tab=plan");
    assert_eq!(values(&browser, "list-domain", "shop"), ["shop"]);
    browser.type_into("input[name=domain]", "shop");
    assert_eq!(values(&browser, "list-Key", "tenant"), ["tenant"]);
    let mut plans = values(&browser, "list-plan", "pro");
    plans.sort_unstable();
    assert_eq!(plans, ["free", "pro"]);
    browser.type_into("input[name=key]", "tenant");
    browser.type_into("input[name=value]", "acme");
    browser.type_into("input[name=plan]", "prro");
    browser.type_into("input[name=reason]", "contract");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=change-steps] [data-test=alert]", &["no plan \"prro\"", "\"pro\""]);
    browser.fill("input[name=plan]", "pro");
    browser.click("select[name=end] option[value=never]");
    browser.click("[data-test=preview]");
    apply(&browser, "[data-test=apply]", "Set the plan of shop tenant=acme to pro, without an end");
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    assert_eq!(request(server, "tenant", "acme"), (200, 4000));
    assert_eq!(request(server, "tenant", "globex"), (200, 2));
    apply(&browser, "[data-test=undo]", "Remove the plan set for shop tenant=acme");
    browser.wait_for_text("[data-test=result]", &["Undone with version"]);
    assert_eq!(request(server, "tenant", "acme").1, 2);
}

#[test]
fn a_counter_is_reset_and_hits_are_refunded() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(send(server, 5, "user", "bob"), 5);
    let browser = signed_in(&operator, "descriptor?d=shop%20user%3Dbob");
    browser.click("[data-test=change-counter]");
    browser.wait_for("document.querySelector('input[name=value]')?.value === 'bob'");
    browser.click("select[name=action] option[value=refund]");
    browser.type_into("input[name=hits]", "2");
    browser.type_into("input[name=reason]", "our mistake");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=counter-now]", &["5 used, 0 remaining", "5 per year"]);
    apply(&browser, "[data-test=apply]", "Return 2 hits to the counter of shop user=bob");
    browser.wait_for_text("[data-test=counter-now]", &["3 used, 2 remaining"]);
    assert_eq!(send(server, 3, "user", "bob"), 2);
    browser.click("select[name=action] option[value=reset]");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=counter-now]", &["6 used"]);
    apply(&browser, "[data-test=apply]", "Reset the counter of shop user=bob, as if it had never been used");
    browser.wait_for_text("[data-test=counter-now]", &["0 used, 5 remaining"]);
    assert_eq!(send(server, 7, "user", "bob"), 5);
    browser.wait_for_text("[data-test=audit-log]", &["our mistake"]);
    // A descriptor without a rule has no counter.
    browser.fill("input[name=key]", "usr");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=counter-steps] [data-test=alert]", &["no counter"]);
    assert_eq!(browser.count("[data-test=counter-steps] [data-test=apply]"), 0);
}
