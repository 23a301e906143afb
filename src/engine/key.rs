//! The name of a counter: `{domain|user=alice|path=/v1/charges}fw:60`.
//!
//! Unambiguous whatever a caller puts into a value: what has a meaning in the name is percent-encoded in it. Readable
//! in redis-cli. The braces are Redis' hash tag: a domain and descriptor live on one shard. The algorithm stands behind,
//! and a fixed window's length, so that limits of different shapes on one descriptor never meet, while an override
//! of the same unit counts on the rule's own counter.

use std::io::Write;

use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use sha2::{Digest, Sha256};

use crate::{
    algorithm::Algorithm,
    rules::{Entry, Node, Segment},
};

/// A raw `*` only ever stands in a pattern that values share; a raw `~` only before a digest.
const ESCAPED: &AsciiSet = &CONTROLS.add(b' ').add(b'%').add(b'{').add(b'}').add(b'|').add(b'=').add(b'*').add(b'~');
/// The same for a shared pattern, whose stars stay.
const ESCAPED_PATTERN: &AsciiSet = &ESCAPED.remove(b'*');

/// Longer names end in a digest of the whole.
const MAX: usize = 256;
/// What stays readable of them.
const READABLE: usize = 128;
/// 160 bits, so that nobody finds two descriptors with one digest.
const DIGEST: usize = 20;

/// Appends the name of the counter. `path` has a node for each entry, or is empty for an override.
pub(super) fn write<'e>(
    name: &mut Vec<u8>,
    domain: &str,
    entries: impl Iterator<Item = Entry<'e>>,
    path: &[&Node],
    algorithm: &Algorithm,
) {
    let start = name.len();
    name.push(b'{');
    escape(name, domain, ESCAPED);
    for (place, entry) in entries.enumerate() {
        name.push(b'|');
        escape(name, entry.key, ESCAPED);
        name.push(b'=');
        match path.get(place) {
            Some(Node { segment: Segment::Shared(pattern), .. }) => escape(name, pattern, ESCAPED_PATTERN),
            Some(Node { ip_prefix: Some(prefix), .. }) => match prefix.network(entry.value) {
                Some(network) => escape(name, &network, ESCAPED),
                None => escape(name, entry.value, ESCAPED),
            },
            Some(_) | None => escape(name, entry.value, ESCAPED),
        }
    }
    if name.len() - start > MAX {
        shorten(name, start);
    }
    name.extend_from_slice(b"}");
    name.extend_from_slice(algorithm.tag().as_bytes());
    if let Some(scope) = algorithm.scope() {
        // Writing to memory cannot fail.
        let _ = write!(name, ":{scope}");
    }
}

fn escape(name: &mut Vec<u8>, text: &str, set: &'static AsciiSet) {
    // Most values have nothing to escape; bytes above ASCII are letters and stay.
    if text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-' | b'.' | b'/' | b':')) {
        name.extend_from_slice(text.as_bytes());
        return;
    }
    for part in text.split_inclusive(|letter: char| !letter.is_ascii()) {
        let ascii = part.trim_end_matches(|letter: char| !letter.is_ascii());
        name.extend(utf8_percent_encode(ascii, set).flat_map(str::bytes));
        name.extend_from_slice(&part.as_bytes()[ascii.len()..]);
    }
}

fn shorten(name: &mut Vec<u8>, start: usize) {
    let digest = Sha256::digest(&name[start..]);
    // Not in the middle of a letter.
    let is_boundary = |at: &usize| name.get(*at).is_none_or(|byte| byte & 0xC0 != 0x80);
    let end = (start..=start + READABLE).rev().find(is_boundary).unwrap_or(start);
    name.truncate(end);
    name.push(b'~');
    for byte in &digest[..DIGEST] {
        let _ = write!(name, "{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::{Micros, Quota, fixed_window::FixedWindow};

    fn name(domain: &str, entries: &[(String, String)]) -> String {
        let algorithm = FixedWindow::new(Quota::hard(1), Micros::from_secs(60), true).unwrap().into();
        let mut name = Vec::new();
        let entries = entries.iter().map(|(key, value)| Entry { key, value });
        write(&mut name, domain, entries, &[], &algorithm);
        String::from_utf8(name).unwrap()
    }

    fn pairs(entries: &[(&str, &str)]) -> Vec<(String, String)> {
        entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn reads_like_the_descriptor() {
        for (entries, expected) in [
            (pairs(&[("user", "alice"), ("path", "/v1/x")]), "{api|user=alice|path=/v1/x}fw:60"),
            (pairs(&[("user", "")]), "{api|user=}fw:60"),
            (pairs(&[("user", "a|b=c{}*~ %")]), "{api|user=a%7Cb%3Dc%7B%7D%2A%7E%20%25}fw:60"),
            (pairs(&[("名", "日本 x")]), "{api|名=日本%20x}fw:60"),
        ] {
            assert_eq!(name("api", &entries), expected);
        }
    }

    #[test]
    fn long_names_are_cut_and_stay_distinct() {
        let long = |last: &str| pairs(&[("user", &("é".repeat(1_000) + last))]);
        let (one, other) = (name("api", &long("1")), name("api", &long("2")));
        assert_ne!(one, other);
        assert!(one.len() < MAX && one.starts_with("{api|user=éé"), "{one}");
    }

    proptest! {
        #[test]
        fn different_descriptors_never_share_a_name(
            a in prop::collection::vec(("[a|=%{}*~é]{0,3}", "[a|=%{}*~é]{0,3}"), 0..4),
            b in prop::collection::vec(("[a|=%{}*~é]{0,3}", "[a|=%{}*~é]{0,3}"), 0..4),
            domains in ("[a|=]{0,2}", "[a|=]{0,2}"),
        ) {
            let same = name(&domains.0, &a) == name(&domains.1, &b);
            prop_assert_eq!(same, a == b && domains.0 == domains.1);
        }
    }
}
