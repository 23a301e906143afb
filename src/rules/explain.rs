//! Why the walk went where it went, for people: `sluicegate check --explain`.

use std::fmt;

use super::{
    limit::{Limit, Measure},
    matcher::{Entry, ModifierEntry, Path, Rule, RuleSet, Segment},
};

impl RuleSet {
    /// One line for each step of [`RuleSet::find`].
    #[must_use]
    pub fn explain(&self, domain: &str, entries: &[Entry<'_>]) -> Vec<String> {
        let Some(mut at) = self.domain(domain) else {
            return vec![format!("domain {domain:?}: no rule file names it, so nothing is limited")];
        };
        let mut known = format!("domain {domain:?}: known");
        if let Some(settings) = self.settings_of(domain) {
            if settings.charge_all {
                known += ", charges for all limits of a request or for none";
            }
            if !settings.shard_by.is_empty() {
                known += &format!(", sharded by {}", settings.shard_by.join(", "));
            }
        }
        let (mut lines, mut path) = (vec![known], Path::new());
        for entry in entries {
            let asked = format!("{}={}", entry.key, entry.value);
            let Some(next) = self.child(at, *entry) else {
                lines.push(format!("{asked}: {}", self.why_not(at, *entry)));
                return lines;
            };
            let node = self.node(next);
            path.push(node);
            let how = match &node.segment {
                Segment::Value(_) => "the rule with exactly this value".to_owned(),
                Segment::Any => format!("no rule has this value; the rule for any {}", node.key),
                Segment::Pattern(pattern) => format!("the first pattern that fits, {pattern}"),
                Segment::Shared(pattern) => format!("the first pattern that fits, {pattern}, one counter for all"),
            };
            let network = node.ip_prefix.and_then(|prefix| prefix.network(entry.value));
            let counted = network.map_or_else(String::new, |network| format!(", counted as {network}"));
            let aside = match node.modifier {
                Some(ModifierEntry::Plan) => ", the request's plan",
                Some(ModifierEntry::Class) => ", the request's class",
                Some(ModifierEntry::Holder) => ", who holds what it takes",
                None => "",
            };
            lines.push(match aside {
                "" => format!("{asked}: {how} (line {}){counted}", node.place.line),
                aside => format!("{asked}{aside} (line {})", node.place.line),
            });
            at = next;
        }
        let node = self.node(at);
        lines.push(match self.rule_of(node) {
            Some(rule) => format!("limit: {}", self.of_plan(rule, entries.iter().copied(), &path)),
            None if node.has_children => {
                "no limit: the last entry ends on a rule without rate_limit; its children want more entries".into()
            }
            None => "no limit: the rule has no rate_limit, so it allows everything".into(),
        });
        lines
    }

    fn why_not(&self, parent: u32, entry: Entry<'_>) -> String {
        let hint = "so nothing is limited (there is no going back to another branch)";
        if !self.node(parent).has_children {
            return format!("the rules end one level above, {hint}");
        }
        match self.group(parent, entry.key) {
            None => format!("no rule of this level has the key {:?}, {hint}", entry.key),
            Some(_) => format!("rules of this level have the key {:?}, but none this value, {hint}", entry.key),
        }
    }
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.requests())?;
        match self.measure() {
            Measure::Rate { unit, multiplier: 1 } => write!(f, "per {}", unit.name())?,
            Measure::Rate { unit, multiplier } => write!(f, "per {multiplier} {}s", unit.name())?,
            Measure::InFlight { hold } => {
                let hold = std::time::Duration::from_micros(hold.get());
                write!(f, "at once, each for {} at most", humantime::format_duration(hold))?;
            }
        }
        if self.is_default() { Ok(()) } else { write!(f, ", {}", self.algorithm().name()) }
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.limit {
            None => write!(f, "unlimited")?,
            Some(limit) => write!(f, "{limit}")?,
        }
        if !self.classes.is_empty() {
            write!(f, ", shared by {} and others", self.classes.join(", "))?;
        }
        if let Some(elastic) = &self.elastic {
            let most = elastic.steps.last().map_or(0, Limit::requests);
            write!(f, ", elastic up to {most} by {:?}", elastic.resource)?;
        }
        if let Some(plan) = &self.plan {
            write!(f, ", of the plan {:?}", plan.name)?;
        }
        if let Some(name) = &self.name {
            write!(f, ", named {name:?}")?;
        }
        for (set, word) in [
            (self.sheds, "its refusals are overload"),
            (self.shadow_mode, "shadow_mode: never enforced"),
            (self.quota_mode, "quota_mode: refuses only when every quota rule of the request is over"),
        ] {
            if set {
                write!(f, ", {word}")?;
            }
        }
        for name in &self.replaces {
            write!(f, ", replaces {name:?}")?;
        }
        write!(f, " ({}:{}:{})", self.file, self.place.line, self.place.column)
    }
}
