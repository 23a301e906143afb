//! [`Target`] of an override, and its text form, such as `limit|api|user=bob|path=/v1/charges`. The text of a planned
//! override starts with the time at which it begins: `planned|2026-12-01T00:00:00Z|limit|api|user=bob`.

use std::{
    fmt,
    time::{Duration, UNIX_EPOCH},
};

use percent_encoding::percent_decode_str;
use sluicegate_algorithm::{Algorithm, Micros};
use sluicegate_placement::{ESCAPED, escape};
use sluicegate_rules::Entry;

use crate::bounded;

/// Maximum length of a target's text, in bytes. A value has at most 1,024 bytes ([`bounded`]), or 3,072 if all are
/// escaped.
const MAX_BYTES: usize = 4_096;
/// Maximum number of entries in a target.
const MAX_ENTRIES: usize = 16;

/// The entity or rules that an override applies to.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Target {
    /// The limit of every descriptor that begins with these entries.
    Limit {
        /// The domain.
        domain: String,
        /// Keys and values.
        entries: Vec<(String, String)>,
    },
    /// The plan of every request with this entry.
    Plan {
        /// The domain.
        domain: String,
        /// The entry's key.
        key: String,
        /// The entry's value.
        value: String,
    },
    /// The mode of the rules in a scope.
    Switch(Scope),
    /// A set of rules that replaces the rule files, or is evaluated in addition.
    Rules(RuleSetSlot),
    /// A target whose override begins later, as if it were set then.
    Planned {
        /// The beginning in seconds since the Unix epoch.
        from_seconds: u32,
        /// A limit, a plan or a switch.
        target: Box<Target>,
    },
}

/// The use of a set of rules.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleSetSlot {
    /// Candidate rules.
    Candidate,
    /// The rules in force, instead of the rule directory.
    InForce,
    /// The rules that were in force before.
    Previous,
}

impl RuleSetSlot {
    /// All slots.
    pub const ALL: [Self; 3] = [Self::Candidate, Self::InForce, Self::Previous];

    /// Returns the name of the slot in the text form of a target.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Candidate => "candidate",
            Self::InForce => "in_force",
            Self::Previous => "before",
        }
    }
}

/// The rules that a switch applies to. If several scopes contain a rule, the first listed variant decides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// One rule, by the name of its limit or by its levels as shown by `/rlconfig`, such as `user.path_/v1`.
    Rule {
        /// The domain.
        domain: String,
        /// The rule's name.
        rule: String,
    },
    /// All rules with an algorithm, or all rules that shed (`shedding`).
    Algorithm(String),
    /// All rules of a domain.
    Domain(String),
    /// All rules.
    Everything,
}

/// The name of the scope of rules that shed.
pub(super) const SHEDDING: &str = "shedding";

impl Scope {
    /// Returns the names that [`Scope::Algorithm`] can have.
    pub fn algorithms() -> impl Iterator<Item = &'static str> {
        Algorithm::named().map(|kind| kind.name).chain([SHEDDING])
    }
}

/// Error returned for an invalid target.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// The text is malformed.
    #[error("{0:?} is not an override target: expected a text such as limit|api|user=bob")]
    Malformed(String),
    /// The text is too long, or has too many entries.
    #[error("an override target has at most {MAX_BYTES} bytes and {MAX_ENTRIES} entries")]
    TooLong,
    /// The domain, the list of entries, a key or another name is empty.
    #[error("the override target has no entries, or its domain, a key or another name is empty")]
    Empty,
    /// The target of a planned override is neither a limit nor a plan nor a switch.
    #[error("only a limit, a plan or a switch can begin later")]
    NotPlannable,
}

