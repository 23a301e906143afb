//! [`Yaml`]: the format of YAML files that the crate `config` reads. The parser is that of rule files, with its bounds on
//! nesting and aliases.

use std::error::Error;

use config::{FileStoredFormat, Format, Map, Value, ValueKind};
use serde_json::Value as Json;

use crate::rules::read_small;

/// Maximum size of a file, in bytes.
const MAX_BYTES: usize = 16 << 20;

/// YAML whose scalars are texts, as in environment variables. `config` converts them to numbers and booleans.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Yaml;

impl Format for Yaml {
    fn parse(&self, uri: Option<&String>, text: &str) -> Result<Map<String, Value>, Box<dyn Error + Send + Sync>> {
        match convert(uri, read_small(text, MAX_BYTES)?).kind {
            ValueKind::Table(table) => Ok(table),
            ValueKind::Nil => Ok(Map::new()),
            _ => Err("the file must consist of `key: value`".into()),
        }
    }
}

impl FileStoredFormat for Yaml {
    fn file_extensions(&self) -> &'static [&'static str] {
        &["yaml", "yml"]
    }
}

/// Converts a value from the file `uri`.
fn convert(uri: Option<&String>, value: Json) -> Value {
    let kind = match value {
        Json::Null => ValueKind::Nil,
        Json::String(text) => ValueKind::String(text),
        scalar @ (Json::Bool(_) | Json::Number(_)) => ValueKind::String(scalar.to_string()),
        Json::Array(items) => ValueKind::Array(items.into_iter().map(|item| convert(uri, item)).collect()),
        Json::Object(items) => {
            ValueKind::Table(items.into_iter().map(|(key, value)| (key, convert(uri, value))).collect())
        }
    };
    Value::new(uri, kind)
}

#[cfg(test)]
mod tests {
    use config::{File, Source};

    use super::*;

    fn read(text: &str) -> Result<Map<String, Value>, String> {
        File::from_str(text, Yaml).collect().map_err(|error| error.to_string())
    }

    #[test]
    fn scalars_become_what_their_reader_expects() {
        #[derive(Debug, PartialEq, serde::Deserialize)]
        struct Expected {
            text: String,
            number: u64,
            share: f64,
            flag: bool,
            list: Vec<u8>,
            table: Map<String, String>,
            nothing: Option<u8>,
        }
        let text = "text: 1\nnumber: 12\nshare: 0.5\nflag: true\nlist: [1, 2]\ntable: {a: b}\nnothing: ~\n";
        let value = Value::new(None, ValueKind::Table(read(text).unwrap()));
        let expected = Expected {
            text: "1".into(),
            number: 12,
            share: 0.5,
            flag: true,
            list: vec![1, 2],
            table: Map::from([("a".into(), "b".into())]),
            nothing: None,
        };
        assert_eq!(value.try_deserialize::<Expected>().unwrap(), expected);
    }

    #[test]
    fn a_file_without_keys_is_empty() {
        for text in ["", "# comment\n", "~\n"] {
            assert!(read(text).unwrap().is_empty(), "{text:?}");
        }
    }

    #[test]
    fn a_file_that_could_be_misunderstood_is_rejected() {
        for (text, expected) in [
            ("a: 1\na: 2\n", "line 2, column 1: the key \"a\" appears twice"),
            ("a: 1\n---\nb: 2\n", "line 3, column 1: only the first document of a file is read"),
            ("- a\n", "the file must consist of `key: value`"),
            ("a: [\n", "line 2, column 1: invalid YAML"),
            ("a: &a [*a]\n", "the alias refers to a list or map that contains it"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
        assert!(read(&"- ".repeat(10_000)).unwrap_err().contains("nesting is deeper than 128 levels"));
        assert!(read(&" ".repeat(MAX_BYTES + 1)).unwrap_err().contains("more than 16777216 bytes"));
    }
}
