//! The numbers on every page, with counters in memory and on a ring of Redis servers.

use std::process::Command;

use super::{folder, open, send, sign_in};
use crate::{
    support::{Browser, Operator, RedisServer, Server, operator::OPERATE, ring, wait_for},
    wire::quotas::Caller,
};

/// Sends 33 requests, so that 25 are denied, and waits until all are recorded.
fn send_traffic(server: &Server) {
    assert_eq!((send(server, 30, "user", "bob"), send(server, 3, "user", "eve")), (5, 3));
    wait_for("all requests to be recorded", || {
        (server.metric("sluicegate_recorded_requests_total") >= 33.0).then_some(())
    });
}

fn start(store: &str) -> (Operator, [tempfile::TempDir; 2]) {
    let folders = [folder(), tempfile::tempdir().unwrap()];
    let builder = Server::builder().rules(folders[0].path()).store(store);
    let builder = builder.set("record.dir", folders[1].path().to_str().unwrap()).set("record.share", "1");
    (Operator::with(builder), folders)
}

#[test]
fn every_page_shows_the_traffic_with_counters_in_memory() {
    let (operator, _folders) = start("memory");
    send_traffic(&operator.server);
    let browser = Browser::start();
    check_all_pages(&browser, &operator.server, "this process's memory");
    open(&browser, &operator.server, "now");
    assert_eq!(browser.text("[data-test=store]"), "counters in memory");
    assert_eq!(browser.count("[data-test=servers]"), 0);
    // Counters in memory are not shared, so that there is no sum over instances.
    browser.wait_for_text("[data-test=no-instances]", &["needs Redis or peers"]);
    assert_eq!(browser.count("[data-test=scope] input[value=all]:disabled"), 1);
}

