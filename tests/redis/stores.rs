//! The state in Redis and its lifetime, and limits that many callers in one or two processes share exactly.
//! `histories.rs` checks that memory and Redis return the same decisions.

use std::{sync::Arc, time::Duration};

use sluicegate::{
    algorithm::{
        Action, Algorithm, Classes, LimitSpec, Limiter as _, MaxHits, Micros, Operation, Program, State,
        debt_bucket::DebtBucket,
        first_request::FirstRequestWindow,
        fixed_window::FixedWindow,
        gcra::Gcra,
        large_bucket::LargeBucket,
        leaky_bucket::LeakyBucket,
        reports::UtilizationReports,
        scheduled_window::{Schedule, ScheduledWindow},
        sliding_log::SlidingLog,
        sliding_window::{SlidingWindow, WindowEdge},
        token_bucket::TokenBucket,
        warm_up::WarmUp,
    },
    metrics::WorkerId,
    store::{AnyStore, Charge, Counter, Hit, Local, Memory, Redis, Store, TimeSource, local, memory, redis},
};
use sluicegate_calendar::{Anchor, Calendar, Period};

use crate::support::{DEADLINE, RedisServer, Server, request_for, rules, unwrap_decisions};

/// Connects without a deny cache, so that every hit is sent to Redis. Keys outlive their content by up to `expiry_jitter`.
pub(crate) async fn connect(url: &str, expiry_jitter: Duration) -> Local<Redis> {
    connect_with(url, settings(expiry_jitter), TimeSource::Caller, 0).await
}

/// Connects with a deny cache that uses denials as long as they are valid.
pub(crate) async fn connect_with_deny_cache(url: &str, expiry_jitter: Duration) -> Local<Redis> {
    connect_with(url, settings(expiry_jitter), TimeSource::Caller, 10_000).await
}

fn settings(expiry_jitter: Duration) -> redis::Settings {
    redis::Settings { timeout: DEADLINE, expiry_jitter, bound_expiry_jitter: false, ..redis::Settings::default() }
}

async fn connect_with(url: &str, settings: redis::Settings, time: TimeSource, max_denials: usize) -> Local<Redis> {
    let setup = redis::Setup::new(url, &settings, time, redis::Metrics::new(1)).unwrap();
    tokio::spawn(setup.follow());
    let redis = setup.connect(WorkerId(0));
    assert!(redis.wait_until_up(DEADLINE).await);
    let deny_cache = local::DenyCacheSettings { max_entries: max_denials, max_age: Duration::MAX };
    let (leases, eventual) = (local::LeaseSettings::default(), local::EventualSettings::default());
    Local::new(
        redis,
        local::LocalState::new(&deny_cache, &leases, &eventual, TimeSource::Caller, local::Metrics::new(1)),
        WorkerId(0),
    )
}

fn window(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(seconds), true).unwrap().into()
}

#[tokio::test]
async fn redis_keys_expire_by_themselves_and_can_be_read() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_millis(1)).await;
    let rule = window(10, 60);
    // 30 s into a window.
    let now = Micros::from_secs(1_763_672_430);
    let counter = Counter::new(b"{api|user=alice}fw:60", rule);
    for _ in 0..3 {
        unwrap_decisions(redis.apply(&[counter.take(2)], Charge::Each, now).await);
    }
    let key = "sluicegate:{api|user=alice}fw:60";
    assert_eq!(server.cli(&["keys", "*"]), key);
    // The window's number modulo 900,000, plus one; then ten digits of the count.
    let window = 1_763_672_400 / 60 % 900_000 + 1;
    assert_eq!(server.cli(&["get", key]), format!("{window}0000000006"));
    let ttl = |server: &RedisServer, key: &str| server.cli(&["pttl", key]).parse::<u64>().unwrap();
    assert!((10_000..=30_001).contains(&ttl(&server, key)), "{}", ttl(&server, key));
    let counter = Counter::new(b"{api|user=bob}fw:60", rule);
    unwrap_decisions(redis.apply(&[counter.take(0).peek()], Charge::Each, now).await);
    assert_eq!(server.cli(&["dbsize"]), "1", "a peek stores nothing");

    // With jitter, the keys of one window expire at different times.
    let redis = connect(&server.url(), Duration::from_secs(300)).await;
    let mut ttls = Vec::new();
    for user in 0..20 {
        let name = format!("{{api|user={user}}}fw:60");
        let counter = Counter::new(&*name, rule);
        unwrap_decisions(redis.apply(&[counter.take(1)], Charge::Each, now).await);
        ttls.push(ttl(&server, &format!("sluicegate:{name}")));
    }
    assert!(ttls.iter().all(|ttl| (10_000..=330_001).contains(ttl)), "{ttls:?}");
    assert!(ttls.iter().max().unwrap() - ttls.iter().min().unwrap() > 100_000, "{ttls:?}");
}

