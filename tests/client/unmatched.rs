//! Checks for which the service has no rule, and the headers that the client computes if the service sends none.

use sluicegate_client::{Client, DecidedBy, Status, descriptor};

use crate::{
    client::log::ClientLog,
    support::{DEADLINE, Operator, Server, rules, wait_for_async},
};

const RULES: &str = "
domain: d
descriptors:
- key: user
  rate_limit: {unit: minute, requests_per_unit: 2}
- key: free
  rate_limit: {unlimited: true}
";

fn start() -> Server {
    Server::start(rules(&[("d.yaml", RULES)]).path(), "memory")
}

#[tokio::test]
async fn a_verdict_shows_whether_a_rule_matched() {
    let server = start();
    for batching in [true, false] {
        let client = Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE);
        let client = client.batching(batching).connect_lazy().unwrap();
        let verdict = client.check([descriptor! { "user" => "a" }, descriptor! { "usr" => "a" }]).await;
        let matched: Vec<_> = verdict.statuses().iter().map(Status::matched).collect();
        assert_eq!((verdict.matched(), matched), (true, vec![true, false]), "batching {batching}: {verdict:?}");
        let unlimited = client.check([descriptor! { "free" => "a" }]).await;
        assert!(unlimited.matched() && unlimited.remaining().is_none(), "batching {batching}: {unlimited:?}");
        let unknown = client.check([descriptor! { "user" => "a" }]).domain("other").await;
        assert_eq!((unknown.allowed(), unknown.matched()), (true, false), "batching {batching}: {unknown:?}");
    }
}

/// One line per client names the keys, not the values, of the first check without a rule.
#[tokio::test]
async fn the_first_check_without_a_rule_is_logged() {
    let (server, log) = (start(), ClientLog::start());
    let client = Client::builder(format!("http://{}", server.grpc)).domain("unmatched-domain").timeout(DEADLINE);
    let client = client.connect_lazy().unwrap();
    for _ in 0..3 {
        client.clone().check([descriptor! { "api" => "secret", "usr" => "bob" }]).await;
    }
    let lines = log.lines_with("unmatched-domain");
    assert_eq!(lines.len(), 1, "{lines:?}");
    assert!(lines[0].contains("WARN") && lines[0].contains("api.usr") && !lines[0].contains("secret"), "{lines:?}");
}

#[tokio::test]
async fn a_check_with_a_rule_is_not_logged() {
    let log = ClientLog::start();
    let folder = rules(&[("d.yaml", &RULES.replace("domain: d", "domain: matched-domain"))]);
    let server = Server::start(folder.path(), "memory");
    let client = Client::builder(format!("http://{}", server.grpc)).domain("matched-domain").timeout(DEADLINE);
    let client = client.connect_lazy().unwrap();
    assert!(client.check([descriptor! { "usr" => "bob" }, descriptor! { "user" => "bob" }]).await.matched());
    assert!(log.lines_with("domain=matched-domain").is_empty());
    // The log works: the first check without a rule is in it.
    assert!(!client.check([descriptor! { "usr" => "bob" }]).await.matched());
    assert_eq!(log.lines_with("domain=matched-domain").len(), 1);
}

/// A cached denial has headers, although the service sent them only with the first denial.
#[tokio::test]
async fn a_denial_has_headers_whether_or_not_the_service_sends_them() {
    for service_headers in ["false", "true"] {
        let folder = rules(&[("d.yaml", RULES)]);
        let server = Server::builder()
            .rules(folder.path())
            .set("response.headers", service_headers)
            .set("response.header_style", "ietf-draft-11")
            .start();
        let client = Client::builder(format!("http://{}", server.grpc)).domain("d").timeout(DEADLINE);
        let client = client.connect_lazy().unwrap();
        assert!(client.check([descriptor! { "user" => "bob" }]).hits(2).await.allowed());
        for decided_by in [DecidedBy::Server, DecidedBy::DenyCache] {
            let denied = client.check([descriptor! { "user" => "bob" }]).await;
            assert_eq!((denied.allowed(), denied.decided_by()), (false, decided_by));
            let header = |name: &str| denied.headers().iter().find(|(other, _)| other == name).unwrap().1.clone();
            assert!(header("RateLimit-Policy").ends_with(";q=2;w=60"), "{denied:?}");
            assert!(header("RateLimit").contains(";r=0;t="), "{denied:?}");
            assert!((1..=60).contains(&header("Retry-After").parse::<u64>().unwrap()), "{denied:?}");
        }
    }
}

/// A rule that is switched off limits nothing, but it exists.
#[tokio::test]
async fn a_rule_that_is_switched_off_has_matched() {
    let operator = Operator::start(rules(&[("d.yaml", RULES)]).path(), "memory");
    let client = Client::builder(format!("http://{}", operator.server.grpc)).domain("d").timeout(DEADLINE);
    let client = client.connect_lazy().unwrap();
    operator.ctl(&["switch", "off", "everything", "--reason", "a test"]);
    wait_for_async("the switch", async || {
        let verdict = client.check([descriptor! { "user" => "off" }]).await;
        assert!(verdict.matched(), "{verdict:?}");
        verdict.remaining().is_none().then_some(())
    })
    .await;
}
