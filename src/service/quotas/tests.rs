//! Tests of sessions, with counters in memory and a clock that the tests set.

use futures_util::FutureExt;

use sluicegate_testing::test_log::TestLog;

use super::*;
use crate::{
    algorithm::{Action, Operation},
    engine::{Resources, Statistics, StatisticsSettings, TokenBucket},
    rules::{self, Options, SourceFile},
    store::AnyStore,
};

const RULES: &str = "
domain: api
descriptors:
- {key: user, rate_limit: {unit: second, requests_per_unit: 100}}
- {key: log, rate_limit: {unit: minute, requests_per_unit: 600, algorithm: sliding_log}}
- {key: elastic, rate_limit: {unit: second, requests_per_unit: 100, elastic: {resource: db, up_to: 150%, idle: 30%, busy: 80%}}}
- {key: minutely, rate_limit: {unit: minute, requests_per_unit: 600}}
- {key: hourly, rate_limit: {unit: hour, requests_per_unit: 360}}
- {key: bucket, rate_limit: {unit: minute, requests_per_unit: 60, algorithm: token_bucket, burst: 20}}
- {key: free, rate_limit: {unlimited: true}}
- {key: shadow, shadow_mode: true, rate_limit: {unit: second, requests_per_unit: 1}}
- {key: none, rate_limit: {unit: day, requests_per_unit: 0}}
- {key: slots, rate_limit: {algorithm: concurrency, limit: 3, hold: 1s, on_error: allow}}
- {key: queue, rate_limit: {unit: second, requests_per_unit: 9, algorithm: leaky_bucket, queue: 3, on_error: deny}}
- {key: unknown, rate_limit: {algorithm: concurrency, limit: 3, hold: 1s}}
- key: tenant
  descriptors: [{key: path, rate_limit: {unit: second, requests_per_unit: 10}}]
";

struct Service {
    quotas: Quotas,
    now: Arc<AtomicU64>,
}

pub(super) const NOW: Micros = Micros::from_secs(1_763_672_400);

/// Returns an engine with these rules and its counters in memory.
pub(super) fn engine(rules: &str) -> Engine<AnyStore> {
    let file = SourceFile { name: "api.yaml".into(), text: rules.into() };
    let (rules, _) = rules::compile(&[file], Options::default()).unwrap();
    let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 700, near_limit_ratio: 0.8 });
    let engine = Engine::in_memory(rules, statistics, &Default::default());
    engine.with_store(AnyStore::Memory(Arc::clone(&engine.store)))
}

impl Service {
    fn start(settings: Settings) -> Self {
        let now = Arc::new(AtomicU64::new(NOW.get()));
        let clock = Clock::Manual(Arc::clone(&now));
        Self { quotas: Quotas::new(engine(RULES), clock, settings), now }
    }

    fn pass(&self, seconds: u64) {
        self.now.fetch_add(seconds * 1_000_000, Relaxed);
    }

    /// Puts a rule in force.
    fn load(&self, rule: &str) {
        let text = format!("domain: api\ndescriptors: [{rule}]");
        let (rules, _) = rules::compile(&[SourceFile { name: "api.yaml".into(), text }], Options::default()).unwrap();
        let snapshot = Snapshot::new(rules, &self.quotas.engine.statistics, &Resources::default());
        self.quotas.engine.rules.store(Arc::new(snapshot));
    }

    /// Returns the hits that the counter of a rule contains.
    fn used(&self, rule: usize, key: &str) -> u64 {
        let engine = &self.quotas.engine;
        let memory = engine.store.memory().unwrap();
        let operation = Operation { action: Action::Peek, cost: 0, now: self.quotas.clock.now() };
        let snapshot = engine.rules.load();
        let algorithm = snapshot.rule_set().rules()[rule].limit.as_ref().unwrap().algorithm();
        algorithm.explain(&memory.state(key.as_bytes()), operation, true).used
    }
}

fn bucket(text: &str) -> BucketId {
    text.split(' ').map(|entry| entry.split_once('=').unwrap()).collect()
}

fn usage(text: &str, allowed: u64, denied: u64) -> Usage {
    Usage { bucket: bucket(text), descriptor: None, allowed, denied, elapsed: Micros::ZERO }
}

