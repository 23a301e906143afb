//! YAML as a tree that remembers where everything stood. The parser is `saphyr-parser`'s; a tree of our own, because
//! rule files want all mistakes with line and column, and a serde reader stops at the first.

use std::{collections::HashMap, rc::Rc};

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::diagnostic::Location;

/// Deeper nesting than this is refused.
const MAX_DEPTH: usize = 128;
/// Aliases may not blow a small file up: nodes of the tree, copies included.
const MAX_NODES: usize = 20_000_000;

#[derive(Clone, Debug)]
pub(super) struct Yaml {
    pub(super) place: Location,
    pub(super) kind: Kind,
    /// Nodes in this subtree: what an alias to it costs.
    size: usize,
}

#[derive(Clone, Debug)]
pub(super) enum Kind {
    Null,
    /// `plain`: written without quotes, so it may be a number or a boolean.
    Scalar {
        text: String,
        plain: bool,
    },
    List(Rc<Vec<Yaml>>),
    Map(Rc<Vec<(Yaml, Yaml)>>),
}

impl Yaml {
    /// The text of a scalar, and whether it was written without quotes.
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

/// What stopped the parser.
pub(super) struct YamlError {
    pub(super) place: Location,
    pub(super) message: String,
}

/// The first document of the text; `None` where there is nothing but comments.
pub(super) fn parse(text: &str) -> Result<Option<Yaml>, YamlError> {
    let mut tree = TreeBuilder::default();
    for event in Parser::new_from_str(text) {
        let (event, span) = event.map_err(|error| YamlError {
            place: Location { line: error.marker().line(), column: error.marker().col() + 1 },
            message: format!("this is not YAML: {}", error.info()),
        })?;
        let place = place(&span);
        match event {
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                let null = plain && matches!(&*text, "" | "~" | "null" | "Null" | "NULL");
                let kind = if null { Kind::Null } else { Kind::Scalar { text: text.into_owned(), plain } };
                tree.add(Yaml { place, kind, size: 1 }, anchor)?;
            }
            Event::SequenceStart(anchor, _) => tree.open(place, anchor, false)?,
            Event::MappingStart(anchor, _) => tree.open(place, anchor, true)?,
            Event::SequenceEnd | Event::MappingEnd => tree.close()?,
            Event::Alias(anchor) => tree.alias(place, anchor)?,
            Event::DocumentEnd => break,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => {}
        }
    }
    Ok(tree.root)
}

fn place(span: &Span) -> Location {
    Location { line: span.start.line(), column: span.start.col() + 1 }
}

/// A list or map whose end has not come yet.
struct OpenNode {
    place: Location,
    anchor: usize,
    map: bool,
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
    fn open(&mut self, place: Location, anchor: usize, map: bool) -> Result<(), YamlError> {
        if self.open.len() == MAX_DEPTH {
            return Err(YamlError { place, message: format!("nested deeper than {MAX_DEPTH} levels") });
        }
        self.open.push(OpenNode { place, anchor, map, items: Vec::new() });
        Ok(())
    }

    fn close(&mut self) -> Result<(), YamlError> {
        let Some(OpenNode { place, anchor, map, items }) = self.open.pop() else {
            return Ok(());
        };
        let size = items.iter().fold(1, |sum: usize, item| sum.saturating_add(item.size));
        let kind = if map { Kind::Map(Rc::new(pairs(items))) } else { Kind::List(Rc::new(items)) };
        self.add(Yaml { place, kind, size }, anchor)
    }

    fn alias(&mut self, place: Location, anchor: usize) -> Result<(), YamlError> {
        let Some(target) = self.anchors.get(&anchor).cloned() else {
            return Err(YamlError { place, message: "an alias to something that is not finished yet".into() });
        };
        self.nodes = self.nodes.saturating_add(target.size);
        self.add(target, 0)
    }

    fn add(&mut self, node: Yaml, anchor: usize) -> Result<(), YamlError> {
        self.nodes += 1;
        if self.nodes > MAX_NODES {
            let message = format!("more than {MAX_NODES} values once aliases are written out");
            return Err(YamlError { place: node.place, message });
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
    fn remembers_places_and_shares_what_an_alias_names() {
        let tree = parse("a: &x [1, two]\nb: *x\nc: 'true'\n").ok().flatten().unwrap();
        let Kind::Map(pairs) = &tree.kind else { panic!("not a map") };
        assert_eq!(pairs[0].1.place, Location { line: 1, column: 4 });
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
