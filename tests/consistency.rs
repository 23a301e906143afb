//! What an instance decides without asking the store that it shares with others.

use sluicegate_proto::envoy::service::ratelimit::v3::rate_limit_service_client::RateLimitServiceClient;

use super::support::{
    DEADLINE, RedisServer, Server, descriptor,
    plain::{Answer, Client, Request},
    rules, until, until_async,
};

const RULES: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 5}
- key: log
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: sliding_log}
- key: gcra
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: gcra}
- key: dark
  shadow_mode: true
  rate_limit: {unit: year, requests_per_unit: 5}
";

const STUBBORN: &str = "
- key: stubborn
  rate_limit: {unit: year, requests_per_unit: 5, algorithm: gcra, count_denied: true}
";

fn start(redis: &RedisServer, text: &str, settings: &[(&str, &str)]) -> Server {
    let folder = rules(&[("d.yaml", text)]);
    let builder = Server::builder().rules(folder.path()).store(&redis.url()).set("redis.timeout", "20s");
    settings.iter().fold(builder, |builder, (name, value)| builder.set(name, value)).start()
}

fn one(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits))
}

fn back(key: &str, hits: u64) -> Request {
    Request::new("d").descriptor(descriptor(&[(key, "x")]).hits(hits).give_back())
}

async fn check(client: &Client, request: Request) -> Answer {
    client.check(request).await.unwrap()
}

/// Calls that this has cost.
async fn calls(redis: &RedisServer, what: impl AsyncFnOnce()) -> u64 {
    redis.cli(&["config", "resetstat"]);
    what().await;
    let stats = redis.cli(&["info", "commandstats"]);
    let calls = stats.split_once("cmdstat_evalsha:calls=").map(|(_, rest)| rest.split(',').next().unwrap_or_default());
    calls.map_or(0, |calls| calls.parse().unwrap())
}

#[tokio::test]
async fn what_is_refused_costs_redis_nothing_until_it_may_have_changed() {
    let redis = RedisServer::start();
    let long = [("deny_cache.max_age", "1h"), ("response.dynamic_metadata", "true")];
    let (server, other) = (start(&redis, RULES, &long), start(&redis, RULES, &[]));
    let (client, elsewhere) = (server.client().await, other.client().await);
    for key in ["window", "log", "gcra"] {
        // A larger cost than passes, and then one that does.
        assert!(check(&client, one(key, 4)).await.allowed());
        if key != "window" {
            assert!(!check(&client, one(key, 3)).await.allowed(), "{key}");
        }
        assert!(check(&client, one(key, 1)).await.allowed(), "{key}: what would pass is asked");
        let refused = check(&client, one(key, 1)).await;
        let asked = calls(&redis, async || {
            for cost in [1, 2, 9].into_iter().cycle().take(300) {
                let known = check(&client, one(key, cost)).await;
                assert_eq!((known.allowed(), known.remaining()), (false, refused.remaining()), "{key}: {cost}");
                let (first, now) = (&refused.exact()[0], &known.exact()[0]);
                assert!(
                    now.reset <= first.reset && (cost > 1 || now.retry_after <= first.retry_after),
                    "{key}: {now:?}"
                );
                assert_eq!(now.retry_after.is_some(), cost <= 5, "{key}: {cost}");
            }
        })
        .await;
        assert_eq!(asked, 0, "{key}");
        let metric =
            |name: &str| server.metric(&format!("ratelimit_service_rate_limit_{name}{{domain=\"d\",key1=\"{key}\"}}"));
        assert_eq!(metric("over_limit_with_local_cache"), 1_200.0, "{key}");
        let before = if key == "window" { 1.0 } else { 4.0 };
        assert_eq!((metric("over_limit"), metric("within_limit")), (1_200.0 + before, 5.0), "{key}");
        // Where another instance gives back it is not noticed, here it is.
        check(&elsewhere, back(key, 2)).await;
        assert!(!check(&client, one(key, 1)).await.allowed(), "{key}");
        check(&client, back(key, 1)).await;
        assert!(check(&client, one(key, 1)).await.allowed(), "{key}");
    }
    assert_eq!(server.metric("sluicegate_deny_cache_refusals"), 903.0);
}

