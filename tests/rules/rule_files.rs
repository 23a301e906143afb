//! Rule files: accepted and rejected ones, and the diagnostics.

use sluicegate::rules::{Entry, Lookup, Options, RuleSet, Severity, SourceFile, compile};

use crate::support::{Server, descriptor, request_for, rules};

fn files(texts: &[&str]) -> Vec<SourceFile> {
    let name = |number: usize| format!("{}.yaml", char::from(b'a' + u8::try_from(number).unwrap()));
    texts.iter().enumerate().map(|(number, text)| SourceFile { name: name(number), text: (*text).to_owned() }).collect()
}

fn rejected(texts: &[&str]) -> Vec<String> {
    let diagnostics = compile(&files(texts), Options::default()).err().unwrap_or_else(|| panic!("accepted: {texts:?}"));
    diagnostics.iter().filter(|diagnostic| diagnostic.severity == Severity::Error).map(ToString::to_string).collect()
}

fn accepted(texts: &[&str], options: Options) -> (RuleSet, Vec<String>) {
    let (set, warnings) = compile(&files(texts), options).unwrap_or_else(|diagnostics| panic!("{diagnostics:#?}"));
    (set, warnings.iter().map(ToString::to_string).collect())
}

/// Returns the limit of a descriptor, or `None` if it has none.
fn limit(set: &RuleSet, domain: &str, entries: &[(&str, &str)]) -> Option<u64> {
    let entries = entries.iter().map(|(key, value)| Entry { key, value });
    match set.find(domain, entries) {
        Lookup::Rule(rule, _) => Some(rule.limit.as_ref()?.requests()),
        Lookup::NoLimit | Lookup::UnknownDomain => None,
    }
}

#[test]
fn every_error_has_a_location_and_a_message() {
    let limit = "rate_limit: {unit: day, requests_per_unit: 1";
    for (text, expected) in [
        ("", "a.yaml:1:1: the file is empty; a domain is required"),
        ("# nothing\n", "a.yaml:1:1: the file is empty; a domain is required"),
        ("descriptors: []", "a.yaml:1:1: the file has no domain, or the domain is empty"),
        ("domain: ''", "a.yaml:1:1: the file has no domain, or the domain is empty"),
        ("[]", "a.yaml:1:1: the file must be a map such as { domain: api, descriptors: "),
        ("domain: d\ndescriptor: []", "a.yaml:2:1: unknown key \"descriptor\"; did you mean descriptors?"),
        ("domain: d\ndescriptors: x", "a.yaml:2:14: descriptors must be a list, not a scalar"),
        ("domain: d\ndescriptors: [{value: x}]", "a.yaml:2:15: a descriptor requires a non-empty key"),
        ("domain: d\ndescriptors: [{key: ''}]", "a.yaml:2:15: a descriptor requires a non-empty key"),
        ("domain: d\ndomain: e", "a.yaml:2:1: duplicate key \"domain\""),
        (
            "domain: d\ndescriptors:\n- key: k\n- {key: k, value: v}\n- key: k\n",
            "a.yaml:5:3: duplicate descriptor with key \"k\"; first defined at line 3",
        ),
        (
            "domain: d\ndescriptors: [{key: k, value: v}, {key: k, value: v}]",
            "a.yaml:2:35: duplicate descriptor with key \"k\" and value \"v\"; first defined at line 2",
        ),
        (
            "domain: d\ndescriptors: [{key: k, rate_limit: {requests_per_unit: 1}}]",
            "a.yaml:2:36: rate_limit requires a unit (second, minute, hour, day, week, month, year) or unlimited: true",
        ),
        (
            "domain: d\ndescriptors: [{key: k, rate_limit: {unit: eon}}]",
            "a.yaml:2:43: unit \"eon\" is not one of second, minute, hour, day, week, month, year",
        ),
        (
            "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, unlimited: true}}]",
            "a.yaml:2:43: unlimited: true cannot be combined with unit or unit_multiplier",
        ),
        (
            &format!("domain: d\ndescriptors: [{{key: k, {limit}, name: n, replaces: [{{name: n}}]}}}}]"),
            "a.yaml:2:90: the limit \"n\" cannot replace itself",
        ),
        (
            &format!("domain: d\ndescriptors: [{{key: k, {limit}, replaces: [{{name: ''}}]}}}}]"),
            "a.yaml:2:81: replaces requires the name of another limit, not an empty one",
        ),
        (
            "domain: d\ndescriptors: [{key: k, value: v, share_threshold: true}]",
            "a.yaml:2:34: share_threshold requires a value with a wildcard (*)",
        ),
        (
            "domain: d\ndescriptors: [{key: k, shadow_mode: maybe}]",
            "a.yaml:2:37: shadow_mode must be true or false, not maybe",
        ),
        (
            "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: '5'}}]",
            "a.yaml:2:67: requests_per_unit must be a whole number from 0 to 9007199254740991, not the text \"5\"",
        ),
        (
            "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 9007199254740992}}]",
            "a.yaml:2:67: requests_per_unit must be a whole number from 0 to 9007199254740991, not 9007199254740992",
        ),
        (
            &format!("domain: d\ndescriptors: [{{key: k, {limit}, unit_multiplier: 0}}}}]"),
            "a.yaml:2:70: unit_multiplier must be at least 1",
        ),
        (
            &format!("domain: d\ndescriptors: [{{key: k, {limit}, on_error: panic}}}}]"),
            "a.yaml:2:80: on_error \"panic\" is not one of error, allow, deny",
        ),
        (
            "domain: d\ndescriptors: [{key: k, unit_multiplier: 2}]",
            "a.yaml:2:24: unknown key \"unit_multiplier\"; it belongs under rate_limit",
        ),
        ("domain: d\ndescriptors: [{key: k, metadata: 3}]", "a.yaml:2:34: metadata must be a map, not a scalar"),
        ("domain: 'd", "a.yaml:1:9: invalid YAML: "),
        ("domain: d\ncharge: some", "a.yaml:2:9: charge \"some\" is not one of each, all"),
        (
            "domain: d\ncharge: all\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 1, count_denied: true}}]",
            "a.yaml:3:70: count_denied cannot be combined with the domain's charge: all",
        ),
        (
            "domain: d\ndescriptors: [{key: k, ip_prefix: {v4: 33}}]",
            "a.yaml:2:40: v4 must be a prefix length from 1 to 32",
        ),
        (
            "domain: d\ndescriptors: [{key: k, value: 'a*', share_threshold: true, ip_prefix: {v6: 64}}]",
            "a.yaml:2:60: ip_prefix cannot be combined with share_threshold, which uses one counter for all addresses",
        ),
        (
            "domain: d\ndescriptors: [{key: k, burst: 1}]",
            "a.yaml:2:24: unknown key \"burst\"; it belongs under rate_limit",
        ),
    ] {
        let errors = rejected(&[text]);
        assert_eq!(errors.len(), 1, "{text}: {errors:?}");
        assert!(errors[0].starts_with(expected), "{text}\n  {}\n  {expected}", errors[0]);
    }
}

