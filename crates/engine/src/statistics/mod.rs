//! [`Statistics`]: hits per rule, with the names and labels of envoyproxy/ratelimit's Prometheus exporter.
//!
//! The series of a rule is assigned when a set of rules is loaded, so a decision only updates atomics. If a rule puts
//! the caller's values into the labels (`detailed_metric`, `value_to_metric`, an override), the series is looked up,
//! first in a map of the worker. The number of such series is limited; hits for which there is no room are counted in
//! one series named `other`.

mod series;
mod shedding;
mod totals;

pub(super) use series::{CountContext, Series};
pub(super) use shedding::{Outcome, Shedding};
pub use totals::{ClassTotals, HitTotals, RuleHits, RuleTotals};

use std::{
    borrow::Cow,
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, OnceLock},
};

use parking_lot::Mutex;
use sluicegate_algorithm::Micros;
use sluicegate_metrics::{Counter, Instrument, Label, LabelValue, Meter, Registrar, Striped, Totals, WorkerId};
use sluicegate_rules::{Entry, FailurePolicy, Labels, Node, Rule, Segment};

use self::series::{Count, REFUNDED_HITS};
use crate::{UnmatchedDescriptors, bounded};

/// Settings of the statistics.
#[derive(Clone, Debug)]
pub struct StatisticsSettings {
    /// Maximum number of series created from callers' values, one for each count of each set of labels. Further hits are
    /// counted as `other`.
    pub max_dynamic_series: usize,
    /// Share of a limit above which hits are near the limit.
    pub near_limit_ratio: f32,
}

type SeriesMap = HashMap<String, Arc<Series>>;

/// Identifies a rule across reloads.
#[derive(PartialEq, Eq, Hash)]
struct RuleKey {
    labels: Labels,
    /// The names under which the rule's classes are counted. They are not appended to the labels, because a level may
    /// have the name of a class.
    classes: Box<[String]>,
    dynamic_labels: bool,
}

/// Returns the series of the rules without dynamic labels.
fn exported(rules: &HashMap<RuleKey, RuleStatistics>) -> impl Iterator<Item = &Arc<Series>> {
    rules.iter().filter(|(key, _)| !key.dynamic_labels).map(|(_, rule)| &rule.series)
}

/// The statistics of one rule.
#[derive(Clone)]
pub(super) struct RuleStatistics {
    /// The hits of the rule. Not exported for rules with dynamic labels, whose hits have series of their own.
    pub(super) series: Arc<Series>,
    /// Hits per class, for rules with classes and rules that shed.
    pub(super) shedding: Option<Arc<Shedding>>,
}

impl RuleStatistics {
    fn new(rule: &Rule, classes: &[String], workers: usize) -> Self {
        let shedding = if is_counted_by_class(rule) {
            Some(Arc::new(Shedding::new(Arc::clone(&rule.labels), classes.iter().cloned(), workers)))
        } else {
            None
        };
        Self { series: Arc::new(Series::new(&rule.labels, workers)), shedding }
    }
}

/// Returns whether the hits of a rule are also counted by class: those of rules with classes and of rules that shed.
fn is_counted_by_class(rule: &Rule) -> bool {
    rule.sheds || !rule.classes.is_empty()
}

/// Returns the names under which a rule's classes are counted: the listed classes, then one name for all others.
fn class_names(rule: &Rule) -> Vec<String> {
    if !is_counted_by_class(rule) {
        return Vec::new();
    }
    let others = if rule.classes.is_empty() { "all" } else { "other" };
    let mut names: Vec<String> = rule.classes.iter().map(ToString::to_string).collect();
    names.push(others.to_owned());
    names
}

