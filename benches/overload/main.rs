//! What limits that follow latency do to an upstream with a queue, and a box that sheds to what it serves. In virtual time:
//! tables on standard output, plots in docs/overload. `cargo bench --bench overload`.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

mod upstream;

use sluicegate_common::adaptive::Method;
use upstream::{Limit, SCENARIOS, run};

fn main() {
    for scenario in &SCENARIOS {
        println!("\n{}", scenario.name);
        let limits = [
            ("unlimited", Limit::Unlimited),
            ("fixed 50", Limit::Fixed(50 / scenario.fleets as u32)),
            ("aimd", Limit::learning(Method::Aimd)),
            ("gradient2", Limit::learning(Method::Gradient2)),
            ("vegas", Limit::learning(Method::Vegas)),
        ];
        for (name, limit) in limits {
            let mut run = run(scenario, &limit, std::env::var("SEED").map_or(1, |it| it.parse().unwrap()));
            let seconds = scenario.seconds as usize;
            let tens: Vec<_> =
                (0..seconds / 10).map(|ten| format!("{:.0}", run.limit(10 * ten, 10 * ten + 10))).collect();
            let (p50, p99) = (run.percentile(0.5), run.percentile(0.99));
            println!(
                "{name:10} good {:.0}/s late {} refused {} p50 {:.0} p99 {:.0} spread {:.2}  {}",
                run.goodput(10, seconds),
                run.late,
                run.refused,
                p50,
                p99,
                run.spread(seconds / 2, seconds),
                tens.join(" ")
            );
        }
    }
}
