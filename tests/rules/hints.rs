//! Messages about frequent mistakes in rule files: each one contains the correct form.

use sluicegate::{
    algorithm::MAX_NUMBER,
    rules::{Entry, Lookup, Options, Severity, SourceFile, compile},
};

/// Returns the errors and warnings of a file, without its name.
fn diagnostics(text: &str) -> Vec<String> {
    let file = SourceFile { name: "a.yaml".into(), text: text.into() };
    let diagnostics = match compile(&[file], Options::default()) {
        Ok((_, warnings)) => warnings,
        Err(diagnostics) => diagnostics,
    };
    diagnostics.iter().map(|diagnostic| diagnostic.to_string().trim_start_matches("a.yaml:").to_owned()).collect()
}

/// Returns the file with one descriptor with these lines.
fn descriptor(lines: &[&str]) -> String {
    format!("domain: d\ndescriptors:\n- {}\n", lines.join("\n  "))
}

const LIMIT: &str = "rate_limit: {unit: day, requests_per_unit: 1}";

/// Checks that the file has exactly one diagnostic, which begins with `expected`.
fn assert_only(text: &str, expected: &str) {
    let found = diagnostics(text);
    assert!(found.len() == 1 && found[0].starts_with(expected), "{text}\n{found:#?}\n{expected}");
}

#[test]
fn a_limit_in_another_form_is_written_as_a_map() {
    for (limit, expected) in [
        ("100/minute", "not 100/minute; write { unit: minute, requests_per_unit: 100 }"),
        ("10r/s", "not 10r/s; write { unit: second, requests_per_unit: 10 }"),
        ("unlimited", "not unlimited; write { unlimited: true }"),
    ] {
        let text = descriptor(&["key: k", &format!("rate_limit: {limit}")]);
        assert_only(&text, &format!("4:15: rate_limit must be a map, {expected}"));
    }
    let example = "rate_limit must be a map such as { unit: minute, requests_per_unit: 100 }, not";
    assert_only(&descriptor(&["key: k", "rate_limit: 100"]), &format!("4:15: {example} 100"));
    assert_only(&descriptor(&["key: k", "rate_limit: [100, minute]"]), &format!("4:15: {example} a list"));
    let plans = "domain: d\nplans: {default: a, limits: {a: {calls: 5/day}}}\n";
    assert_only(plans, "2:41: the limit \"calls\" must be a map, not 5/day; write { unit: day, requests_per_unit: 5 }");
}

#[test]
fn a_word_of_another_system_suggests_ours() {
    for (limit, expected) in [
        ("{unit: minute, requests: 100}", "4:30: unknown key \"requests\"; did you mean requests_per_unit?"),
        ("{unit: minute, max_value: 100}", "4:30: unknown key \"max_value\"; did you mean requests_per_unit?"),
        (
            "{unit: minute, requestsPerUnit: 100}",
            "4:30: unknown key \"requestsPerUnit\"; did you mean requests_per_unit?",
        ),
        ("{minute: 5}", "4:16: unknown key \"minute\"; did you mean unit? write unit: minute and requests_per_unit: 5"),
        (
            "{requests_per_minute: 5}",
            "4:16: unknown key \"requests_per_minute\"; did you mean unit? write unit: minute and requests_per_unit: 5",
        ),
        (
            "{requests_per_unit: 5, seconds: 60}",
            "4:38: unknown key \"seconds\"; did you mean unit? write unit: minute, and unit_multiplier: 5 for five minutes",
        ),
    ] {
        assert_only(&descriptor(&["key: k", &format!("rate_limit: {limit}")]), expected);
    }
    for (line, expected) in [
        (
            "limit: {unit: day}",
            "4:3: unknown key \"limit\"; did you mean rate_limit? write rate_limit: { unit: minute, ",
        ),
        ("limit: 5", "4:3: unknown key \"limit\"; it belongs under rate_limit"),
        ("prefix: /api", "4:3: unknown key \"prefix\"; did you mean value? it is one text, in which * stands for"),
        ("children: []", "4:3: unknown key \"children\"; did you mean descriptors?"),
        ("dry_run: true", "4:3: unknown key \"dry_run\"; did you mean shadow_mode?"),
    ] {
        assert_only(&descriptor(&["key: k", line]), expected);
    }
    assert_only("Domain: d\n", "1:1: unknown key \"Domain\"; did you mean domain?");
    assert_only("namespace: d\n", "1:1: unknown key \"namespace\"; did you mean domain?");
    let manifest = diagnostics("apiVersion: v1\nkind: ConfigMap\n");
    assert!(manifest[0].contains("a rule file is no manifest of Kubernetes"), "{manifest:?}");
}

