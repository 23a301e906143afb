//! A service with an admin API, and `sluicegate ctl` to operate it.

use std::path::Path;

use super::{
    server::{Builder, Server, agent, command},
    wait_for,
};

/// Token of an operator that may do everything.
pub(crate) const OPERATE: &str = "operate-0123456789abcdef";
/// Token of an operator that may only read.
pub(crate) const READ: &str = "read-0123456789abcdef";

/// A running service and the address of its admin API.
pub(crate) struct Operator {
    pub(crate) server: Server,
    /// Address of the admin API: `http://…`
    pub(crate) addr: String,
    tokens: tempfile::NamedTempFile,
}

impl Operator {
    pub(crate) fn start(rules: &Path, store: &str) -> Self {
        Self::with(Server::builder().rules(rules).store(store))
    }

    pub(crate) fn with(builder: Builder) -> Self {
        let tokens = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(tokens.path(), format!("operate {OPERATE} alice\nread {READ} eve\n")).unwrap();
        let path = tokens.path().display().to_string();
        let server = builder.set("admin.addr", "127.0.0.1:0").set("admin.token_file", &path).start();
        let addr = format!("http://{}", admin_addr(&server));
        Self { server, addr, tokens }
    }

    /// Returns the path of the token file.
    pub(crate) fn token_file(&self) -> &Path {
        self.tokens.path()
    }

    /// Replaces the token file, and waits until [`OPERATE`] is no longer valid.
    pub(crate) fn replace_tokens(&self, text: &str) {
        std::fs::write(self.tokens.path(), text).unwrap();
        wait_for("the token to become invalid", || (self.call(OPERATE, "GetHealth", "{}").0 == 401).then_some(()));
    }

    /// Runs `sluicegate ctl` and returns its output, or its error output if it fails.
    pub(crate) fn try_ctl(&self, args: &[&str]) -> Result<String, String> {
        let all = [&["ctl", "--addr", &self.addr, "--token", OPERATE], args].concat();
        let output = command().args(all).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
    }

    /// Runs `sluicegate ctl` and returns its output. Panics if it fails.
    pub(crate) fn ctl(&self, args: &[&str]) -> String {
        self.try_ctl(args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    /// Calls a method of the admin API in JSON and returns the status code and the answer.
    pub(crate) fn call(&self, token: &str, method: &str, body: &str) -> (u16, serde_json::Value) {
        let request = agent().post(format!("{}/v1/{method}", self.addr));
        let mut response = request.header("authorization", format!("Bearer {token}")).send(body.as_bytes()).unwrap();
        let text = response.body_mut().read_to_string().unwrap();
        (response.status().as_u16(), serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}")))
    }
}

/// Returns the address of the admin API, which the service logs.
pub(crate) fn admin_addr(server: &Server) -> String {
    let log = server.log();
    if let Some(text) = log.lines().find_map(|line| line.split_once(": serving the admin API admin=")) {
        return text.1.to_owned();
    }
    let lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let addr = lines
        .filter(|line| line["message"] == "serving the admin API" || line["@message"] == "serving the admin API")
        .find_map(|line| line["admin"].as_str().map(str::to_owned));
    addr.expect("the service logs the address of its admin API")
}
