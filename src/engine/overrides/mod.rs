//! What operators say while the service runs, over what the rule files say: one customer's limit, an entity's plan, which
//! rules are enforced.
//!
//! [`Overrides`] is immutable for whoever decides: it belongs to the snapshot that a decision begins with, and a change
//! makes another one that shares all but what it touches. No I/O here: `service::overrides` keeps them.
//!
//! Of several that fit a request, the first of this list decides: a switch, an entity's limit, the plan, the rule.

mod interner;
mod switches;
mod table;
mod target;
#[cfg(test)]
mod tests;

pub use switches::{Mode, Modes, Origin};
pub use target::{RuleSetSlot, Scope, Target, TargetError};

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use foldhash::fast::RandomState;
use sluicegate_common::Identity;
use smallvec::SmallVec;

use self::{
    interner::Interner,
    switches::Switches,
    table::{Entity, EntityHash, Table, prefetch},
};
use crate::{
    algorithm::Micros,
    rules::{Allowance, CustomLimit, Entry, Options, Rule, RuleSet},
};

/// Of a domain, the lists of keys for which there are limits, at most: each may be looked up for every request.
const MAX_KEY_LISTS: usize = 32;

/// One thing that an operator said.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// What of.
    pub target: Target,
    /// What: the words of a limit, the name of a plan, the name of a mode.
    pub value: Arc<str>,
    /// Until when; for ever, if it does not say.
    pub until: Option<Micros>,
    /// Who said it.
    pub author: Arc<str>,
    /// And why.
    pub reason: Arc<str>,
    /// When.
    pub at: Micros,
    /// The change that made it so.
    pub version: u64,
}

impl Override {
    /// Whether its time has passed.
    #[must_use]
    pub fn is_expired(&self, now: Micros) -> bool {
        self.until.is_some_and(|until| until <= now)
    }
}

/// Why something cannot be a override.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OverrideError {
    /// What it is about.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The limit's words, with every mistake.
    #[error("{0}")]
    Limit(String),
    /// A mode.
    #[error("{0:?} is no mode: off, shadow, enforce or deny")]
    Mode(String),
    /// A plan.
    #[error("a plan has a name")]
    Plan,
    /// A set of rules.
    #[error("a set of rules is named by its digest")]
    Rules,
    /// Too many lists of keys.
    #[error(
        "domain {0:?} has limits for {MAX_KEY_LISTS} different lists of keys already; each costs every request of it a look"
    )]
    Shapes(String),
}

/// All of them.
#[derive(Clone)]
pub struct Overrides {
    secret: [u8; 16],
    limits: Table,
    plans: Table,
    limits_by_text: Arc<Interner<ParsedLimit>>,
    /// Names of plans, authors and reasons.
    texts: Arc<Interner<()>>,
    limit_shapes: Arc<Shapes>,
    plan_shapes: Arc<Shapes>,
    switches: Arc<Switches>,
    rules: Arc<BTreeMap<RuleSetSlot, Override>>,
    /// Of those that end: when, and what they are about.
    ends: Arc<BTreeSet<(Micros, Target)>>,
}

/// What the words of a limit mean.
#[derive(Clone)]
struct ParsedLimit {
    /// The terms' own: whoever asks for no more than that does not wait for them.
    allowance: Allowance,
    limit: Arc<CustomLimit>,
}

/// What an operator has given to an entity.
#[derive(Clone, Copy)]
pub(crate) struct EntityLimit<'s> {
    pub(crate) allowance: Allowance,
    pub(crate) limit: &'s CustomLimit,
    /// The number of entries that it is of.
    pub(crate) entries: usize,
}

/// The fingerprints under which a descriptor may have terms, each with the number of entries it is of, the most first.
pub(crate) struct OverrideLookup(SmallVec<[(EntityHash, u32); 1]>);

/// By domain: the lists of keys that overrides have, the longest first, and how many have each.
type Shapes = HashMap<Box<str>, Vec<(Box<[Box<str>]>, u32)>, RandomState>;

impl Default for Overrides {
    fn default() -> Self {
        Self {
            secret: rand::random(),
            limits: Table::default(),
            plans: Table::default(),
            limits_by_text: Arc::default(),
            texts: Arc::default(),
            limit_shapes: Arc::default(),
            plan_shapes: Arc::default(),
            switches: Arc::default(),
            rules: Arc::default(),
            ends: Arc::default(),
        }
    }
}

