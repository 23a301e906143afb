use std::collections::BTreeMap;

use proptest::prelude::*;
use sluicegate_rules::{self as rules, SourceFile};

use super::*;

fn entry(target: &str, value: &str) -> Override {
    Override {
        target: Target::parse(target).unwrap(),
        value: value.into(),
        until: None,
        author: "alice".into(),
        reason: "ticket 4711".into(),
        at: Micros::from_secs(5),
        version: 1,
    }
}

fn all(overrides: &[(&str, &str)]) -> Overrides {
    let mut all = Overrides::default();
    for (target, value) in overrides {
        all.put(entry(target, value), Options::default()).unwrap();
    }
    all
}

/// Returns the requests per second and the number of entries of the custom limit for a descriptor.
fn limit(overrides: &Overrides, entries: &[(&str, &str)], now: u64) -> Option<(u64, usize)> {
    let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
    let entity_limit = overrides.entity_limit("api", &entries, Micros::from_secs(now))?;
    Some((entity_limit.limit.limit.requests(), entity_limit.entries))
}

#[test]
fn the_longest_list_of_entries_decides() {
    let overrides = all(&[
        ("limit|api|user=bob", "1/second"),
        ("limit|api|user=bob|path=/x", "2/second"),
        ("limit|api|path=/x", "3/second"),
        ("limit|other|user=eve", "4/second"),
    ]);
    let user = |name: &'static str| ("user", name);
    assert_eq!(limit(&overrides, &[user("bob")], 0), Some((1, 1)));
    assert_eq!(limit(&overrides, &[user("bob"), ("path", "/y")], 0), Some((1, 1)));
    assert_eq!(limit(&overrides, &[user("bob"), ("path", "/x")], 0), Some((2, 2)));
    assert_eq!(limit(&overrides, &[("path", "/x"), user("bob")], 0), Some((3, 1)));
    assert_eq!(limit(&overrides, &[user("eve"), ("path", "/x")], 0), None);
    assert_eq!(limit(&overrides, &[], 0), None);
}

/// Callers choose values freely, so no value may make one list of entries look like another.
#[test]
fn no_value_is_mistaken_for_another_list_of_entries() {
    let overrides = all(&[("limit|api|user=xpathy|path=b", "1/second")]);
    assert_eq!(limit(&overrides, &[("user", "xpathy"), ("path", "b")], 0), Some((1, 2)));
    assert_eq!(limit(&overrides, &[("user", "x"), ("path", "ypathb")], 0), None);
}

#[test]
fn the_last_entry_with_a_plan_decides() {
    let overrides = all(&[("plan|api|org=a", "free"), ("plan|api|user=b", "pro"), ("plan|web|user=c", "other")]);
    let plan = |entries: &[(&str, &str)]| {
        let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        overrides.plan("api", &entries, Micros::ZERO).map(|assignment| &*assignment.plan)
    };
    assert_eq!(plan(&[("org", "a"), ("user", "b")]), Some("pro"));
    assert_eq!(plan(&[("user", "b"), ("org", "a")]), Some("free"));
    assert_eq!(plan(&[("org", "a"), ("user", "c")]), Some("free"));
    assert_eq!(plan(&[("user", "c")]), None);
}

#[test]
fn removing_a_limit_keeps_others_with_the_same_keys() {
    let mut overrides = all(&[("limit|api|user=bob", "1/second"), ("limit|api|user=eve", "2/second")]);
    overrides.remove(&Target::parse("limit|api|user=bob").unwrap());
    assert_eq!(limit(&overrides, &[("user", "bob")], 0), None);
    assert_eq!(limit(&overrides, &[("user", "eve")], 0), Some((2, 1)));
}

