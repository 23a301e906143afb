//! The name of a counter: `{domain|user=alice|path=/v1/charges}fw:60`.
//!
//! Unambiguous whatever a caller puts into a value: what has a meaning in the name is percent-encoded in it. Readable
//! in redis-cli. The braces are Redis' hash tag, the shard: by default all of a domain and descriptor. The algorithm
//! stands behind, and a fixed window's length, so that limits of different shapes on one descriptor never meet, while
//! an override of the same unit counts on the rule's own counter.
//!
//! Where the domain says by which entries it is sharded, only these stand in the braces, and the others behind, in their
//! order; the place of one that stands in the braces is held by its key: `{domain|user=alice}|user|path=/v1/charges|fw:60`.
//! All counters of a user are on one shard then. A descriptor that has none of the entries is its own shard.

use std::io::Write;

use sha2::{Digest, Sha256};
use sluicegate_common::{ESCAPED, ESCAPED_PATTERN, escape};
use smallvec::SmallVec;

use crate::{
    algorithm::Algorithm,
    rules::{Entry, Node, Segment},
};

/// Longer names end in a digest of the whole.
const MAX: usize = 256;
/// What stays readable of them.
const READABLE: usize = 128;
/// 160 bits, so that nobody finds two descriptors with one digest.
const DIGEST: usize = 20;

