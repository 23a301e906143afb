//! [`Overrides`]: limits of entities, plans of entities and modes of rules (switches) that operators set while the
//! service runs. Overrides take precedence over rule files.
//!
//! [`Overrides`] is part of the snapshot that a decision reads, and immutable there. A change creates a new value that
//! shares all unchanged data with the previous one. This module does no I/O: `service::overrides` stores the overrides.
//!
//! The order of precedence is: a switch, an entity's limit, the plan, the rule.

mod interner;
mod key_lists;
mod known_names;
mod planned;
mod switches;
mod table;
mod target;
#[cfg(test)]
mod tests;

pub use known_names::{KnownNames, UnknownName, similar_name};
pub use switches::{Mode, Modes, Origin};
pub use target::{RuleSetSlot, Scope, Target, TargetError};

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use sluicegate_algorithm::Micros;
use sluicegate_placement::Identity;
use sluicegate_rules::{CustomLimit, Diagnostic, Entry, Options, PlanAssignment, Rule, RuleSet};
use smallvec::SmallVec;

use self::{
    interner::Interner,
    key_lists::{KeyLists, MAX_KEY_LISTS},
    planned::{MAX_PLANNED, PlannedOverrides},
    switches::Switches,
    table::{Entity, EntityHash, Metadata, Table},
};
use crate::bounded;

/// An override, with its metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The entity or rules that the override applies to.
    pub target: Target,
    /// The text of a limit or of a plan assignment, the name of a mode, or a text that names a set of rules.
    pub value: Arc<str>,
    /// The time at which the override expires; `None` if it does not expire.
    pub until: Option<Micros>,
    /// The operator who set the override.
    pub author: Arc<str>,
    /// The reason for the audit log.
    pub reason: Arc<str>,
    /// The time at which the override was set.
    pub at: Micros,
    /// The version of the change that set the override.
    pub version: u64,
}

impl Override {
    /// Returns whether the override has expired.
    #[must_use]
    pub fn is_expired(&self, now: Micros) -> bool {
        self.until.is_some_and(|until| until <= now)
    }

    /// Returns the override that a planned one becomes at its beginning, or `None` if it is not planned.
    #[must_use]
    pub fn begun(&self) -> Option<Self> {
        let at = self.target.beginning()?;
        Some(Self { target: self.target.begun().clone(), at, ..self.clone() })
    }
}

/// Error returned for an invalid override.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverrideError {
    /// The target is invalid.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The text of a limit is invalid. The message lists all errors in it.
    #[error("{0}")]
    Limit(String),
    /// The text of a plan assignment is invalid. The message lists all errors in it.
    #[error("{0}")]
    Assignment(String),
    /// The mode of a switch is unknown.
    #[error("{0:?} is not a mode: expected off, shadow, enforce or deny")]
    Mode(String),
    /// The name of a plan is empty.
    #[error("the name of the plan is empty")]
    Plan,
    /// The end of the override has passed, so it would have no effect.
    #[error("the end of the override has passed")]
    Ended,
    /// The end of the override is too late: tables store ends in seconds, in 32 bits.
    #[error(
        "the end of the override is after 2106-02-07T06:28:15Z, the last that can be stored; leave it out for no end"
    )]
    EndsTooLate,
    /// The beginning of a planned override has passed.
    #[error("the beginning of the override has passed; leave it out to set the override at once")]
    HasBegun,
    /// The override would end before it begins.
    #[error("the end of the override must be after its beginning")]
    EndsBeforeBeginning,
    /// There are too many overrides that begin later.
    #[error("there are already {MAX_PLANNED} planned overrides, which is the maximum")]
    TooManyPlanned,
    /// The digest of a set of rules is empty.
    #[error("the digest of the set of rules is empty")]
    Rules,
    /// The domain already has limits for the maximum number of lists of keys.
    #[error(
        "domain {0:?} already has limits for {MAX_KEY_LISTS} different lists of keys, which is the maximum: each costs \
         every request of the domain a lookup"
    )]
    TooManyKeyLists(String),
}

