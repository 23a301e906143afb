//! [`UnmatchedDescriptors`]: counts the descriptors that no rule matches, by domain and keys, in memory of fixed size.
//! Those of domains that the rules do not have are counted by domain.
//!
//! Such a descriptor is not limited. Often that is intended; a misspelled name has the same effect. Values are not stored.
//!
//! Each worker has a table of its own, and waits for it only while a reader copies the table.

use std::{
    collections::{BTreeMap, HashMap, hash_map::Entry},
    hash::{BuildHasher, Hasher},
    sync::Arc,
};

use foldhash::fast::RandomState;
use parking_lot::{Mutex, MutexGuard};
use sluicegate_algorithm::Micros;
use sluicegate_metrics::{Striped, WorkerId};

use super::Descriptor;

/// Maximum number of combinations of domain and keys in the table of one worker.
const MAX_GROUPS: usize = 200;
/// Maximum number of unknown domains in the table of one worker.
const MAX_UNKNOWN_DOMAINS: usize = 50;
/// Maximum length of a domain and of a key that is stored, in bytes.
const MAX_NAME_BYTES: usize = 100;
/// Maximum number of keys that are stored.
const MAX_KEYS: usize = 16;
/// The domain of descriptors that are counted after the table has become full.
const OTHER: &str = "other";
/// Number of minutes in which recent descriptors are counted, with the current one.
const MINUTES: usize = 5;
const MINUTE: Micros = Micros::from_secs(60);

/// Counts of descriptors without a rule, per worker.
pub struct UnmatchedDescriptors {
    tables: Striped<Mutex<Table>>,
    hasher: RandomState,
}

/// The groups of one worker.
#[derive(Default)]
struct Table {
    /// The groups by the hash of their names.
    groups: HashMap<u64, Group, RandomState>,
    /// Number of groups of unknown domains.
    unknown_domains: usize,
}

/// Descriptors without a rule that have the same domain and the same keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The domain.
    pub domain: Arc<str>,
    /// The keys in their order. Empty for unknown domains, and for groups that are counted together because there are
    /// too many.
    pub keys: Arc<[String]>,
    /// Whether the rules did not have the domain.
    pub is_unknown_domain: bool,
    /// Number of descriptors of this group since the start of the process.
    pub total: u64,
    /// Time at which a descriptor of this group was first received.
    pub first: Micros,
    /// Time at which a descriptor of this group was last received.
    pub latest: Micros,
    minutes: [MinuteCount; MINUTES],
}

/// The number of descriptors in one minute.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct MinuteCount {
    /// Minutes since the Unix epoch.
    minute: u64,
    count: u64,
}

impl Group {
    fn new(domain: &str, keys: Vec<String>, is_unknown_domain: bool, now: Micros) -> Self {
        Self {
            domain: shortened(domain).into(),
            keys: keys.into(),
            is_unknown_domain,
            total: 0,
            first: now,
            latest: now,
            minutes: [MinuteCount::default(); MINUTES],
        }
    }

    fn count(&mut self, now: Micros) {
        let minute = now.get() / MINUTE.get();
        let slot = &mut self.minutes[minute as usize % MINUTES];
        if slot.minute != minute {
            *slot = MinuteCount { minute, count: 0 };
        }
        slot.count += 1;
        self.total += 1;
        self.latest = self.latest.max(now);
    }

    /// Returns how many descriptors of this group had no rule in the current minute and the four before it.
    #[must_use]
    pub fn recent(&self, now: Micros) -> u64 {
        let minute = now.get() / MINUTE.get();
        let recent = self.minutes.iter().filter(|slot| minute.saturating_sub(slot.minute) < MINUTES as u64);
        recent.map(|slot| slot.count).sum()
    }

    /// Adds the counts of the same group on another worker.
    fn add(&mut self, other: &Self) {
        self.total += other.total;
        self.first = self.first.min(other.first);
        self.latest = self.latest.max(other.latest);
        for (slot, added) in self.minutes.iter_mut().zip(&other.minutes) {
            if slot.minute < added.minute {
                *slot = *added;
            } else if slot.minute == added.minute {
                slot.count += added.count;
            }
        }
    }
}

