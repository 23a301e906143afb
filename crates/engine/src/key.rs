//! Names of counters, such as `{domain|user=alice|path=/v1/charges}fw:60`.
//!
//! A name is unambiguous for all values that callers send: characters with a meaning in the name are percent-encoded.
//! It is also readable in redis-cli. The text in braces is the shard key, Redis' hash tag: by default the domain and
//! the whole descriptor. The algorithm follows, with the length of a fixed window. Limits with different algorithms on
//! one descriptor therefore have different counters, while an override with the same unit uses the rule's own counter.
//!
//! If the domain lists entries to shard by, only these are in the braces. All entries follow in their order, and an
//! entry from the braces is represented by its key alone: `{domain|user=alice}|user|path=/v1/charges|fw:60`. All
//! counters of a user are then on one shard. Without any of the listed entries the whole descriptor is the shard key.
//!
//! In Redis, `redis.key_prefix` precedes the name. The memory store has only a hash of it.

use std::io::Write;

use sha2::{Digest, Sha256};
use sluicegate_algorithm::{Algorithm, Program};
use sluicegate_placement::{ESCAPED, ESCAPED_PATTERN, escape};
use sluicegate_rules::{Entry, Node, RuleSet, Segment};
use smallvec::SmallVec;

use super::{ValueHash, bounded};

/// Maximum length of each of the two parts of a name, in bytes. A longer part ends in a digest of the whole part.
const MAX_BYTES: usize = 256;
/// Number of bytes of a shortened part that stay readable.
const READABLE_BYTES: usize = 128;
/// Length of the digest: 160 bits, so that finding two descriptors with the same digest is infeasible.
const DIGEST_BYTES: usize = 20;

/// Returns the name of a counter.
///
/// `scope` is a prefix that separates the counters of candidate rules; it is empty for the rules in force. `path` has
/// at least one node per entry, or is empty for an override. With a `hash`, the name contains hashes of the values.
pub(super) fn name(
    scope: &str,
    domain: &str,
    shard_by: &[Box<str>],
    entries: &[Entry<'_>],
    path: &[&Node],
    counted_by: CountedBy,
    hash: Option<&ValueHash>,
) -> Vec<u8> {
    let mut name = Vec::with_capacity(128);
    name.push(b'{');
    name.extend_from_slice(scope.as_bytes());
    escape(&mut name, domain, ESCAPED);
    let shard_entries = shard_entries(shard_by, entries);
    if shard_entries.is_empty() {
        for (index, entry) in entries.iter().enumerate() {
            write_entry(&mut name, *entry, path.get(index), hash);
        }
    }
    for index in &shard_entries {
        write_entry(&mut name, entries[*index], path.get(*index), hash);
    }
    if name.len() > MAX_BYTES {
        shorten(&mut name, 0);
    }
    name.push(b'}');
    if !shard_entries.is_empty() {
        let start = name.len();
        for (index, entry) in entries.iter().enumerate() {
            if shard_entries.contains(&index) {
                name.push(b'|');
                escape(&mut name, entry.key, ESCAPED);
            } else {
                write_entry(&mut name, *entry, path.get(index), hash);
            }
        }
        if name.len() - start > MAX_BYTES {
            shorten(&mut name, start);
        }
        name.push(b'|');
    }
    name.extend_from_slice(counted_by.tag.as_bytes());
    if let Some(scope) = counted_by.scope {
        name.push(b':');
        name.extend_from_slice(itoa::Buffer::new().format(scope).as_bytes());
    }
    name
}

/// The end of a counter's name, which separates the counters of one descriptor.
#[derive(Clone, Copy)]
pub(super) struct CountedBy {
    /// See [`CounterProgram::TAG`](sluicegate_algorithm::CounterProgram::TAG).
    tag: &'static str,
    /// See [`Limiter::scope`](sluicegate_algorithm::Limiter::scope).
    scope: Option<u64>,
}

impl From<&Algorithm> for CountedBy {
    fn from(algorithm: &Algorithm) -> Self {
        Self { tag: algorithm.tag(), scope: algorithm.scope() }
    }
}

impl From<&Program> for CountedBy {
    fn from(program: &Program) -> Self {
        Self { tag: program.tag(), scope: program.algorithm().and_then(Algorithm::scope) }
    }
}

/// Returns the keys of the entries that select the shard of a domain's counters; none if the whole descriptor does.
pub(super) fn shard_by<'r>(rules: &'r RuleSet, domain: &str) -> &'r [Box<str>] {
    match rules.settings_of(domain) {
        Some(settings) => &settings.shard_by,
        None => &[],
    }
}

