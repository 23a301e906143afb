//! Limits on the changes and overrides of another member: versions, sizes and contents.
//!
//! A member is limited to changes that operators can make by the admin API, and to versions so
//! low that every later change can have a higher one.

use super::{
    format::{self, MAX_TEXT_BYTES},
    rule_sets,
};
use crate::{
    algorithm::{MAX_NUMBER, Micros},
    engine::{
        Overrides,
        overrides::{Override, Target},
    },
    rules::Options,
    store::overrides::{Change, MAX_CHANGES, OverrideChange},
};

/// Highest version that is valid independently of the clock. No journal ever reaches this number of changes.
const VERSIONS_WITHOUT_CLOCK: u64 = 1 << 40;
/// Maximum difference between the clocks of two members. The highest valid version rises with the clock
/// ([`ValidVersions`]): a change that is valid by a clock which is ahead by this time is merged when it is valid here.
/// Changes with higher versions are ignored.
const MAX_CLOCK_DIFFERENCE: Micros = Micros::from_secs(86_400);
/// Maximum length of the text of a target. [`Target::parse`] has a lower one for its normal form.
const MAX_TARGET_BYTES: usize = 4_096;
/// Maximum length of the id of a change.
const MAX_ID_BYTES: usize = 256;
/// Maximum length of the information about a change. The reason may contain notes about conflicts.
const MAX_INFO_BYTES: usize = 32 << 10;
/// Maximum total number of bytes of the overrides in a journal. A small change of an operator may exceed it by a
/// sixteenth, and a small change of a member by an eighth. So overrides of a lying member leave room for operators, and
/// a member has room for every change that another member accepts from an operator.
const MAX_OVERRIDE_BYTES: usize = if cfg!(test) { 1 << 20 } else { 128 << 20 };
/// Maximum number of bytes of the recent changes in memory. Above it, changes of members are not merged, except small
/// ones up to an eighth more. The log of the journal has about four times this size.
const MAX_RECENT_BYTES: usize = 16 << 20;
/// Maximum number of bytes of a small change.
const SMALL_CHANGE_BYTES: usize = 8 << 10;

/// Versions that the changes of members can have now.
///
/// Honest members number their changes from 1. A lying one can send the highest valid version. A version is therefore
/// valid only up to [`VERSIONS_WITHOUT_CLOCK`] and the milliseconds since the Unix epoch: each millisecond leaves room
/// for one more change, until 2^53 in the year 250,000.
#[derive(Clone, Copy, Debug)]
pub(super) struct ValidVersions {
    max: u64,
    max_later: u64,
}

/// Whether a version is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Validity {
    Valid,
    /// The version is valid within a day. The clock of this instance may be behind that of the member.
    Later,
    Never,
}

impl ValidVersions {
    pub(super) fn at(now: Micros) -> Self {
        Self { max: max_version(now), max_later: max_version(now + MAX_CLOCK_DIFFERENCE) }
    }

    pub(super) const fn validity(self, version: u64) -> Validity {
        if version <= self.max {
            Validity::Valid
        } else if version <= self.max_later {
            Validity::Later
        } else {
            Validity::Never
        }
    }

    /// Returns the version, or a constant if it is never valid: members with different clocks must agree on it.
    /// Journals can have such versions, because release 0.1.0 stored every version of a member.
    pub(super) const fn repair(self, version: u64) -> u64 {
        match self.validity(version) {
            Validity::Valid | Validity::Later => version,
            Validity::Never => VERSIONS_WITHOUT_CLOCK,
        }
    }

    /// Returns the highest version that is valid now.
    #[cfg(test)]
    pub(super) const fn highest(self) -> u64 {
        self.max
    }
}

/// Returns the highest version that is valid at a time.
fn max_version(now: Micros) -> u64 {
    (VERSIONS_WITHOUT_CLOCK + now.get() / 1_000).min(MAX_NUMBER / 2)
}

/// A change of another member, read from its message.
pub(super) struct ReceivedChange {
    pub(super) version: u64,
    pub(super) id: String,
    pub(super) info: String,
    pub(super) overrides: Vec<ReceivedOverride>,
}

/// An override of another member, read from its message.
pub(super) struct ReceivedOverride {
    pub(super) target: Target,
    /// Its text before the change, if it comes with a change.
    pub(super) before: Option<String>,
    /// Its value, or `None` if it was removed.
    pub(super) after: Option<ReceivedValue>,
}

/// The value of an override, as text and as it was read.
pub(super) struct ReceivedValue {
    pub(super) text: String,
    pub(super) entry: Override,
}

