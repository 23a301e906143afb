//! [`RuleSet::explain`]: the steps of a lookup as text, for `sluicegate check --explain`.

use std::fmt;

use sluicegate_algorithm::{Algorithm, Micros, scheduled_window::Schedule};

use super::{
    currency::Currency,
    limit::{Limit, Measure},
    matcher::{Entry, ModifierEntry, Node, Path, Rule, RuleSet, Segment},
    spec::hints::did_you_mean,
};

impl RuleSet {
    /// Returns one line for each step of [`RuleSet::find`], and the resulting limit.
    #[must_use]
    pub fn explain(&self, domain: &str, entries: &[Entry<'_>]) -> Vec<String> {
        let Some(mut node_id) = self.domain_root(domain) else {
            let hint = did_you_mean(domain, self.domain_names());
            return vec![format!("domain {domain:?}: not defined in any rule file, so nothing is limited{hint}")];
        };
        let mut domain_text = format!("domain {domain:?}: defined");
        if let Some(settings) = self.settings_of(domain) {
            if settings.charge_all {
                domain_text += ", charges all limits of a request or none";
            }
            if !settings.shard_by.is_empty() {
                domain_text += &format!(", sharded by {}", settings.shard_by.join(", "));
            }
        }
        let mut lines = vec![domain_text];
        if entries.is_empty() {
            lines.push("no limit: a descriptor has an entry KEY=VALUE for each level of a rule".to_owned());
            return lines;
        }
        let mut path = Path::new();
        for entry in entries {
            let entry_text = format!("{}={}", entry.key, entry.value);
            let Some(next_id) = self.child_of(node_id, *entry) else {
                lines.push(format!("{entry_text}: {}", self.explain_mismatch(node_id, *entry)));
                lines.extend(self.explain_order(domain, entries));
                return lines;
            };
            let node = self.node(next_id);
            path.push(node);
            let matched = match &node.segment {
                Segment::Value(_) => "matches the rule with exactly this value".to_owned(),
                Segment::Any => format!("no rule has this value; matches the rule for any {}", node.key),
                Segment::Pattern(pattern) => format!("matches the first suitable pattern, {pattern}"),
                Segment::Shared(pattern) => {
                    format!("matches the first suitable pattern, {pattern}, with one counter for all values")
                }
            };
            let network_text = match node.ip_prefix.and_then(|prefix| prefix.network(entry.value)) {
                Some(network) => format!(", counted as {network}"),
                None => String::new(),
            };
            let modifier = match node.modifier {
                Some(ModifierEntry::Plan) => ", the request's plan",
                Some(ModifierEntry::Class) => ", the request's class",
                Some(ModifierEntry::Holder) => ", the holder of the request's slots",
                Some(ModifierEntry::Cost) => ", which selects the cost of a hit",
                None => "",
            };
            let cost = match node.modifier {
                Some(ModifierEntry::Cost) => self.explain_cost(node, entries, &path),
                _ => String::new(),
            };
            lines.push(match modifier {
                "" => format!("{entry_text}: {matched} (line {}){network_text}", node.location.line),
                modifier => format!("{entry_text}{modifier}{cost} (line {})", node.location.line),
            });
            node_id = next_id;
        }
        let node = self.node(node_id);
        if let Some(rule) = self.rule_of(node) {
            let rule = self.select_plan_rule(rule, entries.iter().copied(), &path);
            lines.push(format!("limit: {rule}"));
            for further in self.further_limits(rule) {
                lines.push(format!("and, charged together: {further}"));
            }
            return lines;
        }
        lines.push(if node.has_children {
            "no limit: the rule of the last entry has no rate_limit; its child rules require more entries".into()
        } else {
            "no limit: the rule has no rate_limit, so it allows everything".into()
        });
        lines
    }

    /// Returns the cost of a hit that the last entry selects, by the rule's first limit with costs.
    fn explain_cost(&self, node: &Node, entries: &[Entry<'_>], path: &Path<'_>) -> String {
        let Some(rule) = self.rule_of(node) else {
            return String::new();
        };
        let Some(Entry { value, .. }) = entries.last() else {
            return String::new();
        };
        let rule = self.select_plan_rule(rule, entries.iter().copied(), path);
        let mut limits = std::iter::once(rule).chain(self.further_limits(rule));
        match limits.find_map(|rule| rule.cost_per_hit.as_ref()) {
            Some(cost) if cost.values.contains_key(*value) => format!(": {}", cost.of(Some(value))),
            Some(cost) => format!(": {}, the default", cost.default),
            None => String::new(),
        }
    }

    /// Returns a line with an order of the entries in which a rule applies to them, if there is one.
    fn explain_order(&self, domain: &str, entries: &[Entry<'_>]) -> Option<String> {
        if entries.len() > MAX_ORDERED_ENTRIES {
            return None;
        }
        let orders = self.orders(domain, entries);
        let keys: Vec<&str> = orders.first()?.iter().map(|entry| entry.key).collect();
        Some(format!("in another order a rule applies to these entries: {}", keys.join(", ")))
    }

    fn explain_mismatch(&self, parent: u32, entry: Entry<'_>) -> String {
        let hint = "so nothing is limited (other branches are not tried)";
        if !self.node(parent).has_children {
            return format!("the rules have no level for this entry, {hint}");
        }
        match self.group(parent, entry.key) {
            None => {
                let hint = format!("{hint}{}", did_you_mean(entry.key, self.keys_of_level(parent)));
                format!("no rule of this level has the key {:?}, {hint}", entry.key)
            }
            Some(_) => format!("rules of this level have the key {:?}, but none matches this value, {hint}", entry.key),
        }
    }
}

/// Maximum number of entries for which another order is searched. The search follows the tree of rules.
const MAX_ORDERED_ENTRIES: usize = 8;

impl fmt::Display for Measure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Rate { unit, multiplier: 1 } => write!(f, "per {}", unit.name()),
            Self::Rate { unit, multiplier } => write!(f, "per {multiplier} {}s", unit.name()),
            Self::InFlight { hold } => {
                write!(f, "in flight, each for at most {}", duration(hold))
            }
        }
    }
}

