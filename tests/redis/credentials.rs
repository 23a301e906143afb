//! Credentials that change while the service runs, and the names in the certificates of Redis.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
};

use tokio::task::JoinHandle;

use crate::support::{
    RedisServer, Server,
    certificates::{Authority, Files},
    raw_client::Client,
    redis_topologies::{RedisCluster, Sentinels},
    request_for, rules,
    server::command,
    wait_for, wait_for_async,
};

const RULES: &str = "domain: d\ndescriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 900000000}}]\n";
/// Permissions of the user.
const PERMISSIONS: &[&str] = &["on", "~*", "&*", "+@all"];
/// Number of callers that send requests without a pause.
const CALLERS: usize = 4;

/// Returns a service with this store and settings.
fn start(store: &str, settings: &[(&str, &str)]) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut builder = Server::builder().rules(folder.path()).store(store);
    for (name, value) in settings {
        builder = builder.set(name, value);
    }
    builder.start()
}

async fn wait_for_decision(server: &Server) {
    let client = server.client().await;
    let check = async || client.check(request_for("d", &[("k", "x")])).await.ok();
    wait_for_async("a decision", check).await;
}

/// Replaces a file, as Kubernetes does with the files of a secret.
fn replace(path: &Path, text: &str) {
    let new = path.with_extension("new");
    fs::write(&new, text).unwrap();
    fs::rename(new, path).unwrap();
}

/// Callers that send requests until they are stopped, and the numbers of decisions and of failures.
struct Load {
    stopped: Arc<AtomicBool>,
    decided: Arc<AtomicU64>,
    failed: Arc<AtomicU64>,
    callers: Vec<JoinHandle<()>>,
}

impl Load {
    async fn start(server: &Server) -> Self {
        let (stopped, decided, failed) = (Arc::default(), Arc::default(), Arc::default());
        let mut load = Self { stopped, decided, failed, callers: Vec::new() };
        for _ in 0..CALLERS {
            let caller = call(
                server.client().await,
                Arc::clone(&load.stopped),
                Arc::clone(&load.decided),
                Arc::clone(&load.failed),
            );
            load.callers.push(tokio::spawn(caller));
        }
        load
    }

    /// Waits until each caller has sent further requests.
    async fn wait_for_decisions(&self) {
        let before = self.decided.load(Relaxed);
        let enough = before + 100 * CALLERS as u64;
        wait_for_async("decisions", async || (self.decided.load(Relaxed) > enough).then_some(())).await;
    }

    /// Returns the number of failed decisions since the start.
    fn failed(&self) -> u64 {
        self.failed.load(Relaxed)
    }

    async fn stop(mut self) -> u64 {
        self.stopped.store(true, Relaxed);
        for caller in self.callers.drain(..) {
            caller.await.unwrap();
        }
        self.failed()
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stopped.store(true, Relaxed);
    }
}

async fn call(client: Client, stopped: Arc<AtomicBool>, decided: Arc<AtomicU64>, failed: Arc<AtomicU64>) {
    while !stopped.load(Relaxed) {
        let count = match client.check(request_for("d", &[("k", "x")])).await {
            Ok(_) => &decided,
            Err(_) => &failed,
        };
        count.fetch_add(1, Relaxed);
    }
}

/// Returns the number of successful `AUTH` commands.
fn logins(redis: &RedisServer) -> u64 {
    let statistics = redis.cli(&["info", "commandstats"]);
    let mut logins = 0;
    for line in statistics.lines().filter(|line| line.starts_with("cmdstat_auth:")) {
        let number = |name: &str| -> u64 {
            let (_, value) = line.split_once(name).unwrap();
            value.split(',').next().unwrap().trim().parse().unwrap()
        };
        logins += number("calls=") - number("failed_calls=");
    }
    logins
}

fn set_user(redis: &RedisServer, changes: &[&str]) {
    assert_eq!(redis.cli(&[&["acl", "setuser", "app"], changes].concat()), "OK");
}

/// A service with two workers that logs in as `app` with the password `one` in a file.
struct Rotated {
    redis: RedisServer,
    server: Server,
    files: Files,
}

impl Rotated {
    fn start() -> Self {
        let redis = RedisServer::start();
        set_user(&redis, &[PERMISSIONS, &[">one"]].concat());
        let files = Files::new();
        let file = files.write("password", "one\n");
        let store = format!("redis://app@127.0.0.1:{}", redis.port);
        // A busy machine can need longer than the default of 500 ms to connect.
        let settings = [("redis.password_file", file.as_str()), ("redis.connect_timeout", "60s"), ("workers", "2")];
        let server = start(&store, &settings);
        Self { redis, server, files }
    }
}