#[test]
fn a_keyword_of_another_algorithm_is_rejected() {
    for (keywords, expected) in [
        (
            "algorithm: window",
            "2:83: algorithm \"window\" is not one of fixed_window, sliding_window, sliding_log, token_bucket, \
             leaky_bucket, gcra, concurrency, shares, adaptive",
        ),
        ("window: second_request", "2:80: window \"second_request\" is not one of epoch, first_request, calendar"),
        (
            "window: first_request, algorithm: gcra",
            "2:72: window is not supported by algorithm gcra, only by fixed_window",
        ),
        ("limit: 6", "2:72: limit is not supported by algorithm fixed_window, only by concurrency"),
        ("buckets: 6", "2:72: buckets is not supported by algorithm fixed_window, only by sliding_window"),
        (
            "burst: 6",
            "2:72: burst is not supported by algorithm fixed_window, only by token_bucket, leaky_bucket, gcra",
        ),
        ("algorithm: gcra, edge: strict", "2:89: edge is not supported by algorithm gcra, only by sliding_window"),
        (
            "queue: 6, algorithm: token_bucket",
            "2:72: queue is not supported by algorithm token_bucket, only by leaky_bucket",
        ),
        ("algorithm: gcra, warm_up: 1s", "2:89: warm_up is not supported by algorithm gcra, only by token_bucket"),
        ("min_interval: 1s", "2:72: min_interval is not supported by algorithm fixed_window, only by sliding_log"),
        ("algorithm: sliding_window, buckets: 0", "2:99: buckets must be from 1 to 256"),
        ("algorithm: sliding_window, buckets: 257", "2:99: buckets must be from 1 to 256"),
        ("algorithm: sliding_window, edge: sharp", "2:105: edge \"sharp\" is not one of weighted, strict"),
        (
            "algorithm: sliding_window, unit_multiplier: 4000",
            "2:99: the window of a sliding window or log must be at most 10 years",
        ),
        ("algorithm: gcra, burst: 0", "2:89: burst must be at least 1"),
        ("algorithm: gcra, burst: 4000000", "2:89: burst must refill within 100 years"),
        ("algorithm: token_bucket, warm_up: 2h", "2:97: warm_up must be greater than 0 and at most 1 hour"),
        ("algorithm: token_bucket, warm_up: 0s", "2:97: warm_up must be greater than 0 and at most 1 hour"),
        (
            "algorithm: token_bucket, warm_up: soon",
            "2:106: warm_up must be a duration such as 200ms, 30s or 5m, not \"soon\"",
        ),
        ("algorithm: token_bucket, warm_up: 1s, soft: 10%", "2:110: soft is not supported with warm_up"),
        ("algorithm: sliding_log, min_interval: 25h", "2:96: min_interval must not be longer than the window"),
        (
            "algorithm: sliding_log, soft: 1000%",
            "2:36: sliding_log stores every hit: requests_per_unit must be at most 1000, including its soft part; sliding_window has no such bound",
        ),
        ("soft: 10", "2:78: soft must be a whole percentage from 1% to 1000%, not \"10\""),
        ("soft: 0%", "2:78: soft must be a whole percentage from 1% to 1000%, not \"0%\""),
        ("count_denied: perhaps", "2:86: count_denied must be true or false, not perhaps"),
    ] {
        let text = format!(
            "domain: d\ndescriptors: [{{key: k, rate_limit: {{unit: day, requests_per_unit: 100, {keywords}}}}}]"
        );
        assert_eq!(rejected(&[&text]), [format!("a.yaml:{expected}")], "{keywords}");
    }
    let unlimited = "domain: d\ndescriptors: [{key: k, rate_limit: {unlimited: true, burst: 3}}]";
    assert_eq!(rejected(&[unlimited]), ["a.yaml:2:54: burst cannot be combined with unlimited: true"]);
}

