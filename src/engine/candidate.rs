//! [`Candidate`]: candidate rules, which are evaluated on a share of the real requests with counters of their own.
//! Their decisions are counted and never returned to a caller.
//!
//! The share is a share of the counters, not of the requests. Every hit of a sampled counter is evaluated, so its
//! decisions are those that the rules would make in force. A hash of the counter's name selects the sampled counters,
//! and all instances select the same ones.

use std::{
    collections::VecDeque,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use futures_util::future::{BoxFuture, join_all};
use opentelemetry::{KeyValue, metrics::Meter};
use siphasher::sip::SipHasher13;
use smallvec::SmallVec;

use super::{
    Descriptor, Engine, Overrides, Request, Resources, Snapshot, Statistics, StatisticsSettings, TopEntities, Verdict,
    key, overrides::Target,
};
use crate::{
    algorithm::Micros,
    metrics::{Striped, WorkerId},
    rules::{Entry, Lookup, Rule, RuleSet},
    store::AnyStore,
};

/// Prefix of the counters' names. No domain begins with this prefix.
const SCOPE: &str = "~trial~";
/// Maximum number of requests that wait for the store. Further requests are skipped.
const MAX_WAITING: usize = 1_000;
/// Number of queued requests that a worker decides without further delay. They share a call to the store.
const MAX_BATCH: usize = 32;
/// Maximum time that a queued request waits for further requests.
const MAX_BATCH_DELAY: Duration = Duration::from_millis(5);
/// Number of minutes for which outcomes are stored per minute.
const MAX_MINUTES: usize = 180;
/// Maximum number of entities in the list of the first newly denied ones.
const MAX_FIRST_DENIED: usize = 20;

/// Hits by the decisions of the candidate rules and of the rules in force.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// All evaluated hits.
    pub requested: u64,
    /// Hits that the candidate rules would deny.
    pub denied: u64,
    /// Hits that the candidate rules would deny and that were allowed.
    pub newly_denied: u64,
    /// Hits that the candidate rules would allow and that were denied.
    pub newly_allowed: u64,
}

impl Outcomes {
    fn new(hits: u64, would_deny: bool, is_denied: bool) -> Self {
        let hits_if = |is: bool| if is { hits } else { 0 };
        Self {
            requested: hits,
            denied: hits_if(would_deny),
            newly_denied: hits_if(would_deny && !is_denied),
            newly_allowed: hits_if(!would_deny && is_denied),
        }
    }

    fn add(&mut self, other: Self) {
        self.requested += other.requested;
        self.denied += other.denied;
        self.newly_denied += other.newly_denied;
        self.newly_allowed += other.newly_allowed;
    }
}

/// The [`Outcomes`] of one rule as atomic counters.
#[derive(Default)]
struct Tally([AtomicU64; 4]);

impl Tally {
    fn add(&self, outcomes: Outcomes) {
        let Outcomes { requested, denied, newly_denied, newly_allowed } = outcomes;
        for (sum, number) in self.0.iter().zip([requested, denied, newly_denied, newly_allowed]) {
            if number > 0 {
                sum.fetch_add(number, Relaxed);
            }
        }
    }

    fn get(&self) -> Outcomes {
        let [requested, denied, newly_denied, newly_allowed] = self.0.each_ref().map(|sum| sum.load(Relaxed));
        Outcomes { requested, denied, newly_denied, newly_allowed }
    }
}

/// An entity with newly denied hits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewlyDenied {
    /// The entity.
    pub target: Target,
    /// The policy name of the rule that would deny it.
    pub rule: Arc<str>,
    /// The time of the request.
    pub at: Micros,
}

/// Candidate rules and the outcomes of their decisions.
pub struct Candidate {
    rules: Arc<ArcSwap<Snapshot>>,
    statistics: Arc<Statistics>,
    /// The entities with the most newly denied hits.
    pub newly_denied: Arc<TopEntities>,
    /// Share of the counters to sample, in units of 1/2³².
    share: u64,
    since: Micros,
    /// Outcomes by the rule's id. The last element is for descriptors without a candidate rule.
    tallies: Vec<Tally>,
    minutes: Mutex<VecDeque<(Micros, Outcomes)>>,
    first_denied: Mutex<Vec<NewlyDenied>>,
    /// The requests that each worker has queued.
    queues: Striped<Mutex<Vec<OwnedRequest>>>,
    /// Number of requests that are queued or being decided.
    waiting: AtomicUsize,
    skipped: AtomicU64,
}

