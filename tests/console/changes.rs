//! Changes by an operator: limits, switches, candidate rules, and how to undo them.

use super::{RULES, folder, open, request, send, sign_in};
use crate::support::{
    Browser, Operator, Server,
    operator::{OPERATE, READ},
    rules, wait_for,
};

/// Goes from the preview to the result.
pub(super) fn apply(browser: &Browser, button: &str, sentence: &str) {
    browser.click(button);
    browser.wait_for_text("[data-test=confirm-sentence]", &[sentence]);
    browser.click("[data-test=confirm]");
    browser.wait_until_gone("dialog");
}

#[test]
fn a_limit_set_in_the_browser_holds_on_the_wire() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!(request(server, "user", "bob"), (200, 5));
    let browser = Browser::start();
    open(&browser, server, "descriptor?d=shop%20user%3Dbob");
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.click("[data-test=set-limit]");
    browser.wait_for("document.querySelector('input[name=value]')?.value === 'bob'");
    browser.type_into("input[name=reason]", "too many orders");
    // The service checks the limit before there is a button to apply it.
    browser.expect_log("the server responded with a status of 400");
    browser.type_into("input[name=limit]", "plenty");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=change-steps] [data-test=alert]", &["\"plenty\" is not a limit"]);
    assert_eq!(browser.count("[data-test=apply], [data-test=apply-anyway]"), 0);
    browser.fill("input[name=limit]", "2/year");
    browser.click("select[name=end] option[value=never]");
    browser.click("[data-test=preview]");
    browser.wait_for_text(
        "[data-test=before-after]",
        &["shop user=bob", "none", "the rule applies: 5 per year", "2/year"],
    );
    assert_eq!(request(server, "user", "bob"), (200, 5), "a preview changes nothing");
    apply(&browser, "[data-test=apply]", "Set the limit of shop user=bob to 2/year, without an end");
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    assert_eq!(request(server, "user", "bob"), (429, 2));
    assert_eq!(request(server, "user", "eve"), (200, 5), "the limit of others is unchanged");
    browser.wait_for_text("[data-test=overrides] tbody tr", &["shop user=bob", "2/year", "alice", "too many orders"]);
    browser.wait_for_text("[data-test=audit-entry]", &["shop user=bob", "none", "2/year", "alice"]);
    apply(&browser, "[data-test=undo]", "Remove the limit set for shop user=bob");
    browser.wait_for_text("[data-test=result]", &["Undone with version"]);
    assert_eq!(request(server, "user", "bob"), (200, 5));
    browser.wait_for_text("[data-test=audit-entry]", &["undo of too many orders"]);
    browser.wait_for_text("[data-test=overrides]", &["No override is set"]);
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    assert!(list["overrides"].is_null(), "{list}");
}

#[test]
fn a_switch_set_in_the_browser_holds_and_can_be_undone_from_the_audit_log() {
    let folder = folder();
    let builder = Server::builder().rules(folder.path()).store("memory");
    let operator = Operator::with(builder);
    let server = &operator.server;
    assert_eq!(send(server, 6, "user", "bob"), 5);
    let browser = Browser::start();
    open(&browser, server, "rule?path=shop.user");
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.click("[data-test=change-switch]");
    browser.wait_for("document.querySelector('[data-test=switch-form] input[name=rule]')?.value === 'user'");
    browser.click("select[name=mode] option[value=off]");
    browser.fill("input[name=end-amount]", "3");
    browser.type_into("input[name=reason]", "incident 7");
    browser.click("[data-test=preview]");
    apply(&browser, "[data-test=apply]", "Set the switch of rule user of domain shop to “off”, until");
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    browser.wait_for_text("[data-test=effect]", &["Before", "Now"]);
    assert_eq!(request(server, "user", "bob").0, 200);
    open(&browser, server, "rules");
    browser.wait_for_text("[data-test=rule-row][data-path='shop.user'] .tag", &["off"]);
    // The switch ends within three hours, and an operator ends it now.
    open(&browser, server, "change");
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    assert!(list["overrides"][0]["until"].is_string(), "{list}");
    apply(&browser, "[data-test=undo-entry]", "Remove the switch of rule user of domain shop");
    browser.wait_for_text("[data-test=overrides]", &["No override is set"]);
    assert_eq!(request(server, "user", "bob").0, 429);
    // The earlier change cannot be undone again: the switch has another version by now.
    operator.ctl(&["switch", "shadow", "rule", "shop", "user", "--reason", "another operator"]);
    browser.reload();
    browser.wait_for_text("[data-test=audit-entry]", &["another operator"]);
    let earlier = "[data-test=audit-entry]:nth-child(3) [data-test=undo-entry]";
    browser.expect_log("the server responded with a status of 4");
    browser.click(earlier);
    browser.click("[data-test=confirm]");
    browser.wait_for_text("dialog [data-test=alert]", &["has version"]);
}