/// Appends the name of the counter. `scope`: of rules that are only tried out. `path` has a node for each entry at least,
/// or is empty for an override.
pub(super) fn write(
    name: &mut Vec<u8>,
    scope: &str,
    domain: &str,
    shard_by: &[Box<str>],
    entries: &[Entry<'_>],
    path: &[&Node],
    algorithm: &Algorithm,
) {
    let start = name.len();
    name.push(b'{');
    name.extend_from_slice(scope.as_bytes());
    escape(name, domain, ESCAPED);
    let shard = shard(shard_by, entries);
    for (place, entry) in entries.iter().enumerate().filter(|_| shard.is_empty()) {
        write_entry(name, *entry, path.get(place));
    }
    for place in &shard {
        write_entry(name, entries[*place], path.get(*place));
    }
    if name.len() - start > MAX {
        shorten(name, start);
    }
    name.push(b'}');
    if !shard.is_empty() {
        let start = name.len();
        for (place, entry) in entries.iter().enumerate() {
            if shard.contains(&place) {
                name.push(b'|');
                escape(name, entry.key, ESCAPED);
            } else {
                write_entry(name, *entry, path.get(place));
            }
        }
        if name.len() - start > MAX {
            shorten(name, start);
        }
        name.push(b'|');
    }
    name.extend_from_slice(algorithm.tag().as_bytes());
    if let Some(scope) = algorithm.scope() {
        name.push(b':');
        name.extend_from_slice(itoa::Buffer::new().format(scope).as_bytes());
    }
}

/// The places of the entries that choose the shard: of each key the first, in the order of the keys.
fn shard(shard_by: &[Box<str>], entries: &[Entry<'_>]) -> SmallVec<[usize; 4]> {
    shard_by.iter().filter_map(|key| entries.iter().position(|entry| *entry.key == **key)).collect()
}

fn write_entry(name: &mut Vec<u8>, entry: Entry<'_>, node: Option<&&Node>) {
    name.push(b'|');
    escape(name, entry.key, ESCAPED);
    name.push(b'=');
    match node {
        Some(Node { segment: Segment::Shared(pattern), .. }) => escape(name, pattern, ESCAPED_PATTERN),
        Some(Node { ip_prefix: Some(prefix), .. }) => match prefix.network(entry.value) {
            Some(network) => escape(name, &network, ESCAPED),
            None => escape(name, entry.value, ESCAPED),
        },
        Some(_) | None => escape(name, entry.value, ESCAPED),
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
        // Writing to memory cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::algorithm::{MaxHits, Micros, fixed_window::FixedWindow};

    fn name(domain: &str, shard_by: &[&str], entries: &[(String, String)]) -> String {
        let algorithm = FixedWindow::new(MaxHits::hard(1), Micros::from_secs(60), true).unwrap().into();
        // The names of a request share a buffer.
        let mut name = b"before".to_vec();
        let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        let shard_by: Vec<Box<str>> = shard_by.iter().map(|key| (*key).into()).collect();
        write(&mut name, "", domain, &shard_by, &entries, &[], &algorithm);
        String::from_utf8(name.split_off("before".len())).unwrap()
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
            assert_eq!(name("api", &[], &entries), expected);
        }
    }

    #[test]
    fn the_entries_that_choose_the_shard_stand_in_the_braces() {
        let entries = pairs(&[("path", "/x"), ("user", "a"), ("api", "1"), ("user", "b")]);
        for (shard_by, expected) in [
            (&["user"][..], "{d|user=a}|path=/x|user|api=1|user=b|fw:60"),
            (&["user", "api"], "{d|user=a|api=1}|path=/x|user|api|user=b|fw:60"),
            (&["api", "user"], "{d|api=1|user=a}|path=/x|user|api|user=b|fw:60"),
            (&["tenant", "api"], "{d|api=1}|path=/x|user=a|api|user=b|fw:60"),
            (&["tenant"], "{d|path=/x|user=a|api=1|user=b}fw:60"),
        ] {
            assert_eq!(name("d", shard_by, &entries), expected);
        }
    }

    /// However long the rest is, and however long the shard itself.
    #[test]
    fn long_names_of_one_shard_stay_on_it() {
        let long = "x".repeat(400);
        let one = name("d", &["user"], &pairs(&[("user", &long), ("path", &long)]));
        let other = name("d", &["user"], &pairs(&[("path", "/"), ("user", &long)]));
        let shard = |name: &str| name.split_once('}').unwrap().0.to_owned();
        assert_eq!(shard(&one), shard(&other));
        assert!(one.len() < 2 * MAX && one.ends_with("|fw:60"), "{one}");
        // The rest by itself: `|path=` and so many letters are as long as may be, and with one more they are not.
        for (letters, is_whole) in [(MAX - 11, true), (MAX - 10, false)] {
            let name = name("d", &["user"], &pairs(&[("path", &"x".repeat(letters)), ("user", "u")]));
            assert_eq!(!name.contains('~'), is_whole, "{name}");
        }
        // The same of what chooses the shard, which is `{d|user=` and so many letters.
        for (letters, is_whole) in [(MAX - 8, true), (MAX - 7, false)] {
            let name = name("d", &[], &pairs(&[("user", &"x".repeat(letters))]));
            assert_eq!(!name.contains('~'), is_whole, "{name}");
        }
    }

    #[test]
    fn long_names_are_cut_and_stay_distinct() {
        let long = |last: &str| pairs(&[("user", &("é".repeat(1_000) + last))]);
        // Wherever the cut falls, in a letter of two bytes or between them.
        for domain in ["api", "apis"] {
            let (one, other) = (name(domain, &[], &long("1")), name(domain, &[], &long("2")));
            assert_ne!(one, other);
            assert!(one.len() < MAX && one.contains("|user=éé"), "{one}");
        }
    }

    proptest! {
        #[test]
        fn different_descriptors_never_share_a_name(
            a in prop::collection::vec(("[a|=%{}*~é]{0,3}", "[a|=%{}*~é]{0,3}"), 0..4),
            b in prop::collection::vec(("[a|=%{}*~é]{0,3}", "[a|=%{}*~é]{0,3}"), 0..4),
            domains in ("[a|=]{0,2}", "[a|=]{0,2}"),
            shard_by in prop::sample::subsequence(vec!["a", "|", "=", "é"], 0..4),
        ) {
            let same = name(&domains.0, &shard_by, &a) == name(&domains.1, &shard_by, &b);
            prop_assert_eq!(same, a == b && domains.0 == domains.1);
        }
    }
}
