//! [`RuleFilter`]: selects the entities of a rule that is named in any of the spellings in which it is printed.

use std::collections::BTreeSet;

use percent_encoding::percent_decode_str;

use crate::rules::{Rule, RuleSet};

/// The rules that a text names.
pub(super) struct RuleFilter<'t> {
    text: &'t str,
    /// Domain and policy name of each rule that the text names by its path, by its levels, or with its domain.
    rules: BTreeSet<(&'t str, &'t str)>,
}

impl<'t> RuleFilter<'t> {
    /// Finds the rules that `text` names: by the name of the limit or the levels (`per_user`, `user`), by the path
    /// (`shop.user`), or by the domain and one of the names (`shop|per_user`). An empty text names all rules.
    pub(super) fn new(rules: &'t RuleSet, text: &'t str) -> Self {
        let after_domain = text.split_once('|').map(|(domain, name)| (decode(domain), decode(name)));
        let mut named = BTreeSet::new();
        if !text.is_empty() {
            for rule in rules.rules() {
                let domain = &*rule.labels[0];
                let is_named = is_joined(&rule.labels, text)
                    || is_joined(&rule.labels[1..], text)
                    || after_domain.as_ref().is_some_and(|(of, name)| of == domain && is_name(rule, name));
                if is_named {
                    named.insert((domain, &**rule.policy()));
                }
            }
        }
        Self { text, rules: named }
    }

    /// Returns whether entities of the rules with the policy name `policy` in `domain` are selected.
    pub(super) fn matches(&self, domain: &str, policy: &str) -> bool {
        self.text.is_empty() || self.text == policy || self.rules.contains(&(domain, policy))
    }
}

fn is_name(rule: &Rule, name: &str) -> bool {
    rule.name.as_deref() == Some(name) || is_joined(&rule.labels[1..], name)
}

/// Returns whether `text` consists of the labels, separated by dots.
fn is_joined(labels: &[std::sync::Arc<str>], text: &str) -> bool {
    let mut rest = text;
    for (index, label) in labels.iter().enumerate() {
        let separated = if index == 0 { Some(rest) } else { rest.strip_prefix('.') };
        let Some(after) = separated.and_then(|rest| rest.strip_prefix(&**label)) else {
            return false;
        };
        rest = after;
    }
    !labels.is_empty() && rest.is_empty()
}

fn decode(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::{Options, SourceFile, compile};

    const RULES: &str = "
domain: shop
descriptors:
- { key: user, rate_limit: { name: per_user, unit: day, requests_per_unit: 1 } }
- { key: path, value: /a.b, rate_limit: { unit: day, requests_per_unit: 1 } }
";

    #[test]
    fn a_rule_has_several_spellings() {
        let file = SourceFile { name: "a.yaml".into(), text: RULES.into() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let selected = |text: &str| {
            let filter = RuleFilter::new(&rules, text);
            let all = [("shop", "per_user"), ("shop", "path_/a.b"), ("other", "per_user")];
            all.map(|(domain, policy)| filter.matches(domain, policy))
        };
        assert_eq!(selected(""), [true; 3]);
        assert_eq!(selected("per_user"), [true, false, true], "the name in any domain");
        for text in ["user", "shop.user", "shop|user", "shop|per_user"] {
            assert_eq!(selected(text), [true, false, false], "{text}");
        }
        for text in ["path_/a.b", "shop.path_/a.b", "shop|path_/a.b"] {
            assert_eq!(selected(text), [false, true, false], "{text}");
        }
        for text in ["shop", "shop.use", "shop.user.", "other|user", ".user"] {
            assert_eq!(selected(text), [false; 3], "{text}");
        }
    }
}
