//! The client crate when the service is away, slow, restarted or somewhere else.

use std::{
    collections::BTreeSet,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::{Duration, Instant},
};

use sluicegate_client::{Client, DecidedBy, Failure, OnError, Routing, Verdict, descriptor};
use tokio::task::JoinSet;

use crate::{
    client::verdicts::{RULES, client, few, start},
    support::{DEADLINE, Fault, Proxy, Server, rules, wait_for_async},
};

/// Nobody listens at one of two addresses: the other one is asked, and no caller notices.
#[tokio::test]
async fn an_instance_that_is_not_there_is_passed_over() {
    let server = start();
    for batching in [true, false] {
        let limiter = client(&server).endpoint("http://127.0.0.1:1").routing(Routing::RoundRobin).batching(batching);
        let limiter = limiter.connect_lazy().unwrap();
        for _ in 0..20 {
            limiter.check([descriptor! { "many" => "x" }]).without_fallback().await.unwrap();
        }
    }
}

/// Whoever does not wait any more is not asked about when the service wakes up.
#[tokio::test]
async fn what_nobody_waits_for_is_not_sent() {
    let server = start();
    server.signal("STOP");
    let limiter = client(&server).connect_lazy().unwrap();
    let mut late = JoinSet::new();
    for _ in 0..100 {
        let limiter = limiter.clone();
        let within = Duration::from_millis(50);
        late.spawn(
            async move { limiter.check([descriptor! { "many" => "x" }]).timeout(within).without_fallback().await },
        );
    }
    assert!(late.join_all().await.iter().all(Result::is_err));
    server.signal("CONT");
    wait_for_async("an answer", async || limiter.check([descriptor! { "many" => "x" }]).without_fallback().await.ok())
        .await;
    assert_eq!(limiter.check([descriptor! { "many" => "x" }]).await.remaining(), Some(999_998));
}

