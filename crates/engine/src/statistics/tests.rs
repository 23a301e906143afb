//! Tests of the numbers and labels that dashboards rely on.

use sluicegate_algorithm::Decision;
use sluicegate_rules as rules;

use super::*;

/// Returns statistics with room for this number of combinations of values, and not quite for one more.
fn statistics(combinations: usize) -> Arc<Statistics> {
    let max_dynamic_series = (combinations + 1) * Count::EXPORTED - 1;
    Statistics::new(2, StatisticsSettings { max_dynamic_series, near_limit_ratio: 0.8 })
}

fn series(statistics: &Statistics, labels: &[&str]) -> Arc<Series> {
    let labels: Vec<_> = labels.iter().map(|label| (*label).to_owned()).collect();
    statistics.dynamic_series(WorkerId(0), &labels, 1)
}

#[test]
fn a_request_that_crosses_a_threshold_is_split() {
    let statistics = statistics(100);
    // Each row: hits, the counter after them at a limit of 10, and the expected counts (within, near, over).
    for (index, (hits, used, expected)) in [
        (1, 1, (1, 0, 0)),
        (8, 8, (8, 0, 0)),
        (1, 9, (1, 1, 0)),
        (5, 10, (5, 2, 0)),
        (5, 13, (2, 2, 3)),
        (13, 13, (10, 2, 3)),
        (1, 11, (0, 0, 1)),
        (7, 90, (0, 0, 7)),
    ]
    .into_iter()
    .enumerate()
    {
        let series = series(&statistics, &["d", &index.to_string()]);
        let decision = Decision { allowed: used <= 10, used, ..Decision::default() };
        let context = CountContext {
            limit: 10,
            near: statistics.near_threshold(10),
            requests: 1,
            splits_denied: true,
            shadow: true,
            from_deny_cache: false,
        };
        series.count_decision(WorkerId(1), hits, &decision, context);
        let sum = |count| series.sum(count).unwrap_or_default();
        assert_eq!((sum(Count::Within), sum(Count::Near), sum(Count::Over)), expected, "{hits} hits to {used}");
        assert_eq!(sum(Count::Shadow), sum(Count::Over));
    }
}

/// As in envoyproxy/ratelimit, a shared value is labelled with its pattern, and an empty value below it adds nothing.
#[test]
fn labels_contain_the_values_that_rules_select() {
    let text = "domain: d\ndescriptors:\n\
                - {key: path, value: f*, share_threshold: true, descriptors: [{key: user, detailed_metric: true, \
                   rate_limit: {unit: day, requests_per_unit: 1}}]}\n\
                - {key: user, detailed_metric: true, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let file = rules::SourceFile { name: "d.yaml".into(), text: text.into() };
    let (rules, _) = rules::compile(&[file], rules::Options::default()).unwrap();
    for (entries, expected) in [
        (&[("path", "fx"), ("user", "bob")][..], &["d", "path_f*", "user_bob"][..]),
        (&[("path", "fx"), ("user", "")], &["d", "path_f*", "user"]),
        (&[("user", "")], &["d", "user_"]),
    ] {
        let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        let rules::Lookup::Rule(rule, path) = rules.find("d", entries.iter().copied()) else {
            panic!("no rule for {entries:?}");
        };
        assert_eq!(labels("d", &entries, rule, &path), expected);
    }
    let entries = [Entry { key: "user", value: "bob" }, Entry { key: "job", value: "" }];
    assert_eq!(override_labels("d", &entries), ["d", "user_bob", "job"]);
}

#[test]
fn callers_cannot_make_more_series_than_allowed() {
    let statistics = statistics(3);
    for user in 0..100 {
        series(&statistics, &["d", &format!("user_{user}")]).count_requested(WorkerId(0), 1, 1);
    }
    let sums = statistics.collect(Count::Total);
    assert_eq!(sums.len(), 4);
    assert_eq!(sums[&(["other", "other"].map(Arc::from).to_vec(), None)], 97);
    assert_eq!(statistics.overflow.get(), 97);
    series(&statistics, &["d", "user_1"]).count_requested(WorkerId(0), 1, 1);
    assert_eq!(statistics.collect(Count::Total)[&(["d", "user_1"].map(Arc::from).to_vec(), None)], 2);
}

