//! The exchange of counted hits between peers, in virtual time. The simulation runs the service's own code: several
//! [`Memory`] stores and their [`Peers`]. Messages are late, lost, duplicated and reordered, members crash, restart, join,
//! leave and stall, links are cut in one or both directions, clocks differ and jump, and one member lies. A seed replays a
//! scenario.
//!
//! The checks compare each decision with two models of the hits that were delivered to its member. In the *lower* model
//! each hit counts from the time at which it was admitted, in the *upper* model from the time at which it was applied
//! at the member. Both are computed from the definition of the algorithm. The state is always between them:
//!
//! - **Not too much**: a hit is allowed only if the lower model has room for it.
//! - **Not too little**: a hit is denied only if the upper model has no room for it.
//! - **Staleness**: without failures, a hit is known everywhere after one interval of publishing, one of pulling, and
//!   the latency of the messages. All members together admit at most the limit and the hits of this time.
//! - **Exactly once**: no hit is applied twice, unless it was admitted while its counter was copied.
//! - **Convergence**: when all links work again, each member knows the hits of all others.
//!
//! Planted faults show that the checks work: each of them must be found.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used, reason = "a test that cannot go on has failed")]

mod peers {
    pub(crate) mod knowledge;
    pub(crate) mod limit;
    pub(crate) mod world;
}

use std::sync::{
    Mutex,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use peers::world::{Fault, Totals, replay};

const SCENARIOS: u64 = 5_000;

#[test]
fn every_decision_agrees_with_the_hits_that_were_delivered() {
    // The environment variable SEED selects one scenario, which is printed. FIRST_SEED and SCENARIOS select others.
    if let Some(seed) = number_of("SEED") {
        let totals = replay(seed, Fault::None, true).unwrap_or_else(|broken| panic!("seed {seed}: {broken}"));
        println!("{totals:?}");
        return;
    }
    let first = number_of("FIRST_SEED").unwrap_or_default();
    let end = first + number_of("SCENARIOS").unwrap_or(SCENARIOS);
    let (seeds, sums) = (AtomicU64::new(first), Mutex::new((Totals::default(), Vec::new())));
    let replay_some = || {
        while let seed = seeds.fetch_add(1, Relaxed)
            && seed < end
        {
            let ended = replay(seed, Fault::None, false);
            let (totals, broken) = &mut *sums.lock().expect("no scenario has panicked");
            match ended {
                Ok(ended) => totals.add(&ended),
                Err(law) => broken.push(format!("seed {seed}: {law}")),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(2, usize::from);
        (0..threads).for_each(|_| drop(scope.spawn(replay_some)));
    });
    let (totals, broken) = sums.into_inner().expect("no scenario has panicked");
    println!("{totals:?}");
    assert!(broken.is_empty(), "{} scenarios: {:#?}", broken.len(), &broken[..broken.len().min(20)]);
    let Totals { allowed, denied, unknown, exact, compared, copies, merged, lies } = totals;
    assert!(allowed > 100_000 && denied > 100_000, "{allowed} allowed and {denied} denied");
    assert!(unknown > 1_000, "only {unknown} decisions lacked hits of other members");
    assert!(2 * exact > compared, "only {exact} of {compared} counters have one possible value in the end");
    assert!(copies > 100 && merged > 100, "{copies} copies and {merged} merged increments");
    assert!(lies > 10_000, "{lies} lies");
}

/// Returns the number in an environment variable.
fn number_of(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().expect("the variable is a number"))
}

/// Each planted fault breaks a law in some scenario, which proves that the checks work.
#[test]
fn planted_faults_are_found() {
    for fault in [
        Fault::AppliedTwice,
        Fault::EpochIgnored,
        Fault::ClockIgnored,
        Fault::BatchSkipped,
        Fault::RefundsSkipped,
        Fault::LieBelieved,
    ] {
        let found = (0..500).find_map(|seed| Some((seed, replay(seed, fault, false).err()?)));
        let (seed, broken) = found.unwrap_or_else(|| panic!("{fault:?} was not found"));
        println!("{fault:?}: seed {seed}: {broken}");
    }
}
