//! The service runs with the profile of system calls in `deploy/container/seccomp.json`, which container runtimes read.

use std::{
    fs,
    process::{Child, Command},
    thread,
};

use seccompiler::{BpfProgram, apply_filter, compile_from_json};
use serde_json::{Value, json};

use crate::support::{
    RedisServer, Server,
    certificates::{Authority, Files},
    operator::{OPERATE, admin_addr},
    raw_client::Client,
    repository, request_for, rules,
    server::{Builder, agent, command},
    wait_for, wait_for_async,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
const EPERM: u64 = 1;

/// The profile, for this machine's architecture.
struct Profile {
    names: Vec<String>,
}

impl Profile {
    fn read() -> Self {
        let text = fs::read_to_string(repository("deploy/container/seccomp.json")).unwrap();
        let profile: Value = serde_json::from_str(&text).unwrap();
        assert_eq!((&profile["defaultAction"], &profile["defaultErrnoRet"]), (&"SCMP_ACT_ERRNO".into(), &EPERM.into()));
        assert_eq!(profile["architectures"], json!(["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]));
        let mut names = Vec::new();
        for group in profile["syscalls"].as_array().unwrap() {
            assert_eq!(group["action"], "SCMP_ACT_ALLOW", "{group}");
            names.extend(group["names"].as_array().unwrap().iter().map(|name| name.as_str().unwrap().to_owned()));
        }
        let mut sorted = names.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(names, sorted, "the names are in order, each once");
        // As in container runtimes, calls that the architecture does not have are ignored.
        Self { names: names.into_iter().filter(|name| compile(&[name.as_str()]).is_some()).collect() }
    }

    fn without(mut self, name: &str) -> Self {
        assert!(self.names.iter().any(|known| known == name), "{name} is not in the profile");
        self.names.retain(|known| known != name);
        self
    }

    /// Spawns a program with this profile, which a thread passes on to its children.
    fn spawn(&self, command: &mut Command) -> Child {
        let filter = compile(&self.names.iter().map(String::as_str).collect::<Vec<_>>()).unwrap();
        let spawn = || {
            apply_filter(&filter).unwrap();
            command.spawn()
        };
        thread::scope(|scope| scope.spawn(spawn).join().unwrap()).unwrap()
    }
}

/// Compiles a filter that permits these calls, or returns `None` if the architecture does not have one of them.
fn compile(names: &[&str]) -> Option<BpfProgram> {
    let calls: Vec<_> = names.iter().map(|name| json!({"syscall": name})).collect();
    let filter = json!({"mismatch_action": {"errno": EPERM}, "match_action": "allow", "filter": calls});
    let text = json!({ "service": filter }).to_string();
    let arch = std::env::consts::ARCH.try_into().unwrap();
    compile_from_json(text.as_bytes(), arch).ok()?.remove("service")
}

/// Returns the log without the messages of errors that this test provokes.
fn assert_no_denied_call(server: &Server) {
    let filter = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    assert!(filter.contains("Seccomp:\t2"), "{filter}");
    let log = server.log();
    assert!(!log.contains("os error 1)") && !log.contains("not permitted") && !log.contains("panicked"), "{log}");
}

/// All that writes files and opens sockets, with counters in memory.
fn with_everything(files: &Files, address: &str) -> Builder {
    let authority = Authority::new("ours");
    let (certificate, key) = authority.sign();
    let (certificate, key) = (files.write("cert.pem", &certificate), files.write("key.pem", &key));
    let path = |name: &str| files.path(name).display().to_string();
    Server::builder()
        .set("admin.addr", "127.0.0.1:0")
        .set("admin.token_file", &files.write("tokens", &format!("operate {OPERATE} alice\n")))
        .set("http.metrics_addr", "127.0.0.1:0")
        .set("record.dir", &path("traffic"))
        .set("record.share", "1")
        .set("overrides.file", &path("overrides"))
        .set("overrides.switch_file", &path("switches"))
        .set("cluster.addr", address)
        .set("cluster.peers", &format!("localhost:{}", address.rsplit(':').next().unwrap()))
        .set("cluster.tls.cert_file", &certificate)
        .set("cluster.tls.key_file", &key)
        .set("cluster.tls.ca_file", &files.write("ca.pem", &authority.pem))
        .set("telemetry.statsd.addr", "localhost:1")
        .set("telemetry.statsd.interval", "100ms")
        .set("telemetry.otlp.endpoint", "http://localhost:1")
        .set("telemetry.otlp.metrics", "true")
        .set("telemetry.otlp.traces", "true")
        .set("telemetry.otlp.interval", "100ms")
}

#[tokio::test]
async fn the_service_runs_with_the_profile_of_system_calls() {
    let profile = Profile::read();
    let (folder, files) = (rules(&[("api.yaml", RULES)]), Files::new());
    let address = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let builder = with_everything(&files, &address).rules(folder.path());
    let server = builder.start_by(|command| profile.spawn(command));
    let client = server.client().await;
    assert_eq!(client.check(request_for("api", &[("user", "bob")])).await.unwrap().remaining(), Some(1));
    let body = r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "shadow"}]}"#;
    let request = agent().post(format!("http://{}/v1/PutOverrides", admin_addr(&server)));
    let request = request.header("authorization", format!("Bearer {OPERATE}"));
    assert_eq!(request.send(body).unwrap().status().as_u16(), 200);
    fs::write(folder.path().join("api.yaml"), RULES.replace("requests_per_unit: 2", "requests_per_unit: 9")).unwrap();
    wait_for("the changed rules", || server.log().contains("rules reloaded").then_some(()));
    assert!(server.metric("process_resident_memory_bytes") > 0.0 && server.metric("process_open_fds") > 0.0);
    wait_for("the collector's error", || server.log().contains("cannot send metrics to the").then_some(()));
    wait_for("statsd's error", || server.log().contains("cannot send metrics to statsd").then_some(()));
    let mut health = command();
    let mut health = profile.spawn(health.args(["health", "--http-addr", &server.http.to_string()]));
    assert!(health.wait().unwrap().success());
    server.signal("TERM");
    wait_for("the shutdown", || server.log().contains("shutdown complete").then_some(()));
    assert_no_denied_call(&server);
    assert!(server.wait().await.success());
    assert!(fs::read_dir(files.path("traffic")).unwrap().count() > 0, "requests are recorded");
}

#[tokio::test]
async fn the_profile_is_sufficient_with_redis_tls_and_a_control_plane() {
    let profile = Profile::read();
    let (redis, files, authority) = (RedisServer::start(), Files::new(), Authority::new("ours"));
    let (certificate, key) = authority.sign();
    let builder = Server::builder()
        .store(&format!("redis://localhost:{}", redis.port))
        .set("per_second.store", &format!("redis+unix://{}", redis.socket()))
        .set("grpc.uds", &files.path("grpc.sock").display().to_string())
        .set("rules.xds.server", "https://localhost:1")
        .set("rules.xds.start_without_rules", "true")
        .set("admin.addr", "127.0.0.1:0")
        .set("admin.token_file", &files.write("tokens", &format!("operate {OPERATE} alice\n")))
        .set("admin.tls.cert_file", &files.write("cert.pem", &certificate))
        .set("admin.tls.key_file", &files.write("key.pem", &key));
    let server = builder.start_by(|command| profile.spawn(command));
    let socket = format!("unix://{}", files.path("grpc.sock").display());
    let client = Client::connect(tonic::transport::Endpoint::from_shared(socket).unwrap()).await.unwrap();
    let status = client.check(request_for("api", &[("user", "bob")])).await.unwrap_err();
    assert_eq!(status.code(), Some(tonic::Code::Unavailable), "there are no rules");
    assert!(server.get("/readyz").contains("redis, up"), "{}", server.get("/readyz"));
    wait_for("the missing control plane", || server.log().contains("control plane unavailable").then_some(()));
    server.signal("INT");
    wait_for("the shutdown", || server.log().contains("shutdown complete").then_some(()));
    assert_no_denied_call(&server);
}

/// The filter is in effect: without a call that the service needs, it fails.
#[tokio::test]
async fn a_profile_without_a_needed_call_is_noticed() {
    let folder = rules(&[("api.yaml", RULES)]);
    let profile = Profile::read().without("accept4");
    let server = Server::builder().rules(folder.path()).start_by(|command| profile.spawn(command));
    wait_for_async("the rejected call", async || {
        let _ = std::net::TcpStream::connect(server.grpc);
        server.log().contains("Operation not permitted (os error 1)").then_some(())
    })
    .await;
}