fn duration(micros: Micros) -> humantime::FormattedDuration {
    humantime::format_duration(std::time::Duration::from_micros(micros.get()))
}

impl Limit {
    /// Returns the limit as text, with an amount in the currency instead of hits. A limit of requests in flight has no
    /// amount.
    #[must_use]
    pub fn text(&self, currency: Option<&Currency>) -> String {
        match (currency, self.measure()) {
            (Some(_), Measure::Rate { .. }) => LimitText { limit: self, currency }.to_string(),
            (Some(_), Measure::InFlight { .. }) | (None, _) => self.to_string(),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        LimitText { limit: self, currency: None }.fmt(f)
    }
}

/// The text of a limit: `100 per day, token_bucket, burst 20`. The amounts are in the currency, or else hits.
struct LimitText<'l> {
    limit: &'l Limit,
    currency: Option<&'l Currency>,
}

impl LimitText<'_> {
    fn write_amount(&self, f: &mut fmt::Formatter<'_>, hits: u64) -> fmt::Result {
        match self.currency {
            Some(currency) => write!(f, "{}", currency.amount(hits)),
            None => write!(f, "{hits}"),
        }
    }
}

impl fmt::Display for LimitText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, .. } = self;
        self.write_amount(f, limit.requests())?;
        write!(f, " {}", limit.measure())?;
        match limit.algorithm() {
            Algorithm::ScheduledWindow(window)
                if *window.schedule() == Schedule::Epoch { window: limit.measure().window() } => {}
            Algorithm::ScheduledWindow(window) => write!(f, ", {}", window.schedule())?,
            _ if limit.is_default() => {}
            algorithm => write!(f, ", {}", algorithm.name())?,
        }
        let (burst, _) = limit.policy();
        if burst != limit.requests() {
            f.write_str(", burst ")?;
            self.write_amount(f, burst)?;
        }
        let Some(penalty) = limit.penalty() else {
            return Ok(());
        };
        write!(f, ", then a penalty of {}", duration(penalty.shortest()))?;
        if penalty.longest() == penalty.shortest() {
            return Ok(());
        }
        write!(f, ", doubled up to {}", duration(penalty.longest()))
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            None => write!(f, "unlimited")?,
            Some(limit) => f.write_str(&limit.text(self.currency.as_deref()))?,
        }
        if let Some(cost) = &self.cost_per_hit {
            match &cost.key {
                Some(key) => write!(f, ", the cost of a hit depends on the entry {key:?}")?,
                None => write!(f, ", a hit costs {}", cost.default)?,
            }
        }
        if !self.classes.is_empty() {
            write!(f, ", shared by the classes {} and \"other\" (all other requests)", self.classes.join(", "))?;
        }
        if let Some(elastic) = &self.elastic {
            let max = match elastic.steps.last() {
                Some(limit) => limit.requests(),
                None => 0,
            };
            write!(f, ", elastic up to {max} while {:?} has spare capacity", elastic.resource)?;
        }
        if let Some(plan) = &self.plan {
            write!(f, ", plan {:?}", plan.name)?;
        }
        if let Some(name) = &self.name {
            write!(f, ", named {name:?}")?;
        }
        for (set, note) in [
            (self.sheds, "denials are reported as overload"),
            (self.is_hidden, "visible: false: responses do not mention the limit"),
            (self.retry_jitter > Micros::ZERO, "Retry-After has jitter"),
            (self.shadow_mode, "shadow_mode: never enforced"),
            (self.quota_mode, "quota_mode: denies only if every quota rule of the request is over its limit"),
        ] {
            if set {
                write!(f, ", {note}")?;
            }
        }
        for name in &self.replaces {
            write!(f, ", replaces {name:?}")?;
        }
        write!(f, " ({}:{}:{})", self.file, self.location.line, self.location.column)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Options, SourceFile, compile};

    #[test]
    fn the_cost_of_a_hit_is_that_of_the_plan() {
        let limit = |large| {
            let cost = format!("cost_per_hit: {{key: model, values: {{large: {large}}}, default: 1}}");
            format!("{{calls: {{unit: day, requests_per_unit: 9, currency: EUR, {cost}}}}}")
        };
        let text = format!(
            "domain: d\nplans: {{default: free, limits: {{free: {}, gold: {}}}, entities: {{org: {{b: gold}}}}}}\n\
             descriptors: [{{key: org, rate_limit: {{by_plan: calls}}}}]\n",
            limit(2),
            limit(3)
        );
        let file = SourceFile { name: "d.yaml".into(), text };
        let (set, _) = compile(&[file], Options::default()).unwrap();
        for (org, cost) in [("a", 2), ("b", 3)] {
            let entries = [Entry { key: "org", value: org }, Entry { key: "model", value: "large" }];
            let lines = set.explain("d", &entries);
            assert!(
                lines[2].starts_with(&format!("model=large, which selects the cost of a hit: {cost} (")),
                "{lines:?}"
            );
        }
    }

    #[test]
    fn explains_each_step_of_a_lookup_and_its_result() {
        let text = "
domain: d
charge: all
descriptors:
- key: a
  descriptors: [{key: b, rate_limit: {unit: day, requests_per_unit: 1}}]
- key: free
- {key: c, value: v, rate_limit: {unit: minute, unit_multiplier: 5, requests_per_unit: 2, algorithm: gcra, burst: 9}}
- key: team
  rate_limits:
  - {unit: day, requests_per_unit: 9}
  - {unit: month, requests_per_unit: 9, name: m, cost_per_hit: {key: model, values: {large: 15}, default: 4}}
";
        let file = SourceFile { name: "d.yaml".into(), text: text.into() };
        let (set, _) = compile(&[file], Options::default()).unwrap();
        let any_a = "a=1: no rule has this value; matches the rule for any a (line 5)";
        let any_b = "b=2: no rule has this value; matches the rule for any b (line 6)";
        let any_free = "free=1: no rule has this value; matches the rule for any free (line 7)";
        let hint = "so nothing is limited (other branches are not tried)";
        for (entries, expected) in [
            (&[("a", "1"), ("b", "2")][..], &[any_a, any_b, "limit: 1 per day (d.yaml:6:17)"][..]),
            (
                &[("a", "1")],
                &[
                    any_a,
                    "no limit: the rule of the last entry has no rate_limit; its child rules require more entries",
                ],
            ),
            (&[("free", "1")], &[any_free, "no limit: the rule has no rate_limit, so it allows everything"]),
            (
                &[("free", "1"), ("b", "2")],
                &[any_free, &format!("b=2: the rules have no level for this entry, {hint}")],
            ),
            (
                &[("c", "v")],
                &[
                    "c=v: matches the rule with exactly this value (line 8)",
                    "limit: 2 per 5 minutes, gcra, burst 9 (d.yaml:8:3)",
                ],
            ),
            (
                &[("c", "w")],
                &[&format!("c=w: rules of this level have the key \"c\", but none matches this value, {hint}")],
            ),
            (&[("e", "1")], &[&format!("e=1: no rule of this level has the key \"e\", {hint}")]),
            (
                &[("fre", "1")],
                &[&format!("fre=1: no rule of this level has the key \"fre\", {hint}; did you mean \"free\"?")],
            ),
            (
                &[("b", "2"), ("a", "1")],
                &[
                    &format!("b=2: no rule of this level has the key \"b\", {hint}"),
                    "in another order a rule applies to these entries: a, b",
                ],
            ),
        ] {
            let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
            let lines = set.explain("d", &entries);
            assert_eq!(lines[0], "domain \"d\": defined, charges all limits of a request or none");
            assert_eq!(lines[1..], *expected);
        }
        for (value, cost) in [("large", "15"), ("other", "4, the default")] {
            let entries = [Entry { key: "team", value: "a" }, Entry { key: "model", value }];
            let line = format!("model={value}, which selects the cost of a hit: {cost} (line 9)");
            assert_eq!(set.explain("d", &entries)[2], line);
        }
        let unknown = set.explain("dd", &[]);
        assert_eq!(
            unknown,
            ["domain \"dd\": not defined in any rule file, so nothing is limited; did you mean \"d\"?"]
        );
    }
}
