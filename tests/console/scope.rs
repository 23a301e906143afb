//! The choices between this instance and all instances, and of the time, which are in the URL.

use serde_json::json;

use super::{call, folder, open, send};
use crate::support::{Browser, RedisServer, Server};

fn name_of(server: &Server) -> String {
    let answer: serde_json::Value = serde_json::from_str(&call(server, "GetSession", &[], "{}").1).unwrap();
    answer["instance"].as_str().unwrap().to_owned()
}

fn hash(browser: &Browser) -> String {
    browser.value("location.hash").as_str().unwrap().to_owned()
}

#[test]
fn one_choice_of_instances_applies_to_all_pages() {
    let folder = folder();
    let redis = RedisServer::start();
    let first = Server::start(folder.path(), &redis.url());
    let second = Server::start(folder.path(), &redis.url());
    // Both share the counter: the second one denies all of its requests.
    assert_eq!((send(&first, 8, "user", "bob"), send(&second, 4, "user", "bob")), (5, 0));
    assert_eq!(send(&second, 2, "usr", "bob"), 2);
    let own = format!("on {} only", name_of(&first));
    let browser = Browser::start();
    open(&browser, &first, "now");
    browser.wait_for_text("[data-test=denied-rules]", &[&own, "shop.user", "37.5%"]);
    browser.wait_for_text("[data-test=denied-entities]", &[&own, "shop user=bob", "3"]);
    assert_eq!(browser.count("[data-test=unmatched]"), 0);
    browser.click("[data-test=scope] input[value=all]");
    let all = "on all 2 instances";
    browser.wait_for_text("[data-test=denied-rules]", &[all, "shop.user", "7", "58.3%"]);
    browser.wait_for_text("[data-test=denied-entities]", &[all, "shop user=bob", "7"]);
    browser.wait_for_text("[data-test=unmatched]", &[all, "usr", "2"]);
    browser.wait_for_text("[data-test=events] li", &["Started", &name_of(&second)]);
    browser.click("[data-test=denied-rules] tbody a");
    browser.wait_for_text("[data-test=facts]", &["12 requests, 7 denied (58.3%)", "Since the first start"]);
    browser.wait_for_text("#entities", &[all]);
    browser.wait_for_text("[data-test=rule-most-denied] tbody tr", &["shop user=bob", "7"]);
    browser.click(".crumbs a");
    let row = "[data-test=rule-row][data-path='shop.user']";
    browser.wait_for_text(row, &["58.3%"]);
    browser.wait_for_text("main[data-page=rules] .title-row", &[all]);
    // The menu keeps the choice, also after a page that has none. A reload keeps it, too.
    browser.click("nav[aria-label=Pages] a[href^='#/descriptor']");
    browser.text("[data-test=examples]");
    browser.click("nav[aria-label=Pages] a[href^='#/rules']");
    browser.wait_for_text(row, &["58.3%"]);
    assert!(hash(&browser).contains("scope=all"), "{}", hash(&browser));
    browser.reload();
    browser.wait_for_text(row, &["58.3%"]);
    // Without the other instance, its numbers are gone, and the label names the remaining one.
    drop(second);
    browser.wait_for_text("main[data-page=rules] .title-row", &[&own]);
    browser.wait_for_text(row, &["37.5%"]);
}

/// Adds a period of 20 minutes ago with 10,000 requests per second to the messages of the stream.
const ADD_OLD_PERIOD: &str = "const parse = JSON.parse; JSON.parse = (text, ...others) => {\
    const message = parse(text, ...others);\
    if (message?.at && message.periods) {\
      const start = new Date(Math.floor(Date.now() / 5000) * 5000 - 1200000).toISOString();\
      message.periods.unshift({ start, lengthMs: 5000, requests: '50000' });\
    }\
    return message; };";

/// Keeps the bodies of calls of `ListTopEntities`.
const RECORD_CALLS: &str = "window.bodies = []; const send = window.fetch; window.fetch = (url, options) => {\
    if (url.endsWith('ListTopEntities')) window.bodies.push(options.body);\
    return send(url, options); };";

#[test]
fn a_time_range_applies_to_charts_and_entities() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    assert_eq!(send(&server, 6, "user", "bob"), 5);
    let browser = Browser::start();
    open(&browser, &server, "now");
    browser.run(&format!("{RECORD_CALLS}{ADD_OLD_PERIOD}"), &json!([]));
    let chart = "document.querySelector('[data-test=chart-decisions]').innerText";
    browser.wait_for_text("#hour", &["The last hour"]);
    browser.wait_for(&format!("{chart}.includes('highest') && {chart}.includes('10,000/s')"));
    browser.wait_for("window.bodies.some((body) => JSON.parse(body).periodSeconds === 3600)");
    for (range, title, seconds) in [("15m", "The last 15 minutes", 900), ("5m", "The last 5 minutes", 300)] {
        browser.click(&format!("[data-test=range] input[value='{range}']"));
        browser.wait_for_text("#hour", &[title]);
        browser.wait_for(&format!("!{chart}.includes('10,000/s')"));
        browser.wait_for(&format!("window.bodies.some((body) => JSON.parse(body).periodSeconds === {seconds})"));
        assert!(hash(&browser).contains(&format!("range={range}")), "{}", hash(&browser));
    }
    assert_eq!(browser.count("[data-test=range] input"), 3);
    browser.click("[data-test=range] input[value='1h']");
    browser.wait_for(&format!("{chart}.includes('10,000/s')"));
    // The URL reproduces the choice.
    open(&browser, &server, "now?range=15m");
    browser.reload();
    browser.wait_for_text("#hour", &["The last 15 minutes"]);
}

#[test]
fn all_instances_have_two_time_ranges() {
    let folder = folder();
    let redis = RedisServer::start();
    let server = Server::start(folder.path(), &redis.url());
    let browser = Browser::start();
    open(&browser, &server, "now?scope=all&range=15m");
    browser.wait_for_text("[data-test=instances]", &["1 instance"]);
    browser.wait_for_text("#hour", &["The last hour"]);
    let ranges = "[...document.querySelectorAll('[data-test=range] input')].map((input) => input.value).join()";
    assert_eq!(browser.value(ranges), "5m,1h");
    browser.click("[data-test=range] input[value='5m']");
    browser.wait_for_text("#hour", &["The last 5 minutes"]);
}
