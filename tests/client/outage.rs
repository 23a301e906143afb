//! The client crate when the service is unavailable, slow, restarted or at another address.

use std::{
    collections::BTreeSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use sluicegate_client::{Client, DecidedBy, Failure, OnError, Routing, Verdict, descriptor};
use tokio::task::JoinSet;

use crate::{
    client::{
        log::ClientLog,
        verdicts::{RULES, client, few, start},
    },
    support::{DEADLINE, Fault, Proxy, Server, rules, wait_for_async},
};

/// One of two endpoints is unavailable. All checks succeed at the other one.
#[tokio::test]
async fn an_unavailable_endpoint_is_skipped() {
    let server = start();
    for batching in [true, false] {
        let limiter = client(&server).endpoint("http://127.0.0.1:1").routing(Routing::RoundRobin).batching(batching);
        let limiter = limiter.connect_lazy().unwrap();
        for _ in 0..20 {
            limiter.check([descriptor! { "many" => "x" }]).without_fallback().await.unwrap();
        }
    }
}

/// Checks that have timed out are not sent when the service responds again.
#[tokio::test]
async fn a_check_that_has_timed_out_is_not_sent() {
    let server = start();
    server.signal("STOP");
    let limiter = client(&server).connect_lazy().unwrap();
    let mut late = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        let timeout = Duration::from_millis(50);
        late.spawn(
            async move { limiter.check([descriptor! { "many" => "x" }]).timeout(timeout).without_fallback().await },
        );
    }
    assert!(late.join_all().await.iter().all(Result::is_err));
    server.signal("CONT");
    wait_for_async("a verdict", async || limiter.check([descriptor! { "many" => "x" }]).without_fallback().await.ok())
        .await;
    assert_eq!(limiter.check([descriptor! { "many" => "x" }]).await.remaining(), Some(999_998));
}

