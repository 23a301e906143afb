//! `/rlconfig`: the rules in force, one line per rule, as in envoyproxy/ratelimit.

use std::time::{Duration, UNIX_EPOCH};

use crate::{engine::overrides::Target, rules::Measure, service::reload::RulesInForce};

/// Returns the page `/rlconfig` as text.
///
/// Comments above the rules contain the time at which they were loaded, the error of newer rules, and the switches.
pub(super) fn write(in_force: &RulesInForce) -> String {
    let status = in_force.status();
    let mut text = match status.loaded_at.map(|at| UNIX_EPOCH + Duration::from_secs(at.floor_secs())) {
        Some(loaded) => format!("# loaded {}\n", humantime::format_rfc3339_seconds(loaded)),
        None => "# no rules loaded yet\n".to_owned(),
    };
    for line in status.last_error.iter().flat_map(|error| error.lines()) {
        text += &format!("# last error: {line}\n");
    }
    let snapshot = in_force.snapshot().load_full();
    for (scope, mode, origin) in snapshot.modes().in_force() {
        let scope = Target::Switch(scope.clone()).to_string();
        text += &format!("# {scope} {}, origin: {}\n", mode.name(), origin.name());
    }
    for rule in snapshot.rule_set().rules() {
        let requests = rule.limit.as_ref().map(|limit| limit.requests()).unwrap_or_default();
        let (unit, multiplier) = match rule.limit.as_ref().map(|limit| limit.measure()) {
            Some(Measure::Rate { unit, multiplier }) => (unit.name().to_uppercase(), multiplier),
            Some(Measure::InFlight { .. }) => ("IN_FLIGHT".into(), 1),
            None => ("UNKNOWN".into(), 1),
        };
        let multiplier = if multiplier == 1 { String::new() } else { format!(" unit_multiplier={multiplier}") };
        // envoyproxy/ratelimit does not print the algorithm, so lines about fixed windows do not contain it either.
        let algorithm = match &rule.limit {
            Some(limit) if !limit.is_default() => format!(" algorithm={}", limit.algorithm().name()),
            Some(_) | None => String::new(),
        };
        let mode = match snapshot.modes().mode_of(&rule.labels[0], Some(rule)) {
            Some(mode) => format!(", switched: {}", mode.name()),
            None => String::new(),
        };
        text += &format!(
            "{}: unit={unit}{multiplier}{algorithm} requests_per_unit={requests}, shadow_mode: {}, quota_mode: {}{mode}\n",
            rule.labels.join("."),
            rule.shadow_mode,
            rule.quota_mode,
        );
    }
    text
}
