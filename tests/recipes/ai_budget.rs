//! `deploy/examples/ai-budget.yaml`: prices of tokens, budgets of teams and users, their renewal, and the metric for a
//! warning.

use std::fs;

use super::page::rule_files;
use crate::support::{
    Server, descriptor, fake_clock,
    raw_client::{Answer, Client, Descriptor, Request},
    repository, rules, wait_for_async,
};

const FILE: &str = "deploy/examples/ai-budget.yaml";
const DOLLAR: u64 = 1_000_000;
const TEAM_BUDGET: u64 = 50 * DOLLAR;
const USER_BUDGET: u64 = 5 * DOLLAR;

/// The service with the rules of the example and a clock that the test sets, and a client of it.
struct Gateway {
    server: Server,
    client: Client,
    folder: tempfile::TempDir,
}

impl Gateway {
    /// Starts the service on 27 November, at noon in UTC.
    async fn start() -> Self {
        let folder = rules(&[("ai-budget.yaml", &fs::read_to_string(repository(FILE)).unwrap())]);
        let clock = folder.path().join("clock");
        fs::write(&clock, "@2026-11-27 12:00:00\n").unwrap();
        let builder = Server::builder().rules(folder.path()).store("memory").set("response.dynamic_metadata", "true");
        let server = builder
            .env("LD_PRELOAD", &fake_clock())
            .env("FAKETIME_TIMESTAMP_FILE", clock.to_str().unwrap())
            .env("FAKETIME_CACHE_DURATION", "1")
            .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            .start();
        let client = server.client().await;
        Self { server, client, folder }
    }

    fn set_clock(&self, clock: &str) {
        fs::write(self.folder.path().join("clock"), format!("@{clock}\n")).unwrap();
    }

    async fn check(&self, descriptors: [Descriptor; 2]) -> Answer {
        let mut request = Request::new("ai");
        for descriptor in descriptors {
            request = request.descriptor(descriptor);
        }
        self.client.check(request).await.unwrap()
    }

    /// Checks both budgets before a request, and takes nothing.
    async fn ask(&self, team: &str, user: &str) -> Answer {
        self.check([descriptor(&[("team", team)]).hits(0), descriptor(&[("user", user)]).hits(0)]).await
    }

    /// Charges tokens of a response to both budgets.
    async fn charge(&self, team: &str, user: &str, tokens: &str, number: u64) {
        let team = descriptor(&[("team", team), ("tokens", tokens)]);
        let user = descriptor(&[("user", user), ("tokens", tokens)]);
        self.check([team.hits(number), user.hits(number)]).await;
    }

    /// Asserts that both have spent these amounts in micro-dollars.
    async fn assert_spent(&self, team: (&str, u64), user: (&str, u64)) {
        let answer = self.ask(team.0, user.0).await;
        let left: Vec<_> = answer.0.statuses.iter().map(|status| u64::from(status.limit_remaining)).collect();
        assert_eq!(left, [TEAM_BUDGET - team.1, USER_BUDGET - user.1], "{} and {}", team.0, user.0);
    }

    /// Returns the micro-dollars that a team has spent above 80% of its budget.
    fn near_limit(&self, team: &str) -> u64 {
        let labels = format!("{{domain=\"ai\",key1=\"team_{team}\"}}");
        self.server.metric(&format!("ratelimit_service_rate_limit_near_limit{labels}")) as u64
    }
}

#[tokio::test]
async fn tokens_have_the_price_of_their_model_and_kind() {
    let gateway = Gateway::start().await;
    let mut spent = 0;
    for (tokens, price) in [("large_in", 3), ("large_out", 15), ("small_in", 1), ("small_out", 4), ("unknown_in", 15)] {
        gateway.charge("search", tokens, tokens, 1_000).await;
        spent += 1_000 * price;
        gateway.assert_spent(("search", spent), (tokens, 1_000 * price)).await;
    }
    // Without the entry with the price, tokens have the highest price.
    gateway.check([descriptor(&[("team", "search")]), descriptor(&[("user", "alice")])]).await;
    gateway.assert_spent(("search", spent + 15), ("alice", 15)).await;
    // Without a team, no team is charged, and the user still is.
    let user = descriptor(&[("user", "alice"), ("tokens", "small_in")]);
    let answer = gateway.check([descriptor(&[("project", "search")]), user]).await;
    assert!(answer.0.statuses[0].current_limit.is_none(), "no rule has the key");
    gateway.assert_spent(("search", spent + 15), ("alice", 16)).await;
}

