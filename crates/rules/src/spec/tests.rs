//! Tests of the reader of rule files.

use super::*;
use crate::{Rule, SourceFile, compile};

/// Compiles a descriptor with these keywords and returns its rule, if it has a limit, or the errors.
fn read_descriptor(keywords: &str) -> Result<Option<Rule>, Vec<String>> {
    let text = format!("domain: d\ndescriptors: [{{key: k, {keywords}}}]");
    match compile(&[SourceFile { name: "d.yaml".into(), text }], Options::default()) {
        Ok((set, _)) => Ok(set.rules().first().cloned()),
        Err(diagnostics) => Err(diagnostics.iter().map(ToString::to_string).collect()),
    }
}

/// Returns the only error of a descriptor with these keywords.
fn only_error(keywords: &str) -> String {
    let mut errors = read_descriptor(keywords).err().unwrap_or_default();
    assert_eq!(errors.len(), 1, "{keywords}: {errors:?}");
    errors.remove(0)
}

#[test]
fn booleans_have_the_spellings_of_yaml_1_1() {
    for (text, expected) in [
        ("true", true),
        ("YES", true),
        ("On", true),
        ("y", true),
        ("false", false),
        ("NO", false),
        ("Off", false),
        ("n", false),
        ("~", false),
    ] {
        let keywords = format!("shadow_mode: {text}, rate_limit: {{unit: day, requests_per_unit: 1}}");
        assert_eq!(read_descriptor(&keywords).unwrap().unwrap().shadow_mode, expected, "{text}");
    }
    assert!(only_error("shadow_mode: 'no'").ends_with("shadow_mode must be true or false, not the text \"no\""));
}

#[test]
fn metadata_is_a_map_or_missing() {
    let of_rule = |metadata: &str| {
        let keywords = format!("metadata: {metadata}, rate_limit: {{unit: day, requests_per_unit: 1}}");
        read_descriptor(&keywords).map(|rule| rule.unwrap().metadata)
    };
    assert_eq!(of_rule("~"), Ok(None));
    assert!(matches!(of_rule("{a: 1}"), Ok(Some(Metadata::Map(_)))));
    assert_eq!(of_rule("[a]"), Err(vec!["d.yaml:2:34: metadata must be a map, not a list".to_owned()]));
}

#[test]
fn the_nearest_keyword_is_only_suggested_if_it_is_similar() {
    assert!(only_error("valeu: x").ends_with("unknown key \"valeu\"; did you mean value?"));
    for unknown in ["zzz", "frobnicate"] {
        let expected = format!("unknown key {unknown:?}; keys allowed here: key, value, rate_limit, ");
        assert!(only_error(&format!("{unknown}: x")).contains(&expected), "{unknown}");
    }
}

#[test]
fn keywords_that_are_not_allowed_together_have_no_further_errors() {
    for (limit, expected) in [
        ("capacity: 10, limit: 5, consistency: leased", "limit cannot be combined with capacity; "),
        (
            "algorithm: gcra, unit: day, requests_per_unit: 9, queue: 2, burst: 0",
            "queue is not supported by algorithm gcra, only by leaky_bucket",
        ),
    ] {
        let error = only_error(&format!("rate_limit: {{{limit}}}"));
        assert!(error.contains(expected), "{limit}: {error}");
    }
}

#[test]
fn names_in_a_map_are_unique_and_not_empty() {
    for (classes, expected) in [
        ("{a: 1, a: 2}", "duplicate key \"a\""),
        ("{'': 1}", "the keys of reserve must be non-empty names, not a scalar"),
        ("{[a]: 1}", "the keys of reserve must be non-empty names, not a list"),
    ] {
        let error = only_error(&format!("rate_limit: {{capacity: 10, class: c, reserve: {classes}}}"));
        assert!(error.ends_with(expected), "{classes}: {error}");
    }
}