#[test]
fn a_concurrency_limit_has_its_own_keywords() {
    for (keywords, expected) in [
        ("limit: 2, unit: day", "2:77: concurrency cannot be combined with unit, unit_multiplier or requests_per_unit"),
        (
            "limit: 2, requests_per_unit: 3",
            "2:71: concurrency cannot be combined with unit, unit_multiplier or requests_per_unit",
        ),
        ("hold: 1s", "2:36: concurrency requires limit: the maximum number of requests in flight"),
        ("limit: 1001", "2:61: concurrency stores every slot: limit must be at most 1000, including its soft part"),
        ("limit: 2, hold: 0s", "2:71: hold must be greater than 0 and at most 1 day"),
        ("limit: 2, hold: 25h", "2:71: hold must be greater than 0 and at most 1 day"),
        ("limit: 2, holder: ''", "2:79: holder must be the key of an entry, not empty"),
        (
            "limit: 2, count_denied: true",
            "2:71: count_denied is not supported with concurrency: a denied request holds no slot",
        ),
        (
            "limit: 2, burst: 3",
            "2:71: burst is not supported by algorithm concurrency, only by token_bucket, leaky_bucket, gcra",
        ),
        (
            "limit: 2, consistency: leased",
            "2:84: consistency: leased is not supported by concurrency with these keywords, because the limit could be exceeded",
        ),
        ("limit: 2, consistency: eventual", "2:84: consistency: eventual cannot be combined with concurrency: "),
    ] {
        let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{algorithm: concurrency, {keywords}}}}}]");
        let errors = rejected(&[&text]);
        assert!(errors.len() == 1 && errors[0].starts_with(&format!("a.yaml:{expected}")), "{keywords}: {errors:?}");
    }
    let text = "domain: d\ndescriptors: [{key: k, rate_limit: {algorithm: concurrency, limit: 2, holder: id}, descriptors: [{key: id}]}]";
    assert_eq!(rejected(&[text]), ["a.yaml:2:98: duplicate descriptor with key \"id\"; first defined at line 2"]);
}

#[test]
fn a_shared_capacity_has_its_own_keywords() {
    let full = "capacity: 10/s, class: c";
    for (keywords, expected) in [
        (
            "capacity: many",
            "2:47: capacity must be a number of requests in flight (100), or of hits per s, m, h, d, second, ",
        ),
        (
            "capacity: 10/w",
            "2:47: capacity must be a number of requests in flight (100), or of hits per s, m, h, d, second, ",
        ),
        ("capacity: 10/s", "2:37: capacity per unit of time requires shares or reserve"),
        ("algorithm: shares", "2:36: algorithm shares requires a capacity such as 1000/s"),
        (
            "capacity: 10/s, algorithm: gcra, shares: {a: {}}, class: c",
            "2:53: algorithm cannot be combined with capacity, which determines the algorithm",
        ),
        (
            "capacity: 10/s, unit: day, shares: {a: {}}, class: c",
            "2:59: capacity cannot be combined with unit, unit_multiplier or requests_per_unit",
        ),
        (
            "capacity: 10, limit: 5",
            "2:51: limit cannot be combined with capacity; a limit is a capacity without classes",
        ),
        (
            "capacity: 10/s, shares: {a: {}}",
            "2:53: shares and reserve require class: the key of the entry that contains a request's class",
        ),
        ("capacity: 10, class: c", "2:51: class requires shares or reserve"),
        ("capacity: 10, class: c, holder: c, reserve: {a: 1}", "2:51: class and holder must be different entries"),
        (
            &format!("{full}, shares: {{a: {{min: 6}}, b: {{min: 5}}}}"),
            "2:71: the minimums of the classes add up to more than the capacity",
        ),
        (&format!("{full}, shares: {{a: {{min: 6, max: 5}}}}"), "2:71: the maximum of a class must be at least 1"),
        (
            &format!("{full}, shares: {{a: {{max: 11}}}}"),
            "2:71: the maximum of a class must be at least 1, at least its minimum",
        ),
        (&format!("{full}, shares: {{a: {{most: 1}}}}"), "2:76: unknown key \"most\"; did you mean max?"),
        (&format!("{full}, shares: [a]"), "2:71: shares must be a map, not a list"),
        (&format!("{full}, reserve: {{a: 101%}}"), "2:76: a reserve must be a whole percentage from 0% to 100%"),
        (
            &format!("{full}, reserve: {{a: 60%, b: 50%}}"),
            "2:72: the minimums of the classes add up to more than the capacity",
        ),
        (
            &format!("{full}, reserve: {{a: 1}}, shares: {{a: {{}}}}"),
            "2:80: shares and reserve cannot be combined; reserve is a short form of shares",
        ),
        (&format!("{full}, shares: {{a: {{}}}}, soft: 10%"), "2:80: soft is not supported with shared capacities"),
        (
            &format!("{full}, shares: {{a: {{}}}}, consistency: leased"),
            "2:93: consistency: leased is not supported by shares",
        ),
        (
            &format!("{full}, shares: {{a: {{}}}}, consistency: eventual"),
            "2:93: consistency: eventual cannot be combined with shares",
        ),
        ("capacity: 70000000/s, shares: {a: {}}, class: c", "2:67: a shared capacity must be at most 67108863"),
        (
            "capacity: 60000000/h, shares: {a: {}}, class: c",
            "2:37: capacity times its unit in microseconds must be below 2^52",
        ),
    ] {
        let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{{keywords}}}}}]");
        let errors = rejected(&[&text]);
        assert!(errors.len() == 1 && errors[0].starts_with(&format!("a.yaml:{expected}")), "{keywords}: {errors:?}");
    }
    let fixed =
        "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 3, reserve: {a: 1}, class: c}}]";
    let errors = rejected(&[fixed]);
    assert!(
        errors[0].ends_with("reserve is not supported by algorithm fixed_window, only by concurrency, shares"),
        "{errors:?}"
    );
    let many: Vec<_> = (0..16).map(|class| format!("c{class}: {{}}")).collect();
    let text = format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{{full}, shares: {{{}}}}}}}]", many.join(", "));
    assert_eq!(rejected(&[&text]), ["a.yaml:2:71: a capacity must be shared by 1 to 16 classes"]);
}

