//! The page “Rules” with 100,000 rules.

use std::{fmt::Write, time::Instant};

use serde_json::json;

use super::{open, send};
use crate::support::{Browser, Server, browser::key, rules};

const RULES: usize = 100_000;

fn many_rules() -> String {
    let mut text = "domain: shop\ndescriptors:\n".to_owned();
    for rule in 0..RULES {
        let limit = format!("{{ unit: minute, requests_per_unit: {} }}", rule % 900 + 1);
        writeln!(text, "- key: path\n  value: /shop/{rule:06}\n  rate_limit: {limit}").unwrap();
    }
    text
}

/// Collects the lengths of tasks that block the page for more than 50 ms, and the time between frames.
const OBSERVE: &str = "window.longTasks = []; window.frames_ = []; let last = performance.now();\
    new PerformanceObserver((list) => list.getEntries().forEach(({ duration }) => longTasks.push(duration)))\
    .observe({ type: 'longtask', buffered: true });\
    const frame = () => { const now = performance.now(); frames_.push(now - last); last = now; requestAnimationFrame(frame); };\
    requestAnimationFrame(frame);";

/// Prints how long the page was blocked since the last call. Other tests use the same processors, so that the numbers
/// are not asserted.
fn print_frames(browser: &Browser, what: &str) {
    let script = "const result = [Math.max(0, ...longTasks), longTasks.length, Math.max(0, ...frames_)].map(Math.round);\
                  longTasks.length = 0; frames_.length = 0; return result";
    let numbers = browser.run(script, &json!([]));
    println!(
        "{what}: longest task {} ms of {} above 50 ms (budget: 100 ms), longest frame {} ms",
        numbers[0], numbers[1], numbers[2]
    );
}

#[test]
fn the_page_with_100_000_rules_scrolls_and_finds() {
    let folder = rules(&[("shop.yaml", &many_rules())]);
    let server = Server::start(folder.path(), "memory");
    assert!(send(&server, 5, "path", "/shop/077777") > 0);
    let browser = Browser::start();
    let started = Instant::now();
    open(&browser, &server, "rules?order=file");
    browser.wait_for_text("[data-test=rule-row]", &["000000"]);
    println!("the first rows appeared after {:?} (budget: 2 s)", started.elapsed());
    browser.wait_for_text("[data-test=totals]", &["100,000 rules"]);
    browser.run(OBSERVE, &json!([]));
    // Scrolls through a part of the rows frame by frame, then in steps of thousands of rows to the end.
    let scroll = "const [step, done] = arguments; const grid = document.querySelector('[data-test=rules-grid]'); let rest = 150;\
        (function next() { grid.scrollTop += step; rest -= 1; if (rest) requestAnimationFrame(next); else done(null); })();";
    browser.run_async(scroll, &json!([120]));
    print_frames(&browser, "scrolling by 120 pixels per frame");
    browser.run_async(scroll, &json!([30_000]));
    print_frames(&browser, "scrolling by 30,000 pixels per frame");
    browser.run("document.querySelector('[data-test=rules-grid]').focus()", &json!([]));
    browser.press(&key::END.to_string());
    browser.wait_for_text("[data-test=rule-row].active", &["/shop/099999", "100 per minute"]);
    check_few_rows(&browser);
    print_frames(&browser, "jumping to the end");
    browser.type_into("[data-test=find]", "077777");
    browser.wait_for_text("[data-test=totals]", &["1 of 100,000 rules"]);
    let row = browser.wait_for_text("[data-test=rule-row]:not([data-path=shop])", &["077777"]);
    assert!(row.contains("378 per minute"), "{row}");
    print_frames(&browser, "finding one rule");
    browser.fill("[data-test=find]", "/shop/0777");
    browser.wait_for_text("[data-test=totals]", &["100 of 100,000 rules"]);
    check_few_rows(&browser);
    browser.fill("[data-test=find]", "no such rule");
    browser.wait_for_text("[data-test=none-found]", &["No rule contains these words"]);
    // The rule with requests is the first one in the order of denied and requested hits.
    open(&browser, &server, "rules");
    browser.wait_for_text("#row-1", &["077777"]);
    print_frames(&browser, "ordering by denied hits");
}

/// Only rows in view are elements of the page.
fn check_few_rows(browser: &Browser) {
    let rows = browser.count("[role=row]");
    assert!((10..100).contains(&rows), "{rows} rows in the document");
}
