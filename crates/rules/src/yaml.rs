//! [`Yaml`]: a YAML tree with the location of every node.
//!
//! The parser is `saphyr-parser`. The tree is our own because all mistakes of a rule file must be reported with line
//! and column, and a serde deserializer stops at the first one.

use std::{borrow::Cow, collections::HashMap, rc::Rc};

use saphyr_parser::{Event, Parser, ScalarStyle, Span};

use super::diagnostic::{Location, MAX_DIAGNOSTICS};

/// Maximum nesting depth.
const MAX_DEPTH: usize = 128;
/// Number of nodes that aliases may copy in addition to the number of written nodes. A small file can then not expand
/// without bound. The YAML library of envoyproxy/ratelimit has nearly the same limit (`allowedAliasRatio` of go-yaml).
const MAX_COPIED_NODES: usize = 400_000;
/// Number of bytes of texts that aliases may copy in addition to the number of written bytes.
const MAX_COPIED_BYTES: usize = 4 << 20;

/// Maximum length of a tag, in bytes. A few bytes can name a long tag (`%TAG`), which the parser copies for each node.
const MAX_TAG_BYTES: usize = 256;

/// A node of the tree.
#[derive(Clone, Debug)]
pub(super) struct Yaml {
    pub(super) location: Location,
    pub(super) kind: Kind,
    /// The size of this subtree, which each alias to it copies.
    size: Size,
}

/// Number of nodes and of the bytes in their texts.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    nodes: usize,
    bytes: usize,
}