#[test]
fn elastic_requires_a_resource_and_a_maximum() {
    for (keywords, expected) in [
        ("{resource: db}", "2:81: elastic requires resource and up_to"),
        ("{up_to: 200%}", "2:81: elastic requires resource and up_to"),
        ("{resource: db, up_to: 200%, idle: 90%, busy: 90%}", "2:81: idle must be less than busy"),
        (
            "{resource: db, up_to: 200%}, consistency: leased",
            "2:123: consistency: leased cannot be combined with elastic",
        ),
        (
            "{resource: db, up_to: 200%}, algorithm: sliding_log",
            "2:72: at the highest elastic limit, sliding_log stores every hit",
        ),
    ] {
        let text = format!(
            "domain: d\ndescriptors: [{{key: k, rate_limit: {{unit: day, requests_per_unit: 900, elastic: {keywords}}}}}]"
        );
        let errors = rejected(&[&text]);
        assert!(errors.len() == 1 && errors[0].starts_with(&format!("a.yaml:{expected}")), "{keywords}: {errors:?}");
    }
    let text = "domain: d\ndescriptors: [{key: k, rate_limit: {unit: day, requests_per_unit: 9, elastic: {resource: db, up_to: 90%}}}]";
    assert!(rejected(&[text])[0].contains("up_to must be a whole percentage from 101% to 1000%"));
}

#[test]
fn plans_are_checked_as_a_whole() {
    let rule = "descriptors: [{key: k, rate_limit: {by_plan: calls}}]";
    let one = "{unit: day, requests_per_unit: 1}";
    for (plans, expected) in [
        ("plans: {default: a}".to_owned(), "2:8: plans requires limits for at least one plan"),
        (
            format!("plans: {{limits: {{a: {{calls: {one}}}}}}}"),
            "2:8: plans requires default, the plan of requests without one: a",
        ),
        (
            format!("plans: {{default: b, limits: {{a: {{calls: {one}}}}}}}"),
            "2:18: the default plan \"b\" is not one of a",
        ),
        (
            format!("plans: {{default: a, limits: {{a: {{calls: {one}}}, b: {{}}}}}}"),
            "2:77: the plan \"b\" does not define the limit \"calls\", which line 3 uses",
        ),
        (
            format!("plans: {{default: a, limits: {{a: {{calls: {one}}}}}, entities: {{user: {{bob: c}}}}}}"),
            "2:101: the plan \"c\" is not one of a",
        ),
        (
            "plans: {default: a, limits: {a: {calls: {by_plan: other}}}}".to_owned(),
            "2:42: by_plan is not allowed in the limit of a plan",
        ),
        (
            format!(
                "plans: {{default: a, limits: {{a: {{calls: {one}}}, \
                 b: {{calls: {{algorithm: concurrency, limit: 1, holder: id}}}}}}}}"
            ),
            "3:37: the limit \"calls\" must have the same class and holder in all plans",
        ),
    ] {
        let errors = rejected(&[&format!("domain: d\n{plans}\n{rule}")]);
        assert!(errors[0].starts_with(&format!("a.yaml:{expected}")), "{plans}: {errors:?}");
    }
    let errors = rejected(&[&format!("domain: d\n{rule}")]);
    assert_eq!(errors, ["a.yaml:2:37: no plan defines the limit \"calls\""]);
    let same_entry = format!(
        "domain: d\nplans: {{key: id, default: a, limits: {{a: {{calls: {}}}}}}}\n{rule}",
        "{algorithm: concurrency, limit: 1, holder: id}"
    );
    assert!(
        rejected(&[&same_entry])[0].ends_with("the entry \"id\" cannot be both the plan and the class, holder or cost")
    );
    let with_unit = "domain: d\ndescriptors: [{key: k, rate_limit: {by_plan: calls, unit: day}}]";
    assert_eq!(
        rejected(&[with_unit])[1],
        "a.yaml:2:53: unit cannot be combined with by_plan, which refers to a limit of a plan"
    );
}

