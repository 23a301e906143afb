//! What a override is about, and the text that it is kept under: `limit|api|user=bob|path=/v1/charges`.

use std::fmt;

use percent_encoding::percent_decode_str;
use sluicegate_common::{ESCAPED, escape};

use crate::rules::Entry;

/// The longest text of a target, in bytes.
const LONGEST: usize = 1_024;
/// The most entries that a target names.
const MOST_ENTRIES: usize = 16;

/// What a override is about.
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
        /// And its value.
        value: String,
    },
    /// What is enforced.
    Switch(Scope),
    /// A set of rules, in place of the files' or beside it.
    Rules(RuleSetSlot),
}

/// What a set of rules is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RuleSetSlot {
    /// It is tried out.
    Candidate,
    /// It is in force, in place of the directory's.
    InForce,
    /// It was in force before.
    Previous,
}

impl RuleSetSlot {
    const ALL: [Self; 3] = [Self::Candidate, Self::InForce, Self::Previous];

    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Candidate => "candidate",
            Self::InForce => "in_force",
            Self::Previous => "before",
        }
    }
}

/// What a switch is for. Of several that fit a rule, the one that stands first here decides.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Scope {
    /// One rule, by the name of its limit or its levels as `/rlconfig` has them: `user.path_/v1`.
    Rule {
        /// The domain.
        domain: String,
        /// The rule's name.
        rule: String,
    },
    /// All rules of an algorithm, or all that refuse for overload (`shedding`).
    Algorithm(String),
    /// All rules of a domain.
    Domain(String),
    /// All.
    Everything,
}

/// The kind of all rules that refuse for overload.
pub(super) const SHEDDING: &str = "shedding";

/// A text that names nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TargetError {
    /// It is not of the form.
    #[error("{0:?} names nothing that a override could be about")]
    Form(String),
    /// It is too long.
    #[error("what a override is about has {LONGEST} bytes and {MOST_ENTRIES} entries at most")]
    TooLong,
    /// Something has no name.
    #[error("a override needs a domain, and entries with keys")]
    Empty,
}