impl Size {
    const fn plus(self, other: Self) -> Self {
        Self { nodes: self.nodes.saturating_add(other.nodes), bytes: self.bytes.saturating_add(other.bytes) }
    }
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

/// The first document of a text.
pub(super) struct Document {
    /// The tree; `None` if the document contains only comments.
    pub(super) root: Option<Yaml>,
    /// Locations of parts of the text that are not read, each with a message.
    pub(super) ignored: Vec<(Location, String)>,
}

/// Parses the first document of `text`.
pub(super) fn parse(text: &str) -> Result<Document, YamlError> {
    let text = space_after_colons(text);
    let mut tree = TreeBuilder::default();
    let mut ignored = Vec::new();
    let mut events = events(&text);
    for event in events.by_ref() {
        let (event, span) = event?;
        let location = location_of(&span);
        match event {
            Event::Scalar(text, style, anchor, tag) => {
                let tag = tag.map(|tag| format!("{}{}", tag.handle, tag.suffix));
                let tag = tag.as_deref().map(|tag| tag.strip_prefix("tag:yaml.org,2002:").unwrap_or(tag));
                let plain = style == ScalarStyle::Plain || matches!(tag, Some("int" | "bool"));
                let null = plain && tag != Some("str") && is_null(&text);
                if let Some(tag) = tag
                    && !matches!(tag, "str" | "int" | "bool" | "null")
                    && ignored.len() < MAX_DIAGNOSTICS
                {
                    ignored.push((location, format!("the tag {tag:?} of this value is ignored")));
                }
                let size = Size { nodes: 1, bytes: text.len() };
                let kind = if null { Kind::Null } else { Kind::Scalar { text: text.into_owned(), plain } };
                tree.written = tree.written.plus(size);
                tree.add(Yaml { location, kind, size }, anchor);
            }
            Event::SequenceStart(anchor, _) => tree.open(location, anchor, false)?,
            Event::MappingStart(anchor, _) => tree.open(location, anchor, true)?,
            Event::SequenceEnd | Event::MappingEnd => tree.close(),
            Event::Alias(anchor) => tree.alias(location, anchor)?,
            Event::DocumentEnd => break,
            Event::Nothing | Event::StreamStart | Event::StreamEnd | Event::DocumentStart(_) => {}
        }
    }
    if let Some(location) = next_document(events)? {
        let message = "only the first document of a file is read; move this one to a file of its own";
        ignored.push((location, message.to_owned()));
    }
    Ok(Document { root: tree.root, ignored })
}

/// Returns the events of the parser, until an error.
fn events(text: &str) -> impl Iterator<Item = Result<(Event<'_>, Span), YamlError>> {
    Parser::new_from_str(text).map(|event| {
        let (event, span) = event.map_err(|error| YamlError {
            location: Location { line: error.marker().line(), column: error.marker().col() + 1 },
            message: format!("invalid YAML: {}", error.info()),
        })?;
        let tag = match &event {
            Event::Scalar(.., tag) | Event::SequenceStart(_, tag) | Event::MappingStart(_, tag) => tag.as_ref(),
            _ => None,
        };
        if tag.is_some_and(|tag| tag.handle.len() + tag.suffix.len() > MAX_TAG_BYTES) {
            let message = format!("the tag of this value has more than {MAX_TAG_BYTES} bytes");
            return Err(YamlError { location: location_of(&span), message });
        }
        Ok((event, span))
    })
}

/// Returns the location of the next document that has content, or of a syntax error in it.
///
/// # Errors
///
/// Returns a syntax error before the next document, such as a tab in place of spaces, because the rest of the first
/// document would be ignored.
fn next_document<'t>(
    events: impl Iterator<Item = Result<(Event<'t>, Span), YamlError>>,
) -> Result<Option<Location>, YamlError> {
    let mut is_next = false;
    for event in events {
        let (event, span) = match event {
            Ok(event) => event,
            Err(error) if is_next => return Ok(Some(error.location)),
            Err(error) => return Err(error),
        };
        match event {
            Event::DocumentStart(_) => is_next = true,
            Event::Scalar(text, ScalarStyle::Plain, ..) if is_null(&text) => {}
            Event::Scalar(..) | Event::SequenceStart(..) | Event::MappingStart(..) | Event::Alias(_) => {
                return Ok(Some(location_of(&span)));
            }
            _ => {}
        }
    }
    Ok(None)
}

fn is_null(text: &str) -> bool {
    matches!(text, "" | "~" | "null" | "Null" | "NULL")
}

/// Replaces a tab after the colon of a key by a space: YAML permits it, but the parser does not.
///
/// Tabs in quotes and in block scalars are part of the text. Their spans come from a text in which they are replaced as
/// well, which changes no span.
fn space_after_colons(text: &str) -> Cow<'_, str> {
    if !text.contains(":\t") {
        return Cow::Borrowed(text);
    }
    let replaced = text.replace(":\t", ": ");
    let mut texts = Vec::new();
    for event in events(&replaced) {
        // The caller reports the error, at the same location.
        let Ok((event, span)) = event else { break };
        if matches!(event, Event::Scalar(_, style, ..) if style != ScalarStyle::Plain) {
            texts.push(span.start.index()..span.end.index());
        }
    }
    let mut texts = texts.into_iter().peekable();
    let mut previous = ' ';
    let mut result = String::with_capacity(text.len());
    for (index, character) in text.chars().enumerate() {
        while texts.next_if(|span| span.end <= index).is_some() {}
        let is_text = texts.peek().is_some_and(|span| span.contains(&index));
        let is_separator = previous == ':' && character == '\t' && !is_text;
        result.push(if is_separator { ' ' } else { character });
        previous = character;
    }
    Cow::Owned(result)
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
    /// Size of the written nodes, without aliases.
    written: Size,
    /// Size of the nodes that aliases copied.
    copied: Size,
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

    fn close(&mut self) {
        let Some(OpenNode { location, anchor, is_map, items }) = self.open.pop() else {
            return;
        };
        let own = Size { nodes: 1, bytes: 0 };
        let size = items.iter().fold(own, |sum, item| sum.plus(item.size));
        let kind = if is_map { Kind::Map(Rc::new(pairs(items))) } else { Kind::List(Rc::new(items)) };
        self.written = self.written.plus(own);
        self.add(Yaml { location, kind, size }, anchor);
    }

