//! The protocols that are searched, and the faults that are planted in them.

use super::guarantee::Guarantee;
use crate::algorithm::{
    Algorithm, MaxHits, Micros,
    fixed_window::FixedWindow,
    sliding_log::SlidingLog,
    sliding_window::{SlidingWindow, WindowEdge},
    token_bucket::TokenBucket,
};

pub(super) const LIMIT: u64 = 400;
pub(super) const WINDOW: Micros = Micros::from_secs(1);
/// The beginning of a window.
pub(super) const BEGIN: Micros = Micros::from_secs(1_763_672_400);

/// The contents of a search.
#[derive(Clone, Copy)]
pub(super) struct Setup {
    pub(super) name: &'static str,
    /// One or two counters. Requests with two counters are charged for all or none.
    pub(super) algorithms: &'static [fn() -> Algorithm],
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
    algorithms: &[fixed_window],
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
pub(super) const SLIDING_WINDOW: Setup = Setup {
    name: "leases, sliding window",
    algorithms: &[sliding_window],
    guarantee: Guarantee::AnyWindow,
    // The end of a part of the window, and the time at which hits of the beginning no longer count.
    ticks: &[250, 740, 260],
    ..FIXED_WINDOW
};
pub(super) const SLIDING_LOG: Setup =
    Setup { name: "leases, sliding log", algorithms: &[sliding_log], ticks: &[50, 950, 100], ..SLIDING_WINDOW };
pub(super) const TOKEN_BUCKET: Setup = Setup {
    name: "leases, token bucket",
    algorithms: &[token_bucket],
    guarantee: Guarantee::Envelope,
    // A lease ends after an eighth to a quarter of the window.
    ticks: &[120, 120, 260],
    ..SLIDING_WINDOW
};
pub(super) const GRANTS: Setup = Setup { name: "grants of one client", clients: 1, ..FIXED_WINDOW };
pub(super) const GRANTS_OF_TWO: Setup = Setup { name: "grants of two clients", clients: 2, ..FIXED_WINDOW };
pub(super) const CHARGE_ALL: Setup =
    Setup { name: "leases, charge: all", algorithms: &[fixed_window, fixed_window], ..FIXED_WINDOW };
pub(super) const ALL: [Setup; 7] =
    [FIXED_WINDOW, SLIDING_WINDOW, SLIDING_LOG, TOKEN_BUCKET, GRANTS, GRANTS_OF_TWO, CHARGE_ALL];

pub(super) const FAULTS: [Setup; 6] = [
    Setup { fault: Fault::DoubleGrant, hits_must_remain: false, ..FIXED_WINDOW },
    Setup { fault: Fault::WallClock, hits_must_remain: false, ..FIXED_WINDOW },
    Setup { fault: Fault::DoubleReturn, ..FIXED_WINDOW },
    Setup { fault: Fault::NoEscrow, ..TOKEN_BUCKET },
    Setup { fault: Fault::ChargedSeparately, ..CHARGE_ALL },
    Setup { fault: Fault::EndlessGrant, ..GRANTS },
];

fn fixed_window() -> Algorithm {
    FixedWindow::new(MaxHits::hard(LIMIT), WINDOW, false).unwrap().into()
}

fn sliding_window() -> Algorithm {
    SlidingWindow::new(MaxHits::hard(LIMIT), WINDOW, 4, WindowEdge::Strict, false).unwrap().into()
}

fn sliding_log() -> Algorithm {
    SlidingLog::new(MaxHits::hard(LIMIT), WINDOW, Micros::ZERO, false).unwrap().into()
}

pub(super) fn token_bucket() -> Algorithm {
    TokenBucket::new(LIMIT as u32, WINDOW, MaxHits::hard(LIMIT), false).unwrap().into()
}
