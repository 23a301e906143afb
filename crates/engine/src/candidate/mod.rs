//! [`Candidate`]: candidate rules, which are evaluated on a share of the real requests with counters of their own.
//! Their decisions are counted and never returned to a caller.
//!
//! The share is a share of the counters, not of the requests. Every hit of a sampled counter is evaluated, so its
//! decisions are those that the rules would make in force. A hash of the counter's name selects the sampled counters,
//! and all instances select the same ones.

mod outcomes;

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use siphasher::sip::SipHasher13;
use smallvec::SmallVec;

pub use self::outcomes::Outcomes;
use sluicegate_algorithm::Micros;
use sluicegate_metrics::{Instrument, Label, Meter, Striped, WorkerId};
use sluicegate_rules::{Entry, Lookup, Rule, RuleSet};

use self::outcomes::Tally;
use super::{
    Descriptor, Overrides, Request, Resources, Snapshot, Statistics, StatisticsSettings, TopEntities, Verdict, key,
    overrides::Target, statistics::rule_labels,
};

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

/// An entity with hits that the candidate rules deny and the rules in force allowed.
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
    pub(super) rules: Arc<ArcSwap<Snapshot>>,
    pub(super) statistics: Arc<Statistics>,
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
    queues: Striped<Mutex<Vec<QueuedRequest>>>,
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
        self.minutes.lock().iter().copied().collect()
    }

    /// Returns the first newly denied entities.
    #[must_use]
    pub fn first_newly_denied(&self) -> Vec<NewlyDenied> {
        self.first_denied.lock().clone()
    }

    /// Returns the number of requests skipped because too many were waiting for the store.
    #[must_use]
    pub fn skipped(&self) -> u64 {
        self.skipped.load(Relaxed)
    }

    /// Queues a request that the rules in force have decided, so that no caller waits for the store.
    ///
    /// Returns the time after which the worker has to call [`Engine::evaluate_queued`](super::Engine::evaluate_queued),
    /// or `None` if this request needs no other call.
    pub fn queue(&self, worker: WorkerId, request: &Request<'_>, verdict: &Verdict, now: Micros) -> Option<Duration> {
        let sampled = self.sample_descriptors(request, verdict);
        if sampled.is_empty() {
            return None;
        }
        if self.waiting.fetch_add(1, Relaxed) >= MAX_WAITING {
            self.waiting.fetch_sub(1, Relaxed);
            self.skipped.fetch_add(1, Relaxed);
            return None;
        }
        let mut queue = self.queues.of(worker).lock();
        queue.push(QueuedRequest::new(request, sampled, now));
        match queue.len() {
            1 => Some(MAX_BATCH_DELAY),
            MAX_BATCH => Some(Duration::ZERO),
            _ => None,
        }
    }

    /// Removes the requests that a worker has queued. [`Self::forget_queued`] must follow when they are decided.
    pub(super) fn take_queued(&self, worker: WorkerId) -> Vec<QueuedRequest> {
        std::mem::take(&mut *self.queues.of(worker).lock())
    }

    /// Makes room for as many requests as were decided.
    pub(super) fn forget_queued(&self, requests: usize) {
        self.waiting.fetch_sub(requests, Relaxed);
    }

    /// Records the verdict of the candidate rules on sampled descriptors.
    pub(super) fn record_verdict(
        &self,
        worker: WorkerId,
        request: &Request<'_>,
        verdict: &Verdict,
        sampled: &[SampledDescriptor],
        now: Micros,
    ) {
        for ((descriptor, status), sampled) in request.descriptors.iter().zip(&verdict.statuses).zip(sampled) {
            if descriptor.refund || descriptor.hits == 0 {
                continue;
            }
            let outcomes = Outcomes::new(descriptor.hits, status.is_over(), sampled.denied);
            self.record(sampled.rule, outcomes, now);
            if outcomes.newly_denied > 0 {
                self.record_newly_denied(worker, request.domain, descriptor, sampled, now);
            }
        }
    }

    fn record(&self, rule: usize, outcomes: Outcomes, now: Micros) {
        if let Some(tally) = self.tallies.get(rule) {
            tally.add(outcomes);
        }
        let minute = Micros::from_secs(now.floor_secs() / 60 * 60);
        let mut minutes = self.minutes.lock();
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
        let rule = snapshot.rule_set().rules().get(sampled.rule).map(Rule::policy);
        self.newly_denied.record(worker, domain, descriptor, rule, false, now);
        let mut first = self.first_denied.lock();
        if first.len() < MAX_FIRST_DENIED {
            let target = Target::of_descriptor(domain, &descriptor.entries);
            if !first.iter().any(|newly_denied| newly_denied.target == target) {
                let rule = match rule {
                    Some(rule) => Arc::clone(rule),
                    None => "".into(),
                };
                first.push(NewlyDenied { target, rule, at: now });
            }
        }
    }

    /// Returns the descriptors with sampled counters.
    pub(super) fn sample_descriptors(
        &self,
        request: &Request<'_>,
        verdict: &Verdict,
    ) -> SmallVec<[SampledDescriptor; 2]> {
        let snapshot = self.rules.load();
        let rules = snapshot.rule_set();
        let shard_by = key::shard_by(rules, request.domain);
        let mut sampled = SmallVec::new();
        for (index, (descriptor, status)) in request.descriptors.iter().zip(&verdict.statuses).enumerate() {
            let mut name = Vec::new();
            let entries = descriptor.entries.as_slice();
            let rule = match rules.find(request.domain, entries.iter().copied()) {
                Lookup::Rule(Rule { limit: Some(limit), id, .. }, path) => {
                    let entries = &entries[..entries.len() - Rule::modifier_count(&path)];
                    let counted_by = limit.algorithm().into();
                    name = key::name("", request.domain, shard_by, entries, &path, counted_by, None);
                    *id
                }
                // Both sets of rules allow the descriptor, so there is nothing to compare.
                _ if !status.is_over() => continue,
                Lookup::Rule(rule, _) => rule.id,
                _ => self.tallies.len() - 1,
            };
            if name.is_empty() {
                append_text(&mut name, request.domain);
                for entry in entries {
                    append_text(&mut name, entry.key);
                    append_text(&mut name, entry.value);
                }
            }
            if u64::from(SipHasher13::new().hash(&name) as u32) < self.share {
                sampled.push(SampledDescriptor { index, rule, denied: status.is_over() });
            }
        }
        sampled
    }

    /// Registers the metric of the outcomes. `current` returns the candidate to report.
    pub fn observe_metrics(current: impl Fn() -> Option<Arc<Self>> + Send + Sync + 'static, meter: &dyn Meter) {
        meter.register(Instrument::gauge(
            "sluicegate_candidate_hits",
            "Hits evaluated by the candidate rules, by outcome; reset to 0 by each new candidate",
            move |observer| {
                let Some(candidate) = current() else {
                    return;
                };
                let snapshot = candidate.rules.load();
                for (rule, outcomes) in snapshot.rule_set().rules().iter().zip(candidate.outcomes()) {
                    if outcomes.requested == 0 {
                        continue;
                    }
                    let Outcomes { requested, denied, newly_denied, newly_allowed } = outcomes;
                    for (outcome_name, hits) in [
                        ("requested", requested),
                        ("denied", denied),
                        ("newly_denied", newly_denied),
                        ("newly_allowed", newly_allowed),
                    ] {
                        let outcome = Label::new("outcome", outcome_name);
                        observer.observe(hits, rule_labels(rule.labels.iter().cloned()).chain([outcome]));
                    }
                }
            },
        ));
    }
}

