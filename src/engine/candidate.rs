//! Rules that are tried out: what they would say to a share of the real requests, on counters of their own, and never to a
//! caller.
//!
//! The share is one of counters, not of requests: of a counter that is in it every hit is counted, so what is said of it is what
//! would be said if the rules were in force. Which counters are in it follows from their names, the same on all instances.

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

/// Stands before the names of the counters: no domain begins so.
const SCOPE: &str = "~trial~";
/// Requests that wait for the store at once; more are left out.
const MOST_WAITING: usize = 1_000;
/// Of one worker, so many are decided together: they share a call to the store.
const TOGETHER: usize = 32;
/// And no request waits longer for others.
const PATIENCE: Duration = Duration::from_millis(5);
/// Minutes that are told apart.
const MINUTES: usize = 180;
/// Entities that are remembered as the first to be refused.
const FIRST: usize = 20;

/// What became of hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcomes {
    /// All of them.
    pub requested: u64,
    /// Those that the rules would refuse.
    pub denied: u64,
    /// Of these: those that pass now.
    pub newly_denied: u64,
    /// Those that are refused now, and would pass.
    pub newly_allowed: u64,
}

impl Outcomes {
    fn of(hits: u64, would_refuse: bool, refused: bool) -> Self {
        let when = |is: bool| if is { hits } else { 0 };
        Self {
            requested: hits,
            denied: when(would_refuse),
            newly_denied: when(would_refuse && !refused),
            newly_allowed: when(!would_refuse && refused),
        }
    }

    fn add(&mut self, other: Self) {
        self.requested += other.requested;
        self.denied += other.denied;
        self.newly_denied += other.newly_denied;
        self.newly_allowed += other.newly_allowed;
    }
}

/// The same of one rule, for many to add to.
#[derive(Default)]
struct Tally([AtomicU64; 4]);

impl Tally {
    fn add(&self, outcomes: Outcomes) {
        let Outcomes { requested: asked, denied: refused, newly_denied: newly_refused, newly_allowed: newly_passed } =
            outcomes;
        for (sum, number) in self.0.iter().zip([asked, refused, newly_refused, newly_passed]) {
            if number > 0 {
                sum.fetch_add(number, Relaxed);
            }
        }
    }

    fn get(&self) -> Outcomes {
        let [asked, refused, newly_refused, newly_passed] = self.0.each_ref().map(|sum| sum.load(Relaxed));
        Outcomes { requested: asked, denied: refused, newly_denied: newly_refused, newly_allowed: newly_passed }
    }
}

/// An entity that would be refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewlyDenied {
    /// Which.
    pub target: Target,
    /// By which rule's policy.
    pub rule: Arc<str>,
    /// When.
    pub at: Micros,
}

/// Rules on trial, and what they have said.
pub struct Candidate {
    rules: Arc<ArcSwap<Snapshot>>,
    statistics: Arc<Statistics>,
    /// Those that would be refused, and are not now.
    pub newly_denied: Arc<TopEntities>,
    /// Of 2³².
    share: u64,
    since: Micros,
    /// By the rule's id; the last is of descriptors for which there is no rule any more.
    tallies: Vec<Tally>,
    minutes: Mutex<VecDeque<(Micros, Outcomes)>>,
    first: Mutex<Vec<NewlyDenied>>,
    /// What each worker has yet to decide.
    queues: Striped<Mutex<Vec<OwnedRequest>>>,
    /// How many are in them, or under way.
    waiting: AtomicUsize,
    left_out: AtomicU64,
}

