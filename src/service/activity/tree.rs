//! [`Tree`]: every level of the rules in one list. [`View`]: the rows that a query selects, in their order.

use std::{
    cmp::Ordering,
    collections::HashMap,
    ops::Range,
    sync::{Arc, OnceLock},
};

use serde::{Deserialize, Serialize};

use super::{
    minutes::AddedMinutes,
    query::{RuleOrder, RuleQuery},
};
use crate::{
    engine::{RuleTotals, Snapshot},
    rules::{Rule, RuleEntries},
};

/// Value of [`Node::parent`] for a domain, which has no parent.
const NO_PARENT: u32 = u32::MAX;

/// The requests and hits of a rule, or of several. Rates are averages of some ten seconds (`RATE_TIME`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Hits {
    /// Requests per second.
    pub request_rate: f64,
    /// Denied requests per second.
    pub denied_request_rate: f64,
    /// Requested hits per second.
    pub requested_rate: f64,
    /// Denied hits per second.
    pub denied_rate: f64,
    /// Hits per second over a limit that were allowed because of shadow mode.
    pub shadow_rate: f64,
    /// Requests of the last hour.
    pub requests: u64,
    /// Denied requests of the last hour.
    pub denied_requests: u64,
    /// Requested hits of the last hour.
    pub requested: u64,
    /// Denied hits of the last hour.
    pub denied: u64,
    /// Denied requests of the last ten minutes.
    pub recently_denied: u64,
}

impl Hits {
    pub(super) fn add(&mut self, other: &Self) {
        self.request_rate += other.request_rate;
        self.denied_request_rate += other.denied_request_rate;
        self.requested_rate += other.requested_rate;
        self.denied_rate += other.denied_rate;
        self.shadow_rate += other.shadow_rate;
        self.requests += other.requests;
        self.denied_requests += other.denied_requests;
        self.requested += other.requested;
        self.denied += other.denied;
        self.recently_denied += other.recently_denied;
    }

    /// Compares in the order of rows: most denied requests first.
    pub(super) fn order(&self, other: &Self) -> Ordering {
        other.rank().cmp(&self.rank())
    }

    fn rank(&self) -> (u64, u64, u64) {
        (self.recently_denied, self.denied_requests, self.requests)
    }
}

/// Every level of the rules. Each level is followed by the levels below it.
pub(super) struct Tree {
    pub(super) snapshot: Arc<Snapshot>,
    /// The counters of each rule, by its id.
    pub(super) totals: Vec<RuleTotals>,
    /// The keys and values of each rule, by its id.
    entries: Vec<RuleEntries>,
    nodes: Vec<Node>,
    /// The id of the first rule with each path.
    ids_by_path: OnceLock<HashMap<String, usize>>,
}

struct Node {
    label: Arc<str>,
    depth: u32,
    parent: u32,
    rule: Option<u32>,
    /// Index of the first node after this node and the nodes below it.
    end: u32,
}

impl Tree {
    pub(super) fn new(snapshot: Arc<Snapshot>) -> Self {
        let rules = snapshot.rule_set().rules();
        let mut nodes: Vec<Node> = Vec::new();
        let mut ids: HashMap<(u32, Arc<str>), u32> = HashMap::new();
        for (id, rule) in rules.iter().enumerate() {
            let mut parent = NO_PARENT;
            for (depth, label) in rule.labels.iter().enumerate() {
                parent = *ids.entry((parent, Arc::clone(label))).or_insert_with(|| {
                    let label = Arc::clone(label);
                    nodes.push(Node { label, depth: depth as u32, parent, rule: None, end: 0 });
                    nodes.len() as u32 - 1
                });
            }
            match nodes.get_mut(parent as usize) {
                Some(node) if node.rule.is_none() => node.rule = Some(id as u32),
                // Another rule with the same labels has a row of its own.
                Some(&mut Node { ref label, depth, parent, .. }) => {
                    let label = Arc::clone(label);
                    nodes.push(Node { label, depth, parent, rule: Some(id as u32), end: 0 });
                }
                None => {}
            }
        }
        drop(ids);
        Self {
            totals: snapshot.rule_totals().collect(),
            entries: snapshot.rule_set().entries_of_rules(),
            nodes: in_preorder(nodes),
            snapshot,
            ids_by_path: OnceLock::new(),
        }
    }

