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
    query::RuleQuery,
    tree::{Hits, Tree, View},
};
use crate::{
    algorithm::Micros,
    engine::{Outcomes, RuleHits, RuleTotals, Snapshot},
};

/// Number of minutes that are stored.
const MAX_MINUTES: usize = 60;
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
    /// Requested and denied hits of each minute of the last hour, the oldest first; empty if there were none.
    pub minutes: Vec<[u32; 2]>,
    /// The keys of the rule's levels, with the values that they require; empty for any value.
    pub entries: Vec<(String, String)>,
    /// Number of limits of entities that have the same keys.
    pub overrides: u32,
    /// The outcomes of the candidate rules.
    pub candidate: Option<Outcomes>,
}

/// The requested and denied hits of one rule in the last minutes.
struct ActiveRule {
    totals: RuleTotals,
    /// Hits at the end of the last minute.
    last: RuleHits,
    /// Requested and denied hits of each minute, the oldest first.
    minutes: VecDeque<[u32; 2]>,
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
        let count = |hits: u64| u32::try_from(hits).unwrap_or(u32::MAX);
        for rule in self.active.values_mut() {
            let hits = rule.totals.get().unwrap_or_default();
            let new = hits.since(&rule.last);
            rule.last = hits;
            rule.minutes.push_back([count(new.requested), count(new.denied)]);
            if rule.minutes.len() > MAX_MINUTES {
                rule.minutes.pop_front();
            }
        }
        self.active.retain(|_, rule| rule.minutes.iter().any(|minute| *minute != [0, 0]));
        self.evict();
        self.minute = Some(sample);
    }

    /// Removes the rules with the fewest denied and requested hits, if there are too many.
    fn evict(&mut self) {
        if self.active.len() <= MAX_ACTIVE {
            return;
        }
        let mut ranked: Vec<_> = self.active.iter().map(|(id, rule)| (Reverse(sum(&rule.minutes)), *id)).collect();
        ranked.select_nth_unstable(MAX_ACTIVE);
        for (_, id) in &ranked[MAX_ACTIVE..] {
            self.active.remove(id);
        }
    }

    /// Returns rows of the tree.
    pub(super) fn list(&mut self, snapshot: &Arc<Snapshot>, query: &RuleQuery, now: Micros) -> RuleList {
        self.last_query = now;
        let same_rules = |tree: &&Arc<Tree>| tree.snapshot.has_same_rules(snapshot);
        let tree = match self.tree.as_ref().filter(same_rules) {
            Some(tree) => Arc::clone(tree),
            None => Arc::new(Tree::new(Arc::clone(snapshot))),
        };
        self.tree = Some(Arc::clone(&tree));
        let is_current = |(at, last, _): &(Micros, RuleQuery, View)| {
            let same_query = last.find == query.find && last.order == query.order && last.path == query.path;
            same_query && last.rules_only == query.rules_only && now.get().abs_diff(at.get()) < VIEW_TIME.get()
        };
        let view = match self.view.take().filter(|view| is_current(view) && view.2.is_of(&tree)) {
            Some(view) => view,
            None => (now, query.clone(), View::new(&tree, self.hits(&tree, now), query)),
        };
        let candidate = candidate_outcomes(snapshot);
        let selected = view.2.rows.iter().skip(query.offset).take(query.max_rows);
        let rows = selected.map(|node| self.row(&tree, &view.2, *node, snapshot, candidate.as_ref())).collect();
        let (total_rows, total_rules) = (view.2.rows.len(), view.2.rules);
        self.view = Some(view);
        RuleList { snapshot: Arc::clone(snapshot), rows, total_rows, total_rules }
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
                true => self.minutes(tree, rule),
                false => self.minutes(tree, tree.rules_below(node)),
            },
            entries: rule.map_or_else(Vec::new, |rule| {
                tree.entries(rule).iter().map(|(key, value)| (key.to_string(), value.to_string())).collect()
            }),
            overrides: rule.map_or(0, |rule| tree.overrides(rule, snapshot)),
            candidate: candidate.map(|outcomes| outcomes.get(&path).copied().unwrap_or_default()),
            path,
        }
    }

    /// Returns the hits of each rule, by its id. Takes a sample for later rates if the last one is old enough.
    fn hits(&mut self, tree: &Tree, now: Micros) -> Vec<Hits> {
        let zero = RuleHits::default();
        while self.samples.get(1).is_some_and(|next| age(next, now) >= RATE_TIME.get()) {
            self.samples.pop_front();
        }
        // Without recent samples, rates are those since the start of the minute.
        let recent = self.samples.front().filter(|sample| age(sample, now) <= 3 * RATE_TIME.get());
        let earlier = recent.filter(|sample| age(sample, now) >= 1_000_000).or(self.minute.as_ref());
        let seconds = earlier.map_or(1.0, |sample| age(sample, now) as f64 / 1e6).max(1.0);
        let rate = |hits: u64| hits as f64 / seconds;
        let hits_of = |totals: &RuleTotals| {
            let Some(hits) = totals.get() else {
                return Hits::default();
            };
            let id = totals.id();
            let in_sample = |sample: Option<&Sample>| {
                sample.and_then(|sample| sample.hits.get(&id)).map_or(zero, |(_, hits)| *hits)
            };
            let new = hits.since(&in_sample(earlier));
            let this_minute = hits.since(&in_sample(self.minute.as_ref()));
            let minutes = self.active.get(&id).map(|rule| &rule.minutes);
            let [denied, requested] = minutes.map_or([0, 0], sum);
            let recent = minutes.into_iter().flat_map(|minutes| minutes.iter().rev().take(RANKED_MINUTES));
            Hits {
                requested_rate: rate(new.requested),
                denied_rate: rate(new.denied),
                shadow_rate: rate(new.shadow),
                requested: requested + this_minute.requested,
                denied: denied + this_minute.denied,
                recently_denied: recent.map(|[_, denied]| u64::from(*denied)).sum::<u64>() + this_minute.denied,
            }
        };
        let hits = tree.totals.iter().map(hits_of).collect();
        if self.samples.back().is_none_or(|last| age(last, now) >= SAMPLE_INTERVAL.get()) {
            self.samples.push_back(Sample::take(&tree.snapshot, now));
        }
        hits
    }

    /// Sums the minutes of rules. Empty if there were no hits.
    fn minutes(&self, tree: &Tree, rules: impl IntoIterator<Item = usize>) -> Vec<[u32; 2]> {
        let mut sums = Vec::new();
        for rule in rules {
            let Some(active) = self.active.get(&tree.totals[rule].id()) else {
                continue;
            };
            sums.resize(MAX_MINUTES, [0_u32; 2]);
            let first = MAX_MINUTES - active.minutes.len();
            for (sum, minute) in sums[first..].iter_mut().zip(&active.minutes) {
                sum.iter_mut().zip(minute).for_each(|(sum, hits)| *sum = sum.saturating_add(*hits));
            }
        }
        sums
    }
}