impl Candidate {
    /// Creates a candidate that samples a `share` of the counters, from 0 to 1.
    #[must_use]
    pub fn new(rules: RuleSet, share: f64, since: Micros, workers: usize, resources: &Resources) -> Arc<Self> {
        let settings = StatisticsSettings { max_dynamic_series: 0, near_limit_ratio: 1.0 };
        let statistics = Statistics::new(workers, settings);
        let tallies = (0..=rules.rules().len()).map(|_| Tally::default()).collect();
        let snapshot = Snapshot::new(rules, &statistics, resources);
        Arc::new(Self {
            rules: Arc::new(ArcSwap::from_pointee(snapshot)),
            statistics,
            newly_denied: TopEntities::new(workers),
            share: (share.clamp(0.0, 1.0) * (1_u64 << 32) as f64) as u64,
            since,
            tallies,
            minutes: Mutex::default(),
            first_denied: Mutex::default(),
            queues: Striped::new(workers),
            waiting: AtomicUsize::new(0),
            skipped: AtomicU64::new(0),
        })
    }

    /// Applies the limits and plans of the overrides, but not their switches, to the candidate rules.
    pub fn set_overrides(&self, overrides: &Overrides) {
        let snapshot = self.rules.load().with_limits(overrides.clone());
        self.rules.store(Arc::new(snapshot));
    }

    /// Returns the snapshot of the candidate rules.
    #[must_use]
    pub fn rules(&self) -> Arc<Snapshot> {
        self.rules.load_full()
    }

