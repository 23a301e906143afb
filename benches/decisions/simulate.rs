//! Throughput of `sluicegate simulate` in replayed requests per second.

use std::{fs, process::Command};

use sluicegate::{
    engine::{Descriptor, Micros, Request},
    rules::Entry,
    traffic::{Writer, encode},
};
use smallvec::smallvec;

const REQUESTS: u64 = 3_000_000;
const USERS: u64 = 100_000;

pub(crate) fn run() {
    let folder = tempfile::tempdir().unwrap();
    let (traffic, rules) = (folder.path().join("traffic"), folder.path().join("rules"));
    let mut writer = Writer::new(traffic.clone(), u64::MAX, u64::MAX, 0);
    let mut message = Vec::new();
    for number in 0..REQUESTS {
        let user = format!("user{}", number.wrapping_mul(2_654_435_769) % USERS);
        let entries = smallvec![Entry { key: "user", value: &user }];
        let descriptor = Descriptor::new(entries);
        let request = Request { domain: "bench", descriptors: smallvec![descriptor], feedback: Vec::new() };
        message.clear();
        encode(Micros::new(1_700_000_000_000_000 + number * 100), &request, None, |_| None, &mut message);
        writer.add(&message).unwrap();
    }
    writer.flush().unwrap();
    fs::create_dir(&rules).unwrap();
    let text = "domain: bench\ndescriptors: [{key: user, rate_limit: {unit: minute, requests_per_unit: 5}}]\n";
    fs::write(rules.join("bench.yaml"), text).unwrap();
    println!("{REQUESTS} requests of {USERS} users, replayed:");
    for (name, arguments) in
        [("with one set of rules", vec![]), ("compared with another", vec!["--against", rules.to_str().unwrap()])]
    {
        let output = Command::new(crate::process::binary())
            .args(["simulate", "--rules", rules.to_str().unwrap(), "--traffic", traffic.to_str().unwrap()])
            .args(arguments)
            .output()
            .unwrap();
        assert!(output.status.success(), "{output:?}");
        println!("  {name}: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    println!();
}
