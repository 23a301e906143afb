//! [`Instrument`]: a counter or a gauge with a callback that reads its series, and [`Meter`], which registers it.
//!
//! With these types, components describe their metrics without a dependency on the exporters. A
//! [`Registry`](super::Registry) collects the values of all instruments for them.

use std::{borrow::Cow, cmp::Ordering, sync::Arc};

/// A registry of instruments.
pub trait Meter {
    /// Registers an instrument. Each collection calls its callback.
    fn register(&self, instrument: Instrument);
}

/// A metric with its name, its type, and a callback that reads its series.
pub struct Instrument {
    /// The name of the metric.
    pub name: Cow<'static, str>,
    /// The description of the metric.
    pub description: &'static str,
    /// The type of the metric.
    pub kind: InstrumentKind,
    /// The callback that reads the series.
    pub callback: Callback,
}

/// The type of an instrument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstrumentKind {
    /// A total that only increases.
    Counter,
    /// A value that can increase and decrease.
    Gauge,
}

/// The callback of an instrument, by the type of its values.
pub enum Callback {
    /// A callback with integers.
    U64(ReadSeries<u64>),
    /// A callback with floating-point numbers.
    F64(ReadSeries<f64>),
}

/// A function that passes the current value of each series to an [`Observer`].
pub type ReadSeries<T> = Box<dyn Fn(&mut Observer<'_, T>) + Send + Sync>;

impl Instrument {
    /// Creates a counter of integers.
    pub fn counter(
        name: impl Into<Cow<'static, str>>,
        description: &'static str,
        read: impl Fn(&mut Observer<'_, u64>) + Send + Sync + 'static,
    ) -> Self {
        let callback = Callback::U64(Box::new(read));
        Self { name: name.into(), description, kind: InstrumentKind::Counter, callback }
    }

    /// Creates a gauge of integers.
    pub fn gauge(
        name: impl Into<Cow<'static, str>>,
        description: &'static str,
        read: impl Fn(&mut Observer<'_, u64>) + Send + Sync + 'static,
    ) -> Self {
        let callback = Callback::U64(Box::new(read));
        Self { name: name.into(), description, kind: InstrumentKind::Gauge, callback }
    }

    /// Creates a counter of floating-point numbers.
    pub fn f64_counter(
        name: impl Into<Cow<'static, str>>,
        description: &'static str,
        read: impl Fn(&mut Observer<'_, f64>) + Send + Sync + 'static,
    ) -> Self {
        let callback = Callback::F64(Box::new(read));
        Self { name: name.into(), description, kind: InstrumentKind::Counter, callback }
    }

    /// Creates a gauge of floating-point numbers.
    pub fn f64_gauge(
        name: impl Into<Cow<'static, str>>,
        description: &'static str,
        read: impl Fn(&mut Observer<'_, f64>) + Send + Sync + 'static,
    ) -> Self {
        let callback = Callback::F64(Box::new(read));
        Self { name: name.into(), description, kind: InstrumentKind::Gauge, callback }
    }
}

/// The receiver of the values that a callback reads.
pub struct Observer<'o, T>(&'o mut dyn FnMut(T, &mut dyn Iterator<Item = Label>));

impl<'o, T> Observer<'o, T> {
    /// Creates an observer that calls `record` with the value and the labels of each series.
    pub fn new(record: &'o mut dyn FnMut(T, &mut dyn Iterator<Item = Label>)) -> Self {
        Self(record)
    }

    /// Records the value of the series with the given labels.
    pub fn observe(&mut self, value: T, labels: impl IntoIterator<Item = Label>) {
        (self.0)(value, &mut labels.into_iter());
    }
}

/// A label of a series.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Label {
    /// The name of the label.
    pub name: &'static str,
    /// The value of the label.
    pub value: LabelValue,
}

impl Label {
    /// Creates a label.
    pub fn new(name: &'static str, value: impl Into<LabelValue>) -> Self {
        Self { name, value: value.into() }
    }
}

/// The value of a label, which can be copied without an allocation.
#[derive(Clone, Debug)]
pub enum LabelValue {
    /// A text of the program.
    Static(&'static str),
    /// A text that was created at run time.
    Shared(Arc<str>),
}

impl LabelValue {
    /// Returns the text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        match self {
            Self::Static(value) => value,
            Self::Shared(value) => value,
        }
    }
}

impl PartialEq for LabelValue {
    fn eq(&self, other: &Self) -> bool {
        self.as_str() == other.as_str()
    }
}

impl Eq for LabelValue {}

impl PartialOrd for LabelValue {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for LabelValue {
    fn cmp(&self, other: &Self) -> Ordering {
        self.as_str().cmp(other.as_str())
    }
}

impl From<&'static str> for LabelValue {
    fn from(value: &'static str) -> Self {
        Self::Static(value)
    }
}

impl From<Arc<str>> for LabelValue {
    fn from(value: Arc<str>) -> Self {
        Self::Shared(value)
    }
}

impl From<String> for LabelValue {
    fn from(value: String) -> Self {
        Self::Shared(value.into())
    }
}

/// A meter, and the source of the values of instruments that have one series each, without labels.
pub struct Registrar<'m, T> {
    /// The meter, which the instruments are registered with.
    pub meter: &'m dyn Meter,
    /// The source, from which each collection reads the values.
    pub source: &'m Arc<T>,
}

impl<T: Send + Sync + 'static> Registrar<'_, T> {
    /// Registers a counter; collecting calls `read`.
    pub fn counter(&self, name: &'static str, description: &'static str, read: fn(&T) -> u64) {
        let source = Arc::clone(self.source);
        let read = move |observer: &mut Observer<'_, u64>| observer.observe(read(&source), []);
        self.meter.register(Instrument::counter(name, description, read));
    }

    /// Registers a gauge; collecting calls `read`.
    pub fn gauge(&self, name: &'static str, description: &'static str, read: fn(&T) -> u64) {
        let source = Arc::clone(self.source);
        let read = move |observer: &mut Observer<'_, u64>| observer.observe(read(&source), []);
        self.meter.register(Instrument::gauge(name, description, read));
    }
}