    /// Returns the share of sampled counters, from 0 to 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.share as f64 / (1_u64 << 32) as f64
    }

    /// Returns the time since which the candidate rules have been evaluated.
    #[must_use]
    pub const fn since(&self) -> Micros {
        self.since
    }

    /// Returns the outcomes by rule id. The last element is for descriptors without a candidate rule.
    pub fn outcomes(&self) -> impl Iterator<Item = Outcomes> {
        self.tallies.iter().map(Tally::get)
    }

    /// Returns the outcomes per minute, for the last three hours.
    #[must_use]
    pub fn minutes(&self) -> Vec<(Micros, Outcomes)> {
        lock(&self.minutes).iter().copied().collect()
    }

    /// Returns the first newly denied entities.
    #[must_use]
    pub fn first_newly_denied(&self) -> Vec<NewlyDenied> {
        lock(&self.first_denied).clone()
    }

    /// Returns the number of requests skipped because too many were waiting for the store.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped.load(Relaxed)
    }

    /// Evaluates the candidate rules for a request that the rules in force have decided.
    ///
    /// With the memory store, returns a future that the caller must await. With Redis, queues the request instead, so
    /// that no caller waits for the store. Returns `None` if there is nothing to await.
    pub(super) fn evaluate<'t>(
        self: &'t Arc<Self>,
        engine: &Engine,
        request: &'t Request<'_>,
        verdict: &Verdict,
        now: Micros,
    ) -> Option<BoxFuture<'t, ()>> {
        let sampled = self.sample_descriptors(request, verdict);
        if sampled.is_empty() {
            return None;
        }
        if let AnyStore::Memory(_) = engine.store {
            let engine = self.candidate_engine(engine);
            return Some(Box::pin(async move {
                let descriptors = sampled.iter().map(|sampled| request.descriptors[sampled.index].clone()).collect();
                let request = Request { domain: request.domain, descriptors, feedback: Vec::new() };
                self.decide(&engine, &request, &sampled, now).await;
            }));
        }
        if self.waiting.fetch_add(1, Relaxed) >= MAX_WAITING {
            self.waiting.fetch_sub(1, Relaxed);
            self.skipped.fetch_add(1, Relaxed);
        } else {
            self.queue(engine, OwnedRequest::new(request, sampled, now));
        }
        None
    }

    /// Queues a request to be decided soon, together with other requests of this worker.
    fn queue(self: &Arc<Self>, engine: &Engine, request: OwnedRequest) {
        let mut queue = lock(self.queues.of(engine.worker));
        queue.push(request);
        let delay = match queue.len() {
            1 => MAX_BATCH_DELAY,
            MAX_BATCH => Duration::ZERO,
            _ => return,
        };
        drop(queue);
        let (this, engine) = (Arc::clone(self), self.candidate_engine(engine));
        tokio::spawn(async move {
            tokio::time::sleep(delay).await;
            let requests = std::mem::take(&mut *lock(this.queues.of(engine.worker)));
            join_all(
                requests
                    .iter()
                    .map(async |request| this.decide(&engine, &request.request(), &request.sampled, request.at).await),
            )
            .await;
            this.waiting.fetch_sub(requests.len(), Relaxed);
        });
    }

    async fn decide(&self, engine: &Engine, request: &Request<'_>, sampled: &[SampledDescriptor], now: Micros) {
        // A failure of the store is no outcome of the rules.
        let Ok(verdict) = engine.decide(request, now).await else {
            return;
        };
        for ((descriptor, status), sampled) in request.descriptors.iter().zip(&verdict.statuses).zip(sampled) {
            if descriptor.refund || descriptor.hits == 0 {
                continue;
            }
            let outcomes = Outcomes::new(descriptor.hits, status.is_over(), sampled.denied);
            self.record(sampled.rule, outcomes, now);
            if outcomes.newly_denied > 0 {
                self.record_newly_denied(engine.worker, request.domain, descriptor, sampled, now);
            }
        }
    }

    fn record(&self, rule: usize, outcomes: Outcomes, now: Micros) {
        if let Some(tally) = self.tallies.get(rule) {
            tally.add(outcomes);
        }
        let minute = Micros::from_secs(now.floor_secs() / 60 * 60);
        let mut minutes = lock(&self.minutes);
        match minutes.back_mut() {
            Some((last, sum)) if *last >= minute => sum.add(outcomes),
            _ => {
                if minutes.len() >= MAX_MINUTES {
                    minutes.pop_front();
                }
                minutes.push_back((minute, outcomes));
            }
        }
    }

    fn record_newly_denied(
        &self,
        worker: WorkerId,
        domain: &str,
        descriptor: &Descriptor<'_>,
        sampled: &SampledDescriptor,
        now: Micros,
    ) {
        let snapshot = self.rules.load();
        let rule = snapshot.rules().rules().get(sampled.rule).map(Rule::policy);
        self.newly_denied.record(worker, domain, descriptor, rule, false, now);
        let mut first = lock(&self.first_denied);
        if first.len() < MAX_FIRST_DENIED {
            let target = Target::of_descriptor(domain, &descriptor.entries);
            if !first.iter().any(|newly_denied| newly_denied.target == target) {
                first.push(NewlyDenied { target, rule: rule.map_or_else(|| "".into(), Arc::clone), at: now });
            }
        }
    }

    /// Returns the descriptors with sampled counters.
    fn sample_descriptors(&self, request: &Request<'_>, verdict: &Verdict) -> SmallVec<[SampledDescriptor; 2]> {
        let snapshot = self.rules.load();
        let rules = snapshot.rules();
        let shard_by = rules.settings_of(request.domain).map_or([].as_slice(), |domain| &domain.shard_by);
        let mut sampled = SmallVec::new();
        let mut name = Vec::with_capacity(128);
        for (index, (descriptor, status)) in request.descriptors.iter().zip(&verdict.statuses).enumerate() {
            name.clear();
            let entries = descriptor.entries.as_slice();
            let rule = match rules.find(request.domain, entries.iter().copied()) {
                Lookup::Rule(Rule { limit: Some(limit), id, .. }, path) => {
                    let entries = &entries[..entries.len() - Rule::modifier_count(&path)];
                    key::write(&mut name, "", request.domain, shard_by, entries, &path, limit.algorithm());
                    *id
                }
                // Both sets of rules allow the descriptor, so there is nothing to compare.
                _ if !status.is_over() => continue,
                Lookup::Rule(rule, _) => rule.id,
                _ => self.tallies.len() - 1,
            };
            if name.is_empty() {
                let texts = entries.iter().flat_map(|entry| [entry.key, entry.value]);
                for text in std::iter::once(request.domain).chain(texts) {
                    name.extend_from_slice(&(text.len() as u64).to_le_bytes());
                    name.extend_from_slice(text.as_bytes());
                }
            }
            if u64::from(SipHasher13::new().hash(&name) as u32) < self.share {
                sampled.push(SampledDescriptor { index, rule, denied: status.is_over() });
            }
        }
        sampled
    }

    fn candidate_engine(&self, engine: &Engine) -> Engine {
        Engine {
            scope: SCOPE,
            rules: Arc::clone(&self.rules),
            statistics: Arc::clone(&self.statistics),
            top: None,
            ..engine.clone()
        }
    }

    /// Registers the metric of the outcomes. `current` returns the candidate to report.
    pub fn observe_metrics(current: impl Fn() -> Option<Arc<Self>> + Send + Sync + 'static, meter: &Meter) {
        let counter = meter.u64_observable_gauge("sluicegate_candidate_hits");
        counter
            .with_description("Hits evaluated by the candidate rules, by outcome; reset to 0 by each new candidate")
            .with_callback(move |observer| {
                let Some(candidate) = current() else {
                    return;
                };
                let snapshot = candidate.rules.load();
                for (rule, outcomes) in snapshot.rules().rules().iter().zip(candidate.outcomes()) {
                    if outcomes.requested == 0 {
                        continue;
                    }
                    let names = ["domain", "key1", "key2"].into_iter().zip(rule.labels.iter());
                    let labels: Vec<_> = names.map(|(name, label)| KeyValue::new(name, label.clone())).collect();
                    let Outcomes { requested, denied, newly_denied, newly_allowed } = outcomes;
                    for (outcome_name, hits) in [
                        ("requested", requested),
                        ("denied", denied),
                        ("newly_denied", newly_denied),
                        ("newly_allowed", newly_allowed),
                    ] {
                        let outcome = vec![KeyValue::new("outcome", outcome_name)];
                        observer.observe(hits, &[labels.clone(), outcome].concat());
                    }
                }
            })
            .build();
    }
}