/// What is asked for every decision.
impl Overrides {
    /// Where the terms of a descriptor are, if it has any. The processor begins to fetch them: of many they are in no cache, and
    /// whoever has something else to do meanwhile does not wait for the memory.
    pub(crate) fn prepare_lookup(&self, domain: &str, entries: &[Entry<'_>]) -> OverrideLookup {
        let shapes = if self.limits.len() == 0 { None } else { self.limit_shapes.get(domain) };
        let fits = |keys: &[Box<str>]| {
            keys.len() <= entries.len() && keys.iter().zip(entries).all(|(key, entry)| **key == *entry.key)
        };
        let fitting = shapes.into_iter().flatten().filter(|(keys, _)| fits(keys));
        let seek = |(keys, _): &(Box<[Box<str>]>, u32)| {
            let of = self.fingerprint(domain, &entries[..keys.len()]);
            self.limits.prefetch(of);
            (of, keys.len() as u32)
        };
        OverrideLookup(fitting.map(seek).collect())
    }

    /// What the longest list of entries has that the descriptor begins with. The processor begins to fetch the terms.
    pub(crate) fn entity_limit(&self, sought: &OverrideLookup, now: Micros) -> Option<EntityLimit<'_>> {
        sought.0.iter().find_map(|(of, entries)| {
            let entity = self.limits.get(*of).filter(|entity| is_active(entity, now))?;
            let ParsedLimit { allowance, limit: terms } = self.limits_by_text.meaning(entity.value)?;
            prefetch(&**terms);
            Some(EntityLimit { allowance: *allowance, limit: terms, entries: *entries as usize })
        })
    }