#[test]
fn a_change_replaces_only_the_value_that_its_preview_showed() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    operator.ctl(&["limit", "set", "shop", "user=bob", "3/year", "--reason", "first"]);
    let browser = Browser::start();
    open(&browser, server, "change?tab=limit&domain=shop&entries=[[\"user\",\"bob\"]]&limit=4%2Fyear");
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.expect_log("the server responded with a status of 409");
    browser.type_into("input[name=reason]", "second");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=before-after]", &["3/year", "4/year"]);
    apply(&browser, "[data-test=apply]", "Set the limit of shop user=bob to 4/year");
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    assert_eq!(request(server, "user", "bob"), (200, 4));
    apply(&browser, "[data-test=undo]", "Set the limit of shop user=bob to 3/year");
    browser.wait_for_text("[data-test=result]", &["Undone with version"]);
    // Another operator is faster than this one.
    open(&browser, server, "change?tab=limit&domain=shop&entries=[[\"user\",\"bob\"]]&limit=6%2Fyear");
    browser.type_into("input[name=reason]", "third");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=before-after]", &["3/year", "6/year"]);
    browser.click("[data-test=apply]");
    browser.text("[data-test=confirm-sentence]");
    operator.ctl(&["limit", "set", "shop", "user=bob", "2/year", "--reason", "faster"]);
    browser.wait_for_text("[data-test=before-after]", &["2/year", "6/year"]);
    browser.expect_log("the server responded with a status of 4");
    browser.click("[data-test=confirm]");
    browser.wait_for_text("dialog [data-test=alert]", &["has version"]);
    assert_eq!(request(server, "user", "bob"), (200, 2));
}

#[test]
fn candidate_rules_are_uploaded_promoted_and_rolled_back() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    let stricter = rules(&[("shop.yaml", &RULES.replace("requests_per_unit: 5 ", "requests_per_unit: 2 "))]);
    let browser = Browser::start();
    open(&browser, server, "change?tab=candidate");
    sign_in(&browser, OPERATE, "Operator: alice");
    browser.text("[data-test=no-candidate]");
    browser.type_into("input[name=files]", stricter.path().join("shop.yaml").to_str().unwrap());
    browser.fill("input[name=share]", "100");
    browser.type_into("input[name=reason]", "stricter");
    browser.click("[data-test=candidate-form] [data-test=preview]");
    browser.wait_for_text("[data-test=candidate-preview]", &["1 file: shop.yaml"]);
    apply(&browser, "[data-test=candidate-preview] [data-test=apply]", "Evaluate the rules of shop.yaml on 100%");
    browser.wait_for_text("[data-test=candidate-result]", &["uploaded"]);
    assert_eq!(send(server, 4, "user", "bob"), 4, "candidate rules deny nothing");
    browser.wait_for_text("[data-test=candidate-outcomes]", &["would deny 2 more"]);
    browser.wait_for_text("[data-test=candidate-rules] tbody tr", &["shop.user", "4", "would deny 2 more"]);
    for (action, sentence, limit) in [
        ("promote", "Put the candidate rules in force", 2),
        ("rollback", "Restore the rules that the last promotion", 5),
    ] {
        browser.click(&format!("[data-test={action}]"));
        browser.wait_for_text("[data-test=confirm-sentence]", &[sentence]);
        browser.type_into("dialog input[name=reason]", action);
        browser.click("[data-test=confirm]");
        browser.wait_for_text("[data-test=candidate] p[role=status]", &[sentence, "done"]);
        wait_for("the rules to be in force", || (request(server, "user", action).1 == limit).then_some(()));
    }
}
