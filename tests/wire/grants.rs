//! Grants: parts of an instance's lease that clients may use without a call.

use sluicegate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

use crate::{
    redis::leases_and_deny_cache::{LEASED, single_request, spend, start},
    support::{DEADLINE, RedisServer, descriptor, wait_for_async},
};

/// Clients of two instances and of both protocols together admit at most the limit, and most hits need no call. Finally
/// every granted hit is accounted for as reported, returned or unreported.
#[tokio::test]
async fn granted_hits_are_part_of_the_limit() {
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
                let (mut from_server, mut from_grants) = (0, [0_u64; 3]);
                loop {
                    let verdict =
                        client.check([sluicegate_client::descriptor! { key => "x" }]).without_fallback().await.unwrap();
                    match verdict.decided_by() {
                        _ if !verdict.allowed() => return (from_server, from_grants),
                        sluicegate_client::DecidedBy::Grant => from_grants[number] += 1,
                        _ => from_server += 1_u64,
                    }
                    tokio::task::yield_now().await;
                }
            });
        }
        let counts = callers.join_all().await;
        let from_server = counts.iter().map(|(from_server, _)| from_server).sum::<u64>();
        let from_grants =
            [0, 1, 2].map(|client| counts.iter().map(|(_, from_grants)| from_grants[client]).sum::<u64>());
        assert!(from_grants.iter().all(|hits| *hits > 0), "{key}: a client used no grant: {from_grants:?}");
        let from_grants = from_grants.iter().sum::<u64>();
        let allowed = from_server + from_grants;
        assert!((15_000..=20_000).contains(&allowed), "{key}: {from_server} + {from_grants} hits allowed");
        assert!(from_grants > from_server, "{key}: {from_server} hits from the server, {from_grants} from grants");
        for client in &clients {
            client.return_grants().await;
        }
        let sum_of = |series: &str| servers.iter().map(|server| server.metric(series)).sum::<f64>();
        let granted = || sum_of("sluicegate_grant_hits_total");
        let settled = || {
            ["reported", "returned", "unreported"]
                .map(|outcome| sum_of(&format!("sluicegate_grant_{outcome}_hits_total")))
                .iter()
                .sum()
        };
        assert!(granted() >= from_grants as f64);
        wait_for_async("all granted hits to be accounted for", async || {
            let (granted, settled): (f64, f64) = (granted(), settled());
            // Hits that were returned after the end of their lease are in no counter.
            (granted - settled < 0.01 * granted).then_some(())
        })
        .await;
        let within = sum_of(&format!("ratelimit_service_rate_limit_within_limit{{domain=\"d\",key1=\"{key}\"}}"));
        assert!(within <= allowed as f64, "{key}: {within} hits counted, {allowed} allowed");
        assert!(within > 0.9 * allowed as f64, "{key}: {within} hits counted, {allowed} allowed");
    }
}

/// A caller without the metadata `sluicegate-feedback` receives no grant. Invalid metadata is rejected.
#[tokio::test]
async fn only_callers_that_request_grants_receive_them() {
    let redis = RedisServer::start();
    let server = start(&redis, LEASED, &[]);
    let client = server.client().await;
    assert!(spend(&client, "window", 100).await > 0);
    assert!(server.metric("sluicegate_lease_decisions_total") > 0.0);
    assert_eq!(server.metric("sluicegate_grant_hits_total"), 0.0);
    let send = async |feedback: &str| {
        let mut request = tonic::Request::new(single_request("window", 1).into_message());
        request.metadata_mut().insert("sluicegate-feedback", feedback.parse().unwrap());
        let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        service.should_rate_limit(request).await
    };
    let granted = wait_for_async("a grant from a lease", async || {
        spend(&client, "window", 60).await;
        let response = send("8").await.unwrap();
        let quota = response.get_ref().statuses[0].quota.clone()?;
        Some((quota, response.metadata().get("sluicegate-grant-ttl-us").unwrap().to_str().unwrap().to_owned()))
    });
    let (quota, ttl) = granted.await;
    assert!((4..=8).contains(&quota.requests) && quota.expiration_specifier.is_some() && !quota.id.is_empty());
    assert!((1..=1_000_000).contains(&ttl.parse::<u64>().unwrap()), "{ttl}");
    // A report that is sent twice counts once.
    for _ in 0..2 {
        send(&format!("0;{};3", quota.id)).await.unwrap();
    }
    assert_eq!(server.metric("sluicegate_grant_reported_hits_total"), 3.0);
    assert_eq!(send("many").await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

/// Two descriptors with the same counter are charged with one take, so only one of them receives the grant.
#[tokio::test]
async fn only_one_of_two_descriptors_with_the_same_counter_receives_a_grant() {
    let redis = RedisServer::start();
    let server = start(&redis, &LEASED.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    let has_grant = async || {
        spend(&client, "window", 60).await;
        let both = single_request("window", 1).descriptor(descriptor(&[("window", "x")]).hits(1));
        let mut request = tonic::Request::new(both.into_message());
        request.metadata_mut().insert("sluicegate-feedback", "8,8".parse().unwrap());
        let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        let response = service.should_rate_limit(request).await.unwrap().into_inner();
        let has_grant: Vec<_> = response.statuses.iter().map(|status| status.quota.is_some()).collect();
        has_grant.contains(&true).then_some(has_grant)
    };
    assert_eq!(wait_for_async("a grant", has_grant).await, [true, false]);
}
