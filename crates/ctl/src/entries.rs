//! [`Entity`]: a domain and entries on the command line, in every spelling that the program prints.

use anyhow::{Context, bail};
use sluicegate_engine::overrides::Target;
use sluicegate_rules as rules;

/// A domain and the entries of a descriptor.
#[derive(Debug, PartialEq, Eq)]
pub struct Entity {
    /// The domain.
    pub domain: String,
    /// Keys and values.
    pub entries: Vec<(String, String)>,
}

impl Entity {
    /// Reads a domain and its entries (`KEY=VALUE`).
    ///
    /// Without entries, the domain can be a whole descriptor as `ctl top` and `ctl limit list` print it: `shop|user=bob`
    /// or `limit|shop|user=bob`.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no entries, or one of them has no `=`.
    pub fn read(domain: &str, pairs: &[String]) -> anyhow::Result<Self> {
        if pairs.is_empty() {
            return printed(domain).with_context(|| {
                format!("{domain:?} has no entries: add KEY=VALUE, or write DOMAIN|KEY=VALUE in quotes")
            });
        }
        let mut entries = Vec::new();
        for pair in pairs {
            entries.push(key_and_value(pair)?);
        }
        Ok(Self { domain: domain.to_owned(), entries })
    }

    /// Returns the entries as the rules match them.
    pub fn entries(&self) -> Vec<rules::Entry<'_>> {
        self.entries.iter().map(|(key, value)| rules::Entry { key, value }).collect()
    }
}

/// Splits `KEY=VALUE`.
///
/// # Errors
///
/// Returns an error if there is no `=`.
pub fn key_and_value(entry: &str) -> anyhow::Result<(String, String)> {
    let Some((key, value)) = entry.split_once('=') else {
        bail!("{entry:?} is not KEY=VALUE");
    };
    Ok((key.to_owned(), value.to_owned()))
}

/// Reads a descriptor in the form in which it is printed, in which `|`, `=` and `%` of names are percent-encoded.
/// Returns `None` for a text without entries.
pub fn printed(text: &str) -> Option<Entity> {
    let descriptor = match text.split_once('|') {
        // A domain can have the name of a kind of override, and then its entries follow.
        Some(("limit" | "plan", rest)) if !rest.split('|').next()?.contains('=') => rest,
        _ => text,
    };
    match Target::parse(&format!("limit|{descriptor}")) {
        Ok(Target::Limit { domain, entries }) => Some(Entity { domain, entries }),
        Ok(_) | Err(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_descriptor_is_read_in_every_spelling_that_is_printed() {
        let entity = |domain: &str, entries: &[(&str, &str)]| {
            let entries = entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
            Entity { domain: domain.to_owned(), entries }
        };
        for (domain, pairs, expected) in [
            ("shop", &["user=bob", "path=/a=b"][..], entity("shop", &[("user", "bob"), ("path", "/a=b")])),
            ("shop|user=bob", &[], entity("shop", &[("user", "bob")])),
            ("limit|shop|user=bob|path=/a", &[], entity("shop", &[("user", "bob"), ("path", "/a")])),
            ("plan|shop|tenant=acme", &[], entity("shop", &[("tenant", "acme")])),
            ("limit|user=bob", &[], entity("limit", &[("user", "bob")])),
            ("a%7Cb|user=x%3Dy%25", &[], entity("a|b", &[("user", "x=y%")])),
            // With entries, the domain is used as it is.
            ("a|b=c", &["user=bob"], entity("a|b=c", &[("user", "bob")])),
        ] {
            let pairs: Vec<String> = pairs.iter().map(|pair| (*pair).to_owned()).collect();
            assert_eq!(Entity::read(domain, &pairs).unwrap(), expected, "{domain}");
        }
        for (domain, pairs) in [("shop", &[][..]), ("shop|user", &[]), ("", &[]), ("shop", &["user"])] {
            let pairs: Vec<String> = pairs.iter().map(|pair: &&str| (*pair).to_owned()).collect();
            assert!(Entity::read(domain, &pairs).is_err(), "{domain} {pairs:?}");
        }
    }
}
