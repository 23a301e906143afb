//! Hits that callers admit by themselves, of what an instance has taken in advance.

use sluicegate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

use crate::{
    redis::leases_and_deny_cache::{LEASED, single_request, spend, start},
    support::{DEADLINE, RedisServer, descriptor, wait_for_async},
};

/// Clients that admit hits by themselves, of two instances and by both protocols: together no more than the limit, and
/// most of it without a call. What has become of each hit that they were given is known in the end.
#[tokio::test]
async fn what_clients_hold_is_part_of_the_limit() {
    let redis = RedisServer::start();
    let servers = [start(&redis, LEASED, &[]), start(&redis, LEASED, &[])];
    for key in ["window", "bucket"] {
        let clients: Vec<_> = [(0, true), (0, false), (1, true)]
            .into_iter()
            .map(|(server, batching)| {
                let builder =
                    sluicegate_client::Client::builder(format!("http://{}", servers[server].grpc)).domain("d");
                let builder = builder.timeout(DEADLINE).batching(batching).request_grants(true);
                builder.connect_lazy().unwrap()
            })
            .collect();
        let mut callers = tokio::task::JoinSet::new();
        for (number, client) in clients.iter().cloned().enumerate().cycle().take(24) {
            callers.spawn(async move {
                let (mut asked, mut held) = (0, [0_u64; 3]);
                loop {
                    let verdict =
                        client.check([sluicegate_client::descriptor! { key => "x" }]).without_fallback().await.unwrap();
                    match verdict.decided_by() {
                        _ if !verdict.allowed() => return (asked, held),
                        sluicegate_client::DecidedBy::Grant => held[number] += 1,
                        _ => asked += 1_u64,
                    }
                    tokio::task::yield_now().await;
                }
            });
        }
        let passed = callers.join_all().await;
        let asked = passed.iter().map(|(asked, _)| asked).sum::<u64>();
        let held = [0, 1, 2].map(|client| passed.iter().map(|(_, held)| held[client]).sum::<u64>());
        assert!(held.iter().all(|hits| *hits > 0), "{key}: {held:?}, by both protocols");
        let held = held.iter().sum::<u64>();
        assert!((15_000..=20_000).contains(&(asked + held)), "{key}: {asked} + {held}");
        assert!(held > asked, "{key}: {asked} were asked, and {held} were not");
        for client in &clients {
            client.return_grants().await;
        }
        let sum = |series: &str| servers.iter().map(|server| server.metric(series)).sum::<f64>();
        let granted = || sum("sluicegate_grant_hits_total");
        let settled = || {
            ["reported", "returned", "unreported"]
                .map(|what| sum(&format!("sluicegate_grant_{what}_hits")))
                .iter()
                .sum()
        };
        assert!(granted() >= held as f64);
        wait_for_async("all to be known", async || {
            let (granted, settled): (f64, f64) = (granted(), settled());
            // What came back after its lease had ended is nobody's.
            (granted - settled < 0.01 * granted).then_some(())
        })
        .await;
        let within = sum(&format!("ratelimit_service_rate_limit_within_limit{{domain=\"d\",key1=\"{key}\"}}"));
        assert!(within <= (asked + held) as f64, "{key}: {within} of {asked} + {held}");
        assert!(within > 0.9 * (asked + held) as f64, "{key}: {within} of {asked} + {held}");
    }
}

/// Whoever does not say that he can hold grants never sees one; nonsense is told so.
#[tokio::test]
async fn grants_are_for_those_who_want_them() {
    let redis = RedisServer::start();
    let server = start(&redis, LEASED, &[]);
    let client = server.client().await;
    assert!(spend(&client, "window", 100).await > 0);
    assert!(server.metric("sluicegate_lease_decisions_total") > 0.0);
    assert_eq!(server.metric("sluicegate_grant_hits_total"), 0.0);
    let ask = async |hold: &str| {
        let mut request = tonic::Request::new(single_request("window", 1).into_message());
        request.metadata_mut().insert("sluicegate-feedback", hold.parse().unwrap());
        let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        service.should_rate_limit(request).await
    };
    let granted = wait_for_async("a lease", async || {
        spend(&client, "window", 60).await;
        let answer = ask("8").await.unwrap();
        let quota = answer.get_ref().statuses[0].quota.clone()?;
        Some((quota, answer.metadata().get("sluicegate-grant-ttl-us").unwrap().to_str().unwrap().to_owned()))
    });
    let (quota, life) = granted.await;
    assert!((4..=8).contains(&quota.requests) && quota.expiration_specifier.is_some() && !quota.id.is_empty());
    assert!((1..=1_000_000).contains(&life.parse::<u64>().unwrap()), "{life}");
    // Said twice, it counts once.
    for _ in 0..2 {
        ask(&format!("0;{};3", quota.id)).await.unwrap();
    }
    assert_eq!(server.metric("sluicegate_grant_reported_hits_total"), 3.0);
    assert_eq!(ask("many").await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

/// Two descriptors that are one counter are charged once for both: what is granted is granted to one of them.
#[tokio::test]
async fn what_is_granted_is_granted_once() {
    let redis = RedisServer::start();
    let server = start(&redis, &LEASED.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    let quotas = async || {
        spend(&client, "window", 60).await;
        let both = single_request("window", 1).descriptor(descriptor(&[("window", "x")]).hits(1));
        let mut request = tonic::Request::new(both.into_message());
        request.metadata_mut().insert("sluicegate-feedback", "8,8".parse().unwrap());
        let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        let answer = service.should_rate_limit(request).await.unwrap().into_inner();
        let quotas: Vec<_> = answer.statuses.iter().map(|status| status.quota.is_some()).collect();
        quotas.contains(&true).then_some(quotas)
    };
    assert_eq!(wait_for_async("a grant", quotas).await, [true, false]);
}
