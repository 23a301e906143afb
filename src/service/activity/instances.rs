//! [`Instances`]: the activity of the instances that share a store, exchanged through Redis while there are viewers.

use std::{
    collections::BTreeMap,
    io::Read,
    sync::Arc,
    time::{Duration, Instant},
};

use flate2::{Compression, read::GzDecoder, read::GzEncoder};
use serde::{Deserialize, Serialize};

use super::history::Period;
use crate::{
    algorithm::Micros,
    store::{AnyStore, Redis},
};

/// Length of a period in the report of an instance.
pub(super) const STEP: Micros = Micros::from_secs(30);
/// Time between two exchanges.
pub(super) const INTERVAL: Duration = Duration::from_secs(2);
/// Time without a change after which a report is ignored.
const MAX_AGE: Duration = Duration::from_secs(10);
/// Maximum size of a report after decompression.
const MAX_REPORT_BYTES: u64 = 1 << 20;

/// An instance of the service.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Instance {
    /// Unique name: host and port.
    pub name: String,
    /// Version of the service.
    pub version: String,
    /// Microseconds since the Unix epoch at which the instance started.
    pub since: u64,
}

/// The report of one instance.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Report {
    pub(super) instance: Instance,
    /// Time of the report in microseconds since the Unix epoch.
    pub(super) at: u64,
    /// The last hour in periods of [`STEP`].
    pub(super) steps: Vec<Period>,
    pub(super) current: Period,
}

/// Reports of other instances.
pub(super) struct Instances {
    redis: Redis,
    /// The report of each instance, and when it changed last.
    others: BTreeMap<String, (Report, Instant)>,
    is_read: bool,
}

impl Instances {
    /// Returns `None` if the counters are in memory, so that there are no other instances.
    pub(super) fn new(store: &AnyStore) -> Option<Self> {
        let AnyStore::Redis(local) = store else {
            return None;
        };
        Some(Self { redis: local.store().clone(), others: BTreeMap::new(), is_read: false })
    }

    /// Publishes the report of this instance if any instance reads reports, and reads those of the others if `read` is
    /// set.
    ///
    /// Without an answer from Redis, nothing changes, and the reports of the other instances become outdated.
    pub(super) async fn exchange(&mut self, own: impl FnOnce() -> Report, read: bool, name: &str) {
        let report = (self.is_read || read).then(|| encode(&own()));
        let outdated = self.others.iter().filter(|(_, (_, changed))| changed.elapsed() > MAX_AGE);
        let outdated: Vec<String> = outdated.map(|(name, _)| name.clone()).collect();
        let exchanged = self.redis.exchange_activity(name, report.as_deref(), read, &outdated).await;
        if let Ok(answer) = exchanged {
            self.is_read = answer.is_read;
            let reports = answer.reports.into_iter().filter(|(instance, _)| instance != name);
            let reports: BTreeMap<_, _> = reports.filter_map(|(name, bytes)| Some((name, decode(&bytes)?))).collect();
            self.others.retain(|name, _| reports.contains_key(name));
            for (name, report) in reports {
                // Clocks of hosts differ, so the age of a report is the time since it changed.
                match self.others.get(&name) {
                    Some((known, _)) if known.at == report.at => {}
                    _ => drop(self.others.insert(name, (report, Instant::now()))),
                }
            }
        }
    }

    /// Returns the reports of the other instances that are not outdated.
    pub(super) fn others(&self) -> impl Iterator<Item = &Report> {
        self.others.values().filter(|(_, changed)| changed.elapsed() <= MAX_AGE).map(|(report, _)| report)
    }
}

/// Sums up reports: the periods by their start, and the decisions of the last seconds.
pub(super) fn sum<'a>(reports: impl Iterator<Item = &'a Report>) -> (BTreeMap<u64, Period>, Period) {
    let (mut steps, mut current) = (BTreeMap::<u64, Period>::new(), Period::default());
    for report in reports {
        for step in &report.steps {
            let zero = || Period { start: step.start, ..Period::default() };
            steps.entry(step.start).or_insert_with(zero).add(step);
        }
        current.start = current.start.max(report.current.start);
        current.add(&report.current);
    }
    (steps, current)
}

fn encode(report: &Report) -> Vec<u8> {
    let json = serde_json::to_vec(report).unwrap_or_default();
    let mut bytes = Vec::new();
    // Reading from memory cannot fail.
    let _ = GzEncoder::new(&json[..], Compression::fast()).read_to_end(&mut bytes);
    bytes
}

pub(super) fn decode(bytes: &[u8]) -> Option<Report> {
    let mut json = Vec::new();
    GzDecoder::new(bytes).take(MAX_REPORT_BYTES).read_to_end(&mut json).ok()?;
    serde_json::from_slice(&json).ok()
}

/// Returns the name of this instance: the host and the port.
pub fn instance_name(port: Option<u16>) -> Arc<str> {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").ok();
    let host = host.or_else(|| std::env::var("HOSTNAME").ok()).unwrap_or_else(|| "localhost".to_owned());
    match port {
        Some(port) => format!("{}:{port}", host.trim()).into(),
        None => host.trim().into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str, steps: &[(u64, u64)], requests: u64) -> Report {
        let period =
            |(start, requests): &(u64, u64)| Period { start: *start, requests: *requests, ..Period::default() };
        let instance = Instance { name: name.to_owned(), ..Instance::default() };
        Report { instance, at: 7, steps: steps.iter().map(period).collect(), current: period(&(100, requests)) }
    }

    #[test]
    fn reports_are_summed_by_the_start_of_their_periods() {
        let reports = [report("a", &[(30, 1), (60, 2)], 5), report("b", &[(60, 10), (90, 20)], 6)];
        let (steps, current) = sum(reports.iter());
        let requests: Vec<_> = steps.iter().map(|(start, step)| (*start, step.start, step.requests)).collect();
        assert_eq!(requests, [(30, 30, 1), (60, 60, 12), (90, 90, 20)]);
        assert_eq!((current.start, current.requests), (100, 11));
    }

    #[test]
    fn a_decoded_report_is_the_encoded_one() {
        let report = report("a", &[(30, 1)], 5);
        assert_eq!(decode(&encode(&report)), Some(report));
    }

    #[test]
    fn a_report_that_cannot_be_read_is_ignored() {
        let mut large = Vec::new();
        GzEncoder::new(std::io::repeat(b' ').take(10 << 20), Compression::fast()).read_to_end(&mut large).unwrap();
        for bytes in [&b""[..], b"{}", &large, &encode(&report("a", &[], 1))[..20]] {
            assert_eq!(decode(bytes), None);
        }
    }
}