#[test]
fn a_consistency_that_the_limit_does_not_support_is_rejected() {
    for (limit, consistency, expected) in [
        ("unit: day, requests_per_unit: 9", "exact", None),
        ("unit: day, requests_per_unit: 9", "leased", None),
        ("unit: day, requests_per_unit: 9", "eventual", None),
        ("algorithm: gcra, unit: day, requests_per_unit: 9", "eventual", None),
        ("algorithm: concurrency, limit: 9", "exact", None),
        ("algorithm: concurrency, limit: 9", "leased", Some("leased is not supported by concurrency")),
        ("algorithm: concurrency, limit: 9", "eventual", Some("eventual cannot be combined with concurrency")),
        ("capacity: 9/s, class: c, reserve: {a: 1}", "leased", Some("leased is not supported by shares")),
        ("capacity: 9/s, class: c, reserve: {a: 1}", "eventual", Some("eventual cannot be combined with shares")),
        (
            "unit: day, requests_per_unit: 9, elastic: {resource: db, up_to: 200%}",
            "leased",
            Some("leased cannot be combined with elastic"),
        ),
    ] {
        let keywords = format!("rate_limit: {{{limit}, consistency: {consistency}}}");
        match expected {
            Some(expected) => assert!(only_error(&keywords).contains(expected), "{keywords}"),
            None => {
                assert_eq!(read_descriptor(&keywords).unwrap().unwrap().consistency.name(), consistency, "{keywords}");
            }
        }
    }
}

#[test]
fn windows_of_the_calendar_have_a_unit_and_an_anchor_that_fit() {
    let read = |keywords: &str| {
        read_descriptor(&format!("rate_limit: {{requests_per_unit: 9, {keywords}}}")).map(|limit| limit.unwrap())
    };
    for (keywords, expected) in [
        ("unit: hour, window: calendar, zone: Asia/Kolkata", "9 per hour, from minute 0 in Asia/Kolkata"),
        ("unit: day, window: calendar, at: 06:30", "9 per day, from 06:30 in UTC"),
        ("unit: week, window: calendar, week_starts: sunday", "9 per week, from Sunday at 00:00 in UTC"),
        (
            "unit: month, window: calendar, zone: europe/berlin, day: 15, at: '06:00'",
            "9 per month, from day 15 at 06:00 in Europe/Berlin",
        ),
        (
            "unit: month, unit_multiplier: 3, window: calendar, month: 2",
            "9 per 3 months, from day 1 of month 2 at 00:00 in UTC",
        ),
        ("unit: year, window: calendar", "9 per year, from day 1 of month 1 at 00:00 in UTC"),
        ("unit: day, phase: entity", "9 per day, each entity with its own phase"),
        ("unit: day, phase: entity, window: epoch", "9 per day, each entity with its own phase"),
    ] {
        assert_eq!(read(keywords).unwrap().limit.unwrap().to_string(), expected);
    }
    for (keywords, expected) in [
        ("unit: minute, window: calendar", "window: calendar requires the unit hour, day, week, month or year"),
        ("unit: month, unit_multiplier: 5, window: calendar", "or with unit: month a divisor of 12"),
        ("unit: day, unit_multiplier: 2, window: calendar", "unit_multiplier must be 1"),
        ("unit: day, window: calendar, day: 3", "day requires windows of months or years"),
        ("unit: month, window: calendar, month: 3", "month requires windows of several months"),
        ("unit: month, window: calendar, week_starts: monday", "week_starts requires windows of a week"),
        ("unit: hour, window: calendar, at: 06:00", "at cannot be combined with windows of an hour"),
        ("unit: month, window: calendar, day: 32", "day must be a number from 1 to 31"),
        ("unit: month, window: calendar, day: 0", "day must be a number from 1 to 31"),
        ("unit: month, window: calendar, zone: Europe/Berln", "did you mean \"Europe/Berlin\"?"),
        ("unit: month, window: calendar, at: 6am", "at must be a time of day such as \"06:00\", not \"6am\""),
        ("unit: month, window: calender", "window \"calender\" is not one of"),
        ("unit: month, day: 15", "zone, week_starts, day, month and at require window: calendar"),
        ("unit: month, window: first_request, zone: UTC", "require window: calendar"),
        ("unit: month, window: first_request, phase: entity", "phase cannot be combined with window"),
        ("unit: month, window: calendar, phase: entity", "phase cannot be combined with window"),
        ("unit: month, window: calendar, algorithm: gcra", "window is not supported by algorithm gcra"),
    ] {
        let error = only_error(&format!("rate_limit: {{requests_per_unit: 9, {keywords}}}"));
        assert!(error.contains(expected), "{keywords}: {error}");
    }
}