impl Candidate {
    /// `share`: of 1. `workers`: that decide.
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
            first: Mutex::default(),
            queues: Striped::new(workers),
            waiting: AtomicUsize::new(0),
            left_out: AtomicU64::new(0),
        })
    }

    /// What operators have said of entities holds for these rules, too; switches do not.
    pub fn set_overrides(&self, overrides: &Overrides) {
        let snapshot = self.rules.load().with_limits(overrides.clone());
        self.rules.store(Arc::new(snapshot));
    }

    /// The rules.
    #[must_use]
    pub fn rules(&self) -> Arc<Snapshot> {
        self.rules.load_full()
    }

    /// The share, of 1.
    #[must_use]
    pub fn share(&self) -> f64 {
        self.share as f64 / (1_u64 << 32) as f64
    }

    /// Since when they are tried.
    #[must_use]
    pub const fn since(&self) -> Micros {
        self.since
    }

    /// What became of each rule's hits, by its id; the last is of descriptors that no rule of these has.
    pub fn outcomes(&self) -> impl Iterator<Item = Outcomes> {
        self.tallies.iter().map(Tally::get)
    }

    /// What became of all, minute by minute.
    #[must_use]
    pub fn minutes(&self) -> Vec<(Micros, Outcomes)> {
        lock(&self.minutes).iter().copied().collect()
    }

    /// The first that would have been refused.
    #[must_use]
    pub fn first(&self) -> Vec<NewlyDenied> {
        lock(&self.first).clone()
    }

    /// Requests that were left out, since too many waited for the store.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.left_out.load(Relaxed)
    }

    /// Asks what the rules would have said, beside what was said. In memory that is what is returned, to be waited for;
    /// elsewhere it is done soon after, and no caller waits for it.
    pub(super) fn observe<'t>(
        self: &'t Arc<Self>,
        engine: &Engine,
        request: &'t Request<'_>,
        verdict: &Verdict,
        now: Micros,
    ) -> Option<BoxFuture<'t, ()>> {
        let chosen = self.sampled(request, verdict);
        if chosen.is_empty() {
            return None;
        }
        if let AnyStore::Memory(_) = engine.store {
            let engine = self.engine(engine);
            return Some(Box::pin(async move {
                let descriptors = chosen.iter().map(|it| request.descriptors[it.place].clone()).collect();
                let request = Request { domain: request.domain, descriptors, feedback: Vec::new() };
                self.decide(&engine, &request, &chosen, now).await;
            }));
        }
        if self.waiting.fetch_add(1, Relaxed) >= MOST_WAITING {
            self.waiting.fetch_sub(1, Relaxed);
            self.left_out.fetch_add(1, Relaxed);
        } else {
            self.queue(engine, OwnedRequest::new(request, chosen, now));
        }
        None
    }

    /// Has it decided soon, together with others of this worker.
    fn queue(self: &Arc<Self>, engine: &Engine, request: OwnedRequest) {
        let mut queue = lock(self.queues.of(engine.worker));
        queue.push(request);
        let patience = match queue.len() {
            1 => PATIENCE,
            TOGETHER => Duration::ZERO,
            _ => return,
        };
        drop(queue);
        let (this, engine) = (Arc::clone(self), self.engine(engine));
        tokio::spawn(async move {
            tokio::time::sleep(patience).await;
            let requests = std::mem::take(&mut *lock(this.queues.of(engine.worker)));
            join_all(requests.iter().map(async |it| this.decide(&engine, &it.request(), &it.chosen, it.at).await))
                .await;
            this.waiting.fetch_sub(requests.len(), Relaxed);
        });
    }

    async fn decide(&self, engine: &Engine, request: &Request<'_>, chosen: &[SampledDescriptor], now: Micros) {
        // What the store cannot decide says nothing of the rules.
        let Ok(verdict) = engine.decide(request, now).await else {
            return;
        };
        for ((descriptor, status), chosen) in request.descriptors.iter().zip(&verdict.statuses).zip(chosen) {
            if descriptor.refund || descriptor.hits == 0 {
                continue;
            }
            let outcomes = Outcomes::of(descriptor.hits, status.is_over(), chosen.refused);
            self.count(chosen.rule, outcomes, now);
            if outcomes.newly_denied > 0 {
                self.note_newly_denied(engine.worker, request.domain, descriptor, chosen, now);
            }
        }
    }

    fn count(&self, rule: usize, outcomes: Outcomes, now: Micros) {
        if let Some(tally) = self.tallies.get(rule) {
            tally.add(outcomes);
        }
        let minute = Micros::from_secs(now.floor_secs() / 60 * 60);
        let mut minutes = lock(&self.minutes);
        match minutes.back_mut() {
            Some((last, sum)) if *last >= minute => sum.add(outcomes),
            _ => {
                if minutes.len() >= MINUTES {
                    minutes.pop_front();
                }
                minutes.push_back((minute, outcomes));
            }
        }
    }

    fn note_newly_denied(
        &self,
        worker: WorkerId,
        domain: &str,
        descriptor: &Descriptor<'_>,
        chosen: &SampledDescriptor,
        now: Micros,
    ) {
        let snapshot = self.rules.load();
        let rule = snapshot.rules().rules().get(chosen.rule).map(Rule::policy);
        self.newly_denied.record(worker, domain, descriptor, rule, false, now);
        let mut first = lock(&self.first);
        if first.len() < FIRST {
            let target = Target::of_descriptor(domain, &descriptor.entries);
            if !first.iter().any(|harmed| harmed.target == target) {
                first.push(NewlyDenied { target, rule: rule.map_or_else(|| "".into(), Arc::clone), at: now });
            }
        }
    }

    /// The descriptors whose counters are in the share.
    fn sampled(&self, request: &Request<'_>, verdict: &Verdict) -> SmallVec<[SampledDescriptor; 2]> {
        let snapshot = self.rules.load();
        let rules = snapshot.rules();
        let shard_by = rules.settings_of(request.domain).map_or([].as_slice(), |domain| &domain.shard_by);
        let mut chosen = SmallVec::new();
        let mut name = Vec::with_capacity(128);
        for (place, (descriptor, status)) in request.descriptors.iter().zip(&verdict.statuses).enumerate() {
            name.clear();
            let entries = descriptor.entries.as_slice();
            let rule = match rules.find(request.domain, entries.iter().copied()) {
                Lookup::Rule(Rule { limit: Some(limit), id, .. }, path) => {
                    let entries = &entries[..entries.len() - Rule::modifier_count(&path)];
                    key::write(&mut name, "", request.domain, shard_by, entries, &path, limit.algorithm());
                    *id
                }
                // Nothing could be said of it but that it would pass.
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
                chosen.push(SampledDescriptor { place, rule, refused: status.is_over() });
            }
        }
        chosen
    }

    fn engine(&self, engine: &Engine) -> Engine {
        Engine {
            scope: SCOPE,
            rules: Arc::clone(&self.rules),
            statistics: Arc::clone(&self.statistics),
            top: None,
            ..engine.clone()
        }
    }

    /// Shows what this trial says to the meter, for as long as it is the current one.
    pub fn observe_metrics(current: impl Fn() -> Option<Arc<Self>> + Send + Sync + 'static, meter: &Meter) {
        let counter = meter.u64_observable_gauge("sluicegate_candidate_hits");
        counter
            .with_description("Hits that the candidate rules have been asked about, by what they would do; from 0 with each candidate")
            .with_callback(move |observer| {
                let Some(trial) = current() else {
                    return;
                };
                let snapshot = trial.rules.load();
                for (rule, outcomes) in snapshot.rules().rules().iter().zip(trial.outcomes()) {
                    if outcomes.requested == 0 {
                        continue;
                    }
                    let names = ["domain", "key1", "key2"].into_iter().zip(rule.labels.iter());
                    let labels: Vec<_> = names.map(|(name, label)| KeyValue::new(name, label.clone())).collect();
                    let Outcomes { requested: asked, denied: refused, newly_denied: newly_refused, newly_allowed: newly_passed } = outcomes;
                    for (word, hits) in [
                        ("asked", asked),
                        ("refused", refused),
                        ("newly_refused", newly_refused),
                        ("newly_passed", newly_passed),
                    ] {
                        let outcome = vec![KeyValue::new("outcome", word)];
                        observer.observe(hits, &[labels.clone(), outcome].concat());
                    }
                }
            })
            .build();
    }
}