fn report(session: &mut QuotaSession, usages: &[Usage]) -> Result<Vec<BucketAction>, QuotaError> {
    session.report("api", usages.to_vec()).now_or_never().unwrap()
}

/// Reports one bucket, and returns its quota.
fn quota(session: &mut QuotaSession, text: &str, allowed: u64, denied: u64) -> Option<Quota> {
    match report(session, &[usage(text, allowed, denied)]).unwrap().pop() {
        Some(BucketAction::Assign(_, quota, _)) => Some(quota),
        _ => None,
    }
}

/// Returns the tokens per second of a quota.
fn rate(quota: Option<Quota>) -> f64 {
    match quota {
        Some(Quota::TokenBucket(bucket)) => f64::from(bucket.tokens) / bucket.interval_secs as f64,
        Some(Quota::DenyAll) => 0.0,
        Some(Quota::AllowAll) | None => f64::INFINITY,
    }
}

#[test]
fn each_kind_of_rule_becomes_a_quota() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    let mut first = |text| quota(&mut session, text, 1, 0);
    let bucket =
        |max_tokens, tokens, interval_secs| Some(Quota::TokenBucket(TokenBucket { max_tokens, tokens, interval_secs }));
    // An eighth and a quarter of it, until the demand is known.
    assert_eq!(first("user=a"), bucket(15, 1_000, 64));
    assert_eq!(first("hourly=a"), bucket(14, 1_000, 63_996));
    assert_eq!(first("bucket=a"), bucket(3, 1_000, 6_400));
    assert_eq!(first("path=p tenant=t"), bucket(2, 1_000, 640), "the rules know the order of the entries");
    assert_eq!(first("free=a"), Some(Quota::AllowAll));
    assert_eq!(first("shadow=a"), Some(Quota::AllowAll));
    assert_eq!(first("other=a"), Some(Quota::AllowAll), "no rule limits this bucket");
    assert_eq!(first("none=a"), Some(Quota::DenyAll));
    assert_eq!(first("slots=a"), Some(Quota::AllowAll));
    assert_eq!(first("queue=a"), Some(Quota::DenyAll));
    assert_eq!(first("unknown=a"), None, "the caller decides");
}

#[test]
fn a_limit_that_cannot_be_divided_is_logged_once_for_each_rule() {
    let (service, log) = (Service::start(Settings::default()), TestLog::start());
    let mut session = service.quotas.session(None);
    let mut count = || {
        for text in ["slots=a", "slots=b", "queue=a", "user=a", "slots=a"] {
            quota(&mut session, text, 1, 0);
        }
        log.text().matches("so on_error decides").count()
    };
    assert_eq!(count(), 2);
    assert!(log.text().contains("\"concurrency\"") && log.text().contains("\"queue\""), "{}", log.text());
    // After rules were loaded.
    service.load("{key: slots, rate_limit: {algorithm: concurrency, limit: 3, hold: 1s}}");
    assert_eq!(count(), 3);
}

#[test]
fn shares_follow_the_demand_of_all_callers() {
    let service = Service::start(Settings::default());
    let mut sessions = [service.quotas.session(None), service.quotas.session(None), service.quotas.session(None)];
    // The first two callers send more than the limit each, and the third one sends little.
    let mut rates = [0.0; 3];
    for _ in 0..12 {
        service.pass(5);
        for (index, session) in sessions.iter_mut().enumerate() {
            let requests = if index == 2 { 50 } else { 5_000 };
            let allowed = requests.min((rates[index] * 5.0) as u64);
            rates[index] = rate(quota(session, "user=a", allowed, requests - allowed));
        }
        assert!(rates.iter().sum::<f64>() <= 100.0, "{rates:?}");
    }
    assert_eq!(rates[2], 10.0, "the demand");
    assert!((rates[0] - rates[1]).abs() < 3.0 && rates.iter().sum::<f64>() >= 97.0, "{rates:?}");
    // A caller that is gone leaves its share to the others.
    drop(mem::replace(&mut sessions[0], service.quotas.session(None)));
    for _ in 0..6 {
        service.pass(5);
        rates[1] = rate(quota(&mut sessions[1], "user=a", 200, 4_800));
        rates[2] = rate(quota(&mut sessions[2], "user=a", 50, 0));
    }
    assert!(rates[1] >= 85.0 && rates[2] >= 10.0, "{rates:?}");
}

