//! Load test with nghttp2's `h2load`, which repeats one request.

use std::{fs, process::Command};

use prost::Message;
use sluicegate_proto::envoy::{
    extensions::common::ratelimit::v3::{RateLimitDescriptor, rate_limit_descriptor::Entry},
    service::ratelimit::v3::RateLimitRequest,
};

use crate::{REQUESTS, process::Process};

pub(crate) const METHOD: &str = "envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit";

/// Runs the load test. Returns calls per second, and p50 and p99 in microseconds.
pub(crate) fn run(process: &Process) -> (f64, f64, f64) {
    let folder = tempfile::tempdir().unwrap();
    let (body, log) = (folder.path().join("body"), folder.path().join("log"));
    fs::write(&body, frame()).unwrap();
    let output = Command::new("h2load")
        .args(["-n", &REQUESTS.to_string(), "-c", "10", "-m", "20", "-d"])
        .arg(&body)
        .args(["-H", "content-type: application/grpc", "-H", "te: trailers", "--log-file"])
        .arg(&log)
        .arg(format!("http://{}/{METHOD}", process.address))
        .output()
        .expect("h2load is missing (Debian: apt-get install nghttp2-client)");
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.contains(&format!("{REQUESTS} succeeded, 0 failed, 0 errored")), "{text}");
    let per_second = text.split(", ").find_map(|part| part.strip_suffix(" req/s")?.parse().ok()).unwrap();
    // Each line contains the start time, the HTTP status and the duration in microseconds.
    let log = fs::read_to_string(&log).unwrap();
    let mut latencies: Vec<f64> = log.lines().map(|line| line.rsplit('\t').next().unwrap().parse().unwrap()).collect();
    latencies.sort_by(f64::total_cmp);
    (per_second, latencies[latencies.len() / 2], latencies[latencies.len() * 99 / 100])
}

fn frame() -> Vec<u8> {
    let entry = Entry { key: "user".into(), value: "alice".into() };
    let descriptor = RateLimitDescriptor { entries: vec![entry], ..RateLimitDescriptor::default() };
    let message = RateLimitRequest { domain: "bench".into(), descriptors: vec![descriptor], hits_addend: 0 };
    framed(&message.encode_to_vec())
}

/// Adds the gRPC frame header to a message.
pub(crate) fn framed(message: &[u8]) -> Vec<u8> {
    let mut frame = vec![0];
    frame.extend_from_slice(&u32::try_from(message.len()).unwrap().to_be_bytes());
    frame.extend_from_slice(message);
    frame
}
