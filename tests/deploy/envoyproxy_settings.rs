//! The replacement of envoyproxy/ratelimit: started under its name, with its environment variables.

use std::{fs, io::Read, os::unix::fs::symlink, path::Path, process::Command};

use sluicegate::settings;
use tonic::transport::Endpoint;

use crate::support::{
    DEADLINE, RedisServer, Server,
    raw_client::Client,
    repository, request_for,
    server::{command, get},
    wait_for,
};

const RULES: &str = "domain: example\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 5}}]\n";

/// Returns a command that starts the service under the name `ratelimit`, without an environment.
fn ratelimit_command(folder: &Path) -> Command {
    let link = folder.join("ratelimit");
    symlink(env!("CARGO_BIN_EXE_sluicegate"), &link).unwrap();
    let mut command = Command::new(link);
    command.env_clear();
    command
}

/// Returns ports that are currently free.
fn free_ports<const N: usize>() -> [String; N] {
    let listeners: [_; N] = std::array::from_fn(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port().to_string())
}

/// Sets the variables of Istio's sample and of envoyproxy/ratelimit's own Compose file, with other ports.
#[tokio::test]
async fn its_environment_configures_the_service() {
    let (folder, redis) = (tempfile::tempdir().unwrap(), RedisServer::start());
    // The files are mounted like a ConfigMap. Their names need not end in `.yaml`.
    let config = folder.path().join("data/ratelimit/config");
    fs::create_dir_all(config.join("..2026_11_22")).unwrap();
    fs::write(config.join("..2026_11_22/config"), RULES).unwrap();
    symlink("..2026_11_22", config.join("..data")).unwrap();
    symlink("..data/config", config.join("config")).unwrap();
    fs::write(config.join(".config.swp"), "an editor's swap file").unwrap();
    let [http, grpc, debug, metrics] = free_ports();
    let mut command = ratelimit_command(folder.path());
    command.envs([
        ("LOG_LEVEL", "debug"),
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", redis.url().trim_start_matches("redis://")),
        ("REDIS_POOL_SIZE", "20"),
        ("USE_STATSD", "false"),
        ("USE_PROMETHEUS", "true"),
        ("PROMETHEUS_ADDR", &format!(":{metrics}")),
        ("PROMETHEUS_PATH", "/numbers"),
        ("RUNTIME_ROOT", folder.path().join("data").to_str().unwrap()),
        ("RUNTIME_SUBDIRECTORY", "ratelimit"),
        ("RUNTIME_WATCH_ROOT", "false"),
        ("RUNTIME_IGNOREDOTFILES", "true"),
        ("HOST", "::"),
        ("PORT", &http),
        ("GRPC_HOST", "::"),
        ("GRPC_PORT", &grpc),
        ("DEBUG_PORT", &debug),
        ("UNKNOWN_VARIABLE", "1"),
    ]);
    let server = Server::from_command(command).start();
    // The address `::` accepts both IPv4 and IPv6.
    let client = Client::connect(Endpoint::from_shared(format!("http://127.0.0.1:{grpc}")).unwrap()).await.unwrap();
    let answer = client.check(request_for("example", &[("user", "a")])).await.unwrap();
    assert_eq!(answer.remaining(), Some(4));
    let page = |port: &str, path: &str| get(&format!("http://127.0.0.1:{port}{path}"));
    assert_eq!(page(&http, "/healthcheck"), (200, "OK".into()));
    let line = "example.user: unit=HOUR requests_per_unit=5, shadow_mode: false, quota_mode: false\n";
    assert!(page(&debug, "/rlconfig").1.ends_with(line));
    fs::create_dir(config.join("..2026_11_23")).unwrap();
    fs::write(config.join("..2026_11_23/config"), RULES.replace('5', "7")).unwrap();
    symlink("..2026_11_23", config.join("..next")).unwrap();
    fs::rename(config.join("..next"), config.join("..data")).unwrap();
    wait_for("the new rules", || page(&debug, "/rlconfig").1.contains("requests_per_unit=7").then_some(()));
    let (code, stats) = page(&debug, "/stats");
    let total = "ratelimit_service_rate_limit_total_hits{domain=\"example\",key1=\"user\"}";
    assert!(code == 200 && stats.contains(&format!("{total}: 1\n")), "{stats}");
    assert!(page(&debug, "/").1.contains("/rlconfig") && page(&debug, "/json").0 == 404);
    assert!(page(&metrics, "/numbers").1.contains(&format!("{total} 1\n")) && page(&metrics, "/metrics").0 == 404);
    let log = server.log();
    let warnings: Vec<_> = log.lines().filter(|line| line.contains("without effect")).collect();
    assert_eq!(warnings.len(), 1, "{log}");
    for name in ["REDIS_POOL_SIZE (each worker has", "RUNTIME_WATCH_ROOT ("] {
        assert!(warnings[0].contains(name), "{name}: {}", warnings[0]);
    }
    assert!(!log.contains("UNKNOWN_VARIABLE"), "{log}");
}