#[test]
fn an_entry_as_a_key_is_written_with_key_and_value() {
    let found = diagnostics(&descriptor(&["user: bob", LIMIT]));
    let expected = "an entry is written as key: \"user\", value: \"bob\"";
    assert!(found[0].starts_with("3:3: unknown key \"user\"; keys allowed here: key, value, "), "{found:?}");
    assert!(found[0].ends_with(expected), "{found:?}");
}

#[test]
fn an_invalid_value_names_the_one_that_is_probably_meant() {
    for (limit, expected) in [
        ("unit: minutes, requests_per_unit: 1", "4:22: unit \"minutes\" is not one of second, ; did you mean minute?"),
        ("unit: s, requests_per_unit: 1", "4:22: unit \"s\" is not one of second, ; did you mean second?"),
        (
            "unit: 5m, requests_per_unit: 1",
            "4:22: unit \"5m\" is not one of second, ; write unit: minute and unit_multiplier: 5",
        ),
        ("unit: dya, requests_per_unit: 1", "4:22: unit \"dya\" is not one of second, "),
        ("unit: day, requests_per_unit: 10k", "4:46: requests_per_unit must be a whole number, not 10k; write 10000"),
        (
            "unit: day, requests_per_unit: -1",
            "4:46: requests_per_unit must be a whole number, not -1; a rule without a limit has unlimited: true",
        ),
        (
            "unit: day, requests_per_unit: 10,000",
            "4:49: unknown key \"000\"; a number has no commas: write 10000, not 10,000",
        ),
        (
            "unit: day, requests_per_unit: 1, algorithm: token-bucket",
            "4:60: algorithm \"token-bucket\" is not one of ; did you mean token_bucket?",
        ),
        (
            "unit: day, requests_per_unit: 1, on_error: allowed",
            "4:59: on_error \"allowed\" is not one of error, allow, deny, local; did you mean allow?",
        ),
        (
            "unit: day, requests_per_unit: 1, replaces: [base]",
            "4:60: an entry of replaces must be a map such as { name: base }, not base",
        ),
        (
            "unlimited: true, requests_per_unit: 5",
            "4:33: warning: requests_per_unit has no effect with unlimited: true",
        ),
    ] {
        let found = diagnostics(&descriptor(&["key: k", &format!("rate_limit: {{{limit}}}")]));
        let [found] = found.as_slice() else { panic!("{limit}: {found:#?}") };
        // `expected` does not contain the list of units or algorithms.
        let (start, end) = expected.split_once("; ").unwrap_or((expected, ""));
        let max = if start.contains("requests_per_unit") { MAX_NUMBER } else { u32::MAX.into() };
        let number = format!(" a whole number from 0 to {max},");
        let start = start.trim_end_matches("not one of ").replace(" a whole number,", &number);
        assert!(found.starts_with(start.trim_end()) && found.ends_with(end), "{found}\n{expected}");
    }
    let prefix = descriptor(&["key: k", "ip_prefix: {v4: /24}", LIMIT]);
    assert_only(&prefix, "4:19: v4 must be a prefix length from 1 to 32, without a slash, not \"/24\"");
    let prefix = descriptor(&["key: k", "ip_prefix: 24", LIMIT]);
    assert_only(&prefix, "4:14: ip_prefix must be a map such as { v4: 24, v6: 56 }, not 24");
}

