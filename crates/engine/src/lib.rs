#![doc = include_str!("../README.md")]
//!
//! # Structure
//!
//! Decisions about requests, independent of the protocol: the [`Engine`] matches descriptors with rules, applies the
//! hits to the store and builds the [`Verdict`]. [`RateLimiter`] is an engine with counters in memory.
//!
//! Only this crate knows both the rule and the store's failure, so failure policies are applied here.

mod candidate;
mod clock;
mod decide;
mod denial;
mod engine;
mod evaluate;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod headers;
mod inspect;
mod key;
#[cfg(feature = "tower")]
pub mod layer;
mod long_value;
mod matching;
pub mod overrides;
mod penalty;
mod prepared;
mod quotas;
mod rate_limiter;
mod resources;
mod settings;
mod snapshot;
mod statistics;
mod top_entities;
mod unmatched;
mod utilization;
mod value_hash;
mod verdict;
mod wait_queue;

pub use candidate::{Candidate, NewlyDenied, Outcomes};
pub use clock::Clock;
pub use denial::DenialResponse;
pub use engine::Engine;
pub use inspect::{CounterLocation, CounterState, Inspection};
pub use long_value::{MAX_PLAIN_BYTES, bounded, ends_like_bounded};
pub use overrides::{Override, Overrides};
pub use prepared::PreparedRequest;
pub use quotas::{
    Assignment, BucketReport, DELIVERY_TIME, HeldQuota, Payment, Prepaid, Quota, REVIEW_TIME, ReportOutcome,
    TokenBucket, Tokens, caller_number,
};
pub use rate_limiter::{Builder, RateLimiter};
pub use resources::{Resource, Resources};
pub use settings::Settings;
pub use sluicegate_algorithm::{CounterPart, MAX_NUMBER, Micros, Sample, bound_hits, reports::Utilization};
pub use sluicegate_rules::source::LoadError;
pub use sluicegate_store::{Decider, Grant, StoreError};
pub use snapshot::Snapshot;
pub use statistics::{ClassTotals, HitTotals, RuleHits, RuleTotals, Statistics, StatisticsSettings};
pub use top_entities::{Estimate, RankBy, Ranking, TopEntities, TopEntity, sort as sort_ranking};
pub use unmatched::{Group as UnmatchedGroup, UnmatchedDescriptors};
pub use utilization::{Report, ReportError};
pub use value_hash::ValueHash;
pub use verdict::{Binding, Code, CurrentLimit, OverrideKind, Status, Verdict};

use sluicegate_rules::{Entry, Limit, Lookup, Rule, RuleSet};
use smallvec::SmallVec;

/// Returns the name of a descriptor's counter, and whether its limit is per second.
///
/// Returns `None` if no rule limits the descriptor.
#[must_use]
pub fn counter(
    rules: &RuleSet,
    domain: &str,
    entries: &[Entry<'_>],
    hash: Option<&ValueHash>,
) -> Option<(String, bool)> {
    let Lookup::Rule(rule, path) = rules.find(domain, entries.iter().copied()) else {
        return None;
    };
    let shard_by = key::shard_by(rules, domain);
    let limit = rule.limit.as_ref()?;
    let entries = &entries[..entries.len() - Rule::modifier_count(&path)];
    let name = key::name("", domain, shard_by, entries, &path, limit.algorithm().into(), hash);
    Some((String::from_utf8(name).ok()?, limit.is_per_second()))
}

/// A request for a decision.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The namespace of the rules; not empty.
    pub domain: &'a str,
    /// At least one descriptor. The inline capacity is 1, here and in all vectors derived from it: most requests have
    /// one descriptor, and a pending request should be small.
    pub descriptors: SmallVec<[Descriptor<'a>; 1]>,
    /// One report per descriptor on hits that the caller admits without a request; empty if there are none.
    pub feedback: Vec<Feedback>,
}

/// Report of a caller about one descriptor: hits admitted under a grant, or a slot that is released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feedback {
    /// Hits that the caller could use.
    pub demand: u64,
    /// The id of a finished grant, and the number of its hits that were admitted.
    pub reports: Option<(u64, u64)>,
    /// Latency and outcome of the request that held the slot.
    pub sample: Option<Sample>,
}

/// A list of entries that describes one aspect of a request.
#[derive(Clone, Debug)]
pub struct Descriptor<'a> {
    /// The entries, from the most general to the most specific.
    pub entries: SmallVec<[Entry<'a>; 3]>,
    /// The cost; 0 peeks and takes nothing.
    pub hits: u64,
    /// Whether the hits are refunded instead of taken.
    pub refund: bool,
    /// A limit supplied by the request. Boxed, as it is rare and a request is moved several times.
    pub requested_limit: Option<Box<Limit>>,
}

impl<'a> Descriptor<'a> {
    /// Creates a descriptor that takes one hit.
    #[must_use]
    pub fn new(entries: SmallVec<[Entry<'a>; 3]>) -> Self {
        Self { entries, hits: 1, refund: false, requested_limit: None }
    }
}

/// Error returned when a request cannot be decided.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecideError {
    /// The store failed, and the failure policy of an applicable rule is `error`.
    #[error("counter store failed, and on_error is error for an applicable rule")]
    Store(#[source] StoreError),
    /// The control plane has not sent any rules yet. The text is that of envoyproxy/ratelimit.
    #[error("no rate limit configuration loaded")]
    NoRules,
}

#[cfg(test)]
pub(crate) mod testing;
#[cfg(test)]
mod tests;
