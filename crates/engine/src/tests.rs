//! Tests of whole decisions, with counters in memory.

use std::collections::BTreeMap;

use futures_util::FutureExt;
use sluicegate_algorithm::Consistency;
use sluicegate_metrics::Totals;
use sluicegate_rules::{Metadata, Options};
use smallvec::smallvec;

use super::{
    matching::Match,
    overrides::{Mode, Origin},
    testing::{MemoryEngine, NOW, decide, descriptor, engine, engine_with, overrides, refund},
    *,
};

const RULES: &str = "
domain: api
descriptors:
- {key: wide, rate_limit: {unit: year, requests_per_unit: 10}}
- {key: narrow, rate_limit: {unit: year, requests_per_unit: 2}}
- {key: dark, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 2}}
- {key: quota, quota_mode: true, rate_limit: {unit: year, requests_per_unit: 2}}
- {key: free, rate_limit: {unlimited: true}}
- {key: slots, rate_limit: {algorithm: adaptive, method: aimd, ceiling: 100, initial: 10, hold: 1h, holder: id}}
";

fn charge_all() -> String {
    RULES.replace("domain: api", "domain: api\ncharge: all")
}

/// Replaces all overrides.
fn set(engine: &MemoryEngine, entries: &[(&str, &str)]) {
    let snapshot = engine.rules.load().with(overrides(entries), None, NOW);
    engine.rules.store(snapshot.into());
}

/// Returns a descriptor with the value `x`.
fn one(key: &str, hits: u64) -> Descriptor<'_> {
    descriptor(&[(key, "x")], hits)
}

fn decide_one(engine: &MemoryEngine, descriptor: Descriptor<'_>) -> Status {
    decide(engine, &[descriptor]).statuses.remove(0)
}

/// Returns whether each descriptor is allowed, and its remaining hits.
fn statuses(verdict: &Verdict) -> Vec<(bool, u64)> {
    verdict.statuses.iter().map(|status| (!status.is_over(), status.remaining)).collect()
}

/// Returns a count by the end of its name in statsd.
fn count(engine: &MemoryEngine, name: &str) -> u64 {
    let mut totals = Totals::new();
    engine.statistics.add_totals(&mut totals);
    totals.get(&format!("ratelimit.service.{name}")).copied().unwrap_or_default()
}

/// Returns the counts of a rule's hits: within the limit, over it, and denied from the deny cache.
fn counts(engine: &MemoryEngine, key: &str) -> [u64; 3] {
    ["within_limit", "over_limit", "over_limit_with_local_cache"]
        .map(|name| count(engine, &format!("rate_limit.api.{key}.{name}")))
}

#[test]
fn only_a_binding_denial_prevents_the_takes_of_a_request() {
    let settings = |shadow_mode, quota_mode| Settings { shadow_mode, quota_mode, ..Settings::default() };
    for (key, settings, remaining) in [
        ("narrow", settings(false, false), 10),
        ("dark", settings(false, false), 9),
        ("quota", settings(false, false), 9),
        ("narrow", settings(true, false), 9),
        ("narrow", settings(false, true), 9),
    ] {
        let engine = engine_with(&charge_all(), Options::default(), settings);
        let verdict = decide(&engine, &[one("wide", 1), one(key, 3)]);
        assert_eq!(statuses(&verdict)[0], (true, remaining), "{key}");
    }
}

#[test]
fn a_request_that_takes_nothing_is_not_counted_as_within_a_limit() {
    let engine = engine(&charge_all());
    assert!(decide(&engine, &[one("wide", 1), one("narrow", 3)]).is_denied());
    assert_eq!((counts(&engine, "wide"), counts(&engine, "narrow")), ([0, 0, 0], [0, 3, 0]));
    let verdict = decide(&engine, &[one("wide", 1), one("narrow", 1)]);
    assert_eq!(statuses(&verdict), [(true, 9), (true, 1)]);
    assert_eq!((counts(&engine, "wide"), counts(&engine, "narrow")), ([1, 0, 0], [1, 3, 0]));
    // A limit that is alone in its request counts the hits below it.
    assert!(decide(&engine, &[descriptor(&[("narrow", "y")], 5)]).is_denied());
    assert_eq!(counts(&engine, "narrow"), [3, 6, 0]);
}

#[test]
fn limits_that_are_charged_each_are_counted_each() {
    let engine = engine(RULES);
    let verdict = decide(&engine, &[one("wide", 1), one("narrow", 3)]);
    assert_eq!((verdict.is_denied(), statuses(&verdict)), (true, vec![(true, 9), (false, 0)]));
    assert_eq!((counts(&engine, "wide"), counts(&engine, "narrow")), ([1, 0, 0], [2, 1, 0]));
}

#[test]
fn hits_of_one_request_on_one_counter_are_charged_together() {
    let engine = engine(&charge_all());
    let twice = |value, hits| [descriptor(&[("wide", value)], hits), descriptor(&[("wide", value)], hits)];
    assert_eq!(statuses(&decide(&engine, &twice("x", 6))), [(false, 0), (false, 0)]);
    assert_eq!(statuses(&decide(&engine, &twice("y", 5))), [(true, 0), (true, 0)]);
    let others = [descriptor(&[("wide", "z")], 1), one("narrow", 1)];
    assert_eq!(statuses(&decide(&engine, &others)), [(true, 9), (true, 1)]);
}

#[test]
fn a_switch_that_denies_prevents_the_takes_of_the_other_limits() {
    let (engine, each) = (engine(&charge_all()), engine(RULES));
    set(&engine, &[("switch|rule|api|narrow", "deny")]);
    let verdict = decide(&engine, &[one("wide", 1), one("narrow", 1)]);
    assert_eq!((verdict.is_denied(), statuses(&verdict)), (true, vec![(true, 10), (false, 0)]));
    assert_eq!((counts(&engine, "wide"), counts(&engine, "narrow")), ([0, 0, 0], [0, 1, 0]));
    let period = TopEntities::DEFAULT_PERIOD;
    let top = |by| engine.top.as_ref().unwrap().ranking(by, 9, period, NOW, |_, _| true).hits;
    assert_eq!((top(RankBy::Requested), top(RankBy::Denied)), (2, 1));
    set(&engine, &[]);
    assert_eq!(statuses(&decide(&engine, &[one("wide", 1), one("narrow", 1)])), [(true, 9), (true, 1)]);
    // Without `charge: all`, the other limit is charged.
    set(&each, &[("switch|rule|api|narrow", "deny")]);
    assert_eq!(statuses(&decide(&each, &[one("wide", 1), one("narrow", 1)])), [(true, 9), (false, 0)]);
}

#[test]
fn hits_are_ranked_as_denied_only_if_they_are_denied() {
    let engine = engine(RULES);
    for key in ["wide", "narrow", "dark"] {
        decide(&engine, &[one(key, 3)]);
    }
    let period = TopEntities::DEFAULT_PERIOD;
    let top = |by| engine.top.as_ref().unwrap().ranking(by, 9, period, NOW, |_, _| true);
    assert_eq!(top(RankBy::Requested).hits, 9);
    let denied: Vec<_> = top(RankBy::Denied).top.iter().map(|entity| entity.target.to_string()).collect();
    assert_eq!(denied, ["limit|api|narrow=x"]);
}