#[test]
fn one_domain_in_two_files_is_rejected_unless_merged() {
    let one = "domain: d\ndescriptors: [{key: a, rate_limit: {unit: day, requests_per_unit: 1}}]";
    let two = "domain: d\ndescriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 2}}]";
    assert_eq!(
        rejected(&[one, two]),
        ["b.yaml:1:1: domain \"d\" is already defined in a.yaml; set rules.merge_domains to combine the files"]
    );
    let (set, _) = accepted(&[one, two], Options { merge_domains: true, ..Options::default() });
    assert_eq!((limit(&set, "d", &[("a", "")]), limit(&set, "d", &[("b", "")])), (Some(1), Some(2)));
    let diagnostics =
        compile(&files(&[one, one]), Options { merge_domains: true, ..Options::default() }).err().unwrap();
    assert!(
        diagnostics[0].to_string().starts_with("b.yaml:2:15: duplicate descriptor with key \"a\""),
        "{diagnostics:?}"
    );
}

#[test]
fn files_of_envoyproxy_ratelimit_are_accepted() {
    let text = "
domain: d
descriptors:
- key: &key k
  value: 123            # a number is a text
  shadow_mode: yes      # YAML 1.1
  rate_limit: &day {unit: DAY, requests_per_unit: 1_000}
- key: *key
  value: true
  rate_limit: *day
- key: merged
  rate_limit: {<<: *day, requests_per_unit: 0x10}
- key: empty
  value:
  rate_limit: ~
  descriptors:
- key: misplaced
  rate_limit: {unit: day, requests_per_unit: 2, shadow_mode: true}
---
another: document
";
    let (set, warnings) = accepted(&[text], Options::default());
    assert_eq!(limit(&set, "d", &[("k", "123")]), Some(1000));
    assert_eq!(limit(&set, "d", &[("k", "true")]), Some(1000));
    assert_eq!(limit(&set, "d", &[("merged", "x")]), Some(16));
    assert_eq!(limit(&set, "d", &[("misplaced", "x")]), Some(2));
    assert_eq!(
        warnings,
        [
            "a.yaml:15:15: warning: rate_limit is empty, so this descriptor has no limit of its own",
            "a.yaml:18:49: warning: shadow_mode has no effect here; it belongs in a descriptor",
            "a.yaml:20:1: warning: only the first document of a file is read; move this one to a file of its own",
        ]
    );
}

/// The value of `requests_per_unit` in yaml.v2 2.4, the reader of envoyproxy/ratelimit; `None` if it is an error there.
const NUMBERS: &[(&str, Option<u32>)] = &[
    ("0", Some(0)),
    ("7", Some(7)),
    ("00", Some(0)),
    ("-0", Some(0)),
    ("-00", Some(0)),
    ("+0", Some(0)),
    ("07", Some(7)),
    ("+5", Some(5)),
    ("0_7", Some(7)),
    ("0_0", Some(0)),
    ("0o10", Some(8)),
    ("0O10", Some(8)),
    ("0o100", Some(64)),
    ("0o1_0", Some(8)),
    ("0o_7", Some(7)),
    ("+0o7", Some(7)),
    ("0b11", Some(3)),
    ("0B11", Some(3)),
    ("0b1_1", Some(3)),
    ("0b1__1", Some(3)),
    ("+0b1", Some(1)),
    ("-0b0", Some(0)),
    ("0b11111111111111111111111111111111", Some(u32::MAX)),
    ("0x1F", Some(31)),
    ("0X1F", Some(31)),
    ("0xfF", Some(255)),
    ("0x_1F", Some(31)),
    ("0x1__0", Some(16)),
    ("+0x10", Some(16)),
    ("0xFFFFFFFF", Some(u32::MAX)),
    ("1_000", Some(1_000)),
    ("1__0", Some(10)),
    ("1_", Some(1)),
    ("4294967295", Some(u32::MAX)),
    ("4_294_967_295", Some(u32::MAX)),
    ("!!int 5", Some(5)),
    ("!!int '5'", Some(5)),
    ("&a 5", Some(5)),
    ("0 ", Some(0)),
    ("~", Some(0)),
    ("null", Some(0)),
    ("Null", Some(0)),
    ("NULL", Some(0)),
    ("", Some(0)),
    ("0o8", None),
    ("0o", None),
    ("0b12", None),
    ("0b", None),
    ("0xg", None),
    ("0x", None),
    ("-1", None),
    ("-010", None),
    ("-0x1", None),
    ("+ 5", None),
    ("9007199254740992", None),
    ("0x20000000000000", None),
    ("99999999999999999999", None),
    ("1.0", Some(1)),
    ("1.5", Some(1)),
    ("10.", Some(10)),
    (".5", Some(0)),
    ("1e3", Some(1_000)),
    ("1E3", Some(1_000)),
    ("5e0", Some(5)),
    ("1_0.0", Some(10)),
    ("+1e2", Some(100)),
    ("1e+3", Some(1_000)),
    ("1e-3", Some(0)),
    ("07.0", Some(7)),
    ("-0.0", Some(0)),
    ("4294967295.0", Some(u32::MAX)),
    ("9007199254740992.0", None),
    ("1e16", None),
    ("-1.0", None),
    ("1e400", None),
    ("1e", None),
    ("0x1.8p1", None),
    (".inf", None),
    (".nan", None),
    ("inf", None),
    ("1:30", None),
    ("2001-12-14", None),
    ("1 000", None),
    ("5#c", None),
    ("'5'", None),
    ("\"5\"", None),
    ("five", None),
    ("true", None),
    ("yes", None),
    ("[5]", None),
    ("{}", None),
    ("٣", None),
];