/// Time by which the key of a bucket outlives its state at most, because its expiry is rarely set: a sixteenth of the
/// drain time.
fn expiry_step(algorithm: &Algorithm, drain_time: Micros) -> u64 {
    let is_bucket = ["tb", "debt", "tbl", "lb", "gcra"].contains(&algorithm.tag());
    if is_bucket { drain_time.get() / 16_000 } else { 0 }
}

/// A key expires when its state has the same meaning as no state, if the jitter is minimal: to the millisecond, except
/// for buckets.
#[tokio::test]
async fn a_key_expires_when_its_state_no_longer_matters() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_millis(1)).await;
    let (window, max_hits) = (Micros::from_secs(86_400), MaxHits::hard(10));
    let month = Calendar::new(Period::Months(1), Anchor::default()).unwrap();
    let algorithms: [Algorithm; 13] = [
        FixedWindow::new(max_hits, window, true).unwrap().into(),
        FirstRequestWindow::new(max_hits, window, false).unwrap().into(),
        ScheduledWindow::new(max_hits, Schedule::Calendar(month), false).into(),
        ScheduledWindow::new(max_hits, Schedule::Phase { window, phase: Micros::from_secs(7) }, false).into(),
        FixedWindow::new(max_hits, window, false).unwrap().into(),
        SlidingWindow::new(max_hits, window, 1, WindowEdge::Weighted, false).unwrap().into(),
        SlidingWindow::new(max_hits, window, 6, WindowEdge::Strict, false).unwrap().into(),
        SlidingLog::new(max_hits, window, Micros::ZERO, false).unwrap().into(),
        TokenBucket::new(10, window, max_hits, false).unwrap().into(),
        DebtBucket::new(10, window, 5, 5).unwrap().into(),
        LargeBucket::new(10, window, max_hits, false).unwrap().into(),
        LeakyBucket::new(10, window, max_hits, 10, false).unwrap().into(),
        WarmUp::new(10, window, 1, Micros::from_secs(3_600), false).unwrap().into(),
    ];
    for (number, algorithm) in algorithms.iter().enumerate() {
        let key = format!("{{life}}{number}");
        // The second take uses an existing counter.
        let mut state = State::default();
        for elapsed in [0, 3_600] {
            let now = Micros::from_secs(1_763_672_430 + elapsed);
            let counter = Counter::new(&*key, *algorithm);
            unwrap_decisions(redis.apply(&[counter.take(1)], Charge::Each, now).await);
            let written = algorithm.step(&mut state, Operation { action: Action::Take, cost: 1, now });
            if elapsed > 0 && (!written || algorithm.name().ends_with("window")) {
                continue; // the lifetime of a window is fixed when it or its current counter begins
            }
            let ttl = server.cli(&["pttl", &format!("sluicegate:{key}")]).parse::<u64>().unwrap();
            let expected = (algorithm.expires(&state, now) - now).get().div_ceil(1_000);
            let passed = 10_000; // real time, at most
            let latest = expected + expiry_step(algorithm, window) + 1;
            assert!((expected - passed..=latest).contains(&ttl), "{algorithm:?}: {ttl} of {expected}");
        }
    }
}