/// By default metrics are sent to statsd as lines over TCP, each with the change since the last one. Changes that could
/// not be sent are sent later.
#[tokio::test]
async fn metrics_are_sent_to_statsd() {
    let (folder, redis) = (tempfile::tempdir().unwrap(), RedisServer::start());
    let config = folder.path().join("config");
    fs::create_dir(&config).unwrap();
    let rules = "domain: d\ndescriptors:\n- key: a\n  descriptors:\n  - key: b\n    descriptors:\n    - key: c\n      \
                 rate_limit: {unit: hour, requests_per_unit: 2}\n";
    fs::write(config.join("d.yaml"), rules).unwrap();
    let [http, grpc, debug, statsd] = free_ports();
    let mut command = ratelimit_command(folder.path());
    command.envs([
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", redis.url().trim_start_matches("redis://")),
        ("RUNTIME_ROOT", folder.path().to_str().unwrap()),
        ("PORT", &http),
        ("GRPC_HOST", "127.0.0.1"),
        ("GRPC_PORT", &grpc),
        ("DEBUG_PORT", &debug),
        ("STATSD_HOST", "127.0.0.1"),
        ("STATSD_PORT", &statsd),
        ("STATS_FLUSH_INTERVAL", "100ms"),
        ("EXTRA_TAGS", "zone:a"),
    ]);
    let server = Server::from_command(command).start();
    let client = server.client().await;
    for _ in 0..3 {
        client.check(request_for("d", &[("a", "1"), ("b", "2"), ("c", "10.0.0.1")])).await.unwrap();
    }
    client.check(request_for("unknown", &[("a", "1")])).await.unwrap();
    wait_for("a failure to send", || server.log().contains("cannot send metrics to statsd").then_some(()));
    let listener = std::net::TcpListener::bind(format!("127.0.0.1:{statsd}")).unwrap();
    let all = [("total_hits", 3), ("within_limit", 2), ("over_limit", 1), ("near_limit", 1)];
    let (mut lines, mut counts) = (String::new(), 0);
    wait_for("all counters", || {
        listener.accept().unwrap().0.read_to_string(&mut lines).unwrap();
        counts = lines.matches("rate_limit.d.a.b.c.").count();
        (counts >= all.len()).then_some(())
    });
    for (name, value) in all {
        assert!(
            lines.contains(&format!("ratelimit.service.rate_limit.d.a.b.c.{name}.__zone=a:{value}|c\n")),
            "{lines}"
        );
    }
    assert!(lines.contains("ratelimit.service.rate_limit.unknown.domain_not_found.__zone=a:1|c\n"), "{lines}");
    assert!(lines.contains("ratelimit_server.ShouldRateLimit.total_requests.__zone=a:4|c\n"), "{lines}");
    let times =
        lines.lines().filter(|line| line.starts_with("ratelimit_server.ShouldRateLimit.response_time.__zone=a:"));
    let samples: f64 = times.map(|line| 1.0 / line.rsplit_once('@').unwrap().1.parse::<f64>().unwrap()).sum();
    assert!((samples - 4.0).abs() < 1e-6, "{lines}");
    // The last changes are sent during the shutdown.
    client.check(request_for("d", &[("a", "1"), ("b", "2"), ("c", "x")])).await.unwrap();
    server.signal("TERM");
    drop(client);
    let last_lines = std::thread::spawn(move || {
        let mut lines = String::new();
        while !lines.contains("total_hits.__zone=a:1|c") {
            listener.accept().unwrap().0.read_to_string(&mut lines).unwrap();
        }
    });
    assert!(server.wait().await.success());
    last_lines.join().unwrap();
}

