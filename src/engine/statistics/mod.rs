//! Statistics per rule, under the names and labels of envoyproxy/ratelimit's Prometheus exporter.
//!
//! A rule's series is found when the rules are compiled, so a decision touches nothing but atomics. Where a rule puts
//! the caller's values into the labels (`detailed_metric`, `value_to_metric`, an override) the series has to be looked
//! up: in a map of the worker's own first. There are at most so many of these; the rest is one series named `other`.

mod series;
mod shedding;

pub(super) use series::{Series, Threshold};
pub(super) use shedding::{Outcome, Shedding};

use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

use opentelemetry::{KeyValue, metrics::Meter};

use self::series::Count;
use crate::{
    algorithm::Micros,
    metrics::{Counter, Striped, Totals, WorkerId, observe_counter, observe_gauge},
    rules::{Entry, FailurePolicy, Labels, Node, Rule, Segment},
};

/// How much may be counted apart.
#[derive(Clone, Debug)]
pub struct StatisticsSettings {
    /// Series that callers' values can make; the rest goes to `other`.
    pub max_dynamic_series: usize,
    /// From this share of a limit on, hits are near it.
    pub near_limit_ratio: f32,
}

type SeriesMap = HashMap<String, Arc<Series>>;
/// What tells rules apart, over reloads: their labels, and their classes, since a level may have the name of a class.
type Identity = (Labels, Vec<String>);
/// What is counted of a rule.
type Counted = (Arc<Series>, Option<Arc<Shedding>>);

/// All series.
pub struct Statistics {
    workers: usize,
    settings: StatisticsSettings,
    /// Of the rules in force.
    rules: Mutex<HashMap<Identity, Counted>>,
    dynamic: Mutex<SeriesMap>,
    /// `dynamic`, once it is full: it never changes again and needs no lock.
    full: OnceLock<SeriesMap>,
    /// Each worker's part of `dynamic`.
    seen: Striped<Mutex<SeriesMap>>,
    other: Arc<Series>,
    overflow: Counter,
    pub(super) unknown_domain: Counter,
    pub(super) unknown_plan: Counter,
    pub(super) global_shadow: Counter,
    /// Limits that the store could not decide, by what then did.
    pub(super) on_error: [Counter; FailurePolicy::ALL.len()],
}

impl Statistics {
    /// Nothing counted yet.
    #[must_use]
    pub fn new(workers: usize, settings: StatisticsSettings) -> Arc<Self> {
        Arc::new(Self {
            workers,
            settings,
            rules: Mutex::default(),
            dynamic: Mutex::default(),
            full: OnceLock::new(),
            seen: Striped::new(workers),
            other: Arc::new(Series::new(&["other".into(), "other".into()].into(), workers)),
            overflow: Counter::new(workers),
            unknown_domain: Counter::new(workers),
            unknown_plan: Counter::new(workers),
            global_shadow: Counter::new(workers),
            on_error: std::array::from_fn(|_| Counter::new(workers)),
        })
    }

    /// The series of a new set's rules, by their ids. Rules that were there before keep theirs; those that are gone
    /// lose it.
    pub(super) fn enter(&self, rules: &mut [Rule]) -> Vec<Counted> {
        let mut known = lock(&self.rules);
        let mut before = std::mem::take(&mut *known);
        known.reserve(rules.len());
        let counted = |rule: &mut Rule| {
            let id = (Arc::clone(&rule.labels), self.classes(rule));
            if let Some(counted) = known.get(&id) {
                return counted.clone();
            }
            let (id, counted) = before.remove_entry(&id).unwrap_or_else(|| {
                let shedding = || Shedding::new(Arc::clone(&rule.labels), id.1.iter().cloned(), self.workers);
                let sheds = rule.sheds || !rule.classes.is_empty();
                let shedding = sheds.then(|| Arc::new(shedding()));
                let series = Arc::new(Series::new(&rule.labels, self.workers));
                (id, (series, shedding))
            });
            // The same labels are in memory once, over reloads as well.
            rule.labels = Arc::clone(&id.0);
            known.insert(id, counted.clone());
            counted
        };
        rules.iter_mut().map(counted).collect()
    }

    /// The names under which a rule's classes are counted: those of the list, and the others.
    fn classes(&self, rule: &Rule) -> Vec<String> {
        let others = if rule.classes.is_empty() { "all" } else { "other" };
        match rule.sheds || !rule.classes.is_empty() {
            true => rule.classes.iter().map(|class| &**class).chain([others]).map(str::to_owned).collect(),
            false => Vec::new(),
        }
    }

