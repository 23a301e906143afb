//! Accessibility: axe-core on every page, and work with the keyboard only.

use serde_json::json;

use super::{RULES, folder, open, request, send, sign_in};
use crate::support::{
    Browser, Operator, Server,
    browser::key,
    operator::{OPERATE, READ},
    wait_for,
};

#[test]
fn axe_finds_no_violations_in_light_and_dark() {
    let (folder, traffic) = (folder(), tempfile::tempdir().unwrap());
    let builder = Server::builder().rules(folder.path()).store("memory").set("record.share", "1");
    let operator = Operator::with(builder.set("record.dir", traffic.path().to_str().unwrap()));
    let server = &operator.server;
    send(server, 30, "user", "bob");
    send(server, 45, "plan", "free");
    operator.ctl(&["limit", "set", "shop", "user=eve", "100/minute", "--reason", "trial"]);
    operator.ctl(&["switch", "shadow", "rule", "shop", "path", "--reason", "incident"]);
    let files =
        json!([{ "name": "shop.yaml", "text": RULES.replace("requests_per_unit: 5 ", "requests_per_unit: 2 ") }]);
    let upload = json!({ "files": files, "share": 1, "reason": "fewer" });
    assert_eq!(operator.call(OPERATE, "UploadCandidate", &upload.to_string()).0, 200);
    wait_for("the requests to be recorded", || {
        (server.metric("sluicegate_recorded_requests_total") >= 75.0).then_some(())
    });
    let browser = Browser::start();
    for (width, role) in [(1280, "public"), (400, "operate")] {
        browser.set_window(width, 800);
        browser.open(&server.url("/"));
        if role == "operate" {
            sign_in(&browser, OPERATE, "Operator: alice");
        }
        for scheme in ["light", "dark"] {
            browser.set_color_scheme(scheme);
            check_pages(&browser, server, &format!("{role} {scheme}"), role == "operate");
        }
    }
}

/// Checks each page in its complete state.
fn check_pages(browser: &Browser, server: &Server, what: &str, is_operator: bool) {
    let pages = [
        ("now", "[data-test=denied-entities] tbody tr"),
        ("rules", "[data-test=rule-row]"),
        ("rule?path=shop.user", "[data-test=usage-entities] tbody tr"),
        ("descriptor", "[data-test=examples] a"),
        ("descriptor?d=shop%20user%3Dbob", "[data-test=counter]"),
        ("descriptor?d=bob", "[data-test=found-entities] tbody tr"),
        ("change", "[data-test=overrides] tbody tr"),
        ("change?tab=plan", "[data-test=plan-form]"),
        ("change?tab=counter", "[data-test=counter-form]"),
        ("change?tab=switch&scope=rule&domain=shop&rule=user", "[data-test=switch-form]"),
        ("change?tab=candidate", "[data-test=candidate-form]"),
        ("simulate", "[data-test=run]:not(:disabled)"),
    ];
    let check = |page: &str| {
        let violations = browser.accessibility_violations();
        assert!(violations.is_empty(), "{what}, {page}:\n{violations}");
        let is_wider = browser.value("document.documentElement.scrollWidth > innerWidth");
        assert_eq!(is_wider, false, "{what}, {page}: the page is wider than the window");
    };
    for (page, sign) in pages {
        open(browser, server, page);
        browser.wait_for(&format!("document.querySelector({})", json!(sign)));
        check(page);
    }
    browser.click("[data-test=run]");
    browser.wait_for("document.querySelector('[data-test=simulated-rule]')");
    check("simulate, the report");
    if is_operator {
        // A preview is a change that the service rejects.
        browser.expect_log("the server responded with a status of 4");
        open(browser, server, "change?tab=limit&domain=shopp&entries=[[\"user\",\"bob\"]]&limit=7%2Fyear");
        browser.type_into("input[name=reason]", "accessible");
        browser.click("[data-test=preview]");
        browser.text("[data-test=apply-anyway]");
        check("change, an unknown name");
        open(browser, server, "change?tab=limit&domain=shop&entries=[[\"user\",\"bob\"]]&limit=7%2Fyear");
        browser.type_into("input[name=reason]", "accessible");
        browser.click("[data-test=preview]");
        browser.wait_for_text("[data-test=simulation-summary]", &["recorded requests"]);
        check("change, the preview");
        browser.click("[data-test=apply]");
        browser.wait_for_text("[data-test=confirm-sentence]", &["7/year"]);
        check("change, the confirmation");
        browser.click("dialog button[type=button]");
        browser.wait_until_gone("dialog");
    }
}