/// A descriptor whose counter is in the share.
struct SampledDescriptor {
    place: usize,
    rule: usize,
    /// By the rules in force.
    refused: bool,
}

/// A part of a request, for later.
struct OwnedRequest {
    domain: String,
    descriptors: Vec<OwnedDescriptor>,
    chosen: SmallVec<[SampledDescriptor; 2]>,
    at: Micros,
}

struct OwnedDescriptor {
    entries: Vec<(String, String)>,
    hits: u64,
    give_back: bool,
}

impl OwnedRequest {
    fn new(request: &Request<'_>, chosen: SmallVec<[SampledDescriptor; 2]>, at: Micros) -> Self {
        let own = |descriptor: &Descriptor<'_>| OwnedDescriptor {
            entries: descriptor.entries.iter().map(|it| (it.key.to_owned(), it.value.to_owned())).collect(),
            hits: descriptor.hits,
            give_back: descriptor.refund,
        };
        let descriptors = chosen.iter().map(|it| own(&request.descriptors[it.place])).collect();
        Self { domain: request.domain.to_owned(), descriptors, chosen, at }
    }

    fn request(&self) -> Request<'_> {
        let descriptors = self.descriptors.iter().map(|it| Descriptor {
            entries: it.entries.iter().map(|(key, value)| Entry { key, value }).collect(),
            hits: it.hits,
            refund: it.give_back,
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

    /// Its Redis is out of reach.
    fn engine(trial: &Candidate) -> Engine {
        let (metrics, worker) = (Metrics::new(1), WorkerId(0));
        let settings = redis::Settings::default();
        let setup = redis::Setup::new("redis://127.0.0.1:1", &settings, redis::Time::Server, Arc::clone(&metrics));
        let (deny_cache, leases, eventual) = Default::default();
        let known =
            local::Shared::new(&deny_cache, &leases, &eventual, local::Clock::start(), Arc::clone(metrics.local()));
        Engine {
            worker,
            scope: "",
            store: AnyStore::Redis(Local::new(setup.unwrap().connect(worker), known, worker)),
            local: Arc::new(Memory::new(&Default::default())),
            rules: Arc::clone(&trial.rules),
            statistics: Arc::clone(&trial.statistics),
            top: None,
            settings: Arc::default(),
        }
    }

    fn trial(share: f64) -> Arc<Candidate> {
        let text = "domain: api\ndescriptors:\n- key: user\n  rate_limit: {unit: second, requests_per_unit: 1}\n\
                    - key: job\n  rate_limit: {algorithm: concurrency, limit: 5, hold: 60s, holder: id}\n\
                    - key: free\n  rate_limit: {unlimited: true}\n";
        let file = SourceFile { name: "api.yaml".into(), text: text.into() };
        let (rules, _) = rules::compile(&[file], Options::default()).unwrap();
        Candidate::new(rules, share, Micros::ZERO, 1, &Resources::default())
    }

    /// The rule for which a request counts that had this answer, if it is in the share.
    fn sampled(trial: &Candidate, entries: &[(&str, &str)], code: Code) -> Option<usize> {
        let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        let descriptors = smallvec![Descriptor { entries, hits: 1, refund: false, requested_limit: None }];
        let status = Status { code, ..Status::NO_LIMIT };
        let verdict = Verdict { overall: code, statuses: smallvec![status], metadata: None };
        let request = Request { domain: "api", descriptors, feedback: Vec::new() };
        trial.sampled(&request, &verdict).first().map(|chosen| chosen.rule)
    }

    /// No decision waits for what is only tried out, however long the store takes.
    #[tokio::test]
    async fn requests_are_left_out_when_too_many_wait() {
        let trial = trial(1.0);
        trial.waiting.store(MOST_WAITING - 1, Relaxed);
        let entries = smallvec![Entry { key: "user", value: "x" }];
        let descriptors = smallvec![Descriptor { entries, hits: 1, refund: false, requested_limit: None }];
        let status = Status { code: Code::Ok, ..Status::NO_LIMIT };
        let verdict = Verdict { overall: Code::Ok, statuses: smallvec![status], metadata: None };
        let request = Request { domain: "api", descriptors, feedback: Vec::new() };
        let engine = engine(&trial);
        for left_out in 0..3 {
            assert!(trial.observe(&engine, &request, &verdict, Micros::ZERO).is_none());
            assert_eq!((trial.skipped(), trial.waiting.load(Relaxed)), (left_out, MOST_WAITING));
        }
    }

    /// Who holds a slot says nothing of which counter it is.
    #[test]
    fn all_hits_of_a_counter_are_in_the_share_or_none() {
        let trial = trial(0.5);
        let is_chosen = |job: &str, id: &str| sampled(&trial, &[("job", job), ("id", id)], Code::Ok).is_some();
        let jobs: Vec<String> = (0..100).map(|job| job.to_string()).collect();
        let chosen: Vec<&String> = jobs.iter().filter(|job| is_chosen(job, "x")).collect();
        assert!((20..80).contains(&chosen.len()), "{}", chosen.len());
        for job in &jobs {
            assert!(["y", "z"].into_iter().all(|id| is_chosen(job, id) == chosen.contains(&job)), "{job}");
        }
    }

    /// What is refused now counts for the rule that would not limit it, or for none.
    #[test]
    fn what_would_not_be_limited_matters_where_it_is_refused() {
        let trial = trial(1.0);
        let chosen = |key, code| sampled(&trial, &[(key, "x")], code);
        assert_eq!((chosen("free", Code::Ok), chosen("other", Code::Ok)), (None, None));
        assert_eq!((chosen("free", Code::OverLimit), chosen("other", Code::OverLimit)), (Some(2), Some(3)));
    }

    #[test]
    fn what_would_change_is_told_from_what_would_not() {
        let mut all = Outcomes::default();
        for (hits, would_refuse, refused) in
            [(1, false, false), (10, true, false), (100, false, true), (1_000, true, true)]
        {
            all.add(Outcomes::of(hits, would_refuse, refused));
        }
        let expected = Outcomes { requested: 1_111, denied: 1_010, newly_denied: 10, newly_allowed: 100 };
        assert_eq!(all, expected);
        all.add(expected);
        assert_eq!(all.newly_allowed, 200);
    }

    #[test]
    fn the_first_that_would_be_refused_are_each_named_once() {
        let trial = trial(1.0);
        let harm = |user: &str| {
            let entries = smallvec![Entry { key: "user", value: user }];
            let descriptor = Descriptor { entries, hits: 1, refund: false, requested_limit: None };
            let chosen = SampledDescriptor { place: 0, rule: 0, refused: false };
            trial.note_newly_denied(WorkerId(0), "api", &descriptor, &chosen, Micros::from_secs(1));
        };
        ["a", "b", "a"].into_iter().for_each(harm);
        let names = || trial.first().into_iter().map(|harmed| harmed.target.to_string()).collect::<Vec<_>>();
        assert_eq!(names(), ["limit|api|user=a", "limit|api|user=b"]);
        (0..2 * FIRST).for_each(|user| harm(&user.to_string()));
        assert_eq!(names().len(), FIRST);
    }

    #[test]
    fn the_last_three_hours_are_told_apart() {
        let trial = trial(1.0);
        let one = Outcomes::of(1, true, false);
        for minute in 0..MINUTES as u64 + 20 {
            trial.count(0, one, Micros::from_secs(60 * minute));
            trial.count(0, one, Micros::from_secs(60 * minute + 59));
        }
        let minutes = trial.minutes();
        let two = Outcomes { requested: 2, denied: 2, newly_denied: 2, newly_allowed: 0 };
        assert_eq!((minutes.len(), minutes[0]), (MINUTES, (Micros::from_secs(60 * 20), two)));
        assert_eq!(trial.outcomes().next().unwrap().requested, 2 * (MINUTES as u64 + 20));
    }
}
