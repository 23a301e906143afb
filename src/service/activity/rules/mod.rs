//! [`RuleTable`]: the hits of each rule in the last hour, and the tree of rules that operators search and sort.
//!
//! The hits of each minute are stored for the rules that had any, in memory of fixed size. Rates and the tree exist only
//! while operators request them.

use std::{
    cmp::Reverse,
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use super::{
    minutes::{AddedMinutes, MAX_MINUTES, Minute, add_minutes, rank, sum},
    query::RuleQuery,
    tables::{MAX_RULES, RuleActivity},
    tree::{Hits, Tree, View},
};
use crate::{
    algorithm::Micros,
    engine::{Outcomes, RuleHits, RuleTotals, Snapshot},
};

/// Maximum number of rules with stored minutes. Above it, the rules with the fewest denied requests are omitted.
const MAX_ACTIVE: usize = 12_000;
/// Number of the last minutes by which rules are ranked.
const RANKED_MINUTES: usize = 10;
/// Time that rates cover.
const RATE_TIME: Micros = Micros::from_secs(10);
/// Minimum time between two samples for rates.
const SAMPLE_INTERVAL: Micros = Micros::from_secs(5);
/// Time without a query after which the tree is dropped.
const IDLE_TIME: Micros = Micros::from_secs(30);
/// Time for which the rows and their hits are reused.
const VIEW_TIME: Micros = Micros::from_secs(1);

/// Rows of the tree of rules.
pub struct RuleList {
    /// The rules and overrides in force.
    pub snapshot: Arc<Snapshot>,
    /// The rows.
    pub rows: Vec<RuleRow>,
    /// Number of rows without `offset` and `max_rows`.
    pub total_rows: usize,
    /// Number of rules among all rows.
    pub total_rules: usize,
    /// The names of the instances that are summed up.
    pub instances: Vec<String>,
}

/// A row of the tree: a rule, or a level above rules.
#[derive(Clone, Debug, Default)]
pub struct RuleRow {
    /// Number of levels above.
    pub depth: usize,
    /// The last part of the path.
    pub label: String,
    /// Domain and levels, separated by dots.
    pub path: String,
    /// Id of the rule, if the level has one.
    pub rule: Option<usize>,
    /// The hits of the rule and of the rules below.
    pub hits: Hits,
    /// The minutes of the last hour, the oldest first; empty if there were no hits.
    pub minutes: Vec<Minute>,
    /// The keys of the rule's levels, with the values that they require; empty for any value.
    pub entries: Vec<(String, String)>,
    /// Number of overrides that set the limit of an entity with the keys of the rule.
    pub overrides: u32,
    /// The outcomes of the candidate rules.
    pub candidate: Option<Outcomes>,
}

/// The requests and hits of one rule in the last minutes.
struct ActiveRule {
    totals: RuleTotals,
    /// Hits at the end of the last minute.
    last: RuleHits,
    /// The finished minutes, the oldest first.
    minutes: VecDeque<Minute>,
}

/// The hits of every used rule at one time.
struct Sample {
    at: Micros,
    hits: HashMap<usize, (RuleTotals, RuleHits)>,
}

/// The rows of the last query, which are reused for [`VIEW_TIME`].
struct CachedView {
    at: Micros,
    query: RuleQuery,
    view: View,
}

impl CachedView {
    /// Returns whether the rows can be reused for a query. Its `offset` and `max_rows` may differ.
    fn is_current(&self, tree: &Arc<Tree>, query: &RuleQuery, now: Micros) -> bool {
        let last = &self.query;
        let is_same_query = last.find == query.find
            && last.order == query.order
            && last.path == query.path
            && last.all_instances == query.all_instances
            && last.rules_only == query.rules_only;
        is_same_query && now.get().abs_diff(self.at.get()) < VIEW_TIME.get() && self.view.is_of(tree)
    }
}

/// The hits of each rule in the last hour.
#[derive(Default)]
pub(super) struct RuleTable {
    /// Rules with hits in the last hour, by their id.
    active: HashMap<usize, ActiveRule>,
    /// Hits at the start of the current minute.
    minute: Option<Sample>,
    /// Samples of the last seconds, the oldest first.
    samples: VecDeque<Sample>,
    view: Option<CachedView>,
    tree: Option<Arc<Tree>>,
    last_query: Micros,
}

impl RuleTable {
    /// Ends the current minute if it is over, and drops the tree if it was not requested for a while.
    pub(super) fn tick(&mut self, snapshot: &Snapshot, now: Micros) {
        if now.get().saturating_sub(self.last_query.get()) > IDLE_TIME.get() {
            self.view = None;
            self.tree = None;
            self.samples.clear();
        }
        match &self.minute {
            Some(minute) if minute_of(minute.at) == minute_of(now) => {}
            _ => self.end_minute(snapshot, now),
        }
    }

    fn end_minute(&mut self, snapshot: &Snapshot, now: Micros) {
        let Some(previous) = self.minute.take() else {
            // All hits since the start of the process belong to the first minute.
            self.minute = Some(Sample { at: now, hits: HashMap::new() });
            return;
        };
        let sample = Sample::take(snapshot, now);
        let zero = RuleHits::default();
        for (id, (totals, hits)) in &sample.hits {
            if self.active.contains_key(id) {
                continue;
            }
            let last = previous.hits_of(*id);
            if hits.since(&last) != zero {
                self.active.insert(*id, ActiveRule { totals: totals.clone(), last, minutes: VecDeque::new() });
            }
        }
        for rule in self.active.values_mut() {
            let hits = rule.totals.get().unwrap_or_default();
            let new = hits.since(&rule.last);
            rule.last = hits;
            rule.minutes.push_back(Minute::new(&new));
            if rule.minutes.len() > MAX_MINUTES {
                rule.minutes.pop_front();
            }
        }
        self.active.retain(|_, rule| rule.minutes.iter().any(|minute| *minute != Minute::default()));
        self.evict();
        self.minute = Some(sample);
    }

    /// Removes the rules with the lowest [`rank`] if there are more than [`MAX_ACTIVE`].
    fn evict(&mut self) {
        if self.active.len() <= MAX_ACTIVE {
            return;
        }
        let mut ranked: Vec<_> = self.active.iter().map(|(id, rule)| (Reverse(rank(&rule.minutes)), *id)).collect();
        ranked.select_nth_unstable(MAX_ACTIVE);
        for (_, id) in &ranked[MAX_ACTIVE..] {
            self.active.remove(id);
        }
    }

    /// Returns the activity of the rules with the most denied requests, for other instances.
    pub(super) fn report(&mut self, snapshot: &Snapshot, now: Micros) -> Vec<RuleActivity> {
        let mut used = Vec::new();
        for (totals, rule) in snapshot.rule_totals().zip(snapshot.rule_set().rules()) {
            if totals.get().is_some() {
                let hits = self.hits_of(&totals, now);
                used.push((rule, totals.id(), hits));
            }
        }
        self.sample(snapshot, now);
        used.sort_by(|(_, _, one), (_, _, other)| one.order(other));
        let mut reports = Vec::new();
        for (rule, id, hits) in used.into_iter().take(MAX_RULES) {
            let minutes = self.active.get(&id).map(|rule| rule.minutes.iter().copied().collect());
            reports.push(RuleActivity { path: rule.path(), hits, minutes: minutes.unwrap_or_default() });
        }
        reports
    }

    /// Returns rows of the tree. The activity of `others`, the rules of other instances, is added.
    pub(super) fn list<'r>(
        &mut self,
        snapshot: &Arc<Snapshot>,
        query: &RuleQuery,
        others: impl Iterator<Item = &'r RuleActivity>,
        now: Micros,
    ) -> RuleList {
        self.last_query = now;
        let tree = match &self.tree {
            Some(tree) if tree.snapshot.has_same_rules(snapshot) => Arc::clone(tree),
            _ => Arc::new(Tree::new(Arc::clone(snapshot))),
        };
        self.tree = Some(Arc::clone(&tree));
        let cached = self.view.take().filter(|cached| cached.is_current(&tree, query, now));
        let cached = match cached {
            Some(cached) => cached,
            None => {
                let mut hits: Vec<Hits> = tree.totals.iter().map(|totals| self.hits_of(totals, now)).collect();
                self.sample(&tree.snapshot, now);
                let added = add_reports(&tree, &mut hits, others);
                CachedView { at: now, query: query.clone(), view: View::new(&tree, hits, added, query) }
            }
        };
        let view = &cached.view;
        let candidate = candidate_outcomes(snapshot);
        let mut rows = Vec::new();
        for node in view.rows.iter().skip(query.offset).take(query.max_rows) {
            rows.push(self.row(&tree, view, *node, snapshot, candidate.as_ref()));
        }
        let list = RuleList {
            snapshot: Arc::clone(snapshot),
            rows,
            total_rows: view.rows.len(),
            total_rules: view.rules,
            instances: Vec::new(),
        };
        self.view = Some(cached);
        list
    }

    fn row(
        &self,
        tree: &Tree,
        view: &View,
        node: u32,
        snapshot: &Snapshot,
        candidate: Option<&HashMap<String, Outcomes>>,
    ) -> RuleRow {
        let path = tree.path(node);
        let rule = tree.rule_of(node);
        let minutes = if view.is_flat {
            self.minutes(tree, &view.added, rule)
        } else {
            self.minutes(tree, &view.added, tree.rules_below(node))
        };
        let mut entries = Vec::new();
        let mut overrides = 0;
        if let Some(rule) = rule {
            for (key, value) in tree.entries(rule) {
                entries.push((key.to_string(), value.to_string()));
            }
            overrides = tree.overrides(rule, snapshot);
        }
        RuleRow {
            depth: tree.depth(node),
            label: tree.label(node).to_owned(),
            rule,
            hits: view.hits(node),
            minutes,
            entries,
            overrides,
            candidate: candidate.map(|outcomes| outcomes.get(&path).copied().unwrap_or_default()),
            path,
        }
    }

    /// Returns the requests and hits of a rule.
    fn hits_of(&self, totals: &RuleTotals, now: Micros) -> Hits {
        let Some(hits) = totals.get() else {
            return Hits::default();
        };
        let id = totals.id();
        let latest_old = self.samples.iter().rposition(|sample| age(sample, now) >= RATE_TIME.get()).unwrap_or(0);
        let earlier = match self.samples.get(latest_old) {
            Some(sample) if (1_000_000..=3 * RATE_TIME.get()).contains(&age(sample, now)) => Some(sample),
            // Without recent samples, rates are those since the start of the minute.
            _ => self.minute.as_ref(),
        };
        let seconds = match earlier {
            Some(sample) => (age(sample, now) as f64 / 1e6).max(1.0),
            None => 1.0,
        };
        let new = hits_since(&hits, id, earlier);
        let this_minute = hits_since(&hits, id, self.minute.as_ref());
        let minutes = self.active.get(&id).map(|rule| &rule.minutes);
        let hour = minutes.map(sum).unwrap_or_default();
        let recent = minutes.into_iter().flat_map(|minutes| minutes.iter().rev().take(RANKED_MINUTES));
        let recently_denied: u64 = recent.map(|minute| u64::from(minute.denied_requests)).sum();
        Hits {
            request_rate: new.requests as f64 / seconds,
            denied_request_rate: new.denied_requests as f64 / seconds,
            requested_rate: new.requested as f64 / seconds,
            denied_rate: new.denied as f64 / seconds,
            shadow_rate: new.shadow as f64 / seconds,
            requests: hour.requests + this_minute.requests,
            denied_requests: hour.denied_requests + this_minute.denied_requests,
            requested: hour.requested + this_minute.requested,
            denied: hour.denied + this_minute.denied,
            recently_denied: recently_denied + this_minute.denied_requests,
        }
    }

    /// Takes a sample for later rates if the last one is old enough, and drops those that are too old.
    fn sample(&mut self, snapshot: &Snapshot, now: Micros) {
        while self.samples.get(1).is_some_and(|next| age(next, now) >= RATE_TIME.get()) {
            self.samples.pop_front();
        }
        if self.samples.back().is_none_or(|last| age(last, now) >= SAMPLE_INTERVAL.get()) {
            self.samples.push_back(Sample::take(snapshot, now));
        }
    }

    /// Sums the minutes of rules. Empty if there were no hits.
    fn minutes(&self, tree: &Tree, added: &AddedMinutes, rules: impl IntoIterator<Item = usize>) -> Vec<Minute> {
        let mut sums = Vec::new();
        for rule in rules {
            if let Some(active) = self.active.get(&tree.totals[rule].id()) {
                add_minutes(&mut sums, active.minutes.iter());
            }
            if let Some(minutes) = added.get(&rule) {
                add_minutes(&mut sums, minutes.iter());
            }
        }
        sums
    }
}

