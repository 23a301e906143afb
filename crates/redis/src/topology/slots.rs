//! The 16,384 slots of Redis Cluster: the slot of a key, and the nodes that serve the slots.
//!
//! <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>

use redis::Value;

/// Number of slots in a cluster.
pub const SLOTS: usize = 16_384;

/// Returns the slot of a shard key: its CRC-16/XMODEM checksum modulo 16,384.
#[must_use]
pub fn slot(shard: &[u8]) -> u16 {
    let crc = shard.iter().fold(0_u16, |crc, byte| (crc << 8) ^ TABLE[usize::from((crc >> 8) as u8 ^ byte)]);
    crc % SLOTS as u16
}

const TABLE: [u16; 256] = table();

const fn table() -> [u16; 256] {
    let mut table = [0; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut crc = (byte as u16) << 8;
        let mut bit = 0;
        while bit < 8 {
            crc = if crc & 0x8000 == 0 { crc << 1 } else { (crc << 1) ^ 0x1021 };
            bit += 1;
        }
        table[byte] = crc;
        byte += 1;
    }
    table
}

/// The masters of a cluster and the owner of each slot, as one node reports them.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// Host and port of each master, in the order of the reply.
    pub(super) masters: Vec<(String, u16)>,
    /// Index of each slot's master, or [`UNASSIGNED`].
    pub(super) owners: Box<[u16]>,
}

/// Owner of a slot that no node serves.
pub(super) const UNASSIGNED: u16 = u16::MAX;

/// Parses the reply to `CLUSTER SLOTS`. Returns `None` if it is malformed.
///
/// A node that does not know or does not publish its own host omits it. `queried_host`, at which it was reached, is
/// used instead.
pub(super) fn parse(reply: &Value, queried_host: &str) -> Option<SlotMap> {
    let mut map = SlotMap { masters: Vec::new(), owners: vec![UNASSIGNED; SLOTS].into() };
    let Value::Array(ranges) = reply else {
        return None;
    };
    for range in ranges {
        let Value::Array(range) = range else {
            return None;
        };
        let [Value::Int(first), Value::Int(last), Value::Array(master), ..] = range.as_slice() else {
            return None;
        };
        let [host, Value::Int(port), ..] = master.as_slice() else {
            return None;
        };
        let host =
            text(host).filter(|host| !matches!(host.as_str(), "" | "?")).unwrap_or_else(|| queried_host.to_owned());
        let master = (host, u16::try_from(*port).ok()?);
        let index = map.masters.iter().position(|known| *known == master).unwrap_or_else(|| {
            map.masters.push(master);
            map.masters.len() - 1
        });
        let slots = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
        map.owners.get_mut(slots)?.fill(u16::try_from(index).ok()?);
    }
    Some(map)
}

/// Returns the text of a reply, or `None` if it is not a valid string.
pub(super) fn text(value: &Value) -> Option<String> {
    match value {
        Value::BulkString(bytes) => String::from_utf8(bytes.clone()).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_the_ones_that_redis_uses() {
        // The expected values are those of CLUSTER KEYSLOT.
        for (shard, expected) in [("", 0), ("123456789", 12_739), ("foo", 12_182), ("bar", 5_061)] {
            assert_eq!(slot(shard.as_bytes()), expected, "{shard}");
        }
    }

    fn range(first: i64, last: i64, host: Value, port: i64) -> Value {
        let node = Value::Array(vec![host, Value::Int(port), Value::BulkString(b"id".to_vec()), Value::Array(vec![])]);
        Value::Array(vec![Value::Int(first), Value::Int(last), node.clone(), node])
    }

    fn host(name: &str) -> Value {
        Value::BulkString(name.as_bytes().to_vec())
    }

    #[test]
    fn a_map_has_an_owner_for_each_assigned_slot() {
        let reply = Value::Array(vec![
            range(0, 5, host("10.0.0.1"), 7_000),
            range(6, 6, host(""), 7_001),
            range(7, 9, Value::Nil, 7_001),
            range(16_383, 16_383, host("10.0.0.1"), 7_000),
        ]);
        let map = parse(&reply, "seed").unwrap();
        assert_eq!(map.masters, [("10.0.0.1".to_owned(), 7_000), ("seed".to_owned(), 7_001)]);
        assert_eq!(map.owners[..11], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, UNASSIGNED]);
        assert_eq!(map.owners[16_383], 0);
    }

    #[test]
    fn rejects_malformed_replies() {
        for reply in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 16_384, host("a"), 1)]),
            Value::Array(vec![range(-1, 5, host("a"), 1)]),
            Value::Array(vec![range(0, 5, host("a"), 70_000)]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(5)])]),
        ] {
            assert_eq!(parse(&reply, "seed"), None, "{reply:?}");
        }
    }

    #[test]
    fn a_reversed_range_assigns_no_slot() {
        let map = parse(&Value::Array(vec![range(5, 4, host("a"), 1)]), "seed");
        assert!(map.is_none_or(|map| map.owners.iter().all(|owner| *owner == UNASSIGNED)));
    }
}
