//! [`TestMeter`]: the metrics of a test.

use std::collections::BTreeMap;

use super::{Callback, Instrument, InstrumentKind, Meter, Observer};
use parking_lot::Mutex;

/// A meter that returns the counters to a test.
#[derive(Default)]
pub struct TestMeter(Mutex<Vec<Instrument>>);

impl TestMeter {
    /// Returns the counters of integers by their names, each with the sum of its series.
    pub fn counters(&self) -> BTreeMap<String, u64> {
        let mut counters = BTreeMap::new();
        for instrument in self.0.lock().iter() {
            let Callback::U64(read) = &instrument.callback else {
                continue;
            };
            if instrument.kind != InstrumentKind::Counter {
                continue;
            }
            let mut sum = 0;
            read(&mut Observer::new(&mut |value, _| sum += value));
            counters.insert(instrument.name.to_string(), sum);
        }
        counters
    }
}

impl Meter for TestMeter {
    fn register(&self, instrument: Instrument) {
        self.0.lock().push(instrument);
    }
}
