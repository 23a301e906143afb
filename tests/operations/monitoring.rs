//! Monitoring: the alerts and their tests, a real Prometheus, and the metrics that alerts and the dashboard refer to.

use std::{
    collections::BTreeSet,
    fs,
    process::{Child, Command, Stdio},
};

use serde_json::{Value, json};

use crate::support::{
    RedisServer, Server, control_plane::ControlPlane, repository, request_for, rules, server::agent, tool, wait_for,
    wait_for_async,
};

#[test]
fn alerts_pass_their_tests_and_are_documented() {
    for args in [["check", "rules", "alerts.yaml"], ["test", "rules", "alerts_test.yaml"]] {
        let output =
            Command::new(tool("promtool")).args(args).current_dir(repository("deploy/prometheus")).output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{text}");
    }
    // Each alert has a row in the guide, and a test in which it fires.
    let read = |path| fs::read_to_string(repository(path)).unwrap();
    let (alerts, tests) = (read("deploy/prometheus/alerts.yaml"), read("deploy/prometheus/alerts_test.yaml"));
    let guide = read("docs/guides/monitoring.md");
    let names: Vec<_> = alerts.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(guide.contains(&format!("| `{name}` |")), "{name} is not in docs/guides/monitoring.md");
        assert!(
            tests.contains(&format!("alertname: {name}\n    exp_alerts:\n    - ")),
            "{name} has no test in which it fires"
        );
    }
}

/// Returns the names of the metrics in the text.
fn metric_names(text: &str) -> BTreeSet<&str> {
    let words = text.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_');
    let prefixes = ["sluicegate_", "ratelimit_service_", "process_"];
    let names = words.filter(|word| prefixes.iter().any(|prefix| word.starts_with(prefix)));
    names.map(|name| name.strip_suffix("_bucket").unwrap_or(name)).collect()
}

/// Checks queries of Prometheus as recording rules.
fn check_queries(queries: &[String]) {
    let mut recording_rules = Vec::new();
    for (number, query) in queries.iter().enumerate() {
        let labels = json!({ "number": number.to_string() });
        recording_rules.push(json!({ "record": "query", "labels": labels, "expr": query }));
    }
    check_rules(&json!({ "groups": [{ "name": "queries", "rules": recording_rules }] }).to_string());
}

/// Checks the text of a file with rules of Prometheus.
fn check_rules(text: &str) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), text).unwrap();
    let output = Command::new(tool("promtool")).args(["check", "rules"]).arg(file.path()).output().unwrap();
    let message = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{message}{text}");
}