#[test]
fn the_totals_are_the_hits_of_all_rules() {
    let engine = engine(RULES);
    for (key, hits) in [("wide", 9), ("narrow", 3), ("dark", 3)] {
        decide(&engine, &[one(key, hits)]);
    }
    let expected = HitTotals { requested: 15, denied: 1, near: 3, shadow: 1 };
    assert_eq!(engine.statistics.hit_totals(), expected);
}

#[test]
fn the_global_shadow_mode_allows_everything_unless_a_switch_enforces_everything() {
    let settings = Settings { shadow_mode: true, ..Settings::default() };
    let shadow = engine_with(RULES, Options::default(), settings);
    assert!(!decide(&shadow, &[one("narrow", 3)]).is_denied());
    assert_eq!(count(&shadow, "global_shadow_mode"), 1);
    set(&shadow, &[("switch|everything", "enforce")]);
    assert!(decide(&shadow, &[one("narrow", 3)]).is_denied());
    set(&shadow, &[("switch|domain|api", "enforce")]);
    assert!(!decide(&shadow, &[one("narrow", 3)]).is_denied());
    assert_eq!((count(&shadow, "global_shadow_mode"), count(&engine(RULES), "global_shadow_mode")), (2, 0));
    let enforced = engine(RULES);
    assert!(!decide(&enforced, &[one("narrow", 2)]).is_denied());
    assert!(decide(&enforced, &[one("narrow", 1)]).is_denied());
    assert!(!decide(&enforced, &[one("dark", 3)]).is_denied());
}

/// Under `charge: all`, a denial counts in no other limit, unless it allows the request.
#[test]
fn the_global_shadow_mode_decides_what_a_denial_is_charged_to() {
    let settings = Settings { shadow_mode: true, ..Settings::default() };
    let engine = engine_with(&charge_all(), Options::default(), settings);
    let request = [one("narrow", 3), one("wide", 1)];
    decide(&engine, &request);
    assert_eq!(decide_one(&engine, one("wide", 0)).remaining, 9, "the request was allowed and counted");
    set(&engine, &[("switch|everything", "enforce")]);
    assert!(decide(&engine, &request).is_denied());
    assert_eq!(decide_one(&engine, one("wide", 0)).remaining, 9, "the request was denied");
}

#[test]
fn the_global_shadow_mode_denies_nothing_to_callers_with_quotas() {
    let rules = format!(
        "{RULES}- {{key: queue, rate_limit: {{unit: second, requests_per_unit: 9, algorithm: leaky_bucket, \
                         queue: 3, on_error: deny}}}}\n"
    );
    let settings = Settings { shadow_mode: true, ..Settings::default() };
    let engine = engine_with(&rules, Options::default(), settings);
    let quota = |key| {
        let report = BucketReport {
            domain: "api",
            entries: smallvec![Entry { key, value: "x" }],
            caller: 1,
            allowed: 0,
            denied: 0,
            demand: None,
            elapsed: Micros::ZERO,
            held: HeldQuota::default(),
            ttl: Micros::from_secs(15),
            lifetime: Micros::from_secs(17),
        };
        engine.assign(&report, NOW).now_or_never().unwrap().assignment.unwrap().quota
    };
    let blocked = ("limit|api|wide=x", "blocked");
    set(&engine, &[blocked]);
    assert_eq!(["narrow", "queue", "wide"].map(quota), [Quota::AllowAll; 3]);
    set(&engine, &[blocked, ("switch|everything", "enforce")]);
    assert!(matches!(["narrow", "queue", "wide"].map(quota), [Quota::TokenBucket(_), Quota::DenyAll, Quota::DenyAll]));
}

#[test]
fn a_limit_that_is_not_visible_decides_without_numbers() {
    let text = "domain: api\ndescriptors:\n- {key: open, rate_limit: {unit: hour, requests_per_unit: 9}}\n\
                - {key: guard, rate_limit: {unit: hour, requests_per_unit: 2, visible: false}}\n";
    let engine = engine(text);
    let request = [one("open", 1), one("guard", 1)];
    let verdict = decide(&engine, &request);
    assert_eq!(
        (statuses(&verdict)[1], &verdict.statuses[1].limit, verdict.statuses[1].reset),
        ((true, 0), &None, None)
    );
    assert_eq!(verdict.binding().map(|binding| (binding.limit, binding.remaining)), Some((9, 8)));
    decide(&engine, &request);
    let denied = decide(&engine, &request);
    assert!(denied.is_denied() && denied.retry_after().is_some() && denied.statuses[1].limit.is_none());
    assert_eq!(denied.binding().map(|binding| (binding.limit, binding.remaining)), Some((9, 6)));
    assert_eq!(decide(&engine, &[one("guard", 3)]).max_cost(), None);
}

#[test]
fn quota_mode_applies_to_a_rule_or_to_all_descriptors() {
    let quota = |engine: &MemoryEngine| {
        let verdict = decide(engine, &[one("quota", 1), one("wide", 1), one("unknown", 1)]);
        verdict.statuses.iter().map(|status| status.quota).collect::<Vec<_>>()
    };
    assert_eq!(quota(&engine(RULES)), [true, false, false]);
    let settings = Settings { quota_mode: true, ..Settings::default() };
    assert_eq!(quota(&engine_with(RULES, Options::default(), settings)), [true; 3]);
}

#[test]
fn an_override_takes_precedence_over_the_rule() {
    let engine = engine(RULES);
    set(
        &engine,
        &[
            ("limit|api|wide=x", "20/year"),
            ("limit|api|wide=blocked", "blocked"),
            ("limit|api|wide=open", "unlimited"),
            ("limit|api|tenant=a", "1/year"),
        ],
    );
    let status = |entries: &[(&'static str, &'static str)]| decide_one(&engine, descriptor(entries, 1));
    let limit = |status: &Status| status.limit.as_ref().map(|limit| limit.requests);
    let custom = status(&[("wide", "x")]);
    assert_eq!((limit(&custom), custom.remaining, custom.override_kind), (Some(20), 19, Some(OverrideKind::Limit)));
    let rule = status(&[("wide", "y")]);
    assert_eq!((limit(&rule), rule.remaining, rule.override_kind), (Some(10), 9, None));
    let open = status(&[("wide", "open")]);
    assert_eq!((open.unlimited, open.override_kind), (true, Some(OverrideKind::Limit)));
    // Denials without a counter have no reset time and must not be cached.
    let blocked = status(&[("wide", "blocked")]);
    assert_eq!((blocked.is_over(), blocked.reset, blocked.denial_counts), (true, None, true));
    assert!(!decide_one(&engine, refund(descriptor(&[("wide", "blocked")], 1))).is_over());
    // Without a rule, an override applies only to its exact descriptor.
    assert_eq!(limit(&status(&[("tenant", "a")])), Some(1));
    assert_eq!(limit(&status(&[("tenant", "a"), ("path", "/")])), None);
}

