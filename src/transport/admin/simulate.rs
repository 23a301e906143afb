//! The method `Simulate`: conversions of [`crate::service::simulation`].

use std::cmp::Reverse;

use sluicegate_proto::sluicegate::admin::v1 as api;
use tonic::Status;

use super::convert::{files, outcomes, read_change, rule, time};
use crate::{
    engine::Micros,
    replay::{RuleHits, Series},
    rules::Rule,
    service::simulation::{Outcome, Simulation, SimulationError, Traffic},
};

/// Maximum number of rules in a response.
const MAX_RULES: usize = 200;
/// Maximum number of entities that are listed for each rule.
const MAX_ENTITIES: usize = 10;

pub(super) fn read_simulation(request: api::SimulateRequest) -> Result<Simulation, Status> {
    let api::SimulateRequest { files: uploaded, changes, access_log, mapping } = request;
    let traffic =
        if access_log.is_empty() { Traffic::Recorded } else { Traffic::AccessLog { log: access_log, mapping } };
    let files = if uploaded.is_empty() { None } else { Some(files(uploaded)) };
    let changes = changes.into_iter().map(read_change).collect::<Result<_, _>>()?;
    Ok(Simulation { files, changes, traffic })
}

pub(super) fn write_outcome(outcome: &Outcome) -> api::SimulateResponse {
    let Outcome { replay, invalid_lines, is_incomplete } = outcome;
    let snapshot = replay.rules();
    let mut rules: Vec<_> = replay.by_rule.iter().enumerate().filter(|(_, hits)| hits.hits.requested > 0).collect();
    rules.sort_by_key(|(_, rule_hits)| {
        let hits = rule_hits.hits;
        Reverse((hits.newly_denied + hits.newly_allowed, hits.denied, hits.requested))
    });
    rules.truncate(MAX_RULES);
    let mut simulated_rules = Vec::with_capacity(rules.len());
    for (id, hits) in rules {
        simulated_rules.push(write_rule(snapshot.rule_set().rules().get(id), hits));
    }
    let [denied, denied_before] = replay.denied;
    api::SimulateResponse {
        requests: replay.requests,
        denied,
        denied_before,
        unknown_before: replay.unknown,
        skipped: replay.skipped + invalid_lines,
        rules: simulated_rules,
        series: Some(write_series(&replay.series)),
        incomplete: *is_incomplete,
    }
}

fn write_rule(simulated: Option<&Rule>, hits: &RuleHits) -> api::SimulatedRule {
    let mut most_denied = Vec::new();
    for entity in hits.most_denied(MAX_ENTITIES) {
        most_denied.push(api::SimulatedEntity { name: entity.name.to_string(), outcomes: Some(outcomes(entity.hits)) });
    }
    api::SimulatedRule {
        rule: simulated.map(|simulated| rule(simulated, None)),
        outcomes: Some(outcomes(hits.hits)),
        entities: hits.entities.len() as u64,
        entities_denied: hits.entities_denied() as u64,
        most_denied,
        series: Some(write_series(&hits.series)),
    }
}

fn write_series(series: &Series) -> api::SimulatedSeries {
    api::SimulatedSeries {
        start: series.start.map(|start| time(Micros::new(start))),
        step_ms: series.step / 1_000,
        allowed: series.sums.iter().map(|sums| sums[0]).collect(),
        denied: series.sums.iter().map(|sums| sums[1]).collect(),
    }
}

pub(super) fn reject(error: &SimulationError) -> Status {
    let message = crate::metrics::chain(error);
    match error {
        SimulationError::Busy => Status::resource_exhausted(message),
        SimulationError::NothingRecorded => Status::failed_precondition(message),
        SimulationError::Rules(_) | SimulationError::Change(..) | SimulationError::Mapping(_) => {
            Status::invalid_argument(message)
        }
        SimulationError::Traffic(_) => Status::internal(message),
        SimulationError::Stopped => Status::unavailable(message),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::Outcomes;
    use crate::{
        replay::Replay,
        rules::{Options, SourceFile, compile},
    };

    #[test]
    fn rules_with_the_most_changed_decisions_come_first() {
        let line = |key: &str| format!("- {{ key: {key}, rate_limit: {{ unit: hour, requests_per_unit: 1 }} }}\n");
        let text = format!("domain: d\ndescriptors:\n{}{}{}", line("a"), line("b"), line("c"));
        let (rules, _) = compile(&[SourceFile { name: "d.yaml".into(), text }], Options::default()).unwrap();
        let mut replay = Replay::new(rules, None);
        let hits =
            |denied, newly_denied, newly_allowed| Outcomes { requested: 10, denied, newly_denied, newly_allowed };
        for (id, hits) in [hits(9, 0, 0), hits(2, 1, 2), hits(4, 4, 0)].into_iter().enumerate() {
            replay.by_rule[id].hits = hits;
        }
        replay.skipped = 5;
        replay.series = Series { start: Some(3_000_000), step: 2_000_000, sums: vec![[5, 1], [7, 0]] };
        let response = write_outcome(&Outcome { replay, invalid_lines: 2, is_incomplete: false });
        let names: Vec<_> = response.rules.iter().map(|simulated| &simulated.rule.as_ref().unwrap().name).collect();
        assert_eq!(names, ["c", "b", "a"]);
        assert_eq!(response.skipped, 7);
        let start = Some(time(Micros::from_secs(3)));
        let series = api::SimulatedSeries { start, step_ms: 2_000, allowed: vec![5, 7], denied: vec![1, 0] };
        assert_eq!(response.series, Some(series));
    }
}
