//! The two text formats, Prometheus and OpenMetrics, which are nearly the same.

use std::{
    borrow::Cow,
    fmt::{Result, Write},
};

use super::{Family, Kind, Sample, Value};
use crate::metrics::Exemplar;

pub(super) fn write(families: &[Family<'_>], open_metrics: bool) -> String {
    let mut text = String::new();
    for family in families {
        // Writing to a `String` does not fail.
        let _ = Writer { text: &mut text, open_metrics }.family(family);
    }
    if open_metrics {
        text.push_str("# EOF\n");
    }
    text
}

struct Writer<'t> {
    text: &'t mut String,
    /// Whether to write OpenMetrics instead of Prometheus text.
    open_metrics: bool,
}

impl Writer<'_> {
    fn family(&mut self, family: &Family<'_>) -> Result {
        let name = &*family.name;
        // Metric names are the same in both formats, so that dashboards do not depend on the format. OpenMetrics
        // requires that names of counters end in `_total`, so other counters have the type `unknown` there.
        let (base, kind) = match (family.kind, name.strip_suffix("_total")) {
            (Kind::Counter, Some(base)) if self.open_metrics => (base, "counter"),
            (Kind::Counter, None) if self.open_metrics => (name, "unknown"),
            (Kind::Counter, _) => (name, "counter"),
            (Kind::Gauge, _) => (name, "gauge"),
            (Kind::Histogram, _) => (name, "histogram"),
            (Kind::Summary, _) => (name, "summary"),
        };
        writeln!(self.text, "# HELP {base} {}", escape(&family.help, self.open_metrics))?;
        writeln!(self.text, "# TYPE {base} {kind}")?;
        family.samples.iter().try_for_each(|sample| self.sample(family, sample))
    }

    fn sample(&mut self, Family { name, kind, .. }: &Family<'_>, sample: &Sample<'_>) -> Result {
        let distribution = match &sample.value {
            Value::Number(number) => return self.line(name, "", sample, None, *number, None),
            Value::Distribution(distribution) => distribution,
        };
        let buckets: &[_] = if *kind == Kind::Histogram { &distribution.buckets } else { &[] };
        for (bound, count, exemplar) in buckets {
            let bound = if self.open_metrics && bound.is_finite() { format!("{bound:?}") } else { number(*bound) };
            self.line(name, "_bucket", sample, Some(&bound), *count as f64, exemplar.as_ref())?;
        }
        self.line(name, "_sum", sample, None, distribution.sum, None)?;
        self.line(name, "_count", sample, None, distribution.count as f64, None)
    }

    fn line(
        &mut self,
        name: &str,
        suffix: &str,
        sample: &Sample<'_>,
        bound: Option<&str>,
        value: f64,
        exemplar: Option<&Exemplar>,
    ) -> Result {
        write!(self.text, "{name}{suffix}")?;
        let labels = sample.labels.iter().map(|(name, value)| (&**name, &**value));
        let mut separator = '{';
        for (name, value) in labels.chain(bound.map(|bound| ("le", bound))) {
            write!(self.text, "{separator}{name}=\"{}\"", escape(value, true))?;
            separator = ',';
        }
        let end = if separator == ',' { "}" } else { "" };
        write!(self.text, "{end} {}", number(value))?;
        if self.open_metrics
            && let Some(Exemplar { trace, seconds, at }) = exemplar
        {
            write!(self.text, " # {{trace_id=\"{:032x}\"}} {seconds} {:.3}", trace.0, at.as_secs_f64())?;
        }
        writeln!(self.text)
    }
}

fn number(number: f64) -> String {
    if number.is_infinite() { if number > 0.0 { "+Inf" } else { "-Inf" }.to_owned() } else { number.to_string() }
}

fn escape(text: &str, quotes: bool) -> Cow<'_, str> {
    if !text.contains(['\\', '\n', '"']) {
        return text.into();
    }
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    if quotes { text.replace('"', "\\\"") } else { text }.into()
}
