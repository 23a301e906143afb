//! Endurance test: all features in one run, on a Redis Cluster and on peers, under faults that a seed selects.
//!
//! `make soak HOURS=1 SEED=1` runs it for an hour and writes docs/endurance; `cargo test` runs three faults in half
//! a minute. [`Observer`] counts the results of calls and reports violations of the laws, [`Sampler`] measures the processes.
//! docs/design/endurance.md describes the laws and the faults.
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, reason = "a failed assumption must fail the test")]

mod faults;
mod features;
mod law;
#[path = "../../benches/accuracy/legend.rs"]
mod legend;
mod load;
mod observer;
mod planted;
#[path = "../../benches/overload/plot.rs"]
mod plot;
mod report;
mod samples;
mod schedule;
mod site;
#[path = "../support/mod.rs"]
#[allow(dead_code, unused_imports, reason = "the other tests use the other items")]
mod support;

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, Mutex},
    thread::sleep,
    time::{Duration, Instant},
};

use self::{
    load::Load,
    observer::{Observer, PERIOD},
    report::{FaultReport, Run},
    samples::Sampler,
    schedule::{Fault, Schedule},
    site::{INSTANCES, ON_REDIS, PEERS, Site},
};

/// Time after a fault within which errors must end.
const RECOVERY: Duration = Duration::from_secs(10);
/// Time without an error after which the service has recovered.
const QUIET: u64 = 2_000;
/// Load without faults at the begin and at the end.
const CALM: Duration = Duration::from_secs(6);

#[test]
fn no_law_is_violated_under_faults() {
    let number = |name: &str| std::env::var(name).ok().map(|text| text.parse::<f64>().unwrap());
    let seed = number("SEED").unwrap_or(1.0) as u64;
    let (length, faults): (_, Box<dyn Iterator<Item = Fault>>) = match number("HOURS") {
        Some(hours) => (Duration::from_secs_f64(hours * 3_600.0), Box::new(Schedule::new(seed))),
        None => (Duration::MAX, Box::new(schedule::short())),
    };
    let run = soak(number("HOURS").is_some(), length, faults);
    let folder = match (number("HOURS"), std::env::var_os("REPORT")) {
        (_, Some(folder)) => PathBuf::from(folder),
        (Some(_), None) => support::repository("docs/endurance"),
        (None, None) => support::repository("target/endurance"),
    };
    run.write(&folder, seed);
    assert!(run.violations.is_empty(), "{:#?}", run.violations);
}

/// Runs the load and injects the faults one after the other, until the time is over.
fn soak(is_timed: bool, length: Duration, faults: impl Iterator<Item = Fault>) -> Run {
    let mut site = Site::start();
    let observer = Arc::new(Observer::new(is_timed));
    let (pids, samples) = (Arc::new(Mutex::new(site.pids())), Arc::new(Mutex::new(Vec::new())));
    let targets = |all: &[usize]| all.iter().map(|index| site.target(*index)).collect();
    let all: Vec<_> = (0..INSTANCES.len()).collect();
    let sampler = Sampler {
        observer: Arc::clone(&observer),
        targets: targets(&all),
        pids: Arc::clone(&pids),
        redis: site.redis_nodes(),
        samples: Arc::clone(&samples),
    };
    let load = Load::start(targets(&ON_REDIS), targets(&PEERS), Arc::clone(&observer), sampler);
    let begin = Instant::now();
    sleep(CALM);
    let mut reports = Vec::new();
    for fault in faults {
        if begin.elapsed() + fault.lasts + fault.pause + CALM > length {
            break;
        }
        let from = observer.now();
        // A failure of the test itself ends the run, and the report contains it.
        let Ok(affected) = catch_unwind(AssertUnwindSafe(|| fault.run(&mut site, &observer))) else {
            observer.report(&format!("{}: the fault could not be injected or removed", fault.kind.name()));
            break;
        };
        *pids.lock().unwrap() = site.pids();
        let until = observer.now();
        sleep(fault.pause);
        let report = FaultReport::new(&fault, from, until, &observer);
        println!("second {}: {affected}: {report:?}", observer.second());
        if fault.kind.fails_calls() && report.errors == 0 {
            observer.report(&format!("{}: no call failed", fault.kind.name()));
        }
        observer.recovered_after(fault.kind.name(), until, report.recovery, RECOVERY);
        reports.push(report);
    }
    sleep(CALM);
    drop(load);
    let record = observer.finish();
    let samples = std::mem::take(&mut *samples.lock().unwrap());
    Run::new(is_timed, begin.elapsed(), observer.epoch, reports, samples, record)
}
