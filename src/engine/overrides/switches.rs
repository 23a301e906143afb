//! Which rules are enforced, and which are not: what switches make of a set of rules.

use std::collections::{BTreeMap, HashMap};

use super::{Override, Scope, target::SHEDDING};
use crate::{
    algorithm::{Algorithm, Micros},
    rules::{Rule, RuleSet},
};

/// What a switch makes of the rules that it is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// They let everything pass and count nothing.
    Off,
    /// They are counted, and never refuse.
    Shadow,
    /// They refuse, also where a file says `shadow_mode`.
    Enforce,
    /// They refuse everything, and the store is not asked.
    Deny,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 4] = [Self::Off, Self::Shadow, Self::Enforce, Self::Deny];

    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::Shadow => "shadow",
            Self::Enforce => "enforce",
            Self::Deny => "deny",
        }
    }

    /// What the word says.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.name() == name)
    }
}

/// Who threw a switch. Of two for the same, the one that stands first here is in force.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Origin {
    /// Somebody told this instance alone.
    Instance,
    /// A file beside this instance.
    File,
    /// The store that all instances share.
    Store,
}

impl Origin {
    /// Every origin.
    pub const ALL: [Self; 3] = [Self::Instance, Self::File, Self::Store];

    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Instance => "instance",
            Self::File => "file",
            Self::Store => "store",
        }
    }
}

/// All switches, by who threw them.
#[derive(Clone, Default)]
pub(super) struct Switches([BTreeMap<Scope, Override>; Origin::ALL.len()]);

impl Switches {
    pub(super) fn of(&self, origin: Origin) -> &BTreeMap<Scope, Override> {
        &self.0[origin as usize]
    }

    pub(super) fn of_mut(&mut self, origin: Origin) -> &mut BTreeMap<Scope, Override> {
        &mut self.0[origin as usize]
    }

    /// Those that are in force at this moment, by their scopes.
    pub(super) fn in_force(&self, now: Micros) -> Vec<(Scope, Mode, Origin)> {
        let mut all = BTreeMap::new();
        for origin in Origin::ALL {
            for (scope, switch) in self.of(origin).iter().filter(|(_, switch)| !switch.is_expired(now)) {
                if let Some(mode) = Mode::from_name(&switch.value) {
                    all.entry(scope).or_insert((mode, origin));
                }
            }
        }
        all.into_iter().map(|(scope, (mode, origin))| (scope.clone(), mode, origin)).collect()
    }
}

/// What the switches in force make of each rule. Without any it costs a decision a look at a flag.
#[derive(Default)]
pub struct Modes {
    any: bool,
    /// By the rule's id.
    rules: Vec<Option<Mode>>,
    domains: HashMap<Box<str>, Mode>,
    /// Of limits that callers bring along.
    overrides: Option<Mode>,
    everything: Option<Mode>,
    /// The scopes and modes, and who threw each.
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
            overrides: mode(&Scope::Algorithm(Algorithm::DEFAULT.name.to_owned())),
            everything: mode(&Scope::Everything),
            in_force,
        }
    }

    /// What has been made of a rule, or of what is limited without one.
    pub(crate) fn of(&self, domain: &str, rule: Option<&Rule>) -> Option<Mode> {
        if !self.any {
            return None;
        }
        match rule {
            Some(rule) => self.rules.get(rule.id).copied().flatten(),
            None => self.overrides.or_else(|| self.domains.get(domain).copied()).or(self.everything),
        }
    }

    /// Whether everything is to be enforced, whatever the settings say.
    pub(crate) fn enforces_all(&self) -> bool {
        self.everything == Some(Mode::Enforce)
    }

    /// The switches in force.
    #[must_use]
    pub fn in_force(&self) -> &[(Scope, Mode, Origin)] {
        &self.in_force
    }
}

fn domain_of(rule: &Rule) -> String {
    rule.labels.first().map(ToString::to_string).unwrap_or_default()
}

/// The scopes that a rule is in, the nearest first; or what is limited without a rule.
pub(super) fn scopes(domain: &str, rule: Option<&Rule>) -> Vec<Scope> {
    let Some(rule) = rule else {
        let kind = Scope::Algorithm(Algorithm::DEFAULT.name.to_owned());
        return vec![kind, Scope::Domain(domain.to_owned()), Scope::Everything];
    };
    let named = |rule: String| Scope::Rule { domain: domain.to_owned(), rule };
    let name = rule.name.as_deref().map(|name| named(name.to_owned()));
    let algorithm = rule.limit.as_ref().map(|limit| Scope::Algorithm(limit.algorithm().name().to_owned()));
    let shedding = (rule.sheds || !rule.classes.is_empty()).then(|| Scope::Algorithm(SHEDDING.to_owned()));
    let levels = named(rule.labels[1..].join("."));
    let nearest = name.into_iter().chain([levels]).chain(algorithm).chain(shedding);
    nearest.chain([Scope::Domain(domain.to_owned()), Scope::Everything]).collect()
}