#[test]
fn labels_are_sanitized_like_those_of_envoyproxy_ratelimit() {
    let statistics = statistics(10);
    let labels =
        |labels: &[&str]| series(&statistics, labels).labels().iter().map(ToString::to_string).collect::<Vec<_>>();
    assert_eq!(labels(&["d", "ip_10.0.0.1", "a|b:c", "third"]), ["d", "ip_10_0_0_1", "a_b_c", "third"]);
    assert_eq!(labels(&["d", "host_a.example.com"]), ["d", "host_a.example.com"]);
    assert_eq!(labels(&["d", "a\nb:1|c\r\0\u{7f}\u{85}x", "a.__zone=b"]), ["d", "a_b_1_c____x", "a___zone=b"]);
}

#[test]
fn each_count_and_each_outcome_has_its_own_name_and_description() {
    let distinct = |texts: &[&str]| texts.iter().collect::<std::collections::BTreeSet<_>>().len();
    assert_eq!(distinct(&Count::HITS.map(Count::name)), Count::HITS.len());
    assert_eq!(distinct(&Count::HITS.map(Count::description)), Count::HITS.len());
    assert_eq!(distinct(&Outcome::ALL.map(Outcome::name)), Outcome::ALL.len());
    let labels = class_labels(["gold", "d", "user"].map(str::to_owned).to_vec());
    let labels: Vec<_> = labels.iter().map(|label| format!("{}={}", label.name, label.value.as_str())).collect();
    assert_eq!(labels, ["class=gold", "domain=d", "key1=user"]);
}

/// A series appears with its first hit, and its count of the deny cache with the first hit that is denied from there.
#[test]
fn unused_series_are_hidden() {
    let statistics = statistics(10);
    let series = series(&statistics, &["d", "user"]);
    series.count_requested(WorkerId(0), 0, 1);
    assert_eq!((series.sum(Count::Total), statistics.collect(Count::Total).len()), (None, 0));
    let deny = |from_deny_cache| {
        let context =
            CountContext { limit: 2, requests: 1, near: 1, splits_denied: false, shadow: false, from_deny_cache };
        series.count_decision(WorkerId(0), 3, &Decision { used: 3, ..Decision::default() }, context);
    };
    let counts =
        || [Count::Within, Count::Over, Count::DenyCache].map(|count| statistics.collect(count).into_values().next());
    deny(false);
    assert_eq!(counts(), [Some(0), Some(3), None]);
    deny(true);
    assert_eq!(counts(), [Some(0), Some(6), Some(3)]);
}

/// Prometheus has a series for each protocol; statsd and the totals have their sum.
#[test]
fn hits_are_counted_by_protocol() {
    let statistics = statistics(10);
    let series = series(&statistics, &["d", "user"]);
    let exported = || statistics.collect(Count::Total).into_iter().map(|((_, protocol), hits)| (protocol, hits));
    series.reports().count_requested(WorkerId(1), 3, 3);
    assert_eq!(exported().collect::<Vec<_>>(), [(Some("rlqs"), 3)]);
    series.count_requested(WorkerId(0), 4, 1);
    assert_eq!(exported().collect::<Vec<_>>(), [(None, 4), (Some("rlqs"), 3)]);
    let mut totals = Totals::new();
    statistics.add_totals(&mut totals);
    assert_eq!(totals["ratelimit.service.rate_limit.d.user.total_hits"], 7);
    assert_eq!(statistics.hit_totals().requested, 7);
}