#[tokio::test]
async fn a_refusal_is_asked_for_again_when_it_is_old() {
    let redis = RedisServer::start();
    let server = start(&redis, RULES, &[("deny_cache.max_age", "50ms")]);
    let other = start(&redis, RULES, &[]);
    let (client, elsewhere) = (server.client().await, other.client().await);
    check(&client, one("gcra", 5)).await;
    assert!(!check(&client, one("gcra", 1)).await.allowed());
    check(&elsewhere, back("gcra", 5)).await;
    until_async("the refund to be noticed", async || check(&client, one("gcra", 1)).await.allowed().then_some(()))
        .await;
}

/// Where a refused hit makes the wait longer, each has to be counted; and where nothing is to be remembered, nothing is.
#[tokio::test]
async fn refusals_that_count_are_asked_every_time() {
    let redis = RedisServer::start();
    let remembering = start(&redis, &[RULES, STUBBORN].concat(), &[]);
    let forgetful = start(&redis, RULES, &[("deny_cache.max_entities", "0")]);
    for (server, key) in [(&remembering, "stubborn"), (&forgetful, "gcra")] {
        let client = server.client().await;
        check(&client, one(key, 5)).await;
        let asked = calls(&redis, async || {
            for _ in 0..20 {
                assert!(!check(&client, one(key, 1)).await.allowed());
            }
        });
        assert_eq!(asked.await, 20, "{key}");
        assert_eq!(server.metric("sluicegate_deny_cache_refusals"), 0.0, "{key}");
    }
}

#[tokio::test]
async fn of_several_limits_only_those_are_asked_that_may_pass() {
    let redis = RedisServer::start();
    for charge in ["each", "all"] {
        let text = RULES.replace("domain: d", &format!("domain: d\ncharge: {charge}"));
        let server = start(&redis, &text, &[("deny_cache.max_age", "1h")]);
        let client = server.client().await;
        check(&client, one("gcra", 5)).await;
        assert!(!check(&client, one("gcra", 1)).await.allowed());
        let both = |keys: [&str; 2]| {
            keys.iter().fold(Request::new("d"), |request, key| request.descriptor(descriptor(&[(*key, "x")])))
        };
        let asked = calls(&redis, async || {
            for hit in 1..=3 {
                let answer = check(&client, both(["log", "gcra"])).await;
                // Charged for all, the other only looks.
                let left = if charge == "all" { 5 } else { 5 - hit };
                assert_eq!((answer.allowed(), answer.0.statuses[0].limit_remaining), (false, left), "{charge}");
            }
        });
        assert_eq!(asked.await, 3, "{charge}");
        // A refusal that holds nobody back keeps nobody from paying.
        check(&client, one("dark", 5)).await;
        check(&client, one("dark", 1)).await;
        let answer = check(&client, both(["dark", "log"])).await;
        let left = if charge == "all" { 4 } else { 1 };
        assert_eq!((answer.allowed(), answer.0.statuses[1].limit_remaining), (true, left), "{charge}");
        redis.cli(&["flushall"]);
    }
}

const LEASED: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 20000, consistency: leased}
- key: sliding
  rate_limit: {unit: year, requests_per_unit: 20000, algorithm: sliding_window, buckets: 12, consistency: leased}
- key: bucket
  rate_limit: {unit: year, requests_per_unit: 20000, algorithm: token_bucket, consistency: leased}
- key: other
  rate_limit: {unit: year, requests_per_unit: 1000000}
";

/// How many of so many requests pass, asked by several callers at once until one of them is refused.
async fn spend(client: &Client, key: &'static str, each: u64) -> u64 {
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let client = client.clone();
        callers.spawn(async move {
            let mut passed = 0;
            while passed < each && check(&client, one(key, 1)).await.allowed() {
                passed += 1;
            }
            passed
        });
    }
    callers.join_all().await.into_iter().sum()
}

