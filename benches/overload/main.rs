//! Simulates adaptive limits in front of an upstream with a queue, and a load shedder on an overloaded host, in virtual
//! time. Prints tables to standard output and writes plots to docs/overload. Run it with `cargo bench --bench
//! overload`, or `make overload`.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark stops on the first error")]

#[path = "../accuracy/legend.rs"]
mod legend;
mod plot;
mod upstream;
mod worker;

use std::{fs, path::Path};

use plot::{Panel, svg};
use sluicegate_overload::adaptive::Method;
use upstream::{Limit, SCENARIOS, run};

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/overload");
    fs::create_dir_all(&folder).unwrap();
    limits(&folder);
    shedding(&folder);
}

fn limits(folder: &Path) {
    println!("An upstream serves 50 requests at once in 0.1 s each, at 1.5 times its capacity. Callers wait 0.5 s.\n");
    println!("| scenario | limit | in time per s | late per s | p50 ms | p99 ms | mean limit, second half | spread |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for scenario in &SCENARIOS {
        let seconds = scenario.seconds as usize;
        let limits = [
            ("none", Limit::Unlimited),
            ("fixed, 50", Limit::Fixed(50 / scenario.fleets as u32)),
            ("aimd", Limit::adaptive(Method::Aimd)),
            ("gradient2", Limit::adaptive(Method::Gradient2)),
            ("vegas", Limit::adaptive(Method::Vegas)),
        ];
        let (mut limit_lines, mut goodput_lines) = (Vec::new(), Vec::new());
        for (name, limit) in limits {
            let mut run = run(scenario, &limit, 1);
            let (p50, p99) = (run.percentile(0.5), run.percentile(0.99));
            let (goodput, late) = (run.goodput(10, seconds), run.late / scenario.seconds);
            let (mean_limit, spread) = match name {
                "none" => ("∞".to_owned(), String::new()),
                _ => (
                    format!("{:.0}", run.mean_limit(seconds / 2, seconds)),
                    format!("{:.2}", run.spread(seconds / 2, seconds)),
                ),
            };
            let scenario = scenario.name;
            println!("| {scenario} | {name} | {goodput:.0} | {late} | {p50:.0} | {p99:.0} | {mean_limit} | {spread} |");
            if name != "none" {
                limit_lines.push((name.to_owned(), run.limits.clone()));
            }
            goodput_lines.push((name.to_owned(), run.in_time.iter().map(|count| f64::from(*count)).collect()));
        }
        // The line without a limit comes last, so that each name has the same colour in both panels.
        goodput_lines.rotate_left(1);
        let panels = [
            Panel {
                title: format!("{}: limit", scenario.name),
                unit: "requests in flight",
                values_per_second: 10.0,
                max_value: 200.0,
                lines: limit_lines,
            },
            Panel {
                title: "answered in time".into(),
                unit: "requests per second",
                values_per_second: 1.0,
                max_value: 600.0,
                lines: goodput_lines,
            },
        ];
        fs::write(folder.join(format!("{}.svg", scenario.name)), svg(&panels).unwrap()).unwrap();
    }
}

fn shedding(folder: &Path) {
    println!("\nA host with four classes and the default settings:\n");
    println!("| load | shed after 1 min | 2 min | 5 min | level halved after | restored after | reversals per hour |");
    println!("| --- | --- | --- | --- | ---: | ---: | ---: |");
    for load in [&worker::OVERLOAD_PERIOD, &worker::NEAR_CAPACITY] {
        let run = worker::run(load, 1);
        let shed = |second: usize| {
            let shares = worker::CLASS_SHARES.iter().zip(run[second].shed);
            let shares = shares.filter(|(_, shed)| *shed > 0.0);
            let text: Vec<_> = shares.map(|((name, _), shed)| format!("{name} {:.0} %", 100.0 * shed)).collect();
            if text.is_empty() { "nothing".to_owned() } else { text.join(", ") }
        };
        let reversals = worker::reversals(&run) as f64 * 3_600.0 / load.seconds as f64;
        let after = |level: f64| {
            let reached = run.iter().enumerate().skip(1_500).find(|(_, second)| second.level <= level);
            reached.map_or("".to_owned(), |(second, _)| format!("{} s", second - 1_500))
        };
        let mut halved = String::new();
        let mut restored = String::new();
        if load.name == worker::OVERLOAD_PERIOD.name {
            halved = after(run[1_499].level / 2.0);
            restored = after(0.0);
        }
        let start = 300;
        let [one, two, five] = [60, 120, 300].map(|later| shed(start + later));
        println!("| {} | {one} | {two} | {five} | {halved} | {restored} | {reversals:.1} |", load.name);
    }
    let run = worker::run(&worker::OVERLOAD_PERIOD, 1);
    let line = |name: &str, value: &dyn Fn(&worker::Second) -> f64| {
        (name.to_owned(), run.iter().map(value).collect::<Vec<_>>())
    };
    let classes = worker::CLASS_SHARES.iter().enumerate();
    let panels = [
        Panel {
            title: "offered and served load".into(),
            unit: "fraction of capacity",
            values_per_second: 1.0,
            max_value: 2.0,
            lines: vec![line("offered", &|second| second.offered), line("served", &|second| second.served)],
        },
        Panel {
            title: "shed share of each class".into(),
            unit: "share",
            values_per_second: 1.0,
            max_value: 1.0,
            lines: classes.map(|(class, (name, _))| line(name, &|second| second.shed[class])).collect(),
        },
    ];
    fs::write(folder.join("shedding.svg"), svg(&panels).unwrap()).unwrap();
}