    pub(super) fn depth(&self, node: u32) -> usize {
        self.nodes[node as usize].depth as usize
    }

    pub(super) fn label(&self, node: u32) -> &str {
        &self.nodes[node as usize].label
    }

    pub(super) fn rule_of(&self, node: u32) -> Option<usize> {
        self.nodes[node as usize].rule.map(|rule| rule as usize)
    }

    /// Returns the labels of the node and its parents, separated by dots.
    pub(super) fn path(&self, node: u32) -> String {
        let mut labels = Vec::new();
        let mut at = node;
        while at != NO_PARENT {
            labels.push(self.label(at));
            at = self.nodes[at as usize].parent;
        }
        labels.reverse();
        labels.join(".")
    }

    /// Returns the id of the rule with a path.
    pub(super) fn rule_at(&self, path: &str) -> Option<usize> {
        let ids = self.ids_by_path.get_or_init(|| {
            let mut ids = HashMap::new();
            for (id, rule) in self.snapshot.rule_set().rules().iter().enumerate() {
                ids.entry(rule.path()).or_insert(id);
            }
            ids
        });
        ids.get(path).copied()
    }

    /// Returns the ids of the rules of a node and of the nodes below it.
    pub(super) fn rules_below(&self, node: u32) -> impl Iterator<Item = usize> {
        let end = self.nodes[node as usize].end;
        self.nodes[node as usize..end as usize].iter().filter_map(|node| node.rule.map(|rule| rule as usize))
    }

    /// Returns the keys and values of a rule.
    pub(super) fn entries(&self, rule: usize) -> &[(Arc<str>, Box<str>)] {
        &self.entries[rule]
    }

    /// Returns the number of overrides that set the limit of an entity with the keys of a rule.
    pub(super) fn overrides(&self, rule: usize, snapshot: &Snapshot) -> u32 {
        let keys: Vec<&str> = self.entries[rule].iter().map(|(key, _)| &**key).collect();
        let domain = &self.snapshot.rule_set().rules()[rule].labels[0];
        if keys.is_empty() { 0 } else { snapshot.overrides().limits_with_keys(domain, &keys) }
    }
}

/// Sorts nodes so that each is followed by the nodes below it, and sets `end`.
fn in_preorder(nodes: Vec<Node>) -> Vec<Node> {
    let mut children = vec![Vec::new(); nodes.len() + 1];
    let root = nodes.len();
    for (id, node) in nodes.iter().enumerate() {
        let parent = if node.parent == NO_PARENT { root } else { node.parent as usize };
        children[parent].push(id);
    }
    let mut nodes: Vec<_> = nodes.into_iter().map(Some).collect();
    let mut sorted: Vec<Node> = Vec::with_capacity(nodes.len());
    let mut todo: Vec<_> = children[root].iter().rev().map(|id| (*id, NO_PARENT)).collect();
    while let Some((id, parent)) = todo.pop() {
        if let Some(node) = nodes[id].take() {
            let new_id = sorted.len() as u32;
            sorted.push(Node { parent, end: new_id + 1, ..node });
            todo.extend(children[id].iter().rev().map(|child| (*child, new_id)));
        }
    }
    for id in (0..sorted.len()).rev() {
        let Node { parent, end, .. } = sorted[id];
        if let Some(above) = sorted.get_mut(parent as usize) {
            above.end = above.end.max(end);
        }
    }
    sorted
}

/// The rows that a query selects.
pub(super) struct View {
    tree: Arc<Tree>,
    /// Nodes of the tree.
    pub(super) rows: Vec<u32>,
    /// Number of rules among the rows.
    pub(super) rules: usize,
    /// Whether `hits` does not include the nodes below.
    pub(super) is_flat: bool,
    /// Hits of each node, including those below it.
    hits: Vec<Hits>,
    /// The minutes of other instances.
    pub(super) added: AddedMinutes,
}

