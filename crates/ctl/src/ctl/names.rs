//! Names of domains and rules on the command line, in every spelling that the program prints.

use anyhow::bail;
use sluicegate_engine::overrides::UnknownName;
use sluicegate_proto::sluicegate::admin::v1::{self as api, scope::Scope as ScopeMessage};

use super::{
    client::Client,
    parse::{self, escaped},
};

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

/// Returns all spellings of a rule in printed texts: its name, its path with and without the domain, and `DOMAIN|NAME`
/// as in the name of a switch.
fn spellings(rule: &api::Rule) -> Vec<String> {
    let mut all = vec![rule.name.clone()];
    for path in [&rule.path, &rule.path_without_plan] {
        all.push(levels_of(rule, path).to_owned());
        all.push(path.clone());
    }
    for name in [rule.name.as_str(), levels_of(rule, &rule.path)] {
        all.push(format!("{}|{}", escaped(&rule.domain), escaped(name)));
    }
    all.retain(|name| !name.is_empty());
    all.dedup();
    all
}

/// Returns whether a text is the path of a rule, with or without its plan.
fn is_path_of(text: &str, rule: &api::Rule) -> bool {
    text == rule.path || text == rule.path_without_plan
}

/// Returns a path of a rule without the domain.
fn levels_of<'r>(rule: &api::Rule, path: &'r str) -> &'r str {
    path.strip_prefix(&rule.domain).and_then(|path| path.strip_prefix('.')).unwrap_or(path)
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
                if let Some(found) = rules.iter().find(|found| is_path_of(path, found)) {
                    return Ok(rule_scope(&found.domain, &path[dot + 1..]));
                }
            }
            bail!("no rule has the path {path:?}, as `/rlconfig` prints paths; use rule DOMAIN NAME or rule PATH")
        }
        [rule, domain, name] if rule == "rule" => {
            let Some(levels) = name.strip_prefix(domain.as_str()).and_then(|rest| rest.strip_prefix('.')) else {
                return parse::scope(words);
            };
            let rules = client.rules(api::ListRulesRequest { domain: domain.clone() }).await?.rules;
            let is_name = rules.iter().any(|rule| rule.name == *name || levels_of(rule, &rule.path) == name);
            let is_path = rules.iter().any(|rule| is_path_of(name, rule));
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
    fn a_filter_accepts_a_rule_with_plans_without_a_plan() {
        let path_without_plan = "shop.user".to_owned();
        let rules = [api::Rule { path_without_plan, ..rule("shop", "", "shop.user.plan_pro") }, rule("a", "", "a.b.c")];
        for name in ["user", "shop.user", "user.plan_pro", "shop.user.plan_pro"] {
            assert!(check_names("", name, &rules).is_ok(), "{name}");
        }
        assert!(check_names("", "a.b", &rules).is_err());
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
