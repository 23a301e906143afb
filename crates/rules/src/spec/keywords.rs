//! [`MAPS`]: the keywords of rule files, with their context, their values and their descriptions.
//!
//! The reader supports no other keywords, and the JSON Schema for editors is generated from these maps.

use sluicegate_algorithm::{Algorithm, Consistency, WindowStart, sliding_window::WindowEdge};
use sluicegate_calendar::Weekday;
use sluicegate_overload::adaptive::Method;

use crate::limit::{FailurePolicy, Unit};

/// A map of a rule file with a fixed set of keywords.
pub(crate) struct MapSchema {
    /// Name of the map in the JSON Schema.
    pub(crate) name: &'static str,
    /// Where the map is in a file, as in diagnostics: `under rate_limit`.
    pub(crate) context: &'static str,
    /// A short map, as an example in diagnostics.
    pub(crate) example: &'static str,
    pub(crate) keywords: &'static [Keyword],
    /// Names of the required keywords.
    pub(crate) required: &'static [&'static str],
}

/// A keyword of a map.
pub(crate) struct Keyword {
    pub(crate) name: &'static str,
    pub(crate) value: ValueSchema,
    pub(crate) description: &'static str,
}

/// The type of a keyword's value.
pub(crate) enum ValueSchema {
    /// A scalar as text.
    Text,
    Boolean,
    /// An unsigned integer of 32 bits.
    Number,
    /// An unsigned integer of hits or costs, up to 2^53 − 1.
    LargeNumber,
    /// An integer from 1 to this maximum.
    UpTo(u32),
    /// A whole percentage from this minimum to this maximum.
    Percent(u32, u32),
    /// A duration such as `200ms`.
    Duration,
    /// A number, or a percentage of a capacity.
    Amount,
    /// A capacity in flight, such as `100`, or per unit of time, such as `1000/s`.
    Capacity,
    /// One of these values.
    Choice(fn() -> Vec<&'static str>),
    /// One of these values, ignoring case.
    CaseInsensitiveChoice(fn() -> Vec<&'static str>),
    /// A map with any content.
    Anything,
    List(&'static ValueSchema),
    Map(&'static MapSchema),
    /// A map, or a list of such maps.
    MapOrList(&'static MapSchema),
    /// An unsigned integer of hits or costs, or a map.
    NumberOrMap(&'static MapSchema),
    /// A scalar as text, or a map.
    TextOrMap(&'static MapSchema),
    /// A map with names as keys, chosen by the author of the file.
    Named(&'static ValueSchema),
}

impl MapSchema {
    pub(super) fn has(&self, name: &str) -> bool {
        self.keywords.iter().any(|keyword| keyword.name == name)
    }

    pub(super) fn names(&self) -> impl Iterator<Item = &'static str> {
        self.keywords.iter().map(|keyword| keyword.name)
    }
}

const fn keyword(name: &'static str, value: ValueSchema, description: &'static str) -> Keyword {
    Keyword { name, value, description }
}

/// All maps with keywords.
pub(crate) const MAPS: [&MapSchema; 12] = [
    &ROOT,
    &DESCRIPTOR,
    &RATE_LIMIT,
    &REPLACES,
    &IP_PREFIX,
    &ELASTIC,
    &SHARE,
    &PLANS,
    &ASSIGNMENT,
    &DENIAL,
    &COST_PER_HIT,
    &CURRENCY,
];

/// Values of `charge`, and whether they mean that a request takes hits from all of its limits or from none.
pub(super) const CHARGES: [(&str, bool); 2] = [("each", false), ("all", true)];
/// Values of `edge`.
pub(super) const EDGES: [(&str, WindowEdge); 2] = [("weighted", WindowEdge::Weighted), ("strict", WindowEdge::Strict)];
/// Values of `week_starts`.
pub(super) const WEEKDAYS: [(&str, Weekday); 7] = [
    ("monday", Weekday::Monday),
    ("tuesday", Weekday::Tuesday),
    ("wednesday", Weekday::Wednesday),
    ("thursday", Weekday::Thursday),
    ("friday", Weekday::Friday),
    ("saturday", Weekday::Saturday),
    ("sunday", Weekday::Sunday),
];
/// The value of `phase`.
pub(super) const PHASE_ENTITY: &str = "entity";
/// Maximum percentage of soft and elastic limits; a higher one is treated as a mistake.
pub(super) const MAX_PERCENT: u32 = 1_000;

pub(crate) static ROOT: MapSchema = MapSchema {
    name: "file",
    context: "at the top of the file",
    example: "{ domain: api, descriptors: [{ key: user, rate_limit: { unit: minute, requests_per_unit: 100 } }] }",
    keywords: &[
        keyword("domain", ValueSchema::Text, "The domain of the requests that these rules apply to."),
        keyword(
            "charge",
            ValueSchema::Choice(|| CHARGES.map(|(name, _)| name).to_vec()),
            "Whether a request that one limit denies takes hits from its other limits (each) or from none (all).",
        ),
        keyword(
            "shard_by",
            ValueSchema::List(&ValueSchema::Text),
            "The keys of the entries that select a counter's Redis server; the whole descriptor by default.",
        ),
        keyword("plans", ValueSchema::Map(&PLANS), "Named sets of limits that entities are assigned to."),
        keyword(
            "descriptors",
            ValueSchema::List(&ValueSchema::Map(&DESCRIPTOR)),
            "The rules for the first entry of a descriptor.",
        ),
    ],
    required: &["domain"],
};

pub(crate) static DESCRIPTOR: MapSchema = MapSchema {
    name: "descriptor",
    context: "in a descriptor",
    example: "{ key: user, rate_limit: { unit: minute, requests_per_unit: 100 } }",
    keywords: &[
        keyword("key", ValueSchema::Text, "The key of the entry that this rule matches."),
        keyword(
            "value",
            ValueSchema::Text,
            "The value of the entry; with *, a pattern. By default, every value matches and has its own counter.",
        ),
        keyword("rate_limit", ValueSchema::Map(&RATE_LIMIT), "The limit of descriptors that end with this entry."),
        keyword(
            "rate_limits",
            ValueSchema::List(&ValueSchema::Map(&RATE_LIMIT)),
            "Up to 8 limits that are charged together: a request that one of them denies takes hits from none.",
        ),
        keyword(
            "shadow_mode",
            ValueSchema::Boolean,
            "If true, the limit is counted and measured, but never denies a request.",
        ),
        keyword(
            "quota_mode",
            ValueSchema::Boolean,
            "If true, the rule denies a request only if every rule of the request in quota mode is over its limit.",
        ),
        keyword(
            "detailed_metric",
            ValueSchema::Boolean,
            "If true, statistics are kept for each combination of the values of all entries.",
        ),
        keyword("value_to_metric", ValueSchema::Boolean, "If true, statistics are kept for each value of this entry."),
        keyword(
            "share_threshold",
            ValueSchema::Boolean,
            "If true, all values that match the pattern in value share one counter.",
        ),
        keyword(
            "ip_prefix",
            ValueSchema::Map(&IP_PREFIX),
            "The value of the entry is an IP address, and all addresses with the same prefix share one counter.",
        ),
        keyword(
            "metadata",
            ValueSchema::Anything,
            "Free-form data that responses contain if response.dynamic_metadata is set.",
        ),
        keyword(
            "descriptors",
            ValueSchema::List(&ValueSchema::Map(&DESCRIPTOR)),
            "The rules for the next entry of the descriptor.",
        ),
    ],
    required: &["key"],
};

pub(crate) static RATE_LIMIT: MapSchema = MapSchema {
    name: "rate_limit",
    context: "under rate_limit",
    example: "{ unit: minute, requests_per_unit: 100 }",
    keywords: &[
        keyword(
            "unit",
            ValueSchema::CaseInsensitiveChoice(|| Unit::ALL.map(Unit::name).to_vec()),
            "The unit of the window. A month has 30 days and a year 365 days.",
        ),
        keyword(
            "unit_multiplier",
            ValueSchema::Number,
            "The length of the window in units, at most 100 years; 1 by default.",
        ),
        keyword(
            "requests_per_unit",
            ValueSchema::LargeNumber,
            "The maximum number of hits in one window. With 0, everything is denied.",
        ),
        keyword(
            "unlimited",
            ValueSchema::Boolean,
            "If true, everything is allowed and nothing is counted. It cannot be combined with unit.",
        ),
        keyword("name", ValueSchema::Text, "The name of the limit, for replaces and in responses."),
        keyword(
            "replaces",
            ValueSchema::List(&ValueSchema::Map(&REPLACES)),
            "The limits of the same request that do not apply if this limit applies.",
        ),
        keyword(
            "on_error",
            ValueSchema::Choice(|| FailurePolicy::ALL.map(FailurePolicy::name).to_vec()),
            "What happens if the store cannot decide; the setting decisions.on_error by default.",
        ),
        keyword(
            "consistency",
            ValueSchema::Choice(|| Consistency::ALL.map(Consistency::name).to_vec()),
            "How exactly instances share the counter in Redis; exact by default.",
        ),
        keyword(
            "algorithm",
            ValueSchema::Choice(|| Algorithm::named().map(|kind| kind.name).collect()),
            "The algorithm that counts hits; fixed_window by default.",
        ),
        keyword(
            "window",
            ValueSchema::Choice(|| WindowStart::ALL.map(WindowStart::name).to_vec()),
            "When a fixed window begins: at multiples of its length since 1970 (epoch, the default), with the first hit of \
             each entity (first_request), or at the boundaries of the calendar (calendar).",
        ),
        keyword(
            "zone",
            ValueSchema::Text,
            "The time zone of a calendar window, such as Europe/Berlin; UTC by default.",
        ),
        keyword(
            "week_starts",
            ValueSchema::Choice(|| WEEKDAYS.map(|(name, _)| name).to_vec()),
            "The first day of a calendar window of a week; monday by default.",
        ),
        keyword(
            "month",
            ValueSchema::UpTo(12),
            "The first month of calendar windows of several months or a year; 1 by default.",
        ),
        keyword(
            "day",
            ValueSchema::UpTo(31),
            "The first day of calendar windows of months or years; in shorter months their last day. 1 by default.",
        ),
        keyword(
            "at",
            ValueSchema::Text,
            "The local time at which calendar windows of days or more begin, such as 06:00; midnight by default.",
        ),
        keyword(
            "phase",
            ValueSchema::Choice(|| vec![PHASE_ENTITY]),
            "With entity, the fixed windows of each entity begin at another time, so that they do not all end together.",
        ),
        keyword(
            "retry_jitter",
            ValueSchema::Duration,
            "A random time up to this one is added to Retry-After, so that callers do not all return at the same time.",
        ),
        keyword(
            "buckets",
            ValueSchema::Number,
            "The number of counters in a sliding window, from 1 to 256. More counters are more precise; 1 by default.",
        ),
        keyword(
            "edge",
            ValueSchema::Choice(|| EDGES.map(|(name, _)| name).to_vec()),
            "How the oldest counter of a sliding window counts: by its overlap with the window, or in full (strict).",
        ),
        keyword("burst", ValueSchema::LargeNumber, "The number of hits that a bucket allows at once."),
        keyword(
            "debt",
            ValueSchema::LargeNumber,
            "The number of hits that a bucket may owe: a request passes if nothing is owed.",
        ),
        keyword(
            "queue",
            ValueSchema::Number,
            "The number of further hits that a leaky bucket allows with a delay, stated in the response; 0 by default.",
        ),
        keyword(
            "warm_up",
            ValueSchema::Duration,
            "The time in which a token bucket reaches its full rate after it was idle, up to 1h.",
        ),
        keyword(
            "count_denied",
            ValueSchema::Boolean,
            "Whether denied hits are counted; true by default for fixed_window, false for other algorithms.",
        ),
        keyword(
            "min_interval",
            ValueSchema::Duration,
            "The minimum time between two allowed requests, up to the length of the window.",
        ),
        keyword(
            "soft",
            ValueSchema::Percent(1, MAX_PERCENT),
            "The percentage above the limit that is still allowed; these responses are marked as over the soft limit.",
        ),
        keyword("limit", ValueSchema::Number, "The maximum number of requests in flight, at most 1000."),
        keyword(
            "ceiling",
            ValueSchema::Number,
            "The upper bound of an adaptive limit, in requests in flight, at most 1000.",
        ),
        keyword(
            "floor",
            ValueSchema::Number,
            "The lower bound of an adaptive limit, in requests in flight; 1 by default.",
        ),
        keyword(
            "initial",
            ValueSchema::Number,
            "The initial value of an adaptive limit, in requests in flight; 20 by default.",
        ),
        keyword(
            "method",
            ValueSchema::Choice(|| Method::ALL.map(Method::name).to_vec()),
            "The algorithm that computes an adaptive limit from latencies; vegas by default.",
        ),
        keyword(
            "timeout",
            ValueSchema::Duration,
            "The latency above which an adaptive limit treats a request as dropped; 5s by default.",
        ),
        keyword(
            "hold",
            ValueSchema::Duration,
            "The time after which a slot that was not released becomes free, at most a day; 60s by default.",
        ),
        keyword(
            "holder",
            ValueSchema::Text,
            "The key of the last entry of the descriptor, which contains the holder of a slot.",
        ),
        keyword(
            "capacity",
            ValueSchema::Capacity,
            "The capacity that classes share: a number of requests in flight (100) or a rate (1000/s).",
        ),
        keyword("class", ValueSchema::Text, "The key of the entry that contains the class of a request."),
        keyword(
            "shares",
            ValueSchema::Named(&ValueSchema::Map(&SHARE)),
            "The guaranteed and the maximum share of the capacity for each class.",
        ),
        keyword(
            "reserve",
            ValueSchema::Named(&ValueSchema::Amount),
            "The part of the capacity that is reserved for each class, as a number of hits or a percentage.",
        ),
        keyword(
            "shed",
            ValueSchema::Boolean,
            "If true, denials are reported as overload: HTTP status 503 instead of 429.",
        ),
        keyword(
            "visible",
            ValueSchema::Boolean,
            "If false, responses do not mention the limit: not in headers, current_limit or metadata. True by default.",
        ),
        keyword(
            "cost_per_hit",
            ValueSchema::NumberOrMap(&COST_PER_HIT),
            "The factor by which hits count: a number, or a table by the value of an entry, such as the price of a model.",
        ),
        keyword(
            "currency",
            ValueSchema::TextOrMap(&CURRENCY),
            "The unit in which the hits of a budget are displayed: a name, if a hit is a millionth, or a map with code \
             and hits.",
        ),
        keyword(
            "denial",
            ValueSchema::Map(&DENIAL),
            "The message, the headers and the status of the response to a denied request.",
        ),
        keyword(
            "penalty",
            ValueSchema::Duration,
            "The time for which every hit is denied, and changes nothing, after the limit was exceeded.",
        ),
        keyword(
            "penalty_max",
            ValueSchema::Duration,
            "The maximum length of a penalty. A penalty is twice as long as the last one if the time between the two \
             is less than the length of the last one.",
        ),
        keyword("elastic", ValueSchema::Map(&ELASTIC), "A higher limit while a resource has spare capacity."),
        keyword(
            "by_plan",
            ValueSchema::Text,
            "The name of a limit in the request's plan, which replaces all other keywords.",
        ),
    ],
    required: &[],
};

pub(crate) static REPLACES: MapSchema = MapSchema {
    name: "replaces",
    context: "in an entry of replaces",
    example: "{ name: base }",
    keywords: &[keyword("name", ValueSchema::Text, "The name of the limit that is replaced.")],
    required: &["name"],
};

pub(crate) static IP_PREFIX: MapSchema = MapSchema {
    name: "ip_prefix",
    context: "under ip_prefix",
    example: "{ v4: 24, v6: 56 }",
    keywords: &[
        keyword("v4", ValueSchema::UpTo(32), "The prefix length of IPv4 addresses in bits; 32 by default."),
        keyword("v6", ValueSchema::UpTo(128), "The prefix length of IPv6 addresses in bits; 64 by default."),
    ],
    required: &[],
};

pub(crate) static COST_PER_HIT: MapSchema = MapSchema {
    name: "cost_per_hit",
    context: "under cost_per_hit",
    example: "{ key: model, values: { small: 1, large: 15 }, default: 15 }",
    keywords: &[
        keyword("key", ValueSchema::Text, "The key of the last entry of the descriptor, which selects the cost."),
        keyword(
            "values",
            ValueSchema::Named(&ValueSchema::LargeNumber),
            "The cost of a hit by the value of the entry.",
        ),
        keyword("default", ValueSchema::LargeNumber, "The cost of a hit with another value, or without the entry."),
    ],
    required: &["key", "values", "default"],
};

pub(crate) static CURRENCY: MapSchema = MapSchema {
    name: "currency",
    context: "under currency",
    example: "{ code: USD, hits: 1_000_000 }",
    keywords: &[
        keyword("code", ValueSchema::Text, "The name of the unit, such as USD."),
        keyword("hits", ValueSchema::LargeNumber, "The number of hits in one unit; 1000000 by default."),
    ],
    required: &["code"],
};

pub(crate) static DENIAL: MapSchema = MapSchema {
    name: "denial",
    context: "under denial",
    example: "{ message: \"{limit} used up, come back in {wait} s\" }",
    keywords: &[
        keyword(
            "message",
            ValueSchema::Text,
            "The body of the response, up to 4096 bytes, with the placeholders {limit}, {name}, {plan}, {reset} and {wait}.",
        ),
        keyword("content_type", ValueSchema::Text, "The type of the message; text/plain by default."),
        keyword(
            "headers",
            ValueSchema::Named(&ValueSchema::Text),
            "Up to 16 further headers with their values, which can have the same placeholders.",
        ),
        keyword(
            "status",
            ValueSchema::Number,
            "The HTTP status on /json and of the client's layer, from 400 to 599; by default 429, or 503 for overload.",
        ),
    ],
    required: &[],
};

pub(crate) static ELASTIC: MapSchema = MapSchema {
    name: "elastic",
    context: "under elastic",
    example: "{ resource: db, up_to: 200% }",
    keywords: &[
        keyword(
            "resource",
            ValueSchema::Text,
            "The name of the resource, whose utilization is reported to /resources.",
        ),
        keyword(
            "up_to",
            ValueSchema::Percent(101, MAX_PERCENT),
            "The highest limit, as a percentage of the rule's own limit.",
        ),
        keyword(
            "idle",
            ValueSchema::Percent(0, 100),
            "The utilization up to which the highest limit applies; 50% by default.",
        ),
        keyword(
            "busy",
            ValueSchema::Percent(0, 100),
            "The utilization from which only the rule's own limit applies; 90% by default.",
        ),
    ],
    required: &["resource", "up_to"],
};

pub(crate) static SHARE: MapSchema = MapSchema {
    name: "share",
    context: "in a class of shares",
    example: "{ min: 10%, max: 50% }",
    keywords: &[
        keyword(
            "min",
            ValueSchema::Amount,
            "The guaranteed share of the class, as a number of hits or a percentage; 0 by default.",
        ),
        keyword(
            "max",
            ValueSchema::Amount,
            "The maximum share of the class, as a number of hits or a percentage; the whole capacity by default.",
        ),
    ],
    required: &[],
};

pub(crate) static PLANS: MapSchema = MapSchema {
    name: "plans",
    context: "under plans",
    example: "{ default: free, limits: { free: { calls: { unit: minute, requests_per_unit: 100 } } } }",
    keywords: &[
        keyword("key", ValueSchema::Text, "The key of the entry that contains a request's plan; plan by default."),
        keyword("default", ValueSchema::Text, "The plan of requests without a plan or with an unknown one."),
        keyword(
            "limits",
            ValueSchema::Named(&ValueSchema::Named(&ValueSchema::MapOrList(&RATE_LIMIT))),
            "The limits of each plan, by the name of the plan and the name of the limit: one limit, or a list like rate_limits.",
        ),
        keyword(
            "entities",
            ValueSchema::Named(&ValueSchema::Named(&ValueSchema::TextOrMap(&ASSIGNMENT))),
            "The plans of entities, by the key and the value of an entry.",
        ),
    ],
    required: &["default", "limits"],
};

pub(crate) static ASSIGNMENT: MapSchema = MapSchema {
    name: "assignment",
    context: "in the plan of an entity",
    example: "{ plan: gold, day: 15 }",
    keywords: &[
        keyword("plan", ValueSchema::Text, "The name of the plan."),
        keyword("zone", ValueSchema::Text, "The time zone of the entity's calendar windows, in place of the limit's."),
        keyword(
            "week_starts",
            ValueSchema::Choice(|| WEEKDAYS.map(|(name, _)| name).to_vec()),
            "The first day of the entity's weeks, in place of the limit's.",
        ),
        keyword("month", ValueSchema::UpTo(12), "The first month of the entity's years, in place of the limit's."),
        keyword(
            "day",
            ValueSchema::UpTo(31),
            "The first day of the entity's months and years, in place of the limit's.",
        ),
        keyword(
            "at",
            ValueSchema::Text,
            "The local time at which the entity's windows begin, in place of the limit's.",
        ),
    ],
    required: &["plan"],
};
