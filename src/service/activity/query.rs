//! [`RuleQuery`] and [`TopQuery`]: which rules and which entities of the activity to return.

use std::time::Duration;

use crate::engine::{RankBy, TopEntities};

/// The order of rules on the same level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RuleOrder {
    /// By denied requests of the last ten minutes, then of the last hour, then by requests; the highest numbers first.
    #[default]
    Denied,
    /// The order of the rule files.
    File,
}

/// A query for top entities.
#[derive(Clone, Debug, Default)]
pub struct TopQuery {
    /// The number by which entities are ranked.
    pub rank_by: RankBy,
    /// Maximum number of entities.
    pub max_entities: usize,
    /// Length of the time up to now for which requests are counted.
    pub period: Duration,
    /// Whether to add the reports of the other instances: their entities of the last five minutes, or of the last hour.
    pub all_instances: bool,
}

impl TopQuery {
    /// Returns the length of the time for which requests are counted. For all instances, it is five minutes or an hour,
    /// because reports have no other periods.
    pub(super) fn period(&self) -> Duration {
        let period = self.period.min(TopEntities::MAX_PERIOD);
        if !self.all_instances {
            return period;
        }
        if period > TopEntities::DEFAULT_PERIOD { TopEntities::MAX_PERIOD } else { TopEntities::DEFAULT_PERIOD }
    }
}

/// A query for rows of the tree of rules.
#[derive(Clone, Debug, Default)]
pub struct RuleQuery {
    /// Search terms, separated by spaces. A rule must contain each.
    pub find: String,
    /// Order of the rows.
    pub order: RuleOrder,
    /// Path of a rule. If it is not empty, only this rule is returned.
    pub path: String,
    /// Whether to return only rules, each with only its own hits, without the levels above them.
    pub rules_only: bool,
    /// Whether to add the reports of the other instances.
    pub all_instances: bool,
    /// Number of rows to skip.
    pub offset: usize,
    /// Maximum number of rows.
    pub max_rows: usize,
}