/// DogStatsD receives datagrams with tags.
#[tokio::test]
async fn metrics_are_sent_to_dogstatsd() {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    socket.set_read_timeout(Some(DEADLINE)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("settings.toml");
    let settings = format!(
        "[telemetry.statsd]\naddr = '{}'\nprotocol = 'udp'\ninterval = '50ms'\ntags = ['zone:a']\n[[telemetry.statsd.name_mappings]]\n\
         pattern = '^ratelimit\\.service\\.rate_limit\\.([^.]+)\\.(.+)\\.([^.]+)$'\nname = 'hits.$3'\n\
         tags = ['domain:$1', 'rule:$2']\n",
        socket.local_addr().unwrap()
    );
    fs::write(&file, settings).unwrap();
    let keys: Vec<String> = (0..60).map(|number| format!("key-{number}")).collect();
    let rule = |key: &String| format!("- {{key: {key}, rate_limit: {{unit: hour, requests_per_unit: 5}}}}\n");
    let mut all: String = keys.iter().map(rule).collect();
    all += "- {key: name, value_to_metric: true, rate_limit: {unit: hour, requests_per_unit: 5}}\n";
    fs::write(folder.path().join("d.yaml"), format!("domain: d\ndescriptors:\n{all}")).unwrap();
    let builder = Server::builder().args(["--config", file.to_str().unwrap()]);
    let server = builder.rules(folder.path()).start();
    let client = server.client().await;
    for key in &keys {
        client.check(request_for("d", &[(key, "a")])).await.unwrap();
    }
    client.check(request_for("d", &[("name", "x\r\nforged:9|c|#a:b,c")])).await.unwrap();
    let line = |key: &String| format!("hits.total_hits:1|c|#domain:d,rule:{key},zone:a\n");
    let (mut lines, mut datagram) = (String::new(), [0; 20_000]);
    let clean = line(&"name_x__forged_9_c_#a_b_c".to_owned());
    while !keys.iter().all(|key| lines.contains(&line(key))) || !lines.contains(&clean) {
        let length = socket.recv(&mut datagram).unwrap();
        // Each datagram fits into an Ethernet frame.
        assert!(length <= 1_432, "a datagram of {length} bytes");
        lines += std::str::from_utf8(&datagram[..length]).unwrap();
    }
    assert!(keys.iter().all(|key| lines.matches(&line(key)).count() == 1), "each hit must be sent once: {lines}");
}

#[test]
fn an_invalid_variable_ends_the_start_with_its_name() {
    let redis = [("REDIS_SOCKET_TYPE", "tcp"), ("REDIS_URL", "127.0.0.1:6379")];
    for (variables, expected) in [
        (&redis[1..], &["REDIS_URL=", "REDIS_SOCKET_TYPE=tcp"][..]),
        (&[redis[0], ("REDIS_TYPE", "sentinel"), ("REDIS_URL", "m, 127.0.0.1:1")], &["REDIS_URL="]),
        (&[redis[0], redis[1], ("STATSD_PORT", "tcp://10.96.0.7:8125")], &["STATSD_PORT=", "Kubernetes"]),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let output = ratelimit_command(folder.path()).envs(variables.iter().copied()).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success(), "{error}");
        assert!(expected.iter().all(|part| error.contains(part)), "{error}");
    }
}

