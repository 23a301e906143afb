//! Properties of utilization reports.

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn apply(state: &mut State, reporter: u64, action: Action, cost: u64, second: u64) -> Option<Utilization> {
    let limiter = UtilizationReports::new(Micros::from_secs(10)).with_reporter(reporter);
    let operation = Operation { action, cost, now: Micros::new(START) + Micros::from_secs(second) };
    let allowed = limiter.step(state, operation);
    UtilizationReports::read(&limiter.explain(state, operation, allowed))
}

#[test]
fn utilization_is_the_highest_report_that_has_not_expired() {
    let mut state = State::default();
    assert_eq!(apply(&mut state, 0, Action::Peek, 0, 0), None);
    let expected = |max, mean, reporters| Some(Utilization { max, mean, reporters });
    assert_eq!(apply(&mut state, 1, Action::Take, 5_000, 0), expected(0.5, 0.5, 1));
    assert_eq!(apply(&mut state, 2, Action::Take, 9_000, 4), expected(0.9, 0.7, 2));
    assert_eq!(
        apply(&mut state, 2, Action::Take, 1_000, 5),
        expected(0.5, 0.3, 2),
        "a later report replaces the former one"
    );
    assert_eq!(apply(&mut state, 0, Action::Peek, 0, 10), expected(0.1, 0.1, 1), "the first report has expired");
    assert_eq!(apply(&mut state, 3, Action::Take, 20_000, 11), expected(1.0, 0.55, 2));
    assert_eq!(apply(&mut state, 3, Action::Refund, 0, 12), expected(0.1, 0.1, 1));
    assert_eq!(apply(&mut state, 0, Action::Peek, 0, 15), None);
}

#[test]
fn the_number_of_reporters_is_bounded_and_future_reports_are_ignored() {
    let mut state = State::default();
    for reporter in 0..=UtilizationReports::MAX_REPORTERS as u64 + 5 {
        apply(&mut state, reporter, Action::Take, reporter, 0);
    }
    let utilization = apply(&mut state, 0, Action::Peek, 0, 0).unwrap();
    assert_eq!(utilization.reporters, UtilizationReports::MAX_REPORTERS as u32);
    assert!(
        apply(&mut state, 3, Action::Take, 0, 0)
            .is_some_and(|utilization| utilization.reporters == UtilizationReports::MAX_REPORTERS as u32)
    );
    let years_before = UtilizationReports::valid_reports(&state, Micros::new(START / 2)).count();
    assert_eq!(years_before, 0);
}

#[test]
fn reporters_are_distinguished_by_48_bits() {
    let mut state = State::default();
    let report = |reporter| apply(&mut state, reporter, Action::Take, 100, 0).unwrap().reporters;
    assert_eq!([1, 1 + (1 << 14), 1 + (1 << 47), u64::MAX, u64::MAX].map(report), [1, 2, 3, 4, 4]);
}

#[test]
fn reports_are_stored_until_the_last_one_expires() {
    let reports = UtilizationReports::new(Micros::from_secs(10));
    let mut state = State::default();
    let at = |second| Micros::new(START) + Micros::from_secs(second);
    let operation = Operation { action: Action::Take, cost: 5_000, now: at(0) };
    let allowed = reports.step(&mut state, operation);
    let decision = reports.explain(&state, operation, allowed);
    assert_eq!((decision.allowed, decision.reset), (true, Micros::from_secs(10)));
    let later = reports.explain(&state, Operation { action: Action::Peek, now: at(4), ..operation }, true);
    assert_eq!(later.reset, Micros::from_secs(6));
    assert_eq!(reports.expires(&state, at(4)), at(10));
    assert_eq!(reports.expires(&State::default(), at(4)), at(4));
}
