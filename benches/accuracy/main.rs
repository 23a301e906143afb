//! How far every algorithm is from the exact sliding log. `make accuracy` runs it: a table of wrong answers and a table
//! of worst cases on standard output, a plot for each trace in docs/accuracy.
//!
//! The judge knows every instant at which an algorithm let a request through. A request is wrongly allowed when the
//! window before it held the limit already, and wrongly refused when it did not.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark that cannot go on should stop")]

mod consistency;
mod judge;
mod legend;
mod plot;
mod traces;

use std::{collections::BTreeMap, fs, path::Path};

use sluicegate::algorithm::{
    Action, Algorithm, MaxHits, Micros, Operation, State,
    fixed_window::FixedWindow,
    gcra::Gcra,
    leaky_bucket::LeakyBucket,
    sliding_log::SlidingLog,
    sliding_window::{SlidingWindow, WindowEdge},
    token_bucket::TokenBucket,
    warm_up::WarmUp,
};

use self::{
    judge::Judge,
    plot::Panel,
    traces::{Request, Trace},
};

const LIMIT: u32 = 100;
const WINDOW: Micros = Micros::from_secs(60);

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/accuracy");
    fs::create_dir_all(&folder).unwrap();
    let traces = traces::all();
    println!("Wrongly allowed / wrongly refused, in percent of the requests; limit {LIMIT} per 60 s.\n");
    let names: Vec<_> = traces.iter().map(|trace| format!(" {} |", trace.name)).collect();
    println!("| algorithm |{}", names.concat());
    println!("| --- |{}", " ---: |".repeat(traces.len()));
    let mut panels: BTreeMap<&str, Vec<Panel>> = BTreeMap::new();
    for (name, make) in algorithms() {
        let mut row = format!("| {name} |");
        for trace in &traces {
            let (outcome, panel) = replay(name, &make(trace.count_denied), trace);
            row += &format!(" {outcome} |");
            panels.entry(trace.name).or_default().push(panel);
        }
        println!("{row}");
    }
    for trace in &traces {
        let requests = trace.requests.len();
        println!("\n{}: {} ({requests} requests)", trace.name, trace.about);
        fs::write(folder.join(format!("{}.svg", trace.name)), plot::svg(trace, &panels[trace.name]).unwrap()).unwrap();
    }
    println!("\nThe most that an adversary gets in any 60 s, at a limit of {LIMIT}:\n");
    for (name, make) in algorithms() {
        println!("| {name} | {} |", worst_case(&make(false)));
    }
    consistency::print();
    drift();
}

type Make = fn(bool) -> Algorithm;

fn algorithms() -> Vec<(&'static str, Make)> {
    fn sliding(buckets: u32, edge: WindowEdge, count_denied: bool) -> Algorithm {
        SlidingWindow::new(quota(), WINDOW, buckets, edge, count_denied).unwrap().into()
    }
    fn quota() -> MaxHits {
        MaxHits::hard(LIMIT.into())
    }
    vec![
        ("fixed_window", |denied| FixedWindow::new(quota(), WINDOW, denied).unwrap().into()),
        ("sliding_window", |denied| sliding(1, WindowEdge::Weighted, denied)),
        ("sliding_window, buckets: 6", |denied| sliding(6, WindowEdge::Weighted, denied)),
        ("sliding_window, buckets: 60", |denied| sliding(60, WindowEdge::Weighted, denied)),
        ("sliding_window, edge: strict", |denied| sliding(1, WindowEdge::Strict, denied)),
        ("sliding_window, buckets: 6, edge: strict", |denied| sliding(6, WindowEdge::Strict, denied)),
        ("sliding_log", |denied| SlidingLog::new(quota(), WINDOW, Micros::ZERO, denied).unwrap().into()),
        ("token_bucket", |_| TokenBucket::new(LIMIT, WINDOW, quota(), false).unwrap().into()),
        ("token_bucket, warm_up: 30s", |_| WarmUp::new(LIMIT, WINDOW, 1, Micros::from_secs(30), false).unwrap().into()),
        ("leaky_bucket, burst: 1, queue: 10", |_| {
            LeakyBucket::new(LIMIT, WINDOW, MaxHits::hard(11), 1, false).unwrap().into()
        }),
        ("gcra, burst: 10", |_| Gcra::new(LIMIT, WINDOW, MaxHits::hard(10), false).unwrap().into()),
    ]
}

fn replay(name: &str, algorithm: &Algorithm, trace: &Trace) -> (judge::Outcome, Panel) {
    let users = trace.requests.iter().map(|request| request.user).max().map_or(0, |user| user as usize + 1);
    let mut states = vec![State::default(); users];
    let mut judge = Judge::new(LIMIT as usize, WINDOW, users, trace.count_denied);
    let mut panel = Panel::new(name, trace);
    for Request { at, user } in &trace.requests {
        let ask = Operation { action: Action::Take, cost: 1, now: Micros::new(*at) };
        let decision = algorithm.apply(&mut states[*user as usize], ask);
        judge.hear(*user as usize, *at, decision.allowed);
        if decision.allowed {
            panel.admit(at + decision.delay.get());
        }
    }
    (judge.outcome(), panel)
}

/// Asks a hundred times a second, after idleness, from any second of a minute on: the most that passed in 60 s.
fn worst_case(algorithm: &Algorithm) -> usize {
    let from = |phase: u64| {
        let mut state = State::default();
        let mut passed = Vec::new();
        for tick in 0..30_000 {
            let now = traces::START + phase * 10_000 + tick * 10_000;
            let decision =
                algorithm.apply(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
            // At one instant as much as passes.
            let mut allowed = decision.allowed;
            while allowed {
                passed.push(now);
                let ask = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
                allowed = algorithm.apply(&mut state, ask).allowed;
            }
        }
        let inside =
            |(first, start): (usize, &u64)| passed[first..].iter().take_while(|at| **at < start + WINDOW.get()).count();
        passed.iter().enumerate().map(inside).max().unwrap_or_default()
    };
    (0..6_000).step_by(97).chain([5_999]).map(from).max().unwrap_or_default()
}

/// A thousand million requests, each at the microsecond at which it fits and not before.
fn drift() {
    const SECONDS: u64 = 1_000_000_000 / 7;
    let bucket = TokenBucket::new(7, Micros::from_secs(1), MaxHits::hard(7), false).unwrap();
    let algorithm: Algorithm = bucket.into();
    let mut state = State::default();
    let mut take = |cost: u64, now: u64| {
        algorithm.step(&mut state, Operation { action: Action::Take, cost, now: Micros::new(traces::START + now) })
    };
    let mut refused = u64::from(!take(7, 0));
    for second in 0..SECONDS {
        for hit in 1..=7 {
            refused += u64::from(!take(1, second * 1_000_000 + (hit * 1_000_000_u64).div_ceil(7)));
        }
    }
    println!("\n{} requests at exactly 7 a second: {refused} refused", SECONDS * 7 + 7);
}