/// `migrate` prints a settings file with the same effect as the environment.
#[test]
fn migrate_prints_equivalent_settings() {
    let folder = tempfile::tempdir().unwrap();
    let variables = [
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", "redis:6379"),
        ("REDIS_AUTH", "secret"),
        ("MEMCACHE_SRV", "x"),
        ("SHADOW_MODE", "true"),
        ("STOP_CACHE_KEY_INCREMENT_WHEN_OVERLIMIT", "true"),
    ];
    let text = |command: &mut Command| {
        let output = command.envs(variables).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let migrated = text(command().args(["migrate", "--from-env"]));
    assert!(migrated.starts_with("# MEMCACHE_SRV has no effect: MEMCACHE_HOST_PORT lists the servers"), "{migrated}");
    let file = folder.path().join("settings.toml");
    fs::write(&file, migrated).unwrap();
    let from_file = text(command().args(["--print-settings", "--config", file.to_str().unwrap()]));
    for settings in [
        text(command().args(["--print-settings", "--compat", "envoyproxy"])),
        text(ratelimit_command(folder.path()).arg("--print-settings")),
    ] {
        assert_eq!(settings, from_file);
    }
    for line in ["store = \"redis://:***@redis:6379\"", "shadow_mode = true", "charge_all = true", "debug_addr"] {
        assert!(from_file.contains(line), "{from_file}");
    }
    // Under another name, and without `--compat`, the program ignores that environment.
    assert!(text(command().arg("--print-settings")).contains("store = \"memory\""));
    let output = command().args(["serve", "--compat", "envoyproxy"]).env("PORT", "x").output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && error.contains("PORT=\"x\" is not a port number"), "{error}");
}

/// The tables in the documentation are equal to the tables of the program. `UPDATE_TABLES=1` rewrites them.
#[test]
fn every_variable_is_documented() {
    let path = repository("docs/reference/compatibility.md");
    let text = fs::read_to_string(&path).unwrap();
    let expected = with_table(&text, "variables", &settings::envoyproxy::table());
    let expected = with_table(&expected, "variables of OpenTelemetry", &settings::opentelemetry::table());
    if std::env::var_os("UPDATE_TABLES").is_some() {
        fs::write(path, expected).unwrap();
    } else {
        assert_eq!(text, expected);
    }
}

/// Replaces the table between the comments with this name.
fn with_table(text: &str, name: &str, table: &str) -> String {
    let (begin, end) = (format!("<!-- {name} -->\n"), format!("<!-- end of {name} -->\n"));
    let (before, from_table) = text.split_once(&begin).unwrap();
    let (_, after) = from_table.split_once(&end).unwrap();
    format!("{before}{begin}{table}{end}{after}")
}

/// `LOG_FORMAT=json` selects the format `logstash`, which has the field names of envoyproxy/ratelimit's log.
#[tokio::test]
async fn the_log_format_logstash_has_the_fields_of_envoyproxy_ratelimit() {
    let server = Server::builder().store("redis://127.0.0.1:1").set("telemetry.log.format", "logstash").start();
    let log = server.log();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).expect(&log)).collect();
    let serving = lines.iter().find(|line| line["@message"] == "serving").expect(&log);
    assert_eq!((&serving["level"], &serving["workers"]), (&"info".into(), &2.into()), "{serving}");
    assert_eq!(serving["logger"], "sluicegate::app");
    assert!(humantime::parse_rfc3339(serving["@timestamp"].as_str().unwrap()).is_ok(), "{serving}");
    assert!(lines.iter().any(|line| line["level"] == "warning"), "{log}");
}