impl UnmatchedDescriptors {
    /// Creates empty tables for `workers` workers.
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self { tables: Striped::new(workers), hasher: RandomState::default() }
    }

    /// Counts a descriptor.
    pub(super) fn count(&self, worker: WorkerId, domain: &str, descriptor: &Descriptor<'_>, now: Micros) {
        let mut hasher = self.hasher.build_hasher();
        hasher.write(domain.as_bytes());
        for entry in &descriptor.entries {
            // No name contains this byte, so that names cannot run into each other.
            hasher.write_u8(0xff);
            hasher.write(entry.key.as_bytes());
        }
        let mut table = self.table_of(worker);
        let hash = hasher.finish();
        if let Some(group) = table.groups.get_mut(&hash) {
            group.count(now);
            return;
        }
        table.new_group(hash, domain, descriptor, now).count(now);
    }

    /// Counts a descriptor of a domain that the rules do not have.
    pub(super) fn count_domain(&self, worker: WorkerId, domain: &str, now: Micros) {
        let mut hasher = self.hasher.build_hasher();
        // No text begins with this byte, so that the hash differs from that of a domain with keys.
        hasher.write_u8(0xff);
        hasher.write(domain.as_bytes());
        self.table_of(worker).unknown_domain(hasher.finish(), domain, now).count(now);
    }

    /// Returns the table of a worker. A reader holds the lock only while it copies the table.
    fn table_of(&self, worker: WorkerId) -> MutexGuard<'_, Table> {
        self.tables.of(worker).lock()
    }

    /// Returns all groups, summed over the workers and ordered by domain and keys.
    #[must_use]
    pub fn groups(&self) -> Vec<Group> {
        let mut sums = BTreeMap::<_, Group>::new();
        for table in self.tables.iter() {
            let table = table.lock();
            let groups: Vec<Group> = table.groups.values().cloned().collect();
            drop(table);
            for group in groups {
                let name = (Arc::clone(&group.domain), Arc::clone(&group.keys), group.is_unknown_domain);
                match sums.get_mut(&name) {
                    Some(sum) => sum.add(&group),
                    None => drop(sums.insert(name, group)),
                }
            }
        }
        sums.into_values().collect()
    }

    /// Returns the number of descriptors of domains that the rules did not have, by domain.
    pub(super) fn by_unknown_domain(&self) -> BTreeMap<Arc<str>, u64> {
        self.sum_by_domain(true)
    }

    /// Returns the number of descriptors by domain, without those of unknown domains.
    pub(super) fn by_domain(&self) -> BTreeMap<Arc<str>, u64> {
        self.sum_by_domain(false)
    }

    fn sum_by_domain(&self, is_unknown_domain: bool) -> BTreeMap<Arc<str>, u64> {
        let mut sums = BTreeMap::new();
        for group in self.groups() {
            if group.is_unknown_domain == is_unknown_domain {
                *sums.entry(group.domain).or_default() += group.total;
            }
        }
        sums
    }
}

impl Table {
    /// Adds a group, or returns the one that counts all others if there are too many.
    #[cold]
    fn new_group(&mut self, hash: u64, domain: &str, descriptor: &Descriptor<'_>, now: Micros) -> &mut Group {
        if self.groups.len() - self.unknown_domains < MAX_GROUPS {
            return self.groups.entry(hash).or_insert_with(|| {
                let keys = descriptor.entries.iter().take(MAX_KEYS).map(|entry| shortened(entry.key).to_owned());
                Group::new(domain, keys.collect(), false, now)
            });
        }
        // Any hash can be that of the others: a collision only adds two counts.
        self.groups.entry(0).or_insert_with(|| Group::new(OTHER, Vec::new(), false, now))
    }

    /// Returns the group of an unknown domain, or the one that counts all others if there are too many.
    fn unknown_domain(&mut self, hash: u64, domain: &str, now: Micros) -> &mut Group {
        let is_full = self.unknown_domains >= MAX_UNKNOWN_DOMAINS && !self.groups.contains_key(&hash);
        let (hash, domain) = if is_full { (1, OTHER) } else { (hash, domain) };
        match self.groups.entry(hash) {
            Entry::Occupied(group) => group.into_mut(),
            Entry::Vacant(vacant) => {
                self.unknown_domains += 1;
                vacant.insert(Group::new(domain, Vec::new(), true, now))
            }
        }
    }
}

/// Returns the beginning of a name, up to the maximum length.
fn shortened(name: &str) -> &str {
    let mut end = name.len().min(MAX_NAME_BYTES);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    &name[..end]
}

#[cfg(test)]
mod tests {
    use sluicegate_rules as rules;
    use smallvec::SmallVec;

    use super::*;

    fn count(unmatched: &UnmatchedDescriptors, worker: usize, domain: &str, keys: &[&str], second: u64) {
        let entries: SmallVec<_> = keys.iter().map(|key| rules::Entry { key, value: "secret" }).collect();
        let descriptor = Descriptor::new(entries);
        unmatched.count(WorkerId(worker), domain, &descriptor, Micros::from_secs(second));
    }