/// Sums the denied and the requested hits.
fn sum(minutes: &VecDeque<[u32; 2]>) -> [u64; 2] {
    let of = |index: usize| minutes.iter().map(|minute| u64::from(minute[index])).sum();
    [of(1), of(0)]
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
mod tests {
    use std::fmt::Write;

    use arc_swap::ArcSwap;
    use futures_util::FutureExt;
    use smallvec::smallvec;

    use super::*;
    use crate::service::activity::RuleOrder;
    use crate::{
        engine::{Candidate, Descriptor, Engine, Overrides, Request, Resources, Statistics, StatisticsSettings},
        metrics::WorkerId,
        rules::{Entry, Options, SourceFile, compile},
        store::{AnyStore, Memory, memory},
    };

    const RULES: &str = "domain: api
descriptors:
- { key: user, rate_limit: { unit: minute, requests_per_unit: 5 } }
- key: path
  value: /a
  rate_limit: { name: checkout, unit: hour, requests_per_unit: 1, algorithm: gcra }
  descriptors:
  - { key: method, rate_limit: { unit: second, requests_per_unit: 2 } }
- { key: quiet, shadow_mode: true, rate_limit: { unit: hour, requests_per_unit: 1 } }
";

    struct Setup {
        engine: Engine,
        table: RuleTable,
    }

    impl Setup {
        fn new(rules: &str) -> Self {
            let file = SourceFile { name: "a.yaml".into(), text: rules.into() };
            let (rules, _) = compile(&[file], Options::default()).unwrap();
            let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 70, near_limit_ratio: 0.8 });
            let snapshot = Snapshot::new(rules, &statistics, &Resources::default());
            let memory = || Arc::new(Memory::new(&memory::Settings { max_counters: 1_000_000 }));
            let engine = Engine {
                worker: WorkerId(0),
                scope: "",
                store: AnyStore::Memory(memory()),
                local: memory(),
                rules: Arc::new(ArcSwap::from_pointee(snapshot)),
                statistics,
                top: None,
                settings: Arc::default(),
            };
            Self { engine, table: RuleTable::default() }
        }

        fn snapshot(&self) -> Arc<Snapshot> {
            self.engine.rules.load_full()
        }

        fn ask(&self, entries: &[(&str, &str)], times: u32, second: u64) {
            for _ in 0..times {
                let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
                let descriptor = Descriptor { entries, hits: 1, refund: false, requested_limit: None };
                let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: vec![] };
                self.engine.decide(&request, Micros::from_secs(second)).now_or_never().unwrap().unwrap();
            }
        }

        fn tick(&mut self, second: u64) {
            self.table.tick(&self.snapshot(), Micros::from_secs(second));
        }

        fn list(&mut self, query: &RuleQuery, second: u64) -> RuleList {
            self.table.list(&self.snapshot(), &RuleQuery { max_rows: 100, ..query.clone() }, Micros::from_secs(second))
        }
    }

    fn paths(list: &RuleList) -> Vec<&str> {
        list.rows.iter().map(|row| row.path.as_str()).collect()
    }

    fn by_file() -> RuleQuery {
        RuleQuery { order: RuleOrder::File, ..RuleQuery::default() }
    }

    #[test]
    fn the_tree_has_a_row_for_each_level() {
        let mut setup = Setup::new(RULES);
        let list = setup.list(&by_file(), 6_000);
        assert_eq!(paths(&list), ["api", "api.user", "api.path_/a", "api.path_/a.method", "api.quiet"]);
        let depths: Vec<_> = list.rows.iter().map(|row| (row.depth, row.rule.is_some())).collect();
        assert_eq!(depths, [(0, false), (1, true), (1, true), (2, true), (1, true)]);
        assert_eq!((list.total_rows, list.total_rules), (5, 4));
        let entries = |row: usize| list.rows[row].entries.clone();
        let entry = |key: &str, value: &str| (key.to_owned(), value.to_owned());
        assert_eq!((entries(0), entries(1)), (vec![], vec![entry("user", "")]));
        assert_eq!(entries(3), [entry("path", "/a"), entry("method", "")]);
        let page = setup.table.list(
            &setup.engine.rules.load_full(),
            &RuleQuery { offset: 1, max_rows: 2, ..by_file() },
            Micros::from_secs(6_000),
        );
        assert_eq!((paths(&page), page.total_rows), (vec!["api.user", "api.path_/a"], 5));
    }

    #[test]
    fn words_are_found_in_paths_names_limits_and_algorithms() {
        let mut setup = Setup::new(RULES);
        let mut find = |text: &str| {
            let list = setup.list(&RuleQuery { find: text.into(), ..by_file() }, 6_000);
            (list.rows.iter().map(|row| row.path.clone()).collect::<Vec<_>>().join(" "), list.total_rules)
        };
        assert_eq!(find("METHOD"), ("api api.path_/a api.path_/a.method".into(), 1));
        assert_eq!(find("checkout"), ("api api.path_/a".into(), 1));
        assert_eq!(find("hour gcra"), ("api api.path_/a".into(), 1));
        assert_eq!(find("hour quiet"), ("api api.quiet".into(), 1));
        assert_eq!(find("hour nothing"), (String::new(), 0));
        let one = setup.list(&RuleQuery { path: "api.path_/a".into(), ..by_file() }, 6_000);
        assert_eq!((paths(&one), one.total_rules), (vec!["api.path_/a"], 1));
    }

    #[test]
    fn rules_with_the_most_denied_hits_come_first() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        setup.ask(&[("user", "bob")], 6, 6_001);
        setup.ask(&[("path", "/a"), ("method", "GET")], 9, 6_001);
        setup.ask(&[("quiet", "x")], 50, 6_001);
        let list = setup.list(&RuleQuery::default(), 6_002);
        assert_eq!(paths(&list), ["api", "api.path_/a", "api.path_/a.method", "api.user", "api.quiet"]);
        let denied: Vec<_> = list.rows.iter().map(|row| row.hits.denied).collect();
        assert_eq!(denied, [8, 7, 7, 1, 0]);
        assert!((list.rows[4].hits.shadow_rate - 49.0 / 2.0).abs() < 1e-9, "{:?}", list.rows[4].hits);
        let flat = setup.list(&RuleQuery { rules_only: true, ..RuleQuery::default() }, 6_002);
        assert_eq!(paths(&flat), ["api.path_/a.method", "api.user", "api.quiet", "api.path_/a"]);
        assert_eq!(flat.rows[3].hits.requested, 0);
    }

    #[test]
    fn rates_cover_the_last_seconds() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        let rate = |setup: &mut Setup, second| setup.list(&by_file(), second).rows[1].hits.requested_rate;
        setup.ask(&[("user", "bob")], 20, 6_005);
        assert!((rate(&mut setup, 6_010) - 2.0).abs() < 1e-9);
        setup.ask(&[("user", "bob")], 30, 6_012);
        assert!((rate(&mut setup, 6_020) - 3.0).abs() < 1e-9);
        assert!((rate(&mut setup, 6_030) - 0.0).abs() < 1e-9);
    }

    #[test]
    fn minutes_are_kept_for_an_hour() {
        let mut setup = Setup::new(RULES);
        for minute in 0..70 {
            setup.tick(60 * minute);
            if minute == 5 || minute == 30 {
                setup.ask(&[("user", "bob")], 7, 60 * minute + 1);
            }
        }
        let list = setup.list(&by_file(), 60 * 70 - 1);
        let minutes = &list.rows[1].minutes;
        assert_eq!(minutes.len(), MAX_MINUTES);
        // The last finished minute is 68, so minute 30 is the 39th from the end.
        let with_hits: Vec<_> = minutes.iter().rev().enumerate().filter(|(_, hits)| **hits != [0, 0]).collect();
        assert_eq!(with_hits, [(38, &[7, 2])]);
        assert_eq!((list.rows[1].hits.requested, list.rows[0].minutes[MAX_MINUTES - 39]), (7, [7, 2]));
        assert!(list.rows[2].minutes.is_empty());
        (70..100).for_each(|minute| setup.tick(60 * minute));
        assert!(setup.list(&by_file(), 6_000).rows[1].minutes.is_empty() && setup.table.active.is_empty());
    }

    #[test]
    fn hits_before_the_first_tick_belong_to_the_first_minute() {
        let mut setup = Setup::new(RULES);
        setup.ask(&[("user", "bob")], 7, 1);
        setup.tick(60);
        setup.ask(&[("user", "bob")], 2, 61);
        setup.tick(120);
        assert_eq!(setup.list(&by_file(), 121).rows[1].minutes[MAX_MINUTES - 1], [9, 2]);
    }

    #[test]
    fn the_memory_for_minutes_is_bounded() {
        let mut rules = "domain: api\ndescriptors:\n".to_owned();
        for number in 0..MAX_ACTIVE + 100 {
            let _ = writeln!(rules, "- {{ key: k{number}, rate_limit: {{ unit: day, requests_per_unit: 1 }} }}");
        }
        let mut setup = Setup::new(&rules);
        setup.tick(60);
        for number in 0..MAX_ACTIVE + 100 {
            // The last rule is used most.
            setup.ask(&[(&format!("k{number}"), "")], if number == MAX_ACTIVE + 99 { 5 } else { 1 }, 61);
        }
        setup.tick(120);
        assert_eq!(setup.table.active.len(), MAX_ACTIVE);
        assert!(MAX_ACTIVE * (size_of::<ActiveRule>() + MAX_MINUTES * 8) < 7 << 20);
        let list = setup.list(&RuleQuery { rules_only: true, ..RuleQuery::default() }, 121);
        assert_eq!((paths(&list)[0], list.rows[0].hits.denied), (format!("api.k{}", MAX_ACTIVE + 99).as_str(), 4));
    }

    #[test]
    fn a_tree_that_is_not_requested_is_dropped() {
        let mut setup = Setup::new(RULES);
        setup.list(&by_file(), 100);
        setup.tick(120);
        assert!(setup.table.tree.is_some() && !setup.table.samples.is_empty());
        setup.tick(131);
        assert!(setup.table.tree.is_none() && setup.table.view.is_none() && setup.table.samples.is_empty());
    }

    #[test]
    fn a_minute_ends_once() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        setup.ask(&[("user", "bob")], 2, 6_001);
        [6_020, 6_040, 6_060].into_iter().for_each(|second| setup.tick(second));
        assert_eq!(setup.list(&by_file(), 6_061).rows[1].minutes[MAX_MINUTES - 1], [2, 0]);
    }

    #[test]
    fn the_oldest_of_sixty_minutes_is_kept() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        setup.ask(&[("user", "bob")], 2, 6_001);
        (1..=MAX_MINUTES as u64).for_each(|minute| setup.tick(6_000 + 60 * minute));
        let list = setup.list(&by_file(), 6_000 + 60 * MAX_MINUTES as u64);
        assert_eq!(list.rows[1].minutes.first(), Some(&[2, 0]));
    }

    #[test]
    fn a_level_has_the_sum_of_the_hits_below() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        setup.ask(&[("user", "bob")], 6, 6_001);
        setup.ask(&[("path", "/a"), ("method", "GET")], 9, 6_001);
        setup.ask(&[("quiet", "x")], 50, 6_001);
        let sum = setup.list(&by_file(), 6_002).rows[0].hits;
        assert_eq!((sum.requested_rate, sum.denied_rate, sum.shadow_rate), (32.5, 4.0, 24.5));
        assert_eq!((sum.requested, sum.denied, sum.recently_denied), (65, 8, 8));
    }

    #[test]
    fn recently_denied_hits_include_the_current_minute() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        setup.ask(&[("user", "bob")], 6, 6_001);
        setup.tick(6_060);
        setup.ask(&[("user", "bob")], 7, 6_061);
        let hits = setup.list(&by_file(), 6_062).rows[1].hits;
        assert_eq!((hits.recently_denied, hits.denied), (3, 3));
    }

    #[test]
    fn rates_cover_up_to_thirty_seconds() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        setup.ask(&[("user", "bob")], 20, 6_005);
        setup.list(&by_file(), 6_010);
        setup.ask(&[("user", "bob")], 30, 6_012);
        let rate = setup.list(&by_file(), 6_030).rows[1].hits.requested_rate;
        assert!((rate - 1.5).abs() < 1e-9, "{rate}");
    }

    #[test]
    fn rows_are_reused_for_a_second_by_the_same_query() {
        let mut setup = Setup::new(RULES);
        setup.tick(6_000);
        let requested = |setup: &mut Setup, second| setup.list(&by_file(), second).rows[0].hits.requested;
        assert_eq!(requested(&mut setup, 6_001), 0);
        setup.ask(&[("quiet", "x")], 3, 6_001);
        assert_eq!((requested(&mut setup, 6_001), requested(&mut setup, 6_002)), (0, 3));
        let by_denied = setup.list(&RuleQuery { order: RuleOrder::Denied, ..RuleQuery::default() }, 6_002);
        assert_eq!(paths(&by_denied)[..2], ["api", "api.quiet"]);
        let of_user = setup.list(&RuleQuery { path: "api.user".into(), ..RuleQuery::default() }, 6_002);
        assert_eq!(paths(&of_user), ["api.user"]);
    }

    #[test]
    fn rows_are_not_reused_for_other_rules() {
        let mut setup = Setup::new(RULES);
        setup.list(&by_file(), 6_000);
        let text = "domain: api\ndescriptors:\n- { key: other, rate_limit: { unit: hour, requests_per_unit: 1 } }\n";
        let file = SourceFile { name: "b.yaml".into(), text: text.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let snapshot = Snapshot::new(rules, &setup.engine.statistics, &Resources::default());
        setup.engine.rules.store(Arc::new(snapshot));
        assert_eq!(paths(&setup.list(&by_file(), 6_000)), ["api", "api.other"]);
    }

    #[test]
    fn rows_have_the_outcomes_of_candidate_rules() {
        let mut setup = Setup::new(RULES);
        assert!(setup.list(&by_file(), 6_000).rows.iter().all(|row| row.candidate.is_none()));
        let text = RULES.replace("requests_per_unit: 5", "requests_per_unit: 2");
        let (rules, _) = compile(&[SourceFile { name: "b.yaml".into(), text }], Options::default()).unwrap();
        let candidate = Candidate::new(rules, 1.0, Micros::ZERO, 1, &Resources::default());
        let snapshot = setup.snapshot().with(Overrides::default(), Some(candidate), Micros::ZERO);
        setup.engine.rules.store(Arc::new(snapshot));
        setup.ask(&[("user", "bob")], 6, 6_001);
        let list = setup.list(&by_file(), 6_002);
        let expected = Outcomes { requested: 6, denied: 4, newly_denied: 3, newly_allowed: 0 };
        assert_eq!((list.rows[1].candidate, list.rows[2].candidate), (Some(expected), Some(Outcomes::default())));
    }
}
