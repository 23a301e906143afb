//! Tokens are compared in one place, as digests and in constant time. Times cannot be measured without noise, so the tests
//! read the source.

use std::fs;

use crate::support::{repository, rust_sources};

/// Files of the service that read the header with a token.
const READERS: [&str; 1] = ["src/transport/admin/mod.rs"];
const AUTHENTICATOR: &str = "src/transport/admin/auth.rs";

#[test]
fn tokens_are_compared_in_one_place() {
    for (name, text) in [rust_sources("src"), rust_sources("crates")].concat() {
        let code: String = text.lines().filter(|line| !line.trim_start().starts_with("//")).collect();
        let reads = code.contains("AUTHORIZATION") || code.contains("\"authorization\"");
        // `sluicegate ctl` sends a token.
        let is_client = name.starts_with("crates/ctl/src/ctl/");
        assert_eq!(reads && !is_client, READERS.contains(&name.as_str()), "{name} reads the header with tokens");
        assert_eq!(code.contains("ct_eq"), name == AUTHENTICATOR, "{name} compares secrets");
    }
}

#[test]
fn tokens_are_kept_as_digests_that_only_a_comparison_in_constant_time_reads() {
    let text = fs::read_to_string(repository(AUTHENTICATOR)).unwrap();
    let (code, _tests) = text.split_once("#[cfg(test)]").unwrap();
    let fields = code.split_once("struct Token {").unwrap().1.split_once('}').unwrap().0;
    let fields: Vec<_> = fields.split_whitespace().collect();
    assert_eq!(fields, ["digest:", "TokenDigest,", "caller:", "Caller,"], "a token is kept only as a digest");
    // A derived or written `PartialEq` would end at the first different byte.
    let before = code.split_once("struct TokenDigest").unwrap().0;
    assert!(!before.lines().last().unwrap().contains("derive") && !code.contains("for TokenDigest"));
    // The digest is read only by its constructor and by the comparison.
    let reads: Vec<_> = code.lines().filter(|line| line.contains(".0")).map(str::trim).collect();
    assert_eq!(reads, ["self.0.ct_eq(&other.0).into()"]);
    // Each token is compared, whether or not an earlier one is equal.
    let search = code.split_once("fn by_token").unwrap().1.split_once("\n    }\n").unwrap().0;
    let ends_early = ["return", "break", "find", "any(", "position"].iter().any(|word| search.contains(word));
    assert!(!ends_early && search.matches("is_equal").count() == 1, "{search}");
}
