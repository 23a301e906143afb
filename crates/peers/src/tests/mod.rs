//! Tests of the exchange. `tests/virtual_time/peers.rs` tests it with failures of the network and of instances.

mod backlog;
mod batch;
mod copy;
mod hits;
mod model;
mod properties;

use sluicegate_algorithm::{
    Action, Algorithm, CLOCK_SLACK, MaxHits, State, concurrency::Concurrency, fixed_window::FixedWindow, gcra::Gcra,
    leaky_bucket::LeakyBucket, sliding_log::SlidingLog, sliding_window::SlidingWindow, sliding_window::WindowEdge,
    token_bucket::TokenBucket,
};
use sluicegate_store::{Counter, Hit, identity::Digests, memory::Settings};

use super::*;

/// The beginning of a minute.
const START: u64 = 1_763_672_400;
const KEY: &str = "{d|k=v}";

fn at(millis: u64) -> Micros {
    Micros::new(START * 1_000_000 + millis * 1_000)
}

fn fixed_window(limit: u64, seconds: u64) -> Algorithm {
    FixedWindow::new(MaxHits::hard(limit), Micros::from_secs(seconds), false).unwrap().into()
}

fn sliding_window(limit: u64, seconds: u64, buckets: u32) -> Algorithm {
    let window = Micros::from_secs(seconds);
    SlidingWindow::new(MaxHits::hard(limit), window, buckets, WindowEdge::Strict, false).unwrap().into()
}

fn sliding_log(limit: u64, seconds: u64) -> Algorithm {
    SlidingLog::new(MaxHits::hard(limit), Micros::from_secs(seconds), Micros::ZERO, false).unwrap().into()
}

fn token_bucket(requests: u32, seconds: u64, burst: u64) -> Algorithm {
    TokenBucket::new(requests, Micros::from_secs(seconds), MaxHits::hard(burst), false).unwrap().into()
}

/// Returns a limit of `limit` hits a second of each rate algorithm.
fn all_algorithms(limit: u32) -> Vec<Algorithm> {
    let (hits, second) = (MaxHits::hard(limit.into()), Micros::from_secs(1));
    vec![
        fixed_window(limit.into(), 1),
        sliding_window(limit.into(), 1, 1),
        sliding_window(limit.into(), 1, 6),
        sliding_log(limit.into(), 1),
        token_bucket(limit, 1, limit.into()),
        Gcra::new(limit, second, hits, false).unwrap().into(),
        LeakyBucket::new(limit, second, hits, limit.into(), false).unwrap().into(),
    ]
}

/// An instance with its store.
struct Instance {
    memory: Arc<Memory>,
    peers: Arc<Peers>,
}

impl Instance {
    fn new(epoch: u64) -> Self {
        Self::with_max_counters(epoch, 1_000_000)
    }

    fn with_max_counters(epoch: u64, max_counters: usize) -> Self {
        let memory = Arc::new(Memory::exchanged(&Settings { max_counters }));
        Self { peers: Peers::with_epoch(Arc::clone(&memory), Metrics::new(), epoch), memory }
    }

    fn decide(&self, key: &str, limit: &Algorithm, (action, cost): (Action, u64), now: Micros) -> bool {
        let counter = Counter::new(key, *limit);
        let hit = Hit { action, ..counter.take(cost) };
        self.memory.decide(&hit, now).decision.allowed
    }

    fn take(&self, limit: &Algorithm, cost: u64, now: Micros) -> bool {
        self.decide(KEY, limit, (Action::Take, cost), now)
    }

    fn refund(&self, limit: &Algorithm, cost: u64, now: Micros) {
        self.decide(KEY, limit, (Action::Refund, cost), now);
    }

    fn used_by(&self, key: &str, limit: &Algorithm, now: Micros) -> u64 {
        let counter = Counter::new(key, *limit);
        let hit = counter.take(0).peek();
        self.memory.decide(&hit, now).decision.used
    }

    fn used(&self, limit: &Algorithm, now: Micros) -> u64 {
        self.used_by(KEY, limit, now)
    }

    /// Pulls once.
    fn pull(&self, origin: &Self, now: Micros) -> Pull {
        origin.peers.pull(self.peers.epoch(), self.peers.position(origin.peers.epoch()), now)
    }

    /// Pulls a batch that must exist.
    fn batch(&self, origin: &Self, now: Micros) -> Batch {
        match self.pull(origin, now) {
            Pull::Batch(batch) => batch,
            other => panic!("{other:?} instead of a batch"),
        }
    }

    /// Pulls and applies everything, and returns the number of batches.
    fn follow(&self, origin: &Self, now: Micros) -> usize {
        let mut batches = 0;
        while let Pull::Batch(batch) = self.pull(origin, now) {
            assert!(self.peers.apply(&batch, now));
            batches += 1;
        }
        assert!(matches!(self.pull(origin, now), Pull::Nothing));
        batches
    }

    /// Joins by a copy of another instance.
    fn copy(&self, source: &Self, now: Micros) {
        let positions = source.peers.copy_positions(now);
        (0..).map_while(|part| source.peers.copy_part(part)).for_each(|copies| self.peers.insert_copies(copies, now));
        self.peers.continue_from(source.peers.epoch(), &positions, now);
    }
}

fn description(pull: &Pull) -> String {
    match pull {
        Pull::Batch(Batch { after, until, .. }) => format!("{after} to {until}"),
        Pull::Nothing => "nothing".to_owned(),
        Pull::Copy => "copy".to_owned(),
    }
}

fn increment(limits: Vec<Algorithm>, changes: Vec<Change>) -> Batch {
    let increments = vec![Arc::new(Increment::new(1, at(0), limits, changes))];
    Batch { origin: 9, after: 0, until: 1, now: at(0), increments }
}