impl Target {
    /// The limit of a descriptor.
    #[must_use]
    pub fn of_descriptor(domain: &str, entries: &[Entry<'_>]) -> Self {
        let entries = entries.iter().map(|entry| (entry.key.to_owned(), entry.value.to_owned())).collect();
        Self::Limit { domain: domain.to_owned(), entries }
    }

    /// Whether it can be one.
    pub fn check(&self) -> Result<(), TargetError> {
        self.check_length(self.to_string().len())
    }

    /// The same where the length of its text is known.
    fn check_length(&self, length: usize) -> Result<(), TargetError> {
        let empty = match self {
            Self::Limit { domain, entries } => {
                domain.is_empty() || entries.is_empty() || entries.iter().any(|(key, _)| key.is_empty())
            }
            Self::Plan { domain, key, .. } => domain.is_empty() || key.is_empty(),
            Self::Switch(Scope::Rule { domain, rule }) => domain.is_empty() || rule.is_empty(),
            Self::Switch(Scope::Algorithm(name) | Scope::Domain(name)) => name.is_empty(),
            Self::Switch(Scope::Everything) | Self::Rules(_) => false,
        };
        if empty {
            return Err(TargetError::Empty);
        }
        let entries = if let Self::Limit { entries, .. } = self { entries.len() } else { 0 };
        if entries > MOST_ENTRIES || length > LONGEST {
            return Err(TargetError::TooLong);
        }
        Ok(())
    }

    /// Reads what [`fmt::Display`] writes.
    pub fn parse(text: &str) -> Result<Self, TargetError> {
        let malformed = || TargetError::Form(text.to_owned());
        let mut parts = text.split('|');
        let kind = parts.next().unwrap_or_default();
        let parts: Vec<&str> = parts.collect();
        let target = match (kind, parts.as_slice()) {
            ("limit", [domain, entries @ ..]) => {
                let entries = entries.iter().map(|entry| read_entry(entry)).collect::<Option<_>>();
                Self::Limit { domain: decode(domain), entries: entries.ok_or_else(malformed)? }
            }
            ("plan", [domain, entry]) => {
                let (key, value) = read_entry(entry).ok_or_else(malformed)?;
                Self::Plan { domain: decode(domain), key, value }
            }
            ("switch", ["everything"]) => Self::Switch(Scope::Everything),
            ("switch", ["domain", domain]) => Self::Switch(Scope::Domain(decode(domain))),
            ("switch", ["kind", kind]) => Self::Switch(Scope::Algorithm(decode(kind))),
            ("switch", ["rule", domain, rule]) => {
                Self::Switch(Scope::Rule { domain: decode(domain), rule: decode(rule) })
            }
            ("rules", [slot]) => {
                let slot = RuleSetSlot::ALL.into_iter().find(|known| known.name() == *slot);
                Self::Rules(slot.ok_or_else(malformed)?)
            }
            _ => return Err(malformed()),
        };
        target.check_length(text.len())?;
        Ok(target)
    }
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
        let mut part = |between: &str, part: &str| {
            text.extend_from_slice(between.as_bytes());
            escape(&mut text, part, ESCAPED);
        };
        match self {
            Self::Limit { domain, entries } => {
                part("limit|", domain);
                for (key, value) in entries {
                    part("|", key);
                    part("=", value);
                }
            }
            Self::Plan { domain, key, value } => {
                part("plan|", domain);
                part("|", key);
                part("=", value);
            }
            Self::Rules(slot) => part("rules|", slot.name()),
            Self::Switch(Scope::Everything) => part("switch|", "everything"),
            Self::Switch(Scope::Domain(domain)) => part("switch|domain|", domain),
            Self::Switch(Scope::Algorithm(kind)) => part("switch|kind|", kind),
            Self::Switch(Scope::Rule { domain, rule }) => {
                part("switch|rule|", domain);
                part("|", rule);
            }
        }
        f.write_str(&String::from_utf8_lossy(&text))
    }
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
    fn what_names_nothing_is_refused() {
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
        ] {
            assert!(Target::parse(text).is_err(), "{text}");
        }
        let long = Target::Plan { domain: "d".into(), key: "k".into(), value: "v".repeat(LONGEST) };
        assert_eq!(long.check(), Err(TargetError::TooLong));
        let many = Target::Limit { domain: "d".into(), entries: vec![("k".into(), String::new()); MOST_ENTRIES + 1] };
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
    fn a_target_may_be_as_long_and_have_as_many_entries_as_is_said() {
        let plan = |letters| Target::Plan { domain: "d".into(), key: "k".into(), value: "v".repeat(letters) };
        let longest = LONGEST - plan(0).to_string().len();
        assert_eq!((plan(longest).check(), plan(longest + 1).check()), (Ok(()), Err(TargetError::TooLong)));
        let most = Target::Limit { domain: "d".into(), entries: vec![("k".into(), String::new()); MOST_ENTRIES] };
        assert_eq!(most.check(), Ok(()));
    }

    fn text() -> impl Strategy<Value = String> {
        "[a|=%{}*~é \n]{1,5}"
    }

    fn target() -> impl Strategy<Value = Target> {
        prop_oneof![
            (text(), prop::collection::vec((text(), ".{0,4}"), 1..4))
                .prop_map(|(domain, entries)| Target::Limit { domain, entries }),
            (text(), text(), ".{0,4}").prop_map(|(domain, key, value)| Target::Plan { domain, key, value }),
            (text(), text()).prop_map(|(domain, rule)| Target::Switch(Scope::Rule { domain, rule })),
            text().prop_map(|domain| Target::Switch(Scope::Domain(domain))),
            text().prop_map(|kind| Target::Switch(Scope::Algorithm(kind))),
            Just(Target::Switch(Scope::Everything)),
            prop::sample::select(RuleSetSlot::ALL.to_vec()).prop_map(Target::Rules),
        ]
    }

    proptest! {
        #[test]
        fn the_text_says_all_of_it(target in target()) {
            prop_assert_eq!(Target::parse(&target.to_string()).unwrap(), target);
        }
    }
}