#[test]
fn an_override_expires() {
    let mut overrides = Overrides::default();
    let until = |seconds| Some(Micros::from_secs(seconds));
    for (target, value, until) in [
        ("limit|api|user=bob", "1/second", until(10)),
        ("limit|api|user=eve", "1/second", until(20)),
        ("plan|api|user=bob", "pro", until(15)),
        ("switch|everything", "off", until(10)),
    ] {
        overrides.put(Override { until, ..entry(target, value) }, Options::default()).unwrap();
    }
    assert_eq!(limit(&overrides, &[("user", "bob")], 9), Some((1, 1)));
    assert_eq!(limit(&overrides, &[("user", "bob")], 10), None);
    let expired = |overrides: &Overrides, now| -> Vec<String> {
        overrides.expired(Micros::from_secs(now), 10).map(|expired| expired.target.to_string()).collect()
    };
    assert_eq!(expired(&overrides, 9), [""; 0]);
    assert_eq!(expired(&overrides, 15), ["limit|api|user=bob", "switch|everything", "plan|api|user=bob"]);
    assert_eq!(overrides.expired(Micros::from_secs(15), 2).count(), 2);
    // An override that is put again has the new time of expiry, or none.
    overrides.put(entry("limit|api|user=bob", "2/second"), Options::default()).unwrap();
    overrides.put(entry("switch|everything", "off"), Options::default()).unwrap();
    assert_eq!(expired(&overrides, 15), ["plan|api|user=bob"]);
    overrides.remove(&Target::parse("plan|api|user=bob").unwrap()).unwrap();
    assert_eq!(expired(&overrides, 20), ["limit|api|user=eve"]);
    // A time within a second is rounded up to the end of the second.
    let eve = |until| Override { until, ..entry("limit|api|user=eve", "1/second") };
    overrides.put(eve(Some(Micros::new(20_500_000))), Options::default()).unwrap();
    assert_eq!((expired(&overrides, 20), expired(&overrides, 21)), (vec![], vec!["limit|api|user=eve".to_owned()]));
    overrides.put(eve(None), Options::default()).unwrap();
    assert_eq!(expired(&overrides, 21), [""; 0]);
}

#[test]
fn an_invalid_override_is_rejected_and_changes_nothing() {
    let mut overrides = all(&[("limit|api|user=bob", "1/second")]);
    for (target, value, expected) in [
        ("limit|api|user=bob", "lots", "is not a limit"),
        ("plan|api|user=bob", "", "the name of the plan is empty"),
        ("switch|everything", "maybe", "is not a mode"),
    ] {
        let entry = entry(target, value);
        let errors = [Overrides::check(&entry, Options::default()), overrides.put(entry, Options::default())];
        for error in errors.map(|result| result.unwrap_err().to_string()) {
            assert!(error.contains(expected), "{error}");
        }
    }
    for number in 1..MAX_KEY_LISTS {
        overrides.put(entry(&format!("limit|api|k{number}=v"), "1/second"), Options::default()).unwrap();
    }
    let error = overrides.put(entry("limit|api|k=v", "1/second"), Options::default()).unwrap_err();
    assert_eq!(error, OverrideError::TooManyKeyLists("api".into()));
    // A list of keys that is in use is accepted, and a new one is accepted after another was removed.
    overrides.put(entry("limit|api|k1=w", "1/second"), Options::default()).unwrap();
    overrides.remove(&Target::parse("limit|api|k2=v").unwrap()).unwrap();
    overrides.put(entry("limit|api|k=v", "1/second"), Options::default()).unwrap();
    assert_eq!(limit(&overrides, &[("user", "bob")], 0), Some((1, 1)));
}