/// The order of a rotation without an outage: both passwords are valid, then the file changes, then the old one ends.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_password_rotates_under_load_without_a_failed_decision() {
    let Rotated { redis, server, files } = Rotated::start();
    let file = files.path("password");
    let load = Load::start(&server).await;
    load.wait_for_decisions().await;
    for (old, new) in [("one", "two"), ("two", "three")] {
        set_user(&redis, &[&format!(">{new}")]);
        let before = logins(&redis);
        replace(&file, new);
        wait_for("each worker to log in again", || (logins(&redis) >= before + 2).then_some(()));
        set_user(&redis, &[&format!("<{old}")]);
        load.wait_for_decisions().await;
    }
    assert_eq!(load.failed(), 0, "while both passwords are valid: {}", server.log());
    // New connections use the current password. Only calls in flight fail when their connection is cut.
    for _ in 0..3 {
        let failed = load.failed();
        redis.cli(&["client", "kill", "type", "normal", "skipme", "yes"]);
        load.wait_for_decisions().await;
        let lost = load.failed() - failed;
        assert!(lost <= CALLERS as u64, "{lost} decisions of {CALLERS} callers failed: {}", server.log());
    }
    load.stop().await;
    assert!(!server.log().contains("three"), "{}", server.log());
}

/// The password is changed at Redis after the file: open connections continue, and use it as soon as Redis accepts it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rejected_password_does_not_break_open_connections() {
    let Rotated { redis, server, files } = Rotated::start();
    let file = files.path("password");
    let load = Load::start(&server).await;
    load.wait_for_decisions().await;
    let before = logins(&redis);
    replace(&file, "two");
    let rejected = "sluicegate_redis_failures_total{kind=\"noauth\"}";
    wait_for("the password to be rejected", || (server.metric(rejected) >= 2.0).then_some(()));
    assert!(server.log().contains("Redis server rejects the changed password"), "{}", server.log());
    // An unreadable file changes nothing either.
    fs::remove_file(&file).unwrap();
    wait_for("a warning", || server.log().contains("cannot read the password of Redis").then_some(()));
    load.wait_for_decisions().await;
    set_user(&redis, &[">two", "<one"]);
    wait_for("a login with the rejected password", || (logins(&redis) > before).then_some(()));
    load.wait_for_decisions().await;
    assert_eq!(load.stop().await, 0, "{}", server.log());
}

#[tokio::test]
async fn a_command_prints_the_password() {
    let redis = RedisServer::start();
    set_user(&redis, &[PERMISSIONS, &[">one", ">two"]].concat());
    let files = Files::new();
    let password = files.path("password");
    let program = files.path("token");
    fs::write(&password, "app:one").unwrap();
    let script =
        format!("#!/bin/sh\n[ \"$1\" = --user ] && cat {} && exit\necho no user >&2\nexit 3\n", password.display());
    fs::write(&program, script).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let start_with = |arguments: &str, max_age: &str| {
        let line = format!("{} {arguments}", program.display());
        let settings = [("redis.password_command", line.as_str()), ("redis.password_max_age", max_age)];
        start(&redis.url(), &settings)
    };
    // The default user cannot log in, so that decisions show a login as the user that the command prints.
    redis.cli(&["acl", "setuser", "default", "resetpass", ">other"]);
    let redis_cli = |args: &[&str]| redis.cli(&[&["--no-auth-warning", "-a", "other"], args].concat());
    let server = start_with("--user", "1s");
    wait_for_decision(&server).await;
    let slow_server = start_with("--user", "1h");
    wait_for_decision(&slow_server).await;
    fs::write(&password, "app:two").unwrap();
    assert_eq!(redis_cli(&["acl", "setuser", "app", "<one"]), "OK");
    assert_ne!(redis_cli(&["client", "kill", "user", "app"]), "0");
    wait_for_decision(&server).await;
    // A rejected password is renewed before its time.
    wait_for_decision(&slow_server).await;
    // While the command fails, the last password is used.
    fs::remove_file(&password).unwrap();
    wait_for("a warning", || server.log().contains("redis.password_command has failed").then_some(()));
    assert_ne!(redis_cli(&["client", "kill", "user", "app"]), "0");
    wait_for_decision(&server).await;
    let failing = start_with("", "1s");
    wait_for("the reason", || failing.log().contains("exit status: 3: no user").then_some(()));
}

