//! A change of overrides, as an operator requests it ([`ChangeRequest`]) and as it was made ([`AppliedChange`]).
//!
//! A store holds overrides as texts. Before a write, [`check_values`] makes texts of them. [`ReadOverride`] reads the
//! texts of a change.

use super::{ChangeError, ChangeInfo, MAX_VALUE_BYTES, format};
use crate::{
    algorithm::Micros,
    engine::{
        Override, Overrides,
        overrides::{OverrideError, Target},
    },
    rules::Options,
    store::overrides::{Change, MAX_CHANGES, OverrideChange, Versioned},
};

/// A request to set or remove one override.
#[derive(Clone, Debug)]
pub struct ChangeRequest {
    /// The entity or rules that the override applies to.
    pub target: Target,
    /// The new value. `None` removes the override.
    pub value: Option<String>,
    /// The time at which the override expires; `None` if it does not expire.
    pub until: Option<Micros>,
    /// The version that the override must have now, or 0 if it must not exist. `None`: no condition.
    pub expected: Option<u64>,
}

impl ChangeRequest {
    /// Returns the override that the request sets at a time; `None` if it removes one.
    pub(super) fn entry(&self, info: &ChangeInfo, at: Micros) -> Option<Override> {
        let value = self.value.as_deref()?;
        Some(Override {
            target: self.target.clone(),
            value: value.into(),
            until: self.until,
            author: info.author.as_str().into(),
            reason: info.reason.as_str().into(),
            at,
            version: 0,
        })
    }

    /// Checks everything that does not depend on the current overrides.
    fn check(&self, info: &ChangeInfo, options: Options, now: Micros) -> Result<(), ChangeError> {
        let Some(entry) = self.entry(info, Micros::ZERO) else {
            return self.target.check().map_err(|error| self.invalid(error.into()));
        };
        Overrides::check(&entry, options).map_err(|error| self.invalid(error))?;
        Overrides::check_end(self.until, now).map_err(|error| self.invalid(error))?;
        Overrides::check_beginning(&entry, now).map_err(|error| self.invalid(error))
    }

    /// Returns the write that makes the requested change.
    pub(super) fn to_write(&self, info: &ChangeInfo) -> NewWrite {
        let entry = self.entry(info, Micros::new(info.at));
        NewWrite { target: self.target.clone(), entry, expected: self.expected }
    }

    fn invalid(&self, reason: OverrideError) -> ChangeError {
        ChangeError::Invalid { target: self.target.clone(), reason }
    }
}

/// Checks everything about requests that does not depend on the current overrides.
///
/// # Errors
///
/// Returns an error if a target, a value, an end, the author or the reason is invalid, if there are no requests or too
/// many, or if a target occurs twice.
pub(super) fn check(
    requests: &[ChangeRequest],
    info: &ChangeInfo,
    options: Options,
    now: Micros,
) -> Result<(), ChangeError> {
    info.check()?;
    let mut targets = Vec::new();
    for request in requests {
        if request.value.as_ref().is_some_and(|value| value.len() > MAX_VALUE_BYTES) {
            return Err(ChangeError::Info);
        }
        targets.push(&request.target);
    }
    targets.sort_unstable();
    targets.dedup();
    if !(1..=MAX_CHANGES).contains(&requests.len()) || targets.len() < requests.len() {
        return Err(ChangeError::Count);
    }
    for request in requests {
        request.check(info, options, now)?;
    }
    Ok(())
}

/// An override to write to the store, or to remove from it.
#[derive(Clone, Debug)]
pub(super) struct NewWrite {
    pub(super) target: Target,
    /// `None` removes the override.
    pub(super) entry: Option<Override>,
    /// As in [`ChangeRequest`].
    pub(super) expected: Option<u64>,
}

impl NewWrite {
    /// Returns a write that removes an override.
    pub(super) fn removal(entry: &Override) -> Self {
        Self { target: entry.target.clone(), entry: None, expected: Some(entry.version) }
    }
}

/// A write that was checked, with the new value as text; no text removes the override.
pub(super) struct CheckedWrite {
    pub(super) target: Target,
    pub(super) text: Option<String>,
    pub(super) expected: Option<u64>,
}

/// Checks writes against the current overrides.
///
/// # Errors
///
/// Returns an error if the overrides cannot have one of the values beside the others: other instances could not apply
/// such a change either.
pub(super) fn check_values(
    writes: Vec<NewWrite>,
    overrides: &Overrides,
    options: Options,
) -> Result<Vec<CheckedWrite>, ChangeError> {
    let mut overrides = overrides.clone();
    let mut checked = Vec::new();
    for NewWrite { target, entry, expected } in writes {
        let mut text = None;
        if let Some(entry) = entry {
            text = Some(format::write(&entry));
            if let Err(reason) = put(&mut overrides, entry, options) {
                return Err(ChangeError::Invalid { target, reason });
            }
        }
        checked.push(CheckedWrite { target, text, expected });
    }
    Ok(checked)
}