impl Target {
    /// Returns the target for the limit of a descriptor.
    #[must_use]
    pub fn of_descriptor(domain: &str, entries: &[Entry<'_>]) -> Self {
        let entries = entries.iter().map(|entry| (entry.key.to_owned(), bounded(entry.value).into_owned())).collect();
        Self::Limit { domain: domain.to_owned(), entries }
    }

    /// Returns the target with long values in their [`bounded`] form, as all targets of overrides have them.
    #[must_use]
    pub fn with_bounded_values(self) -> Self {
        match self {
            Self::Limit { domain, entries } => {
                let entries = entries.into_iter().map(|(key, value)| (key, bounded(&value).into_owned()));
                Self::Limit { domain, entries: entries.collect() }
            }
            Self::Plan { domain, key, value } => Self::Plan { domain, key, value: bounded(&value).into_owned() },
            Self::Switch(_) | Self::Rules(_) => self,
            Self::Planned { from_seconds, target } => {
                Self::Planned { from_seconds, target: Box::new(target.with_bounded_values()) }
            }
        }
    }

    /// Returns the target of an override that begins at a time, which is rounded up to a full second. Returns `None` if
    /// the seconds since the Unix epoch exceed 32 bits.
    #[must_use]
    pub fn planned(self, from: Micros) -> Option<Self> {
        let from_seconds = u32::try_from(from.ceil_secs()).ok()?;
        Some(Self::Planned { from_seconds, target: Box::new(self) })
    }

    /// Returns the time at which the override of a planned target begins; `None` for other targets.
    #[must_use]
    pub fn beginning(&self) -> Option<Micros> {
        match self {
            Self::Planned { from_seconds, .. } => Some(Micros::from_secs((*from_seconds).into())),
            Self::Limit { .. } | Self::Plan { .. } | Self::Switch(_) | Self::Rules(_) => None,
        }
    }

    /// Returns the target to which the override applies once it has begun.
    #[must_use]
    pub fn begun(&self) -> &Self {
        match self {
            Self::Planned { target, .. } => target,
            Self::Limit { .. } | Self::Plan { .. } | Self::Switch(_) | Self::Rules(_) => self,
        }
    }

    /// Checks whether the target is valid.
    ///
    /// # Errors
    ///
    /// Returns an error if a name is empty or the target is too large.
    pub fn check(&self) -> Result<(), TargetError> {
        self.check_length(self.to_string().len())
    }

    /// Checks the target, given the length of its text.
    fn check_length(&self, length: usize) -> Result<(), TargetError> {
        if let Self::Planned { target, .. } = self
            && matches!(**target, Self::Rules(_) | Self::Planned { .. })
        {
            return Err(TargetError::NotPlannable);
        }
        let begun = self.begun();
        let empty = match begun {
            Self::Limit { domain, entries } => {
                domain.is_empty() || entries.is_empty() || entries.iter().any(|(key, _)| key.is_empty())
            }
            Self::Plan { domain, key, .. } => domain.is_empty() || key.is_empty(),
            Self::Switch(Scope::Rule { domain, rule }) => domain.is_empty() || rule.is_empty(),
            Self::Switch(Scope::Algorithm(name) | Scope::Domain(name)) => name.is_empty(),
            Self::Switch(Scope::Everything) | Self::Rules(_) | Self::Planned { .. } => false,
        };
        if empty {
            return Err(TargetError::Empty);
        }
        let entries = if let Self::Limit { entries, .. } = begun { entries.len() } else { 0 };
        if entries > MAX_ENTRIES || length > MAX_BYTES {
            return Err(TargetError::TooLong);
        }
        Ok(())
    }

    /// Parses the text form that [`fmt::Display`] writes.
    ///
    /// # Errors
    ///
    /// Returns an error if the text is malformed or the target is invalid.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        if let Some(planned) = text.strip_prefix(PLANNED) {
            return Self::parse_planned(planned).unwrap_or_else(|| Err(malformed(text)));
        }
        let mut parts = text.split('|');
        let kind = parts.next().unwrap_or_default();
        let parts: Vec<&str> = parts.collect();
        let target = match (kind, parts.as_slice()) {
            ("limit", [domain, entries @ ..]) => {
                let entries = entries.iter().map(|entry| read_entry(entry)).collect::<Option<_>>();
                Self::Limit { domain: decode(domain), entries: entries.ok_or_else(|| malformed(text))? }
            }
            ("plan", [domain, entry]) => {
                let (key, value) = read_entry(entry).ok_or_else(|| malformed(text))?;
                Self::Plan { domain: decode(domain), key, value }
            }
            ("switch", ["everything"]) => Self::Switch(Scope::Everything),
            ("switch", ["domain", domain]) => Self::Switch(Scope::Domain(decode(domain))),
            ("switch", ["kind", kind]) => Self::Switch(Scope::Algorithm(decode(kind))),
            ("switch", ["rule", domain, rule]) => {
                Self::Switch(Scope::Rule { domain: decode(domain), rule: decode(rule) })
            }
            ("rules", [slot]) => {
                let slot = RuleSetSlot::ALL.into_iter().find(|other| other.name() == *slot);
                Self::Rules(slot.ok_or_else(|| malformed(text))?)
            }
            _ => return Err(malformed(text)),
        };
        let target = target.with_bounded_values();
        // The text that is stored can be up to three times as long, because `parse` also accepts unescaped characters.
        let is_surely_short = 3 * text.len() <= MAX_BYTES;
        target.check_length(if is_surely_short { text.len() } else { target.to_string().len() })?;
        Ok(target)
    }

    /// Parses the beginning and the target of a planned override. Returns `None` if one of them is malformed.
    fn parse_planned(text: &str) -> Option<Result<Self, TargetError>> {
        let (from, begun) = text.split_once('|')?;
        if begun.starts_with(PLANNED) {
            return None;
        }
        let time = humantime::parse_rfc3339(from).ok()?.duration_since(UNIX_EPOCH).ok()?;
        let from_seconds = u32::try_from(time.as_secs()).ok()?;
        // A beginning has one text, so that a target has one name in the store.
        if time_text(from_seconds) != from {
            return None;
        }
        let target = match Self::parse(begun) {
            Ok(target) => Self::Planned { from_seconds, target: Box::new(target) },
            Err(error) => return Some(Err(error)),
        };
        Some(target.check().map(|()| target))
    }
}

