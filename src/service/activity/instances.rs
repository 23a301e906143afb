//! [`InstanceActivity`]: the activity of one instance for the others, which they exchange through Redis or with their
//! peers while there are viewers. [`Others`]: the latest report of each other instance.

use std::{
    collections::BTreeMap,
    io::Read,
    sync::Arc,
    time::{Duration, Instant},
};

use flate2::{Compression, read::GzDecoder, read::GzEncoder};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::{history::Period, instance::Instance, tables::Tables};
use crate::{
    algorithm::Micros,
    store::{AnyStore, Redis},
};

/// Length of a period in the report of an instance.
pub(super) const STEP: Micros = Micros::from_secs(30);
/// Time between two exchanges.
pub const INTERVAL: Duration = Duration::from_secs(2);
/// Time without a change after which a report is ignored.
const MAX_AGE: Duration = Duration::from_secs(10);
/// Maximum number of peers with reports that are added up.
const MAX_PEERS: usize = 50;
/// Maximum size of a report after decompression.
const MAX_REPORT_BYTES: u64 = 1 << 20;

/// The activity of one instance, which it reports to the others.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(super) struct InstanceActivity {
    pub(super) instance: Instance,
    /// Time of the report in microseconds since the Unix epoch.
    pub(super) at: u64,
    /// The last hour in periods of [`STEP`].
    pub(super) steps: Vec<Period>,
    pub(super) current: Period,
    /// Absent in reports of earlier versions.
    #[serde(default)]
    pub(super) tables: Tables,
}

/// The latest reports of other instances.
#[derive(Default)]
pub(super) struct Others {
    /// The report of each instance, and when it changed last.
    reports: BTreeMap<String, (Arc<InstanceActivity>, Instant)>,
}

impl Others {
    /// Replaces the reports by those that were just read. `own` is the name of this instance.
    pub(super) fn update(&mut self, reports: Vec<(String, Vec<u8>)>, own: &str) {
        let reports = reports.into_iter().filter(|(instance, _)| instance != own);
        let reports: BTreeMap<_, _> = reports.filter_map(|(name, bytes)| Some((name, decode(&bytes)?))).collect();
        self.reports.retain(|name, _| reports.contains_key(name));
        for (name, report) in reports {
            // Clocks of hosts differ, so the age of a report is the time since it changed.
            match self.reports.get(&name) {
                Some((known, _)) if known.at == report.at => {}
                _ => drop(self.reports.insert(name, (Arc::new(report), Instant::now()))),
            }
        }
    }

    /// Adds or replaces the report of a peer, unless it comes from this instance, or too many peers have reported.
    pub(super) fn add(&mut self, address: String, report: &[u8], own: &str) {
        self.reports.retain(|_, (_, changed)| changed.elapsed() <= MAX_AGE);
        if self.reports.len() >= MAX_PEERS && !self.reports.contains_key(&address) {
            return;
        }
        if let Some(report) = decode(report).filter(|report| report.instance.name != own) {
            self.reports.insert(address, (Arc::new(report), Instant::now()));
        }
    }

    /// Returns the names of the instances with outdated reports.
    fn outdated(&self) -> Vec<String> {
        let outdated = self.reports.iter().filter(|(_, (_, changed))| changed.elapsed() > MAX_AGE);
        outdated.map(|(name, _)| name.clone()).collect()
    }

    /// Returns the reports that are not outdated.
    pub(super) fn current(&self) -> Vec<Arc<InstanceActivity>> {
        let current = self.reports.values().filter(|(_, changed)| changed.elapsed() <= MAX_AGE);
        current.map(|(report, _)| Arc::clone(report)).collect()
    }
}

/// The exchange of reports through Redis.
pub(super) struct Instances {
    redis: Redis,
    is_read: bool,
}

impl Instances {
    /// Returns the exchange, or `None` if the store is not Redis.
    pub(super) fn new(store: &AnyStore) -> Option<Self> {
        Some(Self { redis: store.redis()?.clone(), is_read: false })
    }

    /// Publishes the report of this instance if any instance reads reports, and reads those of the others if `read` is
    /// set.
    ///
    /// Without an answer from Redis, nothing changes, and the reports of the other instances become outdated.
    pub(super) async fn exchange(
        &mut self,
        report: impl FnOnce() -> Vec<u8>,
        read: bool,
        name: &str,
        others: &Mutex<Others>,
    ) {
        let report = if self.is_read || read { Some(report()) } else { None };
        let outdated = others.lock().outdated();
        let exchanged = self.redis.exchange_activity(name, report.as_deref(), read, &outdated).await;
        if let Ok(answer) = exchanged {
            self.is_read = answer.is_read;
            others.lock().update(answer.reports, name);
        }
    }
}

/// The activity of one or several instances.
pub(super) struct Sums {
    /// The last hour.
    pub(super) steps: Vec<Period>,
    /// The last 10 seconds.
    pub(super) current: Period,
}

/// Adds the reports of other instances: the periods by their start, and the decisions of the last 10 seconds.
pub(super) fn sum<'a>(own: Sums, others: impl Iterator<Item = &'a InstanceActivity>) -> Sums {
    let mut current = own.current;
    let mut steps: BTreeMap<u64, Period> = own.steps.into_iter().map(|step| (step.start, step)).collect();
    for report in others {
        for step in &report.steps {
            let sum = steps.entry(step.start).or_insert_with(|| Period { start: step.start, ..Period::default() });
            sum.add(step);
        }
        current.start = current.start.max(report.current.start);
        current.add(&report.current);
    }
    Sums { steps: steps.into_values().collect(), current }
}

pub(super) fn encode(report: &InstanceActivity) -> Vec<u8> {
    let json = serde_json::to_vec(report).unwrap_or_default();
    let mut bytes = Vec::new();
    // Reading from memory cannot fail.
    let _ = GzEncoder::new(&json[..], Compression::fast()).read_to_end(&mut bytes);
    bytes
}

pub(super) fn decode(bytes: &[u8]) -> Option<InstanceActivity> {
    let mut json = Vec::new();
    GzDecoder::new(bytes).take(MAX_REPORT_BYTES).read_to_end(&mut json).ok()?;
    let mut report: InstanceActivity = serde_json::from_slice(&json).ok()?;
    report.tables.truncate();
    Some(report)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(name: &str, steps: &[(u64, u64)], requests: u64) -> InstanceActivity {
        let period =
            |(start, requests): &(u64, u64)| Period { start: *start, requests: *requests, ..Period::default() };
        let instance = Instance { name: name.to_owned(), ..Instance::default() };
        let (steps, current) = (steps.iter().map(period).collect(), period(&(100, requests)));
        InstanceActivity { instance, at: 7, steps, current, tables: Tables::default() }
    }

    #[test]
    fn reports_are_summed_by_the_start_of_their_periods() {
        let own = report("a", &[(30, 1), (60, 2)], 5);
        let own = Sums { steps: own.steps, current: own.current };
        let Sums { steps, current } = sum(own, [&report("b", &[(60, 10), (90, 20)], 6)].into_iter());
        let requests: Vec<_> = steps.iter().map(|step| (step.start, step.requests)).collect();
        assert_eq!(requests, [(30, 1), (60, 12), (90, 20)]);
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