/// Adds the activity of the rules of other instances, and returns their minutes.
fn add_reports<'r>(tree: &Tree, hits: &mut [Hits], others: impl Iterator<Item = &'r RuleActivity>) -> AddedMinutes {
    let mut added = AddedMinutes::new();
    for report in others {
        // Instances may have different rules for a while.
        let Some(rule) = tree.rule_at(&report.path) else {
            continue;
        };
        hits[rule].add(&report.hits);
        add_minutes(added.entry(rule).or_default(), report.minutes.iter());
    }
    added
}

fn minute_of(at: Micros) -> u64 {
    at.get() / 60_000_000
}

/// Returns the hits of a rule since a sample, or all of them without one.
fn hits_since(hits: &RuleHits, rule: usize, sample: Option<&Sample>) -> RuleHits {
    match sample {
        Some(sample) => hits.since(&sample.hits_of(rule)),
        None => hits.since(&RuleHits::default()),
    }
}

/// Returns the age of a sample in microseconds.
fn age(sample: &Sample, now: Micros) -> u64 {
    now.get().saturating_sub(sample.at.get())
}

impl Sample {
    fn take(snapshot: &Snapshot, at: Micros) -> Self {
        let hits = snapshot.rule_totals().filter_map(|totals| {
            let hits = totals.get()?;
            Some((totals.id(), (totals, hits)))
        });
        Self { at, hits: hits.collect() }
    }

    /// Returns the hits of a rule, or zero if it had none.
    fn hits_of(&self, rule: usize) -> RuleHits {
        match self.hits.get(&rule) {
            Some((_, hits)) => *hits,
            None => RuleHits::default(),
        }
    }
}

/// Returns the outcomes of the candidate rules by path, or `None` without candidate rules.
fn candidate_outcomes(snapshot: &Snapshot) -> Option<HashMap<String, Outcomes>> {
    let candidate = snapshot.candidate()?;
    let rules = candidate.rules();
    let mut by_path = HashMap::new();
    for (rule, outcomes) in rules.rule_set().rules().iter().zip(candidate.outcomes()) {
        if outcomes.requested > 0 {
            by_path.insert(rule.path(), outcomes);
        }
    }
    Some(by_path)
}

#[cfg(test)]
mod tests;
