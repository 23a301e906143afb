//! Secrets of all settings appear nowhere: not in the log at the level `debug`, in pages, in responses of the admin API, in
//! printed settings, or in error messages.

use std::{
    fs,
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use tonic::transport::{Certificate, ClientTlsConfig, Endpoint};

use crate::support::{
    DEADLINE, RedisServer, Server,
    certificates::{Authority, Files},
    operator::admin_addr,
    raw_client::Client,
    request_for, rules,
    server::{Builder, agent, command},
    wait_for, wait_for_async,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n\
                     - key: often\n  rate_limit: { unit: second, requests_per_unit: 2 }\n";
/// Part of every secret that this test chooses.
const MARK: &str = "hunter2";

/// Secrets, each for one setting. The numbers show which one was found.
const REDIS: &str = "hunter2-redis-0123456789";
const PER_SECOND: &str = "hunter2-second-0123456789";
const SENTINEL: &str = "hunter2-sentinel-0123456789";
const RING: &str = "hunter2-ring-0123456789";
const XDS: &str = "hunter2-xds-0123456789";
const OTLP: &str = "hunter2-otlp-0123456789";
const HASH_KEY: &str = "hunter2-hash-0123456789";
const READ: &str = "hunter2-read-0123456789";
const OPERATE: &str = "hunter2-operate-0123456789";
const WRONG: &str = "hunter2-wrong-0123456789";

/// Returns whether a text contains a secret: a chosen one, or a line of a private key.
fn find_secret(text: &str, keys: &[String]) -> Option<String> {
    let chosen = text.lines().find(|line| line.contains(MARK)).map(str::to_owned);
    let key_lines =
        keys.iter().flat_map(|key| key.lines()).filter(|line| !line.starts_with("-----") && line.len() > 30);
    chosen.or_else(|| { key_lines }.find(|line| text.contains(*line)).map(str::to_owned))
}

/// Returns settings with a secret wherever a setting can have one.
fn settings(server: &str, per_second: &str) -> String {
    format!(
        "store = '{server}'
[per_second]
store = '{per_second}'
[per_second.redis.sentinel]
password = '{SENTINEL}'
[[per_second.redis.ring]]
name = 'b'
url = 'redis://:{RING}@127.0.0.1:1'
[redis.sentinel]
username = 'watch'
password = '{SENTINEL}'
[[redis.ring]]
name = 'a'
url = 'redis://app:{RING}@127.0.0.1:1'
[rules.xds]
headers = ['authorization=Bearer {XDS}', 'x-key={XDS}']
"
    )
}

struct Fixture {
    authority: Authority,
    files: Files,
    /// The private keys.
    keys: Vec<String>,
}

impl Fixture {
    fn new() -> Self {
        Self { authority: Authority::new("ours"), files: Files::new(), keys: Vec::new() }
    }

    /// Adds TLS, tokens, recording with a hash key, and a collector that is not there.
    fn configure(&mut self, mut builder: Builder) -> Builder {
        self.files.write("tokens", &format!("read {READ} eve\noperate {OPERATE} alice\n"));
        self.files.write("hash.key", HASH_KEY);
        for section in ["grpc", "redis", "per_second.redis", "rules.xds"] {
            let (certificate, key) = self.authority.sign();
            let certificate = self.files.write(&format!("{section}.pem"), &certificate);
            let key_file = self.files.write(&format!("{section}.key"), &key);
            self.keys.push(key);
            builder = builder
                .set(&format!("{section}.tls.cert_file"), &certificate)
                .set(&format!("{section}.tls.key_file"), &key_file);
        }
        let path = |name: &str| self.files.path(name).display().to_string();
        builder
            .set("admin.addr", "127.0.0.1:0")
            .set("admin.token_file", &path("tokens"))
            .set("http.debug_addr", "127.0.0.1:0")
            .set("record.dir", &path("traffic"))
            .set("record.share", "1")
            .set("record.hash_key_file", &path("hash.key"))
            .set("telemetry.otlp.endpoint", "http://127.0.0.1:1")
            .set("telemetry.otlp.metrics", "true")
            .set("telemetry.otlp.traces", "true")
            .set("telemetry.otlp.sample_ratio", "1")
            .set("telemetry.otlp.interval", "100ms")
            .set("telemetry.log.level", "debug,h2=debug")
            .env("OTEL_EXPORTER_OTLP_HEADERS", &format!("authorization=Bearer%20{OTLP},api-key={OTLP}"))
    }

    async fn client(&self, server: &Server) -> Client {
        let tls = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&self.authority.pem));
        let endpoint = Endpoint::from_shared(format!("https://{}", server.grpc)).unwrap().timeout(DEADLINE);
        Client::connect(endpoint.tls_config(tls.domain_name("localhost")).unwrap()).await.unwrap()
    }

    fn assert_no_secret(&self, what: &str, text: &str) {
        if let Some(line) = find_secret(text, &self.keys) {
            panic!("{what} contains a secret: {line}");
        }
    }
}