#[test]
fn a_switch_takes_precedence_over_the_rule() {
    let engine = engine(RULES);
    set(&engine, &[("switch|domain|api", "deny"), ("switch|rule|api|wide", "off")]);
    let off = decide_one(&engine, one("wide", 1));
    let switched = |mode| Some(OverrideKind::Switch(mode));
    assert_eq!((off.is_over(), off.limit, off.override_kind), (false, None, switched(Mode::Off)));
    for key in ["narrow", "dark", "free"] {
        let denied = decide_one(&engine, one(key, 1));
        assert_eq!((denied.is_over(), denied.override_kind), (true, switched(Mode::Deny)), "{key}");
    }
    assert!(!decide_one(&engine, refund(one("narrow", 1))).is_over());
    set(&engine, &[("switch|rule|api|narrow", "shadow")]);
    assert!(!decide_one(&engine, one("narrow", 3)).is_over());
}

#[test]
fn a_replaced_limit_counts_nothing() {
    let text = "domain: api\ndescriptors:\n- {key: few, rate_limit: {unit: year, requests_per_unit: 3, name: few}}\n\
                - {key: strict, rate_limit: {unit: year, requests_per_unit: 1, replaces: [{name: few}]}}\n";
    let engine = engine(text);
    let verdict = decide(&engine, &[one("few", 3), one("strict", 1)]);
    assert_eq!((verdict.statuses[0].limit.is_none(), verdict.statuses[1].remaining), (true, 0));
    assert_eq!(decide_one(&engine, one("few", 1)).remaining, 2);
}

#[test]
fn an_elastic_limit_marks_hits_above_the_limit_proper() {
    let text = "domain: api\ndescriptors:\n- {key: soft, rate_limit: {unit: year, requests_per_unit: 2, soft: 100%}}\n\
                - {key: elastic, rate_limit: {unit: year, requests_per_unit: 2, elastic: {resource: db, up_to: 200%}}}\n";
    let engine = engine(text);
    let hits = |key: &str, value: &str| -> Vec<_> {
        let hit = |_| decide_one(&engine, descriptor(&[(key, value)], 1));
        (0..5).map(hit).map(|status| (!status.is_over(), status.remaining, status.elastic)).collect()
    };
    let hard = [(true, 1, false), (true, 0, false), (false, 0, false), (false, 0, false), (false, 0, false)];
    let extended = |elastic| [hard[0], hard[1], (true, 0, elastic), (true, 0, elastic), hard[4]];
    assert_eq!(hits("soft", "x"), extended(false));
    assert_eq!(hits("elastic", "unknown"), hard);
    let snapshot = engine.rules.load_full();
    let resource = snapshot.compiled.rule_states[1].resource.as_ref().unwrap();
    resource.set(Some(0.0));
    assert_eq!(hits("elastic", "idle"), extended(true));
    resource.set(None);
    assert_eq!(hits("elastic", "gone"), hard);
    // Spare capacity may appear at any time, so clients must not cache the denial.
    let denial_counts = |key| decide_one(&engine, one(key, 1)).denial_counts;
    assert_eq!((denial_counts("elastic"), denial_counts("soft")), (true, false));
}

#[test]
fn denials_are_counted_as_shed_unless_the_caller_exceeded_its_own_limit() {
    let text = "domain: api\ndescriptors:\n- {key: own, rate_limit: {unit: year, requests_per_unit: 1}}\n\
                - {key: backend, rate_limit: {unit: year, requests_per_unit: 1, shed: true}}\n\
                - {key: tenants, rate_limit: {capacity: 10/h, class: tenant, shares: {gold: {min: 4}, \
                   free: {min: 1, max: 3}, other: {max: 2}}}}\n";
    let engine = engine(text);
    let last = |entries: &[(&'static str, &'static str)], hits: u32| {
        let statuses: Vec<_> = (0..hits).map(|_| decide_one(&engine, descriptor(entries, 1))).collect();
        let (last, others) = statuses.split_last().unwrap();
        assert!(others.iter().all(|status| !status.is_over() && !status.shed), "{entries:?}");
        (last.is_over(), last.shed)
    };
    assert_eq!(last(&[("own", "x")], 2), (true, false));
    assert_eq!(last(&[("backend", "x")], 2), (true, true));
    assert_eq!(last(&[("tenants", "x"), ("tenant", "free")], 4), (true, false));
    assert_eq!(last(&[("tenants", "x"), ("tenant", "gold")], 8), (true, true));
    let totals = engine.statistics.class_totals(NOW).into_iter();
    let totals: BTreeMap<_, _> = totals.map(|class| (class.class, [class.allowed, class.denied, class.shed])).collect();
    let expected = [("all", [1, 0, 1]), ("gold", [7, 0, 1]), ("free", [3, 1, 0]), ("other", [0; 3])]
        .map(|(class, hits)| (class.to_owned(), hits));
    assert_eq!(totals, BTreeMap::from(expected));
}

#[test]
fn slots_belong_to_their_holder_and_an_adaptive_limit_learns_from_samples() {
    let engine = engine(RULES);
    let slot = |id| descriptor(&[("slots", "x"), ("id", id)], 1);
    let remaining = ["a", "a", "b"].map(|id| decide_one(&engine, slot(id)).remaining);
    assert_eq!(remaining, [9, 9, 8], "a holder has one slot");
    // Ten requests that were dropped within half a second lower the limit by a tenth.
    for number in 0..10 {
        let sample = Sample { latency: Micros::new(1_000), dropped: true };
        let feedback = vec![Feedback { sample: Some(sample), ..Feedback::default() }];
        decide(&engine, &[slot("c")]);
        let request = Request { domain: "api", descriptors: smallvec![refund(slot("c"))], feedback };
        let now = Micros::new(NOW.get() + number * 100_000);
        engine.decide_in(&engine.store, &request, now).unwrap();
    }
    let limit = decide_one(&engine, slot("d")).limit.unwrap();
    assert_eq!((limit.requests, limit.quota), (9, 9));
}

#[test]
fn a_limit_has_the_consistency_of_its_rule_or_override() {
    let text = "domain: api\ndescriptors:\n\
                - {key: leased, rate_limit: {unit: year, requests_per_unit: 9, consistency: leased}}\n\
                - {key: exact, rate_limit: {unit: year, requests_per_unit: 9}}\n";
    let engine = engine(text);
    let custom = "{unit: year, requests_per_unit: 9, consistency: eventual}";
    set(&engine, &[("limit|api|leased=y", custom), ("limit|api|exact=y", "9/year")]);
    let snapshot = engine.rules.load_full();
    for (key, value, expected) in [
        ("leased", "x", Consistency::Leased),
        ("leased", "y", Consistency::Eventual),
        ("exact", "x", Consistency::Exact),
        ("exact", "y", Consistency::Exact),
    ] {
        let descriptor = descriptor(&[(key, value)], 1);
        let matched = engine.find_match(&snapshot, "api", &descriptor, NOW);
        let Match::Limited(applied) = matched else { panic!("{key}={value} has no limit") };
        assert_eq!(applied.consistency(), expected, "{key}={value}");
    }
}