/// Statistics by rule.
pub struct Statistics {
    workers: usize,
    settings: StatisticsSettings,
    /// Statistics of the rules in force.
    rules: Mutex<HashMap<RuleKey, RuleStatistics>>,
    /// Series created from callers' values.
    dynamic: Mutex<SeriesMap>,
    /// A copy of `dynamic` once that is full. It never changes, so readers need no lock.
    full: OnceLock<SeriesMap>,
    /// The series of `dynamic` that each worker has used.
    worker_series: Striped<Mutex<SeriesMap>>,
    other: Arc<Series>,
    /// Labels of rules with a limit that cannot be divided, for which a message was logged.
    indivisible: Mutex<HashSet<Labels>>,
    overflow: Counter,
    /// Descriptors that no rule matches.
    pub(crate) unmatched: UnmatchedDescriptors,
    pub(super) unknown_plan: Counter,
    pub(super) global_shadow: Counter,
    /// Number of limits decided after a failure of the store, by failure policy.
    pub(super) on_error: [Counter; FailurePolicy::ALL.len()],
    /// Number of limits whose answer is missing.
    pub(super) missing_answers: Counter,
}

impl Statistics {
    /// Creates empty statistics for `workers` workers.
    #[must_use]
    pub fn new(workers: usize, settings: StatisticsSettings) -> Arc<Self> {
        Arc::new(Self {
            workers,
            settings,
            rules: Mutex::default(),
            dynamic: Mutex::default(),
            full: OnceLock::new(),
            worker_series: Striped::new(workers),
            other: Arc::new(Series::new(&["other".into(), "other".into()].into(), workers)),
            indivisible: Mutex::default(),
            overflow: Counter::new(workers),
            unmatched: UnmatchedDescriptors::new(workers),
            unknown_plan: Counter::new(workers),
            global_shadow: Counter::new(workers),
            on_error: std::array::from_fn(|_| Counter::new(workers)),
            missing_answers: Counter::new(workers),
        })
    }

    /// Returns the statistics of a new set's rules, by rule id. Rules of the previous set keep their statistics; those
    /// of removed rules are dropped.
    pub(super) fn register_rules(&self, rules: &mut [Rule]) -> Vec<RuleStatistics> {
        self.indivisible.lock().clear();
        let mut current = self.rules.lock();
        let mut previous = std::mem::take(&mut *current);
        current.reserve(rules.len());
        let mut all = Vec::with_capacity(rules.len());
        for rule in rules {
            let key = RuleKey {
                labels: Arc::clone(&rule.labels),
                classes: class_names(rule).into(),
                dynamic_labels: rule.dynamic_labels,
            };
            if let Some(statistics) = current.get(&key) {
                all.push(statistics.clone());
                continue;
            }
            let (key, statistics) = match previous.remove_entry(&key) {
                Some(former) => former,
                None => {
                    let statistics = RuleStatistics::new(rule, &key.classes, self.workers);
                    (key, statistics)
                }
            };
            // Equal labels are shared, also between the previous and the new set.
            rule.labels = Arc::clone(&key.labels);
            current.insert(key, statistics.clone());
            all.push(statistics);
        }
        all
    }

    /// Returns the descriptors that no rule matches.
    #[must_use]
    pub fn unmatched(&self) -> &UnmatchedDescriptors {
        &self.unmatched
    }

    /// Records a limit that quotas cannot divide. Returns whether it is the first one with these labels since rules
    /// were loaded.
    pub(super) fn is_first_indivisible(&self, labels: &Labels) -> bool {
        self.indivisible.lock().insert(Arc::clone(labels))
    }

    /// Returns the near-limit threshold, with the same arithmetic as envoyproxy/ratelimit.
    pub(super) fn near_threshold(&self, limit: u64) -> u64 {
        (limit as f32 * self.settings.near_limit_ratio).floor() as u64
    }

    /// Returns the series for labels with callers' values, or `other` if there are too many.
    pub(super) fn dynamic_series(&self, worker: WorkerId, labels: &[String], hits: u64) -> Arc<Series> {
        let id = labels.join("\0");
        let mut worker_series = self.worker_series.of(worker).lock();
        if let Some(series) = worker_series.get(&id) {
            return Arc::clone(series);
        }
        match self.register_dynamic(&id, labels) {
            Some(series) => {
                worker_series.insert(id, Arc::clone(&series));
                series
            }
            None => {
                self.overflow.add(worker, hits);
                Arc::clone(&self.other)
            }
        }
    }