/// Numbers above 32 bits, which envoyproxy/ratelimit rejects.
const LARGE_NUMBERS: &[(&str, u64)] = &[
    ("4294967296", 4_294_967_296),
    ("0x100000000", 4_294_967_296),
    ("5e9", 5_000_000_000),
    ("9_007_199_254_740_991", 9_007_199_254_740_991),
];

/// Numbers with a leading zero: our value since 0.1.0, where envoyproxy/ratelimit has another or an error.
const LEADING_ZEROS: &[(&str, u32)] = &[
    ("010", 10),
    ("0100", 100),
    ("00100", 100),
    ("0_10", 10),
    ("0777_7", 7_777),
    ("+010", 10),
    ("08", 8),
    ("09", 9),
    ("018", 18),
    ("0128", 128),
    ("!!int 010", 10),
];

/// Returns the file with this value of `requests_per_unit`, in block and in flow style.
fn files_with_number(number: &str) -> [String; 2] {
    [
        format!("domain: d\ndescriptors:\n- key: k\n  rate_limit:\n    unit: day\n    requests_per_unit: {number}\n"),
        format!("domain: d\ndescriptors: [{{key: k, rate_limit: {{unit: day, requests_per_unit: {number}}}}}]\n"),
    ]
}

#[test]
fn numbers_have_the_values_of_envoyproxy_ratelimit() {
    for (number, expected) in NUMBERS {
        for text in files_with_number(number) {
            let Some(expected) = expected else {
                let errors = rejected(&[&text]);
                assert!(errors[0].contains("requests_per_unit must be a whole number"), "{number}: {errors:?}");
                continue;
            };
            let (set, warnings) = accepted(&[&text], Options::default());
            assert_eq!(limit(&set, "d", &[("k", "x")]), Some(u64::from(*expected)), "{number}");
            let is_unusual = matches!(*number, "" | "~" | "null" | "Null" | "NULL" | "1.5" | ".5" | "1e-3");
            assert_eq!(warnings.len(), usize::from(is_unusual), "{number}: {warnings:?}");
        }
    }
}

#[test]
fn a_limit_can_have_more_than_32_bits() {
    for (number, expected) in LARGE_NUMBERS {
        for text in files_with_number(number) {
            let (set, warnings) = accepted(&[&text], Options::default());
            assert_eq!(limit(&set, "d", &[("k", "x")]), Some(*expected), "{number}");
            assert!(warnings.is_empty(), "{number}: {warnings:?}");
        }
    }
}

#[test]
fn a_number_with_a_leading_zero_stays_decimal_with_a_warning() {
    for (number, expected) in LEADING_ZEROS {
        for text in files_with_number(number) {
            let (set, warnings) = accepted(&[&text], Options::default());
            assert_eq!(limit(&set, "d", &[("k", "x")]), Some(u64::from(*expected)), "{number}");
            assert_eq!(warnings.len(), 1, "{number}: {warnings:?}");
            let read =
                format!("is read as {expected}; envoyproxy/ratelimit reads numbers with a leading zero as octal");
            assert!(warnings[0].contains(&read), "{number}: {warnings:?}");
        }
    }
}

