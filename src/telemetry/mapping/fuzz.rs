//! Fuzz target: mapping files of `statsd_exporter`.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use super::{Mapping, RESPONSE_TIME};
use crate::{
    metrics::{Histogram, Totals, WorkerId},
    telemetry::exposition::Exposition,
};

/// Reads a mapping file and writes metrics with it. Every line must begin with a valid name, and no series may appear
/// twice.
pub fn statsd_mapping(input: &[u8]) {
    let Ok(mapping) = Mapping::parse(&String::from_utf8_lossy(input)) else {
        return;
    };
    let names =
        ["ratelimit.service.rate_limit.api.user_bob.total_hits", "a.b.hits", "a", "", "1-2--3.x", RESPONSE_TIME];
    let totals: Totals = names.iter().map(|name| ((*name).to_owned(), 7)).collect();
    let histogram = Histogram::new("response_time", "Time", 1);
    histogram.record(WorkerId(0), std::time::Duration::from_millis(3));
    let families = mapping.families(&totals, histogram.distribution());
    let page = Exposition::Text.write(&families);
    let page = String::from_utf8_lossy(&page);
    let mut series: Vec<&str> = Vec::new();
    for line in page.lines().filter(|line| !line.starts_with('#')) {
        let (name, value) = line.rsplit_once(' ').unwrap_or((line, ""));
        assert!(name.starts_with(|letter: char| letter.is_ascii_alphabetic() || letter == '_'), "{line:?}");
        assert!(value.parse::<f64>().is_ok(), "{line:?}");
        series.push(name);
    }
    series.sort_unstable();
    assert!(series.is_sorted_by(|one, other| one < other), "a series appears twice: {series:?}");
}
