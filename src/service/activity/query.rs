//! [`RuleQuery`]: which rules of the activity to return, and in which order.

/// The order of rules on the same level.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum RuleOrder {
    /// Most denied hits of the last ten minutes first, then most requested hits of the last hour.
    #[default]
    Denied,
    /// The order of the rule files.
    File,
}

/// Which rows of the tree to return.
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
    /// Number of rows to skip.
    pub offset: usize,
    /// Maximum number of rows.
    pub max_rows: usize,
}