/// Three instances that take quota in advance let exactly the limit through, at a call for many decisions.
#[tokio::test]
async fn leases_add_up_to_the_limit_and_no_more() {
    let redis = RedisServer::start();
    let servers: Vec<_> = (0..3).map(|_| start(&redis, LEASED, &[])).collect();
    for key in ["window", "sliding", "bucket"] {
        // What comes back to a bucket after its lease has ended has drained for a moment, and is a little less than a hit.
        let all = if key == "bucket" { 19_980..=20_000 } else { 20_000..=20_000 };
        redis.cli(&["config", "resetstat"]);
        let mut passed = 0;
        // One has most of the traffic.
        for (server, each) in servers.iter().zip([700, 100, 50]) {
            passed += spend(&server.client().await, key, each).await;
        }
        assert_eq!(passed, 16 * 850, "{key}: below the limit nobody is refused");
        let stats = redis.cli(&["info", "commandstats"]);
        let calls = stats.split_once("cmdstat_evalsha:calls=").unwrap().1.split(',').next().unwrap();
        let calls: u64 = calls.parse().unwrap();
        assert!(calls < passed / 10, "{key}: {calls} calls for {passed} decisions");
        assert!(servers[0].metric("sluicegate_lease_decisions") > 8_000.0, "{}", servers[0].get("/metrics"));
        // What others hold comes back, and the rest can be had to the last hit.
        until_async("the whole limit to be spent", async || {
            for server in &servers {
                passed += spend(&server.client().await, key, u64::MAX).await;
            }
            assert!(passed <= 20_000, "{key}: {passed}");
            all.contains(&passed).then_some(())
        })
        .await;
        let within: f64 = servers
            .iter()
            .map(|server| {
                server.metric(&format!("ratelimit_service_rate_limit_within_limit{{domain=\"d\",key1=\"{key}\"}}"))
            })
            .sum();
        assert_eq!(within, passed as f64, "{key}: each hit is counted once");
    }
}

/// What a counter in Redis stands at: of a fixed window, its last ten digits.
fn counted(redis: &RedisServer) -> u64 {
    let key = redis.cli(&["keys", "*window*"]);
    redis.cli(&["get", &key]).parse::<u64>().unwrap() % 10_000_000_000
}

#[tokio::test]
async fn what_was_not_spent_is_given_back() {
    let redis = RedisServer::start();
    for orderly in [true, false] {
        let server = start(&redis, LEASED, &[]);
        let passed = spend(&server.client().await, "window", 60).await;
        assert!(server.metric("sluicegate_lease_decisions") > 0.0 && counted(&redis) > passed);
        if orderly {
            server.signal("TERM");
            server.wait().await;
            assert_eq!(counted(&redis), passed, "at the end of the process");
        } else {
            let mut spent = passed;
            until_async("it to come back by itself", async || (counted(&redis) == passed).then_some(())).await;
            spent += spend(&server.client().await, "window", 1).await;
            until_async("no more than that", async || (counted(&redis) == spent).then_some(())).await;
            assert!(server.metric("sluicegate_lease_returned_hits") > 0.0);
        }
        redis.cli(&["flushall"]);
    }
}

/// Three instances, of which one is killed and one stands still for a while: what they held is lost until the window
/// ends, and nobody gets more for it.
#[tokio::test]
async fn instances_that_die_take_their_leases_with_them() {
    let redis = RedisServer::start();
    let servers: Vec<_> = (0..3).map(|_| start(&redis, LEASED, &[])).collect();
    let mut callers = tokio::task::JoinSet::new();
    for server in &servers {
        for _ in 0..8 {
            let client = server.client().await;
            callers.spawn(async move {
                let mut passed = 0;
                while let Ok(answer) = client.check(one("window", 1)).await
                    && answer.allowed()
                {
                    passed += 1;
                }
                passed
            });
        }
    }
    until_async("leases", async || (servers[0].metric("sluicegate_lease_decisions") > 100.0).then_some(())).await;
    servers[0].signal("KILL");
    servers[1].signal("STOP");
    let held = counted(&redis);
    until_async("the third to go on", async || (counted(&redis) > held + 1_000).then_some(())).await;
    servers[1].signal("CONT");
    let passed: u64 = callers.join_all().await.into_iter().sum();
    let client = servers[2].client().await;
    let rest = spend(&client, "window", u64::MAX).await;
    assert!(passed + rest <= 20_000, "{passed} + {rest}");
    assert!(passed + rest > 15_000, "{passed} + {rest}");
}

/// Redis is gone: leases are spent, and then `on_error` decides.
#[tokio::test]
async fn a_lease_outlives_its_redis() {
    let mut redis = RedisServer::start();
    let server = start(&redis, LEASED, &[("redis.timeout", "100ms")]);
    let client = server.client().await;
    let refill = async || {
        spend(&client, "window", 60).await;
        let before = server.metric("sluicegate_lease_decisions");
        check(&client, one("window", 1)).await;
        (server.metric("sluicegate_lease_decisions") > before).then_some(())
    };
    until_async("a lease", refill).await;
    redis.kill();
    let mut passed = 0;
    while client.check(one("window", 1)).await.is_ok_and(|answer| answer.allowed()) {
        passed += 1;
        assert!(passed <= 20_000 / 4, "a quarter of what remains at most");
    }
    assert!(passed > 0);
    assert!(client.check(one("window", 1)).await.is_err());
}