#[test]
fn the_switch_with_the_narrowest_scope_decides() {
    let text = "domain: api\ndescriptors:\n- {key: a, rate_limit: {unit: second, requests_per_unit: 1, name: first}}\n\
                - {key: b, value: v, rate_limit: {unit: second, requests_per_unit: 1, algorithm: token_bucket}}\n\
                - {key: c, rate_limit: {unit: second, requests_per_unit: 1, shed: true}}\n\
                - {key: d, rate_limit: {unlimited: true}}\n";
    let file = SourceFile { name: "api.yaml".into(), text: text.into() };
    let (rules, _) = rules::compile(&[file], Options::default()).unwrap();
    let modes = |switches: &[(&str, &str)]| {
        let modes = all(switches).modes(&rules, Micros::ZERO);
        let name = |mode: Option<Mode>| mode.map_or("", Mode::name);
        let of_rules: Vec<_> = rules.rules().iter().map(|rule| name(modes.mode_of("api", Some(rule)))).collect();
        (of_rules.join(","), name(modes.mode_of("api", None)), name(modes.mode_of("other", None)))
    };
    assert_eq!(modes(&[]), (",,,".into(), "", ""));
    assert_eq!(modes(&[("switch|everything", "off")]), ("off,off,off,off".into(), "off", "off"));
    assert_eq!(modes(&[("switch|domain|api", "deny")]), ("deny,deny,deny,deny".into(), "deny", ""));
    assert_eq!(modes(&[("switch|kind|shedding", "off")]), (",,off,".into(), "", ""));
    assert_eq!(modes(&[("switch|kind|fixed_window", "off")]), ("off,,off,".into(), "off", "off"));
    assert_eq!(modes(&[("switch|rule|api|first", "off")]), ("off,,,".into(), "", ""));
    assert_eq!(modes(&[("switch|rule|api|b_v", "off"), ("switch|rule|other|a", "off")]), (",off,,".into(), "", ""));
    let nested = [
        ("switch|everything", "off"),
        ("switch|domain|api", "shadow"),
        ("switch|kind|token_bucket", "deny"),
        ("switch|rule|api|a", "enforce"),
    ];
    assert_eq!(modes(&nested), ("enforce,deny,shadow,shadow".into(), "shadow", "off"));
    // An origin nearer to this instance takes precedence over the store, and an expired switch is ignored.
    let mut overrides = all(&[("switch|everything", "off")]);
    overrides.set_switch(&entry("switch|everything", "shadow"), Origin::File);
    let mode = |overrides: &Overrides| overrides.modes(&rules, Micros::from_secs(9)).mode_of("other", None);
    assert_eq!(mode(&overrides), Some(Mode::Shadow));
    let over = Override { until: Some(Micros::from_secs(9)), ..entry("switch|everything", "deny") };
    overrides.set_switch(&over, Origin::Instance);
    assert_eq!(mode(&overrides), Some(Mode::Shadow));
    overrides.set_switch(&entry("switch|everything", "enforce"), Origin::Instance);
    assert_eq!(mode(&overrides), Some(Mode::Enforce));
    overrides.clear_switch(&Scope::Everything, Origin::Instance);
    overrides.clear_switch(&Scope::Everything, Origin::File);
    assert_eq!(mode(&overrides), Some(Mode::Off));
}

fn target() -> impl Strategy<Value = String> {
    prop::sample::select(vec![
        "limit|api|user=a",
        "limit|api|user=b",
        "limit|api|user=a|path=b",
        "limit|web|user=a",
        "plan|api|user=a",
        "plan|api|user=b",
        "switch|everything",
        "switch|domain|api",
        "rules|candidate",
    ])
    .prop_map(str::to_owned)
}

fn step() -> impl Strategy<Value = (String, Option<(usize, Option<u64>, u8)>)> {
    (target(), prop::option::of((0..2_usize, prop::option::of(1..5_u64), 0..3_u8)))
}

