//! Responses to changes of overrides.

use sluicegate_proto::sluicegate::admin::v1 as api;

/// Prints warnings of the service on standard error.
pub(super) fn print_warnings(warnings: &[String]) {
    for warning in warnings {
        eprintln!("warning: {warning}");
    }
}

/// Returns whether a change only removed overrides that did not exist.
pub(super) fn changes_nothing(changed: &api::PutOverridesResponse) -> bool {
    let changes = &changed.changes;
    !changes.is_empty() && changes.iter().all(|change| change.before.is_none() && change.after.is_none())
}