/// Most hits do not change the expiry of a key. A hit that gives the state a longer lifetime does.
#[tokio::test]
async fn a_key_never_expires_before_its_state() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_millis(1)).await;
    let (window, max_hits) = (Micros::from_secs(86_400), MaxHits::hard(40));
    let sliding = |buckets| SlidingWindow::new(max_hits, window, buckets, WindowEdge::Weighted, false).unwrap().into();
    let algorithms: [Algorithm; 7] = [
        sliding(1),
        sliding(6),
        SlidingLog::new(max_hits, window, Micros::ZERO, false).unwrap().into(),
        TokenBucket::new(40, window, max_hits, false).unwrap().into(),
        LeakyBucket::new(40, window, max_hits, 40, false).unwrap().into(),
        Gcra::new(40, window, max_hits, false).unwrap().into(),
        WarmUp::new(40, window, 40, Micros::from_secs(3_600), false).unwrap().into(),
    ];
    // The last but one hour of a counter of 24 hours and of one of 4 hours, and the beginning of the next.
    let next = 1_763_672_400 / 86_400 * 86_400 + 86_400;
    for (number, algorithm) in algorithms.iter().enumerate() {
        let key = format!("{{life}}{number}");
        let mut state = State::default();
        for hit in 0..32 {
            let now = Micros::from_secs(if hit < 16 { next - 7_200 } else { next });
            unwrap_decisions(redis.apply(&[Counter::new(&*key, *algorithm).take(1)], Charge::Each, now).await);
            if !algorithm.step(&mut state, Operation { action: Action::Take, cost: 1, now }) {
                continue;
            }
            let ttl = server.cli(&["pttl", &format!("sluicegate:{key}")]).parse::<u64>().unwrap();
            let expected = (algorithm.expires(&state, now) - now).get().div_ceil(1_000);
            let passed = 30_000; // real time, at most
            // The clock of the test jumps ahead of Redis' clock by two hours, so that keys live longer by as much.
            let latest = expected + expiry_step(algorithm, window) + 1 + if hit < 16 { 0 } else { 7_200_000 };
            assert!((expected - passed..=latest).contains(&ttl), "{algorithm:?}, {hit}: {ttl} of {expected}");
        }
    }
}

/// Redis appends hits to a long log in place if no hit has expired.
#[tokio::test]
async fn a_long_log_decides_like_memory_and_stays_short() {
    const LIMIT: u64 = 200;
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_millis(1)).await;
    let memory = Memory::new(&memory::Settings::default());
    let window = Micros::from_secs(86_400);
    for count_denied in [false, true] {
        let algorithm = SlidingLog::new(MaxHits::hard(LIMIT), window, Micros::ZERO, count_denied).unwrap();
        let key = format!("{{long}}{count_denied}");
        let mut seconds = 1_763_672_430;
        for number in 0_u64..1_500 {
            // Bursts that exceed the limit, pauses in which from none to nearly all hits expire, and a clock that steps
            // back by less than the tolerance and by more.
            match number {
                _ if number % 150 == 149 => seconds += number * 37 % 86_000,
                _ if number % 211 == 100 => seconds -= 3_000,
                _ if number % 5 == 3 => seconds -= 55,
                _ => seconds += number * 7 % 300,
            }
            let now = Micros::from_secs(seconds);
            let counter = Counter::new(&*key, algorithm);
            let hit = counter.take(1 + number % 3);
            let hit = match number % 11 {
                4 => hit.peek(),
                7 => Hit { action: Action::Refund, ..hit },
                9 => Hit { action: Action::RollBack(now), ..hit },
                _ => hit,
            };
            let decision = unwrap_decisions(redis.apply(&[hit], Charge::Each, now).await);
            assert_eq!(decision, [memory.decide(&hit, now).decision], "{number}");
            if number % 7 > 0 {
                continue;
            }
            let bytes: u64 = server.cli(&["strlen", &format!("sluicegate:{key}")]).parse().unwrap();
            assert!(bytes <= 7 * LIMIT, "{bytes} bytes");
            if decision[0].allowed && hit.action == Action::Take {
                let ttl: u64 = server.cli(&["pttl", &format!("sluicegate:{key}")]).parse().unwrap();
                assert!((86_390_000..=86_460_001).contains(&ttl), "{ttl} ms");
            }
        }
    }
}