#[test]
fn a_list_in_place_of_a_map_and_the_reverse_are_named() {
    assert_only(
        &format!("domain: d\ndescriptors:\n  key: k\n  {LIMIT}\n"),
        "3:3: descriptors must be a list, not a map; begin each of its items with \"- \"",
    );
    assert_only("- domain: d\n", "1:1: the file must be a map such as { domain: api, descriptors: [{ key: user, ");
    assert_only(&descriptor(&["- key: k"]), "3:3: a descriptor must be a map such as { key: user, rate_limit: ");
    assert_only(
        &descriptor(&["key: k", "value: [a, b]", LIMIT]),
        "4:10: value must be a scalar, not a list; a text that begins with [ or { needs quotes; several values need a \
         descriptor each",
    );
    let toml = diagnostics(&"domain = 'd'\n".repeat(100));
    assert!(toml[0].starts_with("1:1: the file must be a map such as ") && toml[0].len() < 300, "{toml:?}");
}

#[test]
fn a_syntax_error_has_a_hint_to_its_usual_reason() {
    let quotes = "; a text that begins with such a character needs quotes: \"*.example.com\"";
    let indentation = "; check the indentation, and the space after the colon of each key, here and in the line before";
    for (text, expected) in [
        (descriptor(&["key: k", "value: *", LIMIT]), quotes),
        (descriptor(&["key: k", "value: *.example.com", LIMIT]), quotes),
        (descriptor(&["key: k", "value: @foo", LIMIT]), quotes),
        (descriptor(&["key: k", "value: a: b", LIMIT]), "; a text with a colon and a space needs quotes"),
        (descriptor(&["key:k", LIMIT]), indentation),
        (descriptor(&["key: k", &format!(" {LIMIT}")]), indentation),
        (format!("domain: d\ndescriptors:\n- key: k\n {LIMIT}\n"), indentation),
        (format!("domain: d\ndescriptors:\n- key: k\n\t{LIMIT}\n"), "; indent with spaces"),
    ] {
        let found = diagnostics(&text);
        assert!(found.len() == 1 && found[0].contains("invalid YAML: "), "{text}\n{found:?}");
        assert!(found[0].ends_with(expected), "{text}\n{found:?}");
    }
}

#[test]
fn a_text_that_matches_less_than_it_seems_to_has_a_warning() {
    for (lines, expected) in [
        (
            &["key: path", "value: ^/api/.*$", LIMIT][..],
            "4:10: warning: the value \"^/api/.*$\" looks like a regular expression",
        ),
        (
            &["key: remote_address", "value: 10.0.0.0/8", LIMIT],
            "4:10: warning: the network \"10.0.0.0/8\" is compared as text, so no address matches it; ip_prefix, ",
        ),
        (&["key: 'user '", LIMIT], "3:8: warning: the key \"user \" begins or ends with a space"),
        (&["key: plan", "value: ' free'", LIMIT], "4:10: warning: the value \" free\" begins or ends with a space"),
        (&["key: plan", "value: '\"free\"'", LIMIT], "4:10: warning: the quotes in the value "),
        (&["key: “plan”", LIMIT], "3:8: warning: the quotes in the key "),
        (
            &["key: user=bob", LIMIT],
            "3:3: warning: the = in the key \"user=bob\" is a part of it, which requests must contain",
        ),
        (&["key: k", "rate_limit:"], "4:13: warning: rate_limit is empty, so this descriptor has no limit of its own"),
        (&["key: plan", "value: #free", LIMIT], "4:3: warning: the # begins a comment, so the value is empty"),
    ] {
        assert_only(&descriptor(lines), expected);
    }
    let domain = format!("domain: 'api-*'\ndescriptors: [{{key: k, {LIMIT}}}]\n");
    assert_only(&domain, "1:9: warning: the * in the domain \"api-*\" is no pattern");
    assert_eq!(diagnostics(&descriptor(&["key: masked_remote_address", "value: 10.0.0.0/8", LIMIT])), [""; 0]);
}

