//! Which node of a ring holds a shard: weighted rendezvous hashing (Thaler and Ravishankar 1998; weights after Schindelhauer
//! and Schomaker 2005).
//!
//! Every node draws a time for the shard, exponentially distributed with its weight as the rate, and the earliest
//! wins. So each node gets its share and no other error than that of chance; a node that is added takes shards from all
//! and moves none between the others; one that is removed leaves the others' where they are. Points on a circle need
//! thousands for each node to come as close. The price is a draw for each node and shard: a few nanoseconds.
//!
//! The placement is a promise: it depends on the nodes' names and weights and on nothing else, and does not change
//! between releases. docs/operations.md has the formula, and the vectors of the tests below.

use std::hash::Hasher;

use siphasher::sip::SipHasher24;

/// Nodes with their weights.
#[derive(Clone, Debug)]
pub struct Ring {
    nodes: Vec<Node>,
    /// With one weight for all, the earliest draw is that of the largest hash.
    even: bool,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    /// Of the name.
    hash: u64,
    weight: f64,
}

impl Ring {
    /// Of nodes with distinct names; a node of weight 2 holds twice as much as one of weight 1.
    pub fn new<'n>(nodes: impl IntoIterator<Item = (&'n str, u32)>) -> Self {
        let node = |(name, weight): (&str, u32)| Node { hash: hash(name.as_bytes()), weight: weight.into() };
        let nodes: Vec<_> = nodes.into_iter().map(node).collect();
        let even = nodes.windows(2).all(|pair| pair[0].weight.to_bits() == pair[1].weight.to_bits());
        Self { nodes, even }
    }

    /// The place of the shard's node; `None` when there are none.
    #[must_use]
    pub fn node_of(&self, shard: &[u8]) -> Option<usize> {
        self.node_among(shard, |_| true)
    }

    /// The place that the shard's node would have if there were only these.
    pub fn node_among(&self, shard: &[u8], among: impl Fn(usize) -> bool) -> Option<usize> {
        let shard = hash(shard);
        let draws = self.nodes.iter().map(|node| mix(shard ^ node.hash)).enumerate();
        let draws = draws.filter(|(place, _)| among(*place));
        if self.even {
            return draws.max_by_key(|(place, draw)| (*draw, self.nodes[*place].hash)).map(|(place, _)| place);
        }
        let times = draws.map(|(place, draw)| (place, time(draw, self.nodes[place].weight)));
        times.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(place, _)| place)
    }
}

/// SipHash-2-4 with a key of zeros: known to every language.
fn hash(bytes: &[u8]) -> u64 {
    let mut hasher = SipHasher24::new();
    hasher.write(bytes);
    hasher.finish()
}

/// `SplitMix64`'s finalizer (Steele, Lea and Flood 2014): every bit of the input moves every bit of the output.
const fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    bits ^ (bits >> 31)
}

/// The upper 53 bits as a number strictly between 0 and 1, and that as an exponentially distributed time.
fn time(draw: u64, weight: f64) -> f64 {
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

    fn placed(ring: &Ring) -> Vec<usize> {
        (0..USERS).map(|user| ring.node_of(format!("api|user=user{user}").as_bytes()).unwrap()).collect()
    }

    fn load(places: &[usize], nodes: usize) -> Vec<usize> {
        let mut load = vec![0; nodes];
        places.iter().for_each(|place| load[*place] += 1);
        load
    }

    /// These stand in docs/operations.md. A change here moves every counter of every user.
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
            let place = |ring: &Ring| ring.node_of(shard.as_bytes()).map(|place| ["a", "b", "c"][place]);
            assert_eq!((place(&even), place(&weighted)), (Some(one), Some(other)), "{shard}");
        }
    }

    #[test]
    fn load_stays_close_to_the_mean() {
        for nodes in [3, 8, 50] {
            let load = load(&placed(&even(&names(nodes))), nodes);
            let most = *load.iter().max().unwrap() as f64 * nodes as f64 / USERS as f64;
            assert!(most <= 1.10, "{nodes} nodes: {most}");
        }
    }

    #[test]
    fn a_node_more_takes_its_share_and_moves_nothing_else() {
        for nodes in [1, 3, 8, 49] {
            let (before, after) = (placed(&even(&names(nodes))), placed(&even(&names(nodes + 1))));
            let moved: Vec<_> = before.iter().zip(&after).filter(|(one, other)| one != other).collect();
            assert!(moved.iter().all(|(_, to)| **to == nodes), "only to the new node");
            let share = moved.len() as f64 / USERS as f64 * (nodes + 1) as f64;
            assert!((0.9..=1.1).contains(&share), "{nodes} nodes: {share}");
        }
    }

    #[test]
    fn weights_are_honoured_and_a_change_moves_only_what_it_must() {
        let weigh = |last| Ring::new([("a", 1), ("b", 2), ("c", 3), ("d", last)]);
        let (before, after) = (placed(&weigh(4)), placed(&weigh(6)));
        for (place, load) in load(&before, 4).into_iter().enumerate() {
            let share = load as f64 / USERS as f64 * 10.0 / (place + 1) as f64;
            assert!((0.95..=1.05).contains(&share), "{place}: {share}");
        }
        assert!(before.iter().zip(&after).all(|(one, other)| one == other || *other == 3));
    }

    #[test]
    fn the_order_of_the_nodes_does_not_matter() {
        let (one, other) = (Ring::new([("a", 1), ("b", 3), ("c", 1)]), Ring::new([("c", 1), ("a", 1), ("b", 3)]));
        for (one, other) in placed(&one).into_iter().zip(placed(&other)) {
            assert_eq!(["a", "b", "c"][one], ["c", "a", "b"][other]);
        }
    }
}
