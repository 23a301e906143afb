//! The connection to the instance: events, restarts, and several instances.

use std::{path::Path, time::Instant};

use serde_json::json;

use super::{RULES, folder, open, send};
use crate::support::{
    Browser, Operator, RedisServer, Server,
    operator::OPERATE,
    server::{command, post},
};

#[test]
fn an_event_appears_in_an_open_page() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &operator.server, "now");
    browser.wait_for_text("[data-test=events] li", &["Started"]);
    for mode in ["shadow", "off", "deny"] {
        let target = json!({ "switch": { "domain": "shop" } });
        let change = json!({ "changes": [{ "target": target, "value": mode }], "reason": format!("drill {mode}") });
        assert_eq!(operator.call(OPERATE, "PutOverrides", &change.to_string()).0, 200);
        let answered = Instant::now();
        let drill = format!("drill {mode}");
        let event = browser.wait_for_text("[data-test=events] li:first-child", &["Switch", &drill, "alice"]);
        println!("the event appeared {:?} after the answer (budget: 1 s): {event}", answered.elapsed());
        assert!(event.contains("shop"), "{event}");
        // Screen readers announce the event.
        browser.wait_for_text("[data-test=announcer]", &["shop"]);
    }
}

/// Starts an instance with this address for HTTP.
fn start_at(rules: &Path, http: &str, entities: &str) -> Server {
    let mut command = command();
    command.args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", http]).env("SLUICEGATE__SHUTDOWN__DELAY", "0s");
    Server::from_command(command).rules(rules).store("memory").set("console.entities", entities).start()
}

#[test]
fn a_page_reports_a_lost_connection_and_reconnects_after_a_restart() {
    let folder = folder();
    let server = start_at(folder.path(), "127.0.0.1:0", "local");
    let address = server.http.to_string();
    send(&server, 30, "user", "bob");
    let browser = Browser::start();
    open(&browser, &server, "now");
    browser.wait_for_text("[data-test=denied-entities]", &["user=bob"]);
    let denied_share = "parseFloat(document.querySelector('[data-test=denied] .figure-value').innerText) > 0";
    browser.wait_while(denied_share, || _ = send(&server, 1, "user", "bob"));
    // The charts have a period with requests.
    let period = "/highest[^/]*[1-9][^/]*\\/s/.test(document.querySelector('[data-test=chart-decisions]').innerText)";
    browser.wait_for(period);
    browser.run("window.isFirstLoad = true", &json!([]));
    assert_eq!(browser.text("[data-test=banner]"), "");
    // The browser logs connections that fail.
    browser.expect_log("net::ERR_");
    drop(server);
    let stopped = Instant::now();
    browser.wait_for_text("[data-test=banner]", &["No connection to the instance since", "Trying again"]);
    println!("the banner appeared {:?} after the stop (budget: 3 s)", stopped.elapsed());
    // The data of the page stays, without colours. The tables are loaded every five seconds, also in this time.
    let requests = "performance.getEntriesByType('resource')\
                    .filter(({ name }) => /ListRuleActivity|ListTopEntities/.test(name)).length";
    let before = browser.value(requests).as_u64().unwrap();
    browser.wait_for(&format!("{requests} > {}", before + 1));
    browser.wait_for_text("[data-test=denied-rules]", &["shop.user"]);
    browser.wait_for_text("[data-test=denied-entities]", &["user=bob"]);
    assert_eq!(browser.count("[data-test=alert]"), 0);
    let is_grey = "(() => { const { color } = getComputedStyle(document.querySelector('[data-test=denied-rules] a'));\
                   return color === getComputedStyle(document.querySelector('.one-instance')).color; })()";
    assert_eq!(browser.value(is_grey), true);
    let server = start_at(folder.path(), &address, "token");
    let started = Instant::now();
    browser.wait_for("document.querySelector('[data-test=banner]').textContent === ''");
    println!("the page was connected {:?} after the start (budget: 5 s)", started.elapsed());
    // The new process has another setting and no activity yet. The page states this, and has the earlier periods.
    browser.wait_for_text("[data-test=role]", &["Not signed in"]);
    browser.wait_for_text("[data-test=none-denied]", &["No rule denied a request since this instance started at"]);
    browser.wait_for_text("[data-test=kept]", &["received from the former process"]);
    assert_eq!(browser.value(period), true);
    assert_eq!(browser.count("main.old"), 0);
    // Its requests appear without a reload.
    let decisions = "parseFloat(document.querySelector('[data-test=decisions] .figure-value').innerText) > 0";
    browser.wait_for(&format!("!({decisions})"));
    assert_eq!(send(&server, 1, "user", "bob"), 1);
    browser.wait_for(decisions);
    assert_eq!(browser.value("window.isFirstLoad"), true);
}

#[test]
fn a_page_reports_an_instance_that_does_not_answer() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "rules");
    browser.wait_for_text("[data-test=rule-row]", &["user"]);
    browser.expect_log("net::ERR_");
    server.signal("STOP");
    let stopped = Instant::now();
    browser.wait_for_text("[data-test=banner]", &["No connection to the instance since"]);
    println!("the banner appeared {:?} after the stop (budget: 3 s)", stopped.elapsed());
    server.signal("CONT");
    browser.wait_for("document.querySelector('[data-test=banner]').textContent === ''");
}

#[test]
fn an_open_page_shows_changed_rules() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "descriptor?d=shop%20user%3Deve");
    browser.wait_for_text("[data-test=matched-rule]", &["5 per year"]);
    let changed = RULES.replace("requests_per_unit: 5 ", "requests_per_unit: 7 ");
    std::fs::write(folder.path().join("shop.yaml"), changed).unwrap();
    browser.wait_for_text("[data-test=matched-rule]", &["7 per year"]);
}

#[test]
fn all_instances_are_summed_up() {
    let folder = folder();
    let redis = RedisServer::start();
    let start = || Server::start(folder.path(), &redis.url());
    let (first, second) = (start(), start());
    // The page shows the number of errors of the last hour, an exact sum: requests without a domain have no decision.
    let send_invalid =
        |server: &Server| post(&server.url("/json"), br#"{"descriptors":[{"entries":[{"key":"user"}]}]}"#);
    for (server, number) in [(&first, 3), (&second, 4)] {
        assert_eq!(send(server, number, "path", "/cart"), number);
        (0..number).for_each(|_| assert_eq!(send_invalid(server).0, 400));
    }
    let browser = Browser::start();
    open(&browser, &first, "now");
    browser.wait_for_text("[data-test=errors]", &["3 in the last hour"]);
    browser.click("[data-test=scope] input[value=all]");
    browser.wait_for_text("[data-test=instances]", &["2 instances"]);
    browser.wait_for_text("[data-test=errors]", &["7 in the last hour"]);
    // The tables state which instances they count. The state of Redis is that of the instance that serves the page.
    for place in ["#hour", "#events", "[data-test=none-denied]"] {
        browser.wait_for_text(place, &["on all 2 instances"]);
    }
    let name = browser.text("[data-test=instance]");
    browser.wait_for_text("#health", &[&format!("on {name} only")]);
    assert!(browser.value("location.hash").as_str().unwrap().contains("scope=all"));
    // Both counted in Redis: the page of either instance shows the same counter.
    open(&browser, &second, "descriptor?d=shop%20path%3D%2Fcart");
    assert_eq!(browser.text("[data-test=used]"), "7");
    // An instance that stops is not an instance any more.
    open(&browser, &second, "now?scope=all");
    browser.wait_for_text("[data-test=instances]", &["2 instances"]);
    drop(first);
    browser.wait_for_text("[data-test=instances]", &["1 instance"]);
}
