//! [`ControlPlane`]: a real xDS control plane, built on go-control-plane (`tests/control_plane`). It sends the
//! snapshots that a test sets and records the requests that it receives.

use std::{
    fmt::Write as _,
    io::{BufRead, BufReader, Write as _},
    path::Path,
    process::{Child, ChildStdin, Command, Stdio},
    sync::{Arc, Mutex},
};

use prost::Message;
use serde_json::Value;
use sluicegate_proto::ratelimit::config::ratelimit::v3::RateLimitConfig;

use super::{tool, wait_for, wait_for_async};

/// A running control plane; killed when dropped.
pub(crate) struct ControlPlane {
    child: Child,
    input: ChildStdin,
    address: String,
    events: Arc<Mutex<Vec<Value>>>,
}

/// Files of the control plane's certificate and key, and of the authority that signs the clients' certificates.
pub(crate) struct Certificates<'a> {
    pub(crate) cert: &'a Path,
    pub(crate) key: &'a Path,
    pub(crate) ca: &'a Path,
}

impl ControlPlane {
    pub(crate) fn start() -> Self {
        Self::start_at("127.0.0.1:0", "default", None)
    }

    pub(crate) fn start_at(address: &str, node: &str, tls: Option<&Certificates<'_>>) -> Self {
        let mut command = Command::new(tool("control-plane"));
        command.args(["-address", address, "-node", node]).stdin(Stdio::piped()).stdout(Stdio::piped());
        if let Some(Certificates { cert, key, ca }) = tls {
            command.arg("-cert").arg(cert).arg("-key").arg(key).arg("-ca").arg(ca);
        }
        let mut child = command.spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let events = Arc::new(Mutex::new(Vec::<Value>::new()));
        let recorded = Arc::clone(&events);
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                recorded.lock().unwrap().push(serde_json::from_str(&line).unwrap());
            }
        });
        let address = wait_for("the control plane to listen", || {
            assert!(child.try_wait().unwrap().is_none(), "the control plane has exited");
            Some(events.lock().unwrap().first()?["address"].as_str()?.to_owned())
        });
        Self { child, input, address, events }
    }

    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Serves this snapshot from now on.
    pub(crate) fn set(&mut self, version: &str, configs: &[RateLimitConfig]) {
        let hex = |config: &RateLimitConfig| {
            config.encode_to_vec().iter().fold(String::new(), |mut text, byte| {
                let _ = write!(text, "{byte:02x}");
                text
            })
        };
        let line = serde_json::json!({"version": version, "configs": configs.iter().map(hex).collect::<Vec<_>>()});
        writeln!(self.input, "{line}").unwrap();
    }

    /// Serves the rules in these output files of Envoy Gateway's translator, and returns them as JSON.
    pub(crate) fn set_files(&mut self, version: &str, files: &[std::path::PathBuf]) -> Vec<Value> {
        writeln!(self.input, "{}", serde_json::json!({"version": version, "files": files})).unwrap();
        wait_for("the files to be read", || {
            let read = self.events("read").into_iter().find(|event| event["version"] == version)?;
            Some(read["configs"].as_array().unwrap().clone())
        })
    }

    /// Returns the recorded events of one kind: `open` (a stream), `request` or `read` (files).
    pub(crate) fn events(&self, kind: &str) -> Vec<Value> {
        self.events.lock().unwrap().iter().filter(|event| event["event"] == kind).cloned().collect()
    }

    /// Waits for the first request that matches, and returns it.
    pub(crate) async fn wait_for_request(&self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        wait_for_async(what, async || self.events("request").into_iter().find(|request| matches(request))).await
    }
}

impl Drop for ControlPlane {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