#[test]
fn several_limits_of_a_rule_have_different_names_and_can_be_charged_together() {
    let day = "{unit: day, requests_per_unit: 9, name: d}";
    let limits = |second: &str| format!("rate_limits: [{{unit: minute, requests_per_unit: 1}}, {second}]");
    let read = |keywords: &str| read_descriptor(keywords).unwrap().unwrap();
    let count = |keywords: &str| 1 + read(keywords).further.len();
    assert_eq!([count(&limits(day)), count(&format!("rate_limits: [{day}]"))], [2, 1]);
    assert_eq!(count("rate_limits: [{unlimited: true}]"), 1, "a list of one can contain anything");
    let eight: Vec<_> = (0..8).map(|number| format!("{{unit: day, requests_per_unit: 9, name: n{number}}}")).collect();
    assert_eq!(count(&format!("rate_limits: [{}]", eight.join(", "))), 8);
    let nine = format!("rate_limits: [{}, {day}]", eight.join(", "));
    for (keywords, expected) in [
        (limits("{unit: day, requests_per_unit: 9}"), "each limit of rate_limits after the first requires a name"),
        (format!("rate_limits: [{day}, {day}]"), "must have different names"),
        (nine, "rate_limits may contain at most 8 limits"),
        ("rate_limits: []".to_owned(), "rate_limits requires at least one limit"),
        (limits("{unlimited: true, name: d}"), "unlimited: true cannot be one of several limits"),
        (limits("{by_plan: x}"), "by_plan cannot be one of several limits"),
        (limits("{algorithm: concurrency, limit: 3, name: d}"), "requests in flight cannot be one of several limits"),
        (limits("{capacity: 10/s, class: c, reserve: {a: 1}, name: d}"), "classes cannot be one of several limits"),
        (limits("{unit: day, requests_per_unit: 9, name: d, count_denied: true}"), "count_denied cannot be true"),
        (format!("rate_limits: [{day}], rate_limit: {day}"), "rate_limit and rate_limits cannot be combined"),
        ("rate_limits: {unit: day}".to_owned(), "rate_limits must be a list, not a map; begin each"),
    ] {
        let error = only_error(&keywords);
        assert!(error.contains(expected), "{keywords}: {error}");
    }
}

#[test]
fn a_budget_is_displayed_in_its_currency() {
    let read = |currency: &str| {
        let keywords = format!("rate_limit: {{unit: month, requests_per_unit: 12500000, currency: {currency}}}");
        read_descriptor(&keywords).unwrap().unwrap()
    };
    for (currency, expected) in [
        ("USD", "12.50 USD per month"),
        ("{code: EUR}", "12.50 EUR per month"),
        ("{code: EUR, hits: 20_000_000}", "0.625 EUR per month"),
        ("{hits: 1, code: credits}", "12500000 credits per month"),
    ] {
        let rule = read(currency);
        assert_eq!(rule.limit.unwrap().text(rule.currency.as_deref()), expected);
    }
    for (keywords, expected) in [
        ("currency: {hits: 5}", "currency requires a code, such as USD"),
        ("currency: {code: USD, hits: 0}", "hits must be at least 1"),
        ("currency: {code: USD, digits: 2}", "unknown key \"digits\"; did you mean hits?"),
        ("currency: ''", "currency must be the name of a unit with at most 16 bytes, such as USD"),
        ("currency: seventeen-letters", "currency must be the name of a unit"),
        ("currency: {code: \"a\\nb\"}", "code must be the name of a unit"),
        ("currency: [USD]", "currency"),
    ] {
        let error = only_error(&format!("rate_limit: {{unit: day, requests_per_unit: 1, {keywords}}}"));
        assert!(error.contains(expected), "{keywords}: {error}");
    }
    let slots = only_error("rate_limit: {algorithm: concurrency, limit: 3, currency: USD}");
    assert!(slots.contains("currency cannot be combined with a limit of requests in flight"), "{slots}");
}

