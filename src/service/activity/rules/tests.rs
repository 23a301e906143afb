//! Tests of the rates, the minutes and the rows of rules.

use std::fmt::Write;

use smallvec::smallvec;

use super::*;
use crate::service::activity::RuleOrder;
use crate::{
    engine::{Candidate, Descriptor, Engine, Overrides, Request, Resources, Statistics, StatisticsSettings},
    rules::{Entry, Options, SourceFile, compile},
    store::{Memory, memory},
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
    engine: Engine<Arc<Memory>>,
    table: RuleTable,
}

impl Setup {
    fn new(rules: &str) -> Self {
        let file = SourceFile { name: "a.yaml".into(), text: rules.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let statistics = Statistics::new(1, StatisticsSettings { max_dynamic_series: 70, near_limit_ratio: 0.8 });
        let engine = Engine::in_memory(rules, statistics, &memory::Settings { max_counters: 1_000_000 });
        Self { engine, table: RuleTable::default() }
    }

    fn snapshot(&self) -> Arc<Snapshot> {
        self.engine.rules.load_full()
    }

    fn ask(&self, entries: &[(&str, &str)], times: u32, second: u64) {
        for _ in 0..times {
            let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
            let descriptor = Descriptor::new(entries);
            let request = Request { domain: "api", descriptors: smallvec![descriptor], feedback: vec![] };
            self.engine.decide_in(&self.engine.store, &request, Micros::from_secs(second)).unwrap();
        }
    }

    fn tick(&mut self, second: u64) {
        self.table.tick(&self.snapshot(), Micros::from_secs(second));
    }

    fn list(&mut self, query: &RuleQuery, second: u64) -> RuleList {
        self.table.list(
            &self.snapshot(),
            &RuleQuery { max_rows: 100, ..query.clone() },
            [].iter(),
            Micros::from_secs(second),
        )
    }
}

fn paths(list: &RuleList) -> Vec<&str> {
    list.rows.iter().map(|row| row.path.as_str()).collect()
}

/// Returns a minute of requests with one hit each.
fn minute(requested: u32, denied: u32) -> Minute {
    Minute { denied_requests: denied, requests: requested, denied, requested }
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
        [].iter(),
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
fn rules_with_the_most_denied_requests_come_first() {
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
    let with_hits: Vec<_> =
        minutes.iter().rev().enumerate().filter(|(_, minute)| **minute != Minute::default()).collect();
    assert_eq!(with_hits, [(38, &minute(7, 2))]);
    assert_eq!((list.rows[1].hits.requested, list.rows[0].minutes[MAX_MINUTES - 39]), (7, minute(7, 2)));
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
    assert_eq!(setup.list(&by_file(), 121).rows[1].minutes[MAX_MINUTES - 1], minute(9, 2));
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
    assert!(MAX_ACTIVE * (size_of::<ActiveRule>() + MAX_MINUTES * size_of::<Minute>()) < 14 << 20);
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
    assert_eq!(setup.list(&by_file(), 6_061).rows[1].minutes[MAX_MINUTES - 1], minute(2, 0));
}

#[test]
fn the_oldest_of_sixty_minutes_is_kept() {
    let mut setup = Setup::new(RULES);
    setup.tick(6_000);
    setup.ask(&[("user", "bob")], 2, 6_001);
    (1..=MAX_MINUTES as u64).for_each(|minute| setup.tick(6_000 + 60 * minute));
    let list = setup.list(&by_file(), 6_000 + 60 * MAX_MINUTES as u64);
    assert_eq!(list.rows[1].minutes.first(), Some(&minute(2, 0)));
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
