//! Mistakes in the address and the credentials of Redis: the log and the metric name each.

use std::process::Output;

use crate::support::{
    RedisServer, Server,
    certificates::{Authority, Files},
    rules,
    server::command,
    wait_for,
};

const RULES: &str = "domain: d\ndescriptors: [{key: k, rate_limit: {unit: year, requests_per_unit: 9}}]\n";

fn start(store: &str, settings: &[(&str, &str)]) -> Server {
    let folder = rules(&[("d.yaml", RULES)]);
    let builder = Server::builder().rules(folder.path()).store(store).set("redis.timeout", "1s");
    settings.iter().fold(builder, |builder, (name, value)| builder.set(name, value)).start()
}

/// Waits until the log contains a problem with its kind in one line, and the metric has failures of this kind.
fn assert_names(server: &Server, kind: &str, problem: &str) {
    wait_for(&format!("{problem:?} in the log and {kind} in the metric"), || {
        let log = server.log();
        let is_logged =
            log.lines().any(|line| line.contains(&format!("\"kind\":\"{kind}\"")) && line.contains(problem));
        let series = format!("sluicegate_redis_failures_total{{kind=\"{kind}\"}}");
        (is_logged && server.metric(&series) > 0.0).then_some(())
    });
}

const MISSING: &str = "Redis requires a password";
const REJECTED: &str = "Redis rejects the user name or the password";

#[test]
fn a_missing_password_is_named() {
    let redis = RedisServer::with(&["--requirepass", "secret"]);
    let address = format!("127.0.0.1:{}", redis.port);
    for store in [format!("redis://{address}"), format!("redis+ring://{address}"), format!("redis+cluster://{address}")]
    {
        assert_names(&start(&store, &[]), "noauth", MISSING);
    }
}

#[test]
fn a_wrong_password_is_named() {
    let redis = RedisServer::with(&["--requirepass", "secret"]);
    for credentials in [":wrong", "somebody:secret"] {
        for scheme in ["redis", "redis+cluster"] {
            let server = start(&format!("{scheme}://{credentials}@127.0.0.1:{}", redis.port), &[]);
            assert_names(&server, "noauth", REJECTED);
            assert!(!server.log().contains("wrong"), "{}", server.log());
        }
    }
}

/// The outage itself was logged as a connection that broke. The reason why it does not end is logged, too.
#[test]
fn a_password_that_was_rotated_is_named() {
    let mut redis = RedisServer::with(&["--requirepass", "secret"]);
    let server = start(&format!("redis://:secret@127.0.0.1:{}", redis.port), &[]);
    let is_up = format!("sluicegate_redis_up{{server=\"127.0.0.1:{}\"}}", redis.port);
    wait_for("a connection", || (server.metric(&is_up) > 0.0).then_some(()));
    redis.restart_with(&["--requirepass", "other"]);
    assert_names(&server, "noauth", REJECTED);
    redis.restart_with(&["--requirepass", "secret"]);
    wait_for("the recovery", || server.log().contains("Redis server is available again").then_some(()));
}

#[test]
fn tls_on_one_side_only_is_named() {
    let (authority, files) = (Authority::new("redis"), Files::new());
    let (certificate, key) = authority.sign();
    let path = |name: &str, text: &str| files.write(name, text);
    let (certificate, key, ca) = (path("cert", &certificate), path("key", &key), path("ca", &authority.pem));
    let (plain, tls) = (RedisServer::start(), RedisServer::tls(&certificate, &key, &ca));
    for scheme in ["redis", "redis+cluster"] {
        let server = start(&format!("{scheme}://127.0.0.1:{}", tls.port), &[]);
        assert_names(&server, "tls", "the port requires TLS: use rediss");
    }
    for scheme in ["rediss", "rediss+cluster"] {
        let server = start(&format!("{scheme}://127.0.0.1:{}", plain.port), &[("redis.tls.ca_file", &ca)]);
        assert_names(&server, "tls", "the port does not use TLS: use redis");
    }
    // Another authority has signed the server's certificate.
    let other = path("other", &Authority::new("other").pem);
    let server = start(&format!("rediss://127.0.0.1:{}", tls.port), &[("redis.tls.ca_file", &other)]);
    assert_names(&server, "tls", "TLS cannot be established");
}

#[test]
fn a_file_without_the_expected_certificate_is_an_error() {
    let (authority, files) = (Authority::new("redis"), Files::new());
    let (certificate, key) = authority.sign();
    let path = |name: &str, text: &str| files.write(name, text);
    let (certificate, key) = (path("cert", &certificate), path("key", &key));
    let empty = path("empty", "no certificate\n");
    for (settings, expected) in [
        (vec![("CA_FILE", &empty)], "contains no certificate"),
        (vec![("CA_FILE", &key)], "contains no certificate"),
        (vec![("CERT_FILE", &empty), ("KEY_FILE", &key)], "contains no certificate"),
        (vec![("CERT_FILE", &certificate), ("KEY_FILE", &empty)], "contains no private key"),
    ] {
        let folder = rules(&[("d.yaml", RULES)]);
        let mut command = command();
        command.args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0", "--rules"]);
        command.arg(folder.path()).args(["--store", "rediss://127.0.0.1:1"]);
        for (name, file) in settings {
            command.env(format!("SLUICEGATE__REDIS__TLS__{name}"), file);
        }
        let Output { status, stderr, .. } = command.output().unwrap();
        let error = String::from_utf8(stderr).unwrap();
        assert!(!status.success() && error.contains(expected) && error.contains("TLS certificate or key /"), "{error}");
    }
}