/// A descriptor with a sampled counter.
struct SampledDescriptor {
    index: usize,
    rule: usize,
    /// Whether the rules in force denied it.
    denied: bool,
}

/// An owned copy of the sampled descriptors of a request, for later evaluation.
struct OwnedRequest {
    domain: String,
    descriptors: Vec<OwnedDescriptor>,
    sampled: SmallVec<[SampledDescriptor; 2]>,
    at: Micros,
}

struct OwnedDescriptor {
    entries: Vec<(String, String)>,
    hits: u64,
    refund: bool,
}

impl OwnedRequest {
    fn new(request: &Request<'_>, sampled: SmallVec<[SampledDescriptor; 2]>, at: Micros) -> Self {
        let own = |descriptor: &Descriptor<'_>| OwnedDescriptor {
            entries: descriptor.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.to_owned())).collect(),
            hits: descriptor.hits,
            refund: descriptor.refund,
        };
        let descriptors = sampled.iter().map(|sampled| own(&request.descriptors[sampled.index])).collect();
        Self { domain: request.domain.to_owned(), descriptors, sampled, at }
    }

    fn request(&self) -> Request<'_> {
        let descriptors = self.descriptors.iter().map(|descriptor| Descriptor {
            entries: descriptor.entries.iter().map(|(key, value)| Entry { key, value }).collect(),
            hits: descriptor.hits,
            refund: descriptor.refund,
            requested_limit: None,
        });
        Request { domain: &self.domain, descriptors: descriptors.collect(), feedback: Vec::new() }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::{
        engine::{Code, Status},
        rules::{self, Options, SourceFile},
        store::{Local, Memory, Metrics, local, redis},
    };

    /// Returns an engine with an unreachable Redis.
    fn engine(candidate: &Candidate) -> Engine {
        let (metrics, worker) = (Metrics::new(1), WorkerId(0));
        let settings = redis::Settings::default();
        let setup = redis::Setup::new("redis://127.0.0.1:1", &settings, redis::Time::Server, Arc::clone(&metrics));
        let (deny_cache, leases, eventual) = Default::default();
        let shared =
            local::Shared::new(&deny_cache, &leases, &eventual, local::Clock::start(), Arc::clone(metrics.local()));
        Engine {
            worker,
            scope: "",
            store: AnyStore::Redis(Local::new(setup.unwrap().connect(worker), shared, worker)),
            local: Arc::new(Memory::new(&Default::default())),
            rules: Arc::clone(&candidate.rules),
            statistics: Arc::clone(&candidate.statistics),
            top: None,
            settings: Arc::default(),
        }
    }

    fn candidate(share: f64) -> Arc<Candidate> {
        let text = "domain: api\ndescriptors:\n- key: user\n  rate_limit: {unit: second, requests_per_unit: 1}\n\
                    - key: job\n  rate_limit: {algorithm: concurrency, limit: 5, hold: 60s, holder: id}\n\
                    - key: free\n  rate_limit: {unlimited: true}\n";
        let file = SourceFile { name: "api.yaml".into(), text: text.into() };
        let (rules, _) = rules::compile(&[file], Options::default()).unwrap();
        Candidate::new(rules, share, Micros::ZERO, 1, &Resources::default())
    }

    /// Returns the rule under which a request with this verdict is counted, if its counter is sampled.
    fn sampled_rule(candidate: &Candidate, entries: &[(&str, &str)], code: Code) -> Option<usize> {
        let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        let descriptors = smallvec![Descriptor { entries, hits: 1, refund: false, requested_limit: None }];
        let status = Status { code, ..Status::NO_LIMIT };
        let verdict = Verdict { overall: code, statuses: smallvec![status], metadata: None };
        let request = Request { domain: "api", descriptors, feedback: Vec::new() };
        candidate.sample_descriptors(&request, &verdict).first().map(|sampled| sampled.rule)
    }

    #[tokio::test]
    async fn requests_are_skipped_while_too_many_wait() {
        let candidate = candidate(1.0);
        candidate.waiting.store(MAX_WAITING - 1, Relaxed);
        let entries = smallvec![Entry { key: "user", value: "x" }];
        let descriptors = smallvec![Descriptor { entries, hits: 1, refund: false, requested_limit: None }];
        let status = Status { code: Code::Ok, ..Status::NO_LIMIT };
        let verdict = Verdict { overall: Code::Ok, statuses: smallvec![status], metadata: None };
        let request = Request { domain: "api", descriptors, feedback: Vec::new() };
        let engine = engine(&candidate);
        for skipped in 0..3 {
            assert!(candidate.evaluate(&engine, &request, &verdict, Micros::ZERO).is_none());
            assert_eq!((candidate.skipped(), candidate.waiting.load(Relaxed)), (skipped, MAX_WAITING));
        }
    }

    /// The holder of a slot is not part of the counter's name, so it does not influence the sampling.
    #[test]
    fn all_hits_of_a_counter_are_sampled_or_none() {
        let candidate = candidate(0.5);
        let is_sampled =
            |job: &str, id: &str| sampled_rule(&candidate, &[("job", job), ("id", id)], Code::Ok).is_some();
        let jobs: Vec<String> = (0..100).map(|job| job.to_string()).collect();
        let sampled: Vec<&String> = jobs.iter().filter(|job| is_sampled(job, "x")).collect();
        assert!((20..80).contains(&sampled.len()), "{}", sampled.len());
        for job in &jobs {
            assert!(["y", "z"].into_iter().all(|id| is_sampled(job, id) == sampled.contains(&job)), "{job}");
        }
    }

    /// A descriptor that is denied now is counted under the unlimited candidate rule, or under no rule.
    #[test]
    fn an_unlimited_descriptor_is_sampled_only_if_it_is_denied_now() {
        let candidate = candidate(1.0);
        let rule = |key, code| sampled_rule(&candidate, &[(key, "x")], code);
        assert_eq!((rule("free", Code::Ok), rule("other", Code::Ok)), (None, None));
        assert_eq!((rule("free", Code::OverLimit), rule("other", Code::OverLimit)), (Some(2), Some(3)));
    }

    #[test]
    fn outcomes_distinguish_changed_from_unchanged_decisions() {
        let mut all = Outcomes::default();
        for (hits, would_deny, denied) in
            [(1, false, false), (10, true, false), (100, false, true), (1_000, true, true)]
        {
            all.add(Outcomes::new(hits, would_deny, denied));
        }
        let expected = Outcomes { requested: 1_111, denied: 1_010, newly_denied: 10, newly_allowed: 100 };
        assert_eq!(all, expected);
        all.add(expected);
        assert_eq!(all.newly_allowed, 200);
    }

    #[test]
    fn each_of_the_first_newly_denied_entities_is_listed_once() {
        let candidate = candidate(1.0);
        let deny = |user: &str| {
            let entries = smallvec![Entry { key: "user", value: user }];
            let descriptor = Descriptor { entries, hits: 1, refund: false, requested_limit: None };
            let sampled = SampledDescriptor { index: 0, rule: 0, denied: false };
            candidate.record_newly_denied(WorkerId(0), "api", &descriptor, &sampled, Micros::from_secs(1));
        };
        ["a", "b", "a"].into_iter().for_each(deny);
        let names = || {
            candidate
                .first_newly_denied()
                .into_iter()
                .map(|newly_denied| newly_denied.target.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(), ["limit|api|user=a", "limit|api|user=b"]);
        (0..2 * MAX_FIRST_DENIED).for_each(|user| deny(&user.to_string()));
        assert_eq!(names().len(), MAX_FIRST_DENIED);
    }

    #[test]
    fn the_last_three_hours_are_counted_by_minute() {
        let candidate = candidate(1.0);
        let one = Outcomes::new(1, true, false);
        for minute in 0..MAX_MINUTES as u64 + 20 {
            candidate.record(0, one, Micros::from_secs(60 * minute));
            candidate.record(0, one, Micros::from_secs(60 * minute + 59));
        }
        let minutes = candidate.minutes();
        let two = Outcomes { requested: 2, denied: 2, newly_denied: 2, newly_allowed: 0 };
        assert_eq!((minutes.len(), minutes[0]), (MAX_MINUTES, (Micros::from_secs(60 * 20), two)));
        assert_eq!(candidate.outcomes().next().unwrap().requested, 2 * (MAX_MINUTES as u64 + 20));
    }
}
