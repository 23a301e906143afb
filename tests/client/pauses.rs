//! The client crate in a process that is paused: the service did not fail meanwhile.

use std::{
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use sluicegate_client::{Client, descriptor};
use tokio::task::JoinSet;

use crate::{
    client::verdicts::start,
    support::{server::signal, wait_for},
};

/// Address of the service, for the process of the paused client.
const ADDRESS: &str = "PAUSED_CLIENT_ADDRESS";
const CALLERS: usize = 8;
const TIME: Duration = Duration::from_secs(8);
/// One that the service does not exceed on a busy machine.
const TIMEOUT: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_millis(400);

#[test]
fn a_pause_of_the_client_is_no_failure_of_the_service() {
    let server = start();
    let client = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "client::pauses::check_all_the_time", "--ignored", "--nocapture"])
        .env(ADDRESS, format!("http://{}", server.grpc))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let calls = "ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}";
    wait_for("the client to check", || (server.metric(calls) > CALLERS as f64).then_some(()));
    for _ in 0..5 {
        signal(client.id(), "STOP");
        thread::sleep(PAUSE);
        signal(client.id(), "CONT");
        thread::sleep(PAUSE);
    }
    let output = client.wait_with_output().unwrap();
    let output = String::from_utf8(output.stdout).unwrap();
    assert!(output.contains("\n0 checks without a verdict of the service"), "{output}");
}

/// Checks from several tasks, and prints the number of checks that the service did not decide. It runs as a process that
/// [`a_pause_of_the_client_is_no_failure_of_the_service`] pauses.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "the process of another test"]
async fn check_all_the_time() {
    let Ok(address) = std::env::var(ADDRESS) else {
        return;
    };
    let client = Client::builder(address).domain("d").timeout(TIMEOUT).connect_lazy().unwrap();
    while client.check([descriptor! { "many" => "x" }]).await.failure().is_some() {
        // The first check waits for the connection.
    }
    let end = Instant::now() + TIME;
    let mut callers = JoinSet::new();
    for _ in 0..CALLERS {
        let client = client.clone();
        callers.spawn(async move {
            let mut failed = 0;
            while Instant::now() < end {
                let verdict = client.check([descriptor! { "many" => "x" }]).await;
                failed += usize::from(verdict.failure().is_some());
            }
            failed
        });
    }
    let failed: usize = callers.join_all().await.into_iter().sum();
    println!("{failed} checks without a verdict of the service");
}
