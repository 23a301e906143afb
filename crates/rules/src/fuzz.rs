//! Fuzz targets: rule files, and patterns in them.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use super::{Entry, Options, Severity, SourceFile, compile, diagnostic::MAX_DIAGNOSTICS, wildcard::Wildcards};

/// Maximum number of steps of the definition of a match, which takes one for each byte of the value and of the pattern.
const MAX_STEPS: usize = 1 << 20;

/// Compiles a rule file.
///
/// An invalid file must have an error but not too many, and each diagnostic must be one line. In a valid file, every rule
/// of one level must be found by its value. Rules of more levels can be behind a pattern that comes first.
pub fn rule_file(input: &[u8]) {
    let text = String::from_utf8_lossy(input).into_owned();
    let file = SourceFile { name: "rules.yaml".into(), text };
    match compile(&[file], Options { merge_domains: true, peers: true, ..Options::default() }) {
        Ok((rules, warnings)) => {
            assert!(warnings.iter().all(|warning| warning.severity == Severity::Warning), "{warnings:?}");
            for (rule, entries) in rules.rules().iter().zip(rules.entries_of_rules()) {
                let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
                let domain = &rule.labels[0];
                // The rules of other plans than the default one have no entries.
                let has_one_level = entries.len() == 1;
                let found = rules.rule_for(domain, &entries);
                assert!(!has_one_level || found.is_some(), "{domain} {entries:?}");
                let _ = rules.explain(domain, &entries);
            }
        }
        Err(diagnostics) => {
            assert!(diagnostics.iter().any(|diagnostic| diagnostic.severity == Severity::Error));
            // Errors of the whole rule set can follow those of its only file.
            assert!(diagnostics.len() <= MAX_DIAGNOSTICS + 2, "{} diagnostics", diagnostics.len());
            for diagnostic in diagnostics {
                let text = diagnostic.to_string();
                assert!(!text.contains('\n'), "a diagnostic has several lines: {text:?}");
            }
        }
    }
}

/// Matches a value against patterns. The first line is the value, and every other line with a `*` is a pattern.
///
/// The index must find the first pattern that matches by definition, which is compared for short texts only.
pub fn wildcard(input: &[u8]) {
    let text = String::from_utf8_lossy(input);
    let mut lines = text.split('\n');
    let value = lines.next().unwrap_or_default();
    let patterns: Vec<&str> = lines.filter(|line| line.contains('*')).take(64).collect();
    let mut wildcards = Wildcards::default();
    for (index, pattern) in patterns.iter().enumerate() {
        wildcards.insert(pattern, index as u32);
    }
    let found = wildcards.find(value);
    if value.len() * patterns.iter().map(|pattern| pattern.len()).sum::<usize>() > MAX_STEPS {
        return;
    }
    let expected = patterns.iter().position(|pattern| matches(pattern, value));
    assert_eq!(found, expected.map(|index| index as u32), "{value:?} {patterns:?}");
}

/// Matches a value against one pattern: `reached[at]` is whether the pattern so far matches the first `at` bytes.
pub(super) fn matches(pattern: &str, value: &str) -> bool {
    let mut reached = vec![false; value.len() + 1];
    reached[0] = true;
    for letter in pattern.bytes() {
        if letter == b'*' {
            let first = reached.iter().position(|reached| *reached).unwrap_or(reached.len());
            reached[first..].fill(true);
        } else {
            for at in (0..value.len()).rev() {
                reached[at + 1] = reached[at] && value.as_bytes()[at] == letter;
            }
            reached[0] = false;
        }
    }
    reached[value.len()]
}