/// The overrides of an instance.
#[derive(Clone)]
pub struct Overrides {
    /// Key of the hash that identifies descriptors in the tables.
    secret: [u8; 16],
    limits: Table,
    plans: Table,
    /// Parsed limits, shared by all entities with the same text.
    limits_by_text: Arc<Interner<Arc<CustomLimit>>>,
    /// Parsed plan assignments, shared by all entities with the same text.
    plans_by_text: Arc<Interner<Arc<PlanAssignment>>>,
    /// Authors and reasons.
    texts: Arc<Interner<()>>,
    limit_key_lists: Arc<KeyLists>,
    plan_key_lists: Arc<KeyLists>,
    switches: Arc<Switches>,
    rules: Arc<BTreeMap<RuleSetSlot, Override>>,
    /// The targets of the overrides that expire, ordered by time.
    expirations: Arc<BTreeSet<(Micros, Target)>>,
    /// Overrides that begin later.
    planned: Arc<PlannedOverrides>,
}

/// The custom limit of an entity.
#[derive(Clone, Copy)]
pub(crate) struct EntityLimit<'s> {
    pub(crate) limit: &'s CustomLimit,
    /// Number of entries in the target of the override.
    pub(crate) entries: usize,
}

impl Default for Overrides {
    fn default() -> Self {
        Self {
            secret: rand::random(),
            limits: Table::default(),
            plans: Table::default(),
            limits_by_text: Arc::default(),
            plans_by_text: Arc::default(),
            texts: Arc::default(),
            limit_key_lists: Arc::default(),
            plan_key_lists: Arc::default(),
            switches: Arc::default(),
            rules: Arc::default(),
            expirations: Arc::default(),
            planned: Arc::default(),
        }
    }
}