#[test]
fn a_verdict_contains_the_metadata_of_the_rules_that_allowed_a_descriptor() {
    let text = "domain: api\ndescriptors:\n\
                - {key: few, rate_limit: {unit: year, requests_per_unit: 1}, metadata: {plan: basic}}\n\
                - {key: many, rate_limit: {unit: year, requests_per_unit: 9}, metadata: {team: edge, plan: other}}\n\
                - {key: free, rate_limit: {unlimited: true}, metadata: {open: yes}}\n";
    let settings = Settings { metadata: true, ..Settings::default() };
    let on = engine_with(text, Options::default(), settings);
    let map = |entries: &[(&str, &str)]| {
        let entry = |(key, value): &(&str, &str)| ((*key).to_owned(), Metadata::Text((*value).to_owned()));
        Some(Metadata::Map(entries.iter().map(entry).collect()))
    };
    let metadata = |engine: &MemoryEngine| decide(engine, &["few", "many", "free"].map(|key| one(key, 1))).metadata;
    assert_eq!(metadata(&on), map(&[("plan", "basic"), ("team", "edge")]), "the first rule wins");
    assert_eq!(metadata(&on), map(&[("plan", "other"), ("team", "edge")]), "a rule that denies has no metadata");
    assert_eq!((decide(&on, &[one("free", 1)]).metadata, metadata(&engine(text))), (None, None));
}

#[test]
fn an_inspection_describes_the_counter_and_takes_nothing() {
    let engine = engine(RULES);
    let inspect = |entries: &[(&str, &str)]| {
        let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        engine.inspect("api", &entries, 1, NOW).now_or_never().unwrap().unwrap()
    };
    decide(&engine, &[one("narrow", 3), one("dark", 3)]);
    let narrow = inspect(&[("narrow", "x")]);
    let counter = narrow.counter.as_ref().unwrap();
    assert_eq!((narrow.allowed, counter.limit.requests(), counter.decision.used), (false, 2, 3));
    assert_eq!(counter.parts().iter().map(|part| part.hits).sum::<u64>(), 3);
    let remaining: Vec<_> = counter.forecast().into_iter().map(|(_, remaining)| remaining).collect();
    assert_eq!(remaining, [0, 2]);
    assert!(inspect(&[("narrow", "y")]).allowed && inspect(&[("unknown", "x")]).allowed);
    let dark = inspect(&[("dark", "x")]);
    assert!(dark.allowed && dark.counter.is_some_and(|counter| !counter.decision.allowed));
    // The holder is not part of the counter's name.
    let entries = [("slots", "x"), ("id", "7")];
    let key = inspect(&entries).counter.unwrap().counter.key;
    assert!(key.starts_with("{api|slots=x}"), "{key}");
    let entries = entries.map(|(key, value)| Entry { key, value });
    assert_eq!(counter_of(&engine, &entries), Some((key, false)));
    set(&engine, &[("limit|api|narrow=x", "blocked"), ("switch|rule|api|narrow", "enforce")]);
    let blocked = inspect(&[("narrow", "x")]);
    let overrides: Vec<_> =
        blocked.overrides.iter().map(|(origin, entry)| (*origin, entry.target.to_string())).collect();
    let expected = ["switch|rule|api|narrow", "limit|api|narrow=x"].map(|target| (Origin::Store, target.to_owned()));
    assert_eq!((blocked.allowed, overrides), (false, expected.to_vec()));
}