#[test]
fn a_denial_has_a_message_headers_and_a_status() {
    let read = |denial: &str| {
        let keywords = format!("rate_limit: {{unit: day, requests_per_unit: 1, denial: {denial}}}");
        read_descriptor(&keywords).unwrap().unwrap().denial
    };
    let denial = read("{message: 'wait {wait} s', headers: {X-Plan: '{plan}', x-a: b}, status: 402}").unwrap();
    let values = crate::DenialValues { plan: "gold", wait: Some(7), ..crate::DenialValues::default() };
    assert_eq!(denial.message.render(&values, false), "wait 7 s");
    let headers: Vec<_> = denial.headers.iter().map(|(name, value)| (&**name, value.render(&values, false))).collect();
    assert_eq!(headers, [("X-Plan", "gold".to_owned()), ("x-a", "b".to_owned())]);
    assert_eq!((denial.status, denial.content_type.as_deref()), (Some(402), Some("text/plain; charset=utf-8")));
    let json = read("{message: '{\"e\": 1}', content_type: application/json}").unwrap();
    assert!(json.is_json());
    assert_eq!(read("{status: 503}").unwrap().content_type, None);
    let long = format!("{{message: {}}}", "x".repeat(4_097));
    let names: Vec<_> = (0..17).map(|number| format!("x-{number}: a")).collect();
    let many = format!("{{headers: {{{}}}}}", names.join(", "));
    for (denial, expected) in [
        ("{message: 'in {wiat}'}", "message contains {wiat}, which is not one of the placeholders {limit}, {name},"),
        (&long, "message may have at most 4096 bytes"),
        (&many, "headers may contain at most 16 headers"),
        ("{status: 200}", "status must be an HTTP status from 400 to 599"),
        ("{status: 70000}", "status must be an HTTP status from 400 to 599"),
        ("{content_type: text/html}", "content_type requires a message"),
        ("{message: a, content_type: 'text/ä'}", "content_type must be a text of visible ASCII characters"),
        ("{headers: {'a b': c}}", "is not the name of a header that a denial can have"),
        ("{headers: {Content-Length: 5}}", "is not the name of a header that a denial can have"),
        ("{headers: {x: \"a\\nb\"}}", "x must be a text of visible ASCII characters"),
        ("{mesage: a}", "message"),
    ] {
        let error = only_error(&format!("rate_limit: {{unit: day, requests_per_unit: 1, denial: {denial}}}"));
        assert!(error.contains(expected), "{denial}: {error}");
    }
}

#[test]
fn a_cost_per_hit_is_a_number_or_a_table_with_a_default() {
    let day = "unit: day, requests_per_unit: 9";
    let table = "{key: model, values: {a: 2, b: 30}, default: 40}";
    let read = |cost: &str| {
        let rule = read_descriptor(&format!("rate_limit: {{{day}, cost_per_hit: {cost}}}")).unwrap().unwrap();
        rule.cost_per_hit.clone().unwrap()
    };
    assert_eq!([None, Some("x")].map(|value| read("7").of(value)), [7, 7]);
    let expected = [None, Some("a"), Some("b"), Some("c")].map(|value| read(table).of(value));
    assert_eq!(expected, [40, 2, 30, 40]);
    for (keywords, expected) in [
        (format!("rate_limit: {{{day}, cost_per_hit: 0}}"), "cost_per_hit must be at least 1"),
        (
            format!("rate_limit: {{{day}, cost_per_hit: {{key: m, values: {{a: 0}}, default: 1}}}}"),
            "a must be at least 1",
        ),
        (
            format!("rate_limit: {{{day}, cost_per_hit: {{key: m, values: {{a: 1}}}}}}"),
            "requires key, values and default",
        ),
        (
            format!("rate_limit: {{{day}, cost_per_hit: {{values: {{a: 1}}, default: 2}}}}"),
            "requires key, values and default",
        ),
        (
            format!("rate_limit: {{algorithm: concurrency, limit: 3, holder: h, cost_per_hit: {table}}}"),
            "cannot be combined with class or holder",
        ),
        (
            format!(
                "rate_limits: [{{{day}, cost_per_hit: {table}}}, {{{day}, name: x, cost_per_hit: {}}}]",
                table.replace("model", "kind")
            ),
            "cost_per_hit must have the same key in all limits of a rule",
        ),
    ] {
        let error = only_error(&keywords);
        assert!(error.contains(expected), "{keywords}: {error}");
    }
}

