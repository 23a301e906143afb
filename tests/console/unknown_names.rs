//! Overrides that match nothing, because they have names that the rules do not have.

use serde_json::json;

use super::{folder, open, sign_in};
use crate::support::{
    Browser, Operator, Server,
    operator::{OPERATE, READ},
};

#[test]
fn overrides_that_match_nothing_are_marked_with_the_reason() {
    let folder = folder();
    let builder = Server::builder().rules(folder.path()).store("memory").set("console.entities", "token");
    let operator = Operator::with(builder);
    let server = &operator.server;
    let limit = |domain: &str| json!({ "limit": { "domain": domain, "entries": [{ "key": "user", "value": "bob" }] } });
    let changes = json!([
        { "target": { "switch": { "domain": "shpo" } }, "value": "shadow" },
        { "target": { "switch": { "domain": "shop" } }, "value": "shadow" },
        { "target": limit("shopp"), "value": "7/year" },
        { "target": limit("shop"), "value": "8/year" },
    ]);
    let request = json!({ "changes": changes, "reason": "drill" });
    assert_eq!(operator.call(OPERATE, "PutOverrides", &request.to_string()).0, 200);
    let browser = Browser::start();
    // Callers without a token see switches.
    open(&browser, server, "change");
    let public = "[data-test=public-state] li";
    browser.wait_for_text(public, &["domain shpo", "matches nothing", "did you mean \"shop\"?"]);
    assert_eq!((browser.count(public), browser.count("[data-test=matches-nothing]")), (2, 1));
    sign_in(&browser, READ, "Read only: eve");
    let row = "[data-test=overrides] tbody tr";
    browser.wait_for_text(row, &["domain shpo", "matches nothing", "did you mean \"shop\"?"]);
    browser.wait_for_text(row, &["shopp user=bob", "matches nothing", "did you mean \"shop\"?"]);
    assert_eq!((browser.count(row), browser.count("[data-test=matches-nothing]")), (4, 2));
    open(&browser, server, "descriptor?d=shopp%20user%3Dbob");
    let applies = "[data-test=overrides-that-apply] li";
    browser.wait_for_text(applies, &["7/year", "matches nothing", "did you mean \"shop\"?"]);
    open(&browser, server, "descriptor?d=shop%20user%3Dbob");
    browser.wait_for_text(applies, &["8/year"]);
    assert_eq!(browser.count("[data-test=matches-nothing]"), 0);
}
