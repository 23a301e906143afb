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
    tables::{MAX_RULES, RuleReport},
    tree::{Hits, Tree, View},
};
use crate::{
    algorithm::Micros,
    engine::{Outcomes, RuleHits, RuleTotals, Snapshot},
};

/// Maximum number of rules with stored minutes. Above it, the rules with the fewest denied hits are omitted.
const MAX_ACTIVE: usize = 12_000;
/// Number of the last minutes by which rules are ranked.
const RANKED_MINUTES: usize = 10;
/// Time that rates cover.
const RATE_TIME: Micros = Micros::from_secs(10);
/// Minimum time between two samples for rates.
const SAMPLE_INTERVAL: Micros = Micros::from_secs(5);
/// Time without a request after which the tree is dropped.
const IDLE_TIME: Micros = Micros::from_secs(30);
/// Time for which the order of rows is reused.
const VIEW_TIME: Micros = Micros::from_secs(1);

/// Rows of the tree of rules.
pub struct RuleList {
    /// The rules and overrides in force.
    pub snapshot: Arc<Snapshot>,
    /// The rows.
    pub rows: Vec<RuleRow>,
    /// Number of rows without `offset` and `max_rows`.
    pub total_rows: usize,
    /// Number of rules among them.
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
    /// Number of limits of entities that have the same keys.
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

/// The hits of each rule in the last hour.
#[derive(Default)]
pub(super) struct RuleTable {
    /// Rules with hits in the last hour, by their id.
    active: HashMap<usize, ActiveRule>,
    /// Hits at the start of the current minute.
    minute: Option<Sample>,
    /// Samples of the last seconds, the oldest first.
    samples: VecDeque<Sample>,
    view: Option<(Micros, RuleQuery, View)>,
    tree: Option<Arc<Tree>>,
    last_query: Micros,
}

impl RuleTable {
    /// Ends the current minute if it is over, and drops the tree if it was not requested for a while.
    pub(super) fn tick(&mut self, snapshot: &Snapshot, now: Micros) {
        let minute_of = |at: Micros| at.get() / 60_000_000;
        if now.get().saturating_sub(self.last_query.get()) > IDLE_TIME.get() {
            (self.view, self.tree) = (None, None);
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
            let before = previous.hits.get(id).map_or(&zero, |(_, hits)| hits);
            if !self.active.contains_key(id) && hits.since(before) == zero {
                continue;
            }
            let new = || ActiveRule { totals: totals.clone(), last: *before, minutes: VecDeque::new() };
            self.active.entry(*id).or_insert_with(new);
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

    /// Removes the rules with the fewest denied requests and requests, if there are too many.
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
    pub(super) fn report(&mut self, snapshot: &Snapshot, now: Micros) -> Vec<RuleReport> {
        let mut used = Vec::new();
        for (totals, rule) in snapshot.rule_totals().zip(snapshot.rules().rules()) {
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
            reports.push(RuleReport { path: rule.path(), hits, minutes: minutes.unwrap_or_default() });
        }
        reports
    }

    /// Returns rows of the tree. The activity of `others`, the rules of other instances, is added.
    pub(super) fn list<'r>(
        &mut self,
        snapshot: &Arc<Snapshot>,
        query: &RuleQuery,
        others: impl Iterator<Item = &'r RuleReport>,
        now: Micros,
    ) -> RuleList {
        self.last_query = now;
        let same_rules = |tree: &&Arc<Tree>| tree.snapshot.has_same_rules(snapshot);
        let tree = match self.tree.as_ref().filter(same_rules) {
            Some(tree) => Arc::clone(tree),
            None => Arc::new(Tree::new(Arc::clone(snapshot))),
        };
        self.tree = Some(Arc::clone(&tree));
        let is_current = |(at, last, _): &(Micros, RuleQuery, View)| {
            let same_query = last.find == query.find && last.order == query.order && last.path == query.path;
            let same_sum = last.all_instances == query.all_instances;
            same_query
                && same_sum
                && last.rules_only == query.rules_only
                && now.get().abs_diff(at.get()) < VIEW_TIME.get()
        };
        let view = match self.view.take().filter(|view| is_current(view) && view.2.is_of(&tree)) {
            Some(view) => view,
            None => {
                let mut hits: Vec<Hits> = tree.totals.iter().map(|totals| self.hits_of(totals, now)).collect();
                self.sample(&tree.snapshot, now);
                let added = add_reports(&tree, &mut hits, others);
                (now, query.clone(), View::new(&tree, hits, added, query))
            }
        };
        let candidate = candidate_outcomes(snapshot);
        let selected = view.2.rows.iter().skip(query.offset).take(query.max_rows);
        let rows = selected.map(|node| self.row(&tree, &view.2, *node, snapshot, candidate.as_ref())).collect();
        let (total_rows, total_rules) = (view.2.rows.len(), view.2.rules);
        self.view = Some(view);
        RuleList { snapshot: Arc::clone(snapshot), rows, total_rows, total_rules, instances: Vec::new() }
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
        RuleRow {
            depth: tree.depth(node),
            label: tree.label(node).to_owned(),
            rule,
            hits: view.hits(node),
            minutes: match view.is_flat {
                true => self.minutes(tree, &view.added, rule),
                false => self.minutes(tree, &view.added, tree.rules_below(node)),
            },
            entries: rule.map_or_else(Vec::new, |rule| {
                tree.entries(rule).iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
            }),
            overrides: rule.map_or(0, |rule| tree.overrides(rule, snapshot)),
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
        let since = |sample: Option<&Sample>| {
            let before = sample.and_then(|sample| sample.hits.get(&id)).map(|(_, hits)| *hits);
            hits.since(&before.unwrap_or_default())
        };
        // Without recent samples, rates are those since the start of the minute.
        let in_time = |sample: &&Sample| (1_000_000..=3 * RATE_TIME.get()).contains(&age(sample, now));
        let latest_old = self.samples.iter().rposition(|sample| age(sample, now) >= RATE_TIME.get()).unwrap_or(0);
        let earlier = self.samples.get(latest_old).filter(in_time).or(self.minute.as_ref());
        let seconds = earlier.map_or(1.0, |sample| age(sample, now) as f64 / 1e6).max(1.0);
        let rate = |hits: u64| hits as f64 / seconds;
        let new = since(earlier);
        let this_minute = since(self.minute.as_ref());
        let minutes = self.active.get(&id).map(|rule| &rule.minutes);
        let hour = minutes.map(sum).unwrap_or_default();
        let recent = minutes.into_iter().flat_map(|minutes| minutes.iter().rev().take(RANKED_MINUTES));
        let recently_denied: u64 = recent.map(|minute| u64::from(minute.denied_requests)).sum();
        Hits {
            request_rate: rate(new.requests),
            denied_request_rate: rate(new.denied_requests),
            requested_rate: rate(new.requested),
            denied_rate: rate(new.denied),
            shadow_rate: rate(new.shadow),
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
fn add_reports<'r>(tree: &Tree, hits: &mut [Hits], others: impl Iterator<Item = &'r RuleReport>) -> AddedMinutes {
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
}

/// Returns the outcomes of the candidate rules by path, or `None` without candidate rules.
fn candidate_outcomes(snapshot: &Snapshot) -> Option<HashMap<String, Outcomes>> {
    let candidate = snapshot.candidate()?;
    let rules = candidate.rules();
    let mut by_path = HashMap::new();
    for (rule, outcomes) in rules.rules().rules().iter().zip(candidate.outcomes()) {
        if outcomes.requested > 0 {
            by_path.insert(rule.path(), outcomes);
        }
    }
    Some(by_path)
}

#[cfg(test)]
mod tests;
