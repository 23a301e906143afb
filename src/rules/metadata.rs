//! A rule's free-form `metadata`, which a response can carry to the caller.

use std::collections::BTreeMap;

/// A value as in JSON.
#[derive(Clone, Debug, PartialEq)]
pub enum Metadata {
    /// Nothing.
    Null,
    /// True or false.
    Bool(bool),
    /// A number.
    Number(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Metadata>),
    /// A map.
    Map(BTreeMap<String, Metadata>),
}

impl Metadata {
    /// Adds what is not there yet: a value that is there stays, and maps merge, as envoyproxy/ratelimit does it.
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
}