#[test]
fn tabs_between_tokens_are_read_and_tabs_in_texts_stay() {
    let descriptor = |descriptor: &str| format!("domain:\td\ndescriptors:\n- {descriptor}\n");
    let limit_of = "rate_limit: {unit: day, requests_per_unit: 5}";
    for (text, value) in [
        (descriptor(&format!("key:\tk\n  {limit_of}")), "x"),
        (descriptor(&format!("key:\t\tk\n  {limit_of}")), "x"),
        (descriptor(&format!("key: \tk\n  {limit_of}")), "x"),
        (descriptor(&format!("key:\t'k'\n  {limit_of}")), "x"),
        (descriptor(&format!("\"key\":\tk\n  {limit_of}")), "x"),
        (descriptor(&format!("key:\tk\t# comment:\tx\n  {limit_of}")), "x"),
        (descriptor(&format!("key\t: k\n  {limit_of}")), "x"),
        (descriptor("key:\tk\n  rate_limit:\t{unit:\tday,\trequests_per_unit:\t5\t}"), "x"),
        (descriptor("key:\tk\n  rate_limit:\t\n    unit:\tday\n    requests_per_unit:\t5\t"), "x"),
        (descriptor("{key:\tk, rate_limit: {\"unit\":\tday, requests_per_unit: 5}}"), "x"),
        (descriptor(&format!("key: k\n  value: &a\tx\n  {limit_of}")), "x"),
        (descriptor(&format!("key: k\n  value: \"a:\tb\"\n  {limit_of}")), "a:\tb"),
        (descriptor(&format!("key: k\n  value: 'é:\tb'\n  {limit_of}")), "é:\tb"),
        (descriptor(&format!("key: k\n  value:\t'a:\tb'\n  {limit_of}")), "a:\tb"),
        (descriptor(&format!("key: k\n  value: |-\n    a:\tb\n    c:\td\n  {limit_of}")), "a:\tb\nc:\td"),
        (descriptor(&format!("key: k\n  value:\t>-\n    a:\tb\n  {limit_of}")), "a:\tb"),
        (descriptor(&format!("key: k\n  value: a\tb\n  {limit_of}")), "a\tb"),
    ] {
        let (set, warnings) = accepted(&[&text], Options::default());
        assert_eq!(limit(&set, "d", &[("k", value)]), Some(5), "{text:?}");
        assert!(warnings.is_empty(), "{text:?}: {warnings:?}");
    }
    // The parser ends the document here. The rest would be ignored.
    assert_eq!(
        rejected(&["\tdomain: d\ndescriptors:\n- {key: k, rate_limit: {unit: day, requests_per_unit: 5}}\n"]),
        ["a.yaml:2:1: invalid YAML: did not find expected <document start>"]
    );
    assert_eq!(
        rejected(&["domain:\td\nfoo:\tx\n"]),
        ["a.yaml:2:1: unknown key \"foo\"; keys allowed here: domain, charge, shard_by, plans, descriptors"]
    );
}

#[test]
fn what_a_file_does_not_mean_has_one_warning() {
    let head = "domain: d\ndescriptors:\n";
    let rule = "- {key: a, rate_limit: {unit: day, requests_per_unit: 1}}\n";
    let documents = "warning: only the first document of a file is read; move this one to a file of its own";
    for (text, expected) in [
        (format!("{head}{rule}---\ndomain: e\nkye: 1\n"), format!("5:1: {documents}")),
        (format!("{head}{rule}---\n---\n[]\n---\nx\n"), format!("6:1: {documents}")),
        (format!("{head}{rule}...\n---\n{{\n"), format!("6:1: {documents}")),
        (
            format!("{head}- {{key: a, rate_limit: {{unit: day, requests_per_unit: 1.5}}}}\n"),
            "3:55: warning: requests_per_unit 1.5 is read as 1, without its fraction".into(),
        ),
        (
            format!("{head}- {{key: a, rate_limit: {{unit: day}}}}\n"),
            "3:24: warning: rate_limit has no requests_per_unit; the default of 0 denies every request".into(),
        ),
        (
            format!("{head}- {{key: a, rate_limit: {{unit: day, requests_per_unit: }}}}\n"),
            "3:53: warning: requests_per_unit is empty and read as 0, which denies every request".into(),
        ),
        (
            format!("{head}- {{key: a, rate_limit: {{algorithm: concurrency, limit: ~}}}}\n"),
            "3:56: warning: limit is empty and read as 0, which denies every request".into(),
        ),
        (
            format!("{head}- {{key: a, value: !!binary aGk=}}\n"),
            "3:19: warning: the tag \"binary\" of this value is ignored".into(),
        ),
        (
            format!("{head}- {{key: 'x-*', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n"),
            "3:9: warning: the * in the key \"x-*\" is no pattern, only entries with exactly this key match; \
             envoyproxy/ratelimit matches a * at the end of a key as a pattern"
                .into(),
        ),
    ] {
        let (_, warnings) = accepted(&[&text], Options::default());
        assert_eq!(warnings, [format!("a.yaml:{expected}")], "{text}");
    }
    for text in [format!("---\n{head}{rule}"), format!("{head}{rule}---\n"), format!("{head}{rule}...\n---\n~\n...\n")]
    {
        assert!(accepted(&[&text], Options::default()).1.is_empty(), "{text}");
    }
}

#[test]
fn descriptors_match_as_in_envoyproxy_ratelimit() {
    let text = "
domain: d
descriptors:
- key: a
  value: exact
  descriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]
- key: a
  value: ex*
  rate_limit: {unit: day, requests_per_unit: 2}
  descriptors: [{key: c, rate_limit: {unit: day, requests_per_unit: 3}}]
- key: a
  value: e*t
  rate_limit: {unit: day, requests_per_unit: 4}
- key: a
  rate_limit: {unit: day, requests_per_unit: 5}
- key: allow
  value: me
- key: allow
  rate_limit: {unit: day, requests_per_unit: 6}