/// Beginning of the texts of targets of planned overrides.
const PLANNED: &str = "planned|";

/// Returns a time as the target of a planned override contains it, such as `2026-12-01T00:00:00Z`.
fn time_text(seconds: u32) -> String {
    humantime::format_rfc3339_seconds(UNIX_EPOCH + Duration::from_secs(seconds.into())).to_string()
}

fn malformed(text: &str) -> TargetError {
    TargetError::Malformed(text.to_owned())
}

fn read_entry(entry: &str) -> Option<(String, String)> {
    let (key, value) = entry.split_once('=')?;
    Some((decode(key), decode(value)))
}

fn decode(text: &str) -> String {
    percent_decode_str(text).decode_utf8_lossy().into_owned()
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = Vec::new();
        match self {
            Self::Limit { domain, entries } => {
                append_part(&mut text, "limit|", domain);
                for (key, value) in entries {
                    append_part(&mut text, "|", key);
                    append_part(&mut text, "=", value);
                }
            }
            Self::Plan { domain, key, value } => {
                append_part(&mut text, "plan|", domain);
                append_part(&mut text, "|", key);
                append_part(&mut text, "=", value);
            }
            Self::Rules(slot) => append_part(&mut text, "rules|", slot.name()),
            Self::Switch(Scope::Everything) => append_part(&mut text, "switch|", "everything"),
            Self::Switch(Scope::Domain(domain)) => append_part(&mut text, "switch|domain|", domain),
            Self::Switch(Scope::Algorithm(algorithm)) => append_part(&mut text, "switch|kind|", algorithm),
            Self::Switch(Scope::Rule { domain, rule }) => {
                append_part(&mut text, "switch|rule|", domain);
                append_part(&mut text, "|", rule);
            }
            Self::Planned { from_seconds, target } => {
                return write!(f, "{PLANNED}{}|{target}", time_text(*from_seconds));
            }
        }
        f.write_str(&String::from_utf8_lossy(&text))
    }
}