/// Redis decides by the sum that precedes the counters of a sliding window, so it must not be less than they are.
#[tokio::test]
async fn counters_that_exceed_their_sum_are_invalid() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(300)).await;
    let limit = SlidingWindow::new(MaxHits::hard(10), Micros::from_secs(60), 6, WindowEdge::Weighted, false).unwrap();
    let (rule, now) = (Algorithm::from(limit), Micros::from_secs(1_763_672_430));
    let key = "sluicegate:{sum}";
    let counter = Counter::new(b"{sum}", rule);
    let take = async |seconds| {
        let now = now + Micros::from_secs(seconds);
        let mut answers = redis.apply(&[counter.take(1)], Charge::Each, now).await;
        answers.pop().unwrap().map(|made| made.decision.used)
    };
    let begin = async || {
        server.cli(&["del", key]);
        for used in 1..=3 {
            assert_eq!(take(0).await.ok(), Some(used));
        }
        assert_eq!(take(10).await.ok(), Some(4));
    };
    begin().await;
    // The sum of 4 becomes 2: less than the former counter of 3, which is the oldest at 60 s. Such a state is replaced.
    server.cli(&["setrange", key, "12", "\u{2}"]);
    assert_eq!(take(60).await.ok(), Some(1));
    begin().await;
    assert_eq!(take(60).await.ok(), Some(5));
    // A sum that does not fit is computed from the counters.
    for offset in ["12", "13", "14", "15"] {
        server.cli(&["eval", "redis.call('SETRANGE', KEYS[1], ARGV[1], '\\255')", "1", key, offset]);
    }
    assert_eq!(take(60).await.ok(), Some(6));
    assert_eq!(server.cli(&["strlen", key]), "44");
}

/// By default, a key outlives its state at most by the lifetime of the state, and by a random time.
#[tokio::test]
async fn keys_of_short_limits_do_not_fill_redis() {
    let server = RedisServer::start();
    let settings = redis::Settings { timeout: DEADLINE, ..redis::Settings::default() };
    let redis = connect_with(&server.url(), settings, TimeSource::Caller, 0).await;
    let now = Micros::from_secs(1_763_672_400);
    let spec = LimitSpec { requests: 1, window: Micros::from_secs(100), ..LimitSpec::default() };
    let mut tested = Vec::new();
    for kind in Algorithm::named() {
        let Ok(algorithm) = (kind.build)(&spec) else {
            continue; // needs more keywords
        };
        let mut state = State::default();
        algorithm.step(&mut state, Operation { action: Action::Take, cost: 1, now });
        let lifetime = (algorithm.expires(&state, now) - now).get().div_ceil(1_000);
        if lifetime > 250_000 {
            continue; // as long as the jitter
        }
        tested.push(kind.name);
        let mut ttls = Vec::new();
        for user in 0..20 {
            let key = format!("{{{}}}{user}", kind.name);
            unwrap_decisions(redis.apply(&[Counter::new(&*key, algorithm).take(1)], Charge::Each, now).await);
            ttls.push(server.cli(&["pttl", &format!("sluicegate:{key}")]).parse::<u64>().unwrap());
        }
        let passed = 10_000; // real time, at most
        assert!(ttls.iter().all(|ttl| (lifetime - passed..=2 * lifetime).contains(ttl)), "{}: {ttls:?}", kind.name);
        let spread = ttls.iter().max().unwrap() - ttls.iter().min().unwrap();
        assert!(spread > lifetime / 3, "{}: {ttls:?}", kind.name);
    }
    let rates = ["fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra"];
    assert!(rates.iter().all(|name| tested.contains(name)), "{tested:?}");
}

