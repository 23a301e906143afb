//! Simulation of an overloaded host with a load shedder, in virtual time with steps of one second, and with noise.

use std::time::Duration;

use rand::{RngExt, SeedableRng, rngs::StdRng};
use sluicegate_overload::shedder::{Settings, Shedder};

/// Classes and their shares of the requests.
pub(crate) const CLASS_SHARES: [(&str, f64); 4] = [("critical", 0.15), ("POST", 0.2), ("GET", 0.5), ("test", 0.15)];

/// Load and state of the host in one second.
#[derive(Clone, Copy)]
pub(crate) struct Second {
    /// Offered load, relative to the capacity.
    pub(crate) offered: f64,
    /// Served load, relative to the capacity.
    pub(crate) served: f64,
    pub(crate) level: f64,
    /// Shed share of each class.
    pub(crate) shed: [f64; 4],
}

/// Load over time.
pub(crate) struct Load {
    pub(crate) name: &'static str,
    pub(crate) seconds: u64,
    /// Offered load at a second, relative to the capacity.
    pub(crate) offered: fn(u64) -> f64,
    /// Standard deviation of the measured utilization.
    pub(crate) noise: f64,
}

/// An overload that starts within a second, lasts for twenty minutes, and ends.
pub(crate) const OVERLOAD_PERIOD: Load = Load {
    name: "overload for twenty minutes",
    seconds: 3_600,
    offered: |second| if (300..1_500).contains(&second) { 1.6 } else { 0.55 },
    noise: 0.06,
};

/// A load near the capacity that oscillates with a period of two minutes, for two hours.
pub(crate) const NEAR_CAPACITY: Load = Load {
    name: "two hours near capacity",
    seconds: 7_200,
    offered: |second| 0.8 + 0.15 * (second as f64 / 60.0 * std::f64::consts::TAU / 2.0).sin(),
    noise: 0.12,
};

pub(crate) fn run(load: &Load, seed: u64) -> Vec<Second> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut shedder = Shedder::new(CLASS_SHARES.len(), Settings::default());
    let mut seconds = Vec::new();
    for second in 0..load.seconds {
        let offered = (load.offered)(second);
        let shed = [0, 1, 2, 3].map(|class| shedder.share(class));
        let admitted =
            CLASS_SHARES.iter().zip(shed).map(|((_, share), shed)| share * (1.0 - shed)).sum::<f64>() * offered;
        // The sum of six uniform numbers approximates a normal distribution.
        let noise = (0..6).map(|_| rng.random::<f64>() - 0.5).sum::<f64>() * load.noise * 2_f64.sqrt();
        shedder.tick(Duration::from_secs(second), (admitted + noise).clamp(0.0, 1.0));
        seconds.push(Second { offered, served: admitted.min(1.0), level: shedder.level(), shed });
    }
    seconds
}

/// Returns how often the level changed direction.
pub(crate) fn reversals(run: &[Second]) -> usize {
    let steps = run.windows(2).map(|pair| pair[1].level - pair[0].level).filter(|step| *step != 0.0);
    let directions: Vec<_> = steps.map(|step| step > 0.0).collect();
    directions.windows(2).filter(|pair| pair[0] != pair[1]).count()
}
