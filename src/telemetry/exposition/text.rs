//! The two formats that people can read, which are nearly the same one.

use std::{
    borrow::Cow,
    fmt::{Result, Write},
};

use super::{Family, Kind, Sample, Value};
use crate::metrics::Exemplar;

pub(super) fn write(families: &[Family<'_>], open: bool) -> String {
    let mut text = String::new();
    for family in families {
        // Writing to a text does not fail.
        let _ = Writer { text: &mut text, open }.family(family);
    }
    if open {
        text.push_str("# EOF\n");
    }
    text
}

struct Writer<'t> {
    text: &'t mut String,
    /// As OpenMetrics has it.
    open: bool,
}

impl Writer<'_> {
    fn family(&mut self, family: &Family<'_>) -> Result {
        let name = &*family.name;
        // Names stay what they are in the text format, or dashboards would have to know which one was asked for: a
        // counter that does not end in `_total` is of unknown type in OpenMetrics, which wants that of counters.
        let (base, kind) = match (family.kind, name.strip_suffix("_total")) {
            (Kind::Counter, Some(base)) if self.open => (base, "counter"),
            (Kind::Counter, None) if self.open => (name, "unknown"),
            (Kind::Counter, _) => (name, "counter"),
            (Kind::Gauge, _) => (name, "gauge"),
            (Kind::Histogram, _) => (name, "histogram"),
            (Kind::Summary, _) => (name, "summary"),
        };
        writeln!(self.text, "# HELP {base} {}", escape(&family.help, self.open))?;
        writeln!(self.text, "# TYPE {base} {kind}")?;
        family.samples.iter().try_for_each(|sample| self.sample(family, sample))
    }

    fn sample(&mut self, Family { name, kind, .. }: &Family<'_>, sample: &Sample<'_>) -> Result {
        let all = match &sample.value {
            Value::Number(number) => return self.line(name, "", sample, None, *number, None),
            Value::Distribution(all) => all,
        };
        let buckets: &[_] = if *kind == Kind::Histogram { &all.buckets } else { &[] };
        for (bound, count, exemplar) in buckets {
            let bound = match self.open && bound.is_finite() {
                true => format!("{bound:?}"),
                false => number(*bound),
            };
            self.line(name, "_bucket", sample, Some(&bound), *count as f64, exemplar.as_ref())?;
        }
        self.line(name, "_sum", sample, None, all.sum, None)?;
        self.line(name, "_count", sample, None, all.count as f64, None)
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
        let mut between = '{';
        for (name, value) in labels.chain(bound.map(|bound| ("le", bound))) {
            write!(self.text, "{between}{name}=\"{}\"", escape(value, true))?;
            between = ',';
        }
        let end = if between == ',' { "}" } else { "" };
        write!(self.text, "{end} {}", number(value))?;
        if let Some(Exemplar { trace, seconds, at }) = exemplar.filter(|_| self.open) {
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
