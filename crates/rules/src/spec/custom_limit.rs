//! Reads a [`CustomLimit`]: a map with the keywords of `rate_limit`, or a short form.

use sluicegate_algorithm::{Algorithm, LimitSpec};

use super::{RateLimit, Reader};
use crate::{
    custom_limit::{Allowance, BLOCKED, CustomLimit, UNLIMITED, parse_shorthand},
    diagnostic::{Diagnostic, Diagnostics, Location},
    limit::Limit,
    options::Options,
    yaml::{self, Kind, Yaml},
};

impl CustomLimit {
    /// Reads a map with the keywords of `rate_limit`, such as `{unit: minute, requests_per_unit: 500}`, one of the
    /// short forms `500/minute`, `unlimited` and `blocked`, or the text of a limit, such as `500 per 15 minutes`.
    ///
    /// # Errors
    ///
    /// Returns every mistake with its location in the text.
    pub fn read(text: &str, options: Options) -> Result<Self, Vec<Diagnostic>> {
        let mut list = Vec::new();
        let mut diagnostics = Diagnostics::new("limit", &mut list);
        let custom_limit = read_custom_limit(&Self::stored_form(text), options, &mut diagnostics);
        diagnostics.sort();
        // Warnings are treated as errors, because a successful call has no way to report them.
        match custom_limit {
            Some(custom_limit) if list.is_empty() => Ok(custom_limit),
            Some(_) | None => Err(list),
        }
    }
}

/// Keywords that depend on other rules or on the rule's descriptor, so that a custom limit cannot have them.
const RULE_FILE_KEYWORDS: &[&str] = &[
    "name",
    "replaces",
    "holder",
    "class",
    "shares",
    "reserve",
    "shed",
    "visible",
    "retry_jitter",
    "denial",
    "cost_per_hit",
    "currency",
    "elastic",
    "by_plan",
];

/// Reads a custom limit. Returns `None` if it is invalid.
fn read_custom_limit(text: &str, options: Options, diagnostics: &mut Diagnostics<'_>) -> Option<CustomLimit> {
    let start = Location { line: 1, column: 1 };
    let document = match yaml::parse(text) {
        Ok(document) => document,
        Err(error) => {
            diagnostics.error(error.location, error.message);
            return None;
        }
    };
    for (location, message) in document.ignored {
        diagnostics.warning(location, message);
    }
    let Some(node) = document.root.filter(|node| !matches!(node.kind, Kind::Null)) else {
        diagnostics.error(start, "the limit is empty");
        return None;
    };
    let mut reader = Reader::new(diagnostics, options);
    if let Kind::Map(pairs) = &node.kind
        && let [(key, limits)] = pairs.as_slice()
        && key.scalar().is_some_and(|(text, _)| text == LIMITS)
    {
        return reader.custom_limits(limits);
    }
    reader.custom_limit(&node)
}

/// Keyword of a map of limits by name, of which each replaces one limit of a rule.
const LIMITS: &str = "limits";

impl Reader<'_, '_> {
    /// Reads the limits that replace single limits of a rule.
    fn custom_limits(&mut self, node: &Yaml) -> Option<CustomLimit> {
        let mut by_name = Vec::new();
        for (name, _, limit) in self.named_entries(LIMITS, node) {
            by_name.push((name.into(), self.custom_limit(limit)?));
        }
        if by_name.is_empty() {
            self.diagnostics.error(node.location, "limits requires at least one limit, by the name of a rule's limit");
            return None;
        }
        Some(CustomLimit { by_name, ..CustomLimit::with_allowance(Allowance::Limited) })
    }

    fn custom_limit(&mut self, node: &Yaml) -> Option<CustomLimit> {
        if let Some((text, _)) = node.scalar() {
            return self.custom_limit_from_scalar(text, node.location);
        }
        if let Kind::Map(pairs) = &node.kind {
            for (key, _) in pairs.iter() {
                if let Some((text, _)) = key.scalar().filter(|(text, _)| RULE_FILE_KEYWORDS.contains(text)) {
                    self.diagnostics.error(key.location, format!("{text} is only allowed in rule files"));
                    return None;
                }
            }
        }
        let RateLimit { limit, divided_limit, on_error, consistency, .. } = self.rate_limit("the limit", node)?;
        let divided_limit = divided_limit.filter(|divided_limit| Some(*divided_limit) != limit).map(Box::new);
        let allowance = if limit.is_some() { Allowance::Limited } else { Allowance::Unlimited };
        Some(CustomLimit {
            allowance,
            limit: limit.unwrap_or(Limit::DENY_ALL),
            divided_limit,
            on_error,
            consistency,
            by_name: Vec::new(),
        })
    }

    /// Reads the short forms of a custom limit: `500/minute`, `unlimited` and `blocked`.
    fn custom_limit_from_scalar(&mut self, text: &str, location: Location) -> Option<CustomLimit> {
        match text {
            UNLIMITED => return Some(CustomLimit::with_allowance(Allowance::Unlimited)),
            BLOCKED => return Some(CustomLimit::with_allowance(Allowance::Blocked)),
            _ => {}
        }
        let Some((requests, unit)) = parse_shorthand(text) else {
            let message = format!(
                "{text:?} is not a limit: use 500/minute, unlimited, blocked, or a map with the keywords of rate_limit"
            );
            self.diagnostics.error(location, message);
            return None;
        };
        let limit =
            Limit::new(requests, unit, 1).map_err(|error| self.diagnostics.error(location, error.to_string())).ok()?;
        let divided_limit =
            Limit::divided(requests, limit.measure(), Algorithm::DEFAULT, LimitSpec::default(), self.instances).ok();
        let divided_limit = divided_limit.filter(|divided_limit| *divided_limit != limit).map(Box::new);
        Some(CustomLimit { limit, divided_limit, ..CustomLimit::with_allowance(Allowance::Limited) })
    }
}
