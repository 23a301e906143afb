//! Names of domains and rules on the command line, in every spelling that the program prints.

use anyhow::bail;
use sluicegate_proto::sluicegate::admin::v1::{self as api, scope::Scope as ScopeMessage};

use super::{
    client::Client,
    parse::{self, escaped},
};
use crate::engine::overrides::UnknownName;

/// Returns an error if the rules in force do not have the domain or the rule of a filter, which are empty if there is
/// none.
pub(super) async fn check_filter(domain: &str, rule: &str, client: &mut Client) -> anyhow::Result<()> {
    if domain.is_empty() && rule.is_empty() {
        return Ok(());
    }
    // If the list of rules is too long for a response, the names cannot be checked.
    match client.rules(api::ListRulesRequest::default()).await {
        Ok(response) => check_names(domain, rule, &response.rules),
        Err(_) => Ok(()),
    }
}

fn check_names(domain: &str, rule: &str, rules: &[api::Rule]) -> anyhow::Result<()> {
    let of_domain: Vec<&api::Rule> = rules.iter().filter(|one| domain.is_empty() || one.domain == domain).collect();
    if of_domain.is_empty() && !domain.is_empty() {
        let known = rules.iter().map(|rule| rule.domain.as_str());
        bail!(UnknownName::new(format!("there is no domain {domain:?} with rules"), domain, known).to_string());
    }
    if rule.is_empty() || of_domain.iter().any(|one| spellings(one).iter().any(|spelling| spelling == rule)) {
        return Ok(());
    }
    let problem = match domain {
        "" => format!("no domain has a rule {rule:?}"),
        domain => format!("domain {domain:?} has no rule {rule:?}"),
    };
    let known: Vec<String> = of_domain.iter().flat_map(|one| spellings(one)).collect();
    bail!(UnknownName::new(problem, rule, known.iter().map(String::as_str)).to_string())
}

/// Returns the names with which a rule is printed: of its limit, its path with and without the domain, and after the
/// domain as in a switch.
fn spellings(rule: &api::Rule) -> Vec<String> {
    let levels = levels_of(rule);
    let mut all = vec![rule.name.clone(), levels.to_owned(), rule.path.clone()];
    for name in [rule.name.as_str(), levels] {
        all.push(format!("{}|{}", escaped(&rule.domain), escaped(name)));
    }
    all.dedup();
    all
}

/// Returns the path without the domain.
fn levels_of(rule: &api::Rule) -> &str {
    rule.path.strip_prefix(&rule.domain).and_then(|path| path.strip_prefix('.')).unwrap_or(&rule.path)
}

/// Returns the scope of a switch: `everything`, `domain NAME`, `algorithm NAME`, `rule DOMAIN NAME`, a rule by its path
/// (`rule shop.user`), or the scope as it is printed (`rule|shop|per_user`).
pub(super) async fn scope(words: &[String], client: &mut Client) -> anyhow::Result<api::Scope> {
    match words {
        [text] if text.contains('|') => match parse::printed_scope(text) {
            Some(scope) => Ok(scope),
            None => parse::scope(words),
        },
        [rule, text] if rule == "rule" && text.contains('|') => match printed_rule(text) {
            Some(scope) => Ok(scope),
            None => parse::scope(words),
        },
        [rule, path] if rule == "rule" => {
            // The domain can contain dots, too. An empty one would list all rules.
            for (dot, _) in path.match_indices('.').filter(|(dot, _)| *dot > 0) {
                let domain = path[..dot].to_owned();
                let rules = client.rules(api::ListRulesRequest { domain }).await?.rules;
                if let Some(found) = rules.iter().find(|found| found.path == *path) {
                    return Ok(rule_scope(&found.domain, levels_of(found)));
                }
            }
            bail!("no rule has the path {path:?}, as `/rlconfig` prints paths; use rule DOMAIN NAME or rule PATH")
        }
        [rule, domain, name] if rule == "rule" => {
            let Some(levels) = name.strip_prefix(domain.as_str()).and_then(|rest| rest.strip_prefix('.')) else {
                return parse::scope(words);
            };
            let rules = client.rules(api::ListRulesRequest { domain: domain.clone() }).await?.rules;
            let is_name = rules.iter().any(|rule| rule.name == *name || levels_of(rule) == name);
            let is_path = rules.iter().any(|rule| rule.path == *name);
            if is_path && !is_name { Ok(rule_scope(domain, levels)) } else { parse::scope(words) }
        }
        _ => parse::scope(words),
    }
}

/// Reads a rule as it is printed: `shop|per_user`, or as in the name of its switch.
fn printed_rule(text: &str) -> Option<api::Scope> {
    let rule = match text.matches('|').count() {
        3 => text.strip_prefix("switch|rule|")?,
        2 => text.strip_prefix("rule|")?,
        _ => text,
    };
    parse::printed_scope(&format!("rule|{rule}"))
}

fn rule_scope(domain: &str, rule: &str) -> api::Scope {
    let rule = api::RuleScope { domain: domain.to_owned(), rule: rule.to_owned() };
    api::Scope { scope: Some(ScopeMessage::Rule(rule)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rule(domain: &str, name: &str, path: &str) -> api::Rule {
        api::Rule { domain: domain.into(), name: name.into(), path: path.into(), ..api::Rule::default() }
    }

    #[test]
    fn a_filter_accepts_every_spelling_of_a_rule_and_names_the_nearest() {
        let rules = [rule("shop", "per_user", "shop.user"), rule("a.b", "k.v_/1", "a.b.k.v_/1")];
        let check = |domain, name| check_names(domain, name, &rules).map_err(|error| error.to_string());
        for name in ["per_user", "user", "shop.user", "shop|user", "shop|per_user", "a.b|k.v_/1", "a.b.k.v_/1"] {
            assert_eq!(check("", name), Ok(()), "{name}");
        }
        assert_eq!(check("shop", "shop.user"), Ok(()));
        for (domain, name, expected) in [
            ("shopp", "", "there is no domain \"shopp\" with rules; did you mean \"shop\"?"),
            ("shop", "peruser", "domain \"shop\" has no rule \"peruser\"; did you mean \"per_user\"?"),
            ("shop", "a.b.k.v_/1", "domain \"shop\" has no rule \"a.b.k.v_/1\"; the nearest is \"shop.user\""),
            ("", "shop.usr", "no domain has a rule \"shop.usr\"; did you mean \"shop.user\"?"),
        ] {
            assert_eq!(check(domain, name), Err(expected.to_owned()));
        }
    }

    #[test]
    fn a_printed_rule_is_a_scope() {
        let expected = Some(rule_scope("a|b", "per_user"));
        for text in ["a%7Cb|per_user", "rule|a%7Cb|per_user", "switch|rule|a%7Cb|per_user"] {
            assert_eq!(printed_rule(text), expected, "{text}");
        }
        assert_eq!(printed_rule("domain|shop"), Some(rule_scope("domain", "shop")), "never the scope of a domain");
        assert_eq!(printed_rule("rule|shop"), Some(rule_scope("rule", "shop")));
        for text in ["shop", "domain|shop|x", "switch|domain|a|b", "a|b|c|d|e"] {
            assert_eq!(printed_rule(text), None, "{text}");
        }
    }
}