/// Returns the rate and the lifetime in seconds of the only quota.
fn assigned(actions: &[BucketAction]) -> (f64, u64) {
    let [BucketAction::Assign(_, quota, ttl)] = actions else { panic!("{actions:?}") };
    (rate(Some(*quota)), ttl.as_secs())
}

/// Others cannot get that share before, and the quota is replaced a moment before it ends.
#[test]
fn a_former_share_is_used_until_its_quota_ends() {
    let service = Service::start(Settings::default());
    let mut sessions = [service.quotas.session(None), service.quotas.session(None)];
    let [first, second] = &mut sessions;
    quota(first, "user=a", 1, 0);
    service.pass(5);
    assert_eq!(assigned(&report(first, &[usage("user=a", 1, 5_000)]).unwrap()), (100.0, 15));
    assert_eq!(quota(second, "user=a", 1, 500), Some(Quota::DenyAll));
    for ttl in [10, 5] {
        service.pass(5);
        assert_eq!(assigned(&report(first, &[usage("user=a", 500, 5_000)]).unwrap()), (100.0, ttl));
        assert_eq!(quota(second, "user=a", 0, 5_000), Some(Quota::DenyAll));
    }
    let mut pushed = Vec::new();
    for second in 11..=18 {
        service.pass(1);
        for (index, session) in sessions.iter_mut().enumerate() {
            let actions = session.tick().now_or_never().unwrap();
            pushed.extend((!actions.is_empty()).then(|| (second, index, assigned(&actions))));
        }
    }
    assert_eq!(pushed, [(13, 0, (50.0, 15)), (17, 1, (50.0, 15))]);
}

/// So its share is free sooner if it still has few requests in the next report.
#[test]
fn the_quota_of_a_caller_with_fewer_requests_is_not_extended() {
    for (reports, ttls) in [
        ([(1, 5_000), (500, 0), (500, 0)], [15, 15, 15]),
        ([(1, 5_000), (249, 0), (500, 0)], [15, 10, 15]),
        ([(1, 5_000), (249, 0), (249, 0)], [15, 10, 5]),
        ([(1, 5_000), (250, 0), (250, 0)], [15, 15, 10]),
        ([(1, 450), (230, 0), (230, 0)], [15, 15, 10]),
        ([(1, 399), (200, 0), (200, 0)], [15, 15, 10]),
    ] {
        let service = Service::start(Settings::default());
        let mut session = service.quotas.session(None);
        quota(&mut session, "user=a", 1, 0);
        for ((allowed, denied), ttl) in reports.into_iter().zip(ttls) {
            service.pass(5);
            let actions = report(&mut session, &[usage("user=a", allowed, denied)]).unwrap();
            assert_eq!(assigned(&actions).1, ttl, "{reports:?}: {actions:?}");
        }
    }
    // Without another report, the quota is extended once.
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    for (allowed, denied) in [(1, 0), (1, 5_000), (249, 0)] {
        service.pass(5);
        report(&mut session, &[usage("user=a", allowed, denied)]).unwrap();
    }
    for second in 1..30 {
        service.pass(1);
        let actions = session.tick().now_or_never().unwrap();
        assert_eq!(actions.is_empty(), second != 8, "{second}: {actions:?}");
        assert!(actions.is_empty() || assigned(&actions) == (100.0, 15), "{actions:?}");
    }
    // The next report could arrive too late.
    let service = Service::start(Settings { ttl: Duration::from_secs(12), ..Settings::default() });
    let mut session = service.quotas.session(None);
    for (allowed, denied) in [(1, 0), (1, 5_000), (249, 0)] {
        service.pass(5);
        let actions = report(&mut session, &[usage("user=a", allowed, denied)]).unwrap();
        assert_eq!(assigned(&actions).1, 12);
    }
}

