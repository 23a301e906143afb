//! Real servers on free ports, and functions that wait for a condition instead of sleeping.

pub(crate) mod browser;
pub(crate) mod certificates;
pub(crate) mod control_plane;
pub(crate) mod disk;
pub(crate) mod envoy;
pub(crate) mod http2_frames;
mod known_fields;
pub(crate) mod memcached;
pub(crate) mod memory_group;
pub(crate) mod network;
pub(crate) mod operator;
pub(crate) mod proxy;
pub(crate) mod raw_client;
pub(crate) mod raw_grpc;
pub(crate) mod redis;
pub(crate) mod redis_topologies;
pub(crate) mod server;
pub(crate) mod transcripts;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use sluicegate::{algorithm::Decision, store::HitDecisions};

use self::raw_client::{Descriptor, Request};
pub(crate) use self::{
    browser::Browser,
    disk::Disk,
    memcached::MemcachedServer,
    operator::Operator,
    proxy::{Fault, Proxy},
    redis::RedisServer,
    redis_topologies::{RedisCluster, Sentinels, ring},
    server::{Server, fake_clock},
};

/// Maximum time to wait for a condition: no working operation takes this long, even on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// Waits until the condition returns a value, and returns the value. Panics after [`DEADLINE`].
pub(crate) fn wait_for<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Waits like [`wait_for`], for an asynchronous condition.
pub(crate) async fn wait_for_async<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "timed out waiting for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Returns the path of a file in the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Returns the path and the text of each Rust file in a folder of the repository. Paths begin with the folder.
pub(crate) fn rust_sources(folder: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(repository(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = format!("{folder}/{}", entry.file_name().into_string().unwrap());
        if entry.path().is_dir() {
            found.extend(rust_sources(&name));
        } else if name.ends_with(".rs") {
            found.push((name, std::fs::read_to_string(entry.path()).unwrap()));
        }
    }
    found
}

/// Returns the path of a program that `tests/setup.sh` installed.
pub(crate) fn tool(name: &str) -> PathBuf {
    let path = repository("target/test-tools/bin").join(name);
    assert!(path.exists(), "{} is missing: run tests/setup.sh (make test does)", path.display());
    path
}

/// Creates a temporary folder with these rule files.
pub(crate) fn rules(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// Returns the decisions about all hits. Panics if the store could not decide one.
pub(crate) fn unwrap_decisions(results: HitDecisions) -> Vec<Decision> {
    results.into_iter().map(|result| result.unwrap().decision).collect()
}

/// Builds a request with one descriptor.
pub(crate) fn request_for(domain: &str, entries: &[(&str, &str)]) -> Request {
    Request::new(domain).descriptor(descriptor(entries))
}

/// Builds a descriptor with these entries.
pub(crate) fn descriptor(entries: &[(&str, &str)]) -> Descriptor {
    entries.iter().fold(Descriptor::new(), |descriptor, (key, value)| descriptor.entry(*key, *value))
}