/// Lookups for every decision.
impl Overrides {
    /// Returns the active custom limit of the longest prefix of the descriptor that has one.
    pub(crate) fn entity_limit(&self, domain: &str, entries: &[Entry<'_>], now: Micros) -> Option<EntityLimit<'_>> {
        if self.limits.len() == 0 {
            return None;
        }
        for list in self.limit_key_lists.of(domain) {
            if !list.is_prefix_of(entries) {
                continue;
            }
            let prefix = &entries[..list.keys.len()];
            if let Some(entity) = self.limits.get(self.entity_hash(domain, prefix))
                && is_active(&entity, now)
                && let Some(limit) = self.limits_by_text.value(entity.value)
            {
                return Some(EntityLimit { limit, entries: prefix.len() });
            }
        }
        None
    }

    /// Returns the active plan assignment of the last entry that has one.
    pub(crate) fn plan(&self, domain: &str, entries: &[Entry<'_>], now: Micros) -> Option<&PlanAssignment> {
        if self.plans.len() == 0 {
            return None;
        }
        let key_lists = self.plan_key_lists.of(domain);
        for entry in entries.iter().rev() {
            if !key_lists.iter().any(|list| *list.keys[0] == *entry.key) {
                continue;
            }
            if let Some(entity) = self.plans.get(self.entity_hash(domain, &[*entry]))
                && is_active(&entity, now)
            {
                return self.plans_by_text.value(entity.value).map(|assignment| &**assignment);
            }
        }
        None
    }

    fn entity_hash(&self, domain: &str, entries: &[Entry<'_>]) -> EntityHash {
        let mut identity = Identity::keyed(&self.secret, domain);
        for entry in entries {
            identity.add(entry.key, &bounded(entry.value));
        }
        identity.finish().into()
    }
}

/// Returns whether an override has not expired.
fn is_active(entity: &Entity, now: Micros) -> bool {
    entity.until == 0 || u64::from(entity.until) > now.floor_secs()
}

/// Queries by operators.
impl Overrides {
    /// Returns the overrides that apply to a descriptor, highest precedence first: a switch, its limit, its plan.
    pub(super) fn applicable(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        rule: Option<&Rule>,
        now: Micros,
    ) -> Vec<(Origin, Override)> {
        let mut applicable = Vec::new();
        applicable.extend(switches::scopes(domain, rule).iter().find_map(|scope| self.switch_in_force(scope, now)));
        if let Some(entity_limit) = self.entity_limit(domain, entries, now)
            && let Some(limit) = self.get(&Target::of_descriptor(domain, &entries[..entity_limit.entries]))
        {
            applicable.push((Origin::Store, limit));
        }
        for entry in entries.iter().rev() {
            let key = entry.key.to_owned();
            let value = entry.value.to_owned();
            if let Some(plan) = self.get(&Target::Plan { domain: domain.to_owned(), key, value }) {
                applicable.push((Origin::Store, plan));
                break;
            }
        }
        applicable
    }

    /// Returns the switch in force with this scope, and its origin.
    fn switch_in_force(&self, scope: &Scope, now: Micros) -> Option<(Origin, Override)> {
        for origin in Origin::ALL {
            if let Some(switch) = self.switches.by_origin(origin).get(scope)
                && !switch.is_expired(now)
            {
                return Some((origin, switch.clone()));
            }
        }
        None
    }
}

/// Changes by operators, and the stored overrides.
impl Overrides {
    /// Computes the modes that the switches set for these rules.
    #[must_use]
    pub fn modes(&self, rules: &RuleSet, now: Micros) -> Modes {
        Modes::new(&self.switches, rules, now)
    }

    /// Returns the numbers of entity limits, of plan assignments, and of switches from the store.
    #[must_use]
    pub fn counts(&self) -> [usize; 3] {
        [self.limits.len(), self.plans.len(), self.switches.by_origin(Origin::Store).len()]
    }

    /// Returns the number of limits of entities that have these keys.
    #[must_use]
    pub fn limits_with_keys(&self, domain: &str, keys: &[&str]) -> u32 {
        self.limit_key_lists.count(domain, keys)
    }

    /// Checks whether an override is valid.
    ///
    /// # Errors
    ///
    /// Returns an error if the target or the value is invalid.
    pub fn check(entry: &Override, options: Options) -> Result<(), OverrideError> {
        entry.target.check()?;
        match entry.target.begun() {
            Target::Limit { .. } => parse_limit(&entry.value, options).map(drop),
            _ => Self::check_value(entry),
        }
    }

    /// Checks whether the end of an override is after `now` and can be stored.
    ///
    /// # Errors
    ///
    /// Returns an error if it is not.
    pub fn check_end(until: Option<Micros>, now: Micros) -> Result<(), OverrideError> {
        match until {
            Some(until) if until <= now => Err(OverrideError::Ended),
            Some(until) if until.ceil_secs() > u32::MAX.into() => Err(OverrideError::EndsTooLate),
            _ => Ok(()),
        }
    }

    /// Checks whether the beginning of a planned override is after `now` and before its end.
    ///
    /// # Errors
    ///
    /// Returns an error if it is not.
    pub fn check_beginning(entry: &Override, now: Micros) -> Result<(), OverrideError> {
        let Some(from) = entry.target.beginning() else {
            return Ok(());
        };
        if from <= now {
            return Err(OverrideError::HasBegun);
        }
        match entry.until {
            Some(until) if until <= from => Err(OverrideError::EndsBeforeBeginning),
            _ => Ok(()),
        }
    }

    /// Checks whether an override can be added to these, also after its beginning if it is planned.
    ///
    /// # Errors
    ///
    /// Returns an error if the target or the value is invalid, if the domain has limits for too many lists of keys, or if
    /// there are too many planned overrides.
    pub fn can_put(&self, entry: &Override, options: Options) -> Result<(), OverrideError> {
        entry.target.check()?;
        Self::check_value(entry)?;
        let is_new = matches!(entry.target, Target::Planned { .. }) && self.planned.get(&entry.target).is_none();
        if is_new && self.planned.len() >= MAX_PLANNED {
            return Err(OverrideError::TooManyPlanned);
        }
        let Target::Limit { domain, entries } = entry.target.begun() else {
            return Ok(());
        };
        let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
        if !self.limit_key_lists.can_add(domain, &keys) {
            return Err(OverrideError::TooManyKeyLists(domain.clone()));
        }
        if self.limits_by_text.contains(&entry.value) {
            return Ok(());
        }
        parse_limit(&entry.value, options).map(drop)
    }

    fn check_value(entry: &Override) -> Result<(), OverrideError> {
        match entry.target.begun() {
            // `put` parses the limit, once for all overrides with the same text.
            Target::Limit { .. } => Ok(()),
            Target::Plan { .. } => parse_plan(&entry.value).map(drop),
            Target::Switch(_) => match Mode::from_name(&entry.value) {
                Some(_) => Ok(()),
                None => Err(OverrideError::Mode(entry.value.to_string())),
            },
            Target::Rules(_) if entry.value.is_empty() => Err(OverrideError::Rules),
            Target::Rules(_) => Ok(()),
            Target::Planned { .. } => Err(TargetError::NotPlannable.into()),
        }
    }

    /// Adds or replaces an override from the store. Its target must be valid.
    ///
    /// # Errors
    ///
    /// Returns an error if the value is invalid, or if the domain has limits for too many lists of keys.
    pub fn put(&mut self, entry: Override, options: Options) -> Result<(), OverrideError> {
        Self::check_value(&entry)?;
        let until = entry.until.map(|until| Micros::from_secs(expiry_seconds(Some(until)).into()));
        let entry = Override { until, ..entry };
        match &entry.target {
            Target::Limit { domain, entries } => {
                let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
                if !self.limit_key_lists.can_add(domain, &keys) {
                    return Err(OverrideError::TooManyKeyLists(domain.clone()));
                }
                let interner = Arc::make_mut(&mut self.limits_by_text);
                let value = match interner.acquire(&entry.value) {
                    Some(value) => value,
                    None => {
                        let limit = Arc::new(parse_limit(&entry.value, options)?);
                        interner.insert(&entry.value, limit)
                    }
                };
                let hash = self.entity_hash(domain, &entries_of(entries));
                let metadata = self.metadata(&entry);
                let until = expiry_seconds(entry.until);
                match self.limits.insert(hash, Entity { value, until }, metadata) {
                    Some((entity, metadata)) => self.release_limit(entity, &metadata, &entry.target),
                    None => Arc::make_mut(&mut self.limit_key_lists).add(domain, &keys),
                }
            }
            Target::Plan { domain, key, value } => {
                let interner = Arc::make_mut(&mut self.plans_by_text);
                let plan = match interner.acquire(&entry.value) {
                    Some(plan) => plan,
                    None => interner.insert(&entry.value, Arc::new(parse_plan(&entry.value)?)),
                };
                let hash = self.entity_hash(domain, &[Entry { key, value }]);
                let metadata = self.metadata(&entry);
                let until = expiry_seconds(entry.until);
                match self.plans.insert(hash, Entity { value: plan, until }, metadata) {
                    Some((entity, metadata)) => self.release_plan(entity, &metadata, &entry.target),
                    None => Arc::make_mut(&mut self.plan_key_lists).add(domain, &[key]),
                }
            }
            Target::Switch(_) => self.set_switch(&entry, Origin::Store),
            Target::Rules(slot) => drop(Arc::make_mut(&mut self.rules).insert(*slot, entry.clone())),
            Target::Planned { .. } => {
                Self::check(&entry, options)?;
                Arc::make_mut(&mut self.planned).insert(entry.clone());
            }
        }
        if let (Some(until), Target::Limit { .. } | Target::Plan { .. }) = (entry.until, &entry.target) {
            Arc::make_mut(&mut self.expirations).insert((until, entry.target));
        }
        Ok(())
    }

    /// Adds or replaces a switch of an origin. Ignores other overrides.
    pub fn set_switch(&mut self, switch: &Override, origin: Origin) {
        if let Target::Switch(scope) = &switch.target {
            let switches = Arc::make_mut(&mut self.switches).by_origin_mut(origin);
            let before = switches.insert(scope.clone(), switch.clone());
            self.update_expirations(origin, before.as_ref(), Some(switch));
        }
    }

    /// Removes a switch of an origin, and returns it.
    pub fn clear_switch(&mut self, scope: &Scope, origin: Origin) -> Option<Override> {
        let before = Arc::make_mut(&mut self.switches).by_origin_mut(origin).remove(scope);
        self.update_expirations(origin, before.as_ref(), None);
        before
    }

    /// Updates `expirations` after a change of a switch. Only overrides from the store are listed there.
    fn update_expirations(&mut self, origin: Origin, before: Option<&Override>, after: Option<&Override>) {
        if origin != Origin::Store {
            return;
        }
        if let Some(expiration) = before.and_then(expiration_of) {
            Arc::make_mut(&mut self.expirations).remove(&expiration);
        }
        if let Some(expiration) = after.and_then(expiration_of) {
            Arc::make_mut(&mut self.expirations).insert(expiration);
        }
    }

    /// Replaces all switches of an origin.
    pub fn set_switches(&mut self, switches: &[Override], origin: Origin) {
        Arc::make_mut(&mut self.switches).by_origin_mut(origin).clear();
        for switch in switches {
            self.set_switch(switch, origin);
        }
    }

    /// Returns overrides with only the switches that are not from the store.
    #[must_use]
    pub fn without_stored(&self) -> Self {
        let mut switches = (*self.switches).clone();
        switches.by_origin_mut(Origin::Store).clear();
        Self { switches: Arc::new(switches), ..Self::default() }
    }

    /// Returns the switches that have not expired, in the same form as [`Modes::in_force`].
    #[must_use]
    pub fn switches_in_force(&self, now: Micros) -> Vec<(Scope, Mode, Origin)> {
        self.switches.in_force(now)
    }

    /// Returns the switches of an origin.
    pub fn switches(&self, origin: Origin) -> impl Iterator<Item = &Override> {
        self.switches.by_origin(origin).values()
    }

    /// Removes an override from the store, and returns it.
    pub fn remove(&mut self, target: &Target) -> Option<Override> {
        let before = self.get(target)?;
        match target {
            Target::Limit { domain, entries } => {
                let (entity, metadata) = self.limits.remove(self.entity_hash(domain, &entries_of(entries)))?;
                self.release_limit(entity, &metadata, target);
                let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
                Arc::make_mut(&mut self.limit_key_lists).remove(domain, &keys);
            }
            Target::Plan { domain, key, value } => {
                let (entity, metadata) = self.plans.remove(self.entity_hash(domain, &[Entry { key, value }]))?;
                self.release_plan(entity, &metadata, target);
                Arc::make_mut(&mut self.plan_key_lists).remove(domain, &[key]);
            }
            Target::Switch(scope) => drop(self.clear_switch(scope, Origin::Store)),
            Target::Rules(slot) => drop(Arc::make_mut(&mut self.rules).remove(slot)),
            Target::Planned { .. } => Arc::make_mut(&mut self.planned).remove(target),
        }
        Some(before)
    }

    /// Returns the override from the store with this target.
    #[must_use]
    pub fn get(&self, target: &Target) -> Option<Override> {
        match target {
            Target::Limit { domain, entries } => {
                let entry = self.limits.entry(self.entity_hash(domain, &entries_of(entries)))?;
                self.read_override(entry, |id| self.limits_by_text.text(id))
            }
            Target::Plan { domain, key, value } => {
                let entry = self.plans.entry(self.entity_hash(domain, &[Entry { key, value }]))?;
                self.read_override(entry, |id| self.plans_by_text.text(id))
            }
            Target::Switch(scope) => self.switches.by_origin(Origin::Store).get(scope).cloned(),
            Target::Rules(slot) => self.rules.get(slot).cloned(),
            Target::Planned { .. } => self.planned.get(target).cloned(),
        }
    }

    /// Returns all overrides from the store, in arbitrary order.
    pub fn iter(&self) -> impl Iterator<Item = Override> {
        let limits =
            self.limits.iter().filter_map(|entry| self.read_override(entry, |id| self.limits_by_text.text(id)));
        let plans = self.plans.iter().filter_map(|entry| self.read_override(entry, |id| self.plans_by_text.text(id)));
        let rest = self.switches(Origin::Store).chain(self.rules.values()).chain(self.planned.iter());
        limits.chain(plans).chain(rest.cloned())
    }

    /// Returns the override for a set of rules. Its value begins with the digest of the set, or names the rule
    /// directory.
    #[must_use]
    pub fn rules(&self, slot: RuleSetSlot) -> Option<&Override> {
        self.rules.get(&slot)
    }

    /// Returns the targets of limits and plans as texts, in arbitrary order.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        self.limits.iter().chain(self.plans.iter()).map(|(_, metadata)| &*metadata.target)
    }

    /// Returns up to `max` expired overrides from the store, earliest first.
    pub fn expired(&self, now: Micros, max: usize) -> impl Iterator<Item = Override> {
        let expired = self.expirations.iter().take_while(move |(until, _)| *until <= now).take(max);
        expired.filter_map(|(_, target)| self.get(target))
    }

    /// Returns the planned overrides, ordered by target.
    pub fn planned(&self) -> impl Iterator<Item = &Override> {
        self.planned.iter()
    }

    /// Returns the number of planned overrides.
    #[must_use]
    pub fn planned_count(&self) -> usize {
        self.planned.len()
    }

    /// Returns the planned overrides of a target, earliest first.
    pub fn planned_for(&self, target: &Target) -> impl Iterator<Item = &Override> {
        self.planned.of(target)
    }

    /// Returns the planned overrides for a descriptor: of a switch, of its limit, of its plan.
    #[must_use]
    pub fn planned_for_descriptor(&self, domain: &str, entries: &[Entry<'_>], rule: Option<&Rule>) -> Vec<&Override> {
        let mut found = Vec::new();
        if self.planned.len() == 0 {
            return found;
        }
        for scope in switches::scopes(domain, rule) {
            found.extend(self.planned.of(&Target::Switch(scope)));
        }
        for length in 1..=entries.len() {
            found.extend(self.planned.of(&Target::of_descriptor(domain, &entries[..length])));
        }
        for entry in entries {
            let key = entry.key.to_owned();
            let value = bounded(entry.value).into_owned();
            found.extend(self.planned.of(&Target::Plan { domain: domain.to_owned(), key, value }));
        }
        found
    }

    /// Returns the planned overrides that have begun, earliest first.
    pub fn due(&self, now: Micros) -> impl Iterator<Item = &Override> {
        self.planned.due(now)
    }

    /// Returns the earliest beginning of a planned override after `now`, or `None` if there is none.
    #[must_use]
    pub fn next_beginning(&self, now: Micros) -> Option<Micros> {
        self.planned.next(now)
    }

    /// Puts the planned overrides that have begun in force, each in place of the override of its target.
    ///
    /// An override that was set after the beginning stays in force. Values that have become invalid are dropped.
    pub fn begin_planned(&mut self, now: Micros, options: Options) {
        let due: Vec<Override> = self.due(now).cloned().collect();
        for planned in due {
            Arc::make_mut(&mut self.planned).remove(&planned.target);
            if let Some(begun) = planned.begun()
                && !self.is_set_after(&begun.target, begun.at)
            {
                let _ = self.put(begun, options);
            }
        }
    }

    /// Returns whether the override of a target was set after `second`. A planned override that begins in that second
    /// is then outdated.
    #[must_use]
    pub fn is_set_after(&self, target: &Target, second: Micros) -> bool {
        // Tables store only the second in which an override was set.
        self.get(target).is_some_and(|entry| entry.at.floor_secs() > second.floor_secs())
    }

    fn intern(&mut self, text: &str) -> u32 {
        let texts = Arc::make_mut(&mut self.texts);
        texts.acquire(text).unwrap_or_else(|| texts.insert(text, ()))
    }

    fn release_limit(&mut self, entity: Entity, metadata: &Metadata, target: &Target) {
        Arc::make_mut(&mut self.limits_by_text).release(entity.value);
        self.release(entity, metadata, target);
    }

    fn release_plan(&mut self, entity: Entity, metadata: &Metadata, target: &Target) {
        Arc::make_mut(&mut self.plans_by_text).release(entity.value);
        self.release(entity, metadata, target);
    }

    fn release(&mut self, entity: Entity, metadata: &Metadata, target: &Target) {
        let texts = Arc::make_mut(&mut self.texts);
        texts.release(metadata.author);
        texts.release(metadata.reason);
        if entity.until > 0 {
            Arc::make_mut(&mut self.expirations).remove(&(Micros::from_secs(entity.until.into()), target.clone()));
        }
    }

    fn metadata(&mut self, entry: &Override) -> Metadata {
        Metadata {
            target: entry.target.to_string().into(),
            version: entry.version,
            at_seconds: u32::try_from(entry.at.floor_secs()).unwrap_or(u32::MAX),
            author: self.intern(&entry.author),
            reason: self.intern(&entry.reason),
        }
    }

    fn read_override(
        &self,
        (entity, metadata): (Entity, &Metadata),
        text_of: impl FnOnce(u32) -> Arc<str>,
    ) -> Option<Override> {
        Some(Override {
            target: Target::parse(&metadata.target).ok()?,
            value: text_of(entity.value),
            until: if entity.until > 0 { Some(Micros::from_secs(entity.until.into())) } else { None },
            author: self.texts.text(metadata.author),
            reason: self.texts.text(metadata.reason),
            at: metadata.at(),
            version: metadata.version,
        })
    }
}

/// Returns the entry of `expirations` for an override, or `None` if it does not expire.
fn expiration_of(entry: &Override) -> Option<(Micros, Target)> {
    Some((entry.until?, entry.target.clone()))
}

fn parse_limit(text: &str, options: Options) -> Result<CustomLimit, OverrideError> {
    CustomLimit::read(text, options).map_err(|diagnostics| OverrideError::Limit(messages(&diagnostics)))
}

fn parse_plan(text: &str) -> Result<PlanAssignment, OverrideError> {
    if text.is_empty() {
        return Err(OverrideError::Plan);
    }
    PlanAssignment::read(text).map_err(|diagnostics| OverrideError::Assignment(messages(&diagnostics)))
}

fn messages(diagnostics: &[Diagnostic]) -> String {
    let messages: Vec<&str> = diagnostics.iter().map(|diagnostic| diagnostic.message.as_str()).collect();
    messages.join("; ")
}

fn entries_of(entries: &[(String, String)]) -> SmallVec<[Entry<'_>; 4]> {
    entries.iter().map(|(key, value)| Entry { key, value }).collect()
}

/// Converts a time of expiry to seconds, rounded up and at least 1. Returns 0 for `None`.
fn expiry_seconds(until: Option<Micros>) -> u32 {
    match until {
        Some(until) => u32::try_from(until.ceil_secs()).unwrap_or(u32::MAX).max(1),
        None => 0,
    }
}