impl View {
    /// Selects and sorts rows. `rule_hits` are the hits of each rule, by its id.
    pub(super) fn new(tree: &Arc<Tree>, rule_hits: Vec<Hits>, added: AddedMinutes, query: &RuleQuery) -> Self {
        let nodes = &tree.nodes;
        let mut hits: Vec<Hits> = Vec::with_capacity(nodes.len());
        for node in nodes {
            match node.rule {
                Some(rule) => hits.push(rule_hits[rule as usize]),
                None => hits.push(Hits::default()),
            }
        }
        drop(rule_hits);
        let mut selected = select(tree, query);
        if query.rules_only {
            let mut rows: Vec<u32> = selected_rules(nodes, &selected).collect();
            if query.order == RuleOrder::Denied {
                rows.sort_by(|one, other| hits[*one as usize].order(&hits[*other as usize]));
            }
            return Self { tree: Arc::clone(tree), rules: rows.len(), rows, is_flat: true, hits, added };
        }
        let rules = selected_rules(nodes, &selected).count();
        for id in (0..nodes.len()).rev() {
            let parent = nodes[id].parent as usize;
            if parent < nodes.len() {
                let below = hits[id];
                hits[parent].add(&below);
                // The levels above a selected rule are shown, too.
                selected[parent] |= selected[id] && query.path.is_empty();
            }
        }
        let rows = sorted_rows(nodes, &selected, &hits, query.order);
        Self { tree: Arc::clone(tree), rows, rules, is_flat: false, hits, added }
    }

    pub(super) fn is_of(&self, tree: &Arc<Tree>) -> bool {
        Arc::ptr_eq(&self.tree, tree)
    }

    pub(super) fn hits(&self, node: u32) -> Hits {
        self.hits[node as usize]
    }
}

/// Returns for each node whether the query selects it.
fn select(tree: &Tree, query: &RuleQuery) -> Vec<bool> {
    let rules = tree.snapshot.rule_set().rules();
    let words: Vec<String> = query.find.split_whitespace().map(str::to_lowercase).collect();
    let mut selected = Vec::with_capacity(tree.nodes.len());
    for (id, node) in tree.nodes.iter().enumerate() {
        let is_selected = if !query.path.is_empty() {
            tree.path(id as u32) == query.path
        } else if words.is_empty() {
            true
        } else {
            node.rule.is_some_and(|rule| contains_all(&rules[rule as usize], &words))
        };
        selected.push(is_selected);
    }
    selected
}

/// Returns the ids of the selected nodes that are rules.
fn selected_rules(nodes: &[Node], selected: &[bool]) -> impl Iterator<Item = u32> {
    (0..nodes.len()).filter(move |id| selected[*id] && nodes[*id].rule.is_some()).map(|id| id as u32)
}

/// Returns whether the searched text of a rule contains every word.
fn contains_all(rule: &Rule, words: &[String]) -> bool {
    let text = searched_text(rule);
    words.iter().all(|word| text.contains(word))
}

/// Returns the searched text of a rule, in lower case.
fn searched_text(rule: &Rule) -> String {
    use std::fmt::Write;
    let mut text = rule.path();
    if let Some(name) = &rule.name {
        let _ = write!(text, " {name}");
    }
    if let Some(limit) = &rule.limit {
        let _ = write!(text, " {limit} {}", limit.algorithm().name());
    }
    text.to_lowercase()
}

/// Returns the selected nodes, each followed by those below it.
fn sorted_rows(nodes: &[Node], selected: &[bool], hits: &[Hits], order: RuleOrder) -> Vec<u32> {
    let mut rows = Vec::new();
    let mut todo = siblings(nodes, selected, hits, order, 0..nodes.len());
    todo.reverse();
    while let Some(id) = todo.pop() {
        rows.push(id as u32);
        let below = siblings(nodes, selected, hits, order, id + 1..nodes[id].end as usize);
        todo.extend(below.into_iter().rev());
    }
    rows
}

/// Returns the selected nodes of a range without those below them, in the order of rows.
fn siblings(nodes: &[Node], selected: &[bool], hits: &[Hits], order: RuleOrder, range: Range<usize>) -> Vec<usize> {
    let mut ids = Vec::new();
    let mut id = range.start;
    while id < range.end {
        if selected[id] {
            ids.push(id);
        }
        // A node that is not selected may still have selected nodes below it, if a single rule was asked for.
        id = if selected[id] { nodes[id].end as usize } else { id + 1 };
    }
    if order == RuleOrder::Denied {
        ids.sort_by(|one, other| hits[*one].order(&hits[*other]));
    }
    ids
}
