//! What reports promise.

use super::*;

const START: u64 = 1_763_672_400_000_000;

fn ask(state: &mut State, reporter: u64, action: Action, cost: u64, second: u64) -> Option<Utilization> {
    let rule = UtilizationReports::new(Micros::from_secs(10))
        .with_context(RequestContext { holder: reporter, ..RequestContext::default() });
    let ask = Operation { action, cost, now: Micros::new(START) + Micros::from_secs(second) };
    let allowed = rule.step(state, ask);
    UtilizationReports::read(&rule.explain(state, ask, allowed))
}

#[test]
fn the_worst_report_that_still_holds_counts() {
    let mut state = State::default();
    assert_eq!(ask(&mut state, 0, Action::Peek, 0, 0), None);
    let said = |worst, mean, reporters| Some(Utilization { worst, mean, reporters });
    assert_eq!(ask(&mut state, 1, Action::Take, 5_000, 0), said(0.5, 0.5, 1));
    assert_eq!(ask(&mut state, 2, Action::Take, 9_000, 4), said(0.9, 0.7, 2));
    assert_eq!(ask(&mut state, 2, Action::Take, 1_000, 5), said(0.5, 0.3, 2), "a later one replaces it");
    assert_eq!(ask(&mut state, 0, Action::Peek, 0, 10), said(0.1, 0.1, 1), "the first's has ended");
    assert_eq!(ask(&mut state, 3, Action::Take, 20_000, 11), said(1.0, 0.55, 2));
    assert_eq!(ask(&mut state, 3, Action::Refund, 0, 12), said(0.1, 0.1, 1));
    assert_eq!(ask(&mut state, 0, Action::Peek, 0, 15), None);
}

#[test]
fn reporters_are_bounded_and_a_wrong_clock_is_not_believed() {
    let mut state = State::default();
    for reporter in 0..=UtilizationReports::MAX_REPORTERS as u64 + 5 {
        ask(&mut state, reporter, Action::Take, reporter, 0);
    }
    let most = ask(&mut state, 0, Action::Peek, 0, 0).unwrap();
    assert_eq!(most.reporters, UtilizationReports::MAX_REPORTERS as u32);
    assert!(
        ask(&mut state, 3, Action::Take, 0, 0)
            .is_some_and(|it| it.reporters == UtilizationReports::MAX_REPORTERS as u32)
    );
    let years_before = UtilizationReports::held(&state, Micros::new(START / 2)).count();
    assert_eq!(years_before, 0);
}
