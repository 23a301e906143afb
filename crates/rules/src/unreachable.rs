//! Warnings about levels that no value can reach, because another level with the same key matches all of their values.

use std::collections::HashMap;

use super::{
    diagnostic::{Diagnostics, Location},
    spec::Descriptor,
};

/// Warns about a pattern after another that matches all of its values.
pub(super) fn warn_about_pattern(pattern: &str, earlier: &str, location: Location, diagnostics: &mut Diagnostics<'_>) {
    let message = format!(
        "the pattern {pattern:?} is never reached: the pattern {earlier:?} comes first and matches all of its values; \
         move {pattern:?} before it"
    );
    diagnostics.warning(location, message);
}

/// Warns about levels without a value, if a pattern with the same key matches every value, wherever it is in the list.
pub(super) fn warn_about_hidden_levels(list: &[Descriptor], diagnostics: &mut Diagnostics<'_>) {
    let mut match_all = HashMap::new();
    for descriptor in list {
        if let Some(value) = &descriptor.value
            && value.chars().all(|letter| letter == '*')
        {
            match_all.entry(descriptor.key.as_str()).or_insert(value);
        }
    }
    if match_all.is_empty() {
        return;
    }
    for descriptor in list.iter().filter(|descriptor| descriptor.value.is_none()) {
        if let Some(pattern) = match_all.get(descriptor.key.as_str()) {
            let message = format!(
                "the descriptor with key {:?} and no value is never reached: the pattern {pattern:?} matches every value",
                descriptor.key
            );
            diagnostics.warning(descriptor.location, message);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use crate::{Entry, Lookup, Options, RuleSet, SourceFile, compile};

    /// Compiles a level with these patterns and, at the end, a descriptor without a value. Returns the rules and, for
    /// each descriptor, whether there is a warning that it is never reached.
    fn level(patterns: &[String]) -> (RuleSet, Vec<bool>) {
        let mut text = "domain: d\ndescriptors:\n".to_owned();
        for pattern in patterns {
            text += &format!("- {{key: k, value: '{pattern}', rate_limit: {{unit: day, requests_per_unit: 1}}}}\n");
        }
        text += "- {key: k, rate_limit: {unit: day, requests_per_unit: 1}}\n";
        let (set, warnings) = compile(&[SourceFile { name: "d.yaml".into(), text }], Options::default()).unwrap();
        assert!(warnings.iter().all(|warning| warning.message.contains("is never reached")), "{warnings:?}");
        let lines: Vec<usize> = warnings.iter().map(|warning| warning.location.line).collect();
        let is_unreachable = (0..=patterns.len()).map(|index| lines.contains(&(index + 3))).collect();
        (set, is_unreachable)
    }

    /// Returns the index of the descriptor that matches the value.
    fn reached(set: &RuleSet, value: &str) -> usize {
        let Lookup::Rule(rule, _) = set.find("d", [Entry { key: "k", value }].into_iter()) else {
            panic!("no rule matches {value}");
        };
        rule.location.line - 3
    }

    fn distinct(mut patterns: Vec<String>) -> Vec<String> {
        let mut known = std::collections::HashSet::new();
        patterns.retain(|pattern| known.insert(pattern.clone()));
        patterns
    }

    proptest! {
        /// A descriptor has a warning if and only if no value reaches it. A value with a letter that no pattern contains
        /// in place of each `*` reaches a descriptor if any value does.
        #[test]
        fn exactly_the_levels_that_no_value_reaches_have_a_warning(
            patterns in prop::collection::vec("[ab]{0,2}\\*[ab*]{0,3}", 1..7),
            values in prop::collection::vec("[abz]{0,6}", 1..40),
        ) {
            let patterns = distinct(patterns);
            let (set, is_unreachable) = level(&patterns);
            for (index, pattern) in patterns.iter().enumerate() {
                let is_reached = reached(&set, &pattern.replace('*', "z")) == index;
                prop_assert_eq!(is_unreachable[index], !is_reached, "{} of {:?}", pattern, patterns);
            }
            prop_assert_eq!(is_unreachable[patterns.len()], reached(&set, "z") != patterns.len());
            for value in &values {
                prop_assert!(!is_unreachable[reached(&set, value)], "{} of {:?}", value, patterns);
            }
        }
    }

    #[test]
    fn a_level_is_named_with_the_pattern_that_hides_it() {
        for (patterns, expected) in [
            (&["/*", "/admin/*"][..], &[false, true, false][..]),
            (&["/admin/*", "/*"], &[false, false, false]),
            (&["a*", "*b", "a*b"], &[false, false, true, false]),
            (&["a*c*", "a*b*c*d"], &[false, true, false]),
            (&["a*b", "a**b"], &[false, true, false]),
            (&["*"], &[false, true]),
        ] {
            let patterns: Vec<String> = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            assert_eq!(level(&patterns).1, expected, "{patterns:?}");
        }
    }

    /// A domain of several files has one list of patterns, in the order of the files.
    #[test]
    fn a_pattern_of_another_file_hides_a_pattern() {
        let file = |name: &str, value: &str| SourceFile {
            name: name.into(),
            text: format!("domain: d\ndescriptors: [{{key: k, value: '{value}', rate_limit: {{unlimited: true}}}}]\n"),
        };
        let options = Options { merge_domains: true, ..Options::default() };
        let (_, warnings) = compile(&[file("a.yaml", "/*"), file("b.yaml", "/admin/*")], options).unwrap();
        let warnings: Vec<String> = warnings.iter().map(ToString::to_string).collect();
        assert_eq!(
            warnings,
            [
                "b.yaml:2:15: warning: the pattern \"/admin/*\" is never reached: the pattern \"/*\" comes first and matches \
              all of its values; move \"/admin/*\" before it"
            ]
        );
    }
}
