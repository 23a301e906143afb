//! The method `Simulate`: conversions of [`crate::service::simulation`].

use std::cmp::Reverse;

use sluicegate_proto::sluicegate::admin::v1 as api;
use tonic::Status;

use super::convert::{files, read_change, rule, time};
use crate::{
    engine::Micros,
    replay::{Hits, RuleHits, Series},
    service::simulation::{Outcome, Simulation, SimulationError, Traffic},
};

/// Maximum number of rules in a response.
const MAX_RULES: usize = 200;
/// Maximum number of entities that are listed for each rule.
const MAX_ENTITIES: usize = 10;

pub(super) fn read_simulation(request: api::SimulateRequest) -> Result<Simulation, Status> {
    let api::SimulateRequest { files: uploaded, changes, access_log, mapping } = request;
    let traffic = match access_log.is_empty() {
        true => Traffic::Recorded,
        false => Traffic::AccessLog { log: access_log, mapping },
    };
    Ok(Simulation {
        files: (!uploaded.is_empty()).then(|| files(uploaded)),
        changes: changes.into_iter().map(read_change).collect::<Result<_, _>>()?,
        traffic,
    })
}

pub(super) fn write_outcome(outcome: &Outcome) -> api::SimulateResponse {
    let Outcome { replay, invalid_lines, is_incomplete } = outcome;
    let snapshot = replay.rules();
    let mut rules: Vec<_> = replay.by_rule.iter().enumerate().filter(|(_, hits)| hits.hits.requested > 0).collect();
    let changed = |hits: &RuleHits| hits.hits.newly_denied + hits.hits.newly_allowed;
    rules.sort_by_key(|(_, hits)| Reverse((changed(hits), hits.hits.denied, hits.hits.requested)));
    rules.truncate(MAX_RULES);
    let rule_hits = |(id, hits): (usize, &RuleHits)| api::SimulatedRule {
        rule: snapshot.rules().rules().get(id).map(|found| rule(found, None)),
        outcomes: Some(write_hits(hits.hits)),
        entities: hits.entities.len() as u64,
        entities_denied: hits.entities_denied() as u64,
        most_denied: hits
            .most_denied(MAX_ENTITIES)
            .into_iter()
            .map(|entity| api::SimulatedEntity {
                name: entity.name.to_string(),
                outcomes: Some(write_hits(entity.hits)),
            })
            .collect(),
        series: Some(write_series(&hits.series)),
    };
    let [denied, denied_before] = replay.denied;
    api::SimulateResponse {
        requests: replay.requests,
        denied,
        denied_before,
        unknown_before: replay.unknown,
        skipped: replay.skipped + invalid_lines,
        rules: rules.into_iter().map(rule_hits).collect(),
        series: Some(write_series(&replay.series)),
        incomplete: *is_incomplete,
    }
}

fn write_hits(hits: Hits) -> api::Outcomes {
    let Hits { requested, denied, newly_denied, newly_allowed } = hits;
    api::Outcomes { requested, denied, newly_denied, newly_allowed }
}

fn write_series(series: &Series) -> api::SimulatedSeries {
    let column = |index: usize| series.sums.iter().map(|sums| sums[index]).collect();
    api::SimulatedSeries {
        start: series.start.map(|start| time(Micros::new(start))),
        step_ms: series.step / 1_000,
        allowed: column(0),
        denied: column(1),
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
        let hits = |denied, newly_denied, newly_allowed| Hits { requested: 10, denied, newly_denied, newly_allowed };
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
