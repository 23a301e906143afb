//! [`TestMeter`]: the metrics of a test.

use std::collections::BTreeMap;

use super::{Instrument, InstrumentKind, Meter, Number, Registry};

/// A meter that returns the counters to a test.
#[derive(Default)]
pub struct TestMeter(Registry);

impl TestMeter {
    /// Returns the counters of integers by their names, each with the sum of its series.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let mut counters = BTreeMap::new();
        for metric in self.0.collect() {
            if metric.kind != InstrumentKind::Counter {
                continue;
            }
            for series in &metric.series {
                if let Number::U64(value) = series.value {
                    *counters.entry(metric.name.to_string()).or_default() += value;
                }
            }
        }
        counters
    }
}

impl Meter for TestMeter {
    fn register(&self, instrument: Instrument) {
        self.0.register(instrument);
    }
}