/// Otherwise the first caller that reports would get the shares of the others.
#[test]
fn callers_keep_their_shares_if_the_store_loses_them() {
    let service = Service::start(Settings::default());
    let mut sessions = [0; 4].map(|_| service.quotas.session(None));
    let report_all = |sessions: &mut [QuotaSession]| -> Vec<f64> {
        service.pass(5);
        sessions.iter_mut().map(|session| rate(quota(session, "user=a", 125, 1_000))).collect()
    };
    (0..10).for_each(|_| drop(report_all(&mut sessions)));
    let before = report_all(&mut sessions);
    assert!(before.iter().all(|rate| (24.8..=25.2).contains(rate)), "{before:?}");
    let store = engine(RULES).store;
    for session in &mut sessions {
        session.quotas.engine.store = store.clone();
    }
    for _ in 0..5 {
        let after = report_all(&mut sessions);
        assert!(after.iter().all(|rate| (24.7..=25.2).contains(rate)), "{after:?}");
    }
}

#[test]
fn a_limit_has_a_maximum_number_of_callers() {
    let service = Service::start(Settings::default());
    let mut sessions: Vec<_> = (0..=Assignments::MAX_CALLERS).map(|_| service.quotas.session(None)).collect();
    let mut actions = Vec::new();
    for session in &mut sessions {
        actions = report(session, &[usage("user=a", 1, 0)]).unwrap();
    }
    assert_eq!(assigned(&actions), (0.0, 15));
    sessions.truncate(1);
    service.pass(17);
    assert!(rate(quota(&mut sessions[0], "user=a", 0, 1_700)) > 95.0);
}

/// The share of its former stream is still reserved, so nothing is free.
#[test]
fn a_caller_that_reconnects_keeps_its_quota_until_it_can_get_a_new_one() {
    let service = Service::start(Settings::default());
    let mut sessions = [service.quotas.session(None), service.quotas.session(None)];
    for _ in 0..8 {
        service.pass(5);
        for session in &mut sessions {
            quota(session, "user=a", 250, 1_000);
        }
    }
    let mut session = service.quotas.session(None);
    drop(mem::replace(&mut sessions[1], service.quotas.session(None)));
    let resumed = Usage { elapsed: Micros::from_secs(5), ..usage("user=a", 250, 1_000) };
    assert_eq!(report(&mut session, &[resumed]), Ok(Vec::new()));
    assert_eq!(quota(&mut sessions[1], "user=a", 1, 0), Some(Quota::DenyAll), "a new caller had no quota before");
    for _ in 0..17 {
        assert_eq!(session.tick().now_or_never().unwrap(), []);
        service.pass(1);
    }
    let actions = session.tick().now_or_never().unwrap();
    let [BucketAction::Assign(_, quota, _)] = actions[..] else { panic!("{actions:?}") };
    assert!(rate(Some(quota)) > 40.0, "{quota:?}");
}

#[test]
fn a_used_up_counter_ends_the_quota_until_it_has_hits_again() {
    let service = Service::start(Settings { idle_timeout: Duration::from_secs(7_200), ..Settings::default() });
    let mut session = service.quotas.session(None);
    assert!(rate(quota(&mut session, "hourly=a", 1, 0)) > 0.0);
    service.pass(5);
    assert_eq!(quota(&mut session, "hourly=a", 359, 0), Some(Quota::DenyAll));
    service.pass(3_590);
    assert_eq!(quota(&mut session, "hourly=a", 0, 1), Some(Quota::DenyAll));
    service.pass(4);
    assert_eq!(session.tick().now_or_never().unwrap(), []);
    service.pass(1);
    let actions = session.tick().now_or_never().unwrap();
    assert!(matches!(actions[..], [BucketAction::Assign(_, Quota::TokenBucket(_), _)]), "{actions:?}");
}

/// Quotas of elastic limits are computed each second, but not for a stream that stays open without reports.
#[test]
fn a_caller_that_reports_no_longer_leaves_its_share_to_others() {
    let service = Service::start(Settings::default());
    let [mut first, mut second] = [service.quotas.session(None), service.quotas.session(None)];
    quota(&mut first, "elastic=a", 1, 0);
    service.pass(5);
    assert_eq!(rate(quota(&mut first, "elastic=a", 1, 5_000)), 100.0);
    for _ in 0..40 {
        service.pass(1);
        assert_eq!(first.tick().now_or_never().unwrap(), [], "the quota has not changed");
    }
    quota(&mut second, "elastic=a", 1, 0);
    service.pass(5);
    assert_eq!(rate(quota(&mut second, "elastic=a", 1, 5_000)), 100.0);
}