/// Puts an override that an operator sets. A planned one must also be possible after its beginning.
fn put(overrides: &mut Overrides, entry: Override, options: Options) -> Result<(), OverrideError> {
    if entry.target.beginning().is_some() {
        overrides.can_put(&entry, options)?;
    }
    overrides.put(entry, options)
}

/// The next change without its overrides: an id, and the author and reason as text.
pub(super) struct ChangeHead {
    pub(super) id: String,
    pub(super) info: String,
}

impl ChangeHead {
    pub(super) fn new(info: &ChangeInfo) -> Self {
        Self { id: format!("{:016x}", rand::random::<u64>()), info: serde_json::to_string(info).unwrap_or_default() }
    }
}

/// A change that was accepted.
#[derive(Clone, Debug)]
pub struct AppliedChange {
    /// The version of the change; 0 if it applies to this instance only.
    pub version: u64,
    /// The author, time and reason.
    pub info: ChangeInfo,
    /// The changed overrides.
    pub changes: Vec<ChangedOverride>,
}

/// An override before and after a change.
#[derive(Clone, Debug)]
pub struct ChangedOverride {
    /// The target of the override.
    pub target: Target,
    /// The override before, or `None` if there was none.
    pub before: Option<Override>,
    /// The override after, or `None` if it was removed.
    pub after: Option<Override>,
    /// The additional hits of a higher limit that were refunded to the counter.
    pub refunded_hits: u64,
}

impl AppliedChange {
    /// Reads a change of a store.
    pub(super) fn read(change: &Change) -> Self {
        let mut applied = Self::without_overrides(change);
        for one in &change.changes {
            if let Some(read) = ReadOverride::new(one, change.version) {
                applied.changes.push(read.into_changed());
            }
        }
        applied
    }

    /// Reads a change of a store without its overrides.
    pub(super) fn without_overrides(change: &Change) -> Self {
        let info = serde_json::from_str(&change.info).unwrap_or_default();
        Self { version: change.version, info, changes: Vec::new() }
    }
}

/// The value of a target after a change.
#[derive(Clone, Debug)]
pub(super) enum NewValue {
    Set(Override),
    Removed,
    /// A text that this version of the service cannot read. Another version may be able to.
    Unreadable,
}

/// An override of a change, read from the texts of a store.
pub(super) struct ReadOverride {
    pub(super) target: Target,
    pub(super) before: Option<Override>,
    pub(super) after: NewValue,
}

impl ReadOverride {
    /// Reads an override of a change with this version. Returns `None` if the target cannot be read.
    pub(super) fn new(change: &OverrideChange, version: u64) -> Option<Self> {
        let target = Target::parse(&change.target).ok()?;
        let mut before = None;
        if let Some(text) = &change.before {
            before = format::read_value(&target, 0, text);
        }
        let after = match &change.after {
            Some(text) => match format::read_value(&target, version, text) {
                Some(entry) => NewValue::Set(entry),
                None => NewValue::Unreadable,
            },
            None => NewValue::Removed,
        };
        Some(Self { target, before, after })
    }

    pub(super) fn into_changed(self) -> ChangedOverride {
        let after = match self.after {
            NewValue::Set(entry) => Some(entry),
            NewValue::Removed | NewValue::Unreadable => None,
        };
        ChangedOverride { target: self.target, before: self.before, after, refunded_hits: 0 }
    }
}

/// Returns all overrides of the store as the store holds them.
pub(super) fn all_versioned(overrides: &Overrides) -> Vec<Versioned> {
    let mut all = Vec::new();
    for entry in overrides.iter() {
        all.push((entry.target.to_string(), entry.version, format::write(&entry)));
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::overrides::Scope;

    #[test]
    fn a_value_has_at_most_the_maximum_length() {
        let check = |bytes: usize| {
            let (target, value) = (Target::Switch(Scope::Everything), Some("x".repeat(bytes)));
            let request = ChangeRequest { target, value, until: None, expected: None };
            let info = ChangeInfo { author: "alice".into(), ..ChangeInfo::default() };
            check(&[request], &info, Options::default(), Micros::ZERO)
        };
        assert!(matches!(check(MAX_VALUE_BYTES), Err(ChangeError::Invalid { .. })));
        assert!(matches!(check(MAX_VALUE_BYTES + 1), Err(ChangeError::Info)));
    }
}
