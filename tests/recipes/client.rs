//! The Rust parts of the pages, with the pages' own rules. Each block of the language `rust` is part of this file.

use std::time::Duration;

use sluicegate_client::{Client, descriptor};

use super::page::rule_files;
use crate::support::{DEADLINE, Server};

/// Starts the service with the rules of a page, and connects to it.
fn start(page: &str, domain: &str) -> (Server, Client) {
    let rules = rule_files(page);
    let server = Server::builder().rules(rules.path()).store("memory").start();
    let builder = Client::builder(format!("http://{}", server.grpc)).domain(domain).timeout(DEADLINE);
    (server, builder.connect_lazy().unwrap())
}

#[tokio::test]
async fn a_check_names_the_plan_of_its_user() {
    let (_server, client) = start("docs/guides/recipes/plans.md", "api");
    let verdict = client.check([descriptor! { "user" => "erin", "plan" => "pro" }]).await;
    assert!(verdict.allowed());
    assert_eq!(verdict.remaining(), Some(4));
}

/// The outcome of an attempt to sign in.
#[derive(Debug, PartialEq)]
enum Login {
    TooManyAttempts,
    WrongPassword,
    Welcome,
}

async fn log_in(client: &Client, name: &str, address: &str, is_password_right: bool) -> Login {
    let pair = || descriptor! { "name_at_address" => name, "remote_address" => address };
    let verdict =
        client.check([pair(), descriptor! { "remote_address" => address }, descriptor! { "name" => name }]).await;
    if !verdict.allowed() {
        return Login::TooManyAttempts;
    }
    if !is_password_right {
        return Login::WrongPassword;
    }
    client.check([pair().refund()]).await;
    Login::Welcome
}

#[tokio::test]
async fn an_attacker_locks_nobody_out_and_successes_do_not_count() {
    let (_server, client) = start("docs/guides/recipes/login.md", "login");
    for attempt in 1..=60 {
        let expected = if attempt <= 5 { Login::WrongPassword } else { Login::TooManyAttempts };
        assert_eq!(log_in(&client, "alice", "203.0.113.7", false).await, expected, "attempt {attempt}");
    }
    for attempt in 1..=10 {
        assert_eq!(log_in(&client, "alice", "198.51.100.1", true).await, Login::Welcome, "attempt {attempt}");
    }
}

/// What a caller that wants an account gets.
#[derive(Debug, PartialEq)]
enum SignUp {
    Create,
    AskForProof,
}

async fn sign_up(client: &Client, address: &str, network: &str) -> SignUp {
    let verdict = client
        .check([
            descriptor! { "remote_address" => address },
            descriptor! { "masked_remote_address" => network },
            descriptor! { "all" => "signup" },
        ])
        .await;
    if !verdict.allowed() {
        return SignUp::AskForProof;
    }
    SignUp::Create
}

#[tokio::test]
async fn the_fourth_account_of_an_address_needs_a_proof() {
    let (_server, client) = start("docs/guides/recipes/sign-up.md", "signup");
    for number in 1..=4 {
        let expected = if number <= 3 { SignUp::Create } else { SignUp::AskForProof };
        assert_eq!(sign_up(&client, "192.0.2.1", "192.0.2.0/24").await, expected, "account {number}");
    }
    assert_eq!(sign_up(&client, "192.0.2.2", "192.0.2.0/24").await, SignUp::Create);
}

async fn run_export() {}

async fn export(client: &Client, customer: &str) -> Result<(), Option<Duration>> {
    match client.acquire([descriptor! { "running" => customer }]).holder_key("job").await {
        Ok(permit) => {
            run_export().await;
            permit.release().await;
            Ok(())
        }
        Err(verdict) => Err(verdict.retry_after()),
    }
}

#[tokio::test]
async fn an_export_holds_a_slot_while_it_runs() {
    let (_server, client) = start("docs/guides/recipes/export-jobs.md", "export");
    let slot = || client.acquire([descriptor! { "running" => "alice" }]).holder_key("job");
    let running = [slot().await.unwrap(), slot().await.unwrap()];
    assert!(export(&client, "alice").await.unwrap_err().is_some(), "two exports are running");
    for permit in running {
        permit.release().await;
    }
    for _ in 0..3 {
        assert_eq!(export(&client, "alice").await, Ok(()));
    }
}

/// What happened to a webhook.
#[derive(Debug, PartialEq)]
enum Delivery {
    Sent(String),
    Later(Option<Duration>),
}

async fn send(host: &str) -> String {
    host.to_owned()
}

async fn deliver(client: &Client, host: &str) -> Delivery {
    let verdict = client.check([descriptor! { "destination" => host }]).await;
    if !verdict.allowed() {
        return Delivery::Later(verdict.retry_after());
    }
    tokio::time::sleep(verdict.delay()).await;
    let Ok(_slot) = client.acquire([descriptor! { "open_calls" => host }]).holder_key("call").await else {
        return Delivery::Later(None);
    };
    Delivery::Sent(send(host).await)
}

#[tokio::test]
async fn webhooks_wait_and_are_denied_beyond_the_queue() {
    let (_server, client) = start("docs/guides/recipes/webhook-senders.md", "webhooks");
    assert_eq!(deliver(&client, "hooks.example.com").await, Delivery::Sent("hooks.example.com".to_owned()));
    let slow = || client.check([descriptor! { "destination" => "slow.example.com" }]);
    for call in 0..4 {
        let verdict = slow().await;
        assert!(verdict.allowed(), "call {call}");
        assert_eq!(verdict.delay().is_zero(), call == 0, "call {call} waits {:?}", verdict.delay());
    }
    let later = deliver(&client, "slow.example.com").await;
    assert!(matches!(later, Delivery::Later(Some(_))), "{later:?}");
}