/// Presses the tab key until the element has the focus.
fn tab_to(browser: &Browser, selector: &str) {
    browser.wait_for(&format!("document.querySelector({})", json!(selector)));
    let has_focus = format!("!!document.activeElement?.matches({})", json!(selector));
    for _ in 0..60 {
        if browser.value(&has_focus) == true {
            // The focus is visible.
            let outline = browser.value("getComputedStyle(document.activeElement).outlineStyle");
            assert_ne!(outline, "none", "{selector}");
            return;
        }
        browser.press(&key::TAB.to_string());
    }
    let state = browser.value("document.activeElement.outerHTML + document.querySelector('dialog')?.outerHTML");
    panic!("60 presses of the tab key do not reach {selector}; the focus is on {state}");
}

#[test]
fn a_keyboard_is_sufficient_to_set_a_limit() {
    let folder = folder();
    let operator = Operator::start(folder.path(), "memory");
    let server = &operator.server;
    assert_eq!((send(server, 20, "user", "bob"), send(server, 1, "path", "/cart")), (5, 1));
    let browser = Browser::start();
    open(&browser, server, "now");
    let (enter, down) = (key::ENTER.to_string(), key::ARROW_DOWN.to_string());
    tab_to(&browser, "[data-test=sign-in]");
    browser.press(&enter);
    // Before the dialog is modal, the key would not close it.
    browser.wait_for("document.querySelector('dialog:modal')");
    // A closed dialog returns the focus to the button that opened it.
    browser.press(&key::ESCAPE.to_string());
    browser.wait_for("document.activeElement.matches('[data-test=sign-in]')");
    browser.press(&enter);
    tab_to(&browser, "input[name=token]");
    browser.press(&format!("{OPERATE}{enter}"));
    browser.wait_for_text("[data-test=role]", &["Operator: alice"]);
    tab_to(&browser, "nav a[href='#/rules']");
    browser.press(&enter);
    browser.wait_for_text("#row-1", &["user"]);
    tab_to(&browser, "[data-test=rules-grid]");
    browser.press(&down);
    browser.wait_for("document.querySelector('#row-1.active')");
    let active = browser.value("document.activeElement.getAttribute('aria-activedescendant')");
    assert_eq!(active, "row-1");
    browser.press(&enter);
    browser.wait_for_text("main[data-page=rule] h1", &["shop.user"]);
    // A new page has the focus on its heading.
    assert_eq!(browser.value("document.activeElement.tagName"), "H1");
    tab_to(&browser, "[data-test=rule-most-denied] a");
    browser.press(&enter);
    tab_to(&browser, "[data-test=set-limit]");
    browser.press(&enter);
    tab_to(&browser, "input[name=limit]");
    browser.press("2/year");
    tab_to(&browser, "input[name=reason]");
    browser.press("by keyboard");
    tab_to(&browser, "[data-test=preview]");
    browser.press(&key::SPACE.to_string());
    browser.wait_for_text("[data-test=before-after]", &["shop user=bob", "2/year"]);
    tab_to(&browser, "[data-test=apply]");
    browser.press(&enter);
    tab_to(&browser, "[data-test=confirm]");
    browser.press(&enter);
    browser.wait_for_text("[data-test=result]", &["Applied with version"]);
    assert_eq!(request(server, "user", "bob"), (429, 2));
    let (_, list) = operator.call(READ, "ListOverrides", "{}");
    assert_eq!(list["overrides"][0]["reason"], "by keyboard", "{list}");
    // The result has the focus, and the next stop is its button.
    tab_to(&browser, "[data-test=undo]");
    browser.press(&enter);
    tab_to(&browser, "[data-test=confirm]");
    browser.press(&enter);
    browser.wait_for_text("[data-test=result]", &["Undone with version"]);
    assert_eq!(request(server, "user", "bob").1, 5);
}