    /// The near-limit threshold, in the peer's own arithmetic.
    pub(super) fn near(&self, limit: u64) -> u64 {
        (limit as f32 * self.settings.near_limit_ratio).floor() as u64
    }

    /// The series for labels that hold a caller's values.
    pub(super) fn dynamic(&self, worker: WorkerId, labels: &[String], hits: u64) -> Arc<Series> {
        let id = labels.join("\0");
        let mut seen = lock(self.seen.of(worker));
        if let Some(series) = seen.get(&id) {
            return Arc::clone(series);
        }
        match self.register(&id, labels) {
            Some(series) => {
                seen.insert(id, Arc::clone(&series));
                series
            }
            None => {
                self.overflow.add(worker, hits);
                Arc::clone(&self.other)
            }
        }
    }

    fn register(&self, id: &str, labels: &[String]) -> Option<Arc<Series>> {
        if let Some(full) = self.full.get() {
            return full.get(id).cloned();
        }
        let mut dynamic = lock(&self.dynamic);
        if let Some(series) = dynamic.get(id) {
            return Some(Arc::clone(series));
        }
        if dynamic.len() >= self.settings.max_dynamic_series {
            let _ = self.full.set(dynamic.clone());
            return None;
        }
        let labels: Labels = labels.iter().map(|label| Arc::from(label.as_str())).collect();
        let series = Arc::new(Series::new(&labels, self.workers));
        dynamic.insert(id.to_owned(), Arc::clone(&series));
        Some(series)
    }

    /// The locks are held for no longer than it takes to copy the references: a worker may want one of them.
    fn all(&self) -> Vec<Arc<Series>> {
        let mut all: Vec<Arc<Series>> = lock(&self.rules).values().map(|(series, _)| Arc::clone(series)).collect();
        all.extend(lock(&self.dynamic).values().cloned());
        all.push(Arc::clone(&self.other));
        all
    }

    /// The sums by the labels that the peer's mapping has, of the domain and two levels: two rules can have the same ones.
    fn collect(&self, count: Count) -> BTreeMap<Vec<Arc<str>>, u64> {
        let mut sums = BTreeMap::new();
        for series in self.all() {
            if let Some(value) = series.sum(count) {
                let labels = series.labels().iter().take(3).cloned().collect();
                *sums.entry(labels).or_default() += value;
            }
        }
        sums
    }

    /// Adds all of it up under the peer's names in statsd, which have every level.
    pub fn total(&self, totals: &mut Totals) {
        for series in self.all() {
            for count in Count::ALL {
                if let Some(value) = series.sum(count) {
                    let name = format!("ratelimit.service.rate_limit.{}.{}", series.labels().join("."), count.name());
                    *totals.entry(name).or_default() += value;
                }
            }
        }
        *totals.entry("ratelimit.service.global_shadow_mode".to_owned()).or_default() += self.global_shadow.get();
    }

    /// Shows everything to the meter. `now`: the clock by which requests are decided.
    pub fn observe(self: &Arc<Self>, meter: &Meter, now: impl Fn() -> Micros + Send + Sync + 'static) {
        for count in Count::ALL {
            let this = Arc::clone(self);
            let name = format!("ratelimit_service_rate_limit_{}", count.name());
            let counter = meter.u64_observable_counter(name).with_description(count.description());
            counter
                .with_callback(move |observer| {
                    for (labels, value) in this.collect(count) {
                        let names = ["domain", "key1", "key2"];
                        let labels: Vec<_> =
                            names.into_iter().zip(labels).map(|(name, label)| KeyValue::new(name, label)).collect();
                        observer.observe(value, &labels);
                    }
                })
                .build();
        }
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "sluicegate_metric_series_overflow_hits_total",
            "Hits counted in the series named other, because there were too many series already",
            move || this.overflow.get(),
        );
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "sluicegate_domain_not_found_total",
            "Descriptors of domains that no rule file names",
            move || this.unknown_domain.get(),
        );
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "sluicegate_plan_not_found_total",
            "Descriptors that name a plan that the rules have not: they have the default one",
            move || this.unknown_plan.get(),
        );
        self.observe_shedding(meter, now);
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "ratelimit_service_global_shadow_mode",
            "Requests over a limit that passed because of the global shadow mode",
            move || this.global_shadow.get(),
        );
        let this = Arc::clone(self);
        let on_error = meter.u64_observable_counter("sluicegate_on_error_total");
        on_error
            .with_description("Limits that the store could not decide, by the policy that then did")
            .with_callback(move |observer| {
                for policy in FailurePolicy::ALL {
                    let labels = [KeyValue::new("policy", policy.name())];
                    observer.observe(this.on_error[policy as usize].get(), &labels);
                }
            })
            .build();
        let this = Arc::clone(self);
        observe_gauge(meter, "sluicegate_metric_dynamic_series", "Series made from callers' values", move || {
            lock(&this.dynamic).len() as u64
        });
    }
}

