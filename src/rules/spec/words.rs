//! The words of rule files: where each belongs, what it takes, and what it says. The reader knows no others, and the JSON
//! Schema that editors check files with is made from them.

use sluicegate_common::adaptive::Method;

use crate::{
    algorithm::{Algorithm, Consistency, sliding_window::Edge},
    rules::limit::{FailurePolicy, Unit},
};

/// A map that has words of ours.
pub(in crate::rules) struct Map {
    /// Its name in the schema.
    pub(in crate::rules) name: &'static str,
    /// Where it stands, for complaints.
    pub(in crate::rules) place: &'static str,
    pub(in crate::rules) words: &'static [Word],
    /// Those that it cannot do without.
    pub(in crate::rules) required: &'static [&'static str],
}

/// One of its words.
pub(in crate::rules) struct Word {
    pub(in crate::rules) name: &'static str,
    pub(in crate::rules) takes: Takes,
    pub(in crate::rules) says: &'static str,
}

/// What stands behind a word.
pub(in crate::rules) enum Takes {
    /// A scalar as it is written.
    Text,
    Boolean,
    /// A whole number of 32 bits.
    Number,
    /// A whole number from 1 to this one.
    UpTo(u32),
    /// A whole percentage from one to the other.
    Percent(u32, u32),
    /// `200ms`.
    Duration,
    /// A number, or a percentage of a capacity.
    Amount,
    /// `100`, or `1000/s`.
    Capacity,
    /// One of these words.
    Word(fn() -> Vec<&'static str>),
    /// The same, in capitals or not.
    Unit(fn() -> Vec<&'static str>),
    /// A map of anything.
    Anything,
    List(&'static Takes),
    Map(&'static Map),
    /// A map whose keys are names that the writer chose.
    Named(&'static Takes),
}

impl Map {
    pub(super) fn has(&self, name: &str) -> bool {
        self.words.iter().any(|word| word.name == name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.words.iter().map(|word| word.name)
    }
}

const fn word(name: &'static str, takes: Takes, says: &'static str) -> Word {
    Word { name, takes, says }
}

/// All of them.
pub(in crate::rules) const MAPS: [&Map; 8] =
    [&ROOT, &DESCRIPTOR, &RATE_LIMIT, &REPLACES, &IP_PREFIX, &ELASTIC, &SHARE, &PLANS];

/// What `charge` can be, and whether that is all or nothing.
pub(super) const CHARGES: [(&str, bool); 2] = [("each", false), ("all", true)];
/// What `edge` can be.
pub(super) const EDGES: [(&str, Edge); 2] = [("weighted", Edge::Weighted), ("strict", Edge::Strict)];
/// A soft or elastic limit of more percent than this is a mistake.
pub(super) const MOST_PERCENT: u32 = 1_000;

pub(in crate::rules) static ROOT: Map = Map {
    name: "file",
    place: "at the top of the file",
    words: &[
        word("domain", Takes::Text, "Which requests these rules are for: those that name this domain."),
        word(
            "charge",
            Takes::Word(|| CHARGES.map(|(name, _)| name).to_vec()),
            "Whether a request that one limit refuses takes from the others: each for itself, or all or none.",
        ),
        word("shard_by", Takes::List(&Takes::Text), "The keys of the entries that choose the Redis shard."),
        word("plans", Takes::Map(&PLANS), "Limits that are not the same for everybody, as one table."),
        word("descriptors", Takes::List(&Takes::Map(&DESCRIPTOR)), "The first level of descriptors."),
    ],
    required: &["domain"],
};

pub(in crate::rules) static DESCRIPTOR: Map = Map {
    name: "descriptor",
    place: "in a descriptor",
    words: &[
        word("key", Takes::Text, "The entry's key."),
        word(
            "value",
            Takes::Text,
            "The entry's value; with * a pattern. Without it, every value has a limit of its own.",
        ),
        word("rate_limit", Takes::Map(&RATE_LIMIT), "The limit."),
        word("shadow_mode", Takes::Boolean, "Counted and measured, never enforced."),
        word(
            "quota_mode",
            Takes::Boolean,
            "Over its limit, it refuses only if every quota rule of the request is over its own.",
        ),
        word("detailed_metric", Takes::Boolean, "Statistics by the values of all levels."),
        word("value_to_metric", Takes::Boolean, "Statistics by the value of this level."),
        word("share_threshold", Takes::Boolean, "Of a pattern: all values that fit share one counter."),
        word("ip_prefix", Takes::Map(&IP_PREFIX), "The value is an address, counted by its prefix."),
        word("metadata", Takes::Anything, "Free form, for the caller (response.dynamic_metadata)."),
        word("descriptors", Takes::List(&Takes::Map(&DESCRIPTOR)), "The next level."),
    ],
    required: &["key"],
};

pub(in crate::rules) static RATE_LIMIT: Map = Map {
    name: "rate_limit",
    place: "under rate_limit",
    words: &[
        word("unit", Takes::Unit(|| Unit::ALL.map(Unit::name).to_vec()), "Length of the window."),
        word("unit_multiplier", Takes::Number, "The window is this many units, 100 years at most."),
        word("requests_per_unit", Takes::Number, "How many hits pass in one window; 0 refuses everything."),
        word("unlimited", Takes::Boolean, "No limit, and nothing is counted. Instead of a unit."),
        word("name", Takes::Text, "For replaces; also told to the caller."),
        word(
            "replaces",
            Takes::List(&Takes::Map(&REPLACES)),
            "Where this limit applies, those with these names do not.",
        ),
        word(
            "on_error",
            Takes::Word(|| FailurePolicy::ALL.map(FailurePolicy::name).to_vec()),
            "What decides when the store cannot.",
        ),
        word(
            "consistency",
            Takes::Word(|| Consistency::ALL.map(Consistency::name).to_vec()),
            "What answers may owe to what Redis has not been asked.",
        ),
        word(
            "algorithm",
            Takes::Word(|| Algorithm::named().map(|kind| kind.name).collect()),
            "How it is counted; fixed_window by default.",
        ),
        word("buckets", Takes::Number, "Counters in a window, 1 to 256: the more, the closer to the truth."),
        word(
            "edge",
            Takes::Word(|| EDGES.map(|(name, _)| name).to_vec()),
            "How the oldest counter counts: by its overlap, or whole.",
        ),
        word("burst", Takes::Number, "How much may come at once."),
        word("queue", Takes::Number, "How many more may wait; the answer says how long."),
        word("warm_up", Takes::Duration, "From cold to warm after idleness, up to 1h."),
        word("count_denied", Takes::Boolean, "Refused hits count too."),
        word("min_interval", Takes::Duration, "Least time between two passes, up to the window."),
        word("soft", Takes::Percent(1, MOST_PERCENT), "That much more passes, marked as over the soft limit."),
        word("limit", Takes::Number, "How many at once, 1000 at most."),
        word("ceiling", Takes::Number, "The most at once, whatever latency says."),
        word("floor", Takes::Number, "The least at once, whatever latency says."),
        word("initial", Takes::Number, "How many at once in the beginning."),
        word("method", Takes::Word(|| Method::ALL.map(Method::name).to_vec()), "How latency makes a limit."),
        word("timeout", Takes::Duration, "What takes longer has been dropped."),
        word("hold", Takes::Duration, "A slot that nobody gives back is free after this time, a day at most."),
        word("holder", Takes::Text, "The key of the last entry, which names who has the slot."),
        word("capacity", Takes::Capacity, "What classes share: 100 in flight, or 1000/s."),
        word("class", Takes::Text, "The key of the entry that says whose request it is."),
        word("shares", Takes::Named(&Takes::Map(&SHARE)), "What each class always has, and the most it may have."),
        word("reserve", Takes::Named(&Takes::Amount), "What is kept for a class, and is there for nobody else."),
        word("shed", Takes::Boolean, "What it refuses is overload: 503 in place of 429."),
        word("elastic", Takes::Map(&ELASTIC), "More than the limit while a resource has capacity to spare."),
        word("by_plan", Takes::Text, "The limit of this name in the request's plan, in place of all other words."),
    ],
    required: &[],
};

pub(in crate::rules) static REPLACES: Map = Map {
    name: "replaces",
    place: "in an entry of replaces",
    words: &[word("name", Takes::Text, "The name of the limit that does not apply then.")],
    required: &["name"],
};

pub(in crate::rules) static IP_PREFIX: Map = Map {
    name: "ip_prefix",
    place: "under ip_prefix",
    words: &[
        word("v4", Takes::UpTo(32), "Bits of an IPv4 address."),
        word("v6", Takes::UpTo(128), "Bits of an IPv6 address."),
    ],
    required: &[],
};

pub(in crate::rules) static ELASTIC: Map = Map {
    name: "elastic",
    place: "under elastic",
    words: &[
        word("resource", Takes::Text, "Whose utilization it depends on, as it is reported to /resources."),
        word("up_to", Takes::Percent(101, MOST_PERCENT), "How much of the limit there is at most."),
        word("idle", Takes::Percent(0, 100), "Up to this utilization there is all of it."),
        word("busy", Takes::Percent(0, 100), "From this utilization on there is no more than the limit."),
    ],
    required: &["resource", "up_to"],
};

pub(in crate::rules) static SHARE: Map = Map {
    name: "share",
    place: "in a class of shares",
    words: &[
        word("min", Takes::Amount, "What is always there for it."),
        word("max", Takes::Amount, "The most it may have."),
    ],
    required: &[],
};

pub(in crate::rules) static PLANS: Map = Map {
    name: "plans",
    place: "under plans",
    words: &[
        word("key", Takes::Text, "The key of the entry that names a request's plan; plan by default."),
        word("default", Takes::Text, "The plan of those that name none, or one that is not there."),
        word("limits", Takes::Named(&Takes::Named(&Takes::Map(&RATE_LIMIT))), "By plan, and then by the limit's name."),
        word("entities", Takes::Named(&Takes::Named(&Takes::Text)), "By an entry's key and value: the plan."),
    ],
    required: &["default", "limits"],
};
