//! One decision, protocol-neutral: match the descriptors, ask the store, read the verdict.
//!
//! The only place that knows both the rule and the store's failure, so what an outage means is decided here.

mod applied_limit;
mod candidate;
mod decide;
mod inspect;
mod key;
pub mod overrides;
mod resources;
mod snapshot;
mod statistics;
mod top_entities;
mod verdict;

pub use crate::{
    algorithm::{Micros, Sample, reports::Utilization},
    store::{Decider, Grant, StoreError},
};
pub use candidate::{Candidate, NewlyDenied, Outcomes};
pub use decide::{Engine, PreparedDecision, Settings};
pub use inspect::{CounterLocation, CounterState, Inspection};
pub use overrides::{Override, Overrides};
pub use resources::{Report, ReportError, Resource, Resources};
pub use snapshot::Snapshot;
pub use statistics::{Statistics, StatisticsSettings};
pub use top_entities::{RankBy, Ranking, TopEntities, TopEntity};
pub use verdict::{Binding, Code, CurrentLimit, OverrideKind, Status, Verdict};

use smallvec::SmallVec;

use crate::rules::{Entry, Limit, Lookup, Rule, RuleSet};

/// The name of the counter that a descriptor has by its rule, and whether it is one of a limit per second; `None` when
/// nothing is counted.
#[must_use]
pub fn counter(rules: &RuleSet, domain: &str, entries: &[Entry<'_>]) -> Option<(String, bool)> {
    let Lookup::Rule(rule, path) = rules.find(domain, entries.iter().copied()) else {
        return None;
    };
    let shard_by = rules.settings_of(domain).map_or([].as_slice(), |domain| &domain.shard_by);
    let (limit, mut name) = (rule.limit.as_ref()?, Vec::new());
    let entries = &entries[..entries.len() - Rule::modifier_count(&path)];
    key::write(&mut name, "", domain, shard_by, entries, &path, limit.algorithm());
    Some((String::from_utf8(name).ok()?, limit.is_per_second()))
}

/// What a caller asks.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    /// The set of rules; not empty.
    pub domain: &'a str,
    /// At least one. Room for one, here and in all that is made of it: most requests have no more, and one that waits for
    /// its answer is to be small.
    pub descriptors: SmallVec<[Descriptor<'a>; 1]>,
    /// What the caller says of the hits of each that he admits by himself; nothing, if he does not.
    pub feedback: Vec<Feedback>,
}

/// What a caller says of what he holds of a descriptor: hits that he admits by himself, or a slot that he gives back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Feedback {
    /// So many he could use.
    pub demand: u64,
    /// A grant that he has done with, and how many of its hits were admitted.
    pub reports: Option<(u64, u64)>,
    /// How long it took what held the slot.
    pub sample: Option<Sample>,
}

/// One of the things that a request counts as.
#[derive(Clone, Debug)]
pub struct Descriptor<'a> {
    /// What it is, from the general to the particular.
    pub entries: SmallVec<[Entry<'a>; 3]>,
    /// What it costs; 0 is a look that takes nothing.
    pub hits: u64,
    /// The hits are given back instead.
    pub refund: bool,
    /// A limit of the caller's own. Boxed, as all that is rare: a request is moved several times.
    pub requested_limit: Option<Box<Limit>>,
}

/// Why there is no verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecideError {
    /// The store could not decide, and a rule that applies wants the caller to know.
    #[error("the counters cannot be asked now, and a rule that applies says on_error: error")]
    Store(#[source] StoreError),
    /// The control plane has not sent any yet. As the peer says it.
    #[error("no rate limit configuration loaded")]
    NoRules,
}
