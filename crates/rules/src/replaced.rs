//! [`unknown_names`]: warnings about `replaces` with a name that no limit of the domain has.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    diagnostic::{Diagnostic, MAX_DIAGNOSTICS, Severity},
    matcher::RuleSet,
    spec::{ReplacedLimit, hints},
};

/// Maximum number of unknown names for which the nearest name is searched.
const MAX_SEARCHES: usize = 10;

/// A name in `replaces`, with the file and the domain of the rule.
pub(super) struct Replaced {
    pub(super) file: Arc<str>,
    pub(super) domain: Arc<str>,
    pub(super) limit: ReplacedLimit,
}

/// Returns a warning for each name that no limit of its domain has, at most [`MAX_DIAGNOSTICS`].
pub(super) fn unknown_names(set: &RuleSet, replaced: Vec<Replaced>) -> Vec<Diagnostic> {
    let mut warnings: Vec<Diagnostic> = Vec::new();
    if replaced.is_empty() {
        return warnings;
    }
    let mut names: HashMap<&str, BTreeSet<&str>> = HashMap::new();
    for rule in set.rules() {
        if let Some(name) = &rule.name {
            names.entry(&rule.labels[0]).or_default().insert(name);
        }
    }
    let none = BTreeSet::new();
    for Replaced { file, domain, limit } in replaced {
        let known = names.get(&*domain).unwrap_or(&none);
        if known.contains(limit.name.as_str()) || warnings.len() == MAX_DIAGNOSTICS {
            continue;
        }
        // The limits of a plan belong to several rules.
        if warnings.iter().any(|warning| warning.file == *file && warning.location == limit.location) {
            continue;
        }
        let is_searched = warnings.len() < MAX_SEARCHES;
        let nearest = if is_searched { hints::nearest(&limit.name, known.iter().copied()) } else { None };
        let hint = nearest.map(|nearest| format!("; did you mean {nearest:?}?")).unwrap_or_default();
        let message =
            format!("no limit of domain {domain:?} has the name {:?}, so replaces has no effect{hint}", limit.name);
        warnings.push(Diagnostic {
            file: file.to_string(),
            location: limit.location,
            severity: Severity::Warning,
            message,
        });
    }
    warnings
}

#[cfg(test)]
mod tests {
    use crate::{Options, SourceFile, compile};

    fn warnings(texts: &[&str]) -> Vec<String> {
        let files: Vec<SourceFile> = texts
            .iter()
            .zip('a'..)
            .map(|(text, name)| SourceFile { name: format!("{name}.yaml"), text: (*text).to_owned() })
            .collect();
        let options = Options { merge_domains: true, ..Options::default() };
        compile(&files, options).unwrap().1.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn a_name_that_no_limit_of_the_domain_has_is_named_with_the_nearest_one() {
        let limit = "unit: day, requests_per_unit: 1";
        let base = format!("domain: d\ndescriptors:\n- {{key: b, rate_limit: {{{limit}, name: base}}}}\n");
        let rule = |name: &str| format!("- {{key: a, rate_limit: {{{limit}, replaces: [{{name: {name}}}]}}}}\n");
        let problem = |name: &str| format!("no limit of domain \"d\" has the name {name:?}, so replaces has no effect");
        assert_eq!(
            warnings(&[&format!("{base}{}", rule("bse"))]),
            [format!("a.yaml:4:69: warning: {}; did you mean \"base\"?", problem("bse"))]
        );
        assert_eq!(
            warnings(&[&format!("{base}{}", rule("everything"))]),
            [format!("a.yaml:4:69: warning: {}", problem("everything"))]
        );
        let other = format!("domain: d\ndescriptors:\n{}", rule("base"));
        assert_eq!(warnings(&[&other, &base]), [""; 0], "the name is in another file of the domain");
        let other_domain = other.replace("domain: d", "domain: e");
        assert_eq!(warnings(&[&base, &other_domain]).len(), 1, "the name is in another domain");
    }

    #[test]
    fn a_limit_of_several_rules_has_one_warning_in_the_order_of_the_file() {
        let text = "domain: d
plans:
  default: a
  limits:
    a: {calls: {unit: day, requests_per_unit: 1, replaces: [{name: none}]}}
descriptors:
- {key: x, rate_limit: {by_plan: calls}}
- {key: y, value: '^y', rate_limit: {by_plan: calls}}
";
        let lines: Vec<String> = warnings(&[text]).iter().map(|warning| warning[..8].to_owned()).collect();
        assert_eq!(lines, ["a.yaml:5", "a.yaml:8"]);
    }
}
