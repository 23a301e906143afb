//! Cost of a million overrides of single entities: time to start, memory, and CPU time per decision. Also the CPU time
//! of candidate rules.

use std::{fmt::Write as _, fs, time::Instant};

use crate::{Load, REQUESTS, Row, algorithms::median, h2load, load_tests, process::Process, rounds, users};

const LIMITS: u32 = 1_000_000;

pub(crate) fn run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("overrides");
    // Half of the overrides apply to users of the load test; one applies to the user of `h2load`.
    let mut text = String::new();
    for user in 0..LIMITS {
        let name = if user == 1 { "alice".to_owned() } else { format!("user{}", user * 2) };
        let value = format!(r#"{{\"w\":\"{}/day\",\"a\":\"alice\",\"t\":1}}"#, 4_000_000_000 - user % 1_000);
        writeln!(text, r#"{{"kept":["limit|bench|user={name}",1,"{value}"]}}"#).unwrap();
    }
    text += "{\"mark\":{\"epoch\":\"journal\",\"version\":1,\"id\":\"1\"}}\n";
    fs::write(&path, text).unwrap();

    let plain = Process::service("memory");
    let started = Instant::now();
    let many = Process::service_with_overrides(path.to_str().unwrap());
    let startup = started.elapsed();
    assert_eq!(many.metric("sluicegate_overrides{kind=\"limit\"}"), f64::from(LIMITS));
    let bytes = (many.resident() - plain.resident()) / f64::from(LIMITS);
    println!(
        "{LIMITS} limits: {bytes:.0} bytes each in memory, {:.1} s from start to serving\n",
        startup.as_secs_f64()
    );
    drop((plain, many));
    compare_overrides(path.to_str().unwrap());
    let (plain, with_candidate) = (Process::redis(), Process::redis());
    let rows: Vec<Row> = [
        ("none, memory", Process::service("memory")),
        ("candidate rules on 10%, memory", Process::service_with_candidate("memory", "0.1")),
        ("none, redis", Process::service(&plain.url())),
        ("candidate rules on 10%, redis", Process::service_with_candidate(&with_candidate.url(), "0.1")),
    ]
    .map(|(name, process)| (name.to_owned(), process, users::run as Load))
    .into();
    load_tests(&rows, &["none"]);
}

/// Compares decisions with all overrides and without any.
///
/// Identical processes differ by up to 10% for their whole lifetime, depending on the location of their memory. Each
/// round therefore starts new processes.
fn compare_overrides(path: &str) {
    let loads: [Load; 2] = [h2load::run, users::run];
    let mut samples: [[Vec<f64>; 2]; 2] = Default::default();
    for _ in 0..rounds() {
        for (row, samples) in samples.iter_mut().enumerate() {
            let process = match row {
                0 => Process::service_with_defaults("memory"),
                _ => Process::service_with_overrides(path),
            };
            for (load, samples) in loads.iter().zip(samples) {
                // The first run creates the counters.
                load(&process);
                let before = process.cpu_micros();
                load(&process);
                samples.push((process.cpu_micros() - before) / f64::from(REQUESTS));
            }
        }
    }
    println!("CPU us per decision, {REQUESTS} requests a round, new processes each, medians of {} rounds\n", rounds());
    println!("| limits | one hot key | x none | 100,000 users | x none |");
    println!("| --- | ---: | ---: | ---: | ---: |");
    for (name, own) in ["none", "a million"].iter().zip(&samples) {
        print!("| {name} |");
        for (own, none) in own.iter().zip(&samples[0]) {
            let ratio = median(own.iter().zip(none).map(|(own, none)| own / none));
            print!(" {:.2} | {ratio:.2} |", median(own.iter().copied()));
        }
        println!();
    }
    println!();
}