/// If the key of a counter contains a foreign value without expiry, the first hit replaces it by a state that expires.
/// Other hits in the same call are decided normally.
#[tokio::test]
async fn a_foreign_value_is_replaced_by_the_first_hit() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(300)).await;
    let spec = LimitSpec {
        requests: 10,
        window: Micros::from_secs(60),
        warm_up: Some(Micros::from_secs(30)),
        ..LimitSpec::default()
    };
    let now = Micros::from_secs(1_763_672_430);
    let (long, digits) = ("nonsense".repeat(90), "9".repeat(30));
    let foreign: [&[&str]; 13] = [
        &["set", "0"],
        &["set", "-1"],
        &["set", "1.5"],
        &["set", "9223372036854775807"],
        &["set", &digits],
        &["set", "nonsense"],
        &["set", "nonsense of 20 bytes"],
        &["set", &long[..72]],
        &["set", &long],
        &["rpush", "a", "b"],
        &["hset", "a", "b"],
        &["zadd", "1", "a"],
        &["xadd", "*", "a", "b"],
    ];
    let reports = UtilizationReports::new(Micros::from_secs(10)).into();
    let mut programs: Vec<(&str, Program)> = vec![("reports", reports)];
    for kind in Algorithm::KINDS {
        let warm_up = spec.warm_up.filter(|_| kind.keywords.contains(&"warm_up"));
        let classes = Classes::new(&[(1, 10), (2, 5)], 10).ok().filter(|_| kind.keywords.contains(&"shares"));
        for count_denied in [None, Some(false)] {
            let debt = (kind.name == DebtBucket::NAME).then_some(5);
            let phase = (kind.name == ScheduledWindow::NAME).then_some(Micros::ZERO);
            let limit = (kind.build)(&LimitSpec { warm_up, classes, count_denied, phase, debt, ..spec }).unwrap();
            programs.push((kind.name, limit.into()));
            programs.extend(limit.leasing().map(|leasing| (kind.name, leasing)));
        }
    }
    for (title, program) in programs {
        for (write, charge) in foreign.iter().flat_map(|write| [(write, Charge::Each), (write, Charge::All)]) {
            let what = format!("{program:?}, {write:?}, {charge:?}");
            let (key, other) = (format!("{{spoiled}}{title}"), format!("{{spoiled}}{title} 2"));
            let name = format!("sluicegate:{key}");
            server.cli(&["del", &name, &format!("sluicegate:{other}"), "sluicegate:{fine}"]);
            server.cli(&[&[write[0], &name], &write[1..]].concat());
            let [other, key, fine] = [&*other, &*key, "{fine}"].map(|name| Counter::new(name, program));
            let (spoiled, fine) = ([other.take(1), key.take(1)], [fine.take(1)]);
            let (one, fine) = tokio::join!(redis.apply(&spoiled, charge, now), redis.apply(&fine, Charge::Each, now));
            assert!(one.iter().chain(&fine).all(Result::is_ok), "{what}: {one:?} {fine:?}");
            // A value that looks like a used-up counter can deny.
            let lifetime: i64 = server.cli(&["pttl", &name]).parse().unwrap();
            let was_foreign = write[0] != "set";
            assert!(lifetime > 0 || lifetime == -2 && !was_foreign, "{what}: {lifetime} ms, {one:?}");
        }
    }
}

/// A peek and a refund do not fail either, and an operator sees that there was such a value.
#[tokio::test]
async fn every_action_on_a_foreign_value_is_decided_and_reported() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(300)).await;
    let algorithm = window(10, 60);
    let now = Micros::from_secs(1_763_672_430);
    for action in [Action::Peek, Action::Refund, Action::RollBack(now), Action::Take] {
        server.cli(&["del", "sluicegate:{a}"]);
        server.cli(&["rpush", "sluicegate:{a}", "foreign"]);
        let counter = Counter::new(b"{a}", algorithm);
        let hit = Hit { action, ..counter.take(1) };
        let decision = unwrap_decisions(redis.apply(&[hit], Charge::Each, now).await)[0];
        let used = u64::from(action == Action::Take);
        assert_eq!((decision.allowed, decision.used), (true, used), "{action:?}");
        assert_ne!(server.cli(&["pttl", "sluicegate:{a}"]), "-1", "{action:?}");
    }
}

/// Requests that are ready at the same time share a call. A denial of one does not affect the next, and the time is the
/// server's.
#[tokio::test]
async fn requests_that_share_a_call_do_not_affect_each_other() {
    let server = RedisServer::start();
    let redis = connect_with(&server.url(), settings(Duration::from_secs(300)), TimeSource::Own, 0).await;
    let (zero, ten) = (window(0, 3_600), window(10, 3_600));
    let [a, b, c] = [("{a}", ten), ("{b}", zero), ("{c}", ten)].map(|(name, rule)| Counter::new(name, rule));
    let before = server.cli(&["time"]).lines().next().unwrap().parse::<u64>().unwrap();
    server.cli(&["config", "resetstat"]);
    let (none, other) = ([a.take(1), b.take(1)], [c.take(1)]);
    let (denied, passed) =
        tokio::join!(redis.apply(&none, Charge::All, Micros::ZERO), redis.apply(&other, Charge::Each, Micros::ZERO));
    let stats = server.cli(&["info", "commandstats"]);
    assert!(stats.contains("cmdstat_evalsha:calls=1,"), "{stats}");
    let (denied, passed) = (unwrap_decisions(denied), unwrap_decisions(passed));
    assert_eq!((denied[0].allowed, denied[0].remaining, denied[1].allowed), (true, 10, false));
    assert_eq!((passed[0].allowed, passed[0].remaining), (true, 9));
    let after = server.cli(&["time"]).lines().next().unwrap().parse::<u64>().unwrap();
    let ends: Vec<_> = [before, after].map(|second| 3_600 - second % 3_600).to_vec();
    assert!(ends.contains(&passed[0].reset.ceil_secs()), "{:?}, {ends:?}", passed[0].reset);
}