/// Reads the value of a target. Returns `None` if no operator could have set it.
pub(super) fn read_value(
    target: &Target,
    version: u64,
    text: String,
    overrides: &Overrides,
    options: Options,
) -> Option<ReceivedValue> {
    let entry = format::read_value(target, version, &text)?;
    let is_valid = match entry.target {
        Target::Rules(slot) => rule_sets::is_valid_value(slot, &entry.value),
        _ => overrides.can_put(&entry, options).is_ok(),
    };
    if is_valid { Some(ReceivedValue { text, entry }) } else { None }
}

/// Reads a target. Returns `None` if no operator could have named it.
pub(super) fn read_target(text: &str) -> Option<Target> {
    if text.len() > MAX_TARGET_BYTES {
        return None;
    }
    Target::parse(text).ok()
}

/// Reads a change of another member. Returns `None` if no operator could have made it.
pub(super) fn read_change(change: Change, overrides: &Overrides, options: Options) -> Option<ReceivedChange> {
    let Change { version, id, info, changes } = change;
    if id.len() > MAX_ID_BYTES || info.len() > MAX_INFO_BYTES || changes.len() > MAX_CHANGES {
        return None;
    }
    let mut received = ReceivedChange { version, id, info, overrides: Vec::new() };
    for OverrideChange { target, before, after } in changes {
        if before.as_ref().is_some_and(|text| text.len() > MAX_TEXT_BYTES) {
            return None;
        }
        let target = read_target(&target)?;
        let mut value = None;
        if let Some(text) = after {
            value = Some(read_value(&target, version, text, overrides, options)?);
        }
        received.overrides.push(ReceivedOverride { target, before, after: value });
    }
    Some(received)
}

/// Returns the bytes of a change.
pub(super) fn change_bytes(change: &Change) -> usize {
    let mut bytes = change.id.len() + change.info.len();
    for OverrideChange { target, before, after } in &change.changes {
        bytes += target.len();
        bytes += before.as_deref().unwrap_or_default().len();
        bytes += after.as_deref().unwrap_or_default().len();
    }
    bytes
}

/// Returns the bytes of an override.
pub(super) fn override_bytes(entry: &Override) -> usize {
    entry.target.to_string().len() + format::write(entry).len()
}

/// Returns whether the change of an operator may be made, given the total bytes of overrides. Members could not merge
/// a larger one.
pub(super) fn may_be_made(change: &Change, override_bytes: usize) -> bool {
    let bytes = change_bytes(change);
    let max = if bytes <= SMALL_CHANGE_BYTES { MAX_OVERRIDE_BYTES / 16 * 17 } else { MAX_OVERRIDE_BYTES };
    removes_only(change) || override_bytes + bytes <= max
}

fn removes_only(change: &Change) -> bool {
    change.changes.iter().all(|one| one.after.is_none())
}

/// Returns whether a change of a member may be merged, given the total bytes of overrides and of recent changes.
pub(super) fn has_room(change: &Change, override_bytes: usize, recent_bytes: usize) -> bool {
    let bytes = change_bytes(change);
    let mut max_override_bytes = MAX_OVERRIDE_BYTES;
    let mut max_recent_bytes = MAX_RECENT_BYTES;
    if bytes <= SMALL_CHANGE_BYTES {
        max_override_bytes += MAX_OVERRIDE_BYTES / 8;
        max_recent_bytes += MAX_RECENT_BYTES / 8;
    }
    let fits = removes_only(change) || override_bytes + bytes <= max_override_bytes;
    recent_bytes + bytes <= max_recent_bytes && fits
}

/// Returns whether an override of a member may be merged, given the total bytes of overrides.
pub(super) const fn has_room_for_override(text: &str, override_bytes: usize) -> bool {
    override_bytes + text.len() <= MAX_OVERRIDE_BYTES
}

#[cfg(test)]
mod tests {
    use super::{
        super::{MAX_AUTHOR_BYTES, MAX_REASON_BYTES, MAX_VALUE_BYTES},
        *,
    };

    const NOW: Micros = Micros::from_secs(1_763_672_400);

    #[test]
    fn every_number_of_changes_is_valid_whatever_the_clock_shows() {
        for now in [Micros::ZERO, NOW, Micros::new(u64::MAX)] {
            let versions = ValidVersions::at(now);
            for version in [0, 1, 1_000_000_000, VERSIONS_WITHOUT_CLOCK] {
                assert_eq!(versions.validity(version), Validity::Valid);
                assert_eq!(versions.repair(version), version);
            }
            assert_eq!(versions.validity(MAX_NUMBER), Validity::Never);
            assert_eq!(versions.repair(MAX_NUMBER), VERSIONS_WITHOUT_CLOCK);
            assert!(versions.highest() < MAX_NUMBER);
        }
    }