    fn lines(unmatched: &UnmatchedDescriptors, second: u64) -> Vec<String> {
        let now = Micros::from_secs(second);
        let line = |group: &Group| {
            let Group { domain, keys, total, first, latest, .. } = group;
            let (first, latest) = (first.floor_secs(), latest.floor_secs());
            format!("{domain} {} {total} {} {first}-{latest}", keys.join(","), group.recent(now))
        };
        unmatched.groups().iter().map(line).collect()
    }

    #[test]
    fn descriptors_are_counted_by_domain_and_keys_over_all_workers() {
        let unmatched = UnmatchedDescriptors::new(2);
        count(&unmatched, 0, "shop", &["usr"], 60);
        count(&unmatched, 1, "shop", &["usr"], 130);
        count(&unmatched, 1, "shop", &["usr"], 61);
        count(&unmatched, 0, "shop", &["user", "path"], 70);
        count(&unmatched, 0, "shop", &["userpath"], 70);
        count(&unmatched, 0, "api", &["usr"], 70);
        assert_eq!(
            lines(&unmatched, 130),
            ["api usr 1 1 70-70", "shop user,path 1 1 70-70", "shop userpath 1 1 70-70", "shop usr 3 3 60-130"]
        );
    }

    #[test]
    fn unknown_domains_are_counted_apart_from_those_of_the_rules() {
        let unmatched = UnmatchedDescriptors::new(2);
        count(&unmatched, 0, "shop", &[], 60);
        for worker in [0, 1, 1] {
            unmatched.count_domain(WorkerId(worker), "shop", Micros::from_secs(70));
        }
        assert_eq!(lines(&unmatched, 70), ["shop  1 1 60-60", "shop  3 3 70-70"]);
        assert!(unmatched.groups()[1].is_unknown_domain);
        assert_eq!(unmatched.by_domain(), BTreeMap::from([("shop".into(), 1)]));
        for number in 0..2 * MAX_UNKNOWN_DOMAINS {
            unmatched.count_domain(WorkerId(0), &format!("domain{number}"), Micros::from_secs(70));
        }
        let groups = unmatched.groups();
        assert_eq!(groups.len(), 1 + MAX_UNKNOWN_DOMAINS + 1);
        let others = groups.iter().find(|group| *group.domain == *OTHER).unwrap();
        assert_eq!(others.total as usize, MAX_UNKNOWN_DOMAINS + 1);
        assert_eq!(unmatched.by_unknown_domain().values().sum::<u64>() as usize, 3 + 2 * MAX_UNKNOWN_DOMAINS);
        assert_eq!(unmatched.by_unknown_domain()["shop"], 3);
        count(&unmatched, 0, "api", &["user"], 80);
        assert_eq!(unmatched.by_domain()["api"], 1);
        let unmatched = UnmatchedDescriptors::new(1);
        unmatched.count_domain(WorkerId(0), &"x".repeat(10_000), Micros::from_secs(70));
        assert_eq!(unmatched.groups()[0].domain.len(), MAX_NAME_BYTES);
    }

    #[test]
    fn recent_descriptors_are_those_of_five_minutes() {
        let unmatched = UnmatchedDescriptors::new(1);
        for minute in 0..12 {
            count(&unmatched, 0, "shop", &["usr"], 60 * minute);
        }
        assert_eq!(lines(&unmatched, 60 * 11), ["shop usr 12 5 0-660"]);
        assert_eq!(lines(&unmatched, 60 * 13), ["shop usr 12 3 0-660"]);
        assert_eq!(lines(&unmatched, 60 * 16), ["shop usr 12 0 0-660"]);
    }

    #[test]
    fn the_number_of_groups_and_the_length_of_names_are_bounded() {
        let unmatched = UnmatchedDescriptors::new(1);
        for number in 0..MAX_GROUPS + 7 {
            count(&unmatched, 0, "shop", &[&format!("key{number:03}")], 60);
        }
        let groups = unmatched.groups();
        assert_eq!(groups.len(), MAX_GROUPS + 1);
        assert_eq!((&*groups[0].domain, groups[0].keys.len(), groups[0].total), (OTHER, 0, 7));
        let unmatched = UnmatchedDescriptors::new(1);
        count(&unmatched, 0, &"ü".repeat(MAX_NAME_BYTES), &vec!["x".repeat(1_000).as_str(); 40], 60);
        let group = &unmatched.groups()[0];
        assert_eq!((group.domain.len(), group.keys.len(), group.keys[0].len()), (100, MAX_KEYS, 100));
    }
}