";
    let (set, _) = accepted(&[text], Options::default());
    for (entries, expected) in [
        (&[("a", "exact"), ("b", "x")][..], Some(1)),
        (&[("a", "exact")], None),             // ends on a rule without a limit
        (&[("a", "exact"), ("c", "x")], None), // no backtracking to ex*
        (&[("a", "extra")], Some(2)),
        (&[("a", "ext"), ("c", "x")], Some(3)), // ex* is defined before e*t
        (&[("a", "eat")], Some(4)),
        (&[("a", "eat"), ("c", "x")], None),
        (&[("a", "other")], Some(5)),
        (&[("a", "")], Some(5)),
        (&[("a", "ex*")], Some(2)), // a pattern matches itself
        (&[("allow", "me")], None),
        (&[("allow", "you")], Some(6)),
        (&[("A", "exact")], None),
        (&[], None),
    ] {
        assert_eq!(limit(&set, "d", entries), expected, "{entries:?}");
    }
    assert_eq!(limit(&set, "e", &[("a", "x")]), None);
}

/// `Options::charge_all` applies to domains without `charge`.
#[test]
fn a_domain_without_charge_uses_the_default() {
    let charges = |charge: &str, charge_all| {
        let text =
            format!("domain: d\n{charge}descriptors: [{{key: k, rate_limit: {{unit: hour, requests_per_unit: 1}}}}]\n");
        let file = SourceFile { name: "d.yaml".into(), text };
        let (set, _) = compile(&[file], Options { charge_all, ..Options::default() }).unwrap();
        set.settings_of("d").is_some_and(|domain| domain.charge_all)
    };
    assert_eq!([charges("", false), charges("", true)], [false, true]);
    assert_eq!([charges("charge: all\n", false), charges("charge: each\n", true)], [true, false]);
}

/// The setting `rules.charge_all` sets `Options::charge_all`.
#[tokio::test]
async fn a_setting_determines_the_default_of_charge() {
    let text = "domain: d\ndescriptors:\n- {key: a, rate_limit: {unit: hour, requests_per_unit: 1}}\n\
                - {key: b, rate_limit: {unit: hour, requests_per_unit: 9}}\n";
    let folder = rules(&[("d.yaml", text)]);
    for (charge_all, remaining) in [("false", 6), ("true", 7)] {
        let server = Server::builder().rules(folder.path()).set("rules.charge_all", charge_all).start();
        let client = server.client().await;
        for _ in 0..2 {
            client.check(request_for("d", &[("a", "x")]).descriptor(descriptor(&[("b", "x")]))).await.unwrap();
        }
        let answer = client.check(request_for("d", &[("b", "x")])).await.unwrap();
        assert_eq!(answer.remaining(), Some(remaining), "{charge_all}");
    }
}

#[test]
fn limits_that_are_not_exchanged_with_peers_have_a_warning() {
    let text = "domain: d\ndescriptors:\n- key: a\n  rate_limit: {algorithm: concurrency, limit: 3, hold: 30s}\n\
                - key: b\n  rate_limit: {algorithm: gcra, unit: day, requests_per_unit: 5}";
    let (_, warnings) = accepted(&[text], Options { peers: true, ..Options::default() });
    let reason = "concurrency is enforced by each instance alone, because its counters are not exchanged with peers";
    assert_eq!(warnings, [format!("a.yaml:4:15: warning: {reason}")]);
    assert_eq!(accepted(&[text], Options::default()).1, <[&str; 0]>::default());
}

#[test]
fn the_rule_files_in_deploy_have_no_warnings() {
    for folder in ["deploy/examples", "deploy/envoy/rules"] {
        let path = crate::support::repository(folder);
        let source = sluicegate::rules::source::Source::directory(path);
        let (_, warnings) = compile(&source.read().unwrap(), Options::default()).unwrap();
        assert_eq!(warnings, []);
    }
}

/// The policy name in headers is the name of the limit, if it has one. Otherwise it consists of the keys and values of
/// the rule, without the plan.
#[test]
fn a_policy_is_named_after_its_limit_or_its_rule() {
    let rule = |name: &str| format!("{{unit: day, requests_per_unit: 1{name}}}");
    let text = format!(
        "domain: d\nplans: {{default: a, limits: {{a: {{calls: {plain}}}, b: {{calls: {plain}}}}}}}\ndescriptors:\n\
         - {{key: user, rate_limit: {{by_plan: calls}}}}\n\
         - {{key: api, value: v1, descriptors: [{{key: user, rate_limit: {plain}}}]}}\n\
         - {{key: own, rate_limit: {named}}}\n",
        plain = rule(""),
        named = rule(", name: mine"),
    );
    let (set, _) = accepted(&[&text], Options::default());
    let policies: Vec<_> = set.rules().iter().map(|rule| rule.policy().to_string()).collect();
    assert_eq!(policies, ["user", "user", "api_v1.user", "mine"]);
    let labels: Vec<_> = set.rules().iter().map(|rule| rule.labels.join(" ")).collect();
    assert_eq!(labels, ["d user plan_b", "d user plan_a", "d api_v1 user", "d own"]);
}