    #[test]
    fn each_millisecond_makes_one_more_version_valid() {
        let versions = ValidVersions::at(NOW);
        let highest = versions.highest();
        assert_eq!(versions.validity(highest), Validity::Valid);
        assert_eq!(versions.validity(highest + 1), Validity::Later);
        assert_eq!(ValidVersions::at(NOW + Micros::new(1_000)).validity(highest + 1), Validity::Valid);
        let day = MAX_CLOCK_DIFFERENCE.get() / 1_000;
        assert_eq!(versions.validity(highest + day), Validity::Later);
        assert_eq!(versions.validity(highest + day + 1), Validity::Never);
    }

    fn change(target: &str, after: Option<&str>) -> Change {
        let changes = vec![OverrideChange { target: target.into(), before: None, after: after.map(str::to_owned) }];
        Change { version: 1, id: "id".into(), info: "{}".into(), changes }
    }

    fn text(value: &str, author: &str, reason: &str) -> String {
        serde_json::json!({ "w": value, "a": author, "r": reason, "t": 1 }).to_string()
    }

    #[test]
    fn only_overrides_that_operators_can_set_are_valid() {
        let is_valid = |target: &str, text: &str| {
            let (overrides, options) = (Overrides::default(), Options::default());
            read_change(change(target, Some(text)), &overrides, options).is_some()
        };
        let target = "limit|api|user=bob";
        assert!(is_valid(target, &text("5/day", "alice", "")));
        assert!(is_valid("switch|everything", &text("deny", "alice", "")));
        let long = |bytes| "x".repeat(bytes);
        assert!(is_valid(target, &text("5/day", &long(MAX_AUTHOR_BYTES), &long(MAX_REASON_BYTES))));
        assert!(!is_valid(target, &text("5/day", &long(MAX_AUTHOR_BYTES + 1), "")));
        assert!(!is_valid(target, &text("5/day", "alice", &long(MAX_REASON_BYTES + 1))));
        assert!(is_valid("plan|api|tenant=acme", &text(&long(MAX_VALUE_BYTES), "alice", "")));
        assert!(!is_valid("plan|api|tenant=acme", &text(&long(MAX_VALUE_BYTES + 1), "alice", "")));
        for (target, value) in [
            ("", "5/day"),
            ("limit|", "5/day"),
            (target, ""),
            (target, "?"),
            ("plan|api|tenant=acme", ""),
            ("switch|everything", "nothing"),
            ("rules|in_force", "../../x"),
            ("rules|candidate", "directory"),
            (&format!("limit|api|user={}", long(MAX_TARGET_BYTES)), "5/day"),
        ] {
            assert!(!is_valid(target, &text(value, "alice", "")), "{target} {value}");
        }
        for invalid in ["", "{", "{}", &" ".repeat(MAX_TEXT_BYTES + 1)] {
            assert!(!is_valid(target, invalid), "{invalid:.9}");
        }
    }

    #[test]
    fn only_changes_that_operators_can_make_are_valid() {
        let is_valid =
            |change: &Change| read_change(change.clone(), &Overrides::default(), Options::default()).is_some();
        let removal = change("limit|api|user=bob", None);
        assert!(is_valid(&removal));
        assert!(!is_valid(&change("limit|", None)));
        let (one, many) = (removal.changes.clone(), MAX_CHANGES);
        assert!(is_valid(&Change { changes: vec![one[0].clone(); many], ..removal.clone() }));
        assert!(!is_valid(&Change { changes: vec![one[0].clone(); many + 1], ..removal.clone() }));
        assert!(!is_valid(&Change { id: "x".repeat(MAX_ID_BYTES + 1), ..removal.clone() }));
        assert!(!is_valid(&Change { info: "x".repeat(MAX_INFO_BYTES + 1), ..removal.clone() }));
        let before = Some("x".repeat(MAX_TEXT_BYTES + 1));
        let long = OverrideChange { before, ..one[0].clone() };
        assert!(!is_valid(&Change { changes: vec![long], ..removal }));
    }

    #[test]
    fn small_changes_are_merged_while_large_ones_have_no_room() {
        let of = |bytes: usize| change("t", Some(&"x".repeat(bytes)));
        let (small, large) = (of(SMALL_CHANGE_BYTES / 2), of(2 * SMALL_CHANGE_BYTES));
        for change in [&small, &large] {
            assert!(has_room(change, 0, 0));
            assert!(!has_room(change, 2 * MAX_OVERRIDE_BYTES, 0) && !has_room(change, 0, 2 * MAX_RECENT_BYTES));
        }
        for (overrides, recent) in [(MAX_OVERRIDE_BYTES, 0), (0, MAX_RECENT_BYTES)] {
            assert!(has_room(&small, overrides, recent) && !has_room(&large, overrides, recent));
        }
        assert!(has_room(&change("t", None), 2 * MAX_OVERRIDE_BYTES, 0), "a removal needs no room");
        assert!(has_room_for_override("x", MAX_OVERRIDE_BYTES - 1) && !has_room_for_override("x", MAX_OVERRIDE_BYTES));
    }
}
