//! Hash tables that callers can fill have random keys, so that callers cannot prepare values that collide.

use std::collections::BTreeSet;

use crate::support::rust_sources;

/// Hashers without a random key. Each use needs a reason in [`UNKEYED`].
const FIXED: [&str; 6] =
    ["FixedState", "SipHasher13::new()", "SipHasher24::new()", "DefaultHasher", "Identity::new(", "BuildHasherDefault"];

/// The code with hashes that are the same in each process, and why callers cannot use that against a table.
const UNKEYED: [(&str, &str); 8] = [
    ("crates/testing/src/model_checker.rs", "no part of a running service"),
    (
        "crates/engine/src/candidate/mod.rs",
        "instances must evaluate the same counters: the hash selects, and is stored nowhere",
    ),
    ("src/service/record.rs", "instances must record the same entities: the hash selects, and is stored nowhere"),
    ("crates/engine/src/matching.rs", "identifies a limit that a caller requests, of 128 bits"),
    (
        "crates/engine/src/wait_queue/mod.rs",
        "the key of a queue in a tree, of 128 bits; an equal one would wait longer",
    ),
    ("crates/engine/src/quotas/mod.rs", "recognises the counter of one bucket after a change of its rule"),
    ("crates/placement/src/ring.rs", "instances and clients must find the same server"),
    ("crates/placement/src/identity.rs", "the hash function itself"),
];

/// The text without comments and tests.
fn code(text: &str) -> String {
    let text = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or_default();
    text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n")
}

#[test]
fn only_hashes_that_fill_no_table_are_without_a_random_key() {
    let sources = [rust_sources("src"), rust_sources("crates")].concat();
    let is_test = |name: &str| name.ends_with("/tests.rs") || name.contains("/tests/") || name.contains("/model/");
    let unkeyed: BTreeSet<String> = sources
        .into_iter()
        .filter(|(name, text)| !is_test(name) && FIXED.iter().any(|hasher| code(text).contains(hasher)))
        .map(|(name, _)| name)
        .collect();
    let expected: BTreeSet<String> = UNKEYED.iter().map(|(name, _)| (*name).to_owned()).collect();
    assert_eq!(unkeyed, expected, "a hash without a random key needs a reason in this test");
}
