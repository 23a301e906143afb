//! Redis Cluster's 16,384 slots: which one a key has, and which node serves it.
//!
//! <https://redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec/>

use redis::Value;

/// Slots of a cluster.
pub const SLOTS: usize = 16_384;

/// The slot of a shard: CRC-16/XMODEM modulo 16,384.
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

/// The masters of a cluster and who serves which slot, as one of its nodes sees it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlotMap {
    /// Host and port, in the order in which they were named.
    pub(super) masters: Vec<(String, u16)>,
    /// Of each slot the master's place, or [`NOBODY`].
    pub(super) owners: Box<[u16]>,
}

/// A slot that no node serves.
pub(super) const UNASSIGNED: u16 = u16::MAX;

/// Reads the answer to CLUSTER SLOTS. A node that does not know its own address (or hides it) leaves it out, and means
/// the one at which it was `asked`.
pub(super) fn read(reply: &Value, asked: &str) -> Option<SlotMap> {
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
        let host = text(host).filter(|host| !matches!(host.as_str(), "" | "?")).unwrap_or_else(|| asked.to_owned());
        let master = (host, u16::try_from(*port).ok()?);
        let place = map.masters.iter().position(|known| *known == master).unwrap_or_else(|| {
            map.masters.push(master);
            map.masters.len() - 1
        });
        let slots = usize::try_from(*first).ok()?..=usize::try_from(*last).ok()?;
        map.owners.get_mut(slots)?.fill(u16::try_from(place).ok()?);
    }
    Some(map)
}

/// The text of a reply, if it is one.
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
    fn slots_are_those_of_redis() {
        // As CLUSTER KEYSLOT says.
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
    fn a_map_has_an_owner_for_each_slot_that_is_served() {
        let reply = Value::Array(vec![
            range(0, 5, host("10.0.0.1"), 7_000),
            range(6, 6, host(""), 7_001),
            range(7, 9, Value::Nil, 7_001),
            range(16_383, 16_383, host("10.0.0.1"), 7_000),
        ]);
        let map = read(&reply, "seed").unwrap();
        assert_eq!(map.masters, [("10.0.0.1".to_owned(), 7_000), ("seed".to_owned(), 7_001)]);
        assert_eq!(map.owners[..11], [0, 0, 0, 0, 0, 0, 1, 1, 1, 1, UNASSIGNED]);
        assert_eq!(map.owners[16_383], 0);
    }

    #[test]
    fn what_is_no_map_is_refused() {
        for reply in [
            Value::Nil,
            Value::Array(vec![Value::Int(1)]),
            Value::Array(vec![range(0, 16_384, host("a"), 1)]),
            Value::Array(vec![range(-1, 5, host("a"), 1)]),
            Value::Array(vec![range(0, 5, host("a"), 70_000)]),
            Value::Array(vec![Value::Array(vec![Value::Int(0), Value::Int(5)])]),
        ] {
            assert_eq!(read(&reply, "seed"), None, "{reply:?}");
        }
    }

    #[test]
    fn a_range_that_runs_backwards_owns_nothing_and_is_refused_or_empty() {
        let map = read(&Value::Array(vec![range(5, 4, host("a"), 1)]), "seed");
        assert!(map.is_none_or(|map| map.owners.iter().all(|owner| *owner == UNASSIGNED)));
    }
}
