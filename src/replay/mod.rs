//! Recorded requests asked again of other rules: in virtual time, by the real engine, with counters in memory.

mod page;
mod series;
mod suggest;

pub use page::page;
pub use suggest::{Suggestion, Suggestions};

use std::{collections::HashMap, hash::BuildHasher, sync::Arc, thread};

use arc_swap::ArcSwap;
use foldhash::fast::FixedState;
use futures_util::FutureExt;
use smallvec::SmallVec;

use self::series::Series;
use crate::{
    engine::{Engine, Request, Resources, Settings, Snapshot, Statistics, StatisticsSettings, Status, Verdict},
    metrics::WorkerId,
    rules::{Entry, RuleSet},
    store::{AnyStore, Memory, memory},
    traffic::RecordedRequest,
};

/// What became of hits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// All of them.
    pub requested: u64,
    /// Those that the rules refuse.
    pub denied: u64,
    /// Of these, those that passed before.
    pub newly_denied: u64,
    /// Those that were refused before, and pass.
    pub newly_allowed: u64,
}

/// What became of one entity.
#[derive(Clone, Debug, Default)]
pub struct Entity {
    /// `user=bob|path=/x`.
    pub name: Box<str>,
    /// Of its hits.
    pub hits: Hits,
}

/// What one rule did.
#[derive(Default)]
pub struct RuleHits {
    /// Of all hits.
    pub hits: Hits,
    /// Descriptors that were asked.
    pub asked: u64,
    /// And each of those that differ.
    pub entities: HashMap<u64, Entity, FixedState>,
    /// Over time.
    series: Series,
}

impl RuleHits {
    /// Entities of which anything was refused.
    #[must_use]
    pub fn touched(&self) -> usize {
        self.entities.values().filter(|entity| entity.hits.denied > 0).count()
    }

    /// The first so many by what is refused of them.
    #[must_use]
    pub fn harmed(&self, most: usize) -> Vec<&Entity> {
        let mut harmed: Vec<_> = self.entities.values().filter(|entity| entity.hits.denied > 0).collect();
        harmed.sort_by(|one, other| other.hits.denied.cmp(&one.hits.denied).then_with(|| one.name.cmp(&other.name)));
        harmed.truncate(most);
        harmed
    }
}

/// Rules, and an engine that decides by them.
struct Side {
    engine: Engine,
}

impl Side {
    fn new(rules: RuleSet) -> Self {
        let settings = StatisticsSettings { max_dynamic_series: 0, near_limit_ratio: 1.0 };
        let statistics = Statistics::new(1, settings);
        let snapshot = Snapshot::new(rules, &statistics, &Resources::default());
        let memory = || Arc::new(Memory::new(&memory::Settings { max_counters: 100_000_000 }));
        let engine = Engine {
            worker: WorkerId(0),
            scope: "",
            store: AnyStore::Memory(memory()),
            local: memory(),
            rules: Arc::new(ArcSwap::from_pointee(snapshot)),
            statistics,
            top: None,
            settings: Arc::new(Settings::default()),
        };
        Self { engine }
    }

    /// `None` for what cannot be asked. In memory nothing waits.
    fn decide(&self, RecordedRequest { at, request, .. }: &RecordedRequest<'_>) -> Option<Verdict> {
        if request.domain.is_empty() || request.descriptors.is_empty() {
            return None;
        }
        self.engine.decide(request, *at).now_or_never()?.ok()
    }

    fn decide_all(&self, requests: &[RecordedRequest<'_>]) -> Vec<Option<Verdict>> {
        requests.iter().map(|recorded| self.decide(recorded)).collect()
    }
}

/// What was said before.
struct Baseline {
    refused: bool,
    /// By descriptor.
    over: SmallVec<[bool; 2]>,
}

impl Baseline {
    fn of_verdict(verdict: &Verdict) -> Self {
        Self { refused: verdict.is_denied(), over: verdict.statuses.iter().map(Status::is_over).collect() }
    }

