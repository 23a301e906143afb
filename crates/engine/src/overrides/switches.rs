//! [`Switches`] by origin, and the [`Modes`] that they set for the rules of a set.

use std::collections::{BTreeMap, HashMap};

use sluicegate_algorithm::{Algorithm, Micros};
use sluicegate_rules::{Rule, RuleSet};

use super::{Override, Scope, target::SHEDDING};

/// The mode that a switch sets for the rules in its scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The rules allow everything and count nothing.
    Off,
    /// The rules count and never deny.
    Shadow,
    /// The rules are enforced, even if their file sets `shadow_mode`.
    Enforce,
    /// The rules deny everything, without a call to the store.
    Deny,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 4] = [Self::Off, Self::Shadow, Self::Enforce, Self::Deny];

    /// Returns the name of the mode.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Shadow => "shadow",
            Self::Enforce => "enforce",
            Self::Deny => "deny",
        }
    }

    /// Returns the mode with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// The place where a switch was set. Of two switches with the same scope, the one with the first listed origin is in
/// force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// Set on this instance only.
    Instance,
    /// Set by a file of this instance.
    File,
    /// Set in the store that all instances share.
    Store,
}

impl Origin {
    /// Every origin.
    pub const ALL: [Self; 3] = [Self::Instance, Self::File, Self::Store];

    /// Returns the name of the origin.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Instance => "instance",
            Self::File => "file",
            Self::Store => "store",
        }
    }
}

/// All switches, by origin.
#[derive(Clone, Default)]
pub(super) struct Switches([BTreeMap<Scope, Override>; Origin::ALL.len()]);

impl Switches {
    pub(super) fn by_origin(&self, origin: Origin) -> &BTreeMap<Scope, Override> {
        &self.0[origin as usize]
    }

    pub(super) fn by_origin_mut(&mut self, origin: Origin) -> &mut BTreeMap<Scope, Override> {
        &mut self.0[origin as usize]
    }

    /// Returns the switches that are in force at `now`, ordered by scope.
    pub(super) fn in_force(&self, now: Micros) -> Vec<(Scope, Mode, Origin)> {
        let mut all = BTreeMap::new();
        for origin in Origin::ALL {
            for (scope, switch) in self.by_origin(origin).iter().filter(|(_, switch)| !switch.is_expired(now)) {
                if let Some(mode) = Mode::from_name(&switch.value) {
                    all.entry(scope).or_insert((mode, origin));
                }
            }
        }
        all.into_iter().map(|(scope, (mode, origin))| (scope.clone(), mode, origin)).collect()
    }
}

/// The modes that the switches in force set for each rule. Without switches, a decision only reads a flag.
#[derive(Default)]
pub struct Modes {
    /// Whether there are switches in force.
    any: bool,
    /// The mode of each rule, by the rule's id.
    rules: Vec<Option<Mode>>,
    domains: HashMap<Box<str>, Mode>,
    /// The mode of limits without a rule, such as requested limits.
    without_rule: Option<Mode>,
    everything: Option<Mode>,
    /// The switches in force, with their origins.
    in_force: Vec<(Scope, Mode, Origin)>,
}

impl Modes {
    pub(super) fn new(switches: &Switches, rules: &RuleSet, now: Micros) -> Self {
        let in_force = switches.in_force(now);
        if in_force.is_empty() {
            return Self::default();
        }
        let mut by_scope: BTreeMap<&Scope, Mode> = BTreeMap::new();
        let mut domains = HashMap::new();
        for (scope, mode, _) in &in_force {
            by_scope.insert(scope, *mode);
            if let Scope::Domain(domain) = scope {
                domains.insert(domain.as_str().into(), *mode);
            }
        }
        let mut rule_modes = Vec::with_capacity(rules.rules().len());
        for rule in rules.rules() {
            let containing = scopes(&domain_of(rule), Some(rule));
            rule_modes.push(containing.iter().find_map(|scope| by_scope.get(scope).copied()));
        }
        let default_algorithm = Scope::Algorithm(Algorithm::DEFAULT.name.to_owned());
        Self {
            any: true,
            rules: rule_modes,
            domains,
            without_rule: by_scope.get(&default_algorithm).copied(),
            everything: by_scope.get(&Scope::Everything).copied(),
            in_force,
        }
    }

    /// Returns the mode of a rule, or of a limit without a rule.
    pub fn mode_of(&self, domain: &str, rule: Option<&Rule>) -> Option<Mode> {
        if !self.any {
            return None;
        }
        match rule {
            Some(rule) => self.rules.get(rule.id).copied().flatten(),
            None => self.without_rule.or_else(|| self.domains.get(domain).copied()).or(self.everything),
        }
    }

    /// Returns whether a switch enforces everything, regardless of the settings.
    pub(crate) fn enforces_all(&self) -> bool {
        self.everything == Some(Mode::Enforce)
    }

    /// Returns the switches in force.
    #[must_use]
    pub fn in_force(&self) -> &[(Scope, Mode, Origin)] {
        &self.in_force
    }
}

fn domain_of(rule: &Rule) -> String {
    rule.labels.first().map(ToString::to_string).unwrap_or_default()
}

/// Returns the scopes that contain a rule, or a limit without a rule, narrowest first.
pub(super) fn scopes(domain: &str, rule: Option<&Rule>) -> Vec<Scope> {
    let Some(rule) = rule else {
        let algorithm = Scope::Algorithm(Algorithm::DEFAULT.name.to_owned());
        return vec![algorithm, Scope::Domain(domain.to_owned()), Scope::Everything];
    };
    let mut scopes = Vec::new();
    if let Some(name) = &rule.name {
        scopes.push(rule_scope(domain, name.to_string()));
    }
    scopes.push(rule_scope(domain, rule.labels[1..].join(".")));
    if let Some(labels) = rule.labels_without_plan() {
        scopes.push(rule_scope(domain, labels[1..].join(".")));
    }
    if let Some(limit) = &rule.limit {
        scopes.push(Scope::Algorithm(limit.algorithm().name().to_owned()));
    }
    if rule.sheds || !rule.classes.is_empty() {
        scopes.push(Scope::Algorithm(SHEDDING.to_owned()));
    }
    scopes.push(Scope::Domain(domain.to_owned()));
    scopes.push(Scope::Everything);
    scopes
}

fn rule_scope(domain: &str, rule: String) -> Scope {
    Scope::Rule { domain: domain.to_owned(), rule }
}