proptest! {
    #[test]
    fn the_overrides_are_those_that_were_put_and_not_removed(steps in prop::collection::vec(step(), 0..60)) {
        let (mut overrides, mut model) = (Overrides::default(), BTreeMap::new());
        for (version, (target, written)) in steps.into_iter().enumerate() {
            let key = Target::parse(&target).unwrap();
            match written {
                Some((value, until, author)) => {
                    let values = match &key {
                        Target::Limit { .. } => ["1/second", "blocked"],
                        Target::Plan { .. } => ["pro", "free"],
                        Target::Switch(_) => ["off", "deny"],
                        Target::Rules(_) => ["abc 0.1", "def 1"],
                    };
                    let written = Override {
                        until: until.filter(|_| !matches!(key, Target::Rules(_))).map(Micros::from_secs),
                        author: author.to_string().into(),
                        version: version as u64,
                        ..entry(&target, values[value])
                    };
                    overrides.put(written.clone(), Options::default()).unwrap();
                    model.insert(target, written);
                }
                None => prop_assert_eq!(overrides.remove(&key), model.remove(&target)),
            }
            let stored: BTreeMap<_, _> = overrides.iter().map(|entry| (entry.target.to_string(), entry)).collect();
            prop_assert_eq!(&stored, &model);
            let expired: Vec<_> =
                overrides.expired(Micros::from_secs(3), 100).map(|entry| entry.target.to_string()).collect();
            let expected = model.iter().filter(|(_, entry)| entry.is_expired(Micros::from_secs(3))).count();
            prop_assert_eq!(expired.len(), expected);
        }
        for target in model.into_keys() {
            overrides.remove(&Target::parse(&target).unwrap()).unwrap();
        }
        // Removing all overrides frees everything that they used.
        prop_assert_eq!(overrides.counts(), [0; 3]);
        prop_assert!(overrides.limit_key_lists.is_empty() && overrides.plan_key_lists.is_empty());
        prop_assert!(overrides.texts.is_empty() && overrides.limits_by_text.is_empty() && overrides.expirations.is_empty());
    }
}

#[test]
fn a_plan_is_found_by_the_only_key_with_plans() {
    let overrides = all(&[("plan|api|user=b", "pro")]);
    let entries = [Entry { key: "org", value: "a" }, Entry { key: "user", value: "b" }];
    let plan = overrides.plan("api", &entries, Micros::ZERO).map(|assignment| &*assignment.plan);
    assert_eq!(plan, Some("pro"));
}

#[test]
fn overrides_are_counted_by_kind_and_limits_by_their_keys() {
    let mut overrides = all(&[
        ("limit|api|user=a", "1/second"),
        ("limit|api|user=b", "2/second"),
        ("limit|api|path=c", "1/second"),
        ("plan|api|user=a", "pro"),
        ("plan|api|user=b", "pro"),
        ("switch|everything", "off"),
    ]);
    overrides.set_switch(&entry("switch|domain|api", "off"), Origin::File);
    assert_eq!(overrides.counts(), [3, 2, 1]);
    let limits = |keys: &[&str]| overrides.limits_with_keys("api", keys);
    assert_eq!((limits(&["user"]), limits(&["path"]), limits(&["user", "path"])), (2, 1, 0));
}

#[test]
fn a_set_of_rules_needs_a_digest() {
    let empty = entry("rules|in_force", "");
    assert_eq!(Overrides::check(&empty, Options::default()), Err(OverrideError::Rules));
    assert_eq!(Overrides::default().put(empty, Options::default()), Err(OverrideError::Rules));
}

#[test]
fn the_switches_of_an_origin_are_replaced_together_and_survive_the_loss_of_the_store() {
    let mut overrides = all(&[("switch|everything", "off"), ("limit|api|user=a", "1/second")]);
    overrides.set_switches(&[entry("switch|domain|api", "off")], Origin::File);
    overrides.set_switches(&[entry("switch|domain|web", "deny")], Origin::File);
    let in_force = |overrides: &Overrides| {
        let switches = overrides.switches_in_force(Micros::ZERO);
        assert_eq!(overrides.modes(&RuleSet::default(), Micros::ZERO).in_force(), switches);
        switches.into_iter().map(|(scope, mode, origin)| (Target::Switch(scope).to_string(), mode, origin)).collect()
    };
    let web = || ("switch|domain|web".to_owned(), Mode::Deny, Origin::File);
    let mut switches: Vec<_> = in_force(&overrides);
    switches.sort_by(|one, other| one.0.cmp(&other.0));
    assert_eq!(switches, [web(), ("switch|everything".to_owned(), Mode::Off, Origin::Store)]);
    let rest = overrides.without_stored();
    assert_eq!((rest.counts(), in_force(&rest)), ([0; 3], vec![web()]));
}