#[test]
fn a_value_is_a_label_only_if_the_rule_selects_it() {
    let text = "domain: d\ndescriptors:\n\
                - {key: user, value_to_metric: true, rate_limit: {unit: day, requests_per_unit: 1}}\n\
                - {key: org, value_to_metric: true, descriptors: [{key: path, rate_limit: {unit: day, \
                   requests_per_unit: 1}}]}\n";
    let file = rules::SourceFile { name: "d.yaml".into(), text: text.into() };
    let (rules, _) = rules::compile(&[file], rules::Options::default()).unwrap();
    for (entries, expected) in
        [(&[("user", "bob")][..], &["d", "user_bob"][..]), (&[("org", "a"), ("path", "/x")], &["d", "org_a", "path"])]
    {
        let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        let rules::Lookup::Rule(rule, path) = rules.find("d", entries.iter().copied()) else {
            panic!("no rule for {entries:?}");
        };
        assert_eq!(labels("d", &entries, rule, &path), expected);
    }
}

#[test]
fn classes_of_rules_with_equal_labels_are_added_up() {
    let statistics = statistics(10);
    let limit = "rate_limit: {unit: day, requests_per_unit: 1, shed: true}";
    let text = format!(
        "domain: d\ndescriptors: [{{key: a, descriptors: [{{key: b, descriptors: [{{key: x, {limit}}}, {{key: y, \
         {limit}}}]}}]}}]\n"
    );
    let file = rules::SourceFile { name: "d.yaml".into(), text };
    let (mut rules, _) = rules::compile(&[file], rules::Options::default()).unwrap();
    let registered = statistics.register_rules(rules.rules_mut());
    for (rule, second) in registered.iter().zip([1_000, 1_005]) {
        let shedding = rule.shedding.as_ref().unwrap();
        shedding.record(WorkerId(0), 0, Outcome::Allowed, 5, Micros::from_secs(second));
        shedding.record(WorkerId(1), 0, Outcome::Shed, 2, Micros::from_secs(second));
    }
    let classes: Vec<_> = statistics.by_class(Micros::from_secs(1_010)).into_iter().collect();
    let labels = ["all", "d", "a", "b"].map(str::to_owned).to_vec();
    let sums = ClassSums { hits: [10, 0, 4], shed_since: Some(Micros::from_secs(1_000)) };
    assert_eq!(classes, [(labels, sums)]);
}

/// A request of many hits is one request, and a request that only shadow mode allows is not denied.
#[test]
fn requests_are_counted_beside_hits() {
    let statistics = statistics(10);
    let series = series(&statistics, &["d", "user"]);
    let decide = |hits, allowed, shadow| {
        series.count_requested(WorkerId(0), hits, 1);
        let (requests, near) = (hits.min(1), 9);
        let context = CountContext { limit: 10, requests, near, splits_denied: false, shadow, from_deny_cache: false };
        series.count_decision(WorkerId(0), hits, &Decision { allowed, used: hits, ..Decision::default() }, context);
    };
    decide(9_000, true, false);
    decide(7, false, false);
    decide(1, false, false);
    decide(5, false, true);
    decide(0, false, false);
    series.count_refunded(WorkerId(0), 4);
    series.count_refunded(WorkerId(1), 2);
    series.reports().count_requested(WorkerId(1), 3, 3);
    let collected = |sums: BySeries| sums.into_iter().map(|((_, protocol), sum)| (protocol, sum)).collect::<Vec<_>>();
    assert_eq!(collected(statistics.collect_requests()), [(None, 4), (Some("rlqs"), 3)]);
    assert_eq!(collected(statistics.collect(Count::DeniedRequests))[0], (None, 2));
    assert_eq!(collected(statistics.collect_refunded()), [(None, 6)]);
    let mut totals = Totals::new();
    statistics.add_totals(&mut totals);
    assert_eq!(totals["ratelimit.service.rate_limit.d.user.total_negative_hits"], 6);
    assert_eq!(totals["ratelimit.service.rate_limit.d.user.total_hits"], 9_016);
    let totals = RuleTotals(series).get().unwrap();
    let expected = RuleHits { requests: 7, denied_requests: 2, requested: 9_016, denied: 8, shadow: 5 };
    assert_eq!(totals, expected);
}
