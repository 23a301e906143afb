//! The words of rule files: where each belongs, what it takes, and what it says. The reader knows no others, and the JSON
//! Schema that editors check files with is made from them.

use sluicegate_common::adaptive::Method;

use crate::{
    algorithm::{Algorithm, Consistency, sliding_window::WindowEdge},
    rules::limit::{FailurePolicy, Unit},
};

/// A map that has words of ours.
pub(in crate::rules) struct MapSchema {
    /// Its name in the schema.
    pub(in crate::rules) name: &'static str,
    /// Where it stands, for complaints.
    pub(in crate::rules) place: &'static str,
    pub(in crate::rules) keywords: &'static [Keyword],
    /// Those that it cannot do without.
    pub(in crate::rules) required: &'static [&'static str],
}

/// One of its words.
pub(in crate::rules) struct Keyword {
    pub(in crate::rules) name: &'static str,
    pub(in crate::rules) value: ValueSchema,
    pub(in crate::rules) description: &'static str,
}

/// What stands behind a word.
pub(in crate::rules) enum ValueSchema {
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
    List(&'static ValueSchema),
    Map(&'static MapSchema),
    /// A map whose keys are names that the writer chose.
    Named(&'static ValueSchema),
}

impl MapSchema {
    pub(super) fn has(&self, name: &str) -> bool {
        self.keywords.iter().any(|word| word.name == name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.keywords.iter().map(|word| word.name)
    }
}

const fn word(name: &'static str, takes: ValueSchema, says: &'static str) -> Keyword {
    Keyword { name, value: takes, description: says }
}

/// All of them.
pub(in crate::rules) const MAPS: [&MapSchema; 8] =
    [&ROOT, &DESCRIPTOR, &RATE_LIMIT, &REPLACES, &IP_PREFIX, &ELASTIC, &SHARE, &PLANS];

/// What `charge` can be, and whether that is all or nothing.
pub(super) const CHARGES: [(&str, bool); 2] = [("each", false), ("all", true)];
/// What `edge` can be.
pub(super) const EDGES: [(&str, WindowEdge); 2] = [("weighted", WindowEdge::Weighted), ("strict", WindowEdge::Strict)];
/// A soft or elastic limit of more percent than this is a mistake.
pub(super) const MAX_PERCENT: u32 = 1_000;

pub(in crate::rules) static ROOT: MapSchema = MapSchema {
    name: "file",
    place: "at the top of the file",
    keywords: &[
        word("domain", ValueSchema::Text, "Which requests these rules are for: those that name this domain."),
        word(
            "charge",
            ValueSchema::Word(|| CHARGES.map(|(name, _)| name).to_vec()),
            "Whether a request that one limit refuses takes from the others: each for itself, or all or none.",
        ),
        word("shard_by", ValueSchema::List(&ValueSchema::Text), "The keys of the entries that choose the Redis shard."),
        word("plans", ValueSchema::Map(&PLANS), "Limits that are not the same for everybody, as one table."),
        word("descriptors", ValueSchema::List(&ValueSchema::Map(&DESCRIPTOR)), "The first level of descriptors."),
    ],
    required: &["domain"],
};

pub(in crate::rules) static DESCRIPTOR: MapSchema = MapSchema {
    name: "descriptor",
    place: "in a descriptor",
    keywords: &[
        word("key", ValueSchema::Text, "The entry's key."),
        word(
            "value",
            ValueSchema::Text,
            "The entry's value; with * a pattern. Without it, every value has a limit of its own.",
        ),
        word("rate_limit", ValueSchema::Map(&RATE_LIMIT), "The limit."),
        word("shadow_mode", ValueSchema::Boolean, "Counted and measured, never enforced."),
        word(
            "quota_mode",
            ValueSchema::Boolean,
            "Over its limit, it refuses only if every quota rule of the request is over its own.",
        ),
        word("detailed_metric", ValueSchema::Boolean, "Statistics by the values of all levels."),
        word("value_to_metric", ValueSchema::Boolean, "Statistics by the value of this level."),
        word("share_threshold", ValueSchema::Boolean, "Of a pattern: all values that fit share one counter."),
        word("ip_prefix", ValueSchema::Map(&IP_PREFIX), "The value is an address, counted by its prefix."),
        word("metadata", ValueSchema::Anything, "Free form, for the caller (response.dynamic_metadata)."),
        word("descriptors", ValueSchema::List(&ValueSchema::Map(&DESCRIPTOR)), "The next level."),
    ],
    required: &["key"],
};

pub(in crate::rules) static RATE_LIMIT: MapSchema = MapSchema {
    name: "rate_limit",
    place: "under rate_limit",
    keywords: &[
        word("unit", ValueSchema::Unit(|| Unit::ALL.map(Unit::name).to_vec()), "Length of the window."),
        word("unit_multiplier", ValueSchema::Number, "The window is this many units, 100 years at most."),
        word("requests_per_unit", ValueSchema::Number, "How many hits pass in one window; 0 refuses everything."),
        word("unlimited", ValueSchema::Boolean, "No limit, and nothing is counted. Instead of a unit."),
        word("name", ValueSchema::Text, "For replaces; also told to the caller."),
        word(
            "replaces",
            ValueSchema::List(&ValueSchema::Map(&REPLACES)),
            "Where this limit applies, those with these names do not.",
        ),
        word(
            "on_error",
            ValueSchema::Word(|| FailurePolicy::ALL.map(FailurePolicy::name).to_vec()),
            "What decides when the store cannot.",
        ),
        word(
            "consistency",
            ValueSchema::Word(|| Consistency::ALL.map(Consistency::name).to_vec()),
            "What answers may owe to what Redis has not been asked.",
        ),
        word(
            "algorithm",
            ValueSchema::Word(|| Algorithm::named().map(|kind| kind.name).collect()),
            "How it is counted; fixed_window by default.",
        ),
        word("buckets", ValueSchema::Number, "Counters in a window, 1 to 256: the more, the closer to the truth."),
        word(
            "edge",
            ValueSchema::Word(|| EDGES.map(|(name, _)| name).to_vec()),
            "How the oldest counter counts: by its overlap, or whole.",
        ),
        word("burst", ValueSchema::Number, "How much may come at once."),
        word("queue", ValueSchema::Number, "How many more may wait; the answer says how long."),
        word("warm_up", ValueSchema::Duration, "From cold to warm after idleness, up to 1h."),
        word("count_denied", ValueSchema::Boolean, "Refused hits count too."),
        word("min_interval", ValueSchema::Duration, "Least time between two passes, up to the window."),
        word("soft", ValueSchema::Percent(1, MAX_PERCENT), "That much more passes, marked as over the soft limit."),
        word("limit", ValueSchema::Number, "How many at once, 1000 at most."),
        word("ceiling", ValueSchema::Number, "The most at once, whatever latency says."),
        word("floor", ValueSchema::Number, "The least at once, whatever latency says."),
        word("initial", ValueSchema::Number, "How many at once in the beginning."),
        word("method", ValueSchema::Word(|| Method::ALL.map(Method::name).to_vec()), "How latency makes a limit."),
        word("timeout", ValueSchema::Duration, "What takes longer has been dropped."),
        word("hold", ValueSchema::Duration, "A slot that nobody gives back is free after this time, a day at most."),
        word("holder", ValueSchema::Text, "The key of the last entry, which names who has the slot."),
        word("capacity", ValueSchema::Capacity, "What classes share: 100 in flight, or 1000/s."),
        word("class", ValueSchema::Text, "The key of the entry that says whose request it is."),
        word(
            "shares",
            ValueSchema::Named(&ValueSchema::Map(&SHARE)),
            "What each class always has, and the most it may have.",
        ),
        word(
            "reserve",
            ValueSchema::Named(&ValueSchema::Amount),
            "What is kept for a class, and is there for nobody else.",
        ),
        word("shed", ValueSchema::Boolean, "What it refuses is overload: 503 in place of 429."),
        word("elastic", ValueSchema::Map(&ELASTIC), "More than the limit while a resource has capacity to spare."),
        word(
            "by_plan",
            ValueSchema::Text,
            "The limit of this name in the request's plan, in place of all other words.",
        ),
    ],
    required: &[],
};

pub(in crate::rules) static REPLACES: MapSchema = MapSchema {
    name: "replaces",
    place: "in an entry of replaces",
    keywords: &[word("name", ValueSchema::Text, "The name of the limit that does not apply then.")],
    required: &["name"],
};

pub(in crate::rules) static IP_PREFIX: MapSchema = MapSchema {
    name: "ip_prefix",
    place: "under ip_prefix",
    keywords: &[
        word("v4", ValueSchema::UpTo(32), "Bits of an IPv4 address."),
        word("v6", ValueSchema::UpTo(128), "Bits of an IPv6 address."),
    ],
    required: &[],
};

pub(in crate::rules) static ELASTIC: MapSchema = MapSchema {
    name: "elastic",
    place: "under elastic",
    keywords: &[
        word("resource", ValueSchema::Text, "Whose utilization it depends on, as it is reported to /resources."),
        word("up_to", ValueSchema::Percent(101, MAX_PERCENT), "How much of the limit there is at most."),
        word("idle", ValueSchema::Percent(0, 100), "Up to this utilization there is all of it."),
        word("busy", ValueSchema::Percent(0, 100), "From this utilization on there is no more than the limit."),
    ],
    required: &["resource", "up_to"],
};

pub(in crate::rules) static SHARE: MapSchema = MapSchema {
    name: "share",
    place: "in a class of shares",
    keywords: &[
        word("min", ValueSchema::Amount, "What is always there for it."),
        word("max", ValueSchema::Amount, "The most it may have."),
    ],
    required: &[],
};

pub(in crate::rules) static PLANS: MapSchema = MapSchema {
    name: "plans",
    place: "under plans",
    keywords: &[
        word("key", ValueSchema::Text, "The key of the entry that names a request's plan; plan by default."),
        word("default", ValueSchema::Text, "The plan of those that name none, or one that is not there."),
        word(
            "limits",
            ValueSchema::Named(&ValueSchema::Named(&ValueSchema::Map(&RATE_LIMIT))),
            "By plan, and then by the limit's name.",
        ),
        word(
            "entities",
            ValueSchema::Named(&ValueSchema::Named(&ValueSchema::Text)),
            "By an entry's key and value: the plan.",
        ),
    ],
    required: &["default", "limits"],
};