const EVENTUAL: &str = "
domain: d
descriptors:
- key: window
  rate_limit: {unit: year, requests_per_unit: 5000, consistency: eventual}
- key: bucket
  rate_limit: {unit: hour, requests_per_unit: 5000, algorithm: gcra, consistency: eventual, on_error: deny}
- key: exact
  rate_limit: {unit: year, requests_per_unit: 3}
";

/// Two instances count by themselves: each knows a little later what the other has let through, and not much more than
/// the limit passes, at a call to Redis now and then.
#[tokio::test]
async fn what_is_counted_here_is_told_a_little_later() {
    let redis = RedisServer::start();
    let servers = [start(&redis, EVENTUAL, &[]), start(&redis, EVENTUAL, &[])];
    for key in ["window", "bucket"] {
        let clients = [servers[0].client().await, servers[1].client().await];
        assert!(check(&clients[0], one(key, 1)).await.allowed());
        assert!(check(&clients[1], one(key, 1)).await.allowed());
        redis.cli(&["config", "resetstat"]);
        assert_eq!(spend(&clients[0], key, 100).await, 1_600);
        let left = async || check(&clients[1], one(key, 0)).await.remaining().unwrap();
        until_async("the other to hear of it", async || ((3_398..3_410).contains(&left().await)).then_some(())).await;
        let stats = redis.cli(&["info", "commandstats"]);
        let calls = stats.split_once("cmdstat_evalsha:calls=").unwrap().1.split(',').next().unwrap();
        assert!(calls.parse::<u64>().unwrap() < 200, "{key}: {calls} calls for 1,600 decisions");
        // Together they let too much through, and then nothing.
        let (here, there) = tokio::join!(spend(&clients[0], key, u64::MAX), spend(&clients[1], key, u64::MAX));
        let passed = 1_602 + here + there;
        assert!((5_000..=2 * 5_000).contains(&passed), "{key}: {passed}");
        until_async("both to know", async || {
            let refused = async |client| !check(client, one(key, 1)).await.allowed();
            (refused(&clients[0]).await && refused(&clients[1]).await).then_some(())
        })
        .await;
    }
    assert!(servers[0].metric("sluicegate_eventual_decisions") > 3_000.0);
    assert_eq!(servers[0].metric("sluicegate_eventual_lost_hits"), 0.0);
}

/// Redis is gone: decisions go on; when it is back it is told, once. At the end of the process all is told.
#[tokio::test]
async fn what_redis_was_not_told_it_is_told_afterwards() {
    let mut redis = RedisServer::start();
    let server = start(&redis, EVENTUAL, &[("redis.timeout", "100ms")]);
    let client = server.client().await;
    assert!(check(&client, one("window", 1)).await.allowed());
    until_async("it to be told", async || (counted(&redis) == 1).then_some(())).await;
    redis.kill();
    until("somebody to notice", || server.get("/readyz").contains("out of reach").then_some(()));
    assert_eq!(spend(&client, "window", 20).await, 320);
    assert!(!check(&client, one("bucket", 1)).await.allowed(), "of this one nothing is known: on_error");
    redis.restart();
    until_async("it to be told", async || {
        let key = redis.cli(&["keys", "*window*"]);
        (!key.is_empty() && counted(&redis) == 320).then_some(())
    })
    .await;
    assert_eq!(spend(&client, "window", 1).await, 16);
    server.signal("TERM");
    server.wait().await;
    assert_eq!(counted(&redis), 336);
}

/// Charged together with a limit that is decided in Redis: all are charged or none is.
#[tokio::test]
async fn counters_here_and_in_redis_are_charged_together() {
    let redis = RedisServer::start();
    let server = start(&redis, &EVENTUAL.replace("domain: d", "domain: d\ncharge: all"), &[]);
    let client = server.client().await;
    let both = || one("window", 1).descriptor(descriptor(&[("exact", "v")]).hits(1));
    for passed in 1..=5 {
        assert_eq!(check(&client, both()).await.allowed(), passed <= 3, "{passed}");
    }
    let left = |key| check(&client, one(key, 0));
    assert_eq!(left("window").await.remaining(), Some(4_997), "two were refused, and charged for nothing");
    assert!(check(&client, one("window", 4_997)).await.allowed());
    redis.cli(&["del", &redis.cli(&["keys", "*exact*"])]);
    assert!(!check(&client, both()).await.allowed());
    assert_eq!(left("exact").await.remaining(), Some(3), "what is full here takes nothing there");
}