    /// The plan of the last of the entries that has been given one.
    pub(crate) fn plan(&self, domain: &str, entries: &[Entry<'_>], now: Micros) -> Option<Arc<str>> {
        if self.plans.len() == 0 {
            return None;
        }
        let shapes = self.plan_shapes.get(domain)?;
        entries.iter().rev().filter(|entry| shapes.iter().any(|(keys, _)| *keys[0] == *entry.key)).find_map(|entry| {
            let entity = self.plans.get(self.fingerprint(domain, &[*entry])).filter(|entity| is_active(entity, now))?;
            Some(self.texts.text(entity.value))
        })
    }

    fn fingerprint(&self, domain: &str, entries: &[Entry<'_>]) -> EntityHash {
        let mut identity = Identity::keyed(&self.secret, domain);
        entries.iter().for_each(|entry| identity.add(entry.key, entry.value));
        identity.finish().into()
    }
}

fn is_active(entity: &Entity, now: Micros) -> bool {
    entity.until == 0 || u64::from(entity.until) > now.floor_secs()
}

/// What operators ask.
impl Overrides {
    /// All that stand over the rule of a descriptor, the first that decides at the head: a switch, its limit, its plan.
    pub(super) fn over_rule(
        &self,
        (domain, entries): (&str, &[Entry<'_>]),
        rule: Option<&Rule>,
        now: Micros,
    ) -> Vec<(Origin, Override)> {
        let thrown = |scope: &Scope| {
            let of = |origin: Origin| Some((origin, self.switches.of(origin).get(scope)?.clone()));
            Origin::ALL.into_iter().filter_map(of).find(|(_, switch)| !switch.is_expired(now))
        };
        let switch = switches::scopes(domain, rule).iter().find_map(thrown);
        let limit = self
            .entity_limit(&self.prepare_lookup(domain, entries), now)
            .and_then(|given| self.get(&Target::of_descriptor(domain, &entries[..given.entries])));
        let plan = entries.iter().rev().find_map(|entry| {
            let Entry { key, value } = *entry;
            self.get(&Target::Plan { domain: domain.to_owned(), key: key.to_owned(), value: value.to_owned() })
        });
        let stored = [limit, plan].into_iter().flatten().map(|entry| (Origin::Store, entry));
        switch.into_iter().chain(stored).collect()
    }
}

/// What operators do.
impl Overrides {
    /// What the switches make of these rules.
    #[must_use]
    pub fn modes(&self, rules: &RuleSet, now: Micros) -> Modes {
        Modes::new(&self.switches, rules, now)
    }

    /// Puts what decisions read together again after many changes; whether there was anything to do.
    pub fn gather(&mut self) -> bool {
        let (limits, plans) = (self.limits.gather(), self.plans.gather());
        limits || plans
    }

    /// Limits of entities, assignments of plans, and switches that the store holds.
    #[must_use]
    pub fn counts(&self) -> [usize; 3] {
        [self.limits.len(), self.plans.len(), self.switches.of(Origin::Store).len()]
    }

    /// Whether it would be understood.
    pub fn check(entry: &Override, options: Options) -> Result<(), OverrideError> {
        entry.target.check()?;
        match &entry.target {
            Target::Limit { .. } => read(&entry.value, options).map(drop),
            _ => Self::check_value(entry),
        }
    }

    fn check_value(entry: &Override) -> Result<(), OverrideError> {
        match &entry.target {
            // Read once for all that have the same.
            Target::Limit { .. } => Ok(()),
            Target::Plan { .. } if entry.value.is_empty() => Err(OverrideError::Plan),
            Target::Plan { .. } => Ok(()),
            Target::Switch(_) => match Mode::from_name(&entry.value) {
                Some(_) => Ok(()),
                None => Err(OverrideError::Mode(entry.value.to_string())),
            },
            Target::Rules(_) if entry.value.is_empty() => Err(OverrideError::Rules),
            Target::Rules(_) => Ok(()),
        }
    }

    /// Puts one in force, whose target can be one.
    pub fn put(&mut self, entry: Override, options: Options) -> Result<(), OverrideError> {
        Self::check_value(&entry)?;
        let until = entry.until.map(|until| Micros::from_secs(seconds(Some(until)).into()));
        let entry = Override { until, ..entry };
        match &entry.target {
            Target::Limit { domain, entries } => {
                let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
                let known = self.limit_shapes.get(domain.as_str());
                let is_new = known.is_none_or(|shapes| !shapes.iter().any(|(shape, _)| is_shape(shape, &keys)));
                if is_new && known.is_some_and(|shapes| shapes.len() >= MAX_KEY_LISTS) {
                    return Err(OverrideError::Shapes(domain.clone()));
                }
                let terms = Arc::make_mut(&mut self.limits_by_text);
                let value = match terms.used(&entry.value) {
                    Some(value) => value,
                    None => {
                        let meaning = Arc::new(read(&entry.value, options)?);
                        terms.add(&entry.value, ParsedLimit { allowance: meaning.allowance, limit: meaning })
                    }
                };
                let of = self.fingerprint(domain, &pairs(entries));
                let record = self.record(&entry);
                let until = seconds(entry.until);
                match self.limits.insert(of, value, until, &record) {
                    Some((entity, record)) => self.forget_limit(entity, &record, &entry.target),
                    None => add_shape(&mut self.limit_shapes, domain, &keys),
                }
            }
            Target::Plan { domain, key, value } => {
                let plan = self.text(&entry.value);
                let of = self.fingerprint(domain, &[Entry { key, value }]);
                let record = self.record(&entry);
                let until = seconds(entry.until);
                match self.plans.insert(of, plan, until, &record) {
                    Some((entity, record)) => self.forget_plan(entity, &record, &entry.target),
                    None => add_shape(&mut self.plan_shapes, domain, &[key]),
                }
            }
            Target::Switch(_) => self.set_switch(&entry, Origin::Store),
            Target::Rules(slot) => drop(Arc::make_mut(&mut self.rules).insert(*slot, entry.clone())),
        }
        if let (Some(until), Target::Limit { .. } | Target::Plan { .. }) = (entry.until, &entry.target) {
            Arc::make_mut(&mut self.ends).insert((until, entry.target));
        }
        Ok(())
    }

    /// Puts a switch in force.
    pub fn set_switch(&mut self, switch: &Override, origin: Origin) {
        if let Target::Switch(scope) = &switch.target {
            let switches = Arc::make_mut(&mut self.switches).of_mut(origin);
            let before = switches.insert(scope.clone(), switch.clone());
            self.note_ends(origin, before.as_ref(), Some(switch));
        }
    }

    /// Takes a switch back.
    pub fn clear_switch(&mut self, scope: &Scope, origin: Origin) -> Option<Override> {
        let before = Arc::make_mut(&mut self.switches).of_mut(origin).remove(scope);
        self.note_ends(origin, before.as_ref(), None);
        before
    }

    /// The store's overrides that end are told to it.
    fn note_ends(&mut self, origin: Origin, before: Option<&Override>, after: Option<&Override>) {
        if origin != Origin::Store {
            return;
        }
        let end = |switch: &Override| Some((switch.until?, switch.target.clone()));
        if let Some(end) = before.and_then(end) {
            Arc::make_mut(&mut self.ends).remove(&end);
        }
        if let Some(end) = after.and_then(end) {
            Arc::make_mut(&mut self.ends).insert(end);
        }
    }

    /// Puts these switches of one origin in force, and no others of it.
    pub fn set_switches(&mut self, switches: &[Override], origin: Origin) {
        Arc::make_mut(&mut self.switches).of_mut(origin).clear();
        switches.iter().for_each(|switch| self.set_switch(switch, origin));
    }

    /// What all of the store's would be added to.
    #[must_use]
    pub fn without_stored(&self) -> Self {
        let mut switches = (*self.switches).clone();
        switches.of_mut(Origin::Store).clear();
        Self { switches: Arc::new(switches), ..Self::default() }
    }

    /// The switches whose time is now, as [`Modes::in_force`] has them.
    #[must_use]
    pub fn switches_in_force(&self, now: Micros) -> Vec<(Scope, Mode, Origin)> {
        self.switches.in_force(now)
    }

    /// The switches of one origin.
    pub fn switches(&self, origin: Origin) -> impl Iterator<Item = &Override> {
        self.switches.of(origin).values()
    }

    /// Takes one of the store's out of force.
    pub fn remove(&mut self, target: &Target) -> Option<Override> {
        let before = self.get(target)?;
        match target {
            Target::Limit { domain, entries } => {
                let (entity, record) = self.limits.remove(self.fingerprint(domain, &pairs(entries)))?;
                self.forget_limit(entity, &record, target);
                let keys: Vec<&str> = entries.iter().map(|(key, _)| key.as_str()).collect();
                remove_shape(&mut self.limit_shapes, domain, &keys);
            }
            Target::Plan { domain, key, value } => {
                let (entity, record) = self.plans.remove(self.fingerprint(domain, &[Entry { key, value }]))?;
                self.forget_plan(entity, &record, target);
                remove_shape(&mut self.plan_shapes, domain, &[key]);
            }
            Target::Switch(scope) => drop(self.clear_switch(scope, Origin::Store)),
            Target::Rules(slot) => drop(Arc::make_mut(&mut self.rules).remove(slot)),
        }
        Some(before)
    }

    /// One of the store's.
    #[must_use]
    pub fn get(&self, target: &Target) -> Option<Override> {
        match target {
            Target::Limit { domain, entries } => {
                let entry = self.limits.entry(self.fingerprint(domain, &pairs(entries)))?;
                self.entry(entry, |number| self.limits_by_text.text(number))
            }
            Target::Plan { domain, key, value } => {
                let entry = self.plans.entry(self.fingerprint(domain, &[Entry { key, value }]))?;
                self.entry(entry, |number| self.texts.text(number))
            }
            Target::Switch(scope) => self.switches.of(Origin::Store).get(scope).cloned(),
            Target::Rules(slot) => self.rules.get(slot).cloned(),
        }
    }

    /// All of the store's, in no order.
    pub fn iter(&self) -> impl Iterator<Item = Override> {
        let limits =
            self.limits.iter().filter_map(|entry| self.entry(entry, |number| self.limits_by_text.text(number)));
        let plans = self.plans.iter().filter_map(|entry| self.entry(entry, |number| self.texts.text(number)));
        limits.chain(plans).chain(self.switches(Origin::Store).cloned()).chain(self.rules.values().cloned())
    }

    /// The set of rules in a slot: its digest, and what else the override says.
    #[must_use]
    pub fn rules(&self, slot: RuleSetSlot) -> Option<&Override> {
        self.rules.get(&slot)
    }

    /// Their texts alone, limits and plans, in no order.
    pub fn targets(&self) -> impl Iterator<Item = &str> {
        let records = self.limits.iter().chain(self.plans.iter());
        records.filter_map(|(_, record)| std::str::from_utf8(record.get(RECORD..)?).ok())
    }

    /// Those of the store whose time has passed, at most so many.
    pub fn over(&self, now: Micros, most: usize) -> impl Iterator<Item = Override> {
        let over = self.ends.iter().take_while(move |(until, _)| *until <= now).take(most);
        over.filter_map(|(_, target)| self.get(target))
    }

    fn text(&mut self, text: &str) -> u32 {
        let texts = Arc::make_mut(&mut self.texts);
        texts.used(text).unwrap_or_else(|| texts.add(text, ()))
    }

    fn forget_limit(&mut self, entity: Entity, record: &[u8], target: &Target) {
        Arc::make_mut(&mut self.limits_by_text).unused(entity.value);
        self.forget(entity, record, target);
    }

    fn forget_plan(&mut self, entity: Entity, record: &[u8], target: &Target) {
        Arc::make_mut(&mut self.texts).unused(entity.value);
        self.forget(entity, record, target);
    }

    fn forget(&mut self, entity: Entity, record: &[u8], target: &Target) {
        if let Some(record) = Record::read(record) {
            let texts = Arc::make_mut(&mut self.texts);
            texts.unused(record.author);
            texts.unused(record.reason);
        }
        if entity.until > 0 {
            Arc::make_mut(&mut self.ends).remove(&(Micros::from_secs(entity.until.into()), target.clone()));
        }
    }

    fn record(&mut self, entry: &Override) -> Box<[u8]> {
        let (author, reason) = (self.text(&entry.author), self.text(&entry.reason));
        let numbers = Record { version: entry.version, at: entry.at, author, reason };
        numbers.write(&entry.target.to_string())
    }

    fn entry(&self, (entity, record): (Entity, &[u8]), word: impl FnOnce(u32) -> Arc<str>) -> Option<Override> {
        let target = std::str::from_utf8(record.get(RECORD..)?).ok()?;
        let record = Record::read(record)?;
        Some(Override {
            target: Target::parse(target).ok()?,
            value: word(entity.value),
            until: (entity.until > 0).then(|| Micros::from_secs(entity.until.into())),
            author: self.texts.text(record.author),
            reason: self.texts.text(record.reason),
            at: record.at,
            version: record.version,
        })
    }
}

/// What is kept of a override beside what it says; its target's text follows.
struct Record {
    version: u64,
    at: Micros,
    author: u32,
    reason: u32,
}

const RECORD: usize = 20;

impl Record {
    fn write(&self, target: &str) -> Box<[u8]> {
        let mut bytes = Vec::with_capacity(RECORD + target.len());
        bytes.extend_from_slice(&self.version.to_le_bytes());
        // Of a million overrides the microseconds would take as much as the seconds.
        let at = u32::try_from(self.at.floor_secs()).unwrap_or(u32::MAX);
        bytes.extend_from_slice(&at.to_le_bytes());
        bytes.extend_from_slice(&self.author.to_le_bytes());
        bytes.extend_from_slice(&self.reason.to_le_bytes());
        bytes.extend_from_slice(target.as_bytes());
        bytes.into()
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (version, rest) = bytes.split_first_chunk()?;
        let (at, rest) = rest.split_first_chunk()?;
        let (author, rest) = rest.split_first_chunk()?;
        let (reason, _) = rest.split_first_chunk()?;
        Some(Self {
            version: u64::from_le_bytes(*version),
            at: Micros::from_secs(u32::from_le_bytes(*at).into()),
            author: u32::from_le_bytes(*author),
            reason: u32::from_le_bytes(*reason),
        })
    }
}

fn read(word: &str, options: Options) -> Result<CustomLimit, OverrideError> {
    let list = |problems: Vec<crate::rules::Diagnostic>| {
        problems.iter().map(|problem| problem.message.as_str()).collect::<Vec<_>>().join("; ")
    };
    CustomLimit::read(word, options).map_err(|problems| OverrideError::Limit(list(problems)))
}

fn pairs(entries: &[(String, String)]) -> SmallVec<[Entry<'_>; 4]> {
    entries.iter().map(|(key, value)| Entry { key, value }).collect()
}

/// Rounded up, and never 0.
fn seconds(until: Option<Micros>) -> u32 {
    until.map_or(0, |until| u32::try_from(until.ceil_secs()).unwrap_or(u32::MAX).max(1))
}

fn is_shape(shape: &[Box<str>], keys: &[&str]) -> bool {
    shape.iter().map(|key| &**key).eq(keys.iter().copied())
}

fn add_shape(shapes: &mut Arc<Shapes>, domain: &str, keys: &[&str]) {
    let shapes = Arc::make_mut(shapes).entry(domain.into()).or_default();
    match shapes.iter_mut().find(|(shape, _)| is_shape(shape, keys)) {
        Some((_, count)) => *count += 1,
        None => {
            shapes.push((keys.iter().map(|key| (*key).into()).collect(), 1));
            shapes.sort_by_key(|(shape, _)| std::cmp::Reverse(shape.len()));
        }
    }
}

fn remove_shape(shapes: &mut Arc<Shapes>, domain: &str, keys: &[&str]) {
    let all = Arc::make_mut(shapes);
    let Some(shapes) = all.get_mut(domain) else {
        return;
    };
    shapes.retain_mut(|(shape, count)| {
        *count -= u32::from(is_shape(shape, keys));
        *count > 0
    });
    if shapes.is_empty() {
        all.remove(domain);
    }
}
