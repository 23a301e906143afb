//! The pictures of docs/guides/console.md. To write them again:
//! `cargo test --test integration console::images -- --ignored`

use std::time::{Duration, Instant};

use serde_json::json;

use super::{open, sign_in};
use crate::support::{Browser, Operator, Server, operator::OPERATE, repository, ring, rules, server::post};

const RULES: &str = "\
domain: shop
descriptors:
- key: user
  rate_limit: { unit: minute, requests_per_unit: 120, algorithm: sliding_window }
- key: path
  value: /search
  rate_limit: { unit: second, requests_per_unit: 20, algorithm: token_bucket, burst: 40 }
- key: path
  value: /orders
  rate_limit: { unit: minute, requests_per_unit: 900 }
- key: path
  value: /login
  descriptors:
  - key: address
    rate_limit: { unit: minute, requests_per_unit: 10, algorithm: sliding_log }
- key: plan
  value: free
  rate_limit: { unit: minute, requests_per_unit: 840, algorithm: sliding_window }
- key: plan
  value: pro
  rate_limit: { unit: minute, requests_per_unit: 3000, algorithm: sliding_window, consistency: leased }
";

const USERS: [&str; 12] =
    ["alice", "bruno", "chloe", "deniz", "emeka", "freja", "goran", "hana", "imani", "jules", "kiran", "lucia"];

/// Sends one request with these descriptors.
fn send(server: &Server, descriptors: &[&[(&str, &str)]]) {
    let entries = |entries: &&[(&str, &str)]| {
        let entries: Vec<_> = entries.iter().map(|(key, value)| json!({ "key": key, "value": value })).collect();
        json!({ "entries": entries })
    };
    let descriptors: Vec<_> = descriptors.iter().map(entries).collect();
    post(&server.url("/json"), json!({ "domain": "shop", "descriptors": descriptors }).to_string().as_bytes());
}

/// Sends the traffic of one second: many users below their limits, one above, and one address that tries to log in.
fn send_second(server: &Server, second: u32) {
    let wave = (f64::from(second) / 9.0).sin().mul_add(9.0, 22.0) as u32;
    for request in 0..wave {
        let user = USERS[(request * 7 + second) as usize % USERS.len()];
        let plan = if request % 3 == 0 { "pro" } else { "free" };
        send(server, &[&[("user", user)], &[("plan", plan)]]);
        send(server, &[&[("path", "/search")]]);
        if request % 7 == 0 {
            send(server, &[&[("user", "mallory")], &[("path", "/orders")]]);
        }
    }
    if second.is_multiple_of(2) {
        send(server, &[&[("path", "/login"), ("address", "203.0.113.7")]]);
    }
}

fn write_picture(browser: &Browser, name: &str) {
    let path = repository("docs/images").join(format!("{name}.png"));
    browser.screenshot(&path);
    let bytes = std::fs::metadata(&path).unwrap().len();
    assert!(bytes <= 150_000, "{} is too large: {bytes} bytes", path.display());
}

/// Takes five minutes, so that the charts contain lines.
#[test]
#[ignore = "writes docs/images"]
fn the_pictures_of_the_guide() {
    let (folder, traffic) = (rules(&[("shop.yaml", RULES)]), tempfile::tempdir().unwrap());
    let (_redis, url) = ring(2);
    let builder = Server::builder().rules(folder.path()).store(&url).set("record.share", "1");
    let operator = Operator::with(builder.set("record.dir", traffic.path().to_str().unwrap()));
    operator.ctl(&["limit", "set", "shop", "user=chloe", "600/minute", "--reason", "trade fair until Friday"]);
    std::thread::scope(|scope| {
        scope.spawn(|| send_traffic(&operator.server));
        std::thread::sleep(Duration::from_secs(130));
        operator.ctl(&[
            "switch",
            "shadow",
            "rule",
            "shop",
            "plan_free",
            "--reason",
            "incident 41: free plan too strict",
        ]);
        std::thread::sleep(Duration::from_secs(110));
        write_pictures(&operator.server);
    });
}

/// Sends requests for five minutes.
fn send_traffic(server: &Server) {
    for second in 0..300 {
        let next = Instant::now() + Duration::from_secs(1);
        send_second(server, second);
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
    }
}

fn write_pictures(server: &Server) {
    let browser = Browser::start();
    browser.set_window(1280, 680);
    browser.open(&server.url("/"));
    sign_in(&browser, OPERATE, "Operator: alice");
    open(&browser, server, "now");
    for (scheme, suffix) in [("dark", "-dark"), ("light", "")] {
        browser.set_color_scheme(scheme);
        browser.reload();
        browser.text("[data-test=denied-entities] tbody tr");
        browser.wait_for("document.querySelector('[data-test=chart-hits] canvas')");
        write_picture(&browser, &format!("console-now{suffix}"));
    }
    open(&browser, server, "rules");
    browser.wait_for_text("[data-test=rule-row]", &["user", "120 per minute"]);
    write_picture(&browser, "console-rules");
    open(&browser, server, "rule?path=shop.user");
    browser.text("[data-test=usage-entities] tbody tr");
    write_picture(&browser, "console-rule");
    open(&browser, server, "descriptor?d=shop%20user%3Dmallory");
    browser.text("[data-test=counter-parts]");
    write_picture(&browser, "console-descriptor");
    open(&browser, server, "change?tab=limit&domain=shop&entries=[[\"user\",\"mallory\"]]&limit=60%2Fminute");
    browser.type_into("input[name=reason]", "scrapes the orders");
    browser.click("[data-test=preview]");
    browser.wait_for_text("[data-test=simulation-summary]", &["recorded requests"]);
    write_picture(&browser, "console-change");
    write_picture_of_simulation(&browser, server);
}

fn write_picture_of_simulation(browser: &Browser, server: &Server) {
    open(browser, server, "simulate");
    let stricter = rules(&[("stricter.yaml", &RULES.replace("requests_per_unit: 120,", "requests_per_unit: 60,"))]);
    browser.click("input[name=rules][value=files]");
    browser.type_into("input[name=rule-files]", stricter.path().join("stricter.yaml").to_str().unwrap());
    browser.click("[data-test=run]");
    browser.text("[data-test=simulated-rule]");
    write_picture(browser, "console-simulate");
}
