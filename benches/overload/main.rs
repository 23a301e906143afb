//! What limits that follow latency do to an upstream with a queue, and a shedder to a box that is too busy. In virtual time:
//! tables on standard output, plots in docs/overload. `cargo bench --bench overload`, or `make overload`.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

#[path = "../accuracy/legend.rs"]
mod legend;
mod plot;
mod upstream;
mod worker;

use std::{fs, path::Path};

use plot::{Panel, svg};
use sluicegate_common::adaptive::Method;
use upstream::{Limit, SCENARIOS, run};

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/overload");
    fs::create_dir_all(&folder).unwrap();
    limits(&folder);
    shedding(&folder);
}

fn limits(folder: &Path) {
    println!("An upstream of 50 at once, 0.1 s each, asked half as much again; whoever waits 0.5 s has gone.\n");
    println!("| | limit | answered in time, of a second | too late | p50 ms | p99 ms | limit, second half | spread |");
    println!("| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |");
    for scenario in &SCENARIOS {
        let seconds = scenario.seconds as usize;
        let limits = [
            ("none", Limit::Unlimited),
            ("fixed, 50", Limit::Fixed(50 / scenario.fleets as u32)),
            ("aimd", Limit::learning(Method::Aimd)),
            ("gradient2", Limit::learning(Method::Gradient2)),
            ("vegas", Limit::learning(Method::Vegas)),
        ];
        let (mut limit_lines, mut good_lines) = (Vec::new(), Vec::new());
        for (name, limit) in limits {
            let mut run = run(scenario, &limit, 1);
            let (p50, p99) = (run.percentile(0.5), run.percentile(0.99));
            let (good, late) = (run.goodput(10, seconds), run.late / scenario.seconds);
            let (now, spread) = match name {
                "none" => ("∞".to_owned(), String::new()),
                _ => (
                    format!("{:.0}", run.limit(seconds / 2, seconds)),
                    format!("{:.2}", run.spread(seconds / 2, seconds)),
                ),
            };
            let scenario = scenario.name;
            println!("| {scenario} | {name} | {good:.0} | {late} | {p50:.0} | {p99:.0} | {now} | {spread} |");
            if name != "none" {
                limit_lines.push((name.to_owned(), run.limits.clone()));
            }
            good_lines.push((name.to_owned(), run.good.iter().map(|good| f64::from(*good)).collect()));
        }
        // The one without a limit goes last: a name has the same colour in both.
        good_lines.rotate_left(1);
        let panels = [
            Panel {
                title: format!("{}: the limit", scenario.name),
                unit: "requests at once",
                a_second: 10.0,
                highest: 200.0,
                lines: limit_lines,
            },
            Panel {
                title: "answered in time".into(),
                unit: "requests per second",
                a_second: 1.0,
                highest: 600.0,
                lines: good_lines,
            },
        ];
        fs::write(folder.join(format!("{}.svg", scenario.name)), svg(&panels).unwrap()).unwrap();
    }
}

fn shedding(folder: &Path) {
    println!("\nA box with four classes, by the defaults:\n");
    println!(
        "| load | seen after 1 min | 2 min | 5 min | back to half of it after | all back after | reversals an hour |"
    );
    println!("| --- | --- | --- | --- | ---: | ---: | ---: |");
    for load in [&worker::COMES_AND_GOES, &worker::AT_THE_EDGE] {
        let run = worker::run(load, 1);
        let shed = |second: usize| {
            let shares = worker::CLASSES.iter().zip(run[second].shed);
            let shares = shares.filter(|(_, shed)| *shed > 0.0);
            let text: Vec<_> = shares.map(|((name, _), shed)| format!("{name} {:.0} %", 100.0 * shed)).collect();
            if text.is_empty() { "nothing".to_owned() } else { text.join(", ") }
        };
        let reversals = worker::reversals(&run) as f64 * 3_600.0 / load.seconds as f64;
        let after = |level: f64| {
            let back = run.iter().enumerate().skip(1_500).find(|(_, second)| second.level <= level);
            back.map_or("".to_owned(), |(second, _)| format!("{} s", second - 1_500))
        };
        let (half, all) = match load.name == worker::COMES_AND_GOES.name {
            true => (after(run[1_499].level / 2.0), after(0.0)),
            false => (String::new(), String::new()),
        };
        let begin = 300;
        let [one, two, five] = [60, 120, 300].map(|later| shed(begin + later));
        println!("| {} | {one} | {two} | {five} | {half} | {all} | {reversals:.1} |", load.name);
    }
    let run = worker::run(&worker::COMES_AND_GOES, 1);
    let line =
        |name: &str, of: &dyn Fn(&worker::Second) -> f64| (name.to_owned(), run.iter().map(of).collect::<Vec<_>>());
    let classes = worker::CLASSES.iter().enumerate();
    let panels = [
        Panel {
            title: "an hour: what is asked and what is served".into(),
            unit: "of what it can do",
            a_second: 1.0,
            highest: 2.0,
            lines: vec![line("asked", &|it| it.asked), line("served", &|it| it.served)],
        },
        Panel {
            title: "the part of each class that is shed".into(),
            unit: "share",
            a_second: 1.0,
            highest: 1.0,
            lines: classes.map(|(class, (name, _))| line(name, &|it| it.shed[class])).collect(),
        },
    ];
    fs::write(folder.join("shedding.svg"), svg(&panels).unwrap()).unwrap();
}