#[tokio::test]
async fn a_user_has_five_dollars_a_day() {
    let gateway = Gateway::start().await;
    assert!(gateway.ask("search", "alice").await.allowed());
    // 0.60 and 4.50 dollars: the response that crosses the budget is charged in full to the team.
    gateway.charge("search", "alice", "large_in", 200_000).await;
    assert!(gateway.ask("search", "alice").await.allowed());
    gateway.charge("search", "alice", "large_out", 300_000).await;
    let denied = gateway.ask("search", "alice").await;
    assert!(!denied.allowed());
    let message = String::from_utf8_lossy(&denied.0.raw_body);
    assert!(message.starts_with(r#"{"error": "budget_exceeded", "budget": "5.00 USD per day", "#), "{message}");
    assert!(!gateway.ask("sales", "alice").await.allowed(), "the budget is the same in another team");
    assert!(gateway.ask("search", "bob").await.allowed(), "another user");
    gateway.assert_spent(("search", 5_100_000), ("bob", 0)).await;
    // Midnight in New York.
    gateway.set_clock("2026-11-28 04:59:00");
    wait_for_async("the last minute of the day", async || {
        let answer = gateway.ask("search", "alice").await;
        let wait = answer.retry_after()?;
        (wait.as_secs() <= 60).then_some(())
    })
    .await;
    gateway.set_clock("2026-11-28 05:00:00");
    wait_for_async("the next day", async || gateway.ask("search", "alice").await.allowed().then_some(())).await;
    gateway.assert_spent(("search", 5_100_000), ("alice", 0)).await;
}

#[tokio::test]
async fn a_team_has_fifty_dollars_a_month_and_a_metric_for_a_warning() {
    let gateway = Gateway::start().await;
    // Eight users spend five dollars each: 80%.
    for user in 1..=8 {
        gateway.charge("search", &format!("user-{user}"), "small_out", 1_250_000).await;
    }
    gateway.charge("sales", "user-11", "small_in", 1_000_000).await;
    assert_eq!((gateway.near_limit("search"), gateway.near_limit("sales")), (0, 0));
    gateway.charge("search", "user-9", "small_in", 1_000_000).await;
    assert_eq!((gateway.near_limit("search"), gateway.near_limit("sales")), (DOLLAR, 0));
    assert!(gateway.ask("search", "user-9").await.allowed(), "a warning denies nothing");

    gateway.charge("search", "user-10", "small_out", 1_250_000).await;
    gateway.charge("search", "user-9", "small_out", 1_000_001).await;
    let denied = gateway.ask("search", "user-11").await;
    assert!(!denied.allowed());
    let message = String::from_utf8_lossy(&denied.0.raw_body);
    assert!(message.starts_with(r#"{"error": "budget_exceeded", "budget": "50.00 USD per month", "#), "{message}");
    assert!(gateway.ask("sales", "user-11").await.allowed(), "another team");
    // The first of December in UTC is still November in New York.
    gateway.set_clock("2026-12-01 04:59:00");
    wait_for_async("the last minute of the month", async || {
        let answer = gateway.ask("search", "user-11").await;
        let wait = answer.retry_after()?;
        (wait.as_secs() <= 60).then_some(())
    })
    .await;
    gateway.set_clock("2026-12-01 05:00:00");
    wait_for_async("the next month", async || gateway.ask("search", "user-11").await.allowed().then_some(())).await;
}

/// The page contains the rules of the file, without the comment at the beginning.
#[test]
fn the_page_has_the_rules_of_the_file() {
    let file = fs::read_to_string(repository(FILE)).unwrap();
    let page = rule_files("docs/guides/recipes/ai-budgets.md");
    let block = fs::read_to_string(page.path().join("ai-budget.yaml")).unwrap();
    let (_, rules_of_file) = file.split_once("\ndomain: ").unwrap();
    let (_, rules_of_page) = block.split_once("\ndomain: ").unwrap();
    assert_eq!(rules_of_page, rules_of_file);
}