/// A window forgets older hits.
#[test]
fn a_debt_is_at_most_the_hits_of_a_window() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    for requests in std::iter::once(u64::MAX).chain([0; 26]) {
        quota(&mut session, "log=a", requests, 0);
        for _ in 0..5 {
            service.pass(1);
            session.tick().now_or_never().unwrap();
        }
    }
    assert!(rate(quota(&mut session, "log=a", 0, 1)) > 0.0);
}

/// The hits that the caller may still use are counted as well, until its quota has ended.
#[test]
fn reports_are_counted_by_the_limits_counter() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    for (allowed, denied) in [(1, 0), (15, 3), (15, 4)] {
        service.pass(5);
        quota(&mut session, "hourly=a", allowed, denied);
    }
    let engine = &service.quotas.engine;
    let snapshot = engine.rules.load();
    let totals: Vec<_> = snapshot.rule_totals().map(|totals| totals.get().unwrap_or_default()).collect();
    assert_eq!((totals[4].requested, totals[4].denied), (38, 7));
    let used = || service.used(4, "{api|hourly=a}fw:3600");
    assert!(used() > 100, "{}", used());
    let wait = session.close().unwrap();
    assert_eq!(wait, Duration::from_secs(17));
    service.pass(17);
    session.return_unused().now_or_never().unwrap();
    assert_eq!(used(), 31);
}

/// Of the requests in five seconds, a window of one second contains a fifth.
#[test]
fn a_long_report_counts_with_a_part_in_a_short_window() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    let resumed = Usage { elapsed: Micros::from_secs(5), ..usage("user=a", 400, 0) };
    report(&mut session, &[resumed]).unwrap();
    // The next quota has the 20 remaining hits as its burst, and all hits of the next second.
    assert_eq!(service.used(0, "{api|user=a}fw:1"), 80 + 20 + 100);
}

/// Other callers could use all hits of a window before the caller reports.
#[test]
fn a_window_begins_with_the_hits_of_its_quotas() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    session.tick().now_or_never().unwrap();
    service.pass(57);
    report(&mut session, &[usage("user=a", 1, 0), usage("minutely=a", 1, 0)]).unwrap();
    service.now.fetch_add(975_000, Relaxed);
    for _ in 57..60 {
        assert_eq!(session.tick().now_or_never().unwrap(), []);
        assert_eq!(session.until_tick(), Duration::from_secs(1));
        service.pass(1);
    }
    // The tokens of the bucket and those that are added in 14 seconds, until the quota ends.
    assert_eq!(service.used(3, "{api|minutely=a}fw:60"), (23.0 + 14.0 * 1.5625) as u64);
    service.now.fetch_sub(1_000_000, Relaxed);
    assert_eq!(service.used(0, "{api|user=a}fw:1"), 16, "those that are added in a second");
}

#[test]
fn changed_rules_change_quotas_at_the_next_tick() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    session.tick().now_or_never().unwrap();
    assert!(rate(quota(&mut session, "user=a", 1, 0)) > 0.0);
    assert_eq!(session.tick().now_or_never().unwrap(), []);
    let ttl = Settings::default().ttl;
    let slots = "rate_limit: {algorithm: concurrency, limit: 3, hold: 1s";
    for (user, quotas) in [
        ("{key: user}".to_owned(), vec![Quota::AllowAll]),
        (RULES.lines().nth(3).unwrap()[2..].to_owned(), vec![]),
        // These limits cannot be divided, so the former quota must not be renewed.
        (format!("{{key: user, {slots}, on_error: deny}}}}"), vec![Quota::DenyAll]),
        (format!("{{key: user, {slots}}}}}"), vec![]),
    ] {
        service.load(&user);
        let actions = session.tick().now_or_never().unwrap();
        if user.contains("second") {
            assert!(matches!(actions[..], [BucketAction::Assign(_, Quota::TokenBucket(_), _)]), "{actions:?}");
            continue;
        }
        let expected = quotas.into_iter().map(|quota| BucketAction::Assign(bucket("user=a"), quota, ttl));
        assert_eq!(actions, expected.collect::<Vec<_>>(), "{user}");
    }
}

