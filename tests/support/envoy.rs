//! A real Envoy 1.40 with a configuration from `deploy` and free ports.

use std::{
    net::SocketAddr,
    process::{Child, Command, Stdio},
    sync::atomic::{AtomicU32, Ordering::Relaxed},
};

use super::{
    repository,
    server::{agent, get},
    tool, wait_for,
};

/// Source of `--base-id` values, which must differ between the Envoy processes on one machine.
static BASE_ID: AtomicU32 = AtomicU32::new(0);

/// A running Envoy; killed when dropped.
pub(crate) struct Envoy {
    child: Child,
    address: String,
    folder: tempfile::TempDir,
}

impl Envoy {
    /// Starts Envoy with `deploy/envoy`. With `failure_mode_deny`, Envoy denies requests if the service does not
    /// answer.
    pub(crate) fn start(service: SocketAddr, upstream: SocketAddr, failure_mode_deny: bool) -> Self {
        Self::start_with("deploy/envoy/envoy.yaml", service, upstream, failure_mode_deny)
    }

    pub(crate) fn start_with(file: &str, service: SocketAddr, upstream: SocketAddr, failure_mode_deny: bool) -> Self {
        let failure_mode_deny = format!("failure_mode_deny: {failure_mode_deny}");
        // The tests do not check Envoy's timeout, and a machine that runs all tests at once is slow.
        let changes = [("timeout: 0.1s", "timeout: 5s"), ("failure_mode_deny: false", &failure_mode_deny)];
        Self::start_changed(file, service, upstream, &changes)
    }

    /// Starts Envoy with a file in which texts are replaced by others.
    pub(crate) fn start_changed(
        file: &str,
        service: SocketAddr,
        upstream: SocketAddr,
        changes: &[(&str, &str)],
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (config, admin) = (folder.path().join("envoy.yaml"), folder.path().join("admin"));
        let text = std::fs::read_to_string(repository(file)).unwrap();
        let text = [
            ("port_value: 9901", "port_value: 0".to_owned()),
            ("path: /dev/stdout", format!("path: {}", folder.path().join("access.log").display())),
            ("port_value: 10000", "port_value: 0".to_owned()),
            ("port_value: 9000", format!("port_value: {}", upstream.port())),
            ("port_value: 8081", format!("port_value: {}", service.port())),
        ]
        .into_iter()
        .chain(changes.iter().map(|(from, to)| (*from, (*to).to_owned())))
        .fold(text, |text, (from, to)| {
            assert!(text.contains(from), "{from} is not in {file}");
            text.replace(from, &to)
        });
        std::fs::write(&config, text).unwrap();
        let id = std::process::id() % 100_000 * 10 + BASE_ID.fetch_add(1, Relaxed);
        let mut child = Command::new(tool("envoy"))
            .args([
                "-l",
                "error",
                "--concurrency",
                "1",
                "--file-flush-interval-msec",
                "100",
                "--base-id",
                &id.to_string(),
                "-c",
            ])
            .arg(&config)
            .arg("--admin-address-path")
            .arg(&admin)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let address = wait_for("Envoy to listen", || {
            assert!(child.try_wait().unwrap().is_none(), "Envoy has exited");
            let admin = std::fs::read_to_string(&admin).ok().filter(|address| !address.is_empty())?;
            agent().get(format!("http://{admin}/ready")).call().ok().filter(|ready| ready.status() == 200)?;
            let (_, listeners) = get(&format!("http://{admin}/listeners"));
            listeners.trim().split_once("::").map(|(_, address)| address.to_owned())
        });
        Self { child, address, folder }
    }

    /// Returns the path of the access log.
    pub(crate) fn access_log(&self) -> std::path::PathBuf {
        self.folder.path().join("access.log")
    }

    /// Returns the address of the listener.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Sends a GET request and returns the status code and headers of the response.
    pub(crate) fn get(&self, path: &str, headers: &[(&str, &str)]) -> (u16, http::HeaderMap) {
        self.send("GET", path, headers)
    }

    /// Sends a request without a body and returns the status code and headers of the response.
    pub(crate) fn send(&self, method: &str, path: &str, headers: &[(&str, &str)]) -> (u16, http::HeaderMap) {
        let request = http::Request::builder().method(method).uri(format!("http://{}{path}", self.address));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let response = agent().run(request.body(()).unwrap()).unwrap();
        (response.status().as_u16(), response.headers().clone())
    }
}

impl Drop for Envoy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