/// Returns the indices of the entries that select the shard: the first entry with each key, in the order of the keys.
fn shard_entries(shard_by: &[Box<str>], entries: &[Entry<'_>]) -> SmallVec<[usize; 4]> {
    shard_by.iter().filter_map(|key| entries.iter().position(|entry| *entry.key == **key)).collect()
}

/// Writes an entry of a counter's name. Different values share a counter only because of the rule: if they are in the
/// same network, or match a pattern that counts all values together.
fn write_entry(name: &mut Vec<u8>, entry: Entry<'_>, node: Option<&&Node>, hash: Option<&ValueHash>) {
    name.push(b'|');
    escape(name, entry.key, ESCAPED);
    name.push(b'=');
    let network = match node {
        Some(Node { segment: Segment::Shared(pattern), .. }) => return escape(name, pattern, ESCAPED_PATTERN),
        Some(Node { ip_prefix: Some(prefix), .. }) => Some(prefix.network(entry.value)),
        Some(_) | None => None,
    };
    let value = &*bounded(entry.value);
    match (network, hash) {
        (None, None) => escape(name, value, ESCAPED),
        (Some(None), None) => escape_non_address(name, value),
        (Some(Some(network)), None) => escape(name, &network, ESCAPED),
        (Some(Some(network)), Some(hash)) => name.extend_from_slice(hash.of_network(&network).as_bytes()),
        (None | Some(None), Some(hash)) => name.extend_from_slice(hash.of(value).as_bytes()),
    }
}

/// Escapes `/` as well, so that the text `10.0.0.0/8` does not share the counter of the addresses of this network.
fn escape_non_address(name: &mut Vec<u8>, value: &str) {
    for (index, part) in value.split('/').enumerate() {
        if index > 0 {
            name.extend_from_slice(b"%2F");
        }
        escape(name, part, ESCAPED);
    }
}

/// Shortens the part of a name from `start` on to its beginning and a digest of the whole part.
fn shorten(name: &mut Vec<u8>, start: usize) {
    let digest = Sha256::digest(&name[start..]);
    // A cut inside a UTF-8 sequence would make the name invalid.
    let end = (start..=start + READABLE_BYTES).rev().find(|end| is_char_boundary(name, *end)).unwrap_or(start);
    name.truncate(end);
    name.push(b'~');
    for byte in &digest[..DIGEST_BYTES] {
        // Writing to memory cannot fail.
        let _ = write!(name, "{byte:02x}");
    }
}

/// Returns `false` if a cut at `index` would be inside a UTF-8 sequence.
fn is_char_boundary(text: &[u8], index: usize) -> bool {
    text.get(index).is_none_or(|byte| byte & 0xC0 != 0x80)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;
    use sluicegate_algorithm::{MaxHits, Micros, fixed_window::FixedWindow};
    use sluicegate_rules::{IpPrefix, Options, SourceFile, compile};

    use super::*;

    fn name(domain: &str, shard_by: &[&str], entries: &[(String, String)]) -> String {
        let algorithm: Algorithm = FixedWindow::new(MaxHits::hard(1), Micros::from_secs(60), true).unwrap().into();
        let entries: Vec<_> = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        let shard_by: Vec<Box<str>> = shard_by.iter().map(|key| (*key).into()).collect();
        String::from_utf8(super::name("", domain, &shard_by, &entries, &[], (&algorithm).into(), None)).unwrap()
    }

    fn pairs(entries: &[(&str, &str)]) -> Vec<(String, String)> {
        entries.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_name_contains_the_escaped_entries_in_order() {
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
    fn the_entries_that_select_the_shard_are_in_the_braces() {
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

    #[test]
    fn long_names_of_one_shard_stay_on_it() {
        let long = "x".repeat(400);
        let one = name("d", &["user"], &pairs(&[("user", &long), ("path", &long)]));
        let other = name("d", &["user"], &pairs(&[("path", "/"), ("user", &long)]));
        let shard_entries = |name: &str| name.split_once('}').unwrap().0.to_owned();
        assert_eq!(shard_entries(&one), shard_entries(&other));
        assert!(one.len() < 2 * MAX_BYTES && one.ends_with("|fw:60"), "{one}");
        // The part after the braces consists of `|path=`, the value and `|user`: 11 bytes and the value.
        for (length, is_unshortened) in [(MAX_BYTES - 11, true), (MAX_BYTES - 10, false)] {
            let name = name("d", &["user"], &pairs(&[("path", &"x".repeat(length)), ("user", "u")]));
            assert_eq!(!name.contains('~'), is_unshortened, "{name}");
        }
        // The part in braces consists of `{d|user=` and the value: 8 bytes and the value.
        for (length, is_unshortened) in [(MAX_BYTES - 8, true), (MAX_BYTES - 7, false)] {
            let name = name("d", &[], &pairs(&[("user", &"x".repeat(length))]));
            assert_eq!(!name.contains('~'), is_unshortened, "{name}");
        }
    }

    #[test]
    fn long_names_are_shortened_and_stay_distinct() {
        let long = |last: &str| pairs(&[("user", &("é".repeat(1_000) + last))]);
        // The two domains put the cut between two characters and inside a character of two bytes.
        for domain in ["api", "apis"] {
            let (one, other) = (name(domain, &[], &long("1")), name(domain, &[], &long("2")));
            assert_ne!(one, other);
            assert!(one.len() < MAX_BYTES && one.contains("|user=éé"), "{one}");
        }
    }

    /// Two values share a counter only if the rule says so: by a network of addresses, or by a pattern.
    #[test]
    fn values_share_a_name_only_by_a_network_or_a_pattern() {
        const VALUES: [&str; 16] = [
            "10.1.2.3",
            "10.9.9.9",
            "::ffff:10.1.1.1",
            "10.0.0.0/8",
            "10.0.0.0%2F8",
            " 10.0.0.0/8",
            "11.0.0.1",
            "2001:db8::1",
            "2001:db8::/64",
            "2001:db8::2",
            "1*",
            "1%2A",
            "1",
            "11",
            "x/y",
            "x%2Fy",
        ];
        let text = "domain: d\ndescriptors:\n\
            - {key: net, ip_prefix: {v4: 8, v6: 64}, rate_limit: {unit: second, requests_per_unit: 1}}\n\
            - {key: shared, value: \"1*\", share_threshold: true, rate_limit: {unit: second, requests_per_unit: 1}}\n\
            - {key: each, value: \"1*\", rate_limit: {unit: second, requests_per_unit: 1}}\n\
            - {key: any, rate_limit: {unit: second, requests_per_unit: 1}}\n";
        let file = SourceFile { name: "d.yaml".to_owned(), text: text.to_owned() };
        let (rules, _) = compile(&[file], Options::default()).unwrap();
        let network = |value: &str| IpPrefix { v4: 8, v6: 64 }.network(value);
        let names = |hash: Option<&ValueHash>| {
            let mut names = HashMap::new();
            for key in ["net", "shared", "each", "any"] {
                for value in VALUES {
                    let expected = match key {
                        "net" => network(value).ok_or(value),
                        "shared" => Ok("1*".to_owned()),
                        _ => Err(value),
                    };
                    let counter = crate::counter(&rules, "d", &[Entry { key, value }], hash);
                    let Some((name, _)) = counter else { continue };
                    let known = names.entry(name.clone()).or_insert((key, expected.clone()));
                    assert_eq!(*known, (key, expected), "{name}");
                }
            }
            names
        };
        let plain = names(None);
        assert_eq!(plain["{d|net=10.0.0.0/8}fw:1"].1, Ok("10.0.0.0/8".to_owned()));
        assert_eq!(plain["{d|net=10.0.0.0%2F8}fw:1"].1, Err("10.0.0.0/8"));
        assert!(plain.len() > 35, "{plain:?}");
        let hashed = names(Some(&ValueHash::new(b"a secret of 16 b")));
        assert_eq!(hashed.len(), plain.len());
        assert_ne!(ValueHash::new(b"x").of_network("10.0.0.0/8"), ValueHash::new(b"x").of("10.0.0.0/8"));
        let is_hidden = |name: &String| {
            let value = name.split(['=', '}']).nth(1).unwrap_or_default();
            value == "1*" || value.len() == 32 && value.bytes().all(|byte| byte.is_ascii_hexdigit())
        };
        assert!(hashed.keys().all(is_hidden), "{hashed:?}");
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
