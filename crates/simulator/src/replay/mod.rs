//! [`Replay`]: evaluates recorded requests against other rules, with the real engine, in virtual time and with counters
//! in memory.

mod page;
mod series;
mod suggest;

pub use page::page;
pub use series::Series;
pub use suggest::{Suggestion, Suggestions};

use std::{
    collections::HashMap,
    hash::{BuildHasher, Hash, Hasher},
    sync::{Arc, LazyLock},
    thread,
};

use foldhash::fast::RandomState;
use sluicegate_engine::{
    Engine, Micros, Outcomes, Overrides, Request, Snapshot, Statistics, StatisticsSettings, Status, Verdict,
};
use sluicegate_rules::{Entry, RuleSet};
use sluicegate_store::{Memory, memory};
use smallvec::SmallVec;

use crate::traffic::RecordedRequest;

/// Hash function for entities, random for each process, so that callers cannot choose values with the same hash.
static HASHES: LazyLock<RandomState> = LazyLock::new(RandomState::default);

/// The hits of one entity.
#[derive(Clone, Debug, Default)]
pub struct Entity {
    /// The entries of the entity, such as `user=bob|path=/x`.
    pub name: Box<str>,
    /// The hits of the entity.
    pub hits: Outcomes,
}

/// The hits of one rule.
#[derive(Default)]
pub struct RuleHits {
    /// All hits.
    pub hits: Outcomes,
    /// Number of descriptors decided.
    pub descriptors: u64,
    /// The entities by the hash of domain and entries.
    pub entities: HashMap<u64, Entity, RandomState>,
    /// Allowed and denied hits over time.
    pub series: Series,
}

impl RuleHits {
    /// Returns the number of entities with denied hits.
    #[must_use]
    pub fn entities_denied(&self) -> usize {
        self.entities.values().filter(|entity| entity.hits.denied > 0).count()
    }

    /// Returns up to `max` entities with the most denied hits, in descending order.
    #[must_use]
    pub fn most_denied(&self, max: usize) -> Vec<&Entity> {
        let mut entities: Vec<_> = self.entities.values().filter(|entity| entity.hits.denied > 0).collect();
        entities.sort_by(|one, other| other.hits.denied.cmp(&one.hits.denied).then_with(|| one.name.cmp(&other.name)));
        entities.truncate(max);
        entities
    }
}

/// An engine that decides by one set of rules.
struct Evaluator {
    engine: Engine<Arc<Memory>>,
}

impl Evaluator {
    fn new(rules: RuleSet, overrides: Option<(&Overrides, Micros)>) -> Self {
        let settings = StatisticsSettings { max_dynamic_series: 0, near_limit_ratio: 1.0 };
        let statistics = Statistics::new(1, settings);
        let engine = Engine::in_memory(rules, statistics, &memory::Settings { max_counters: 100_000_000 });
        if let Some((overrides, now)) = overrides {
            let snapshot = engine.rules.load().with(overrides.clone(), None, now);
            engine.rules.store(Arc::new(snapshot));
        }
        Self { engine }
    }

    /// Decides a request, or returns `None` if it is invalid. With counters in memory, no decision waits.
    fn decide(&self, RecordedRequest { at, request, .. }: &RecordedRequest<'_>) -> Option<Verdict> {
        if request.domain.is_empty() || request.descriptors.is_empty() {
            return None;
        }
        self.engine.decide_in(&self.engine.store, request, *at).ok()
    }

    fn decide_all(&self, requests: &[RecordedRequest<'_>]) -> Vec<Option<Verdict>> {
        requests.iter().map(|recorded| self.decide(recorded)).collect()
    }
}

/// The decision about a request that the replay is compared with.
struct Baseline {
    denied: bool,
    /// Whether each descriptor was denied.
    over: SmallVec<[bool; 2]>,
}

impl Baseline {
    fn from_verdict(verdict: &Verdict) -> Self {
        Self { denied: verdict.is_denied(), over: verdict.statuses.iter().map(Status::is_over).collect() }
    }

    fn from_recorded(recorded: &RecordedRequest<'_>) -> Option<Self> {
        Some(Self { denied: !recorded.allowed?, over: recorded.over.clone() })
    }
}

/// One replay of recorded requests.
pub struct Replay {
    rules: Evaluator,
    baseline: Option<Evaluator>,
    /// The hits of each rule by its id. The last element is for descriptors without a rule.
    pub by_rule: Vec<RuleHits>,
    /// Number of decided requests, without the skipped ones.
    pub requests: u64,
    /// Number of requests denied by the rules, and by the baseline.
    pub denied: [u64; 2],
    /// Number of requests without a baseline decision. They count as allowed by the baseline.
    pub unknown: u64,
    /// Number of invalid requests: without a domain or without descriptors.
    pub skipped: u64,
    /// Allowed and denied requests over time.
    pub series: Series,
    has_match: bool,
}

impl Replay {
    /// Creates a replay. The baseline is the decision by `baseline`, or the recorded decision if that is `None`.
    #[must_use]
    pub fn new(rules: RuleSet, baseline: Option<RuleSet>) -> Self {
        let rules = Evaluator::new(rules, None);
        let baseline = baseline.map(|rules| Evaluator::new(rules, None));
        Self::of(rules, baseline)
    }

