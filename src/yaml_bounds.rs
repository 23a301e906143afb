//! [`check`]: bounds on YAML files that the crate `config` reads. Its parser has none, so a small file could exhaust the
//! stack by its nesting, or the memory by its aliases.

use std::collections::HashMap;

use saphyr_parser::{Event, Parser};

/// Maximum nesting depth.
const MAX_DEPTH: usize = 128;
/// Maximum memory of the values that aliases copy, in bytes.
const MAX_COPIED_BYTES: usize = 4 << 20;
/// Memory of a value without its text, in bytes.
const VALUE_BYTES: usize = 128;

/// Error returned when a YAML file is nested too deeply, or has too many aliases.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum YamlTooLarge {
    /// The nesting is too deep.
    #[error("nesting is deeper than {MAX_DEPTH} levels")]
    Depth,
    /// The aliases copy too much.
    #[error("the aliases copy more than {MAX_COPIED_BYTES} bytes")]
    Copies,
}

/// Checks the nesting and the aliases of a YAML text. Accepts a text with syntax errors, which the crate `config`
/// reports.
///
/// # Errors
///
/// Returns an error if the nesting is too deep, or if the aliases copy too much.
pub(crate) fn check(text: &str) -> Result<(), YamlTooLarge> {
    let mut bytes = 0;
    let mut copied = 0;
    // The anchor of each open list and map, and the bytes before it.
    let mut open = Vec::new();
    let mut anchors = HashMap::new();
    for event in Parser::new_from_str(text) {
        let Ok((event, _)) = event else {
            return Ok(());
        };
        match event {
            Event::Scalar(text, _, anchor, _) => {
                let size = VALUE_BYTES + text.len();
                bytes += size;
                anchors.insert(anchor, size);
            }
            Event::SequenceStart(anchor, _) | Event::MappingStart(anchor, _) => {
                if open.len() == MAX_DEPTH {
                    return Err(YamlTooLarge::Depth);
                }
                open.push((anchor, bytes));
                bytes += VALUE_BYTES;
            }
            Event::SequenceEnd | Event::MappingEnd => {
                if let Some((anchor, start)) = open.pop() {
                    anchors.insert(anchor, bytes - start);
                }
            }
            Event::Alias(anchor) => {
                let size = anchors.get(&anchor).copied().unwrap_or_default();
                bytes += size;
                copied += size;
                if copied > MAX_COPIED_BYTES {
                    return Err(YamlTooLarge::Copies);
                }
            }
            _ => {}
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nesting_is_bounded() {
        for (open, close) in [("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", "")] {
            let nested = |depth: usize| format!("{}x{}", open.repeat(depth), close.repeat(depth));
            assert_eq!(check(&nested(MAX_DEPTH)), Ok(()), "{open}");
            assert_eq!(check(&nested(MAX_DEPTH + 1)), Err(YamlTooLarge::Depth), "{open}");
        }
        assert_eq!(check(&"- ".repeat(10_000)), Err(YamlTooLarge::Depth));
    }

    #[test]
    fn copies_of_aliases_are_bounded() {
        let scalar = |count: usize| format!("a: &a {}\nb: [{}]\n", "x".repeat(1_000), "*a, ".repeat(count));
        let max = MAX_COPIED_BYTES / (VALUE_BYTES + 1_000);
        assert_eq!(check(&scalar(max)), Ok(()));
        assert_eq!(check(&scalar(max + 1)), Err(YamlTooLarge::Copies));
        let mut lists = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
        for level in 1..12 {
            lists += &format!("a{level}: &a{level} [{}]\n", format!("*a{}, ", level - 1).repeat(10));
        }
        assert_eq!(check(&lists), Err(YamlTooLarge::Copies));
        assert_eq!(check("a: &a [*a]\n"), Ok(()));
    }

    #[test]
    fn a_text_with_syntax_errors_is_left_to_its_reader() {
        assert_eq!(check("a: [\n"), Ok(()));
        assert_eq!(check("a: *unknown\n"), Ok(()));
    }
}