    fn recorded(recorded: &RecordedRequest<'_>) -> Option<Self> {
        Some(Self { refused: !recorded.allowed?, over: recorded.over.clone() })
    }
}

/// One run.
pub struct Replay {
    rules: Side,
    against: Option<Side>,
    /// By the id of the rule; the last is of descriptors without one.
    pub of_rules: Vec<RuleHits>,
    /// Requests.
    pub requests: u64,
    /// Those that are refused, by the rules and before.
    pub refused: [u64; 2],
    /// Requests of which it is not known what was said before: they count as let pass.
    pub unknown: u64,
    /// Requests that cannot be asked: without a domain, or without descriptors.
    pub skipped: u64,
    series: Series,
}

impl Replay {
    /// `against`: what is before; else what was said when the requests were recorded.
    #[must_use]
    pub fn new(rules: RuleSet, against: Option<RuleSet>) -> Self {
        let of_rules = (0..=rules.rules().len()).map(|_| RuleHits::default()).collect();
        let (rules, against) = (Side::new(rules), against.map(Side::new));
        let (requests, refused, unknown, skipped, series) = (0, [0; 2], 0, 0, Series::default());
        Self { rules, against, of_rules, requests, refused, unknown, skipped, series }
    }

    /// Asks some again. They come in the order of time.
    pub fn ask(&mut self, requests: &[RecordedRequest<'_>]) {
        let (rules, against) = (&self.rules, &self.against);
        let (verdicts, before) = thread::scope(|scope| {
            // The two know nothing of each other, and a machine has more than one core.
            let before = against.as_ref().map(|side| scope.spawn(|| side.decide_all(requests)));
            (rules.decide_all(requests), before.map(|before| before.join().unwrap_or_default()))
        });
        for (place, (recorded, verdict)) in requests.iter().zip(&verdicts).enumerate() {
            let before = match &before {
                Some(before) => before.get(place).and_then(Option::as_ref).map(Baseline::of_verdict),
                None => Baseline::recorded(recorded),
            };
            match verdict {
                Some(verdict) => self.take(recorded, verdict, before.as_ref()),
                None => self.skipped += 1,
            }
        }
    }

    fn take(&mut self, recorded: &RecordedRequest<'_>, verdict: &Verdict, before: Option<&Baseline>) {
        self.requests += 1;
        self.refused[0] += u64::from(verdict.is_denied());
        match before {
            Some(before) => self.refused[1] += u64::from(before.refused),
            None => self.unknown += 1,
        }
        self.series.add(recorded.at, 1, verdict.is_denied());
        self.count(recorded, verdict, before.map(|before| before.over.as_slice()));
    }

    fn count(&mut self, recorded: &RecordedRequest<'_>, verdict: &Verdict, before: Option<&[bool]>) {
        let RecordedRequest { at, request, .. } = recorded;
        let snapshot = self.rules.engine.rules.load();
        for (place, (descriptor, status)) in request.descriptors.iter().zip(&verdict.statuses).enumerate() {
            if descriptor.refund || descriptor.hits == 0 {
                continue;
            }
            let rule = snapshot.rules().rule_for(request.domain, &descriptor.entries);
            let id = rule.map_or(self.of_rules.len() - 1, |rule| rule.id);
            let (hits, refused) = (descriptor.hits, status.is_over());
            let was_refused = before.and_then(|before| before.get(place).copied()).unwrap_or_default();
            let when = |is: bool| if is { hits } else { 0 };
            let Some(of_rule) = self.of_rules.get_mut(id) else {
                continue;
            };
            of_rule.asked += 1;
            let entity = of_rule.entities.entry(identity(request, &descriptor.entries)).or_default();
            if entity.name.is_empty() {
                entity.name = name(&descriptor.entries);
            }
            for sum in [&mut of_rule.hits, &mut entity.hits] {
                sum.requested += hits;
                sum.denied += when(refused);
                sum.newly_denied += when(refused && !was_refused);
                sum.newly_allowed += when(!refused && was_refused);
            }
            of_rule.series.add(*at, hits, refused);
        }
    }

    /// The rules.
    #[must_use]
    pub fn rules(&self) -> Arc<Snapshot> {
        self.rules.engine.rules.load_full()
    }
}

fn identity(request: &Request<'_>, entries: &[Entry<'_>]) -> u64 {
    let pairs = entries.iter().map(|Entry { key, value }| (*key, *value));
    let mut hasher = FixedState::default().build_hasher();
    std::hash::Hash::hash(request.domain, &mut hasher);
    pairs.for_each(|pair| std::hash::Hash::hash(&pair, &mut hasher));
    std::hash::Hasher::finish(&hasher)
}

fn name(entries: &[Entry<'_>]) -> Box<str> {
    let entries: Vec<_> = entries.iter().map(|Entry { key, value }| format!("{key}={value}")).collect();
    entries.join("|").into()
}