#[tokio::test]
async fn each_topology_reads_its_password_from_a_file() {
    let files = Files::new();
    let [secret, watch] = ["secret", "watch"].map(|password| files.write(password, password));
    let single = RedisServer::with(&["--requirepass", "secret"]);
    let open = RedisServer::start();
    let ring = format!("redis+ring://127.0.0.1:{}", single.port);
    let unix = format!("redis+unix://{}", single.socket());
    let (_cluster, cluster) = RedisCluster::with_documented_user(3);
    let cluster = cluster.replace(":secret@", "@");
    let sentinels = Sentinels::start(Some("secret"), Some("watch"));
    let main = ("redis.password_file", secret.as_str());
    let per_second = [("per_second.redis.password_file", secret.as_str()), ("per_second.store", &single.url())];
    for (store, settings) in [
        (single.url(), vec![main]),
        (ring, vec![main]),
        (unix, vec![main]),
        (cluster, vec![main]),
        (sentinels.url(), vec![main, ("redis.sentinel.password_file", &watch)]),
        (open.url(), per_second.to_vec()),
    ] {
        let server = start(&store, &settings);
        wait_for_decision(&server).await;
        wait_for("all servers", || (!server.get("/readyz").contains("unavailable")).then_some(()));
    }
}

#[tokio::test]
async fn the_name_of_a_certificate_can_differ_from_the_address() {
    let (authority, files) = (Authority::new("redis"), Files::new());
    let (certificate, key) = authority.sign_for(&["redis.example"]);
    let path = |name: &str, text: &str| files.write(name, text);
    let (certificate, key, ca) = (path("cert", &certificate), path("key", &key), path("ca", &authority.pem));
    let redis = RedisServer::tls(&certificate, &key, &ca);
    let store = format!("rediss://127.0.0.1:{}", redis.port);
    let start_with = |ca: &str, setting: (&str, &str)| {
        let certificates = [("ca_file", ca), ("cert_file", &certificate), ("key_file", &key)];
        let names = certificates.map(|(name, _)| format!("redis.tls.{name}"));
        let mut settings = vec![setting];
        for (name, (_, file)) in names.iter().zip(certificates) {
            settings.push((name, file));
        }
        start(&store, &settings)
    };
    for setting in [("redis.tls.server_name", "redis.example"), ("redis.tls.verify_name", "false")] {
        let server = start_with(&ca, setting);
        wait_for_decision(&server).await;
        let is_warned = server.log().contains("redis.tls.verify_name is false: any server with a certificate");
        assert_eq!(is_warned, setting.0 == "redis.tls.verify_name", "{}", server.log());
    }
    let other = path("other", &Authority::new("other").pem);
    for (ca, setting) in [
        (&ca, ("redis.tls.server_name", "redis.other")),
        (&ca, ("redis.tls.verify_name", "true")),
        // The authority is still verified.
        (&other, ("redis.tls.verify_name", "false")),
    ] {
        let server = start_with(ca, setting);
        wait_for("the reason", || server.log().contains("TLS cannot be established").then_some(()));
    }
}

/// The variables of envoyproxy/ratelimit, and mistakes that end the start.
#[tokio::test]
async fn the_variables_of_the_replaced_service_name_the_file() {
    let redis = RedisServer::start();
    set_user(&redis, &[PERMISSIONS, &[">secret"]].concat());
    redis.cli(&["acl", "setuser", "default", "resetpass", ">other"]);
    let files = Files::new();
    let file = files.write("auth", "app:secret\r\n");
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder()
        .args(["--compat", "envoyproxy"])
        .set("telemetry.log.level", "info")
        .rules(folder.path())
        .env("DEBUG_HOST", "127.0.0.1")
        .env("DEBUG_PORT", "0")
        .env("REDIS_SOCKET_TYPE", "tcp")
        .env("REDIS_URL", &format!("127.0.0.1:{}", redis.port))
        .env("REDIS_AUTH_FILE", &file)
        .start();
    wait_for_decision(&server).await;
    for (store, name, value, expected) in [
        ("redis://:secret@127.0.0.1:1", "PASSWORD_FILE", file.as_str(), "in addition to redis.password_file"),
        ("redis://127.0.0.1:1", "PASSWORD_FILE", "/nowhere/password", "/nowhere/password"),
        ("redis://127.0.0.1:1", "PASSWORD_FILE", "/dev/null", "not a regular file"),
        ("redis://127.0.0.1:1", "PASSWORD_COMMAND", " ", "must begin with the path of a program"),
    ] {
        let mut command = command();
        command.args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--rules"]);
        command.arg(folder.path()).args(["--store", store]).env(format!("SLUICEGATE__REDIS__{name}"), value);
        let output = command.output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(expected) && !error.contains("secret@"), "{error}");
    }
}
