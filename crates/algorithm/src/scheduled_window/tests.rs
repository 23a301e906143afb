//! Decisions of windows with a schedule, and their promises beyond the laws.

use proptest::prelude::*;
use sluicegate_calendar::{Anchor, Zone};

use super::*;

/// 2026-11-27T00:00:00Z.
const START: u64 = 1_795_737_600;
const DAY: u64 = 86_400;

fn monthly(limit: u64, day: u8, count_denied: bool) -> ScheduledWindow {
    let anchor = Anchor { day: Some(day), ..Anchor::default() };
    let calendar = Calendar::new(Period::Months(1), anchor).unwrap();
    ScheduledWindow::new(MaxHits::hard(limit), Schedule::Calendar(calendar), count_denied)
}

fn phased(limit: u64, phase: u64) -> ScheduledWindow {
    let schedule = Schedule::Phase { window: Micros::from_secs(60), phase: Micros::from_secs(phase) };
    ScheduledWindow::new(MaxHits::hard(limit), schedule, false)
}

fn operation(action: Action, cost: u64, second: u64) -> Operation {
    Operation { action, cost, now: Micros::from_secs(second) }
}

fn apply(limiter: ScheduledWindow, state: &mut State, operation: Operation) -> Decision {
    let allowed = limiter.step(state, operation);
    limiter.explain(state, operation, allowed)
}

#[test]
fn a_month_ends_with_the_month() {
    use Action::{Peek, Refund, Take};
    let limiter = monthly(10, 1, true);
    let mut state = State::default();
    // (action, cost, second) → (allowed, remaining, used, reset in seconds)
    for (action, cost, second, expected) in [
        (Peek, 1, 0, (true, 10, 0, 4 * DAY)), // the window exists without a hit
        (Take, 8, 17, (true, 2, 8, 4 * DAY - 17)),
        (Take, 5, 27, (false, 0, 13, 4 * DAY - 27)), // a denied cost stays counted
        (Refund, 4, 30, (true, 1, 9, 4 * DAY - 30)),
        (Take, 1, 4 * DAY - 1, (true, 0, 10, 1)), // the last second of November
        (Take, 1, 4 * DAY, (true, 9, 1, 31 * DAY)), // December
        (Take, u64::MAX, 4 * DAY + 1, (false, 0, MAX_NUMBER, 31 * DAY - 1)),
        (Take, 1, 35 * DAY, (true, 9, 1, 31 * DAY)),
        (Refund, 1, 35 * DAY, (true, 10, 0, 31 * DAY)),
    ] {
        let got = apply(limiter, &mut state, operation(action, cost, START + second));
        let got = (got.allowed, got.remaining, got.used, got.reset.floor_secs());
        assert_eq!(got, expected, "{action:?} {cost} at {second}");
    }
    assert!(state.is_empty(), "a counter without hits has no state");
}

#[test]
fn a_count_lasts_until_the_next_boundary_of_a_changed_calendar() {
    let mut state = State::default();
    apply(monthly(10, 1, false), &mut state, operation(Action::Take, 10, START));
    // The anchor moves from the first of December to its fifteenth.
    let moved = monthly(10, 15, false);
    let denied = apply(moved, &mut state, operation(Action::Take, 1, START + 1));
    assert_eq!((denied.used, denied.retry_after), (10, Some(Micros::from_secs(18 * DAY - 1))));
    assert!(!apply(moved, &mut state, operation(Action::Take, 1, START + 18 * DAY - 1)).allowed);
    assert!(apply(moved, &mut state, operation(Action::Take, 1, START + 18 * DAY)).allowed);
    // The zone moves: local midnight is earlier than before.
    let daily = |zone| {
        let anchor = Anchor { zone: Zone::find(zone).ok(), ..Anchor::default() };
        let calendar = Calendar::new(Period::Day, anchor).unwrap();
        ScheduledWindow::new(MaxHits::hard(1), Schedule::Calendar(calendar), false)
    };
    let mut state = State::default();
    apply(daily("UTC"), &mut state, operation(Action::Take, 1, START + 3_600));
    let tokyo = daily("Asia/Tokyo");
    let denied = apply(tokyo, &mut state, operation(Action::Take, 1, START + 3_601));
    assert_eq!(denied.retry_after, Some(Micros::from_secs(14 * 3_600 - 1)));
}