/// Clients that admit hits by themselves, of two instances and by both protocols: together no more than the limit, and
/// most of it without a call. What has become of each hit that they were given is known in the end.
#[tokio::test]
async fn what_clients_hold_is_part_of_the_limit() {
    let redis = RedisServer::start();
    let servers = [start(&redis, LEASED, &[]), start(&redis, LEASED, &[])];
    for key in ["window", "bucket"] {
        let clients: Vec<_> = [(0, true), (0, false), (1, true)]
            .into_iter()
            .map(|(server, coalesces)| {
                let builder =
                    sluicegate_client::Client::builder(format!("http://{}", servers[server].grpc)).domain("d");
                let builder = builder.deadline(DEADLINE).coalesce(coalesces).hold_grants(true);
                builder.connect_lazy().unwrap()
            })
            .collect();
        let mut callers = tokio::task::JoinSet::new();
        for client in clients.iter().cycle().take(24) {
            let client = client.clone();
            callers.spawn(async move {
                let mut passed = [0_u64; 2];
                loop {
                    let verdict = client.check([sluicegate_client::descriptor! { key => "x" }]).strict().await.unwrap();
                    if !verdict.allowed() {
                        return passed;
                    }
                    passed[usize::from(verdict.by() == sluicegate_client::By::Grant)] += 1;
                    tokio::task::yield_now().await;
                }
            });
        }
        let [asked, held] =
            callers.join_all().await.into_iter().fold([0, 0], |sum, passed| [sum[0] + passed[0], sum[1] + passed[1]]);
        assert!((15_000..=20_000).contains(&(asked + held)), "{key}: {asked} + {held}");
        assert!(held > asked, "{key}: {asked} were asked, and {held} were not");
        for client in &clients {
            client.give_back_grants().await;
        }
        let sum = |series: &str| servers.iter().map(|server| server.metric(series)).sum::<f64>();
        let granted = || sum("sluicegate_grant_hits");
        let settled = || {
            ["reported", "returned", "unreported"]
                .map(|what| sum(&format!("sluicegate_grant_{what}_hits")))
                .iter()
                .sum()
        };
        assert!(granted() > held as f64);
        until_async("all to be known", async || {
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
    assert!(server.metric("sluicegate_lease_decisions") > 0.0);
    assert_eq!(server.metric("sluicegate_grant_hits"), 0.0);
    let ask = async |hold: &str| {
        let mut request = tonic::Request::new(one("window", 1).into_message());
        request.metadata_mut().insert("sluicegate-hold", hold.parse().unwrap());
        let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        service.should_rate_limit(request).await
    };
    let granted = until_async("a lease", async || {
        spend(&client, "window", 60).await;
        let answer = ask("8").await.unwrap();
        let quota = answer.get_ref().statuses[0].quota.clone()?;
        Some((quota, answer.metadata().get("sluicegate-grant-life-us").unwrap().to_str().unwrap().to_owned()))
    });
    let (quota, life) = granted.await;
    assert!((4..=8).contains(&quota.requests) && quota.expiration_specifier.is_some() && !quota.id.is_empty());
    assert!((1..=1_000_000).contains(&life.parse::<u64>().unwrap()), "{life}");
    // Said twice, it counts once.
    for _ in 0..2 {
        ask(&format!("0;{};3", quota.id)).await.unwrap();
    }
    assert_eq!(server.metric("sluicegate_grant_reported_hits"), 3.0);
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
        let both = one("window", 1).descriptor(descriptor(&[("window", "x")]).hits(1));
        let mut request = tonic::Request::new(both.into_message());
        request.metadata_mut().insert("sluicegate-hold", "8,8".parse().unwrap());
        let mut service = RateLimitServiceClient::connect(format!("http://{}", server.grpc)).await.unwrap();
        let answer = service.should_rate_limit(request).await.unwrap().into_inner();
        let quotas: Vec<_> = answer.statuses.iter().map(|status| status.quota.is_some()).collect();
        quotas.contains(&true).then_some(quotas)
    };
    assert_eq!(until_async("a grant", quotas).await, [true, false]);
}