    fn register_dynamic(&self, id: &str, labels: &[String]) -> Option<Arc<Series>> {
        if let Some(full) = self.full.get() {
            return full.get(id).cloned();
        }
        let mut dynamic = self.dynamic.lock();
        if let Some(series) = dynamic.get(id) {
            return Some(Arc::clone(series));
        }
        if (dynamic.len() + 1) * Count::EXPORTED > self.settings.max_dynamic_series {
            let _ = self.full.set(dynamic.clone());
            return None;
        }
        let labels: Labels = labels.iter().map(|label| Arc::from(label.as_str())).collect();
        let series = Arc::new(Series::new(&labels, self.workers));
        dynamic.insert(id.to_owned(), Arc::clone(&series));
        Some(series)
    }

    /// Returns all series. Each lock is held only while references are copied, as workers may wait for it.
    fn all_series(&self) -> Vec<Arc<Series>> {
        let mut all: Vec<Arc<Series>> = exported(&self.rules.lock()).cloned().collect();
        all.extend(self.dynamic.lock().values().cloned());
        all.push(Arc::clone(&self.other));
        all
    }

    /// Sums a count by labels and protocol. Two rules can have the same labels.
    fn collect(&self, count: Count) -> BySeries {
        let mut sums = BySeries::new();
        for series in self.all_series() {
            for (protocol, value) in series.by_protocol(count) {
                // envoyproxy/ratelimit creates the counter of the deny cache with its first value, and a script of its
                // tests counts the lines of the export.
                if count != Count::DenyCache || value > 0 {
                    *sums.entry((exported_labels(&series), protocol)).or_default() += value;
                }
            }
        }
        sums
    }

    /// Sums the requests by labels and protocol, as [`Statistics::collect`].
    fn collect_requests(&self) -> BySeries {
        let mut sums = BySeries::new();
        for series in self.all_series() {
            for (protocol, value) in series.requests_by_protocol() {
                *sums.entry((exported_labels(&series), protocol)).or_default() += value;
            }
        }
        sums
    }

    /// Sums the refunded hits by labels, as [`Statistics::collect`].
    fn collect_refunded(&self) -> BySeries {
        let mut sums = BySeries::new();
        for series in self.all_series() {
            if let Some(value) = series.refunded() {
                *sums.entry((exported_labels(&series), None)).or_default() += value;
            }
        }
        sums
    }

    /// Adds all counts to `totals`, under the statsd names of envoyproxy/ratelimit, which contain every level.
    pub fn add_totals(&self, totals: &mut Totals) {
        for series in self.all_series() {
            let mut counts: Vec<_> = Count::HITS.map(|count| (count.name(), series.sum(count))).to_vec();
            counts.push((REFUNDED_HITS, series.refunded()));
            for (name, value) in counts {
                if let Some(value) = value {
                    let name = format!("ratelimit.service.rate_limit.{}.{name}", series.labels().join("."));
                    *totals.entry(name).or_default() += value;
                }
            }
        }
        for (domain, descriptors) in self.unmatched.by_unknown_domain() {
            let name = format!("ratelimit.service.rate_limit.{}.domain_not_found", series::sanitize(&domain));
            *totals.entry(name).or_default() += descriptors;
        }
        *totals.entry("ratelimit.service.global_shadow_mode".to_owned()).or_default() += self.global_shadow.get();
    }

