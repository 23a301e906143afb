//! [`Metadata`]: free-form data of a rule that a response can contain.

use std::collections::BTreeMap;

use super::yaml::{Kind, Yaml};

/// A JSON value.
#[derive(Clone, Debug, PartialEq)]
pub enum Metadata {
    /// No value.
    Null,
    /// A boolean.
    Bool(bool),
    /// A number.
    Number(f64),
    /// A string.
    Text(String),
    /// A list.
    List(Vec<Metadata>),
    /// A map.
    Map(BTreeMap<String, Metadata>),
}

impl Metadata {
    /// Adds the keys of `other` that are missing, as envoyproxy/ratelimit does.
    ///
    /// Values that are present are not replaced, and nested maps are merged in the same way.
    pub fn merge(&mut self, other: &Self) {
        let (Self::Map(own), Self::Map(other)) = (self, other) else {
            return;
        };
        for (key, value) in other {
            match own.get_mut(key) {
                Some(present) => present.merge(value),
                None => {
                    own.insert(key.clone(), value.clone());
                }
            }
        }
    }

    pub(super) fn from_yaml(node: &Yaml) -> Self {
        match &node.kind {
            Kind::Null => Self::Null,
            Kind::Scalar { text, plain: false } => Self::Text(text.clone()),
            Kind::Scalar { text, plain: true } => match text.as_str() {
                "true" | "True" | "TRUE" => Self::Bool(true),
                "false" | "False" | "FALSE" => Self::Bool(false),
                _ => match text.parse::<f64>() {
                    Ok(number) if number.is_finite() => Self::Number(number),
                    _ => Self::Text(text.clone()),
                },
            },
            Kind::List(items) => Self::List(items.iter().map(Self::from_yaml).collect()),
            Kind::Map(pairs) => {
                let mut map = BTreeMap::new();
                for (key, value) in pairs.iter() {
                    let (key, _) = key.scalar().unwrap_or_default();
                    map.insert(key.to_owned(), Self::from_yaml(value));
                }
                Self::Map(map)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::yaml, *};

    fn metadata(text: &str) -> Metadata {
        Metadata::from_yaml(&yaml::parse(text).ok().unwrap().root.unwrap())
    }

    #[test]
    fn a_plain_scalar_is_a_boolean_or_a_number_if_json_has_it() {
        let text = |text: &str| Metadata::Text(text.to_owned());
        for (yaml, expected) in [
            ("true", Metadata::Bool(true)),
            ("TRUE", Metadata::Bool(true)),
            ("false", Metadata::Bool(false)),
            ("False", Metadata::Bool(false)),
            ("7", Metadata::Number(7.0)),
            ("-1.5e3", Metadata::Number(-1_500.0)),
            ("~", Metadata::Null),
            ("'7'", text("7")),
            ("'true'", text("true")),
            ("nan", text("nan")),
            ("inf", text("inf")),
            ("1e999", text("1e999")),
        ] {
            assert_eq!(metadata(yaml), expected, "{yaml}");
        }
    }

    #[test]
    fn merging_adds_missing_keys_and_keeps_present_values() {
        let mut merged = metadata("{a: 1, list: [1], deep: {b: 2}}");
        merged.merge(&metadata("{a: {x: 9}, list: [9], deep: {b: 9, d: 4}, c: 3}"));
        assert_eq!(merged, metadata("{a: 1, list: [1], deep: {b: 2, d: 4}, c: 3}"));
    }
}