/// Calls the admin API and returns the body.
fn admin(server: &Server, method: &str, token: &str) -> (u16, String) {
    let request = agent().post(format!("http://{}/v1/{method}", admin_addr(server)));
    let mut response = request.header("authorization", format!("Bearer {token}")).send("{}").unwrap();
    (response.status().as_u16(), response.body_mut().read_to_string().unwrap())
}

/// Returns all pages and responses that callers can read.
fn pages(server: &Server) -> Vec<(String, String)> {
    let paths = ["/", "/rlconfig", "/metrics", "/stats", "/readyz", "/healthcheck", "/openapi.json", "/console/app.js"];
    let mut pages: Vec<_> = paths.map(|path| (path.to_owned(), server.get(path))).into();
    let methods = ["ListOverrides", "ListAuditLog", "ListRules", "ListTopEntities", "GetHealth", "GetCandidate"];
    for method in methods.into_iter().chain(["GetSession", "ListRuleActivity", "PutOverrides", "Simulate"]) {
        for token in [READ, OPERATE, WRONG] {
            pages.push((method.to_owned(), admin(server, method, token).1));
            let request = agent().post(server.url(&format!("/v1/{method}")));
            let mut response = request.header("authorization", format!("Bearer {token}")).send("{}").unwrap();
            pages.push((format!("{method} by HTTP"), response.body_mut().read_to_string().unwrap()));
        }
    }
    pages
}

#[tokio::test]
async fn no_output_of_a_working_service_contains_a_secret() {
    let folder = rules(&[("api.yaml", RULES)]);
    let redis = RedisServer::with(&["--requirepass", REDIS]);
    let other = RedisServer::with(&["--requirepass", PER_SECOND]);
    let mut fixture = Fixture::new();
    let address = |password: &str, redis: &RedisServer| format!("redis://:{password}@127.0.0.1:{}", redis.port);
    let text = settings(&address(REDIS, &redis), &format!("redis+unix://{}?pass={PER_SECOND}", other.socket()));
    let config = fixture.files.write("settings.toml", &text);
    let builder = Server::builder().args(["--config", &config]).rules(folder.path());
    let server = fixture.configure(builder).start();
    let client = fixture.client(&server).await;
    for key in ["user", "often"] {
        for _ in 0..4 {
            client.check(request_for("api", &[(key, "bob")])).await.unwrap();
        }
    }
    // The passwords are in use, or nothing could leak.
    assert_eq!(admin(&server, "GetHealth", OPERATE).0, 200);
    assert_eq!(admin(&server, "GetHealth", WRONG).0, 401);
    assert!(server.get("/readyz").contains("redis, up"), "{}", server.get("/readyz"));
    // Messages about these failures could contain secrets: of a collector, of a token file, and then of the stores.
    fixture.files.write("tokens", &format!("read {READ} eve\noperate {OPERATE}\n"));
    wait_for("the rejected token file", || server.log().contains("cannot use the changed token file").then_some(()));
    wait_for("the collector's error", || server.log().contains("cannot send metrics").then_some(()));
    for (page, text) in pages(&server) {
        fixture.assert_no_secret(&page, &text);
    }
    drop((redis, other));
    wait_for_async("the stores to be unavailable", async || {
        let _ = client.check(request_for("api", &[("user", "bob")])).await;
        server.log().contains("Redis server is unavailable").then_some(())
    })
    .await;
    for (page, text) in pages(&server) {
        fixture.assert_no_secret(&page, &text);
    }
    server.signal("TERM");
    wait_for("the shutdown", || server.log().contains("shutdown complete").then_some(()));
    assert!(server.log().contains("\"DEBUG\""), "the level debug is in effect");
    fixture.assert_no_secret("the log", &server.log());
}

/// The same with servers that reject the credentials, and a control plane that is not there.
#[tokio::test]
async fn no_output_after_rejected_credentials_contains_a_secret() {
    let redis = RedisServer::with(&["--requirepass", "another"]);
    let mut fixture = Fixture::new();
    let address = |user: &str| format!("redis://{user}:{REDIS}@127.0.0.1:{}", redis.port);
    let config = fixture.files.write("settings.toml", &settings(&address(""), &address("app")));
    let builder = Server::builder()
        .args(["--config", &config])
        .set("rules.xds.server", "http://127.0.0.1:1")
        .set("rules.xds.start_without_rules", "true");
    let server = fixture.configure(builder).start();
    wait_for("the rejected password", || server.log().contains("Redis server is unavailable").then_some(()));
    wait_for("the missing control plane", || server.log().contains("control plane unavailable").then_some(()));
    for (page, text) in pages(&server) {
        fixture.assert_no_secret(&page, &text);
    }
    server.signal("TERM");
    wait_for("the shutdown", || server.log().contains("shutdown complete").then_some(()));
    fixture.assert_no_secret("the log", &server.log());
}

fn output(command: &mut Command) -> String {
    let output = command.output().unwrap();
    String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned()
}

