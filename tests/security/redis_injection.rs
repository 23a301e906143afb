//! Values that look like commands, protocol or keys of Redis end as text in the name of one counter.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex},
};

use http::uri::PathAndQuery;
use tonic::{
    Code, Request,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use crate::support::{RedisServer, Server, request_for, rules, server::post, wait_for};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n\
                     - key: \"{x}\\r\\nDEL precious\"\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
/// Commands that the service needs, besides those inside its own scripts. The last ones exchange the activity of instances.
const COMMANDS: [&str; 10] =
    ["CLIENT", "HELLO", "PING", "ROLE", "SCRIPT", "EVALSHA", "EVAL", "HSET", "HGETALL", "PEXPIRE"];

/// `redis-cli monitor`: one line for each command that Redis executes; killed when dropped.
struct Monitor {
    child: Child,
    lines: Arc<Mutex<Vec<String>>>,
}

impl Monitor {
    fn start(redis: &RedisServer) -> Self {
        let mut command = Command::new("redis-cli");
        let mut child = command.args(["-s", &redis.socket(), "monitor"]).stdout(Stdio::piped()).spawn().unwrap();
        let lines = Arc::new(Mutex::new(Vec::new()));
        let (output, recorded) = (child.stdout.take().unwrap(), Arc::clone(&lines));
        std::thread::spawn(move || {
            for line in BufReader::new(output).lines().map_while(Result::ok) {
                recorded.lock().unwrap().push(line);
            }
        });
        let monitor = Self { child, lines };
        wait_for("the monitor to start", || monitor.lines().first().map(drop));
        monitor
    }

    fn lines(&self) -> Vec<String> {
        self.lines.lock().unwrap().clone()
    }
}

impl Drop for Monitor {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Values that have a meaning in Redis, its protocol, its scripts, in shells or in names of counters.
fn values() -> Vec<String> {
    let mut values: Vec<String> = [
        "\r\nFLUSHALL\r\n",
        "*1\r\n$8\r\nFLUSHALL\r\n",
        "x\r\n*3\r\n$3\r\nSET\r\n$8\r\nprecious\r\n$1\r\n0\r\n",
        "\"; redis.call('FLUSHALL') --",
        "']] redis.call('DEL', 'precious') --[[",
        "{precious}",
        "}{",
        "a}fw:31536000",
        "alice}fw:31536000\0",
        "\0",
        "a\0b",
        "precious",
        "*",
        "?[a-z]",
        "user=alice|user=bob",
        "%7B%0D%0A",
        "$(redis-cli FLUSHALL)",
        "\u{feff}\u{202e}\u{1b}[2J",
        "日本\u{10ffff}",
        "",
        " ",
        "1",
        "-1",
        "nil",
    ]
    .map(str::to_owned)
    .into();
    // The maximum length of a text, less the prefix of domains and keys below.
    values.push("x".repeat(1_023));
    values.push("\r\n".repeat(511));
    values.push("}".repeat(1_023));
    values.push("é".repeat(511));
    values
}

#[tokio::test]
async fn values_of_callers_are_never_commands_or_foreign_keys() {
    let folder = rules(&[("api.yaml", RULES)]);
    let redis = RedisServer::start();
    redis.cli(&["SET", "precious", "unchanged"]);
    let monitor = Monitor::start(&redis);
    let server = Server::start(folder.path(), &redis.url());
    let client = server.client().await;
    let values = values();
    for value in &values {
        // Each value has a counter of its own, so the third request is denied.
        for (number, is_allowed) in [(1, true), (2, true), (3, false)] {
            let answer = client.check(request_for("api", &[("user", value)])).await.unwrap();
            assert_eq!(answer.allowed(), is_allowed, "request {number} of {value:?}");
        }
        client.check(request_for("api", &[("{x}\r\nDEL precious", value)])).await.unwrap();
        // Domains and keys without a rule have no counters.
        client.check(request_for(&format!("d{value}"), &[("user", value)])).await.unwrap();
        client.check(request_for("api", &[(&format!("k{value}"), value)])).await.unwrap();
    }
    assert_eq!(redis.cli(&["GET", "precious"]), "unchanged");
    let keys: BTreeSet<String> = redis.cli(&["KEYS", "*"]).lines().map(str::to_owned).collect();
    // Two counters for each value, and the key of this test.
    assert_eq!(keys.len(), 2 * values.len() + 1, "{keys:#?}");
    for key in keys.iter().filter(|key| *key != "precious") {
        let is_named = key.starts_with("sluicegate:{api|") && key.ends_with("}fw:31536000");
        assert!(is_named && key.matches(['{', '}']).count() == 2, "{key}");
        assert!(!key.contains(|character: char| character.is_ascii_control() || character == ' '), "{key:?}");
    }
    let commands: BTreeSet<String> = monitor.lines().iter().filter_map(|line| caller_command(line)).collect();
    assert!(commands.contains("EVALSHA"), "{commands:?}");
    let unexpected: Vec<_> = commands.iter().filter(|command| !COMMANDS.contains(&command.as_str())).collect();
    assert!(unexpected.is_empty(), "{unexpected:?}");
    // Scripts are called with values, and never composed of them.
    let lines = monitor.lines();
    let sources =
        lines.iter().filter_map(|line| line.split_once("] \"EVAL\" ").or(line.split_once("\"SCRIPT\" \"LOAD\" ")));
    assert!(sources.clone().count() > 0 && sources.clone().all(|(_, source)| !source.contains("FLUSHALL")));
}

/// Returns the name of a command that a client on TCP sent, in capitals: not of this test's `redis-cli`, not of scripts.
fn caller_command(line: &str) -> Option<String> {
    let (origin, command) = line.split_once("] ")?;
    let is_client = origin.contains(" 127.0.0.1:");
    is_client.then(|| command.trim_matches('"').split('"').next().unwrap_or_default().to_uppercase())
}

/// Envoy's request, with bytes in place of the text of a value.
#[derive(Clone, PartialEq, prost::Message)]
struct RawRequest {
    #[prost(string, tag = 1)]
    domain: String,
    #[prost(message, repeated, tag = 2)]
    descriptors: Vec<RawDescriptor>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RawDescriptor {
    #[prost(message, repeated, tag = 1)]
    entries: Vec<RawEntry>,
}

#[derive(Clone, PartialEq, prost::Message)]
struct RawEntry {
    #[prost(string, tag = 1)]
    key: String,
    #[prost(bytes = "vec", tag = 2)]
    value: Vec<u8>,
}

/// Sends a request with this value, and returns the code of the answer.
async fn check(channel: &Channel, value: &[u8]) -> Code {
    let entries = vec![RawEntry { key: "user".to_owned(), value: value.to_vec() }];
    let request = RawRequest { domain: "api".to_owned(), descriptors: vec![RawDescriptor { entries }] };
    let path = PathAndQuery::from_static("/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit");
    let mut client = Grpc::new(channel.clone());
    client.ready().await.unwrap();
    let answer = client.unary(Request::new(request), path, ProstCodec::<RawRequest, ()>::default()).await;
    answer.map_or_else(|status| status.code(), |_| Code::Ok)
}

/// Bytes that are not UTF-8 are decided, and Redis receives a text for them: the same one from both protocols.
#[tokio::test]
async fn invalid_utf8_never_reaches_redis() {
    let folder = rules(&[("api.yaml", RULES)]);
    let redis = RedisServer::start();
    let server = Server::start(folder.path(), &redis.url());
    let channel = Endpoint::from_shared(format!("http://{}", server.grpc)).unwrap().connect().await.unwrap();
    let values = [&b"\xff\xfe"[..], b"a\x80", b"\xc0\xaf", b"\xed\xa0\x80", b"\xf5\x80\x80\x80"];
    for bytes in values {
        assert_eq!(check(&channel, bytes).await, Code::Ok, "{bytes:?}");
        let head = br#"{"domain": "api", "descriptors": [{"entries": [{"key": "user", "value": ""#;
        let (code, answer) = post(&server.url("/json"), &[&head[..], bytes, br#""}]}]}"#].concat());
        assert_eq!(code, 200, "{bytes:?}: {answer}");
    }
    assert_eq!(redis.cli(&["DBSIZE"]), values.len().to_string());
    let keys = redis.cli(&["--raw", "KEYS", "*"]);
    assert!(keys.contains(r"user=a\x80"), "{keys}");
}