/// What is shown of a class: its hits by outcome, and since when it has been shed.
type ByClass = BTreeMap<Vec<String>, ([u64; Outcome::ALL.len()], Option<Micros>)>;

impl Statistics {
    /// What is shed, by class.
    fn observe_shedding(self: &Arc<Self>, meter: &Meter, now: impl Fn() -> Micros + Send + Sync + 'static) {
        let this = Arc::clone(self);
        let hits = meter.u64_observable_counter("sluicegate_class_hits_total");
        hits.with_description("Hits by class and what became of them")
            .with_callback(move |observer| {
                for (labels, (hits, _)) in this.by_class(Micros::ZERO) {
                    for (outcome, hits) in Outcome::ALL.into_iter().zip(hits) {
                        let outcome = KeyValue::new("outcome", outcome.name());
                        observer.observe(hits, &[class_labels(&labels), vec![outcome]].concat());
                    }
                }
            })
            .build();
        let this = Arc::clone(self);
        let since = meter.u64_observable_gauge("sluicegate_shedding_since_timestamp_seconds");
        since
            .with_description("When a class began to be shed; 0 while it is not")
            .with_callback(move |observer| {
                for (labels, (_, since)) in this.by_class(now()) {
                    observer.observe(since.map_or(0, Micros::floor_secs), &class_labels(&labels));
                }
            })
            .build();
    }

    /// By class and labels: two rules can have the same ones, as in [`Statistics::collect`].
    fn by_class(&self, now: Micros) -> ByClass {
        let all: Vec<_> = lock(&self.rules).values().filter_map(|(_, shedding)| shedding.clone()).collect();
        let mut sums = ByClass::new();
        for shedding in all {
            for class in &shedding.classes {
                let levels = shedding.labels.iter().take(3).map(|label| series::sanitize(label));
                let labels = std::iter::once(class.name.clone()).chain(levels).collect();
                let (hits, since) = sums.entry(labels).or_default();
                Outcome::ALL.into_iter().zip(hits).for_each(|(outcome, sum)| *sum += class.hits(outcome));
                *since = (*since).into_iter().chain(class.since(now)).min();
            }
        }
        sums
    }
}

fn class_labels(labels: &[String]) -> Vec<KeyValue> {
    let names = ["class", "domain", "key1", "key2"].into_iter().zip(labels);
    names.map(|(name, label)| KeyValue::new(name, label.clone())).collect()
}

/// The labels of a rule that puts the caller's values into them.
pub(super) fn labels(domain: &str, entries: &[Entry<'_>], rule: &Rule, path: &[&Node]) -> Vec<String> {
    let shared = path.iter().any(|node| matches!(node.segment, Segment::Shared(_)));
    let level = |(entry, node): (&Entry<'_>, &&Node)| match &node.segment {
        Segment::Shared(_) => node.label(),
        _ if rule.detailed_metric && (!shared || !entry.value.is_empty()) => format!("{}_{}", entry.key, entry.value),
        Segment::Any | Segment::Pattern(_) if node.value_to_metric => override_label(entry),
        _ => node.label(),
    };
    // Who asks is no level, or there would be as many series as requests; a plan has its label from the rule.
    let levels = entries.iter().zip(path).filter(|(_, node)| node.modifier.is_none()).map(level);
    let plan = rule.plan.as_ref().and_then(|_| rule.labels.last().map(ToString::to_string));
    std::iter::once(domain.to_owned()).chain(levels).chain(plan).collect()
}

/// The labels of an override: every level with its value.
pub(super) fn override_labels(domain: &str, entries: &[Entry<'_>]) -> Vec<String> {
    std::iter::once(domain.to_owned()).chain(entries.iter().map(override_label)).collect()
}

fn override_label(entry: &Entry<'_>) -> String {
    if entry.value.is_empty() { entry.key.to_owned() } else { format!("{}_{}", entry.key, entry.value) }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