#[test]
fn printed_settings_contain_no_secret() {
    let fixture = Fixture::new();
    for scheme in ["redis", "rediss", "redis+cluster", "redis+sentinel", "redis+ring", "redis+unix"] {
        let address = match scheme {
            "redis+unix" => format!("redis+unix:///run/redis.sock?db=1&pass={REDIS}"),
            _ => format!("{scheme}://app:{REDIS}@host:1/main"),
        };
        let config = fixture.files.write("settings.toml", &settings(&address, &address));
        let text = output(command().args(["serve", "--config", &config, "--print-settings"]));
        assert!(text.contains("***") && text.contains("authorization=***"), "{scheme}: {text}");
        fixture.assert_no_secret(scheme, &text);
        // The same from the command line and the environment.
        let text = output(
            command()
                .args(["serve", "--store", &address, "--print-settings"])
                .env("SLUICEGATE__PER_SECOND__STORE", &address),
        );
        assert!(text.contains("***"), "{scheme}: {text}");
        fixture.assert_no_secret(scheme, &text);
    }
}

/// Returns the error of a service with these settings, which does not start.
fn start_error(folder: &Path, text: &str, environment: &[(&str, &str)]) -> String {
    let config = folder.join("settings.toml");
    fs::write(&config, text).unwrap();
    let mut command = command();
    command.args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--config"]).arg(&config);
    let mut child = command.envs(environment.iter().copied()).stderr(Stdio::piped()).spawn().unwrap();
    let deadline = Instant::now() + DEADLINE;
    while child.try_wait().unwrap().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let output = child.wait_with_output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && !error.is_empty(), "{text} does not prevent the start: {error}");
    error
}

#[test]
fn errors_about_invalid_settings_contain_no_secret() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        folder.path().join(name).display().to_string()
    };
    let (short, tokens) = (file("short", "hunter2"), file("tokens", &format!("operate {OPERATE}\n")));
    let key = file("key.pem", &format!("-----BEGIN PRIVATE KEY-----\n{MARK}\n-----END PRIVATE KEY-----\n"));
    let admin = "[admin]\naddr = '127.0.0.1:0'\n";
    let cases = [
        format!("[redis.sentinel]\npassword = '{SENTINEL}\n"),
        format!("[redis.sentinel]\npassword = {SENTINEL}\n"),
        format!("[redis.sentinel]\npassword = ['{SENTINEL}']\n"),
        format!("[redis]\nsentinel = '{SENTINEL}'\n"),
        format!("redis = '{SENTINEL}'\n"),
        format!("store = 'redis-{REDIS}'\n"),
        format!("store = ['redis://:{REDIS}@host']\n"),
        format!("store = 'redis://:{REDIS}@host:port'\n"),
        format!("store = 'redis+cluster://:{REDIS}@host/7'\n"),
        format!("store = 'redis+sentinel://:{REDIS}@host'\n"),
        format!("store = 'redis+ring://'\n[[redis.ring]]\nname = ''\nurl = 'redis://:{RING}@host'\n"),
        format!("store = 'redis+ring://'\n[[redis.ring]]\nname = 'a'\nurl = 'redis://:{RING}@host:x'\n"),
        format!("[[redis.ring]]\nname = 'a'\nurl = 'redis://:{RING}@host'\nwieght = 1\n"),
        format!("[[redis.ring]]\nname = 'a'\nurl = ['redis://:{RING}@host']\n"),
        format!("[rules.xds]\nserver = 'http://127.0.0.1:1'\nheaders = ['authorization {XDS}']\n"),
        format!("[rules.xds]\nserver = 'http://127.0.0.1:1'\nheaders = ['authorization: Bearer {XDS}']\n"),
        format!("[rules.xds]\nserver = 'http://127.0.0.1:1'\nheaders = [\"authorization=a\\n{XDS}\"]\n"),
        format!("[rules.xds]\nheaders = 'authorization={XDS}'\n"),
        format!("[rules.xds]\nserver = 'http://user:{XDS}@127.0.0.1:1'\n"),
        format!("[telemetry.otlp]\nendpoint = 'http://user:{OTLP}@127.0.0.1:1'\n"),
        format!("[record]\ndir = '{}'\nhash_key_file = '{short}'\n", folder.path().display()),
        format!("{admin}token_file = '{tokens}'\n"),
        format!("[grpc.tls]\ncert_file = '{key}'\nkey_file = '{key}'\n"),
        format!("{admin}token_file = '{tokens}'\n[admin.tls]\ncert_file = '{key}'\nkey_file = '{key}'\n"),
    ];
    for text in &cases {
        let error = start_error(folder.path(), text, &[]);
        assert!(!error.contains(MARK) && !error.contains("panicked"), "{text}: {error}");
    }
    let headers = format!("authorization={XDS}");
    let password = format!("[\"{SENTINEL}\"");
    for (name, value) in [("SLUICEGATE__RULES__XDS__HEADERS", &headers), ("SLUICEGATE__REDIS__SENTINEL", &password)] {
        let error = start_error(folder.path(), "", &[(name, value)]);
        assert!(!error.contains(MARK), "{name}: {error}");
    }
}
