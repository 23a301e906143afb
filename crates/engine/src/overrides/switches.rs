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
        let by_scope: BTreeMap<&Scope, Mode> = in_force.iter().map(|(scope, mode, _)| (scope, *mode)).collect();
        let mode = |scope: &Scope| by_scope.get(scope).copied();
        let of_rule = |rule: &Rule| scopes(&domain_of(rule), Some(rule)).iter().find_map(mode);
        let domains = in_force.iter().filter_map(|(scope, mode, _)| match scope {
            Scope::Domain(domain) => Some((domain.as_str().into(), *mode)),
            Scope::Rule { .. } | Scope::Algorithm(_) | Scope::Everything => None,
        });
        let domains = domains.collect();
        Self {
            any: true,
            rules: rules.rules().iter().map(of_rule).collect(),
            domains,
            without_rule: mode(&Scope::Algorithm(Algorithm::DEFAULT.name.to_owned())),
            everything: mode(&Scope::Everything),
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
    let named = |rule: String| Scope::Rule { domain: domain.to_owned(), rule };
    let name = rule.name.as_deref().map(|name| named(name.to_owned()));
    let algorithm = rule.limit.as_ref().map(|limit| Scope::Algorithm(limit.algorithm().name().to_owned()));
    let shedding = (rule.sheds || !rule.classes.is_empty()).then(|| Scope::Algorithm(SHEDDING.to_owned()));
    let path = named(rule.labels[1..].join("."));
    let all_plans = rule.labels_without_plan().map(|labels| named(labels[1..].join(".")));
    let rule_scopes = name.into_iter().chain([path]).chain(all_plans).chain(algorithm).chain(shedding);
    rule_scopes.chain([Scope::Domain(domain.to_owned()), Scope::Everything]).collect()
}
