//! [`Registry`]: the instruments of a program, and the current values of their series.

use std::{borrow::Cow, collections::BTreeMap};

use parking_lot::RwLock;

use super::{Callback, Instrument, InstrumentKind, Label, Meter, Observer};

/// The instruments of a program.
#[derive(Default)]
pub struct Registry(RwLock<Vec<Instrument>>);

/// A metric with the current values of its series.
#[derive(Clone, Debug)]
pub struct Metric {
    /// The name of the metric.
    pub name: Cow<'static, str>,
    /// The description of the metric.
    pub description: &'static str,
    /// The type of the metric.
    pub kind: InstrumentKind,
    /// The series, sorted by their labels.
    pub series: Vec<Series>,
}

/// The current value of a series.
#[derive(Clone, Debug, PartialEq)]
pub struct Series {
    /// The labels, sorted by name.
    pub labels: Vec<Label>,
    /// The value.
    pub value: Number,
}

/// The value of a series, by the type of its instrument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Number {
    /// An integer.
    U64(u64),
    /// A floating-point number.
    F64(f64),
}

impl Number {
    /// Returns the value as a floating-point number, which is rounded above 2⁵³.
    #[must_use]
    pub const fn as_f64(self) -> f64 {
        match self {
            Self::U64(value) => value as f64,
            Self::F64(value) => value,
        }
    }
}

impl Registry {
    /// Reads all instruments, and returns the metrics that have series, sorted by name.
    ///
    /// Instruments with the same name are one metric. Of series with the same labels, the last one counts.
    #[must_use]
    pub fn collect(&self) -> Vec<Metric> {
        let mut metrics: BTreeMap<_, Metric> = BTreeMap::new();
        for instrument in self.0.read().iter() {
            let metric = metrics.entry(instrument.name.clone()).or_insert_with(|| Metric {
                name: instrument.name.clone(),
                description: instrument.description,
                kind: instrument.kind,
                series: Vec::new(),
            });
            metric.read(&instrument.callback);
        }
        let mut metrics: Vec<_> = metrics.into_values().collect();
        metrics.retain(|metric| !metric.series.is_empty());
        for metric in &mut metrics {
            metric.sort();
        }
        metrics
    }
}

impl Meter for Registry {
    fn register(&self, instrument: Instrument) {
        self.0.write().push(instrument);
    }
}

impl Metric {
    fn read(&mut self, callback: &Callback) {
        match callback {
            Callback::U64(read) => read(&mut Observer::new(&mut |value, labels| self.push(Number::U64(value), labels))),
            Callback::F64(read) => read(&mut Observer::new(&mut |value, labels| self.push(Number::F64(value), labels))),
        }
    }

    fn push(&mut self, value: Number, labels: &mut dyn Iterator<Item = Label>) {
        let mut labels: Vec<_> = labels.collect();
        labels.sort();
        self.series.push(Series { labels, value });
    }

    /// Sorts the series, and removes all but the last of those with the same labels.
    fn sort(&mut self) {
        self.series.sort_by(|one, other| one.labels.cmp(&other.labels));
        self.series.dedup_by(|later, earlier| {
            let is_same = later.labels == earlier.labels;
            if is_same {
                earlier.value = later.value;
            }
            is_same
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instruments_with_the_same_name_are_one_metric() {
        let registry = Registry::default();
        for kind in ["b", "a"] {
            registry.register(Instrument::counter("hits_total", "Number of hits", move |observer| {
                observer.observe(1, [Label::new("kind", kind), Label::new("domain", "api")]);
            }));
        }
        registry.register(Instrument::f64_gauge("a_share", "Share", |observer| observer.observe(0.5, [])));
        let metrics = registry.collect();
        let names: Vec<_> = metrics.iter().map(|metric| &*metric.name).collect();
        assert_eq!(names, ["a_share", "hits_total"]);
        let series = |kind| Series {
            labels: vec![Label::new("domain", "api"), Label::new("kind", kind)],
            value: Number::U64(1),
        };
        assert_eq!(metrics[1].series, [series("a"), series("b")]);
        assert_eq!((metrics[0].kind, metrics[0].series[0].value), (InstrumentKind::Gauge, Number::F64(0.5)));
    }

    #[test]
    fn the_last_of_several_series_with_the_same_labels_counts() {
        let registry = Registry::default();
        registry.register(Instrument::gauge("nodes", "Number of nodes", |observer| {
            for value in [1, 3, 2] {
                observer.observe(value, [Label::new("node", "x".to_owned())]);
            }
        }));
        let values: Vec<_> = registry.collect()[0].series.iter().map(|series| series.value.as_f64()).collect();
        assert_eq!(values, [2.0]);
    }

    #[test]
    fn a_metric_has_as_many_series_as_its_instruments_read() {
        let registry = Registry::default();
        registry.register(Instrument::counter("hits_total", "Number of hits", |observer| {
            for rule in 0..10_000_u64 {
                observer.observe(rule, [Label::new("rule", rule.to_string())]);
            }
        }));
        let series = &registry.collect()[0].series;
        assert_eq!(series.len(), 10_000);
        for Series { labels, value } in series {
            assert_eq!(labels[0].value.as_str(), value.as_f64().to_string());
        }
    }

    #[test]
    fn a_metric_without_series_is_left_out() {
        let registry = Registry::default();
        registry.register(Instrument::gauge("nodes", "Number of nodes", |_| {}));
        assert!(registry.collect().is_empty());
    }
}