    /// Registers all metrics. `now` is the clock by which requests are decided.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter, now: impl Fn() -> Micros + Send + Sync + 'static) {
        for count in Count::HITS {
            let this = Arc::clone(self);
            let name = format!("ratelimit_service_rate_limit_{}", count.name());
            observe_series(meter, name, count.description(), move || this.collect(count));
        }
        let this = Arc::clone(self);
        observe_series(
            meter,
            format!("ratelimit_service_rate_limit_{REFUNDED_HITS}"),
            "Hits that callers have refunded to a rule's limit",
            move || this.collect_refunded(),
        );
        let this = Arc::clone(self);
        observe_series(
            meter,
            "sluicegate_rule_requests_total",
            "Requests with at least one hit for which a rule's limit decided",
            move || this.collect_requests(),
        );
        let this = Arc::clone(self);
        observe_series(
            meter,
            "sluicegate_rule_denied_requests_total",
            Count::DeniedRequests.description(),
            move || this.collect(Count::DeniedRequests),
        );
        let registrar = Registrar { meter, source: self };
        registrar.counter(
            "sluicegate_metric_series_overflow_hits_total",
            "Hits counted in the series other because telemetry.max_dynamic_series was reached",
            |this| this.overflow.get(),
        );
        registrar.counter(
            "sluicegate_domain_not_found_total",
            "Descriptors of domains that no rule file defines",
            |this| this.unmatched.by_unknown_domain().values().sum(),
        );
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "sluicegate_rule_not_found_total",
            "Descriptors that no rule of their domain matches, so that they have no limit",
            move |observer| {
                for (domain, count) in this.unmatched.by_domain() {
                    observer.observe(count, [Label::new("domain", series::sanitize(&domain))]);
                }
            },
        ));
        registrar.counter(
            "sluicegate_plan_not_found_total",
            "Descriptors with an unknown plan, which get the default plan",
            |this| this.unknown_plan.get(),
        );
        self.observe_shedding(meter, now);
        registrar.counter(
            "ratelimit_service_global_shadow_mode",
            "Requests over a limit that were allowed because decisions.shadow_mode is set",
            |this| this.global_shadow.get(),
        );
        registrar.counter(
            "sluicegate_missing_answers_total",
            "Limits without an answer of the store, which is a bug of the service; on_error decided",
            |this| this.missing_answers.get(),
        );
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "sluicegate_on_error_total",
            "Limits decided after a failure of the store, by failure policy",
            move |observer| {
                for policy in FailurePolicy::ALL {
                    let labels = [Label::new("policy", policy.name())];
                    observer.observe(this.on_error[policy as usize].get(), labels);
                }
            },
        ));
        registrar.gauge("sluicegate_metric_dynamic_series", "Number of series that contain callers' values", |this| {
            (this.dynamic.lock().len() * Count::EXPORTED) as u64
        });
    }
}