#[test]
fn a_penalty_is_a_time_with_a_maximum() {
    let day = "unit: day, requests_per_unit: 9";
    let read = |keywords: &str| {
        let rule = read_descriptor(&format!("rate_limit: {{{day}, {keywords}}}")).unwrap().unwrap();
        rule.limit.unwrap().to_string()
    };
    assert_eq!(read("penalty: 10m"), "9 per day, then a penalty of 10m");
    assert_eq!(
        read("algorithm: gcra, penalty: 90s, penalty_max: 1h"),
        "9 per day, gcra, then a penalty of 1m 30s, doubled up to 1h"
    );
    for (keywords, expected) in [
        ("penalty: 0s", "penalty must be longer than 0"),
        ("penalty: 1h, penalty_max: 59m", "penalty_max at least as long"),
        ("penalty: 101years", "at most 100 years"),
        ("penalty: 10", "penalty must be a duration such as"),
        ("penalty_max: 1h", "penalty_max requires penalty"),
        ("penalty: 1h, count_denied: true", "cannot be combined with count_denied: true"),
        ("penalty: 1h, algorithm: gcra, consistency: leased", "cannot be combined with consistency: leased"),
        ("penalty: 1h, consistency: eventual", "cannot be combined with consistency: eventual"),
        ("penalty: 1h, elastic: {resource: db, up_to: 200%}", "cannot be combined with elastic"),
    ] {
        let error = only_error(&format!("rate_limit: {{{day}, {keywords}}}"));
        assert!(error.contains(expected), "{keywords}: {error}");
    }
    for (limit, expected) in [
        ("algorithm: concurrency, limit: 3, penalty: 1h", "cannot be combined with a limit of requests in flight"),
        ("capacity: 10/s, class: c, reserve: {a: 1}, penalty: 1h", "cannot be combined with class"),
        ("unlimited: true, penalty: 1h", "penalty cannot be combined with unlimited: true"),
    ] {
        let error = only_error(&format!("rate_limit: {{{limit}}}"));
        assert!(error.contains(expected), "{limit}: {error}");
    }
}

#[test]
fn a_limit_of_a_fixed_window_or_token_bucket_can_be_any_exact_number() {
    let read = |keywords: &str| {
        let rule = read_descriptor(&format!("rate_limit: {{unit: day, {keywords}}}")).unwrap().unwrap();
        let limit = rule.limit.unwrap();
        (limit.requests(), limit.algorithm().tag())
    };
    for (requests, tag) in [(4_999_999_998, "fw"), (4_999_999_999, "sc"), (9_007_199_254_740_991, "sc")] {
        assert_eq!(read(&format!("requests_per_unit: {requests}")), (requests, tag));
    }
    assert_eq!(read("requests_per_unit: 4_900_000_000, soft: 10%"), (4_900_000_000, "sc"));
    assert_eq!(read("requests_per_unit: 1e15, window: first_request"), (1_000_000_000_000_000, "fr"));
    assert_eq!(read("requests_per_unit: 5000000000, cost_per_hit: 6000000000"), (5_000_000_000, "sc"));
    for (keywords, requests, tag) in [
        ("requests_per_unit: 4294967295, algorithm: token_bucket", 4_294_967_295, "tb"),
        ("requests_per_unit: 9007199254740991, algorithm: token_bucket", 9_007_199_254_740_991, "tbl"),
        ("requests_per_unit: 9e9, algorithm: gcra, burst: 1", 9_000_000_000, "tbl"),
        ("requests_per_unit: 9e9, algorithm: gcra, burst: 9e9, debt: 9e12", 9_000_000_000, "debt"),
    ] {
        assert_eq!(read(keywords), (requests, tag), "{keywords}");
    }
    for (keywords, expected) in [
        ("requests_per_unit: 9007199254740992", "must be a whole number from 0 to 9007199254740991"),
        (
            "requests_per_unit: 4294967296, algorithm: sliding_window",
            "limits above 4294967295 are only possible with fixed_window, token_bucket and gcra",
        ),
        ("requests_per_unit: 9, algorithm: leaky_bucket, burst: 4294967296", "burst must be at most 4294967295"),
        ("requests_per_unit: 9, algorithm: gcra, burst: 9007199254740991", "burst must refill within 100 years"),
        ("requests_per_unit: 5000000000, algorithm: token_bucket, warm_up: 1m", "are only possible with fixed_window"),
        ("requests_per_unit: 5000000000, algorithm: leaky_bucket", "are only possible with fixed_window"),
        ("requests_per_unit: 5000000000, algorithm: sliding_log", "at most 1000"),
        ("requests_per_unit: 1, cost_per_hit: 9007199254740992", "from 0 to 9007199254740991"),
        ("requests_per_unit: 1, unit_multiplier: 4294967296", "from 0 to 4294967295"),
    ] {
        let error = only_error(&format!("rate_limit: {{unit: day, {keywords}}}"));
        assert!(error.contains(expected), "{keywords}: {error}");
    }
}
