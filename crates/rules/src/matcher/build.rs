//! Construction of a [`RuleSet`], for `compile`.

use std::{hash::BuildHasher, sync::Arc};

use super::{Group, NO_PARENT, Node, Rule, RuleSet, Segment};
use crate::diagnostic::Location;

/// Maximum number of patterns of one level that are compared with a further one. The time for all of them is quadratic.
const MAX_COVERING_PATTERNS: usize = 1_000;

impl RuleSet {
    /// Returns the root node of the domain, and adds it if it is missing.
    pub(crate) fn add_domain(&mut self, domain: &str) -> u32 {
        if let Some(root) = self.domain_root(domain) {
            return root;
        }
        let domain = Arc::from(domain);
        let root = self.add_node(&domain, Segment::Any, Location::default());
        let group = self.add_group(NO_PARENT, &domain);
        self.groups[group as usize].any = Some(root);
        root
    }

    /// Adds settings to the domain.
    ///
    /// # Errors
    ///
    /// Returns the `shard_by` of another file if it differs.
    pub(crate) fn set_domain(&mut self, domain: &str, charge_all: bool, shard_by: &[String]) -> Result<(), String> {
        if !charge_all && shard_by.is_empty() {
            return Ok(());
        }
        let settings = self.domains.entry(domain.into()).or_default();
        settings.charge_all |= charge_all;
        let same = settings.shard_by.iter().map(|key| &**key).eq(shard_by.iter().map(String::as_str));
        if shard_by.is_empty() || same {
            return Ok(());
        }
        if !settings.shard_by.is_empty() {
            return Err(settings.shard_by.join(", "));
        }
        settings.shard_by = shard_by.iter().map(|key| key.as_str().into()).collect();
        Ok(())
    }

    /// Returns the first pattern below `parent` that matches every value of `pattern`.
    ///
    /// This is exact. In a value, `*` is a character that no part of a pattern contains, so a pattern that matches the
    /// text of `pattern` matches it with any text in place of each `*`. Conversely, a pattern that does not match the
    /// text does not match the value with another character in place of each `*`, if no pattern contains this
    /// character. Several patterns together therefore match no more of the values than one of them.
    pub(crate) fn covering_pattern(&self, parent: u32, key: &str, pattern: &str) -> Option<&str> {
        let wildcards = self.group(parent, key)?.1.wildcards.as_ref()?;
        if wildcards.len() > MAX_COVERING_PATTERNS {
            return None;
        }
        self.node(wildcards.find(pattern)?).exact_value()
    }

    /// Adds a node below `parent`.
    ///
    /// # Errors
    ///
    /// Returns the location of the existing node if there is one with the same key and value.
    pub(crate) fn add_child(
        &mut self,
        parent: u32,
        key: &Arc<str>,
        segment: Segment,
        location: Location,
    ) -> Result<u32, Location> {
        let group = match self.group(parent, key) {
            Some((id, _)) => id,
            None => self.add_group(parent, key),
        };
        let existing = match &segment {
            Segment::Any => self.groups[group as usize].any,
            Segment::Value(value) | Segment::Pattern(value) | Segment::Shared(value) => self.exact_child(group, value),
        };
        if let Some(existing) = existing {
            return Err(self.node(existing).location);
        }
        let id = self.add_node(key, segment, location);
        self.nodes[parent as usize].has_children = true;
        let entry = &mut self.groups[group as usize];
        let value = match &self.nodes[id as usize].segment {
            Segment::Any => {
                entry.any = Some(id);
                return Ok(id);
            }
            Segment::Value(value) => value,
            Segment::Pattern(pattern) | Segment::Shared(pattern) => {
                entry.wildcards.get_or_insert_default().insert(pattern, id);
                pattern
            }
        };
        entry.has_values = true;
        let hash = self.hasher.hash_one((group, &**value));
        self.by_value.insert_unique(hash, (group, id), |(group, node)| {
            let value = self.nodes[*node as usize].exact_value().unwrap_or_default();
            self.hasher.hash_one((*group, value))
        });
        Ok(id)
    }

    /// Adds a rule, attaches it to the nodes, and returns its id.
    pub(crate) fn add_rule(&mut self, nodes: &[u32], rule: Rule) -> u32 {
        let id = self.rules.len() as u32;
        debug_assert_eq!(id as usize, rule.id, "a rule's id is its position");
        for node in nodes {
            self.nodes[*node as usize].rule = Some(id);
        }
        self.rules.push(rule);
        id
    }

    pub(crate) fn rule_mut(&mut self, id: u32) -> &mut Rule {
        &mut self.rules[id as usize]
    }

    /// Releases unused capacity.
    pub(crate) fn shrink(&mut self) {
        self.nodes.shrink_to_fit();
        self.groups.shrink_to_fit();
        self.rules.shrink_to_fit();
    }

    pub(crate) fn node_mut(&mut self, id: u32) -> &mut Node {
        &mut self.nodes[id as usize]
    }

    fn add_node(&mut self, key: &Arc<str>, segment: Segment, location: Location) -> u32 {
        let node = Node {
            key: Arc::clone(key),
            segment,
            value_to_metric: false,
            ip_prefix: None,
            modifier: None,
            rule: None,
            has_children: false,
            location,
        };
        self.nodes.push(node);
        (self.nodes.len() - 1) as u32
    }

    fn add_group(&mut self, parent: u32, key: &Arc<str>) -> u32 {
        let id = self.groups.len() as u32;
        self.groups.push(Group { parent, key: Arc::clone(key), any: None, has_values: false, wildcards: None });
        let hash = self.hasher.hash_one((parent, &**key));
        self.by_key.insert_unique(hash, id, |id| {
            let group = &self.groups[*id as usize];
            self.hasher.hash_one((group.parent, &*group.key))
        });
        id
    }
}
