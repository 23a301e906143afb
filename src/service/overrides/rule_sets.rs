//! Rule sets that overrides name by their digests, and [`PeerRuleSets`], those of another member.

use std::collections::{BTreeMap, BTreeSet};

use sha2::{Digest as _, Sha256};

use crate::engine::overrides::RuleSetSlot;

/// Maximum size of a rule set.
pub(in crate::service) const MAX_RULE_SET_BYTES: usize = 512 << 10;
/// Value of a slot that means the rules in each instance's own directory.
pub(in crate::service) const DIRECTORY: &str = "directory";
/// Maximum number of rule sets in memory while the overrides that name them are received.
const MAX_KEPT: usize = 16;

/// Returns the digest under which a rule set is stored.
pub(in crate::service) fn digest_of(text: &str) -> String {
    Sha256::digest(text.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Parses the value of the candidate slot: the digest and the share of the traffic.
pub(in crate::service) fn parse_candidate(value: &str) -> Option<(&str, f64)> {
    let (digest, share) = value.split_once(' ')?;
    Some((digest, share.parse().ok()?))
}

/// Returns the digest of the rule set that the value of a slot names; `None` for the rules in the directory.
pub(in crate::service) fn digest_in(value: &str) -> Option<&str> {
    value.split(' ').next().filter(|digest| *digest != DIRECTORY)
}

/// Returns whether the value of a slot has the form that [`Candidates`](crate::service::Candidates) writes.
pub(super) fn is_valid_value(slot: RuleSetSlot, value: &str) -> bool {
    if slot == RuleSetSlot::Candidate {
        return parse_candidate(value).is_some_and(|(digest, share)| is_digest(digest) && share > 0.0 && share <= 1.0);
    }
    value == DIRECTORY || is_digest(value)
}

fn is_digest(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

/// The rule sets of another member, received with its overrides. Each has its digest.
#[derive(Default)]
pub struct PeerRuleSets {
    texts: BTreeMap<String, String>,
    /// Rule sets that overrides in force name and this instance does not have.
    wanted: BTreeSet<String>,
    /// Rule sets that may have to be deleted when all overrides are merged.
    pub(super) obsolete: BTreeSet<String>,
}

impl PeerRuleSets {
    /// Keeps rule sets until their overrides arrive. Returns the number of rule sets that are too large or do not have
    /// their digest.
    ///
    /// Above [`MAX_KEPT`], only wanted rule sets are added: an old log can name many.
    pub(super) async fn add(&mut self, rule_sets: Vec<(String, String)>) -> u64 {
        let mut ignored = 0;
        for (digest, text) in rule_sets {
            if !is_digest(&digest) || text.len() > MAX_RULE_SET_BYTES {
                ignored += 1;
                continue;
            }
            let is_wanted = self.wanted.contains(&digest);
            if self.texts.contains_key(&digest) || self.texts.len() >= MAX_KEPT && !is_wanted {
                continue;
            }
            let hashed = tokio::task::spawn_blocking(move || (digest_of(&text), text)).await;
            match hashed {
                Ok((actual, text)) if actual == digest => drop(self.texts.insert(digest, text)),
                _ => ignored += 1,
            }
        }
        ignored
    }

    pub(super) fn get(&self, digest: &str) -> Option<&str> {
        self.texts.get(digest).map(String::as_str)
    }

    /// Forgets everything, and stores the digests of the wanted rule sets.
    pub(super) fn end_exchange(&mut self, wanted: BTreeSet<String>) {
        *self = Self { wanted, ..Self::default() };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn only_rule_sets_with_their_digest_are_kept() {
        let mut rule_sets = PeerRuleSets::default();
        let set = |text: &str| (digest_of(text), text.to_owned());
        let (valid, other) = (set("rules"), set("other"));
        let lies = vec![
            (other.0.clone(), "rules".to_owned()),
            (valid.0.to_uppercase(), valid.1.clone()),
            ("new".to_owned(), valid.1.clone()),
            ("../../x".to_owned(), valid.1.clone()),
            set(&"x".repeat(MAX_RULE_SET_BYTES + 1)),
        ];
        assert_eq!(rule_sets.add(lies).await, 5);
        assert_eq!(rule_sets.add(vec![valid.clone(), set(&"x".repeat(MAX_RULE_SET_BYTES))]).await, 0);
        assert_eq!(rule_sets.get(&valid.0), Some("rules"));
        assert_eq!((rule_sets.get(&other.0), rule_sets.texts.len()), (None, 2));
    }

    #[tokio::test]
    async fn few_rule_sets_are_kept_besides_those_that_are_wanted() {
        let sets: Vec<_> = (0..100).map(|number: u32| (digest_of(&number.to_string()), number.to_string())).collect();
        let (last, _) = sets[99].clone();
        let mut rule_sets = PeerRuleSets::default();
        assert_eq!(rule_sets.add(sets.clone()).await, 0);
        assert_eq!((rule_sets.texts.len(), rule_sets.get(&last)), (MAX_KEPT, None));
        rule_sets.end_exchange(BTreeSet::from([last.clone()]));
        assert_eq!(rule_sets.texts.len(), 0);
        rule_sets.add(sets).await;
        assert_eq!((rule_sets.texts.len(), rule_sets.get(&last)), (MAX_KEPT + 1, Some("99")));
    }

    #[test]
    fn values_of_slots_name_a_digest_or_the_directory() {
        let digest = digest_of("rules");
        let candidate = |text: &str| is_valid_value(RuleSetSlot::Candidate, text);
        assert!(candidate(&format!("{digest} 1")) && candidate(&format!("{digest} 0.25")));
        for invalid in ["", "directory", &digest, &format!("{digest} 0"), &format!("{digest} 2"), "x 1", "new 1"] {
            assert!(!candidate(invalid), "{invalid}");
        }
        assert!(!candidate(&format!("{digest} NaN")));
        for slot in [RuleSetSlot::InForce, RuleSetSlot::Previous] {
            assert!(is_valid_value(slot, &digest) && is_valid_value(slot, DIRECTORY));
            for invalid in ["", "new", &digest[1..], &digest.to_uppercase(), &format!("{digest} 1"), "../../etc/passwd"]
            {
                assert!(!is_valid_value(slot, invalid), "{invalid}");
            }
        }
    }
}
