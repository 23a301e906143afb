//! Compares every algorithm with the exact sliding log. `make accuracy` runs it and prints a table of wrong decisions
//! and a table of worst cases, and writes a plot for each trace to docs/accuracy.
//!
//! [`Reference`] stores every instant at which an algorithm allowed a request. A request is wrongly allowed if the
//! window before it already contained the limit, and wrongly denied if it did not.
#![allow(missing_docs, clippy::unwrap_used, reason = "a benchmark that cannot continue should stop")]

mod consistency;
mod legend;
mod plot;
mod reference;
mod resets;
mod traces;

use std::{collections::BTreeMap, fs, path::Path};

use sluicegate::algorithm::{
    Action, Algorithm, MaxHits, Micros, Operation, State,
    first_request::FirstRequestWindow,
    fixed_window::FixedWindow,
    gcra::Gcra,
    leaky_bucket::LeakyBucket,
    sliding_log::SlidingLog,
    sliding_window::{SlidingWindow, WindowEdge},
    token_bucket::TokenBucket,
    warm_up::WarmUp,
};

use self::{
    plot::Panel,
    reference::Reference,
    traces::{Request, Trace},
};

const LIMIT: u32 = 100;
const WINDOW: Micros = Micros::from_secs(60);

fn main() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/accuracy");
    fs::create_dir_all(&folder).unwrap();
    let traces = traces::all();
    println!("Wrongly allowed / wrongly denied, in percent of the requests; limit {LIMIT} per 60 s.\n");
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
        println!("\n{}: {} ({requests} requests)", trace.name, trace.description);
        fs::write(folder.join(format!("{}.svg", trace.name)), plot::svg(trace, &panels[trace.name]).unwrap()).unwrap();
    }
    println!("\nMaximum number of hits that an adversary gets in any 60 s, at a limit of {LIMIT}:\n");
    for (name, make) in algorithms() {
        println!("| {name} | {} |", worst_case(&make(false)));
    }
    fs::write(folder.join("resets.svg"), resets::print().unwrap()).unwrap();
    consistency::print();
    drift();
}

type Make = fn(bool) -> Algorithm;

fn algorithms() -> Vec<(&'static str, Make)> {
    fn sliding(buckets: u32, edge: WindowEdge, count_denied: bool) -> Algorithm {
        SlidingWindow::new(max_hits(), WINDOW, buckets, edge, count_denied).unwrap().into()
    }
    fn max_hits() -> MaxHits {
        MaxHits::hard(LIMIT.into())
    }
    vec![
        ("fixed_window", |denied| FixedWindow::new(max_hits(), WINDOW, denied).unwrap().into()),
        ("fixed_window, window: first_request", |denied| {
            FirstRequestWindow::new(max_hits(), WINDOW, denied).unwrap().into()
        }),
        ("sliding_window", |denied| sliding(1, WindowEdge::Weighted, denied)),
        ("sliding_window, buckets: 6", |denied| sliding(6, WindowEdge::Weighted, denied)),
        ("sliding_window, buckets: 60", |denied| sliding(60, WindowEdge::Weighted, denied)),
        ("sliding_window, edge: strict", |denied| sliding(1, WindowEdge::Strict, denied)),
        ("sliding_window, buckets: 6, edge: strict", |denied| sliding(6, WindowEdge::Strict, denied)),
        ("sliding_log", |denied| SlidingLog::new(max_hits(), WINDOW, Micros::ZERO, denied).unwrap().into()),
        ("token_bucket", |_| TokenBucket::new(LIMIT, WINDOW, max_hits(), false).unwrap().into()),
        ("token_bucket, warm_up: 30s", |_| WarmUp::new(LIMIT, WINDOW, 1, Micros::from_secs(30), false).unwrap().into()),
        ("leaky_bucket, burst: 1, queue: 10", |_| {
            LeakyBucket::new(LIMIT, WINDOW, MaxHits::hard(11), 1, false).unwrap().into()
        }),
        ("gcra, burst: 10", |_| Gcra::new(LIMIT, WINDOW, MaxHits::hard(10), false).unwrap().into()),
    ]
}

fn replay(name: &str, algorithm: &Algorithm, trace: &Trace) -> (reference::Outcome, Panel) {
    let users = trace.requests.iter().map(|request| request.user).max().map_or(0, |user| user as usize + 1);
    let mut states = vec![State::default(); users];
    let mut reference = Reference::new(LIMIT as usize, WINDOW, users, trace.count_denied);
    let mut panel = Panel::new(name, trace);
    for Request { at, user } in &trace.requests {
        let operation = Operation { action: Action::Take, cost: 1, now: Micros::new(*at) };
        let decision = algorithm.apply(&mut states[*user as usize], operation);
        reference.record(*user as usize, *at, decision.allowed);
        if decision.allowed {
            panel.record(at + decision.delay.get());
        }
    }
    (reference.outcome(), panel)
}

/// Sends one hit, and after up to a minute as many as are allowed, a hundred times a second. Returns the maximum number of
/// hits that were allowed in any 60 s.
fn worst_case(algorithm: &Algorithm) -> usize {
    let from = |phase: u64| {
        let mut state = State::default();
        let first = Operation { action: Action::Take, cost: 1, now: Micros::new(traces::START) };
        let mut passed = Vec::new();
        if algorithm.apply(&mut state, first).allowed {
            passed.push(traces::START);
        }
        for tick in 0..30_000 {
            let now = traces::START + phase * 10_000 + tick * 10_000;
            let decision =
                algorithm.apply(&mut state, Operation { action: Action::Take, cost: 1, now: Micros::new(now) });
            // Each instant takes all hits that are allowed.
            let mut allowed = decision.allowed;
            while allowed {
                passed.push(now);
                let operation = Operation { action: Action::Take, cost: 1, now: Micros::new(now) };
                allowed = algorithm.apply(&mut state, operation).allowed;
            }
        }
        let inside =
            |(first, start): (usize, &u64)| passed[first..].iter().take_while(|at| **at < start + WINDOW.get()).count();
        passed.iter().enumerate().map(inside).max().unwrap_or_default()
    };
    (0..6_000).step_by(97).chain([5_999]).map(from).max().unwrap_or_default()
}

/// Sends 10⁹ requests, each at the exact microsecond at which it fits.
fn drift() {
    const SECONDS: u64 = 1_000_000_000 / 7;
    let bucket = TokenBucket::new(7, Micros::from_secs(1), MaxHits::hard(7), false).unwrap();
    let algorithm: Algorithm = bucket.into();
    let mut state = State::default();
    let mut take = |cost: u64, now: u64| {
        algorithm.step(&mut state, Operation { action: Action::Take, cost, now: Micros::new(traces::START + now) })
    };
    let mut denied = u64::from(!take(7, 0));
    for second in 0..SECONDS {
        for hit in 1..=7 {
            denied += u64::from(!take(1, second * 1_000_000 + (hit * 1_000_000_u64).div_ceil(7)));
        }
    }
    println!("\n{} requests at exactly 7 a second: {denied} denied", SECONDS * 7 + 7);
}