#[test]
fn every_page_shows_the_traffic_with_counters_on_a_ring() {
    let (mut redis, url) = ring(2);
    let (operator, _folders) = start(&url);
    let server = &operator.server;
    send_traffic(server);
    let has_counter = |redis: &RedisServer| redis.cli(&["EXISTS", "sluicegate:{shop|user=bob}fw:31536000"]) == "1";
    let owner = redis.iter().position(has_counter).expect("a server has the counter");
    let browser = Browser::start();
    check_all_pages(&browser, server, &format!("127.0.0.1:{}", redis[owner].port));
    open(&browser, server, "now");
    browser.wait_for_text("[data-test=store]", &["ring"]);
    // Only failures are red.
    let red = "[...document.querySelectorAll('.chart figcaption > div')].filter((line) => \
               line.querySelector('line').getAttribute('style').includes('--bad')).map((line) => line.innerText.split(':')[0].trim()).join()";
    browser.wait_for("document.querySelector('[data-test=chart-store] canvas')");
    assert_eq!(browser.value(red), "Failed calls");
    for node in &redis {
        browser.wait_for_text("[data-test=servers] tr", &[&node.port.to_string(), "up"]);
    }
    // The page reports the failure of a server without a reload.
    redis[owner].kill();
    let name = redis[owner].port.to_string();
    let is_down = format!(
        "[...document.querySelectorAll('[data-test=servers] tr')].some((row) => row.innerText.includes('{name}') && row.innerText.includes('down'))"
    );
    browser.wait_while(&is_down, || _ = send(server, 1, "user", "bob"));
    browser.wait_for_text("[data-test=events] li", &["Server down", &name]);
    browser.wait_for_text("[data-test=servers] tr", &[&redis[1 - owner].port.to_string(), "up"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_counter_shows_the_quotas_of_its_limit() {
    let (operator, _folders) = start("memory");
    let mut caller = Caller::connect(&operator.server).await;
    caller.report("shop", "path", "/cart", 1, 0).await;
    let browser = Browser::start();
    open(&browser, &operator.server, "descriptor?d=shop%20path%3D%2Fcart");
    browser.wait_for_text("[data-test=quotas]", &["15.6% of the limit, for Envoys", "(1)"]);
    open(&browser, &operator.server, "descriptor?d=shop%20path%3D%2Fother");
    browser.wait_for_text("[data-test=remaining]", &["1,000,000"]);
    assert_eq!(browser.count("[data-test=quotas]"), 0);
}

fn check_all_pages(browser: &Browser, server: &Server, counter_server: &str) {
    check_now(browser, server);
    check_rules(browser, server);
    check_descriptor(browser, server, counter_server);
    check_change(browser, server);
    check_simulate(browser, server);
}

fn check_now(browser: &Browser, server: &Server) {
    open(browser, server, "now");
    browser.wait_for_text("[data-test=denied-rules] tbody tr", &["shop.user", "5 per year", "25", "75.8%"]);
    browser.wait_for_text("[data-test=denied-entities] tbody tr", &["shop user=bob", "shop.user", "25"]);
    browser.wait_for_text("[data-test=events] li", &["Started"]);
    assert_eq!(browser.count("[data-test=empty]"), 0);
    // The rates are those of the last seconds, so that they need requests in these seconds.
    let figure =
        |name: &str| format!("parseFloat(document.querySelector('[data-test={name}] .figure-value').innerText) > 0");
    browser.wait_while(&figure("decisions"), || _ = send(server, 1, "path", "/cart"));
    browser.wait_while(&figure("latency"), || _ = send(server, 1, "path", "/cart"));
    assert!(browser.text("[data-test=errors]").contains("0 in the last hour"));
    browser.wait_for("document.querySelector('[data-test=chart-decisions] canvas')");
    // Charts are drawn again when the browser changes between light and dark. 52 59 66 is the colour of lines in dark mode.
    let has_dark_line = "(() => { const canvas = document.querySelector('[data-test=chart-decisions] canvas');\
        const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);\
        return data.some((red, index) => index % 4 === 0 && red === 52 && data[index + 1] === 59 && data[index + 2] === 66); })()";
    browser.expect_log("willReadFrequently");
    assert_eq!(browser.value(has_dark_line), false);
    browser.set_color_scheme("dark");
    browser.wait_for(has_dark_line);
    browser.set_color_scheme("light");
}

fn check_rules(browser: &Browser, server: &Server) {
    open(browser, server, "rules");
    browser.wait_for_text("[data-test=rule-row][data-path='shop.user']", &["5 per year", "fixed window", "75.8%"]);
    browser.wait_for_text("[data-test=rule-row][data-path='shop.plan_free']", &["50 per year", "–"]);
    browser.wait_for_text("[data-test=rule-row][data-path='shop.path']", &["1,000,000 per year"]);
    browser.wait_for_text("[data-test=totals]", &["3 rules"]);
    assert_eq!(send(server, 1, "plan", "free"), 1);
    browser.wait_for_text("[data-test=rule-row][data-path='shop.plan_free']", &["0%"]);
    browser.click("[data-test=rule-row][data-path='shop.user'] a");
    browser.wait_for_text("[data-test=facts]", &["5 per year", "33 requests, 25 denied (75.8%)", "shop.yaml:3"]);
    browser.wait_for_text("[data-test=rule-most-denied] tbody tr", &["shop user=bob", "25"]);
    browser.wait_for_text("[data-test=rule-most-requested] tbody tr", &["shop user=eve", "3"]);
    browser.wait_for_text("[data-test=usage]", &["2 entities read", "1 uses at least 100% of the limit"]);
    browser.wait_for_text("[data-test=usage-entities] tbody tr", &["shop user=eve", "3", "5", "60.0%"]);
    // A rule belongs to the list of rules, and has no place in the menu.
    assert_eq!(browser.text("nav[aria-label=Pages] [aria-current=true]"), "Rules");
    assert_eq!(browser.count("nav[aria-label=Pages] a"), 5);
    open(browser, server, "rule?path=shop.nothing");
    browser.wait_for_text("[data-test=unknown-rule]", &["No rule has this path"]);
}

fn check_descriptor(browser: &Browser, server: &Server, counter_server: &str) {
    open(browser, server, "descriptor");
    browser.type_into("textarea[name=descriptor]", "shop user=bob\u{e007}");
    browser.wait_for_text("[data-test=decision]", &["would be denied now", "would be allowed in"]);
    browser.wait_for_text("[data-test=first-denial]", &["the first denial was at", "may have been allowed since then"]);
    browser.wait_for_text("[data-test=matched-rule]", &["shop.user", "5 per year", "Decided by the rule"]);
    browser.wait_for_text("[data-test=steps] li", &["matches the rule for any user"]);
    browser.wait_for_text("[data-test=counter]", &[counter_server, "{shop|user=bob}fw:31536000"]);
    assert_eq!(browser.text("[data-test=remaining]"), "0");
    // The URL reproduces the page, also after a reload.
    open(browser, server, "descriptor?d=shop%20user%3Deve");
    browser.reload();
    browser.wait_for_text("[data-test=decision]", &["would be allowed now"]);
    assert_eq!((browser.text("[data-test=used]"), browser.text("[data-test=remaining]")), ("3".into(), "2".into()));
    // The page refreshes a counter every second if the operator wants it to. This takes no hits.
    browser.click("[data-test=live]");
    assert_eq!(send(server, 1, "user", "eve"), 1);
    browser.wait_for("document.querySelector('[data-test=used]').innerText === '4'");
}

fn check_change(browser: &Browser, server: &Server) {
    open(browser, server, "change");
    sign_in(browser, OPERATE, "Operator: alice");
    browser.wait_for_text("[data-test=overrides]", &["No override is set"]);
    browser.wait_for_text("[data-test=audit-log]", &["No changes yet"]);
    for tab in ["plan", "switch", "counter", "candidate"] {
        browser.click(&format!("[data-test=tab-{tab}]"));
        browser.wait_for(&format!("document.querySelector('[data-test={tab}-form]')"));
    }
}

fn check_simulate(browser: &Browser, server: &Server) {
    open(browser, server, "simulate");
    browser.click("[data-test=run]");
    browser.wait_for_text("[data-test=simulated-rule]", &["shop.user", "5 per year", "1 of 2"]);
    for (figure, value) in [("denied-before", "25"), ("denied-after", "25"), ("newly-denied", "0"), ("skipped", "0")] {
        assert_eq!(browser.text(&format!("[data-test=simulated-{figure}] .figure-value")), value, "{figure}");
    }
    // A stricter limit in an uploaded file denies more of the recorded requests.
    let file = tempfile::NamedTempFile::with_suffix(".yaml").unwrap();
    std::fs::write(file.path(), super::RULES.replace("requests_per_unit: 5 ", "requests_per_unit: 2 ")).unwrap();
    browser.click("input[name=rules][value=files]");
    browser.type_into("input[name=rule-files]", file.path().to_str().unwrap());
    browser.click("[data-test=run]");
    browser.wait_for_text("[data-test=simulated-rule]", &["shop.user", "2 per year"]);
    assert_eq!(browser.text("[data-test=simulated-newly-denied] .figure-value"), "5");
    // Requests of an access log, with the example of a mapping that the form contains.
    let log = tempfile::NamedTempFile::new().unwrap();
    let line = |second: u64| format!("{{\"start_time\": \"2026-03-01T00:00:{second:02}Z\", \"x_user\": \"ann\"}}\n");
    std::fs::write(log.path(), (0..9).map(line).collect::<String>()).unwrap();
    browser.click("input[name=requests][value=log]");
    browser.type_into("input[name=access-log]", log.path().to_str().unwrap());
    browser.click("[data-test=run]");
    browser.wait_for_text("[data-test=simulated-denied-after] .figure-value", &["7"]);
}

#[test]
fn the_first_request_removes_the_example_command_without_a_reload() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "now");
    let command = browser.wait_for_text("[data-test=curl]", &["curl", &server.http.to_string(), "\"user\""]);
    browser.run("window.isFirstLoad = true", &serde_json::json!([]));
    let output = Command::new("sh").args(["-c", &format!("{command} -sS")]).output().unwrap();
    let answer = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(answer.contains("\"overallCode\":\"OK\""), "{command}: {answer}");
    browser.wait_until_gone("[data-test=empty]");
    assert_eq!(browser.value("window.isFirstLoad"), true);
    browser.wait_for_text("[data-test=role]", &["Read only"]);
}
