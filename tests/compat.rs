//! In the place of envoyproxy/ratelimit: under its name, with its environment.

use std::{fs, os::unix::fs::symlink, path::Path, process::Command};

use tonic::transport::Endpoint;

use super::support::{
    RedisServer, Server, ask,
    plain::Client,
    repository,
    server::{command, get},
};

const RULES: &str = "domain: example\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 5}}]\n";

fn link(folder: &Path) -> Command {
    let link = folder.join("ratelimit");
    symlink(env!("CARGO_BIN_EXE_sluicegate"), &link).unwrap();
    let mut command = Command::new(link);
    command.env_clear();
    command
}

/// Ports that nobody has just now.
fn free_ports<const N: usize>() -> [String; N] {
    let listeners: [_; N] = std::array::from_fn(|_| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
    listeners.map(|listener| listener.local_addr().unwrap().port().to_string())
}

/// As Istio's sample and the peer's own compose file set it, with other ports.
#[tokio::test]
async fn its_environment_is_enough() {
    let (folder, redis) = (tempfile::tempdir().unwrap(), RedisServer::start());
    // As a ConfigMap is mounted; names need not end in yaml.
    let config = folder.path().join("data/ratelimit/config");
    fs::create_dir_all(config.join("..2026_11_22")).unwrap();
    fs::write(config.join("..2026_11_22/config"), RULES).unwrap();
    symlink("..2026_11_22", config.join("..data")).unwrap();
    symlink("..data/config", config.join("config")).unwrap();
    let [http, grpc, debug, metrics] = free_ports();
    let mut command = link(folder.path());
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
        ("NOBODY_KNOWS_THIS", "1"),
    ]);
    let server = Server::of(command).start();
    // Both families, by the one address.
    let client = Client::with(Endpoint::from_shared(format!("http://127.0.0.1:{grpc}")).unwrap()).await.unwrap();
    let answer = client.check(ask("example", &[("user", "a")])).await.unwrap();
    assert_eq!(answer.remaining(), Some(4));
    let page = |port: &str, path: &str| get(&format!("http://127.0.0.1:{port}{path}"));
    assert_eq!(page(&http, "/healthcheck"), (200, "OK".into()));
    let line = "example.user: unit=HOUR requests_per_unit=5, shadow_mode: false, quota_mode: false\n";
    assert!(page(&debug, "/rlconfig").1.ends_with(line));
    let (code, stats) = page(&debug, "/stats");
    let total = "ratelimit_service_rate_limit_total_hits{domain=\"example\",key1=\"user\"}";
    assert!(code == 200 && stats.contains(&format!("{total}: 1\n")), "{stats}");
    assert!(page(&debug, "/").1.contains("/rlconfig") && page(&debug, "/json").0 == 404);
    assert!(page(&metrics, "/numbers").1.contains(&format!("{total} 1\n")) && page(&metrics, "/metrics").0 == 404);
    let log = server.log();
    let remarks: Vec<_> = log.lines().filter(|line| line.contains("without effect")).collect();
    assert_eq!(remarks.len(), 1, "{log}");
    for name in ["REDIS_POOL_SIZE (each worker has", "USE_STATSD (", "RUNTIME_WATCH_ROOT ("] {
        assert!(remarks[0].contains(name), "{name}: {}", remarks[0]);
    }
    assert!(!log.contains("NOBODY_KNOWS_THIS"), "{log}");
}

/// What `migrate` prints says the same as the environment does.
#[test]
fn the_settings_that_say_the_same_are_printed() {
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
    assert!(migrated.starts_with("# MEMCACHE_SRV has no effect: counters are in Redis"), "{migrated}");
    let file = folder.path().join("settings.toml");
    fs::write(&file, migrated).unwrap();
    let by_file = text(command().args(["--print-settings", "--config", file.to_str().unwrap()]));
    for settings in [
        text(command().args(["--print-settings", "--compat", "envoyproxy"])),
        text(link(folder.path()).arg("--print-settings")),
    ] {
        assert_eq!(settings, by_file);
    }
    for line in ["store = \"redis://:***@redis:6379\"", "shadow_mode = true", "charge_all = true", "debug_addr"] {
        assert!(by_file.contains(line), "{by_file}");
    }
    // Without its name the environment says nothing.
    assert!(text(command().arg("--print-settings")).contains("store = \"memory\""));
    let output = command().args(["serve", "--compat", "envoyproxy"]).env("PORT", "x").output().unwrap();
    let complaint = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && complaint.contains("PORT=\"x\" is no port"), "{complaint}");
}

/// The table in the documentation is the program's. `UPDATE_TABLES=1` writes it.
#[test]
fn every_variable_is_documented() {
    let path = repository("docs/compatibility.md");
    let text = fs::read_to_string(&path).unwrap();
    let (begin, end) = ("<!-- variables -->\n", "<!-- end of variables -->\n");
    let (before, rest) = text.split_once(begin).unwrap();
    let (_, after) = rest.split_once(end).unwrap();
    let expected = format!("{before}{begin}{}{end}{after}", sluicegate::settings::peer::table());
    if std::env::var_os("UPDATE_TABLES").is_some() {
        fs::write(path, expected).unwrap();
    } else {
        assert_eq!(text, expected);
    }
}