    /// Creates a replay of rules with overrides, as they apply at `now`.
    #[must_use]
    pub fn with_overrides(rules: (RuleSet, &Overrides), baseline: Option<(RuleSet, &Overrides)>, now: Micros) -> Self {
        let (rules, overrides) = rules;
        let rules = Evaluator::new(rules, Some((overrides, now)));
        let baseline = baseline.map(|(rules, overrides)| Evaluator::new(rules, Some((overrides, now))));
        Self::of(rules, baseline)
    }

    fn of(rules: Evaluator, baseline: Option<Evaluator>) -> Self {
        let rule_count = rules.engine.rules.load().rule_set().rules().len();
        let by_rule = (0..=rule_count).map(|_| RuleHits::default()).collect();
        Self {
            rules,
            baseline,
            by_rule,
            requests: 0,
            denied: [0; 2],
            unknown: 0,
            skipped: 0,
            series: Series::default(),
            has_match: false,
        }
    }

    /// Returns whether at least one replayed descriptor matched a rule, or had a limit of its own.
    #[must_use]
    pub const fn has_match(&self) -> bool {
        self.has_match
    }

    /// Replays requests, which must be in chronological order over all calls.
    pub fn process(&mut self, requests: &[RecordedRequest<'_>]) {
        let (verdicts, baseline) = thread::scope(|scope| {
            // The two evaluations are independent, so they run in parallel.
            let baseline = self.baseline.as_ref().map(|evaluator| scope.spawn(|| evaluator.decide_all(requests)));
            let verdicts = self.rules.decide_all(requests);
            let baseline = baseline.map(|thread| thread.join().unwrap_or_default());
            (verdicts, baseline)
        });
        for (index, recorded) in requests.iter().enumerate() {
            let Some(verdict) = &verdicts[index] else {
                self.skipped += 1;
                continue;
            };
            let baseline = match &baseline {
                Some(verdicts) => verdicts.get(index).and_then(Option::as_ref).map(Baseline::from_verdict),
                None => Baseline::from_recorded(recorded),
            };
            self.record(recorded, verdict, baseline.as_ref());
        }
    }

    fn record(&mut self, recorded: &RecordedRequest<'_>, verdict: &Verdict, baseline: Option<&Baseline>) {
        self.requests += 1;
        self.denied[0] += u64::from(verdict.is_denied());
        match baseline {
            Some(baseline) => self.denied[1] += u64::from(baseline.denied),
            None => self.unknown += 1,
        }
        self.series.add(recorded.at, 1, verdict.is_denied());
        self.count(recorded, verdict, baseline.map(|baseline| baseline.over.as_slice()));
    }

    fn count(&mut self, recorded: &RecordedRequest<'_>, verdict: &Verdict, baseline: Option<&[bool]>) {
        let RecordedRequest { at, request, .. } = recorded;
        let snapshot = self.rules.engine.rules.load();
        for (index, (descriptor, status)) in request.descriptors.iter().zip(&verdict.statuses).enumerate() {
            let rule = snapshot.rule_set().rule_for(request.domain, &descriptor.entries);
            self.has_match |= rule.is_some() || status.limit.is_some();
            if descriptor.refund || descriptor.hits == 0 {
                continue;
            }
            let id = match rule {
                Some(rule) => rule.id,
                None => self.by_rule.len() - 1,
            };
            let hits = descriptor.hits;
            let is_denied = status.is_over();
            let was_denied = baseline.and_then(|baseline| baseline.get(index).copied()).unwrap_or_default();
            let Some(rule_hits) = self.by_rule.get_mut(id) else {
                continue;
            };
            rule_hits.descriptors += 1;
            let entity = rule_hits.entities.entry(identity(request, &descriptor.entries)).or_default();
            if entity.name.is_empty() {
                entity.name = name(&descriptor.entries);
            }
            let outcome = Outcomes::new(hits, is_denied, was_denied);
            entity.hits.add(outcome);
            rule_hits.hits.add(outcome);
            rule_hits.series.add(*at, hits, is_denied);
        }
    }

    /// Returns the snapshot of the rules.
    #[must_use]
    pub fn rules(&self) -> Arc<Snapshot> {
        self.rules.engine.rules.load_full()
    }
}

fn identity(request: &Request<'_>, entries: &[Entry<'_>]) -> u64 {
    let mut hasher = HASHES.build_hasher();
    request.domain.hash(&mut hasher);
    for Entry { key, value } in entries {
        key.hash(&mut hasher);
        value.hash(&mut hasher);
    }
    hasher.finish()
}

fn name(entries: &[Entry<'_>]) -> Box<str> {
    let entries: Vec<_> = entries.iter().map(|Entry { key, value }| format!("{key}={value}")).collect();
    entries.join("|").into()
}

#[cfg(test)]
mod tests {
    use sluicegate_engine::Descriptor;
    use sluicegate_rules::{Options, SourceFile, compile};
    use smallvec::smallvec;

    use super::*;

    /// A peek and a requested limit are no hits of a rule.
    #[test]
    fn a_descriptor_with_a_rule_or_its_own_limit_is_a_match() {
        let text = "domain: api\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 3}}]\n";
        let has_match = |key, hits, requested_limit| {
            let file = SourceFile { name: "api.yaml".into(), text: text.into() };
            let (rules, _) = compile(&[file], Options::default()).unwrap();
            let entries = smallvec![Entry { key, value: "bob" }];
            let descriptor = Descriptor { entries, hits, refund: false, requested_limit };
            let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: Vec::new() };
            let mut replay = Replay::new(rules, None);
            replay.process(&[RecordedRequest { at: Micros::new(1), request, allowed: None, over: smallvec![] }]);
            replay.has_match()
        };
        assert!(has_match("user", 1, None) && has_match("user", 0, None));
        assert!(!has_match("path", 1, None));
        let limit = sluicegate_rules::CustomLimit::read("5/hour", Options::default()).unwrap().limit;
        assert!(has_match("path", 1, Some(Box::new(limit))));
    }

    #[test]
    fn hits_are_counted_by_rule_and_entity_and_compared_with_the_recorded_decisions() {
        let text = "domain: api\ndescriptors: [{key: user, rate_limit: {unit: hour, requests_per_unit: 3}}]\n";
        let (rules, _) =
            compile(&[SourceFile { name: "api.yaml".into(), text: text.into() }], Options::default()).unwrap();
        let mut replay = Replay::new(rules, None);
        let recorded = |key, value, hits, allowed| {
            let entries = smallvec![Entry { key, value }];
            let descriptor = Descriptor { entries, hits, refund: false, requested_limit: None };
            let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: Vec::new() };
            let over = smallvec![allowed == Some(false)];
            RecordedRequest { at: Micros::from_secs(1_000_000), request, allowed, over }
        };
        let mut refund = recorded("user", "eve", 1, Some(true));
        refund.request.descriptors[0].refund = true;
        let mut without_domain = recorded("user", "eve", 1, Some(true));
        without_domain.request.domain = "";
        let mut without_descriptors = recorded("user", "eve", 1, Some(true));
        without_descriptors.request.descriptors.clear();
        replay.process(&[
            recorded("user", "bob", 2, Some(true)),
            recorded("user", "bob", 2, Some(true)),
            recorded("user", "bob", 2, Some(false)),
            recorded("user", "carol", 1, Some(false)),
            recorded("user", "dave", 5, None),
            recorded("path", "/x", 5, Some(true)),
            recorded("user", "eve", 0, Some(true)),
            refund,
            without_domain,
            without_descriptors,
        ]);
        assert_eq!((replay.requests, replay.denied, replay.unknown, replay.skipped), (8, [3, 2], 1, 2));
        assert_eq!(replay.series.sums, [[5, 3]]);
        let [users, others] = replay.by_rule.as_slice() else { panic!("{} rules", replay.by_rule.len()) };
        assert_eq!(users.hits, Outcomes { requested: 12, denied: 9, newly_denied: 7, newly_allowed: 1 });
        assert_eq!((users.descriptors, users.entities.len(), users.entities_denied()), (5, 3, 2));
        let most_denied = |max| {
            let entities = users.most_denied(max).into_iter();
            entities.map(|entity| (&*entity.name, entity.hits.requested, entity.hits.denied)).collect::<Vec<_>>()
        };
        assert_eq!(most_denied(10), [("user=dave", 5, 5), ("user=bob", 6, 4)]);
        assert_eq!(most_denied(1), [("user=dave", 5, 5)]);
        assert_eq!((others.descriptors, others.hits), (1, Outcomes { requested: 5, ..Outcomes::default() }));
    }
}