/// The hits that were counted in the former window are not there.
#[test]
fn a_changed_window_begins_with_the_hits_of_its_quotas() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    session.tick().now_or_never().unwrap();
    quota(&mut session, "hourly=a", 1, 0);
    service.load("{key: hourly, rate_limit: {unit: day, requests_per_unit: 360}}");
    let Some(BucketAction::Assign(_, Quota::TokenBucket(bucket), _)) = session.tick().now_or_never().unwrap().pop()
    else {
        panic!("no token bucket")
    };
    let used = service.used(0, "{api|hourly=a}fw:86400");
    assert!(used > 0 && used >= bucket.max_tokens.into(), "{used} of {bucket:?}");
}

#[test]
fn buckets_without_requests_are_abandoned() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    report(&mut session, &[usage("user=a", 1, 0), usage("user=b", 1, 0)]).unwrap();
    service.pass(200);
    report(&mut session, &[usage("user=a", 0, 0), usage("user=b", 0, 1)]).unwrap();
    service.pass(101);
    assert_eq!(session.tick().now_or_never().unwrap(), [BucketAction::Abandon(bucket("user=a"))]);
    let counts = || (service.quotas.streams.count.load(Relaxed), service.quotas.streams.buckets.load(Relaxed));
    assert_eq!(counts(), (1, 1));
    drop(session);
    assert_eq!(counts(), (0, 0));
}

#[test]
fn invalid_messages_end_a_stream() {
    let service = Service::start(Settings::default());
    let mut session = service.quotas.session(None);
    let mut send = |domain, usages: &[Usage]| session.report(domain, usages.to_vec()).now_or_never().unwrap();
    assert_eq!(send("", &[]), Err(QuotaError::NoDomain));
    assert_eq!(send("api", &[]), Ok(Vec::new()));
    assert_eq!(send("other", &[]), Err(QuotaError::OtherDomain));
    let nameless = Usage { bucket: BucketId::from_iter([("", ""); 0]), ..usage("user=a", 1, 0) };
    assert_eq!(send("", &[nameless]), Err(QuotaError::NoEntries));
    assert_eq!(send("", &[usage("user=a", 1, 0), usage("user=b", 1, 0)]).map(|actions| actions.len()), Ok(2));
    assert_eq!(send("api", &[usage("user=a", 1, 0)]).map(|actions| actions.len()), Ok(1));
}

/// A stream that reports buckets without limit leaves room for others, and its own further buckets are denied.
#[test]
fn a_stream_has_at_most_as_many_buckets_as_are_free() {
    let service = Service::start(Settings { max_buckets: 8, ..Settings::default() });
    let quotas = |session: &mut QuotaSession, count: u32| {
        let usages: Vec<_> = (0..count).map(|number| usage(&format!("user=u{number}"), 1, 0)).collect();
        let actions = report(session, &usages).unwrap();
        let is_denied = |action: &&BucketAction| matches!(action, BucketAction::Assign(_, Quota::DenyAll, _));
        (actions.len(), actions.iter().filter(is_denied).count(), session.buckets.len())
    };
    let rejected = || service.quotas.streams.rejected.load(Relaxed);
    let [mut greedy, mut honest, mut last] = [(); 3].map(|()| service.quotas.session(None));
    assert_eq!(quotas(&mut greedy, 100), (100, 96, 4));
    assert_eq!((quotas(&mut greedy, 100), rejected()), ((100, 96, 4), 192), "again, for a caller that reports again");
    assert_eq!(quotas(&mut honest, 2), (2, 0, 2));
    assert_eq!(quotas(&mut last, 2), (2, 1, 1));
    drop(greedy);
    assert_eq!(quotas(&mut last, 3), (3, 0, 3));
    drop((honest, last));
    let streams = &service.quotas.streams;
    assert_eq!((streams.used.load(Relaxed), streams.buckets.load(Relaxed)), (0, 0));
}

