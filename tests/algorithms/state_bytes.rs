//! The bytes of each counter program's state, which other versions of the service read from Redis and from peers. A change of
//! them is a change of the format: counters of the previous version would be misread or start again.

use std::{collections::BTreeSet, fmt::Write, fs};

use sluicegate::algorithm::{
    Action, Algorithm, Micros, Operation, Program, RequestContext, Sample, State, assignments::Assignments,
    penalty::Penalty, reports::UtilizationReports,
};

use super::{golden_vectors::limit, histories::with_context};
use crate::support::repository;

const START: u64 = 1_763_672_400_000_000;

/// At least one limit of each algorithm, as in a rule file.
const LIMITS: &[&str] = &[
    r#"{"unit": "minute", "requests_per_unit": 10}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "window": "first_request"}"#,
    r#"{"unit": "hour", "requests_per_unit": 10, "window": "calendar", "zone": "Asia/Kolkata"}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "phase": "entity"}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "sliding_window"}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "sliding_window", "buckets": 6}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "sliding_log"}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "token_bucket", "burst": 15}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "token_bucket", "burst": 3, "debt": 12}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "token_bucket", "burst": 15, "warm_up": "30s"}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "gcra", "burst": 15}"#,
    r#"{"unit": "hour", "requests_per_unit": 999999999999989, "algorithm": "token_bucket"}"#,
    r#"{"unit": "minute", "requests_per_unit": 10, "algorithm": "leaky_bucket", "burst": 3, "queue": 5}"#,
    r#"{"algorithm": "concurrency", "limit": 10, "hold": "90s"}"#,
    r#"{"algorithm": "adaptive", "ceiling": 10, "hold": "90s"}"#,
    r#"{"capacity": "40/m", "class": "plan", "shares": {"free": {"min": 5, "max": 12}, "gold": {"min": 20}}}"#,
];

/// Seconds, action and cost of each operation.
const OPERATIONS: [(u64, Action, u64); 6] = [
    (5, Action::Take, 3),
    (6, Action::Take, 1),
    (20, Action::Refund, 1),
    (50, Action::Take, 2),
    (61, Action::Take, 1),
    (62, Action::Take, 100),
];

fn describe(program: &Program, text: &mut String) {
    let mut state = State::default();
    for (number, (second, action, cost)) in OPERATIONS.into_iter().enumerate() {
        let sample = Some(Sample { latency: Micros::new(20_000), dropped: false });
        let context =
            RequestContext { holder: 1 + number as u64, sample, entity: 5_000_000, ..RequestContext::default() };
        let now = Micros::new(START + 1_000_000 * second);
        with_context(program, context).step(&mut state, Operation { action, cost, now });
        let bytes: String = state.as_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
        writeln!(text, "  {second:>2} s {action:?} {cost}: {bytes}").unwrap();
    }
}

/// `UPDATE_GOLDEN=1` writes the present bytes.
#[test]
fn the_bytes_of_states_are_those_of_the_previous_version() {
    let (mut text, mut names) = (String::new(), BTreeSet::new());
    for line in LIMITS {
        let algorithm = *limit(&serde_json::from_str(line).unwrap()).algorithm();
        names.insert(algorithm.name());
        writeln!(text, "{line}").unwrap();
        describe(&algorithm.into(), &mut text);
        if let Some(leasing) = algorithm.leasing() {
            writeln!(text, "{line}, on lease").unwrap();
            describe(&leasing, &mut text);
        }
    }
    let ttl = Micros::from_secs(90);
    writeln!(text, "reports of a resource").unwrap();
    describe(&UtilizationReports::new(ttl).into(), &mut text);
    writeln!(text, "assignments of a limit").unwrap();
    describe(&Assignments::new(ttl).into(), &mut text);
    writeln!(text, "penalty of a limit").unwrap();
    let penalty = Penalty::new(Micros::from_secs(4), Micros::from_secs(20)).unwrap();
    describe(&penalty.into(), &mut text);
    assert_eq!(names, Algorithm::KINDS.iter().map(|kind| kind.name).collect(), "every algorithm has bytes");
    let path = repository("tests/golden/states.txt");
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        fs::write(&path, &text).unwrap();
    }
    let golden = fs::read_to_string(&path).unwrap_or_default();
    for (number, (now, before)) in text.lines().zip(golden.lines()).enumerate() {
        assert_eq!(now, before, "line {} of tests/golden/states.txt", number + 1);
    }
    assert_eq!(text.lines().count(), golden.lines().count(), "tests/golden/states.txt has all algorithms");
}
