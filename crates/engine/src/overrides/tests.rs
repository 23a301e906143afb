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
        "planned|1970-01-01T00:00:02Z|limit|api|user=a",
        "planned|1970-01-01T00:00:04Z|limit|api|user=a",
        "planned|1970-01-01T00:00:02Z|plan|api|user=a",
        "planned|1970-01-01T00:00:03Z|switch|everything",
    ])
    .prop_map(str::to_owned)
}

fn step() -> impl Strategy<Value = (String, Option<(usize, Option<u64>, u8)>)> {
    (target(), prop::option::of((0..2_usize, prop::option::of(1..5_u64), 0..3_u8)))
}

/// Returns two values that a target can have.
fn values_for(target: &Target) -> [&'static str; 2] {
    match target.begun() {
        Target::Limit { .. } => ["1/second", "blocked"],
        Target::Plan { .. } => ["pro", "free"],
        Target::Switch(_) => ["off", "deny"],
        Target::Rules(_) | Target::Planned { .. } => ["abc 0.1", "def 1"],
    }
}

proptest! {
    #[test]
    fn the_overrides_are_those_that_were_put_and_not_removed(steps in prop::collection::vec(step(), 0..60)) {
        let (mut overrides, mut model) = (Overrides::default(), BTreeMap::new());
        for (version, (target, written)) in steps.into_iter().enumerate() {
            let key = Target::parse(&target).unwrap();
            match written {
                Some((value, until, author)) => {
                    let written = Override {
                        until: until.filter(|_| !matches!(key, Target::Rules(_))).map(Micros::from_secs),
                        author: author.to_string().into(),
                        version: version as u64,
                        ..entry(&target, values_for(&key)[value])
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
            let is_expired = |entry: &&Override| entry.is_expired(Micros::from_secs(3)) && entry.begun().is_none();
            let expected = model.values().filter(is_expired).count();
            prop_assert_eq!(expired.len(), expected);
        }
        for target in model.into_keys() {
            overrides.remove(&Target::parse(&target).unwrap()).unwrap();
        }
        // Removing all overrides frees everything that they used.
        prop_assert_eq!((overrides.counts(), overrides.planned_count(), overrides.next_beginning(Micros::ZERO)), ([0; 3], 0, None));
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

fn planned(from: u64, target: &str, value: &str) -> Override {
    let target = Target::parse(target).unwrap().planned(Micros::from_secs(from)).unwrap();
    Override { version: from, ..entry(&target.to_string(), value) }
}

/// Returns the overrides after the beginning of those that are due.
fn at(overrides: &Overrides, now: u64) -> Overrides {
    let mut overrides = overrides.clone();
    overrides.begin_planned(Micros::from_secs(now), Options::default());
    overrides
}

#[test]
fn a_planned_override_replaces_that_of_its_target_at_its_beginning() {
    let mut overrides = all(&[("limit|api|user=bob", "1/second"), ("switch|everything", "off")]);
    for planned in [
        Override { until: Some(Micros::from_secs(30)), ..planned(10, "limit|api|user=bob", "2/second") },
        planned(20, "limit|api|user=bob", "3/second"),
        planned(10, "plan|api|tenant=acme", "pro"),
        planned(10, "switch|everything", "deny"),
    ] {
        overrides.put(planned, Options::default()).unwrap();
    }
    let plan = |overrides: &Overrides| {
        let entries = [Entry { key: "tenant", value: "acme" }];
        overrides.plan("api", &entries, Micros::ZERO).map(|assignment| assignment.plan.to_string())
    };
    let mode = |overrides: &Overrides| overrides.modes(&RuleSet::default(), Micros::ZERO).mode_of("api", None);
    assert_eq!((overrides.counts(), overrides.planned_count()), ([1, 0, 1], 4));
    let next = |now| overrides.next_beginning(Micros::from_secs(now));
    assert_eq!((next(9), next(10), next(20)), (Some(Micros::from_secs(10)), Some(Micros::from_secs(20)), None));
    for (now, requests, tenant, switch, left) in [
        (9, Some(1), None, Mode::Off, 4),
        (10, Some(2), Some("pro"), Mode::Deny, 1),
        (19, Some(2), Some("pro"), Mode::Deny, 1),
        (20, Some(3), Some("pro"), Mode::Deny, 0),
    ] {
        let begun = at(&overrides, now);
        let bob = limit(&begun, &[("user", "bob")], now).map(|(requests, _)| requests);
        assert_eq!((bob, plan(&begun).as_deref(), mode(&begun)), (requests, tenant, Some(switch)), "{now}");
        assert_eq!(begun.planned_count(), left, "{now}");
    }
    // An override that has begun is that of its author, set at its beginning, and it expires.
    let begun = at(&overrides, 10);
    let bob = begun.get(&Target::parse("limit|api|user=bob").unwrap()).unwrap();
    assert_eq!((&*bob.author, &*bob.reason, bob.at, bob.version), ("alice", "ticket 4711", Micros::from_secs(10), 10));
    assert_eq!(limit(&begun, &[("user", "bob")], 29), Some((2, 1)));
    assert_eq!(limit(&begun, &[("user", "bob")], 30), None);
    // Before its beginning it does not expire.
    assert_eq!(overrides.expired(Micros::from_secs(30), 10).count(), 0);
}

#[test]
fn an_override_that_was_set_after_the_beginning_stays_in_force() {
    for (target, value, newer) in [
        ("limit|api|user=bob", "2/second", "1/second"),
        ("plan|api|user=bob", "pro", "free"),
        ("switch|everything", "deny", "off"),
    ] {
        let key = Target::parse(target).unwrap();
        for (seconds, expected) in [(9, value), (10, value), (11, newer)] {
            let mut overrides = Overrides::default();
            let at_seconds = Micros::new(seconds * 1_000_000 + 999_999);
            overrides.put(Override { at: at_seconds, ..entry(target, newer) }, Options::default()).unwrap();
            overrides.put(planned(10, target, value), Options::default()).unwrap();
            assert_eq!(&*at(&overrides, 12).get(&key).unwrap().value, expected, "{target}, set at {seconds} s");
            // Without a new one, a removed override does not return.
            overrides.remove(&key).unwrap();
            overrides.remove(&planned(10, target, value).target).unwrap();
            assert_eq!(at(&overrides, 12).iter().count(), 0);
        }
    }
}

#[test]
fn planned_overrides_are_found_by_their_target_and_for_a_descriptor() {
    let mut overrides = Overrides::default();
    for planned in [
        planned(20, "limit|api|user=bob", "2/second"),
        planned(10, "limit|api|user=bob", "1/second"),
        planned(10, "limit|api|user=bob|path=/x", "1/second"),
        planned(10, "limit|api|user=eve", "1/second"),
        planned(10, "plan|api|user=bob", "pro"),
        planned(10, "switch|domain|api", "off"),
        planned(10, "switch|domain|web", "off"),
    ] {
        overrides.put(planned, Options::default()).unwrap();
    }
    let names = |found: Vec<&Override>| {
        let names: Vec<String> =
            found.iter().map(|entry| entry.target.to_string().replace("1970-01-01T00:00:", "")).collect();
        names.join(" ")
    };
    let bob = Target::parse("limit|api|user=bob").unwrap();
    let of_bob = names(overrides.planned_for(&bob).collect());
    assert_eq!(of_bob, "planned|10Z|limit|api|user=bob planned|20Z|limit|api|user=bob");
    let user = Entry { key: "user", value: "bob" };
    let found = names(overrides.planned_for_descriptor("api", &[user], None));
    assert_eq!(found, format!("planned|10Z|switch|domain|api {of_bob} planned|10Z|plan|api|user=bob"));
    let due = names(overrides.due(Micros::from_secs(19)).collect());
    assert!(due.starts_with("planned|10Z|limit|api|user=bob planned|10Z") && !due.contains("20Z"), "{due}");
}

#[test]
fn a_planned_override_must_be_valid_at_its_beginning() {
    let overrides = Overrides::default();
    for (target, value, expected) in [
        ("limit|api|user=bob", "lots", "is not a limit"),
        ("plan|api|user=bob", "", "the name of the plan is empty"),
        ("switch|everything", "maybe", "is not a mode"),
    ] {
        let invalid = planned(10, target, value);
        for result in [
            Overrides::check(&invalid, Options::default()),
            overrides.can_put(&invalid, Options::default()),
            overrides.clone().put(invalid.clone(), Options::default()),
        ] {
            let error = result.unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }
    let check = |until: Option<u64>, now| {
        let until = until.map(Micros::from_secs);
        let planned = Override { until, ..planned(10, "switch|everything", "off") };
        Overrides::check_beginning(&planned, Micros::from_secs(now))
    };
    assert_eq!((check(None, 9), check(Some(11), 9)), (Ok(()), Ok(())));
    assert_eq!(check(Some(10), 9), Err(OverrideError::EndsBeforeBeginning));
    assert_eq!((check(None, 10), check(None, 11)), (Err(OverrideError::HasBegun), Err(OverrideError::HasBegun)));
    assert_eq!(Overrides::check_beginning(&entry("switch|everything", "off"), Micros::from_secs(11)), Ok(()));
}

#[test]
fn the_number_of_planned_overrides_has_a_maximum() {
    let mut overrides = Overrides::default();
    for number in 0..MAX_PLANNED as u64 {
        overrides.put(planned(number, "switch|everything", "off"), Options::default()).unwrap();
    }
    let can_put = |from| overrides.can_put(&planned(from, "switch|everything", "deny"), Options::default());
    assert_eq!((can_put(0), can_put(100_000)), (Ok(()), Err(OverrideError::TooManyPlanned)));
    // Those of the store are always used.
    let next = planned(100_000, "switch|everything", "deny");
    assert_eq!(overrides.clone().put(next, Options::default()), Ok(()));
}

fn planned_or_set() -> impl Strategy<Value = Override> {
    let target = prop::sample::select(vec!["limit|api|user=a", "plan|api|user=a", "switch|everything"]);
    let until = prop::option::of((8..16_u64).prop_map(Micros::from_secs));
    (target, any::<bool>(), 1..8_u64, 0..2_usize, until).prop_map(|(target, is_planned, at, value, until)| {
        let value = values_for(&Target::parse(target).unwrap())[value];
        let entry = if is_planned { planned(at, target, value) } else { entry(target, value) };
        Override { at: Micros::from_secs(at), until, version: at, ..entry }
    })
}

proptest! {
    /// Instances begin planned overrides at different times, for example after a restart.
    #[test]
    fn the_overrides_in_force_do_not_depend_on_when_planned_ones_begin(
        entries in prop::collection::vec(planned_or_set(), 0..12),
        steps in prop::collection::vec(1..10_u64, 0..6),
    ) {
        let mut overrides = Overrides::default();
        let mut latest: BTreeMap<Target, (u64, bool, Override)> = BTreeMap::new();
        for entry in &entries {
            overrides.put(entry.clone(), Options::default()).unwrap();
        }
        let now = 5;
        for entry in overrides.iter() {
            let time = entry.target.beginning().unwrap_or(entry.at).floor_secs();
            let is_planned = entry.begun().is_some();
            if is_planned && time > now {
                continue;
            }
            let target = entry.target.begun().clone();
            let is_latest = latest.get(&target).is_none_or(|(before, was_planned, _)| (time, is_planned) > (*before, *was_planned));
            if is_latest {
                let entry = entry.begun().unwrap_or(entry);
                latest.insert(target, (time, is_planned, entry));
            }
        }
        let mut in_steps = overrides.clone();
        let mut times = steps;
        times.retain(|step| *step < now);
        times.sort_unstable();
        for time in times {
            in_steps.begin_planned(Micros::from_secs(time), Options::default());
        }
        for overrides in [at(&overrides, now), at(&in_steps, now)] {
            for (target, (_, _, entry)) in &latest {
                prop_assert_eq!(overrides.get(target), Some(entry.clone()));
            }
            prop_assert_eq!(overrides.due(Micros::from_secs(now)).count(), 0);
            prop_assert_eq!(overrides.counts().iter().sum::<usize>(), latest.len());
        }
    }
}