#[test]
fn a_bucket_without_room_is_denied_only_if_it_has_a_limit() {
    let service = Service::start(Settings { max_buckets: 0, ..Settings::default() });
    let mut session = service.quotas.session(None);
    for (name, quota) in [("user=a", Quota::DenyAll), ("no_rule=a", Quota::AllowAll)] {
        let ttl = Settings::default().ttl;
        assert_eq!(
            report(&mut session, &[usage(name, 1, 0)]),
            Ok(vec![BucketAction::Assign(bucket(name), quota, ttl)])
        );
    }
}

#[test]
fn a_bucket_with_a_long_name_counts_as_several() {
    let service = Service::start(Settings { max_buckets: 1_000, ..Settings::default() });
    let mut session = service.quotas.session(None);
    let long = format!("user={}", "x".repeat(60_000));
    assert_eq!(report(&mut session, &[usage(&long, 1, 0)]).unwrap().len(), 1);
    assert_eq!((session.used, service.quotas.streams.used.load(Relaxed)), (151, 151));
    let raw = Usage { bucket: bucket("user=a").into_unreadable(), ..usage("user=a", 1, 0) };
    assert_eq!(report(&mut session, &[raw]), Ok(vec![]), "a name that is not UTF-8 has no answer");
    assert_eq!((session.used, session.buckets.len()), (152, 2));
    let descriptor = Some(bucket("user=b"));
    assert_eq!(report(&mut session, &[Usage { descriptor, ..usage("user=c", 1, 0) }]).unwrap().len(), 1);
    service.pass(Settings::default().idle_timeout.as_secs() + 2);
    let abandoned = session.tick().now_or_never().unwrap();
    assert_eq!(abandoned.len(), 2, "but not the unreadable one");
    assert_eq!((session.used, session.descriptors.len(), service.quotas.streams.used.load(Relaxed)), (0, 0, 0));
}

#[test]
fn repeated_reports_of_a_bucket_are_merged() {
    let usages = [usage("user=a", 1, 2), usage("user=b", 3, 0), usage("user=a", u64::MAX, 5)];
    let late = Usage { elapsed: Micros::from_secs(7), ..usage("user=b", 1, 0) };
    let merged = merged([usages.to_vec(), vec![late]].concat());
    let expected = [usage("user=a", u64::MAX, 7), Usage { elapsed: Micros::from_secs(7), ..usage("user=b", 4, 0) }];
    assert_eq!(merged, expected);
}

#[test]
fn a_demand_is_the_larger_one_of_two_reports() {
    let mut bucket = Bucket::new(Micros::ZERO, Micros::ZERO, Micros::ZERO);
    let mut demand_after = |requests, seconds| {
        bucket.record(requests, Micros::from_secs(seconds));
        bucket.held.reported_at = Micros::from_secs(seconds);
        bucket.demand()
    };
    assert_eq!(demand_after(1, 0), None);
    assert_eq!(demand_after(50, 5), Some(10.0));
    assert_eq!(demand_after(100, 5), Some(10.0), "the time since the last report is too short");
    assert_eq!(demand_after(200, 10), Some(40.0));
    assert_eq!(demand_after(5, 15), Some(40.0));
    assert_eq!(demand_after(0, 20), Some(1.0));
}

#[test]
fn five_callers_use_the_whole_limit() {
    let service = Service::start(Settings::default());
    let demands = [80.0, 80.0, 80.0, 10.0, 6.0];
    let mut callers = demands.map(|demand| (service.quotas.session(None), demand, 0.0));
    for (session, _, now) in &mut callers {
        *now = rate(quota(session, "user=a", 1, 0));
    }
    for _ in 0..12 {
        service.pass(5);
        for (session, demand, now) in &mut callers {
            let (requests, allowed) = (*demand * 5.0, (*now * 5.0).min(*demand * 5.0));
            *now = rate(quota(session, "user=a", allowed as u64, (requests - allowed) as u64));
        }
    }
    let rates = callers.map(|(_, _, now)| now);
    assert!(rates.iter().sum::<f64>() >= 97.0, "{rates:?}");
}
