//! Benchmarks that need no server: loading rules and matching descriptors.

use std::{fmt::Write, fs, hint::black_box, time::Instant};

use sluicegate::rules::{Entry, Options, RuleSet, SourceFile, compile};

/// Measures loading 100,000 rules, and matching among them compared with matching among 10.
pub(crate) fn rules() {
    let (few, _) = load(10);
    let (many, seconds) = load(100_000);
    println!("100,000 rules load in {seconds:.2} s");
    for (target, value) in [("a value", "user7"), ("a wildcard", "tenant7-x"), ("nothing", "nobody")] {
        let (few, many) = paired(&few, &many, value);
        println!("matching {target}: {few:.0} ns among 10 rules, {many:.0} ns among 100,000: x {:.2}", many / few);
    }
}

fn load(rules: usize) -> (RuleSet, f64) {
    let mut text = "domain: bench\ndescriptors:\n".to_owned();
    for rule in 0..rules / 2 {
        for value in [format!("user{rule}"), format!("tenant{rule}-*")] {
            writeln!(text, "- key: user\n  value: {value}\n  rate_limit: {{unit: day, requests_per_unit: 5}}").unwrap();
        }
    }
    if rules == 10 {
        // Both sets contain the rules that are matched.
        text = text.replace("user4", "user7").replace("tenant4-", "tenant7-");
    }
    let started = Instant::now();
    let file = SourceFile { name: "bench.yaml".into(), text };
    let (set, _) = compile(&[file], Options::default()).unwrap();
    (set, started.elapsed().as_secs_f64())
}

/// Returns the nanoseconds per match in each set, as medians of alternating rounds.
fn paired(few: &RuleSet, many: &RuleSet, value: &str) -> (f64, f64) {
    const MATCHES: u32 = 200_000;
    let time = |set: &RuleSet| {
        let started = Instant::now();
        for _ in 0..MATCHES {
            let entries = [Entry { key: "user", value: black_box(value) }];
            black_box(set.find(black_box("bench"), entries.into_iter()));
        }
        started.elapsed().as_secs_f64() * 1e9 / f64::from(MATCHES)
    };
    let (mut a, mut b): (Vec<_>, Vec<_>) = (0..11).map(|_| (time(few), time(many))).unzip();
    a.sort_by(f64::total_cmp);
    b.sort_by(f64::total_cmp);
    (a[5], b[5])
}

/// Returns the resident memory of this process in bytes.
pub(crate) fn resident() -> f64 {
    let statm = fs::read_to_string("/proc/self/statm").unwrap();
    statm.split_whitespace().nth(1).unwrap().parse::<f64>().unwrap() * 4096.0
}
