//! [`hash_tag`]: the part of a key that selects its server, as Redis Cluster defines it.

/// Returns the hash tag of a key: the text between the first `{` and the next `}`. Returns `None` if that is empty.
#[must_use]
pub fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let start = key.iter().position(|byte| *byte == b'{')? + 1;
    let length = key[start..].iter().position(|byte| *byte == b'}')?;
    if length == 0 {
        return None;
    }
    Some(&key[start..start + length])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_tag_is_the_one_that_redis_uses() {
        for (key, expected) in [
            ("{user1000}.following", Some("user1000")),
            ("foo{}{bar}", None),
            ("foo{{bar}}zap", Some("{bar")),
            ("foo{bar}{zap}", Some("bar")),
            ("foo{bar", None),
            ("foo", None),
        ] {
            assert_eq!(hash_tag(key.as_bytes()), expected.map(str::as_bytes), "{key}");
        }
    }
}
