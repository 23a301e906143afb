//! [`Yaml`]: a YAML tree with the location of every node.
//!
//! The parser is `saphyr-parser`. The tree is our own because all mistakes of a rule file must be reported with line
//! and column, and a serde deserializer stops at the first one.

use std::{collections::HashMap, rc::Rc};

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::diagnostic::Location;

/// Maximum nesting depth.
const MAX_DEPTH: usize = 128;
/// Maximum number of nodes, including the copies made by aliases, so that a small file cannot expand without bound.
const MAX_NODES: usize = 20_000_000;

/// A node of the tree.
#[derive(Clone, Debug)]
pub(super) struct Yaml {
    pub(super) location: Location,
    pub(super) kind: Kind,
    /// Number of nodes in this subtree, which an alias to it adds to the total.
    size: usize,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Null,
    Scalar {
        text: String,
        /// Whether the scalar is written without quotes, so that it may be a number or a boolean.
        plain: bool,
    },
    List(Rc<Vec<Yaml>>),
    Map(Rc<Vec<(Yaml, Yaml)>>),
}

impl Yaml {
    /// Returns the text of a scalar, and whether it is written without quotes.
    pub(super) fn scalar(&self) -> Option<(&str, bool)> {
        match &self.kind {
            Kind::Scalar { text, plain } => Some((text, *plain)),
            Kind::Null | Kind::List(_) | Kind::Map(_) => None,
        }
    }

    pub(super) fn describe(&self) -> &'static str {
        match &self.kind {
            Kind::Null => "nothing",
            Kind::Scalar { .. } => "a scalar",
            Kind::List(_) => "a list",
            Kind::Map(_) => "a map",
        }
    }
}

/// A syntax error, or an exceeded limit.
pub(super) struct YamlError {
    pub(super) location: Location,
    pub(super) message: String,
}

/// Parses the first document of `text`. Returns `None` if it contains only comments.
pub(super) fn parse(text: &str) -> Result<Option<Yaml>, YamlError> {
    let mut tree = TreeBuilder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| YamlError {
            location: Location { line: error.marker().line(), column: error.marker().col() + 1 },
            message: format!("invalid YAML: {}", error.info()),
        })?;
        let location = location_of(&span);
        match event {
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                let null = plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
                let kind = if null { Kind::Null } else { Kind::Scalar { text: text.into_owned(), plain } };
                tree.add(Yaml { location, kind, size: 1 }, anchor)?;
            }
            Event::SequenceStart(anchor, _) => tree.open(location, anchor, false)?,
            Event::MappingStart(anchor, _) => tree.open(location, anchor, true)?,
            Event::SequenceEnd | Event::MappingEnd => tree.close()?,
            Event::Alias(anchor) => tree.alias(location, anchor)?,
            Event::DocumentEnd => break,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => {}
        }
    }
    Ok(tree.root)
}

fn location_of(span: &Span) -> Location {
    Location { line: span.start.line(), column: span.start.col() + 1 }
}

/// A list or map that is not complete yet.
struct OpenNode {
    location: Location,
    anchor: usize,
    is_map: bool,
    items: Vec<Yaml>,
}

#[derive(Default)]
struct TreeBuilder {
    open: Vec<OpenNode>,
    anchors: HashMap<usize, Yaml>,
    nodes: usize,
    root: Option<Yaml>,
}

impl TreeBuilder {
    fn open(&mut self, location: Location, anchor: usize, is_map: bool) -> Result<(), YamlError> {
        if self.open.len() == MAX_DEPTH {
            return Err(YamlError { location, message: format!("nesting is deeper than {MAX_DEPTH} levels") });
        }
        self.open.push(OpenNode { location, anchor, is_map, items: Vec::new() });
        Ok(())
    }

    fn close(&mut self) -> Result<(), YamlError> {
        let Some(OpenNode { location, anchor, is_map, items }) = self.open.pop() else {
            return Ok(());
        };
        let size = items.iter().fold(1, |sum: usize, item| sum.saturating_add(item.size));
        let kind = if is_map { Kind::Map(Rc::new(pairs(items))) } else { Kind::List(Rc::new(items)) };
        self.add(Yaml { location, kind, size }, anchor)
    }

    fn alias(&mut self, location: Location, anchor: usize) -> Result<(), YamlError> {
        let Some(target) = self.anchors.get(&anchor).cloned() else {
            return Err(YamlError { location, message: "the alias refers to a list or map that contains it".into() });
        };
        self.nodes = self.nodes.saturating_add(target.size);
        self.add(target, 0)
    }

    fn add(&mut self, node: Yaml, anchor: usize) -> Result<(), YamlError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            let message = format!("the YAML has more than {MAX_NODES} values after aliases are expanded");
            return Err(YamlError { location: node.location, message });
        }
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut() {
            Some(parent) => parent.items.push(node),
            None => self.root = Some(node),
        }
        Ok(())
    }
}

fn pairs(items: Vec<Yaml>) -> Vec<(Yaml, Yaml)> {
    let mut items = items.into_iter();
    std::iter::from_fn(|| Some((items.next()?, items.next()?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_have_locations_and_aliases_copy_their_targets() {
        let tree = parse("a: &x [1, two]\nb: *x\nc: 'true'\n").ok().flatten().unwrap();
        let Kind::Map(pairs) = &tree.kind else { panic!("not a map") };
        assert_eq!(pairs[0].1.location, Location { line: 1, column: 4 });
        assert!(matches!(&pairs[1].1.kind, Kind::List(items) if items.len() == 2));
        assert!(matches!(&pairs[2].1.kind, Kind::Scalar { plain: false, .. }));
    }

    #[test]
    fn a_small_file_cannot_become_a_huge_tree() {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for i in 1..12 {
            let alias = format!("*a{}, ", i - 1).repeat(10);
            bomb += &format!("a{i}: &a{i} [{alias}]\n");
        }
        assert!(parse(&bomb).err().unwrap().message.contains("aliases"));
        assert!(parse(&"[".repeat(10_000)).is_err());
    }
}
