//! [`Secret`] and [`Digests`]: the hashes that identify a counter in memory, where counter names are not stored.

use std::hash::Hasher;

use sha2::{Digest, Sha256};
use siphasher::sip128::{Hasher128, SipHasher13};

/// A random hash key, so that callers cannot construct two counter names with the same hash.
pub struct Secret([u8; 16]);

impl Secret {
    /// Generates a random secret.
    #[must_use]
    pub fn random() -> Self {
        Self(rand::random())
    }

    /// Returns the 128-bit keyed SipHash-1-3 of a counter's name.
    pub fn identity(&self, key: &[u8]) -> u128 {
        let mut hasher = SipHasher13::new_with_key(&self.0);
        hasher.write(key);
        hasher.finish128().as_u128()
    }
}

/// The first 88 bits of the SHA-256 of a counter's name, by which all peers identify the counter.
///
/// It has no key, so that peers need not agree on one. Finding a name with the digest of another counter is infeasible.
pub type CounterDigest = [u8; 11];

/// Identities made from a [`CounterDigest`], for a store that exchanges counters with peers.
///
/// Callers know the digests of their names, and could choose many that share a place in a hash table. So the low bits of
/// an identity depend on a secret as well. The digest can be computed from the identity.
pub struct Digests {
    secret: Secret,
    /// Odd factor that selects the shard.
    factor: u64,
}

impl Digests {
    /// Generates a random secret.
    #[must_use]
    pub fn random() -> Self {
        Self { secret: Secret::random(), factor: rand::random::<u64>() | 1 }
    }

    /// Returns the digest of a counter's name.
    pub fn digest(key: &[u8]) -> CounterDigest {
        let mut digest = CounterDigest::default();
        digest.copy_from_slice(&Sha256::digest(key)[..11]);
        digest
    }

    /// Returns the identity of a digest: its low 88 bits are a permutation of the digest.
    pub fn identity(&self, digest: CounterDigest) -> u128 {
        let [a, b, c, d, e, f, g, h, high @ ..] = digest;
        let low = u64::from_le_bytes([a, b, c, d, e, f, g, h]).wrapping_add(self.offset(high));
        let [i, j, k] = high;
        let high = u32::from_le_bytes([i, j, k, 0]);
        let shard = low.wrapping_mul(self.factor) >> 48;
        u128::from(low) | u128::from(high) << 64 | u128::from(shard) << 112
    }

    /// Returns the digest from the low 88 bits of an identity.
    pub fn digest_of(&self, identity: [u8; 11]) -> CounterDigest {
        let [a, b, c, d, e, f, g, h, high @ ..] = identity;
        let low = u64::from_le_bytes([a, b, c, d, e, f, g, h]).wrapping_sub(self.offset(high));
        let mut digest = identity;
        digest[..8].copy_from_slice(&low.to_le_bytes());
        digest
    }

    fn offset(&self, high: [u8; 3]) -> u64 {
        self.secret.identity(&high) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_is_the_same_in_all_processes_and_its_identity_is_not() {
        assert_ne!(Secret::random().identity(b"{d|k=v}fw:1"), Secret::random().identity(b"{d|k=v}fw:1"));
        let digest = Digests::digest(b"{d|k=v}fw:1");
        assert_eq!(digest[..4], [0xbd, 0x60, 0xef, 0x47]);
        let (one, other) = (Digests::random(), Digests::random());
        assert_ne!(one.identity(digest) as u64, other.identity(digest) as u64);
        assert_ne!(one.identity(digest) as u64, one.identity(Digests::digest(b"another")) as u64);
        for names in [&one, &other] {
            let identity = names.identity(digest).to_le_bytes();
            let [low @ .., _, _, _, _, _] = identity;
            assert_eq!(names.digest_of(low), digest);
        }
    }

    #[test]
    fn digests_have_many_shards() {
        let digests = Digests::random();
        let shard = |number: u8| digests.identity(Digests::digest(&[number])) >> 112;
        let shards: std::collections::BTreeSet<_> = (0..100).map(shard).collect();
        assert!(shards.len() > 50, "{shards:?}");
    }
}