    fn alias(&mut self, location: Location, anchor: usize) -> Result<(), YamlError> {
        let Some(target) = self.anchors.get(&anchor) else {
            return Err(YamlError { location, message: "the alias refers to a list or map that contains it".into() });
        };
        self.copied = self.copied.plus(target.size);
        let max_nodes = MAX_COPIED_NODES + self.written.nodes;
        if self.copied.nodes > max_nodes {
            let message = format!("the aliases copy more than {max_nodes} values");
            return Err(YamlError { location, message });
        }
        let max_bytes = MAX_COPIED_BYTES + self.written.bytes;
        if self.copied.bytes > max_bytes {
            let message = format!("the aliases copy texts of more than {max_bytes} bytes");
            return Err(YamlError { location, message });
        }
        let target = target.clone();
        self.add(target, 0);
        Ok(())
    }

    fn add(&mut self, node: Yaml, anchor: usize) {
        if anchor > 0 {
            self.anchors.insert(anchor, node.clone());
        }
        match self.open.last_mut() {
            Some(parent) => parent.items.push(node),
            None => self.root = Some(node),
        }
    }
}

/// Reads a small YAML document as JSON, with texts as its only scalars.
///
/// # Errors
///
/// Returns an error if the text is longer than `max_bytes`, is not valid YAML, contains a key twice, a tag or a second
/// document, or has more than `max_bytes` after its aliases are copied.
pub fn read_small(text: &str, max_bytes: usize) -> Result<serde_json::Value, SmallYamlError> {
    if text.len() > max_bytes {
        return Err(SmallYamlError::TooLong(max_bytes));
    }
    let document = parse(text)?;
    if let Some((location, message)) = document.ignored.into_iter().next() {
        return Err(YamlError { location, message }.into());
    }
    let Some(root) = document.root else {
        return Ok(serde_json::Value::Null);
    };
    if root.size.bytes > max_bytes || root.size.nodes > max_bytes {
        return Err(SmallYamlError::TooLong(max_bytes));
    }
    Ok(to_json(&root)?)
}

/// Error returned by [`read_small`].
#[derive(Debug, thiserror::Error)]
pub enum SmallYamlError {
    /// The document is too long, or becomes too long by its aliases.
    #[error("the YAML has more than {0} bytes or values, including those that aliases copy")]
    TooLong(usize),
    /// The document is not valid YAML, or is nested too deeply.
    #[error("line {line}, column {column}: {message}")]
    Invalid {
        /// Line number, from 1.
        line: usize,
        /// Column number in characters, from 1.
        column: usize,
        /// Description of the mistake.
        message: String,
    },
}

impl From<YamlError> for SmallYamlError {
    fn from(YamlError { location: Location { line, column }, message }: YamlError) -> Self {
        Self::Invalid { line, column, message }
    }
}