/// A descriptor with a sampled counter.
pub(super) struct SampledDescriptor {
    pub(super) index: usize,
    rule: usize,
    /// Whether the rules in force denied it.
    denied: bool,
}

/// An owned copy of the sampled descriptors of a request, for later evaluation.
pub(super) struct QueuedRequest {
    domain: String,
    descriptors: Vec<QueuedDescriptor>,
    pub(super) sampled: SmallVec<[SampledDescriptor; 2]>,
    pub(super) at: Micros,
}

/// An owned copy of a descriptor.
struct QueuedDescriptor {
    entries: Vec<(String, String)>,
    hits: u64,
    refund: bool,
}

impl QueuedRequest {
    fn new(request: &Request<'_>, sampled: SmallVec<[SampledDescriptor; 2]>, at: Micros) -> Self {
        let descriptors =
            sampled.iter().map(|sampled| QueuedDescriptor::new(&request.descriptors[sampled.index])).collect();
        Self { domain: request.domain.to_owned(), descriptors, sampled, at }
    }

    pub(super) fn request(&self) -> Request<'_> {
        let descriptors = self.descriptors.iter().map(|descriptor| Descriptor {
            entries: descriptor.entries.iter().map(|(key, value)| Entry { key, value }).collect(),
            hits: descriptor.hits,
            refund: descriptor.refund,
            requested_limit: None,
        });
        Request { domain: &self.domain, descriptors: descriptors.collect(), feedback: Vec::new() }
    }
}

impl QueuedDescriptor {
    fn new(descriptor: &Descriptor<'_>) -> Self {
        Self {
            entries: descriptor.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.to_owned())).collect(),
            hits: descriptor.hits,
            refund: descriptor.refund,
        }
    }
}

/// Appends a text after its length, so that different lists of texts never become the same bytes.
fn append_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
    bytes.extend_from_slice(text.as_bytes());
}

#[cfg(test)]
mod tests;
