//! The protocols that are searched, and the faults that are planted in them.

use sluicegate_algorithm::{
    Algorithm, MaxHits, Micros,
    first_request::FirstRequestWindow,
    fixed_window::FixedWindow,
    scheduled_window::{Schedule, ScheduledWindow},
    sliding_log::SlidingLog,
    sliding_window::{SlidingWindow, WindowEdge},
    token_bucket::TokenBucket,
};

use super::guarantee::{BEGIN, Guarantee, PHASE, WINDOW};

/// The usual limit.
pub(super) const LIMIT: u64 = 400;

/// The contents of a search.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) name: &'static str,
    pub(super) algorithm: fn(u64) -> Algorithm,
    /// The limits of one or two counters. Requests with two counters are charged for all or none.
    pub(super) limits: &'static [u64],
    pub(super) guarantee: Guarantee,
    /// Number of clients. Each calls the instance of the same number.
    pub(super) clients: usize,
    pub(super) start: Micros,
    /// The times by which the clock advances, one after the other, in milliseconds.
    pub(super) ticks: &'static [u64],
    /// Maximum number of messages that are dropped or duplicated.
    pub(super) failures: u32,
    /// Maximum number of instances and clients that crash.
    pub(super) crashes: u32,
    pub(super) fault: Fault,
    /// Whether a counter must contain all allowed hits in the end.
    pub(super) hits_must_remain: bool,
}

/// A fault that is planted in a model. Each must be found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    None,
    /// Hits taken for a lease drain as if they were used immediately.
    NoEscrow,
    /// The end of a lease is determined by a clock that stands still.
    WallClock,
    /// A lease contains twice the hits that were counted.
    DoubleGrant,
    /// Clients use grants even after these have ended.
    EndlessGrant,
    /// The store subtracts the hits that a lease returns twice.
    DoubleReturn,
    /// The store takes the hits of a request although one of its limits denies it.
    ChargedSeparately,
}

pub(super) const FIXED_WINDOW: Setup = Setup {
    name: "leases, fixed window",
    algorithm: fixed_window,
    limits: &[LIMIT],
    guarantee: Guarantee::Windows,
    clients: 0,
    start: Micros::new(BEGIN.get() + 750_000),
    // The first tick ends the window.
    ticks: &[250, 250],
    failures: 1,
    crashes: 1,
    fault: Fault::None,
    hits_must_remain: true,
};
pub(super) const PHASE_WINDOW: Setup = Setup {
    name: "leases, fixed window with a phase",
    algorithm: phase_window,
    guarantee: Guarantee::WindowsWithPhase,
    start: Micros::new(BEGIN.get() + 250_000),
    ..FIXED_WINDOW
};
pub(super) const FIRST_REQUEST: Setup = Setup {
    name: "leases, fixed window from the first request",
    algorithm: first_request,
    guarantee: Guarantee::TwiceInAnyWindow,
    // The window begins with the model, and ends with the second tick.
    ticks: &[750, 250, 250],
    ..FIXED_WINDOW
};
pub(super) const SLIDING_WINDOW: Setup = Setup {
    name: "leases, sliding window",
    algorithm: sliding_window,
    guarantee: Guarantee::AnyWindow,
    // The end of a part of the window, and the time at which hits of the beginning no longer count.
    ticks: &[250, 740, 260],
    ..FIXED_WINDOW
};
pub(super) const SLIDING_LOG: Setup =
    Setup { name: "leases, sliding log", algorithm: sliding_log, ticks: &[50, 950, 100], ..SLIDING_WINDOW };
pub(super) const TOKEN_BUCKET: Setup = Setup {
    name: "leases, token bucket",
    algorithm: token_bucket,
    guarantee: Guarantee::Envelope,
    // A lease ends after an eighth to a quarter of the window.
    ticks: &[120, 120, 260],
    ..SLIDING_WINDOW
};
pub(super) const GRANTS: Setup = Setup { name: "grants of one client", clients: 1, ..FIXED_WINDOW };
pub(super) const GRANTS_OF_TWO: Setup = Setup { name: "grants of two clients", clients: 2, ..FIXED_WINDOW };
pub(super) const CHARGE_ALL: Setup = Setup { name: "leases, charge: all", limits: &[LIMIT, LIMIT], ..FIXED_WINDOW };
pub(super) const TWO_LIMITS: Setup = Setup { name: "leases, two limits", limits: &[LIMIT, 250], ..FIXED_WINDOW };
pub(super) const GRANTS_OF_TWO_LIMITS: Setup = Setup { name: "grants, two limits", clients: 1, ..TWO_LIMITS };
pub(super) const ALL: [Setup; 11] = [
    FIXED_WINDOW,
    PHASE_WINDOW,
    FIRST_REQUEST,
    SLIDING_WINDOW,
    SLIDING_LOG,
    TOKEN_BUCKET,
    GRANTS,
    GRANTS_OF_TWO,
    CHARGE_ALL,
    TWO_LIMITS,
    GRANTS_OF_TWO_LIMITS,
];

pub(super) const FAULTS: [Setup; 8] = [
    Setup { fault: Fault::DoubleGrant, hits_must_remain: false, ..FIXED_WINDOW },
    Setup { fault: Fault::WallClock, hits_must_remain: false, ..FIXED_WINDOW },
    Setup { fault: Fault::DoubleReturn, ..FIXED_WINDOW },
    Setup { fault: Fault::NoEscrow, ..TOKEN_BUCKET },
    Setup { fault: Fault::ChargedSeparately, ..CHARGE_ALL },
    Setup { fault: Fault::EndlessGrant, ..GRANTS },
    Setup { fault: Fault::ChargedSeparately, ..TWO_LIMITS },
    Setup { fault: Fault::DoubleReturn, ..GRANTS_OF_TWO_LIMITS },
];

fn fixed_window(limit: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), WINDOW, false).unwrap().into()
}

fn phase_window(limit: u64) -> Algorithm {
    let schedule = Schedule::Phase { window: WINDOW, phase: PHASE };
    ScheduledWindow::new(MaxHits::hard(limit), schedule, false).into()
}

fn first_request(limit: u64) -> Algorithm {
    FirstRequestWindow::new(MaxHits::hard(limit), WINDOW, false).unwrap().into()
}

fn sliding_window(limit: u64) -> Algorithm {
    SlidingWindow::new(MaxHits::hard(limit), WINDOW, 4, WindowEdge::Strict, false).unwrap().into()
}

fn sliding_log(limit: u64) -> Algorithm {
    SlidingLog::new(MaxHits::hard(limit), WINDOW, Micros::ZERO, false).unwrap().into()
}

pub(super) fn token_bucket(limit: u64) -> Algorithm {
    TokenBucket::new(limit as u32, WINDOW, MaxHits::hard(limit), false).unwrap().into()
}
