//! Numbers of requests and of hits: the order of tables, columns of hits, and the descriptors that no rule matches.

use serde_json::json;

use super::{open, send, send_hits};
use crate::support::{Browser, Server, rules, server::agent};

const RULES: &str = "domain: shop\ndescriptors:\n\
                     - key: user\n  rate_limit: { unit: year, requests_per_unit: 5 }\n\
                     - key: tokens\n  rate_limit: { unit: year, requests_per_unit: 100000 }\n";

const COLUMNS: &str =
    "[...document.querySelectorAll('[data-test=denied-rules] th')].map((cell) => cell.innerText).join()";

#[test]
fn requests_are_ranked_and_hits_are_shown_where_they_differ() {
    let folder = rules(&[("shop.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    assert_eq!(send(&server, 8, "user", "bob"), 5);
    let browser = Browser::start();
    open(&browser, &server, "now");
    browser.wait_for_text("[data-test=denied-rules] tbody tr", &["shop.user", "3", "37.5%"]);
    browser.wait_for_text("[data-test=denied-entities] tbody tr", &["shop user=bob", "3"]);
    assert_eq!(browser.value(COLUMNS), "Rule,Limit,Denied requests,Denied share");
    assert_eq!(browser.count("[data-test=chart-hits], [data-test=denied-hits]"), 0);
    // One denied request with many hits stays below three with one hit each. The rule counts the hits over the limit, and
    // the ranking those of the denied request.
    assert_eq!(send_hits(&server, "tokens", "team", 90_000), 200);
    assert_eq!(send_hits(&server, "tokens", "team", 90_000), 429);
    browser.wait_for_text("[data-test=denied-rules] tbody tr:nth-child(2)", &["shop.tokens", "80,000", "50.0%"]);
    browser.wait_for_text("[data-test=denied-rules] tbody tr:first-child", &["shop.user", "37.5%"]);
    browser.wait_for_text("[data-test=denied-entities] tbody tr:nth-child(2)", &["shop tokens=team", "90,000"]);
    browser.wait_for_text("[data-test=denied-entities] tbody tr:first-child", &["shop user=bob"]);
    assert_eq!(browser.value(COLUMNS), "Rule,Limit,Denied requests,Denied hits,Denied share");
    browser.wait_for("document.querySelector('[data-test=chart-hits] canvas')");
    open(&browser, &server, "rules");
    browser.wait_for_text("[data-test=rule-row][data-path='shop.tokens']", &["50.0%"]);
    check_rules(&browser, &server);
    // The denied share is that of requests. The hits of the last seconds have a note while they differ.
    open(&browser, &server, "now");
    let has_hits = "document.querySelector('[data-test=denied-hits]')";
    browser.wait_while(has_hits, || _ = send_hits(&server, "tokens", "team", 90_000));
    browser.wait_for_text("[data-test=denied]", &["Denied share of requests", "requests/s", "hits/s"]);
}

/// Checks that the page of a rule shows both numbers only where they differ.
fn check_rules(browser: &Browser, server: &Server) {
    open(browser, server, "rule?path=shop.tokens");
    let both = "2 requests, 1 denied (50.0%); 180,000 hits, 80,000 denied (44.4%)";
    browser.wait_for_text("[data-test=facts]", &[both]);
    browser.wait_for_text("[data-test=rule-most-denied]", &["Denied hits", "shop tokens=team", "90,000"]);
    browser.wait_for_text("[data-test=rule-most-requested]", &["Most requested hits", "180,000"]);
    open(browser, server, "rule?path=shop.user");
    let facts = browser.wait_for_text("[data-test=facts]", &["8 requests, 3 denied (37.5%)"]);
    assert!(!facts.contains("hits"), "{facts}");
    let ranking = browser.wait_for_text("[data-test=rule-most-requested]", &["Most requests", "shop user=bob", "8"]);
    assert!(!ranking.contains("Hits"), "{ranking}");
}

#[test]
fn descriptors_without_a_rule_are_listed_with_the_nearest_rule() {
    let folder = rules(&[("shop.yaml", RULES)]);
    let server = Server::start(folder.path(), "memory");
    assert_eq!(send(&server, 6, "user", "bob"), 5);
    let browser = Browser::start();
    open(&browser, &server, "now");
    browser.wait_for_text("[data-test=denied-entities] tbody tr", &["shop user=bob"]);
    assert_eq!(browser.count("[data-test=unmatched]"), 0);
    assert_eq!(send(&server, 4, "usr", "bob"), 4);
    browser.wait_for_text("[data-test=unmatched] p", &["No rule matches these descriptors, so they have no limit."]);
    let row = "[data-test=unmatched] tbody tr";
    browser.wait_for_text(row, &["shop", "usr", "4", "shop.user"]);
    let name = browser.text("[data-test=instance]");
    browser.wait_for_text("[data-test=unmatched] caption", &[&format!("on {name} only")]);
    browser.click(&format!("{row} a"));
    browser.wait_for_text("main[data-page=rule] h1", &["shop.user"]);
    let body = json!({ "domain": "shopp", "descriptors": [{ "entries": [{ "key": "user", "value": "bob" }] }] });
    assert_eq!(agent().post(server.url("/json")).send(body.to_string().as_bytes()).unwrap().status(), 200);
    open(&browser, &server, "now");
    let row = "[data-test=unmatched] tbody tr:nth-child(2)";
    browser.wait_for_text(row, &["shopp", "unknown domain", "1"]);
    browser.wait_for_text(&format!("{row} td:last-child"), &["shop"]);
}
