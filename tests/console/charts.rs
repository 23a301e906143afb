//! Charts: the texts of ticks, and the time under the pointer.

use serde_json::json;

use super::{folder, open, send};
use crate::support::{Browser, Server};

/// Waits until the chart has a line.
fn wait_for_line(browser: &Browser, server: &Server) {
    let has_line = "parseFloat(document.querySelector('[data-test=decisions] .figure-value').innerText) > 0 &&\
                    document.querySelectorAll('.plot canvas').length > 2 &&\
                    !document.querySelector('[data-test=chart-decisions]').innerText.includes('nothing yet')";
    browser.wait_while(has_line, || _ = send(server, 1, "path", "/cart"));
}

#[test]
fn ticks_less_than_a_minute_apart_have_different_texts() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "now");
    wait_for_line(&browser, &server);
    // The texts that are drawn from now on. A change of the colours draws all charts again.
    let record = "window.drawn = new Map(); const draw = CanvasRenderingContext2D.prototype.fillText;\
        CanvasRenderingContext2D.prototype.fillText = function (text, ...others) {\
          const id = this.canvas; drawn.set(id, [...(drawn.get(id) ?? []), text]);\
          return draw.call(this, text, ...others); }";
    browser.run(record, &json!([]));
    browser.set_color_scheme("dark");
    let ticks = "[...window.drawn.values()].map((texts) => texts.filter((text) => /^\\d\\d:\\d\\d/.test(text)))\
                 .find((texts) => texts.length > 1)";
    let ticks = browser.wait_for(ticks);
    let ticks = ticks.as_array().unwrap();
    assert!(ticks.iter().all(|tick| tick.as_str().unwrap().len() == "04:16:30".len()), "{ticks:?}");
    assert_ne!(ticks[0], ticks[1]);
}

#[test]
fn the_pointer_shows_the_same_time_in_all_charts() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "now");
    wait_for_line(&browser, &server);
    assert_eq!(browser.count(".cursor-time"), 0);
    let point = "const over = document.querySelector('[data-test=chart-decisions] .u-over');\
        const { left, top } = over.getBoundingClientRect();\
        const at = { clientX: left + 5, clientY: top + 5, bubbles: true };\
        over.dispatchEvent(new MouseEvent('mouseenter', at)); over.dispatchEvent(new MouseEvent('mousemove', at));";
    browser.run(point, &json!([]));
    let times = "(() => { const times = [...document.querySelectorAll('.cursor-time')].map(({ innerText }) => innerText);\
        return times.length > 2 && times.length === document.querySelectorAll('.chart .plot').length\
          && new Set(times).size === 1 && times[0]; })()";
    let time = browser.wait_for(times);
    assert!(time.as_str().unwrap().starts_with("at "), "{time}");
    browser.run(
        "document.querySelector('[data-test=chart-decisions] .u-over').dispatchEvent(new MouseEvent('mouseleave'))",
        &json!([]),
    );
    browser.wait_until_gone(".cursor-time");
}

#[test]
fn errors_per_second_and_errors_of_the_last_hour_agree() {
    let folder = folder();
    let server = Server::start(folder.path(), "memory");
    let browser = Browser::start();
    open(&browser, &server, "now");
    browser.wait_for_text("[data-test=errors]", &["0 in the last hour"]);
    let invalid = br#"{"descriptors":[{"entries":[{"key":"user"}]}]}"#;
    assert_eq!(crate::support::server::post(&server.url("/json"), invalid).0, 400);
    // Both are read at once: the seconds have the error before a period of the hour does.
    let note = "(() => { const [value, note] = document.querySelectorAll('[data-test=errors] span');\
                return value.innerText !== '0' && note.innerText; })()";
    assert_eq!(browser.wait_for(note), "1 in the last hour");
}
