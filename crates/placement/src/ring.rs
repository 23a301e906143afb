//! [`Ring`]: distributes shards among nodes by weighted rendezvous hashing (Thaler and Ravishankar 1998; weights after
//! Schindelhauer and Schomaker 2005).
//!
//! For each shard, every node draws an exponentially distributed time with its weight as the rate, and the node with
//! the earliest time holds the shard. Each node therefore gets its share, apart from random deviation. A new node takes
//! shards from all others and moves none between them; a removed node leaves the shards of the others unchanged. A hash
//! ring with points on a circle needs thousands of points per node for the same accuracy. The cost is one draw per node
//! and shard: a few nanoseconds.
//!
//! The placement is stable: it depends only on the names and weights of the nodes, and does not change between
//! releases. docs/design/redis.md has the formula, and the vectors of the tests below.

use std::hash::Hasher;

use siphasher::sip::SipHasher24;

/// Set of nodes with weights, among which shards are distributed.
#[derive(Clone, Debug)]
pub struct Ring {
    nodes: Vec<Node>,
    /// Whether all weights are equal. Then the node with the largest hash has the earliest time.
    equal_weights: bool,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Hash of the node's name.
    hash: u64,
    weight: f64,
}

impl Ring {
    /// Creates a ring of nodes (name, weight) with distinct names. A node of weight 2 holds twice as many shards as one
    /// of weight 1.
    pub fn new<'n>(nodes: impl IntoIterator<Item = (&'n str, u32)>) -> Self {
        let node = |(name, weight): (&str, u32)| Node { hash: hash(name.as_bytes()), weight: weight.into() };
        let nodes: Vec<_> = nodes.into_iter().map(node).collect();
        let equal_weights = nodes.windows(2).all(|pair| pair[0].weight.to_bits() == pair[1].weight.to_bits());
        Self { nodes, equal_weights }
    }

    /// Returns the index of the node that holds the shard, or `None` if the ring has no nodes.
    #[must_use]
    pub fn node_of(&self, shard: &[u8]) -> Option<usize> {
        self.node_among(shard, |_| true)
    }

    /// Returns the index of the node that would hold the shard if there were only the nodes for which `among` returns
    /// `true`. Returns `None` if there are none.
    pub fn node_among(&self, shard: &[u8], among: impl Fn(usize) -> bool) -> Option<usize> {
        let shard = hash(shard);
        let draws = self.nodes.iter().map(|node| mix(shard ^ node.hash)).enumerate();
        let draws = draws.filter(|(index, _)| among(*index));
        if self.equal_weights {
            return draws.max_by_key(|(index, draw)| (*draw, self.nodes[*index].hash)).map(|(index, _)| index);
        }
        let times = draws.map(|(index, draw)| (index, draw_time(draw, self.nodes[index].weight)));
        times.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(index, _)| index)
    }
}

/// Returns the SipHash-2-4 with a key of zeros, which is available in every language.
fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new();
    hasher.write(bytes);
    hasher.finish()
}

/// Applies the finalizer of `SplitMix64` (Steele, Lea and Flood 2014), in which every input bit affects every output
/// bit.
const fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// Converts the upper 53 bits to a number greater than 0 and at most 1, and that to an exponentially distributed time.
fn draw_time(draw: u64, weight: f64) -> f64 {
    let uniform = ((draw >> 11) as f64 + 0.5) / (1_u64 << 53) as f64;
    -uniform.ln() / weight
}

#[cfg(test)]
mod tests {
    use super::*;

    const USERS: usize = 100_000;

    fn names(count: usize) -> Vec<String> {
        (1..=count).map(|number| format!("node{number}")).collect()
    }

    fn even(names: &[String]) -> Ring {
        Ring::new(names.iter().map(|name| (name.as_str(), 1)))
    }

    fn placements(ring: &Ring) -> Vec<usize> {
        (0..USERS).map(|user| ring.node_of(format!("api|user=user{user}").as_bytes()).unwrap()).collect()
    }

    fn load(placements: &[usize], nodes: usize) -> Vec<usize> {
        let mut load = vec![0; nodes];
        placements.iter().for_each(|node| load[*node] += 1);
        load
    }

    /// The vectors are those of docs/design/redis.md. A change here moves every user's counters.
    #[test]
    fn placement_never_changes() {
        assert_eq!(hash(b"api|user=alice"), 0x57de_cbe7_a7bb_ddfc);
        let even = Ring::new([("a", 1), ("b", 1), ("c", 1)]);
        let weighted = Ring::new([("a", 1), ("b", 2), ("c", 4)]);
        for (shard, one, other) in [
            ("api|user=alice", "b", "b"),
            ("api|user=bob", "a", "a"),
            ("api|user=carol", "a", "c"),
            ("api|user=dave", "b", "c"),
            ("api|user=日本", "c", "c"),
            ("a", "c", "c"),
            ("c", "a", "a"),
        ] {
            let node = |ring: &Ring| ring.node_of(shard.as_bytes()).map(|index| ["a", "b", "c"][index]);
            assert_eq!((node(&even), node(&weighted)), (Some(one), Some(other)), "{shard}");
        }
    }

    #[test]
    fn load_stays_close_to_the_mean() {
        for nodes in [3, 8, 50] {
            let load = load(&placements(&even(&names(nodes))), nodes);
            let max = *load.iter().max().unwrap() as f64 * nodes as f64 / USERS as f64;
            assert!(max <= 1.10, "{nodes} nodes: {max}");
        }
    }

    #[test]
    fn an_added_node_takes_its_share_and_moves_nothing_else() {
        for nodes in [1, 3, 8, 49] {
            let (before, after) = (placements(&even(&names(nodes))), placements(&even(&names(nodes + 1))));
            let moved: Vec<_> = before.iter().zip(&after).filter(|(one, other)| one != other).collect();
            assert!(moved.iter().all(|(_, to)| **to == nodes), "only to the new node");
            let share = moved.len() as f64 / USERS as f64 * (nodes + 1) as f64;
            assert!((0.9..=1.1).contains(&share), "{nodes} nodes: {share}");
        }
    }

    #[test]
    fn load_follows_the_weights_and_a_changed_weight_moves_only_shards_of_that_node() {
        let weighted = |last| Ring::new([("a", 1), ("b", 2), ("c", 3), ("d", last)]);
        let (before, after) = (placements(&weighted(4)), placements(&weighted(6)));
        for (index, load) in load(&before, 4).into_iter().enumerate() {
            let share = load as f64 / USERS as f64 * 10.0 / (index + 1) as f64;
            assert!((0.95..=1.05).contains(&share), "{index}: {share}");
        }
        assert!(before.iter().zip(&after).all(|(one, other)| one == other || *other == 3));
    }

    #[test]
    fn the_order_of_the_nodes_does_not_matter() {
        let (one, other) = (Ring::new([("a", 1), ("b", 3), ("c", 1)]), Ring::new([("c", 1), ("a", 1), ("b", 3)]));
        for (one, other) in placements(&one).into_iter().zip(placements(&other)) {
            assert_eq!(["a", "b", "c"][one], ["c", "a", "b"][other]);
        }
    }

    #[test]
    fn every_draw_has_a_time() {
        let times = [0, 1, 1 << 63, u64::MAX].map(|draw| draw_time(draw, 1.0));
        assert!(times.iter().all(|time| (0.0..40.0).contains(time)), "{times:?}");
        assert!((draw_time(1 << 63, 2.0) - 2_f64.ln() / 2.0).abs() < 1e-9);
    }
}
