//! [`PlanAssignment`]: the plan of an entity.

use sluicegate_calendar::Anchor;

/// The plan of an entity.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PlanAssignment {
    /// Name of the plan.
    pub plan: Box<str>,
    /// When the windows of the plan's calendar limits begin for this entity, where that differs from the limits.
    pub anchor: Anchor,
}