#[test]
fn the_queries_of_the_dashboard_are_valid() {
    let text = fs::read_to_string(repository("deploy/grafana/sluicegate.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&text).unwrap();
    let mut queries = Vec::new();
    for panel in dashboard["panels"].as_array().unwrap() {
        for target in panel["targets"].as_array().into_iter().flatten() {
            let mut query = target["expr"].as_str().unwrap().to_owned();
            // Grafana replaces these variables before it sends a query.
            for (variable, value) in
                [("$__rate_interval", "5m"), ("$__range", "1h"), ("$domain", "shop"), ("$instance", "a")]
            {
                query = query.replace(variable, value);
            }
            assert!(!query.contains('$'), "{query}");
            queries.push(query);
        }
    }
    assert!(queries.len() > 40, "{queries:?}");
    check_queries(&queries);
}

#[test]
fn the_queries_and_the_alert_of_the_guide_are_valid() {
    let guide = fs::read_to_string(repository("docs/guides/monitoring.md")).unwrap();
    let mut queries = Vec::new();
    let mut alerts = 0;
    for block in guide.split("\n```").skip(1).step_by(2) {
        let (language, text) = block.split_once('\n').unwrap();
        if language == "promql" {
            let lines = text.lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
            queries.extend(lines.map(str::to_owned));
        }
        if language == "yaml" {
            check_rules(text);
            alerts += 1;
        }
    }
    assert!(queries.len() >= 5 && alerts == 1, "{queries:?}, {alerts} alerts");
    check_queries(&queries);
}

const RULES: &str = "
domain: all
descriptors:
- { key: plain, rate_limit: { unit: hour, requests_per_unit: 5 } }
- { key: leased, rate_limit: { unit: hour, requests_per_unit: 5, consistency: leased } }
- { key: counted, rate_limit: { unit: hour, requests_per_unit: 5, consistency: eventual } }
- { key: shared, rate_limit: { capacity: 10/s, class: class, reserve: { batch: 20% } } }
";

#[tokio::test]
async fn every_metric_of_alerts_and_dashboard_exists() {
    let (redis, folder) = (RedisServer::start(), rules(&[("all.yaml", RULES)]));
    let on_redis = Server::builder()
        .rules(folder.path())
        .store(&redis.url())
        .set("rules.candidate_dir", folder.path().to_str().unwrap())
        .set("rules.candidate_share", "1.0")
        .start();
    let plane = ControlPlane::start();
    let in_memory = Server::builder()
        .set("rules.xds.server", &format!("http://{}", plane.address()))
        .set("rules.xds.start_without_rules", "true")
        .set("cluster.addr", "127.0.0.1:0")
        .set("cluster.peers", "127.0.0.1:1")
        .set("cluster.allow_plaintext", "true")
        .start();
    let client = on_redis.client().await;
    // Some series appear with their first value: a denied request, and a descriptor without a rule.
    for _ in 0..6 {
        client.check(request_for("all", &[("plain", "denied")])).await.unwrap();
    }
    client.check(request_for("all", &[("without_rule", "x")])).await.unwrap();
    let page = wait_for_async("an evaluation of the candidate rules", async || {
        client.check(request_for("all", &[("plain", "x")])).await.unwrap();
        let page = on_redis.get("/metrics");
        page.contains("\nsluicegate_candidate_hits{").then_some(page)
    })
    .await;
    let page = page + &in_memory.get("/metrics");
    let existing: BTreeSet<_> =
        page.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    for file in ["deploy/prometheus/alerts.yaml", "deploy/grafana/sluicegate.json"] {
        let text = fs::read_to_string(repository(file)).unwrap();
        let names = metric_names(&text);
        assert!(names.len() > 10, "{names:?}");
        let missing: Vec<_> = names.difference(&existing).collect();
        assert!(missing.is_empty(), "{file} refers to unknown metrics {missing:?}; existing ones are {existing:?}");
    }
    let histograms =
        ["ratelimit_service_response_time_seconds", "sluicegate_decision_seconds", "sluicegate_store_seconds"];
    for name in histograms {
        assert!(page.contains(&format!("# TYPE {name} histogram")), "{name}: {page}");
    }
    // Exit code 3 is a complaint about names. Some names are those of envoyproxy/ratelimit.
    let mut promtool = Command::new(tool("promtool"))
        .args(["check", "metrics"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    std::io::Write::write_all(&mut promtool.stdin.take().unwrap(), on_redis.get("/metrics").as_bytes()).unwrap();
    let output = promtool.wait_with_output().unwrap();
    assert!(matches!(output.status.code(), Some(0 | 3)), "{}", String::from_utf8_lossy(&output.stderr));
}

/// A real Prometheus requests the format that it prefers: OpenMetrics, or protobuf for native histograms.
#[tokio::test]
async fn a_real_prometheus_scrapes_the_metrics() {
    let server = Server::builder().set("telemetry.otlp.traces", "true").set("telemetry.otlp.sample_ratio", "1").start();
    let client = server.client().await;
    for _ in 0..3 {
        client.check(request_for("example", &[("user", "x")])).await.unwrap();
    }
    let mut page = agent().get(server.url("/metrics")).header("accept", "application/openmetrics-text").call().unwrap();
    assert_eq!(page.headers()["content-type"], "application/openmetrics-text; version=1.0.0; charset=utf-8");
    assert!(page.body_mut().read_to_string().unwrap().ends_with("\n# EOF\n"));

    let prometheus = Prometheus::start(&server, &[]);
    let total = "ratelimit_service_rate_limit_total_hits{domain=\"example\",key1=\"user\"}";
    wait_for("the hits to be scraped", || prometheus.query(total).filter(|hits| *hits == 3.0));
    let quantile = "histogram_quantile(0.5, ratelimit_service_response_time_seconds_bucket)";
    assert!(wait_for("a quantile", || prometheus.query(quantile)) > 0.0);
    assert!(wait_for("memory", || prometheus.query("process_resident_memory_bytes")) > 1e6);
    assert_eq!(prometheus.query("sluicegate_build_info"), Some(1.0));
    assert_eq!(prometheus.query("count(up == 1)"), Some(1.0));

    let prometheus = Prometheus::start(&server, &["--enable-feature=native-histograms,exemplar-storage"]);
    let count = "histogram_count(ratelimit_service_response_time_seconds)";
    wait_for("a native histogram", || prometheus.query(count).filter(|count| *count == 3.0));
    let quantile = prometheus.query("histogram_quantile(0.5, ratelimit_service_response_time_seconds)").unwrap();
    assert!(quantile > 0.0 && quantile < 1.0, "{quantile}");
    assert_eq!(prometheus.query("count(up == 1)"), Some(1.0));
    let url = "/api/v1/query_exemplars?query=ratelimit_service_response_time_seconds&start=0&end=99999999999";
    let exemplars =
        wait_for("an exemplar", || Some(prometheus.get(url)?).filter(|response| response["data"][0].is_object()));
    let trace = exemplars["data"][0]["exemplars"][0]["labels"]["trace_id"].as_str().unwrap();
    assert!(trace.len() == 32 && trace != "0".repeat(32), "{exemplars}");
}

/// A Prometheus that scrapes one server; killed when dropped.
struct Prometheus {
    process: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Prometheus {
    fn start(server: &Server, arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let config = format!(
            "scrape_configs: [{{job_name: s, scrape_interval: 100ms, scrape_timeout: 100ms, static_configs: [{{targets: ['{}']}}]}}]\n",
            server.http
        );
        let file = folder.path().join("prometheus.yml");
        fs::write(&file, config).unwrap();
        let process = Command::new(tool("prometheus"))
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address=127.0.0.1:{port}"))
            .args(["--web.console.templates=/nowhere", "--web.console.libraries=/nowhere", "--log.level=error"])
            .args(arguments)
            .spawn()
            .unwrap();
        Self { process, url: format!("http://127.0.0.1:{port}"), _folder: folder }
    }

    fn get(&self, path: &str) -> Option<Value> {
        let mut response = agent().get(format!("{}{path}", self.url)).call().ok()?;
        serde_json::from_str(&response.body_mut().read_to_string().ok()?).ok()
    }

    /// Returns the result of a query, or `None` if there is none yet.
    fn query(&self, query: &str) -> Option<f64> {
        let query = percent_encoding::utf8_percent_encode(query, percent_encoding::NON_ALPHANUMERIC);
        let response = self.get(&format!("/api/v1/query?query={query}"))?;
        response["data"]["result"][0]["value"][1].as_str()?.parse().ok()
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The test finds the fields of the log lines of levels `info` to `error` in the sources.
#[test]
fn the_fields_of_the_log_are_documented() {
    let guide = fs::read_to_string(repository("docs/guides/monitoring.md")).unwrap();
    let (_, table) = guide.split_once("## Log lines").unwrap();
    let table = table.split("\n## ").next().unwrap();
    let mut fields = BTreeSet::new();
    let mut folders = vec![repository("src"), repository("crates")];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
                continue;
            }
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = fs::read_to_string(path).unwrap();
            for level in ["info", "warn", "error"] {
                for line in text.split(&format!("tracing::{level}!(")).skip(1) {
                    let target = line.trim_start().strip_prefix("target: \"").and_then(|line| line.split_once("\","));
                    let line = target.map_or(line, |(_, line)| line);
                    let before = line.split('"').next().unwrap();
                    let names = before.split(',').map(|name| name.trim().trim_start_matches(['%', '?']));
                    fields.extend(names.filter_map(|name| name.split('=').next()).map(|name| name.trim().to_owned()));
                }
            }
        }
    }
    fields.remove("");
    assert!(fields.len() > 20, "{fields:?}");
    let missing: Vec<_> = fields.iter().filter(|field| !table.contains(&format!("`{field}`"))).collect();
    assert!(missing.is_empty(), "docs/guides/monitoring.md does not describe the fields {missing:?}");
}

/// `promtool check metrics` reports counters without `_total` and metrics without a description. Names that
/// envoyproxy/ratelimit defined are excepted.
#[test]
fn promtool_accepts_our_metrics() {
    let server = Server::builder().start();
    let page = tempfile::NamedTempFile::new().unwrap();
    fs::write(page.path(), server.get("/metrics")).unwrap();
    let input = fs::File::open(page.path()).unwrap();
    let output = Command::new(tool("promtool")).args(["check", "metrics"]).stdin(input).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(text.contains("ratelimit_service_"), "promtool reports nothing about envoyproxy/ratelimit's names: {text}");
    let service_metrics: Vec<&str> = text.lines().filter(|line| line.starts_with("sluicegate_")).collect();
    assert!(service_metrics.is_empty(), "{service_metrics:?}");
}

/// envoyproxy/ratelimit creates this series with its first hit, and scripts of its users count the lines of `/metrics`.
#[tokio::test]
async fn the_series_of_the_deny_cache_appears_with_its_first_hit() {
    let server = Server::builder().start();
    server.client().await.check(request_for("example", &[("user", "bob")])).await.unwrap();
    let page = server.get("/metrics");
    assert!(page.contains("ratelimit_service_rate_limit_over_limit{"), "{page}");
    assert!(!page.contains("over_limit_with_local_cache{"), "{page}");
}
