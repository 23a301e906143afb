//! What a million limits of single entities cost: at the start, in memory, and each decision.

use std::{fmt::Write as _, fs, time::Instant};

use crate::{Load, Row, h2load, load_tests, process::Process, users};

const LIMITS: u32 = 1_000_000;

pub(crate) fn run() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("directives");
    // Half of them for users that ask, and for somebody whom h2load asks for.
    let mut text = String::new();
    for user in 0..LIMITS {
        let name = if user == 1 { "alice".to_owned() } else { format!("user{}", user * 2) };
        let said = format!(r#"{{\"w\":\"{}/day\",\"a\":\"alice\",\"t\":1}}"#, 4_000_000_000 - user % 1_000);
        writeln!(text, r#"{{"kept":["limit|bench|user={name}",1,"{said}"]}}"#).unwrap();
    }
    text += "{\"mark\":{\"epoch\":\"journal\",\"version\":1,\"id\":\"1\"}}\n";
    fs::write(&path, text).unwrap();

    let plain = Process::service("memory");
    let started = Instant::now();
    let many = Process::service_told(path.to_str().unwrap());
    let took = started.elapsed();
    assert_eq!(many.metric("sluicegate_directives{kind=\"limit\"}"), f64::from(LIMITS));
    let bytes = (many.resident() - plain.resident()) / f64::from(LIMITS);
    println!("{LIMITS} limits: {bytes:.0} bytes each in memory, {:.1} s from start to serving\n", took.as_secs_f64());
    let mut rows: Vec<Row> = Vec::new();
    for (what, load) in [("one hot key", h2load::run as Load), ("100,000 users", users::run)] {
        rows.push((format!("none, {what}"), Process::service("memory"), load));
        rows.push((format!("a million, {what}"), Process::service_told(path.to_str().unwrap()), load));
    }
    load_tests(&rows, &["none"]);
    let (plain, trying) = (Process::redis(), Process::redis());
    let rows: Vec<Row> = [
        ("none, memory", Process::service("memory")),
        ("candidate rules on 10%, memory", Process::service_trying("memory", "0.1")),
        ("none, redis", Process::service(&plain.url())),
        ("candidate rules on 10%, redis", Process::service_trying(&trying.url(), "0.1")),
    ]
    .map(|(name, process)| (name.to_owned(), process, users::run as Load))
    .into();
    load_tests(&rows, &["none"]);
}
