//! [`Browser`]: headless Chromium, driven by `chromedriver` (<https://www.w3.org/TR/webdriver2/>).
//!
//! Each command of that protocol is one HTTP request with JSON, so the client that other tests use is sufficient. Crates
//! for the protocol, such as fantoccini, depend on second versions of many crates, which `make deny` rejects.

use std::{
    cell::RefCell,
    io::{BufRead, BufReader, Write},
    path::Path,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::{Value, json};

use super::{DEADLINE, known_fields, repository, wait_for};

/// Keys, as the protocol encodes them.
pub(crate) mod key {
    pub(crate) const TAB: char = '\u{e004}';
    pub(crate) const ENTER: char = '\u{e007}';
    pub(crate) const END: char = '\u{e010}';
    pub(crate) const ESCAPE: char = '\u{e00c}';
    pub(crate) const CONTROL: char = '\u{e009}';
    /// Releases keys such as [`CONTROL`].
    pub(crate) const RELEASE: char = '\u{e000}';
    pub(crate) const SPACE: char = ' ';
    pub(crate) const ARROW_DOWN: char = '\u{e015}';
}

/// The name of the field with the id of an element.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";
/// Pause between two evaluations of a condition. The browser needs the processor more than the test does.
const PAUSE: Duration = Duration::from_millis(40);

/// A browser with one page; killed when dropped. The drop panics if the browser's log contains an unexpected message,
/// such as a script error, a violation of the content security policy, or a read of a field that an answer of the admin
/// API cannot have.
pub(crate) struct Browser {
    driver: Child,
    agent: ureq::Agent,
    session: String,
    expected: RefCell<Vec<&'static str>>,
    _folder: tempfile::TempDir,
}

impl Browser {
    pub(crate) fn start() -> Self {
        // The driver and the browser create their folders in TMPDIR.
        let folder = tempfile::tempdir().unwrap();
        // A driver ends if its free port of IPv4 is in use for IPv6.
        let (driver, port) = wait_for("chromedriver to start", || start_driver(folder.path()));
        // A browser starts slowly if all processors are busy.
        let timeout = Some(DEADLINE * 3);
        let agent = ureq::Agent::config_builder().http_status_as_error(false).timeout_global(timeout).build().into();
        let session = format!("http://127.0.0.1:{port}/session");
        let mut browser = Self { driver, agent, session, expected: RefCell::default(), _folder: folder };
        let answer = browser.command("", &capabilities());
        browser.session += &format!("/{}", answer["sessionId"].as_str().unwrap());
        browser.set_window(1280, 800);
        browser.devtools("Page.addScriptToEvaluateOnNewDocument", &json!({ "source": known_fields::script() }));
        browser
    }

    /// Sends a command and returns its value, or the error that the driver reports.
    fn try_command(&self, path: &str, body: &Value) -> Result<Value, String> {
        let request = self.agent.post(format!("{}{path}", self.session));
        let mut response = request.send(body.to_string().as_bytes()).map_err(|error| error.to_string())?;
        let text = response.body_mut().with_config().limit(1 << 26).read_to_string().unwrap();
        let mut answer: Value = serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))?;
        match answer["value"]["error"].as_str() {
            Some(error) => Err(format!("{error}: {}", answer["value"]["message"].as_str().unwrap_or_default())),
            None => Ok(answer["value"].take()),
        }
    }

    fn command(&self, path: &str, body: &Value) -> Value {
        self.try_command(path, body).unwrap_or_else(|error| panic!("{path} {body}: {error}"))
    }

    /// Sends a command of the `DevTools` protocol.
    fn devtools(&self, command: &str, parameters: &Value) -> Value {
        self.command("/goog/cdp/execute", &json!({ "cmd": command, "params": parameters }))
    }

    /// Sets the size of the page in CSS pixels.
    pub(crate) fn set_window(&self, width: u32, height: u32) {
        let size = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": false });
        self.devtools("Emulation.setDeviceMetricsOverride", &size);
    }

    /// Sets the color scheme that the user prefers: `light` or `dark`.
    pub(crate) fn set_color_scheme(&self, scheme: &str) {
        let features = json!({ "features": [{ "name": "prefers-color-scheme", "value": scheme }] });
        self.devtools("Emulation.setEmulatedMedia", &features);
    }

    /// Opens a URL. If only its fragment differs from the current URL, the page is not loaded again.
    pub(crate) fn open(&self, url: &str) {
        self.command("/url", &json!({ "url": url }));
    }

    pub(crate) fn reload(&self) {
        self.command("/refresh", &json!({}));
    }

    /// Runs the body of a function in the page and returns its result.
    pub(crate) fn run(&self, script: &str, arguments: &Value) -> Value {
        self.command("/execute/sync", &json!({ "script": script, "args": arguments }))
    }

    /// Runs the body of a function in the page, and returns the value that it passes to its last argument, a function.
    pub(crate) fn run_async(&self, script: &str, arguments: &Value) -> Value {
        self.command("/execute/async", &json!({ "script": script, "args": arguments }))
    }

    /// Enters the first frame of the page: scripts run in the frame until another page is opened.
    pub(crate) fn enter_frame(&self) {
        self.command("/frame", &json!({ "id": 0 }));
    }

    /// Returns the value of a JavaScript expression.
    pub(crate) fn value(&self, expression: &str) -> Value {
        self.run(&format!("return ({expression})"), &json!([]))
    }

    /// Waits until a JavaScript expression is neither false, null, 0, nor empty, and returns its value. The panic after
    /// [`DEADLINE`] contains the text of the page.
    pub(crate) fn wait_for(&self, expression: &str) -> Value {
        self.wait_while(expression, || ())
    }

    /// Waits like [`Self::wait_for`], and calls `action` before each evaluation.
    pub(crate) fn wait_while(&self, expression: &str, mut action: impl FnMut()) -> Value {
        let deadline = Instant::now() + DEADLINE;
        loop {
            action();
            let value = self.value(&format!("({expression}) || null"));
            if !value.is_null() {
                return value;
            }
            if Instant::now() > deadline {
                let page = self.value("location.href + '\\n' + document.body.innerText");
                panic!("timed out waiting for {expression} in the page {}", page.as_str().unwrap());
            }
            thread::sleep(PAUSE);
        }
    }

    /// Waits until the text of an element contains each string, and returns the text.
    pub(crate) fn wait_for_text(&self, selector: &str, words: &[&str]) -> String {
        let script = format!(
            "[...document.querySelectorAll({})].map((element) => [element.innerText || element.textContent])\
             .find(([text]) => {}.every((word) => text.includes(word)))",
            json!(selector),
            json!(words)
        );
        self.wait_for(&script)[0].as_str().unwrap().to_owned()
    }

    /// Waits until the page contains an element, and returns its text.
    pub(crate) fn text(&self, selector: &str) -> String {
        self.wait_for_text(selector, &[])
    }

    /// Returns the number of elements in the page.
    pub(crate) fn count(&self, selector: &str) -> u64 {
        self.value(&format!("document.querySelectorAll({}).length", json!(selector))).as_u64().unwrap()
    }

    /// Waits until the page does not contain an element.
    pub(crate) fn wait_until_gone(&self, selector: &str) {
        self.wait_for(&format!("!document.querySelector({})", json!(selector)));
    }

    /// Waits for an element and applies a command to it. An element that the page replaces in the meantime is
    /// looked up again.
    fn on_element(&self, selector: &str, command: &str, body: &Value) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let found = self.try_command("/element", &json!({ "using": "css selector", "value": selector }));
            let done = found.and_then(|found| {
                self.try_command(&format!("/element/{}/{command}", found[ELEMENT].as_str().unwrap_or_default()), body)
            });
            match done {
                Ok(_) => return,
                Err(error) => assert!(Instant::now() < deadline, "cannot {command} {selector}: {error}"),
            }
            thread::sleep(PAUSE);
        }
    }

    /// Clicks an element. Waits until the element exists, is enabled and not covered.
    pub(crate) fn click(&self, selector: &str) {
        self.wait_for(&format!("document.querySelector({})?.matches(':not(:disabled)')", json!(selector)));
        self.on_element(selector, "click", &json!({}));
    }

    /// Types text into a field, after its former text. For a field for files, the text is the path of a file.
    pub(crate) fn type_into(&self, selector: &str, text: &str) {
        self.on_element(selector, "value", &json!({ "text": text }));
    }

    /// Replaces the text of a field, as with Ctrl+A.
    pub(crate) fn fill(&self, selector: &str, text: &str) {
        let (control, release) = (key::CONTROL, key::RELEASE);
        self.type_into(selector, &format!("{control}a{release}{text}"));
    }

    /// Presses and releases keys one after the other. The element with the focus receives them.
    pub(crate) fn press(&self, keys: &str) {
        let action = |kind: &str, key: char| json!({ "type": kind, "value": key });
        let presses: Vec<_> = keys.chars().flat_map(|key| [action("keyDown", key), action("keyUp", key)]).collect();
        self.command("/actions", &json!({ "actions": [{ "type": "key", "id": "keyboard", "actions": presses }] }));
    }

    /// Writes a picture of the visible part of the page to a PNG file.
    pub(crate) fn screenshot(&self, path: &Path) {
        let picture = self.devtools("Page.captureScreenshot", &json!({ "format": "png", "optimizeForSpeed": false }));
        let file = std::fs::File::create(path).unwrap();
        let mut decoder = Command::new("base64").arg("-d").stdin(Stdio::piped()).stdout(file).spawn().unwrap();
        decoder.stdin.take().unwrap().write_all(picture["data"].as_str().unwrap().as_bytes()).unwrap();
        assert!(decoder.wait().unwrap().success());
    }

    /// Returns the accessibility violations that axe-core finds in the page, one per line.
    pub(crate) fn accessibility_violations(&self) -> String {
        let path = repository("target/test-tools/axe.min.js");
        let axe = std::fs::read_to_string(path).expect("axe-core is missing: run tests/setup.sh (make test does)");
        // The content security policy does not apply to scripts of the driver.
        if self.value("typeof axe === 'undefined'") == true {
            self.devtools("Runtime.evaluate", &json!({ "expression": axe }));
        }
        let script = "const done = arguments[0];\
            axe.run(document, { resultTypes: ['violations'] }).then(({ violations }) => done(violations.flatMap(({ id, nodes }) =>\
            nodes.map((node) => `${id}: ${node.html.slice(0, 200)} (${node.failureSummary})`)).join('\\n')));";
        let violations = self.run_async(script, &json!([]));
        violations.as_str().unwrap().to_owned()
    }

    /// Declares that messages with this text are expected in the browser's log, because the test provokes them.
    pub(crate) fn expect_log(&self, text: &'static str) {
        self.expected.borrow_mut().push(text);
    }

    /// Returns the messages of the browser's log since the last call.
    pub(crate) fn log(&self) -> Vec<String> {
        let Ok(Value::Array(entries)) = self.try_command("/se/log", &json!({ "type": "browser" })) else {
            return vec!["the browser has no log".to_owned()];
        };
        entries.iter().map(|entry| entry["message"].as_str().unwrap_or_default().to_owned()).collect()
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let mut log = self.log();
        // Deleting the session ends the browser; killing the driver would not.
        let _ = self.agent.delete(&self.session).call();
        let _ = self.driver.kill();
        let _ = self.driver.wait();
        log.retain(|message| !self.expected.borrow().iter().any(|expected| message.contains(expected)));
        if thread::panicking() {
            eprintln!("log of the browser: {log:#?}");
        } else {
            assert!(log.is_empty(), "unexpected messages in the browser's log: {log:#?}");
        }
    }
}

/// Starts a driver and returns it with its port.
fn start_driver(folder: &Path) -> Option<(Child, u16)> {
    let mut driver = Command::new("chromedriver")
        .arg("--port=0")
        .env("TMPDIR", folder)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .expect("chromedriver is missing: run tests/setup.sh (make test does)");
    let mut lines = BufReader::new(driver.stdout.take().unwrap()).lines().map_while(Result::ok);
    let port = |line: String| line.split_once("successfully on port ")?.1.trim_end_matches('.').parse().ok();
    let Some(port) = lines.find_map(port) else {
        let _ = driver.wait();
        return None;
    };
    // The pipe stays open until the driver ends.
    thread::spawn(move || lines.for_each(drop));
    Some((driver, port))
}

/// Returns the request for a new session.
fn capabilities() -> Value {
    let arguments = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1280,800",
        "--force-prefers-reduced-motion",
        "--hide-scrollbars",
        "--lang=en-GB",
    ];
    let chrome = json!({ "goog:chromeOptions": { "args": arguments }, "goog:loggingPrefs": { "browser": "ALL" } });
    json!({ "capabilities": { "alwaysMatch": chrome } })
}
