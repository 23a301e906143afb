//! Overload in virtual time: adaptive limits in front of an upstream with a queue, and the load shedder of an
//! overloaded host. `benches/overload` runs the same simulations and prints tables and plots.
#![allow(missing_docs, clippy::unwrap_used, dead_code, reason = "a test that shares modules with a benchmark")]

#[path = "../../benches/overload/upstream.rs"]
mod upstream;
#[path = "../../benches/overload/worker.rs"]
mod worker;

use sluicegate_overload::adaptive::Method;
use upstream::{Limit, SCENARIOS, Scenario, run};
use worker::{CLASS_SHARES, Load, NEAR_CAPACITY, OVERLOAD_PERIOD, reversals};

const SEEDS: std::ops::Range<u64> = 1..6;

fn scenario(name: &str) -> &'static Scenario {
    SCENARIOS.iter().find(|scenario| scenario.name == name).unwrap()
}

/// Returns the fixed limit with the highest goodput, and the goodput.
fn best(scenario: &Scenario, seed: u64) -> (f64, f64) {
    let candidates = (40..=80).step_by(2).map(|limit| {
        let goodput = run(scenario, &Limit::Fixed(limit), seed).goodput(60, scenario.seconds as usize);
        (f64::from(limit), goodput)
    });
    candidates.max_by(|one, other| one.1.total_cmp(&other.1)).unwrap()
}

#[test]
fn vegas_settles_at_the_best_limit() {
    let steady = scenario("steady");
    for seed in SEEDS {
        let (limit, goodput) = best(steady, seed);
        let vegas = run(steady, &Limit::adaptive(Method::Vegas), seed);
        let settled = vegas.mean_limit(60, 300);
        // The queue begins at fifty requests. A few more bridge the gaps between arrivals.
        assert!(
            settled > 45.0 && settled < 1.1 * limit.max(54.0),
            "settled at {settled}, best limit {limit}, seed {seed}"
        );
        let (good, unlimited) = (vegas.goodput(60, 300), run(steady, &Limit::Unlimited, seed).goodput(60, 300));
        assert!(good > 0.96 * goodput && unlimited < 0.1 * goodput, "{good} of {goodput}, seed {seed}");
        assert!(vegas.spread(60, 300) < 0.2, "{} seed {seed}", vegas.spread(60, 300));
    }
}

/// The capacity falls from fifty concurrent requests to twenty-five.
#[test]
fn a_halved_capacity_is_found_within_seconds() {
    for seed in SEEDS {
        let vegas = run(scenario("step"), &Limit::adaptive(Method::Vegas), seed);
        let found = vegas.limits.iter().enumerate().skip(600).find(|(_, limit)| **limit <= 35.0);
        let after = (found.unwrap().0 - 600) as f64 / 10.0;
        assert!(after <= 5.0, "{after} s, seed {seed}");
        let (low, high) = (vegas.mean_limit(70, 120), vegas.mean_limit(135, 180));
        assert!((22.0..37.0).contains(&low) && (45.0..70.0).contains(&high), "{low} and {high}, seed {seed}");
        let fixed = run(scenario("step"), &Limit::Fixed(25), seed).goodput(65, 120);
        assert!(vegas.goodput(65, 120) > 0.93 * fixed, "{} of {fixed}, seed {seed}", vegas.goodput(65, 120));
    }
}

#[test]
fn two_fleets_share_an_upstream_and_neither_takes_it_over() {
    for seed in SEEDS {
        let vegas = run(scenario("two-fleets"), &Limit::adaptive(Method::Vegas), seed);
        let (before, after) = (vegas.mean_limit(60, 120), vegas.mean_limit(240, 300));
        assert!((45.0..80.0).contains(&before) && (45.0..80.0).contains(&after), "{before} and {after}, seed {seed}");
        assert!(vegas.goodput(60, 300) > 450.0, "{} seed {seed}", vegas.goodput(60, 300));
    }
}

#[test]
fn bursts_and_drift_reduce_goodput_only_slightly() {
    for (name, fraction) in [("bursts", 0.85), ("drift", 0.8)] {
        for seed in SEEDS {
            let seconds = scenario(name).seconds as usize;
            let fixed = run(scenario(name), &Limit::Fixed(50), seed).goodput(30, seconds);
            let vegas = run(scenario(name), &Limit::adaptive(Method::Vegas), seed).goodput(30, seconds);
            assert!(vegas > fraction * fixed, "{name}: {vegas} of {fixed}, seed {seed}");
        }
    }
}

/// The two other methods only promise to stay below the limit at which no request is answered in time.
#[test]
fn every_method_keeps_an_upstream_alive() {
    for method in Method::ALL {
        for seed in SEEDS {
            let good = run(scenario("steady"), &Limit::adaptive(method), seed).goodput(30, 300);
            assert!(good > 400.0, "{}: {good}, seed {seed}", method.name());
        }
    }
}

fn loads() -> [Load; 4] {
    let sudden = |second: u64| if second >= 60 { 3.0 } else { 0.2 };
    let waves = |second: u64| 0.9 + 0.5 * (second as f64 / 500.0).sin();
    [
        OVERLOAD_PERIOD,
        NEAR_CAPACITY,
        Load { name: "three times the capacity", seconds: 1_800, offered: sudden, noise: 0.1 },
        Load { name: "waves", seconds: 7_200, offered: waves, noise: 0.2 },
    ]
}

#[test]
fn critical_traffic_is_served_and_no_class_is_shed_while_a_lower_one_passes() {
    for load in loads() {
        for seed in SEEDS {
            for second in worker::run(&load, seed) {
                assert_eq!(second.shed[0], 0.0, "{}", load.name);
                let ordered = second.shed.windows(2).all(|pair| pair[0] == 0.0 || pair[1] == 1.0);
                assert!(ordered, "{}: {:?}", load.name, second.shed);
            }
        }
    }
}

/// With a patience of 28 s, an hour has at most 3,600 / 28 reversals under any load. In practice there are far fewer.
#[test]
fn the_shedder_does_not_flap() {
    for load in loads() {
        for seed in SEEDS {
            let count = reversals(&worker::run(&load, seed));
            let hours = load.seconds as f64 / 3_600.0;
            assert!((count as f64) < 3_600.0 / 28.0 * hours, "{}: {count}", load.name);
            assert!((count as f64) <= 16.0 * hours, "{}: {count}, seed {seed}", load.name);
        }
    }
}

#[test]
fn the_shedder_reacts_within_two_minutes_and_recovers_more_slowly() {
    for seed in SEEDS {
        let run = worker::run(&OVERLOAD_PERIOD, seed);
        let shed_share = |second: usize| -> f64 {
            CLASS_SHARES.iter().zip(run[second].shed).map(|((_, shed_share), shed)| shed_share * shed).sum()
        };
        assert_eq!(shed_share(320), 0.0, "shedding starts too early");
        assert!(shed_share(420) > 0.2, "{} after two minutes", shed_share(420));
        // The shedder settles where the host is neither calm nor busy.
        let settled = &run[900..1_500];
        assert!(settled.iter().all(|second| (0.6..=0.9).contains(&second.served)), "seed {seed}");
        let peak = run[1_499].level;
        let rose = run.iter().skip(300).position(|second| second.level >= peak / 2.0).unwrap();
        let fell = run.iter().skip(1_500).position(|second| second.level <= peak / 2.0).unwrap();
        assert!(fell > rose, "half of the peak is reached in {rose} s and left in {fell} s");
        assert_eq!(run.last().unwrap().level, 0.0);
    }
}