/// Whatever happens to the service, every caller has an answer by the deadline.
#[tokio::test]
async fn there_is_always_an_answer_in_time() {
    const WITHIN: Duration = Duration::from_millis(50);
    for batching in [true, false] {
        let server = start();
        let proxy = Proxy::start(server.grpc.port());
        let limiter = Client::builder(format!("http://{}", proxy.address)).domain("d").timeout(WITHIN);
        let limiter = limiter.batching(batching).connect_lazy().unwrap();
        let well = async || {
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
            wait_for_async("the service to be asked", well).await;
            proxy.set(fault);
            let began = Instant::now();
            let mut slowest = Duration::ZERO;
            let mut failures = 0;
            while began.elapsed() < Duration::from_millis(600) {
                let asked = Instant::now();
                let verdict = limiter.check([descriptor! { "many" => "x" }]).await;
                slowest = slowest.max(asked.elapsed());
                assert!(verdict.allowed());
                failures += usize::from(verdict.decided_by() == DecidedBy::Fallback);
                assert_eq!(verdict.decided_by() == DecidedBy::Fallback, verdict.failure().is_some());
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            // Tests beside this one have the processors too.
            assert!(slowest < WITHIN + Duration::from_millis(100), "{fault:?}: {slowest:?}");
            // The breaker is why there are many more than the deadline alone would allow.
            assert!(failures > 40, "{fault:?}, batching {batching}: {failures}");
            proxy.set(Fault::None);
        }
    }
}

#[tokio::test]
async fn what_an_outage_means_is_the_callers_choice() {
    let nobody = "http://127.0.0.1:1";
    let deny = Client::builder(nobody).domain("d").on_error(OnError::Deny).connect_lazy().unwrap();
    let refused = deny.check([few("alice")]).await;
    assert_eq!((refused.allowed(), refused.decided_by(), refused.statuses().len()), (false, DecidedBy::Fallback, 0));
    let failure = deny.check([few("alice")]).without_fallback().await.unwrap_err();
    assert!(failure.to_string().contains("refused"), "{failure}");
    // After some of these nobody is asked any more.
    wait_for_async("the breaker to open", async || {
        let failure = deny.check([few("alice")]).without_fallback().await.unwrap_err();
        (failure == Failure::Unreachable).then_some(())
    })
    .await;
    assert!(Client::builder("no address").connect_lazy().is_err());
    assert!(Client::builder(nobody).bearer_token("a\nb").connect_lazy().is_err());
}

/// A service that says what is wrong with a check is well: nobody else has to go without it.
#[tokio::test]
async fn a_check_that_cannot_be_is_no_outage() {
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

/// An outage is one line in the gateway's log, and its end another.
#[tokio::test]
async fn an_outage_is_logged_when_it_begins_and_when_it_ends() {
    let server = start();
    let proxy = Proxy::start(server.grpc.port());
    let log = Arc::new(Mutex::new(Vec::new()));
    let writer = Arc::clone(&log);
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || Log(Arc::clone(&writer)));
    // For the whole process: one of a thread misses events whose place in the code another thread comes to first.
    tracing::subscriber::set_global_default(subscriber.with_env_filter("sluicegate_client").finish()).unwrap();
    let limiter = Client::builder(format!("http://{}", proxy.address)).domain("d").connect_lazy().unwrap();
    for _ in 0..2 {
        proxy.set(Fault::Cut);
        wait_for_async("the breaker to open", async || {
            let failure = limiter.check([few("alice").hits(0)]).without_fallback().await.err()?;
            (failure == Failure::Unreachable).then_some(())
        })
        .await;
        proxy.set(Fault::None);
        wait_for_async("the service to be asked again", async || {
            limiter.check([few("alice").hits(0)]).without_fallback().await.ok()
        })
        .await;
    }
    let log = String::from_utf8(log.lock().unwrap().clone()).unwrap();
    let address = proxy.address.to_string();
    let lines: Vec<_> = log.lines().filter(|line| line.contains(&address)).collect();
    assert_eq!(lines.len(), 4, "{log}");
    for pair in lines.chunks(2) {
        assert!(pair[0].contains("WARN") && pair[0].contains("circuit breaker opened"), "{log}");
        assert!(pair[1].contains("INFO") && pair[1].contains("circuit breaker closed"), "{log}");
    }
}

/// What a subscriber writes.
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Instances that come and go under load: no caller notices more than a fallback or two.
#[tokio::test]
async fn three_instances_are_restarted_one_after_the_other() {
    let folder = rules(&[("d.yaml", RULES)]);
    let mut servers: Vec<_> = (0..3).map(|_| Some(Server::start(folder.path(), "memory"))).collect();
    let addresses: Vec<_> = servers.iter().flatten().map(|server| server.grpc).collect();
    let limiter =
        addresses[1..].iter().fold(Client::builder(format!("http://{}", addresses[0])), |builder, address| {
            builder.endpoint(format!("http://{address}"))
        });
    let limiter = limiter.domain("d").timeout(DEADLINE).connect_lazy().unwrap();
    let failures = Arc::new(AtomicUsize::new(0));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    let mut load = JoinSet::new();
    for task in 0..20 {
        let (limiter, failures, stopped) = (limiter.clone(), Arc::clone(&failures), stopped.clone());
        load.spawn(async move {
            let mut count = 0;
            while !*stopped.borrow() {
                let user = format!("user{}", (task * 7 + count) % 100);
                let verdict = limiter.check([descriptor! { "many" => user }]).await;
                failures.fetch_add(usize::from(verdict.failure().is_some()), Relaxed);
                count += 1;
            }
            count
        });
    }
    for (place, address) in addresses.iter().enumerate() {
        let server = servers[place].take().unwrap();
        server.signal("TERM");
        assert!(server.wait().await.success());
        let again = Server::builder_at(*address).rules(folder.path()).start();
        let seen = || again.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
        wait_for_async("the new instance to be asked", async || (seen() > 0.0).then_some(())).await;
        servers[place] = Some(again);
    }
    stop.send_replace(true);
    let checks: usize = load.join_all().await.into_iter().sum();
    assert!(checks > 1_000, "{checks}");
    // Those that were under way when a connection closed.
    assert!(failures.load(Relaxed) <= 60, "{} of {checks}", failures.load(Relaxed));
}

/// Connections that are asked to go take nobody's check with them.
#[tokio::test]
async fn a_connection_that_is_old_costs_no_check() {
    let folder = rules(&[("d.yaml", RULES)]);
    let server = Server::builder().rules(folder.path()).set("grpc.max_connection_age", "300ms").start();
    let limiter = client(&server).connect_lazy().unwrap();
    let mut load = JoinSet::new();
    let began = Instant::now();
    for task in 0..50 {
        let limiter = limiter.clone();
        load.spawn(async move {
            let mut checks = 0_u64;
            while began.elapsed() < Duration::from_secs(2) {
                let user = format!("user{task}");
                limiter.check([descriptor! { "many" => user }]).without_fallback().await.unwrap();
                checks += 1;
            }
            checks
        });
    }
    let checks: u64 = load.join_all().await.into_iter().sum();
    let asked = server.metric("ratelimit_service_total_requests{grpc_method=\"ShouldRateLimit\"}");
    assert!(checks > 1_000 && asked == checks as f64, "each once: {asked} of {checks}");
}

/// The published placement decides who is asked; without the first the others share its users, and keep their own.
#[tokio::test]
async fn checks_go_where_the_placement_says() {
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
    let ring = sluicegate_common::Ring::new(addresses.iter().map(|name| (name.as_str(), 1)));
    let asked = |server: &Option<Server>| {
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
    assert_eq!(servers.iter().map(asked).collect::<Vec<_>>(), expected);
    drop(servers[0].take());
    // A check may be on its way when the connection breaks: that one is not asked twice.
    let on_first = (0..).map(|user| format!("user{user}"));
    let mut on_first = on_first.filter(|user| ring.node_of(format!("d|many={user}").as_bytes()) == Some(0));
    let user = on_first.next().unwrap();
    wait_for_async("somebody else to be asked", async || {
        let verdict = by_user.check([descriptor! { "many" => &*user }]).await;
        (verdict.decided_by() == DecidedBy::Server).then_some(())
    })
    .await;
    expected[ring.node_among(format!("d|many={user}").as_bytes(), |place| place != 0).unwrap()] += 1.0;
    for user in 0..60 {
        let user = format!("user{user}");
        let place = ring.node_among(format!("d|many={user}").as_bytes(), |place| place != 0).unwrap();
        expected[place] += 1.0;
        by_user.check([descriptor! { "many" => &*user }]).without_fallback().await.unwrap();
    }
    assert_eq!(servers[1..].iter().map(asked).collect::<Vec<_>>(), expected[1..]);
    let in_turn = limiter(Routing::RoundRobin);
    for _ in 0..40 {
        in_turn.check([descriptor! { "many" => "x" }]).without_fallback().await.unwrap();
    }
    let grown: Vec<_> = servers[1..].iter().map(asked).zip(&expected[1..]).map(|(now, before)| now - before).collect();
    assert!(grown.iter().all(|grown| *grown >= 10.0), "{grown:?}");
}

/// A name with one address more: it is found, and its instance asked.
#[tokio::test]
async fn names_are_looked_up_again() {
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

/// Checks that are given up leave nothing behind, neither here nor there.
#[tokio::test]
async fn a_check_that_is_given_up_leaves_nothing() {
    let server = start();
    let limiter = client(&server).connect_lazy().unwrap();
    limiter.check([few("x")]).await;
    drop(limiter.check([few("never asked")]));
    for _ in 0..10_000 {
        let check = limiter.check([descriptor! { "many" => "x" }]);
        tokio::select! {
            biased;
            _ = check => {}
            () = std::future::ready(()) => {}
        }
    }
    let verdicts: Vec<Verdict> = vec![limiter.check([few("never asked")]).hits(3).await];
    assert!(verdicts[0].allowed());
    let descriptors = server.open_file_descriptors();
    drop(limiter);
    wait_for_async("the connection to end", async || (server.open_file_descriptors() < descriptors).then_some(()))
        .await;
}