/// Appends a separator, and a part in which separators are escaped.
fn append_part(text: &mut Vec<u8>, separator: &str, part: &str) {
    text.extend_from_slice(separator.as_bytes());
    escape(text, part, ESCAPED);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_target_reads_like_a_counter() {
        let entries = vec![("user".into(), "b|b".into()), ("path".into(), "/v1/x=y".into())];
        let target = Target::Limit { domain: "api".into(), entries };
        assert_eq!(target.to_string(), "limit|api|user=b%7Cb|path=/v1/x%3Dy");
    }

    #[test]
    fn rejects_targets_that_name_nothing() {
        for text in [
            "",
            "limit",
            "limit|api",
            "limit|api|user",
            "limit||a=b",
            "limit|api|=b",
            "plan|api",
            "plan|api|a",
            "switch",
            "switch|all",
            "switch|rule|api",
            "switch|rule|api|",
            "switch|kind|",
            "plan|api|a=b|c=d",
            "other|x",
            "planned",
            "planned|2026-12-01T00:00:00Z",
            "planned|2026-12-01T00:00:00Z|",
            "planned|2026-12-01T00:00:00Z|rules|in_force",
            "planned|2026-12-01T00:00:00Z|planned|2026-12-01T00:00:00Z|switch|everything",
            "planned|2026-12-01T00:00:00Z|limit|api",
            "planned|2026-12-01T00:00:00.000Z|switch|everything",
            "planned|2026-12-01T00:00:00.5Z|switch|everything",
            "planned|2026-12-01T00:00:00|switch|everything",
            "planned|2026-12-01T01:00:00+01:00|switch|everything",
            "planned|2106-02-07T06:28:16Z|switch|everything",
            "planned|1969-12-31T23:59:59Z|switch|everything",
            "planned|soon|switch|everything",
        ] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
        let long = Target::Plan { domain: "d".into(), key: "k".repeat(MAX_BYTES), value: "v".into() };
        assert_eq!(long.check(), Err(TargetError::TooLong));
        let many = Target::Limit { domain: "d".into(), entries: vec![("k".into(), String::new()); MAX_ENTRIES + 1] };
        assert_eq!(many.check(), Err(TargetError::TooLong));
        for nameless in [
            Target::Limit { domain: "d".into(), entries: vec![(String::new(), "v".into())] },
            Target::Plan { domain: "d".into(), key: String::new(), value: "v".into() },
            Target::Switch(Scope::Rule { domain: "d".into(), rule: "".into() }),
        ] {
            assert_eq!(nameless.check(), Err(TargetError::Empty), "{nameless}");
        }
    }

    #[test]
    fn the_target_of_a_planned_override_has_its_beginning_before_it() {
        let limit = Target::Limit { domain: "api".into(), entries: vec![("user".into(), "b|b".into())] };
        let planned = limit.clone().planned(Micros::new(1_796_083_199_000_001)).unwrap();
        assert_eq!(planned.to_string(), "planned|2026-12-01T00:00:00Z|limit|api|user=b%7Cb");
        assert_eq!(planned.beginning(), Some(Micros::from_secs(1_796_083_200)));
        assert_eq!((planned.begun(), limit.begun(), limit.beginning()), (&limit, &limit, None));
        assert_eq!(limit.clone().planned(Micros::from_secs(1 << 32)), None);
        let latest = limit.planned(Micros::from_secs((1 << 32) - 1)).unwrap();
        assert_eq!(Target::parse(&latest.to_string()), Ok(latest));
        let rules = Target::Rules(RuleSetSlot::InForce).planned(Micros::ZERO).unwrap();
        assert_eq!(rules.check(), Err(TargetError::NotPlannable));
        let long = Target::Plan { domain: "d".into(), key: "k".repeat(MAX_BYTES - 20), value: "v".into() };
        assert_eq!((long.check(), long.planned(Micros::ZERO).unwrap().check()), (Ok(()), Err(TargetError::TooLong)));
        let many = "planned|2026-12-01T00:00:00Z|".repeat(100_000);
        assert!(Target::parse(&many).is_err());
    }

    #[test]
    fn accepts_targets_up_to_the_maximum_length_and_number_of_entries() {
        let plan = |length| Target::Plan { domain: "d".into(), key: "k".repeat(length), value: "v".into() };
        let max_length = MAX_BYTES - plan(0).to_string().len();
        assert_eq!((plan(max_length).check(), plan(max_length + 1).check()), (Ok(()), Err(TargetError::TooLong)));
        let max_entries = Target::Limit { domain: "d".into(), entries: vec![("k".into(), String::new()); MAX_ENTRIES] };
        assert_eq!(max_entries.check(), Ok(()));
    }

    fn text() -> impl Strategy<Value = String> {
        "[a|=%{}*~é \n]{1,5}"
    }

    fn target() -> impl Strategy<Value = Target> {
        let planned = (any::<u32>(), plannable_target())
            .prop_map(|(from_seconds, target)| Target::Planned { from_seconds, target: Box::new(target) });
        let rules = prop::sample::select(RuleSetSlot::ALL.to_vec()).prop_map(Target::Rules);
        prop_oneof![6 => plannable_target(), 1 => rules, 2 => planned]
    }

    fn plannable_target() -> impl Strategy<Value = Target> {
        prop_oneof![
            (text(), prop::collection::vec((text(), ".{0,4}"), 1..4))
                .prop_map(|(domain, entries)| Target::Limit { domain, entries }),
            (text(), text(), ".{0,4}").prop_map(|(domain, key, value)| Target::Plan { domain, key, value }),
            (text(), text()).prop_map(|(domain, rule)| Target::Switch(Scope::Rule { domain, rule })),
            text().prop_map(|domain| Target::Switch(Scope::Domain(domain))),
            text().prop_map(|kind| Target::Switch(Scope::Algorithm(kind))),
            Just(Target::Switch(Scope::Everything)),
        ]
    }

    #[test]
    fn long_values_have_their_bounded_form_and_are_valid() {
        let value = "\u{ffff}".repeat(50_000);
        let of_descriptor = Target::of_descriptor("d", &[Entry { key: "k", value: &value }; 8]);
        assert_eq!(of_descriptor.check(), Ok(()));
        let entries = vec![("k".to_owned(), value.clone()); 8];
        let raw = Target::Limit { domain: "d".into(), entries };
        assert_eq!(Target::parse(&raw.to_string()), Ok(of_descriptor));
        let plan = Target::Plan { domain: "d".into(), key: "k".into(), value: value.clone() };
        let bounded = Target::Plan { domain: "d".into(), key: "k".into(), value: bounded(&value).into() };
        assert_eq!(plan.with_bounded_values(), bounded);
    }

    proptest! {
        #[test]
        fn parsing_the_text_of_a_target_returns_the_target(target in target()) {
            prop_assert_eq!(Target::parse(&target.to_string()).unwrap(), target);
        }
    }
}