fn counter_of(engine: &MemoryEngine, entries: &[Entry<'_>]) -> Option<(String, bool)> {
    counter(engine.rules.load().rule_set(), "api", entries, None)
}

#[test]
fn operators_can_refund_hits_and_delete_counters() {
    let engine = engine(RULES);
    let entries = [Entry { key: "narrow", value: "x" }];
    assert!(decide_one(&engine, one("narrow", 3)).is_over());
    engine.refund("api", &entries, 2, NOW).now_or_never().unwrap().unwrap();
    assert_eq!(statuses(&decide(&engine, &[one("narrow", 1)])), [(true, 0)]);
    let reset = |entries: &[Entry<'_>]| {
        let reset = engine.reset_counter("api", entries, NOW).now_or_never().unwrap().unwrap();
        reset.map(|(location, existed)| (location.key, existed))
    };
    let key = counter_of(&engine, &entries).unwrap().0;
    assert_eq!((reset(&entries), reset(&entries)), (Some((key.clone(), true)), Some((key, false))));
    assert_eq!(statuses(&decide(&engine, &[one("narrow", 1)])), [(true, 1)]);
    assert_eq!(reset(&[Entry { key: "free", value: "x" }]), None);
}

#[test]
fn a_snapshot_with_other_overrides_has_the_same_rules() {
    let (engine, other) = (engine(RULES), engine(RULES));
    let before = engine.rules.load_full();
    set(&engine, &[("switch|everything", "shadow")]);
    let after = engine.rules.load_full();
    assert!(after.has_same_rules(&before) && !after.has_same_rules(&other.rules.load()));
    let modes = |snapshot: &Snapshot| snapshot.modes().in_force().len();
    assert_eq!((modes(&before), modes(&after)), (0, 1));
}

/// Descriptors that an override, the request itself or a switch handles have a rule, or need none.
#[test]
fn descriptors_that_no_rule_matches_are_counted_with_their_keys() {
    let engine = engine(RULES);
    set(&engine, &[("limit|api|vip=x", "5/day")]);
    decide(&engine, &[one("wide", 1), one("unknown", 1), one("vip", 1)]);
    decide(&engine, &[one("unknown", 1)]);
    let groups = engine.statistics.unmatched().groups();
    let groups: Vec<_> = groups.iter().map(|group| (&*group.domain, &*group.keys, group.total)).collect();
    assert_eq!(groups, [("api", &["unknown".to_owned()][..], 2)]);
    // An inspection is not a request.
    engine.inspect("api", &[Entry { key: "unknown", value: "x" }], 1, NOW).now_or_never().unwrap().unwrap();
    assert_eq!(engine.statistics.unmatched().groups()[0].total, 2);
}

#[test]
fn entities_with_a_phase_have_windows_of_their_own() {
    let engine =
        engine("domain: api\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 9, phase: entity}}]");
    let resets: Vec<_> = ["a", "b", "c"]
        .map(|value| decide(&engine, &[descriptor(&[("k", value)], 1)]).statuses[0].reset)
        .into_iter()
        .collect();
    assert!(resets[0] != resets[1] && resets[1] != resets[2] && resets[0] != resets[2], "{resets:?}");
    // The numbers are the same on all instances, and in the next release.
    assert_eq!(resets[0].unwrap().floor_secs(), 55_936);
}

#[test]
fn the_windows_of_a_plan_begin_at_the_anchor_of_its_entity() {
    let text = "
domain: api
plans:
  default: free
  limits:
    free: {calls: {unit: month, requests_per_unit: 9, window: calendar}}
    gold: {calls: {unit: month, requests_per_unit: 99, window: calendar, day: 5}}
  entities:
    org: {a: gold, b: {plan: gold, day: 22}}
descriptors:
- {key: org, rate_limit: {by_plan: calls}}
";
    let engine = engine(text);
    // NOW is 2025-11-20T21:00:00Z.
    let days = |value: &str| {
        let verdict = decide(&engine, &[descriptor(&[("org", value)], 1)]);
        let reset = verdict.statuses[0].reset.unwrap().floor_secs() + 21 * 3_600;
        (verdict.statuses[0].limit.as_ref().unwrap().requests, reset / 86_400)
    };
    assert_eq!(days("x"), (9, 11), "the first of December");
    assert_eq!(days("a"), (99, 15), "the fifth of December");
    assert_eq!(days("b"), (99, 2), "the 22nd of November");
    set(&engine, &[("plan|api|org=x", "{plan: gold, day: 21}"), ("plan|api|org=b", "gold")]);
    assert_eq!([days("x"), days("b")], [(99, 1), (99, 15)]);
    set(&engine, &[("limit|api|org=x", "{unit: month, requests_per_unit: 7, window: calendar, day: 30}")]);
    assert_eq!(days("x"), (7, 10));
}

#[test]
fn retry_after_has_jitter_if_the_rule_says_so() {
    let limit = "unit: day, requests_per_unit: 1, retry_jitter: 1h";
    let engine = engine(&format!("domain: api\ndescriptors: [{{key: k, rate_limit: {{{limit}}}}}]"));
    let verdict = decide(&engine, &[descriptor(&[("k", "a")], 2)]);
    let wait = verdict.retry_after();
    assert_eq!(wait, None, "the cost never fits");
    decide(&engine, &[descriptor(&[("k", "b")], 1)]);
    let verdict = decide(&engine, &[descriptor(&[("k", "b")], 1)]);
    let wait = verdict.retry_after().unwrap().ceil_secs();
    let mut waits = std::collections::BTreeSet::new();
    for _ in 0..100 {
        let (_, seconds) = headers::waits(&verdict).remove(0);
        waits.insert(seconds.parse::<u64>().unwrap());
    }
    let [first, last] = [waits.first(), waits.last()].map(|wait| *wait.unwrap());
    assert!(first >= wait && last <= wait + 3_600, "{first} to {last} after {wait}");
    assert!(last - first > 1_800, "{waits:?}");
    assert_eq!(verdict.statuses[0].reset_seconds(), Some(wait), "the time of the reset is exact");
}

const SEVERAL: &str = "
domain: api
descriptors:
- key: user
  rate_limits:
  - { unit: minute, requests_per_unit: 2, algorithm: gcra, burst: 2 }
  - { unit: day, requests_per_unit: 3, name: per_day }
  - { unit: month, requests_per_unit: 100, name: per_month, window: calendar }
- { key: other, rate_limit: { unit: day, requests_per_unit: 5 } }
";

/// Returns the names and remaining hits of all limits of a descriptor, that of its status first.
fn remaining(status: &Status) -> Vec<(&str, u64)> {
    let statuses = std::iter::once(status).chain(&status.others);
    statuses
        .map(|status| {
            let name = status.limit.as_ref().and_then(|limit| limit.name.as_deref());
            (name.unwrap_or(""), status.remaining)
        })
        .collect()
}

fn decide_at(engine: &MemoryEngine, descriptors: &[Descriptor<'_>], second: u64) -> Verdict {
    let request = Request { domain: "api", descriptors: descriptors.into(), feedback: Vec::new() };
    engine.decide_in(&engine.store, &request, NOW + Micros::from_secs(second)).unwrap()
}

#[test]
fn several_limits_of_a_rule_are_charged_together() {
    let engine = engine(SEVERAL);
    let user = descriptor(&[("user", "a")], 1);
    let decide_user = |second| decide_at(&engine, std::slice::from_ref(&user), second);
    let verdict = decide_user(0);
    assert_eq!(remaining(&verdict.statuses[0]), [("", 1), ("per_day", 2), ("per_month", 99)]);
    decide_user(0);
    let denied = decide_user(0);
    assert!(denied.is_denied());
    assert_eq!(remaining(&denied.statuses[0]), [("", 0), ("per_day", 1), ("per_month", 98)], "nothing is taken");
    let last = decide_user(60);
    assert_eq!(
        remaining(&last.statuses[0]),
        [("per_day", 0), ("", 1), ("per_month", 97)],
        "the smallest part is first"
    );
    // The fixed window of a day would count denied hits alone.
    for second in [61, 120, 180] {
        let denied = decide_at(&engine, &[user.clone(), descriptor(&[("other", "a")], 1)], second);
        let status = &denied.statuses[0];
        assert_eq!(remaining(status)[0], ("per_day", 0));
        assert_eq!(remaining(status).last().unwrap(), &("per_month", 97), "{second}");
        assert_eq!(denied.retry_after(), status.retry_after);
        assert!(status.retry_after.unwrap().floor_secs() > 3_600);
    }
    let other = decide_at(&engine, &[descriptor(&[("other", "a")], 0)], 200);
    assert_eq!(other.statuses[0].remaining, 2, "with charge: each, other descriptors are charged on their own");
    // A refund returns hits to all of them.
    decide_at(&engine, &[refund(user.clone())], 200);
    let peek = decide_at(&engine, &[descriptor(&[("user", "a")], 0)], 200);
    assert_eq!(remaining(&peek.statuses[0]), [("per_day", 1), ("", 2), ("per_month", 98)]);
    let (name, value) = headers::limits(&peek).remove(0);
    assert_eq!((name, value.matches("q=").count()), ("RateLimit-Policy", 3), "{value}");
}

#[test]
fn the_hits_of_a_descriptor_with_several_limits_are_ranked_once() {
    let engine = engine(SEVERAL);
    for _ in 0..3 {
        decide(&engine, &[one("user", 1)]);
    }
    let ranked = |by| engine.top.as_ref().unwrap().ranking(by, 9, TopEntities::DEFAULT_PERIOD, NOW, |_, _| true).hits;
    assert_eq!([ranked(RankBy::Requested), ranked(RankBy::Denied)], [3, 1]);
}

/// A request that the second limit denies takes nothing from the first one, which would allow it.
#[test]
fn a_limit_of_several_that_takes_nothing_counts_nothing() {
    let rule =
        "{key: user, rate_limits: [{unit: day, requests_per_unit: 9}, {unit: day, requests_per_unit: 2, name: d}]}";
    let engine = engine(&format!("domain: api\ndescriptors: [{rule}]"));
    assert!(decide(&engine, &[one("user", 3)]).is_denied());
    assert_eq!(counts(&engine, "user"), [0, 0, 0]);
    let over = ["within_limit", "over_limit"].map(|name| count(&engine, &format!("rate_limit.api.user.d.{name}")));
    assert_eq!(over, [0, 3], "the hits below the limit were not taken either");
    let ranked = |by| engine.top.as_ref().unwrap().ranking(by, 9, TopEntities::DEFAULT_PERIOD, NOW, |_, _| true).hits;
    assert_eq!(ranked(RankBy::Denied), 3);
}

#[test]
fn a_limit_in_quota_mode_that_an_override_blocks_does_not_prevent_the_takes_of_others() {
    let several = "{key: user, quota_mode: true, rate_limits: [{unit: day, requests_per_unit: 9}, \
                   {unit: day, requests_per_unit: 9, name: d}]}";
    let engine = engine(&format!("domain: api\ndescriptors: [{several}]"));
    set(&engine, &[("limit|api|user=x", "{limits: {d: blocked}}")]);
    assert_eq!(remaining(&decide_one(&engine, one("user", 1))), [("d", 0), ("", 8)]);
    // A blocked limit in quota mode denies no request under `charge: all` either.
    let engine = engine_with(&charge_all(), Options::default(), Settings::default());
    set(&engine, &[("switch|rule|api|quota", "deny")]);
    assert_eq!(statuses(&decide(&engine, &[one("wide", 1), one("quota", 1)]))[0], (true, 9));
}

#[test]
fn a_blocked_limit_prevents_the_takes_of_its_own_descriptor_only() {
    let engine = engine(SEVERAL);
    set(&engine, &[("limit|api|user=blocked", "{limits: {per_month: blocked}}")]);
    let both = [descriptor(&[("user", "blocked")], 1), one("other", 1)];
    let verdict = decide(&engine, &both);
    assert_eq!(remaining(&verdict.statuses[0]), [("per_month", 0), ("per_day", 3), ("", 2)]);
    assert_eq!(verdict.statuses[1].remaining, 4);
}

#[test]
fn a_denial_of_one_entity_does_not_affect_the_counts_of_another() {
    let engine = engine(SEVERAL);
    let verdict = decide(&engine, &[descriptor(&[("user", "a")], 1), descriptor(&[("user", "b")], 3)]);
    assert!(verdict.is_denied());
    assert_eq!(counts(&engine, "user"), [1, 3, 0]);
}

#[test]
fn a_take_and_a_refund_of_one_counter_are_not_added_up() {
    let engine = engine(&charge_all());
    decide(&engine, &[one("wide", 5)]);
    decide(&engine, &[one("wide", 3), refund(one("wide", 2))]);
    assert_eq!(decide_one(&engine, one("wide", 0)).remaining, 4);
    assert_eq!(counts(&engine, "wide"), [8, 0, 0], "a refund is no decision");
}

#[test]
fn a_switch_that_denies_does_not_prevent_a_refund() {
    let engine = engine(&charge_all());
    decide(&engine, &[one("wide", 5)]);
    set(&engine, &[("switch|rule|api|narrow", "deny")]);
    decide(&engine, &[refund(one("wide", 2)), one("narrow", 1)]);
    assert_eq!(decide_one(&engine, one("wide", 0)).remaining, 7);
}

#[test]
fn several_limits_are_charged_with_the_other_descriptors_under_charge_all() {
    let engine = engine(&SEVERAL.replace("domain: api", "domain: api\ncharge: all"));
    let both = [descriptor(&[("user", "a")], 1), descriptor(&[("other", "a")], 1)];
    for _ in 0..4 {
        decide_at(&engine, &both, 0);
    }
    let peek = decide_at(&engine, &both.clone().map(|descriptor| Descriptor { hits: 0, ..descriptor }), 0);
    assert_eq!(remaining(&peek.statuses[0]), [("", 0), ("per_day", 1), ("per_month", 98)]);
    assert_eq!(peek.statuses[1].remaining, 3);
}

#[test]
fn an_override_replaces_one_of_several_limits_or_all() {
    let engine = engine(SEVERAL);
    let peek = |name: &str| decide_at(&engine, &[descriptor(&[("user", name)], 0)], 0).statuses.remove(0);
    set(
        &engine,
        &[
            ("limit|api|user=named", "{limits: {per_day: 50/day}}"),
            ("limit|api|user=all", "7/hour"),
            ("limit|api|user=free", "{limits: {per_day: unlimited}}"),
            ("limit|api|user=blocked", "{limits: {per_month: blocked}}"),
            ("limit|api|user=unknown", "{limits: {per_week: blocked}}"),
        ],
    );
    assert_eq!(remaining(&peek("named")), [("", 2), ("per_day", 50), ("per_month", 100)]);
    assert_eq!(remaining(&peek("all")), [("", 7)]);
    assert_eq!(remaining(&peek("free")), [("", 2), ("", u32::MAX.into()), ("per_month", 100)]);
    assert_eq!(remaining(&peek("unknown")), [("", 2), ("per_day", 3), ("per_month", 100)]);
    let blocked = decide_at(&engine, &[descriptor(&[("user", "blocked")], 1)], 0);
    assert!(blocked.is_denied());
    assert_eq!(remaining(&blocked.statuses[0]), [("per_month", 0), ("per_day", 3), ("", 2)], "nothing is taken");
    // A switch can name one of them.
    set(&engine, &[("switch|rule|api|per_day", "off")]);
    let status = peek("x");
    assert_eq!(remaining(&status), [("", 2), ("", 0), ("per_month", 100)], "the limit that is off has no numbers");
}

#[test]
fn the_last_of_several_limits_takes_nothing_from_a_denied_request_either() {
    let rule =
        "{rate_limits: [{unit: minute, requests_per_unit: 9, name: m}, {unit: day, requests_per_unit: 3, name: d}]";
    let engine = engine(&format!("domain: api\ndescriptors: [{rule}, key: user}}]"));
    set(&engine, &[("limit|api|user=a", "{limits: {m: unlimited}}")]);
    let user = descriptor(&[("user", "a")], 1);
    let allowed: Vec<bool> = (0..5).map(|_| !decide_at(&engine, std::slice::from_ref(&user), 0).is_denied()).collect();
    assert_eq!(allowed, [true, true, true, false, false]);
    // A fixed window alone would have counted five hits.
    let mut refund = user.clone();
    refund.refund = true;
    decide_at(&engine, &[refund], 0);
    assert!(!decide_at(&engine, &[user], 0).is_denied());
}

#[test]
fn a_plan_has_several_limits() {
    let text = "
domain: api
plans:
  default: free
  limits:
    free: {calls: {unit: day, requests_per_unit: 5}}
    gold: {calls: [{unit: minute, requests_per_unit: 2}, {unit: day, requests_per_unit: 9, name: per_day}]}
    pro: {calls: [{unit: hour, requests_per_unit: 7, name: per_hour}, {unit: day, requests_per_unit: 8, name: per_day}]}
  entities: {org: {a: gold, c: pro}}
descriptors:
- {key: org, rate_limit: {by_plan: calls}}
";
    let engine = engine(text);
    let peek = |name: &str| decide(&engine, &[descriptor(&[("org", name)], 0)]).statuses.remove(0);
    assert_eq!(remaining(&peek("a")), [("", 2), ("per_day", 9)]);
    assert_eq!(remaining(&peek("b")), [("", 5)]);
    assert_eq!(remaining(&peek("c")), [("per_hour", 7), ("per_day", 8)]);
    set(&engine, &[("plan|api|org=b", "gold")]);
    assert_eq!(remaining(&peek("b")), [("", 2), ("per_day", 9)]);
    let paths: Vec<_> = engine.rules.load().rule_set().rules().iter().map(Rule::path).collect();
    assert_eq!(
        paths,
        [
            "api.org.plan_gold",
            "api.org.plan_pro",
            "api.org.plan_free",
            "api.org.per_day.plan_gold",
            "api.org.per_day.plan_pro"
        ]
    );
}

#[test]
fn counters_of_several_limits_are_on_one_shard_and_the_first_has_its_usual_name() {
    let engine = engine(SEVERAL);
    let snapshot = engine.rules.load_full();
    let request = Request { domain: "api", descriptors: smallvec::smallvec![one("user", 1)], feedback: Vec::new() };
    let mut prepared = PreparedRequest::new(&request, NOW);
    engine.prepare(&snapshot, &mut prepared);
    let hits = prepared.hits();
    let names: Vec<_> = hits.iter().map(|hit| String::from_utf8_lossy(&hit.counter.name)).collect();
    assert_eq!(names, ["{api|user=x}gcra", "{api|user=x}fw:86400#per_day", "{api|user=x}sc#per_month"]);
}

#[test]
fn a_denial_says_what_its_rule_says() {
    let text = "
domain: api
plans:
  default: free
  limits:
    free: {calls: {unit: hour, requests_per_unit: 1, name: calls, denial: {message: '{plan}: {limit} ({name}), wait {wait}'}}}
descriptors:
- {key: org, rate_limit: {by_plan: calls}}
- {key: hidden, rate_limit: {unit: day, requests_per_unit: 1, visible: false, denial: {message: '[{limit}]', status: 402}}}
- {key: plain, rate_limit: {unit: year, requests_per_unit: 1}}
- {key: shadow, shadow_mode: true, rate_limit: {unit: year, requests_per_unit: 1, denial: {message: no}}}
- {key: paid, rate_limit: {unit: day, requests_per_unit: 1, currency: {code: USD, hits: 100}, denial: {message: '{limit}'}}}
";
    let engine = engine(text);
    let all = ["org", "hidden", "plain", "shadow", "paid"].map(|key| descriptor(&[(key, "a")], 1));
    assert_eq!(decide(&engine, &all).denial_response(), None, "nothing is denied");
    let message = |keys: &[usize]| {
        let descriptors: Vec<_> = keys.iter().map(|key| all[*key].clone()).collect();
        decide(&engine, &descriptors).denial_response().map(|denial| denial.message)
    };
    assert_eq!(message(&[0]).as_deref(), Some("free: 1 per hour (calls), wait 3600"));
    assert_eq!(message(&[0, 1]).as_deref(), Some("[]"), "the longest wait decides, and a hidden limit is not named");
    assert_eq!([message(&[2]), message(&[3])], [None, None]);
    assert_eq!(message(&[4]).as_deref(), Some("0.01 USD per day"));
    set(&engine, &[("limit|api|paid=a", "{algorithm: concurrency, limit: 1, hold: 60s}")]);
    assert_eq!(message(&[4]), None);
    assert_eq!(message(&[4]).as_deref(), Some("1 in flight, each for at most 1m"), "slots are no money");
    let entries = [Entry { key: "paid", value: "a" }];
    let state = engine.inspect("api", &entries, 1, NOW).now_or_never().unwrap().unwrap().counter.unwrap();
    assert_eq!(state.currency, None);
    assert_eq!(message(&[2, 0]).as_deref(), Some("free: 1 per hour (calls), wait 3600"), "the only one with a text");
    let denial = decide(&engine, &all[1..2]).denial_response().unwrap();
    assert_eq!((denial.status, denial.headers), (Some(402), Vec::new()));
}

const BUDGETS: &str = "
domain: api
descriptors:
- key: team
  rate_limits:
  - { unit: minute, requests_per_unit: 1000, algorithm: token_bucket, burst: 1000 }
  - unit: month
    requests_per_unit: 50000000
    name: budget
    window: calendar
    cost_per_hit: { key: model, values: { small: 150, large: 15000 }, default: 60000 }
- { key: batch, rate_limit: { unit: day, requests_per_unit: 100, cost_per_hit: 10 } }
";

#[test]
fn hits_cost_what_the_entry_says() {
    let engine = engine(BUDGETS);
    let budget = |entries: &[(&str, &str)], hits| {
        let verdict = decide(&engine, &[descriptor(entries, hits)]);
        remaining(&verdict.statuses[0]).iter().find(|(name, _)| *name == "budget").unwrap().1
    };
    // 100 tokens each, in millionths of a dollar.
    assert_eq!(budget(&[("team", "a"), ("model", "small")], 100), 50_000_000 - 15_000);
    assert_eq!(budget(&[("team", "a"), ("model", "large")], 100), 50_000_000 - 15_000 - 1_500_000);
    assert_eq!(budget(&[("team", "a"), ("model", "unknown")], 100), 50_000_000 - 1_515_000 - 6_000_000);
    assert_eq!(budget(&[("team", "a")], 100), 50_000_000 - 7_515_000 - 6_000_000, "without the entry");
    assert_eq!(budget(&[("team", "b"), ("model", "large")], 0), 50_000_000, "another team has another budget");
    // The other limit counts tokens.
    let verdict = decide(&engine, &[descriptor(&[("team", "a")], 0)]);
    assert_eq!(remaining(&verdict.statuses[0])[0], ("", 600));
    decide(&engine, &[refund(descriptor(&[("team", "a"), ("model", "unknown")], 100))]);
    assert_eq!(budget(&[("team", "a")], 0), 50_000_000 - 7_515_000);
    // The largest number of hits is bounded, and denied.
    let verdict = decide(&engine, &[descriptor(&[("team", "a"), ("model", "large")], MAX_NUMBER)]);
    assert!(verdict.is_denied());
    // An override of the entity keeps the costs.
    set(&engine, &[("limit|api|team=c", "{limits: {budget: 1000000/month}}")]);
    assert_eq!(budget(&[("team", "c"), ("model", "large")], 10), 850_000);
}

#[test]
fn a_constant_cost_multiplies_hits_everywhere() {
    let engine = engine(BUDGETS);
    let batch = |hits| decide(&engine, &[descriptor(&[("batch", "x")], hits)]);
    assert_eq!(batch(3).statuses[0].remaining, 70);
    assert_eq!(batch(8).max_cost(), None, "it fits later");
    assert_eq!(batch(11).max_cost(), Some(100));
    let [within, over, _] = counts(&engine, "batch");
    assert_eq!((within, over), (100, 120), "statistics have costs, too");
    let inspect = |hits| {
        let entries = [Entry { key: "batch", value: "y" }];
        engine.inspect("api", &entries, hits, NOW).now_or_never().unwrap().unwrap()
    };
    assert_eq!((inspect(10).allowed, inspect(10).max_hits), (true, None));
    assert_eq!((inspect(11).allowed, inspect(11).max_hits), (false, Some(10)), "ten hits cost 100");
}

const PENALTIES: &str = "
domain: api
descriptors:
- key: login
  rate_limit: {unit: minute, requests_per_unit: 2, algorithm: sliding_log, penalty: 10m, penalty_max: 1h}
- key: user
  rate_limits:
  - {unit: day, requests_per_unit: 100}
  - {unit: second, requests_per_unit: 1, name: burst, penalty: 1m}
- key: dark
  shadow_mode: true
  rate_limit: {unit: day, requests_per_unit: 1, penalty: 1m}
";

/// Decides a hit of `key`, and returns whether it is allowed, the remaining hits and the seconds until a retry.
fn hit_at(engine: &MemoryEngine, key: &str, second: u64) -> (bool, u64, Option<u64>) {
    let verdict = decide_at(engine, &[one(key, 1)], second);
    let wait = verdict.retry_after().map(Micros::ceil_secs);
    (!verdict.is_denied(), verdict.statuses[0].remaining, wait)
}

#[test]
fn a_penalty_denies_every_hit_after_the_limit_was_exceeded() {
    let engine = engine(PENALTIES);
    assert_eq!(hit_at(&engine, "login", 0), (true, 1, None));
    assert_eq!(hit_at(&engine, "login", 1), (true, 0, None));
    assert_eq!(hit_at(&engine, "login", 2), (false, 0, Some(600)));
    let peek = decide_at(&engine, &[one("login", 0)], 3);
    assert_eq!((peek.is_denied(), peek.statuses[0].reset_seconds()), (true, Some(599)));
    for second in [61, 300, 601] {
        assert_eq!(hit_at(&engine, "login", second), (false, 0, Some(602 - second)), "hits do not prolong it");
    }
    assert_eq!(hit_at(&engine, "login", 602), (true, 1, None), "denied hits have not been counted");
    assert_eq!(hit_at(&engine, "login", 603), (true, 0, None));
    assert_eq!(hit_at(&engine, "login", 604), (false, 0, Some(1_200)), "the second one is twice as long");
    assert_eq!(decide_at(&engine, &[descriptor(&[("login", "y")], 1)], 605).statuses[0].remaining, 1, "another entity");
}

#[test]
fn a_penalty_of_one_of_several_limits_denies_without_charging_the_others() {
    let engine = engine(PENALTIES);
    assert_eq!(hit_at(&engine, "user", 0), (true, 0, None));
    let denied = decide_at(&engine, &[one("user", 1)], 0);
    assert_eq!(denied.retry_after(), Some(Micros::from_secs(60)));
    assert_eq!(remaining(&denied.statuses[0]), [("burst", 0), ("", 99)]);
    let denied = decide_at(&engine, &[one("user", 1)], 59);
    assert_eq!(remaining(&denied.statuses[0]), [("burst", 0), ("", 99)]);
    assert_eq!(remaining(&decide_at(&engine, &[one("user", 1)], 60).statuses[0]), [("burst", 0), ("", 98)]);
}

#[test]
fn a_refund_does_not_lift_a_penalty_and_a_reset_does() {
    let engine = engine(PENALTIES);
    for second in 0..3 {
        hit_at(&engine, "login", second);
    }
    decide_at(&engine, &[refund(one("login", 2))], 3);
    assert_eq!(hit_at(&engine, "login", 4), (false, 0, Some(598)));
    let entries = [Entry { key: "login", value: "x" }];
    let now = NOW + Micros::from_secs(4);
    let inspection = engine.inspect("api", &entries, 1, now).now_or_never().unwrap().unwrap();
    let counter = inspection.counter.unwrap();
    assert_eq!((inspection.allowed, counter.penalty), (false, Micros::from_secs(598)));
    let (_, existed) = engine.reset_counter("api", &entries, now).now_or_never().unwrap().unwrap().unwrap();
    assert!(existed);
    assert_eq!(hit_at(&engine, "login", 5), (true, 1, None));
}

#[test]
fn in_shadow_mode_a_penalty_is_counted_and_denies_nothing() {
    let engine = engine(PENALTIES);
    for second in 0..3 {
        assert!(!decide_at(&engine, &[one("dark", 1)], second).is_denied());
    }
    assert_eq!(count(&engine, "rate_limit.api.dark.over_limit"), 2);
}

#[test]
fn the_penalty_of_a_replaced_limit_is_that_of_the_override() {
    let engine = engine(PENALTIES);
    set(&engine, &[("limit|api|login=x", "{unit: minute, requests_per_unit: 1, penalty: 5s}")]);
    hit_at(&engine, "login", 0);
    assert_eq!(hit_at(&engine, "login", 1), (false, 0, Some(59)), "the window is longer");
    set(&engine, &[("limit|api|login=x", "{unit: day, requests_per_unit: 9}")]);
    assert!(hit_at(&engine, "login", 2).0);
}

#[test]
fn under_charge_all_two_descriptors_of_one_entity_have_one_penalty() {
    let engine = engine(&PENALTIES.replace("domain: api", "domain: api\ncharge: all"));
    let twice = [one("login", 1), one("login", 1)];
    assert!(!decide_at(&engine, &twice, 0).is_denied());
    let denied = decide_at(&engine, &twice, 1);
    assert_eq!((denied.is_denied(), denied.retry_after()), (true, Some(Micros::from_secs(600))));
    let denied = decide_at(&engine, &[one("login", 1), one("user", 1)], 2);
    assert_eq!(statuses(&denied), [(false, 0), (true, 100)], "nothing is taken");
    assert_eq!(denied.retry_after(), Some(Micros::from_secs(599)));
}

#[test]
fn large_limits_are_exact() {
    let engine = engine(
        "domain: api\ndescriptors:\n- {key: budget, rate_limit: {unit: month, requests_per_unit: 9007199254740991}}\n",
    );
    let remaining = |hits| decide_one(&engine, one("budget", hits)).remaining;
    assert_eq!(remaining(1), 9_007_199_254_740_990);
    assert_eq!(remaining(9_007_199_254_740_989), 1);
    assert_eq!(decide_one(&engine, one("budget", 2)).code, Code::OverLimit);
    let binding = decide(&engine, &[one("budget", 0)]).binding().unwrap();
    assert_eq!((binding.limit, binding.remaining), (9_007_199_254_740_991, 0));
}
