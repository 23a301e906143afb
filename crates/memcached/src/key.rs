//! [`key_of`]: the key of a counter in memcached.

use sha2::{Digest, Sha256};

/// Maximum length of a key in memcached, in bytes.
pub(crate) const MAX_KEY_BYTES: usize = 250;

/// Returns the key of a counter: the prefix and the counter's name. A key that memcached does not accept, because it is
/// too long or contains other characters than visible ASCII, is the prefix and a digest of the name.
pub(crate) fn key_of(prefix: &str, name: &[u8]) -> String {
    if prefix.len() + name.len() <= MAX_KEY_BYTES
        && let Ok(text) = str::from_utf8(name)
        && text.bytes().all(|byte| byte.is_ascii_graphic())
    {
        return format!("{prefix}{text}");
    }
    let mut key = format!("{prefix}#");
    for byte in Sha256::digest(name) {
        key.push_str(&format!("{byte:02x}"));
    }
    key
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_that_memcached_does_not_accept_becomes_a_digest() {
        assert_eq!(key_of("s:", b"{api|user=a}fw:60"), "s:{api|user=a}fw:60");
        let longest = [b'a'; MAX_KEY_BYTES - 2];
        assert_eq!(key_of("s:", &longest).len(), MAX_KEY_BYTES);
        let digest = |name: &[u8]| {
            let key = key_of("s:", name);
            assert_eq!((&key[..3], key.len()), ("s:#", 67), "{key}");
            key
        };
        assert_ne!(digest(b"a b"), digest(b"a\tb"));
        assert_ne!(digest(&[b'a'; MAX_KEY_BYTES - 1]), digest(&[b'a'; MAX_KEY_BYTES]));
        digest("ä".as_bytes());
        digest(b"\xff");
        digest(b"a\r\nmd b");
    }
}
