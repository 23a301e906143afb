//! The web console: a real service, real Redis servers, and a real browser.

use serde_json::json;

use crate::support::{
    Browser, Server,
    browser::key,
    rules,
    server::{agent, post},
};

/// Tokens, roles, and the settings of the console.
mod access;
/// Accessibility: axe-core on every page, and work with the keyboard only.
mod accessibility;
/// Changes by an operator: limits, switches, candidate rules, and how to undo them.
mod changes;
/// Charts: the texts of ticks, and the time under the pointer.
mod charts;
/// The connection to the instance: events, restarts, and several instances.
mod connection;
/// The entities of a customer.
mod customers;
/// Forms: lists of existing names, unknown names, ends, plans, resets and refunds.
mod forms;
/// Names with markup, control characters, and thousands of characters.
mod hostile_names;
/// The pictures of docs/guides/console.md.
mod images;
/// The page “Rules” with 100,000 rules.
mod many_rules;
/// Requests that other sites cause, and pages that embed the console.
mod other_sites;
/// The numbers on every page.
mod pages;
/// Numbers of requests and of hits, and descriptors without a rule.
mod requests;
/// The choices of the instances and of the time.
mod scope;
/// Overrides with names that the rules do not have.
mod unknown_names;
/// The fields and enum values of the admin API.
mod words;

/// Windows of a year: no test sees the end of one.
const RULES: &str = "domain: shop\ndescriptors:\n\
                     - key: user\n  rate_limit: { unit: year, requests_per_unit: 5 }\n\
                     - key: path\n  rate_limit: { unit: year, requests_per_unit: 1000000 }\n\
                     - key: plan\n  value: free\n  rate_limit: { unit: year, requests_per_unit: 50 }\n";

fn folder() -> tempfile::TempDir {
    rules(&[("shop.yaml", RULES)])
}

/// Sends requests with one entry in the domain `shop` and returns the number of those that were allowed.
fn send(server: &Server, number: usize, key: &str, value: &str) -> usize {
    (0..number).filter(|_| request(server, key, value).0 == 200).count()
}

/// Sends a request with one entry in the domain `shop` and returns the status code and the limit that applied.
fn request(server: &Server, key: &str, value: &str) -> (u16, u64) {
    let entries = json!([{ "key": key, "value": value }]);
    let body = json!({ "domain": "shop", "descriptors": [{ "entries": entries }] }).to_string();
    let (code, text) = post(&server.url("/json"), body.as_bytes());
    // The body of an error is not JSON.
    let answer: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
    (code, answer["statuses"][0]["currentLimit"]["requestsPerUnit"].as_u64().unwrap_or_default())
}

/// Sends a request with this number of hits and one entry in the domain `shop`, and returns the status code.
fn send_hits(server: &Server, key: &str, value: &str, hits: u32) -> u16 {
    let descriptor = json!({ "entries": [{ "key": key, "value": value }], "hitsAddend": hits.to_string() });
    post(&server.url("/json"), json!({ "domain": "shop", "descriptors": [descriptor] }).to_string().as_bytes()).0
}

/// Calls a method of the API on the HTTP listener with these headers, and returns the status code and the body.
fn call(server: &Server, method: &str, headers: &[(&str, &str)], body: &str) -> (u16, String) {
    let request = agent().post(server.url(&format!("/v1/{method}")));
    let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
    let mut response = request.send(body.as_bytes()).unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

/// Opens a page of the console by the fragment of its URL.
fn open(browser: &Browser, server: &Server, page: &str) {
    browser.open(&server.url(&format!("/#/{page}")));
    let name = page.split('?').next().unwrap();
    browser.wait_for_text(&format!("main[data-page={name}] h1"), &[]);
}

/// Signs in with the button at the top of the page, and waits until the page shows the role.
fn sign_in(browser: &Browser, token: &str, role: &str) {
    browser.click("[data-test=sign-in]");
    browser.type_into("input[name=token]", &format!("{token}{}", key::ENTER));
    browser.wait_for_text("[data-test=role]", &[role]);
    browser.wait_until_gone("dialog");
}