/// Every check has a verdict before its deadline, for each kind of failure.
#[tokio::test]
async fn every_check_has_a_verdict_before_the_deadline() {
    const TIMEOUT: Duration = Duration::from_millis(50);
    for batching in [true, false] {
        let server = start();
        let proxy = Proxy::start(server.grpc.port());
        let limiter = Client::builder(format!("http://{}", proxy.address)).domain("d").timeout(TIMEOUT);
        let limiter = limiter.batching(batching).connect_lazy().unwrap();
        let is_healthy = async || {
            let verdict = limiter.check([descriptor! { "many" => "x" }]).await;
            (verdict.decided_by() == DecidedBy::Server).then_some(())
        };
        let faults = [
            Fault::Cut,
            Fault::Swallow,
            Fault::Delay(Duration::from_millis(200)),
            Fault::Replace(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
            Fault::Replace(b"\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0"),
        ];
        for fault in faults {
            wait_for_async("a verdict from the service", is_healthy).await;
            proxy.set(fault);
            let start = Instant::now();
            let mut slowest = Duration::ZERO;
            let mut failures = 0;
            while start.elapsed() < Duration::from_millis(600) {
                let before_check = Instant::now();
                let verdict = limiter.check([descriptor! { "many" => "x" }]).await;
                slowest = slowest.max(before_check.elapsed());
                assert!(verdict.allowed());
                failures += usize::from(verdict.decided_by() == DecidedBy::Fallback);
                assert_eq!(verdict.decided_by() == DecidedBy::Fallback, verdict.failure().is_some());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // The tolerance is for other tests, which run at the same time.
            assert!(slowest < TIMEOUT + Duration::from_millis(100), "{fault:?}: {slowest:?}");
            // Without the breaker each check would last until its deadline, and there would be fewer failures.
            assert!(failures > 40, "{fault:?}, batching {batching}: {failures} fallbacks");
            proxy.set(Fault::None);
        }
    }
}

#[tokio::test]
async fn the_callers_policy_decides_during_an_outage() {
    let unavailable = "http://127.0.0.1:1";
    let deny = Client::builder(unavailable).domain("d").on_error(OnError::Deny).connect_lazy().unwrap();
    let denied = deny.check([few("alice")]).await;
    assert_eq!((denied.allowed(), denied.decided_by(), denied.statuses().len()), (false, DecidedBy::Fallback, 0));
    let failure = deny.check([few("alice")]).without_fallback().await.unwrap_err();
    assert!(failure.to_string().contains("refused"), "{failure}");
    // After some failures the breaker opens, and no more calls are made.
    wait_for_async("the breaker to open", async || {
        let failure = deny.check([few("alice")]).without_fallback().await.unwrap_err();
        (failure == Failure::Unreachable).then_some(())
    })
    .await;
    assert!(Client::builder("no address").connect_lazy().is_err());
    assert!(Client::builder(unavailable).bearer_token("a\nb").connect_lazy().is_err());
}

/// Errors about invalid checks come from a healthy service, so they do not open the breaker.
#[tokio::test]
async fn invalid_checks_do_not_open_the_breaker() {
    let server = start();
    for batching in [true, false] {
        let limiter = client(&server).batching(batching).connect_lazy().unwrap();
        for _ in 0..100 {
            let failure = limiter.check((0..200).map(|_| few("alice"))).without_fallback().await.unwrap_err();
            assert!(matches!(failure, Failure::Service { code: tonic::Code::InvalidArgument, .. }), "{failure}");
        }
        assert!(limiter.check([few("alice").hits(0)]).without_fallback().await.is_ok(), "batching {batching}");
    }
}

/// The client logs one line at the beginning of an outage and one at its end.
#[tokio::test]
async fn an_outage_is_logged_when_it_begins_and_when_it_ends() {
    let server = start();
    let proxy = Proxy::start(server.grpc.port());
    let log = ClientLog::start();
    let limiter = Client::builder(format!("http://{}", proxy.address)).domain("d").connect_lazy().unwrap();
    for _ in 0..2 {
        proxy.set(Fault::Cut);
        wait_for_async("the breaker to open", async || {
            let failure = limiter.check([few("alice").hits(0)]).without_fallback().await.err()?;
            (failure == Failure::Unreachable).then_some(())
        })
        .await;
        proxy.set(Fault::None);
        wait_for_async("a verdict from the service", async || {
            limiter.check([few("alice").hits(0)]).without_fallback().await.ok()
        })
        .await;
    }
    let lines = log.lines_with(&proxy.address.to_string());
    assert_eq!(lines.len(), 4, "{lines:?}");
    for pair in lines.chunks(2) {
        assert!(pair[0].contains("WARN") && pair[0].contains("circuit breaker opened"), "{lines:?}");
        assert!(pair[1].contains("INFO") && pair[1].contains("circuit breaker closed"), "{lines:?}");
    }
}

/// While all instances are restarted under load, only the checks in flight use the fallback.
#[tokio::test]
async fn a_rolling_restart_costs_few_checks() {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut servers: Vec<_> = (0..3).map(|_| Some(Server::start(folder.path(), "memory"))).collect();
    let addresses: Vec<_> = servers.iter().flatten().map(|server| server.grpc).collect();
    let limiter =
        addresses[1..].iter().fold(Client::builder(format!("http://{}", addresses[0])), |builder, address| {
            builder.endpoint(format!("http://{address}"))
        });
    let limiter = limiter.domain("d").timeout(DEADLINE).connect_lazy().unwrap();
    let checks = Arc::new(AtomicUsize::new(0));
    let failures = Arc::new(AtomicUsize::new(0));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut load = JoinSet::new();
    for _ in 0..20 {
        let limiter = limiter.clone();
        let (checks, failures, stopped) = (Arc::clone(&checks), Arc::clone(&failures), stopped.clone());
        load.spawn(async move {
            while !*stopped.borrow() {
                let user = format!("user{}", checks.fetch_add(1, Relaxed) % 100);
                let verdict = limiter.check([descriptor! { "many" => user }]).await;
                failures.fetch_add(usize::from(verdict.failure().is_some()), Relaxed);
            }
        });
    }
    for (index, address) in addresses.iter().enumerate() {
        let server = servers[index].take().unwrap();
        server.signal("TERM");
        assert!(server.wait().await.success());
        let restarted = Server::builder_at(*address).rules(folder.path()).start();
        let requests = || restarted.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
        wait_for_async("requests at the restarted instance", async || (requests() > 0.0).then_some(())).await;
        let before = checks.load(Relaxed);
        wait_for_async("more checks", async || (checks.load(Relaxed) > before + 400).then_some(())).await;
        servers[index] = Some(restarted);
    }
    stop.send_replace(true);
    load.join_all().await;
    let checks = checks.load(Relaxed);
    // Only checks that were in flight when a connection closed may fail.
    assert!(failures.load(Relaxed) <= 60, "{} of {checks} checks failed", failures.load(Relaxed));
}

/// Connections that the service closes because of their age fail no checks.
#[tokio::test]
async fn closing_old_connections_fails_no_check() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("grpc.max_connection_age", "300ms").start();
    let limiter = client(&server).connect_lazy().unwrap();
    let mut load = JoinSet::new();
    let start = Instant::now();
    for task in 0..50 {
        let limiter = limiter.clone();
        load.spawn(async move {
            let mut checks = 0_u64;
            while start.elapsed() < Duration::from_secs(2) {
                let user = format!("user{task}");
                limiter.check([descriptor! { "many" => user }]).without_fallback().await.unwrap();
                checks += 1;
            }
            checks
        });
    }
    let checks: u64 = load.join_all().await.into_iter().sum();
    let requests = server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    assert!(checks > 1_000 && requests == checks as f64, "{requests} requests for {checks} checks");
}

/// The documented ring selects the endpoint of each check. Without the first endpoint, the others share its users and
/// keep their own.
#[tokio::test]
async fn checks_are_routed_by_the_ring() {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut servers: Vec<_> = (0..3).map(|_| Some(Server::start(folder.path(), "memory"))).collect();
    let addresses: Vec<_> = servers.iter().flatten().map(|server| server.grpc.to_string()).collect();
    let limiter = |routing: Routing| {
        let builder =
            addresses[1..].iter().fold(Client::builder(format!("http://{}", addresses[0])), |builder, name| {
                builder.endpoint(format!("http://{name}"))
            });
        builder.domain("d").timeout(DEADLINE).routing(routing).connect_lazy().unwrap()
    };
    let ring = sluicegate_placement::Ring::new(addresses.iter().map(|name| (name.as_str(), 1)));
    let requests = |server: &Option<Server>| {
        let series = "ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}";
        server.as_ref().map_or(0.0, |server| server.metric(series))
    };
    let by_user = limiter(Routing::ByEntries(vec!["many".into()]));
    let mut expected = [0.0; 3];
    for user in 0..60 {
        let user = format!("user{user}");
        expected[ring.node_of(format!("d|many={user}").as_bytes()).unwrap()] += 1.0;
        let verdict =
            by_user.check([descriptor! { "path" => "/", "many" => &*user }]).without_fallback().await.unwrap();
        assert!(verdict.allowed());
    }
    assert_eq!(servers.iter().map(requests).collect::<Vec<_>>(), expected);
    drop(servers[0].take());
    // A check that was in flight when the connection broke is not sent again.
    let on_first = (0..).map(|user| format!("user{user}"));
    let mut on_first = on_first.filter(|user| ring.node_of(format!("d|many={user}").as_bytes()) == Some(0));
    let user = on_first.next().unwrap();
    wait_for_async("a verdict from another endpoint", async || {
        let verdict = by_user.check([descriptor! { "many" => &*user }]).await;
        (verdict.decided_by() == DecidedBy::Server).then_some(())
    })
    .await;
    expected[ring.node_among(format!("d|many={user}").as_bytes(), |index| index != 0).unwrap()] += 1.0;
    for user in 0..60 {
        let user = format!("user{user}");
        let index = ring.node_among(format!("d|many={user}").as_bytes(), |index| index != 0).unwrap();
        expected[index] += 1.0;
        by_user.check([descriptor! { "many" => &*user }]).without_fallback().await.unwrap();
    }
    assert_eq!(servers[1..].iter().map(requests).collect::<Vec<_>>(), expected[1..]);
    let in_turn = limiter(Routing::RoundRobin);
    for _ in 0..40 {
        in_turn.check([descriptor! { "many" => "x" }]).without_fallback().await.unwrap();
    }
    let new_requests: Vec<_> =
        servers[1..].iter().map(requests).zip(&expected[1..]).map(|(now, before)| now - before).collect();
    assert!(new_requests.iter().all(|count| *count >= 10.0), "{new_requests:?}");
}

/// The client resolves host names again at an interval, and finds new addresses.
#[tokio::test]
async fn host_names_are_resolved_again() {
    let server = start();
    let port = server.grpc.port();
    let limiter = Client::builder(format!("http://localhost:{port}")).domain("d").timeout(DEADLINE);
    let limiter = limiter.resolve_every(Duration::from_millis(20)).connect_lazy().unwrap();
    wait_for_async("the name's addresses", async || {
        let known: BTreeSet<_> = limiter.endpoints().iter().map(ToString::to_string).collect();
        known.contains(&format!("127.0.0.1:{port}")).then_some(())
    })
    .await;
    assert!(limiter.check([few("alice")]).without_fallback().await.unwrap().allowed());
}

/// Cancelled checks leave nothing behind, neither in the client nor in the service.
#[tokio::test]
async fn a_cancelled_check_leaves_nothing_behind() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    limiter.check([few("x")]).await;
    drop(limiter.check([few("never checked")]));
    for _ in 0..10_000 {
        let check = limiter.check([descriptor! { "many" => "x" }]);
        tokio::select! {
            biased;
            _ = check => {}
            () = std::future::ready(()) => {}
        }
    }
    let verdicts: Vec<Verdict> = vec![limiter.check([few("never checked")]).hits(3).await];
    assert!(verdicts[0].allowed());
    let descriptors = server.open_file_descriptors();
    drop(limiter);
    wait_for_async("the connection to end", async || (server.open_file_descriptors() < descriptors).then_some(()))
        .await;
}