/// Sums by the labels that are exported and by protocol.
type BySeries = BTreeMap<(Vec<Arc<str>>, Option<&'static str>), u64>;

/// Returns the labels that envoyproxy/ratelimit exports: the domain and two levels.
fn exported_labels(series: &Series) -> Vec<Arc<str>> {
    series.labels().iter().take(3).cloned().collect()
}

/// Registers a counter with one series for each set of labels; collecting calls `read`.
fn observe_series(
    meter: &dyn Meter,
    name: impl Into<Cow<'static, str>>,
    description: &'static str,
    read: impl Fn() -> BySeries + Send + Sync + 'static,
) {
    meter.register(Instrument::counter(name, description, move |observer| {
        for ((labels, protocol), value) in read() {
            let protocol = protocol.map(|protocol| Label::new("protocol", protocol));
            observer.observe(value, rule_labels(labels).chain(protocol));
        }
    }));
}

/// Returns the labels of a metric about a rule: its domain and two levels.
pub(super) fn rule_labels(values: impl IntoIterator<Item = Arc<str>>) -> impl Iterator<Item = Label> {
    named_labels(["domain", "key1", "key2"], values)
}

/// Returns labels with these names. Values without a name are dropped.
fn named_labels<const N: usize, V: Into<LabelValue>>(
    names: [&'static str; N],
    values: impl IntoIterator<Item = V>,
) -> impl Iterator<Item = Label> {
    names.into_iter().zip(values).map(|(name, value)| Label::new(name, value))
}

/// The metrics of each class by its labels.
type ByClass = BTreeMap<Vec<String>, ClassSums>;

/// The metrics of one class, summed over the rules with the same labels.
#[derive(Debug, Default, PartialEq, Eq)]
struct ClassSums {
    /// Hits by outcome.
    hits: [u64; Outcome::ALL.len()],
    /// Time since which the class has been shed; `None` if it is not shed now.
    shed_since: Option<Micros>,
}

impl Statistics {
    /// Registers the metrics per class.
    fn observe_shedding(self: &Arc<Self>, meter: &dyn Meter, now: impl Fn() -> Micros + Send + Sync + 'static) {
        let this = Arc::clone(self);
        meter.register(Instrument::counter(
            "sluicegate_class_hits_total",
            "Hits of rules with classes and of rules that shed, by class and outcome",
            move |observer| {
                for (labels, sums) in this.by_class(Micros::ZERO) {
                    let labels = class_labels(labels);
                    for outcome in Outcome::ALL {
                        let name = Label::new("outcome", outcome.name());
                        observer.observe(sums.hits[outcome as usize], labels.iter().cloned().chain([name]));
                    }
                }
            },
        ));
        let this = Arc::clone(self);
        meter.register(Instrument::gauge(
            "sluicegate_shedding_since_timestamp_seconds",
            "Unix time in seconds at which a class began to be shed; 0 while it is not shed",
            move |observer| {
                for (labels, sums) in this.by_class(now()) {
                    let since = match sums.shed_since {
                        Some(since) => since.floor_secs(),
                        None => 0,
                    };
                    observer.observe(since, class_labels(labels));
                }
            },
        ));
    }

    /// Sums the hits by class and labels. Two rules can have the same labels, as in [`Statistics::collect`].
    fn by_class(&self, now: Micros) -> ByClass {
        let all: Vec<_> = self.rules.lock().values().filter_map(|rule| rule.shedding.clone()).collect();
        let mut sums = ByClass::new();
        for shedding in all {
            for class in &shedding.classes {
                let mut labels = vec![class.name.clone()];
                labels.extend(shedding.labels.iter().take(3).map(|label| series::sanitize(label)));
                let sum = sums.entry(labels).or_default();
                for outcome in Outcome::ALL {
                    sum.hits[outcome as usize] += class.hits(outcome);
                }
                sum.shed_since = [sum.shed_since, class.since(now)].into_iter().flatten().min();
            }
        }
        sums
    }
}

fn class_labels(labels: Vec<String>) -> Vec<Label> {
    named_labels(["class", "domain", "key1", "key2"], labels).collect()
}

/// Returns the labels of a rule that puts the caller's values into them.
pub(super) fn labels(domain: &str, entries: &[Entry<'_>], rule: &Rule, path: &[&Node]) -> Vec<String> {
    let shared = path.iter().any(|node| matches!(node.segment, Segment::Shared(_)));
    let mut labels = Vec::with_capacity(entries.len() + 2);
    labels.push(domain.to_owned());
    for (entry, node) in entries.iter().zip(path) {
        // Modifier entries are no levels: a holder would create a series per request. A plan's label comes from the
        // rule.
        if node.modifier.is_some() {
            continue;
        }
        labels.push(match &node.segment {
            Segment::Shared(_) => node.label(),
            _ if rule.detailed_metric && (!shared || !entry.value.is_empty()) => {
                format!("{}_{}", entry.key, bounded(entry.value))
            }
            Segment::Any | Segment::Pattern(_) if node.value_to_metric => override_label(entry),
            _ => node.label(),
        });
    }
    if rule.plan.is_some() {
        labels.extend(rule.labels.last().map(ToString::to_string));
    }
    labels
}

/// Returns the labels of an override: every level with its value.
pub(super) fn override_labels(domain: &str, entries: &[Entry<'_>]) -> Vec<String> {
    std::iter::once(domain.to_owned()).chain(entries.iter().map(override_label)).collect()
}

fn override_label(entry: &Entry<'_>) -> String {
    if entry.value.is_empty() { entry.key.to_owned() } else { format!("{}_{}", entry.key, bounded(entry.value)) }
}

#[cfg(test)]
mod tests;
