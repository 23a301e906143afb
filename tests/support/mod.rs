//! Real servers on free ports, and waiting for conditions instead of sleeping.

pub(crate) mod certificates;
pub(crate) mod control_plane;
pub(crate) mod envoy;
pub(crate) mod operator;
pub(crate) mod plain;
pub(crate) mod proxy;
pub(crate) mod redis;
pub(crate) mod redis_many;
pub(crate) mod server;

use std::{
    path::PathBuf,
    time::{Duration, Instant},
};

use sluicegate::{algorithm::Decision, store::HitDecisions};

use self::plain::{Descriptor, Request};
pub(crate) use self::{
    operator::Operator,
    proxy::{Fault, Proxy},
    redis::RedisServer,
    redis_many::{RedisCluster, Sentinels, ring},
    server::Server,
};

/// Nothing that works takes this long.
pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// Waits until the condition gives a value.
pub(crate) fn until<T>(what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The same, for conditions that have to be asked.
pub(crate) async fn until_async<T>(what: &str, mut condition: impl AsyncFnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + DEADLINE;
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(Instant::now() < deadline, "waited in vain for: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// A file of the repository.
pub(crate) fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(path)
}

/// Something that `tests/setup.sh` installed.
pub(crate) fn tool(name: &str) -> PathBuf {
    let path = repository("target/test-tools/bin").join(name);
    assert!(path.exists(), "{} is missing: run tests/setup.sh (make test does)", path.display());
    path
}

/// A folder of rule files.
pub(crate) fn rules(files: &[(&str, &str)]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        std::fs::write(folder.path().join(name), text).unwrap();
    }
    folder
}

/// Decisions on all hits, from a store that can decide.
pub(crate) fn all(answers: HitDecisions) -> Vec<Decision> {
    answers.into_iter().map(|answer| answer.unwrap().decision).collect()
}

/// A request with one descriptor.
pub(crate) fn ask(domain: &str, entries: &[(&str, &str)]) -> Request {
    Request::new(domain).descriptor(descriptor(entries))
}

pub(crate) fn descriptor(entries: &[(&str, &str)]) -> Descriptor {
    entries.iter().fold(Descriptor::new(), |descriptor, (key, value)| descriptor.entry(*key, *value))
}