#[test]
fn windows_of_entities_begin_at_their_phases() {
    let (early, late) = (phased(2, 0), phased(2, 45));
    let minute = START;
    let resets = [early, late].map(|limiter| {
        let mut state = State::default();
        apply(limiter, &mut state, operation(Action::Take, 1, minute + 1)).reset
    });
    assert_eq!(resets, [Micros::from_secs(59), Micros::from_secs(14)]);
    let context = |entity| RequestContext { entity, ..RequestContext::default() };
    assert_eq!(early.with_context(context(45_000_000)), late);
    assert_eq!(early.with_context(context(60_000_000 * 7 + 45_000_000)), late);
}

#[test]
fn a_take_is_rolled_back_only_in_its_window() {
    let limiter = phased(9, 0);
    let mut state = State::default();
    apply(limiter, &mut state, operation(Action::Take, 4, START));
    let roll_back = |taken, second| operation(Action::RollBack(Micros::from_secs(START + taken)), 4, START + second);
    apply(limiter, &mut state, operation(Action::Take, 4, START + 61));
    assert_eq!(apply(limiter, &mut state, roll_back(0, 62)).used, 4, "the window of the take is over");
    assert_eq!(apply(limiter, &mut state, roll_back(61, 62)).used, 0);
    assert!(state.is_empty());
}

#[test]
fn clocks_that_are_wrong_give_no_hits_and_block_nobody() {
    let limiter = phased(3, 0);
    let mut state = State::default();
    apply(limiter, &mut state, operation(Action::Take, 3, START + 90));
    let denied = apply(limiter, &mut state, operation(Action::Take, 1, START + 31));
    assert!(!denied.allowed, "the clock steps back by a minute into an earlier window");
    assert_eq!(denied.reset, Micros::from_secs(89), "the count is that of the later window");
    assert!(limiter.is_ahead(&state, Micros::from_secs(START + 31)));
    assert!(!limiter.is_ahead(&state, Micros::from_secs(START + 60)));
    assert!(apply(limiter, &mut state, operation(Action::Take, 1, START + 29)).allowed, "a later window is ignored");
}

#[test]
fn a_schedule_is_a_calendar_or_a_phase() {
    let spec = LimitSpec { requests: 1, window: Micros::from_secs(60), ..LimitSpec::default() };
    let keyword = |spec: LimitSpec| ScheduledWindow::build(&spec).err().map(|error| error.keyword);
    let phase = Some(Micros::ZERO);
    let day = Anchor { day: Some(3), ..Anchor::default() };
    assert_eq!(keyword(spec), Some("window"));
    assert_eq!(keyword(LimitSpec { phase, ..spec }), None);
    assert_eq!(keyword(LimitSpec { period: Some(Period::Day), ..spec }), None);
    assert_eq!(keyword(LimitSpec { period: Some(Period::Day), phase, ..spec }), Some("phase"));
    assert_eq!(keyword(LimitSpec { period: Some(Period::Day), anchor: day, ..spec }), Some("day"));
    assert_eq!(keyword(LimitSpec { window: Micros::ZERO, phase, ..spec }), Some("unit_multiplier"));
}

#[test]
fn lengths_are_nominal() {
    for (period, expected) in [
        (Period::Hour, 3_600),
        (Period::Day, DAY),
        (Period::Week, 7 * DAY),
        (Period::Months(1), 30 * DAY),
        (Period::Months(3), 90 * DAY),
        (Period::Months(12), 365 * DAY),
    ] {
        let calendar = Calendar::new(period, Anchor::default()).unwrap();
        assert_eq!(Schedule::Calendar(calendar).length(), Micros::from_secs(expected));
    }
}

proptest! {
    /// No window of an entity has more allowed hits than the limit.
    #[test]
    fn each_window_allows_the_limit(
        limit in 1_u64..20, phase in 0_u64..60, hits in prop::collection::vec((0_u64..40, 1_u64..6), 1..60),
    ) {
        let limiter = phased(limit, phase);
        let mut state = State::default();
        let mut second = START;
        let mut window = 0;
        let mut allowed = 0;
        for (pause, cost) in hits {
            second += pause;
            let number = (second + phase) / 60;
            if number != window {
                (window, allowed) = (number, 0);
            }
            let decision = apply(limiter, &mut state, operation(Action::Take, cost, second));
            prop_assert_eq!(decision.allowed, allowed + cost <= limit);
            allowed += if decision.allowed { cost } else { 0 };
            prop_assert_eq!(decision.reset.floor_secs(), (number + 1) * 60 - phase - second);
        }
    }
}
