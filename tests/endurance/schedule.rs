//! [`Schedule`]: the faults of a run, drawn by its seed.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng, seq::SliceRandom};

/// A kind of fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    InstanceKilled,
    InstanceFrozen,
    RedisKilled,
    RedisFrozen,
    RedisRestartsEmpty,
    RedisBusy,
    ScriptsFlushed,
    RedisUnreachable,
    RedisAnswersLost,
    PeersApart,
    PeersApartInOneDirection,
    DiskFull,
    NoDescriptors,
    ClockStep,
    CertificatesBroken,
    RulesBroken,
    ControlPlaneGone,
}

/// All kinds, with their names in the report.
pub(crate) const KINDS: [(Kind, &str); 17] = [
    (Kind::InstanceKilled, "instance killed and restarted"),
    (Kind::RedisRestartsEmpty, "Redis master restarts empty"),
    (Kind::RulesBroken, "rule file half written"),
    (Kind::InstanceFrozen, "instance frozen"),
    (Kind::RedisKilled, "Redis master killed"),
    (Kind::RedisFrozen, "Redis master frozen"),
    (Kind::RedisBusy, "Redis runs another script"),
    (Kind::ScriptsFlushed, "scripts flushed"),
    (Kind::RedisUnreachable, "requests to Redis lost"),
    (Kind::RedisAnswersLost, "answers of Redis lost"),
    (Kind::PeersApart, "peers partitioned"),
    (Kind::PeersApartInOneDirection, "peers partitioned in one direction"),
    (Kind::DiskFull, "disk full"),
    (Kind::NoDescriptors, "no file descriptors"),
    (Kind::ClockStep, "clock steps"),
    (Kind::CertificatesBroken, "certificates broken"),
    (Kind::ControlPlaneGone, "control plane gone"),
];

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        KINDS.iter().find(|(kind, _)| *kind == self).unwrap().1
    }
}

/// A fault with its duration and the pause after it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    /// Selects the affected process.
    pub(crate) choice: usize,
    pub(crate) lasts: Duration,
    pub(crate) pause: Duration,
}

/// An endless sequence of faults. Every kind occurs once before any of them is repeated.
pub(crate) struct Schedule {
    random: StdRng,
    next: Vec<Kind>,
}

impl Schedule {
    pub(crate) fn new(seed: u64) -> Self {
        Self { random: StdRng::seed_from_u64(seed), next: Vec::new() }
    }
}

impl Iterator for Schedule {
    type Item = Fault;

    fn next(&mut self) -> Option<Fault> {
        if self.next.is_empty() {
            self.next = KINDS.map(|(kind, _)| kind).to_vec();
            self.next.shuffle(&mut self.random);
        }
        let random = &mut self.random;
        let seconds =
            |range: std::ops::Range<f64>, random: &mut StdRng| Duration::from_secs_f64(random.random_range(range));
        let kind = self.next.pop()?;
        let lasts = seconds(5.0..10.0, random);
        let pause = seconds(15.0..25.0, random);
        Some(Fault { kind, choice: random.random_range(0..1_000), lasts, pause })
    }
}

/// Returns the faults of the run within `cargo test`. Redis loses counters last, so that at least one whole window before
/// has the exact bound.
pub(crate) fn short() -> impl Iterator<Item = Fault> {
    let kinds = [Kind::InstanceKilled, Kind::RulesBroken, Kind::RedisRestartsEmpty];
    kinds.into_iter().map(|kind| Fault {
        kind,
        choice: 0,
        lasts: Duration::from_secs(2),
        pause: Duration::from_secs(6),
    })
}