/// 64 callers of one counter send twice as many requests as the limit allows.
#[tokio::test]
async fn concurrent_callers_share_every_limit_exactly() {
    let server = RedisServer::start();
    let (window, max_hits) = (Micros::from_secs(31_536_000), MaxHits::hard(500));
    let algorithms: [Algorithm; 7] = [
        FixedWindow::new(max_hits, window, true).unwrap().into(),
        SlidingWindow::new(max_hits, window, 1, WindowEdge::Weighted, false).unwrap().into(),
        SlidingWindow::new(max_hits, window, 6, WindowEdge::Strict, false).unwrap().into(),
        SlidingLog::new(max_hits, window, Micros::ZERO, false).unwrap().into(),
        TokenBucket::new(500, window, max_hits, false).unwrap().into(),
        LeakyBucket::new(500, window, max_hits, 10, false).unwrap().into(),
        Gcra::new(500, window, max_hits, false).unwrap().into(),
    ];
    let memory = AnyStore::Memory(Arc::new(Memory::new(&memory::Settings::default())));
    let redis = AnyStore::Redis(connect(&server.url(), Duration::from_secs(300)).await);
    for (store, name) in [(memory, "memory"), (redis, "redis")] {
        for (number, algorithm) in algorithms.into_iter().enumerate() {
            let mut callers = tokio::task::JoinSet::new();
            for _ in 0..64 {
                let store = store.clone();
                callers.spawn(async move {
                    let mut passed = 0;
                    for _ in 0..16 {
                        let counter = Counter::new(format!("{{hot}}{number}"), algorithm);
                        let now = Micros::from_secs(1_763_672_430);
                        passed += usize::from(
                            unwrap_decisions(store.apply(&[counter.take(1)], Charge::Each, now).await)[0].allowed,
                        );
                    }
                    passed
                });
            }
            let passed: usize = callers.join_all().await.into_iter().sum();
            assert_eq!(passed, 500, "{name}, {algorithm:?}");
        }
    }
}

#[tokio::test]
async fn a_request_with_many_descriptors_is_one_round_trip() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(300)).await;
    let rule = window(10, 60);
    let counters: Vec<_> = (0..128).map(|number| Counter::new(format!("{{key{number}}}fw"), rule)).collect();
    let hits: Vec<_> = counters.iter().map(|counter| counter.take(1)).collect();
    server.cli(&["config", "resetstat"]);
    assert_eq!(unwrap_decisions(redis.apply(&hits, Charge::Each, Micros::from_secs(60)).await).len(), 128);
    let stats = server.cli(&["info", "commandstats"]);
    assert!(stats.contains("cmdstat_evalsha:calls=1,"), "{stats}");
    assert!(!stats.contains("cmdstat_get:"), "{stats}");
}

/// Two instances of the service, one Redis, 10,000 concurrent requests on one key with a limit of 1,000.
#[tokio::test]
async fn two_instances_share_a_limit_exactly() {
    let redis = RedisServer::start();
    let text = "domain: d\ndescriptors: [{key: hot, rate_limit: {unit: year, requests_per_unit: 1000}}]";
    let rules = rules(&[("d.yaml", text)]);
    let start = || Server::builder().rules(rules.path()).store(&redis.url()).start();
    let servers = [start(), start()];
    let mut calls = tokio::task::JoinSet::new();
    for server in &servers {
        for _ in 0..5 {
            let client = server.client().await;
            for _ in 0..1_000 {
                let client = client.clone();
                calls.spawn(async move { client.check(request_for("d", &[("hot", "key")])).await.unwrap().allowed() });
            }
        }
    }
    let answers = calls.join_all().await;
    assert_eq!(answers.len(), 10_000);
    assert_eq!(answers.into_iter().filter(|allowed| *allowed).count(), 1_000);
}