/// Such rules give every request the default plan.
#[test]
fn a_plan_is_no_level_of_a_rule() {
    let plans = |default: &str| {
        format!("plans:\n  {default}\n  limits: {{free: {{calls: {{unit: day, requests_per_unit: 3}}}}}}\n")
    };
    let rules = |key: &str| {
        format!("descriptors:\n- key: user\n  descriptors:\n  - {{key: {key}, rate_limit: {{by_plan: calls}}}}\n")
    };
    let text = |key: &str| format!("domain: d\n{}{}", plans("default: free"), rules(key));
    assert_only(&text("plan"), "8:5: warning: the plan is an entry of its own after the key \"plan\", so each request");
    assert_eq!(diagnostics(&text("path")), [""; 0]);
    let without_default = format!("domain: d\n{}{}", plans("key: plan"), rules("path"));
    assert_only(&without_default, "3:3: plans requires default, the plan of requests without one: free");
}

#[test]
fn descriptors_inside_a_limit_belong_one_level_up() {
    let text = descriptor(&["key: k", "rate_limit:", "  unit: day", "  requests_per_unit: 1", "  descriptors: []"]);
    assert_only(&text, "7:5: warning: descriptors has no effect here; it belongs one level up, beside rate_limit");
    let text = descriptor(&["key: k", "ip_prefix: {v4: 24, descriptors: []}"]);
    assert_only(&text, "4:23: warning: descriptors has no effect here; it belongs in a descriptor");
}

/// The message about a second limit on one key describes a way that works.
#[test]
fn a_second_limit_on_one_value_needs_another_key() {
    let two = |key: &str| {
        format!(
            "domain: d\ndescriptors:\n- {{key: user, rate_limit: {{unit: minute, requests_per_unit: 5}}}}\n\
             - {{key: {key}, rate_limit: {{unit: day, requests_per_unit: 90}}}}\n"
        )
    };
    let duplicate = "4:3: duplicate descriptor with key \"user\"; first defined at line 3";
    assert_only(&two("user"), &format!("{duplicate}; for two limits on the same value, "));
    assert!(diagnostics(&two("user"))[0].contains("replace rate_limit by rate_limits, a list of limits"));
    let same = two("user").replace("minute", "day");
    assert_eq!(diagnostics(&same), [duplicate], "the limits are for the same window");
    let file = SourceFile { name: "a.yaml".into(), text: two("user_per_day") };
    let (set, _) = compile(&[file], Options::default()).unwrap();
    for (key, expected) in [("user", 5), ("user_per_day", 90)] {
        let Lookup::Rule(rule, _) = set.find("d", [Entry { key, value: "bob" }].into_iter()) else { panic!("{key}") };
        assert_eq!(rule.limit.as_ref().map(|limit| limit.requests()), Some(expected));
    }
}

/// Warnings reject nothing.
#[test]
fn a_file_with_all_warnings_is_accepted() {
    let text = "
domain: 'd '
descriptors:
- {key: path, value: '/*', rate_limit: {unit: day, requests_per_unit: 1, replaces: [{name: none}]}}
- {key: path, value: '/admin/*', rate_limit: {unlimited: true, requests_per_unit: 1}}
- {key: path, value: '^/x$', rate_limit: {unit: day, requests_per_unit: 1, descriptors: []}}
- {key: remote_address, value: 10.0.0.0/8}
";
    let (_, warnings) =
        compile(&[SourceFile { name: "a.yaml".into(), text: text.into() }], Options::default()).unwrap();
    assert!(warnings.iter().all(|warning| warning.severity == Severity::Warning));
    let lines: Vec<usize> = warnings.iter().map(|warning| warning.location.line).collect();
    assert_eq!(lines, [2, 4, 5, 5, 6, 6, 7], "{warnings:#?}");
}
