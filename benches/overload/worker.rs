//! One box that is asked for more than it can do, and its shedder: by the second, in virtual time, with noise.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate_common::shedder::{Settings, Shedder};

/// The classes, and their parts of all that is asked.
pub(crate) const CLASSES: [(&str, f64); 4] = [("critical", 0.15), ("POST", 0.2), ("GET", 0.5), ("test", 0.15)];

/// What the box was asked, and what it did, in one second.
#[derive(Clone, Copy)]
pub(crate) struct Second {
    /// As a part of what it can do.
    pub(crate) asked: f64,
    pub(crate) served: f64,
    pub(crate) level: f64,
    /// Of each class.
    pub(crate) shed: [f64; 4],
}

/// How much is asked at a second, as a part of what the box can do; and how far what it sees is from that.
pub(crate) struct Load {
    pub(crate) name: &'static str,
    pub(crate) seconds: u64,
    pub(crate) asked: fn(u64) -> f64,
    pub(crate) noise: f64,
}

/// It comes within a second, stays for twenty minutes, and goes.
pub(crate) const COMES_AND_GOES: Load = Load {
    name: "an overload that comes, stays and goes",
    seconds: 3_600,
    asked: |second| if (300..1_500).contains(&second) { 1.6 } else { 0.55 },
    noise: 0.06,
};

/// About what the box can do, with a minute's swing, for two hours.
pub(crate) const AT_THE_EDGE: Load = Load {
    name: "an hour at the edge",
    seconds: 7_200,
    asked: |second| 0.8 + 0.15 * (second as f64 / 60.0 * std::f64::consts::TAU / 2.0).sin(),
    noise: 0.12,
};

pub(crate) fn run(load: &Load, seed: u64) -> Vec<Second> {
    let mut dice = StdRng::seed_from_u64(seed);
    let mut shedder = Shedder::new(CLASSES.len(), Settings::default());
    let mut seconds = Vec::new();
    for second in 0..load.seconds {
        let asked = (load.asked)(second);
        let shed = [0, 1, 2, 3].map(|class| shedder.share(class));
        let passed = CLASSES.iter().zip(shed).map(|((_, part), shed)| part * (1.0 - shed)).sum::<f64>() * asked;
        // The sum of a few is near enough to a bell.
        let noise = (0..6).map(|_| dice.random::<f64>() - 0.5).sum::<f64>() * load.noise * 2_f64.sqrt();
        shedder.tick(Duration::from_secs(second), (passed + noise).clamp(0.0, 1.0));
        seconds.push(Second { asked, served: passed.min(1.0), level: shedder.level(), shed });
    }
    seconds
}

/// How often the level turned round.
pub(crate) fn reversals(run: &[Second]) -> usize {
    let moves = run.windows(2).map(|pair| pair[1].level - pair[0].level).filter(|step| *step != 0.0);
    let ways: Vec<_> = moves.map(|step| step > 0.0).collect();
    ways.windows(2).filter(|pair| pair[0] != pair[1]).count()
}