fn to_json(node: &Yaml) -> Result<serde_json::Value, YamlError> {
    Ok(match &node.kind {
        Kind::Null => serde_json::Value::Null,
        Kind::Scalar { text, .. } => text.as_str().into(),
        Kind::List(items) => serde_json::Value::Array(items.iter().map(to_json).collect::<Result<_, _>>()?),
        Kind::Map(pairs) => {
            let mut object = serde_json::Map::new();
            for (key, value) in pairs.iter() {
                let name = key.scalar().unwrap_or_default().0;
                if object.insert(name.to_owned(), to_json(value)?).is_some() {
                    let message = format!("the key {name:?} appears twice");
                    return Err(YamlError { location: key.location, message });
                }
            }
            object.into()
        }
    })
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
        let tree = parse("a: &x [1, two]\nb: *x\nc: 'true'\n").ok().unwrap().root.unwrap();
        let Kind::Map(pairs) = &tree.kind else { panic!("not a map") };
        assert_eq!(pairs[0].1.location, Location { line: 1, column: 4 });
        assert!(matches!(&pairs[1].1.kind, Kind::List(items) if items.len() == 2));
        assert!(matches!(&pairs[2].1.kind, Kind::Scalar { plain: false, .. }));
    }

    fn error_of(text: &str) -> String {
        parse(text).err().map(|error| error.message).unwrap_or_default()
    }

    /// Returns lists of ten aliases each to the list before, which have more than ten to the power of `levels` values.
    fn nested_aliases(levels: usize) -> String {
        let mut bomb = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..levels {
            let alias = format!("*a{}, ", level - 1).repeat(10);
            bomb += &format!("a{level}: &a{level} [{alias}]\n");
        }
        bomb
    }

    #[test]
    fn a_small_text_cannot_become_a_huge_tree() {
        assert_eq!(error_of(&nested_aliases(5)), "");
        assert!(error_of(&nested_aliases(12)).starts_with("the aliases copy more than 400"));
        let long = format!("a: &a {}\nb: [{}]\n", "x".repeat(10_000), "*a, ".repeat(1_000));
        assert_eq!(error_of(&long), "the aliases copy texts of more than 4204306 bytes");
        for deep in ["[", "- ", "{a: ", "? "] {
            assert_ne!(error_of(&deep.repeat(10_000)), "", "{deep:?}");
        }
    }

    #[test]
    fn a_tag_that_few_bytes_repeat_is_short() {
        let text = |length: usize, node: &str| format!("%TAG !e! {}\n---\nk: !e!a {node}\n", "x".repeat(length));
        for node in ["y", "[y]", "{y: z}", "'a:\tb'"] {
            assert_eq!(error_of(&text(MAX_TAG_BYTES - 1, node)), "", "{node}");
            let error = error_of(&text(MAX_TAG_BYTES, node));
            assert_eq!(error, "the tag of this value has more than 256 bytes", "{node}");
        }
        let ignored = parse(&format!("[{}]", "!e x, ".repeat(5_000))).ok().unwrap().ignored;
        assert_eq!(ignored.len(), MAX_DIAGNOSTICS);
    }

    /// Aliases may copy as much as the text contains, so that a large file can share its limits.
    #[test]
    fn aliases_may_copy_more_in_a_larger_file() {
        let limit = "limits: [&limit {unit: day, requests_per_unit: 1}]\n";
        let descriptor = "- {key: user, value: some, rate_limit: *limit}\n";
        let count = MAX_COPIED_NODES / 5;
        assert_eq!(error_of(&format!("{limit}descriptors:\n{}", descriptor.repeat(2 * count))), "");
        let aliases = "*limit, ".repeat(count + 10);
        assert_ne!(error_of(&format!("{limit}descriptors: [{aliases}]\n")), "");
    }

    #[test]
    fn a_small_document_is_read_as_texts() {
        let read = |text: &str| read_small(text, 64).map_err(|error| error.to_string());
        let expected =
            serde_json::json!({ "a": ["1", "true", null, { "b": "x" }], "c": ["1", "true", null, { "b": "x" }] });
        assert_eq!(read("a: &a [1, 'true', ~, {b: x}]\nc: *a\n"), Ok(expected));
        assert_eq!(read("# nothing"), Ok(serde_json::Value::Null));
        assert_eq!(
            read("a: [\n"),
            Err("line 2, column 1: invalid YAML: while parsing a node, did not find expected node content".into())
        );
        for (text, expected) in [
            ("a: 1\nb: {a: 2, a: 3}", "line 2, column 11: the key \"a\" appears twice"),
            ("a: !x 1", "line 1, column 4: the tag \"!x\" of this value is ignored"),
            ("a: 1\n---\nb: 2\n", "only the first document of a file is read; move this one to a file of its own"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.ends_with(expected), "{text}: {error}");
        }
        for text in [&*"x".repeat(65), "a: &a [x,x,x,x,x,x]\nb: &b [*a,*a,*a]\nc: [*b,*b,*b]"] {
            let expected = "the YAML has more than 64 bytes or values, including those that aliases copy";
            assert_eq!(read(text), Err(expected.into()), "{text}");
        }
    }
}
