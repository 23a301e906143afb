//! [`Mapping`]: a mapping file of `statsd_exporter`, which turns names of statsd into names and labels of Prometheus.
//! envoyproxy/ratelimit takes the same file (`PROMETHEUS_MAPPER_YAML`).
//!
//! The only timer is the response time. It has the buckets in which it is measured, regardless of buckets and quantiles
//! in the file. `observer_type: histogram` writes the measured buckets; otherwise only count and sum are written.

#[cfg(any(test, fuzzing))]
pub mod fuzz;

use std::{borrow::Cow, collections::BTreeMap, path::Path};

use config::{File, Source};
use regex_lite::Regex;
use serde::Deserialize;
use sluicegate_files as files;

use super::{
    RESPONSE_TIME, TelemetryError, expand,
    exposition::{Family, Kind, Sample, Value},
};
use crate::{
    metrics::{Distribution, Totals},
    yaml::Yaml,
};

/// Maximum size of a mapping file, in bytes.
const MAX_FILE_BYTES: u64 = 16 << 20;

/// Milliseconds per second: statsd has the response time in milliseconds.
const MILLISECONDS: f64 = 1e3;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MappingFile {
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    mappings: Vec<Entry>,
}

/// A supported key without an effect: options of timers, and the time after which an unused series ends.
type Ignored = serde::de::IgnoredAny;

#[derive(Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Defaults {
    #[serde(alias = "timer_type")]
    observer_type: Observer,
    match_type: MatchType,
    glob_disable_ordering: bool,
    ttl: Ignored,
    buckets: Ignored,
    quantiles: Ignored,
    summary_options: Ignored,
    histogram_options: Ignored,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(dead_code, reason = "ignored keys are only checked for their names")]
struct Entry {
    r#match: String,
    match_type: Option<MatchType>,
    match_metric_type: Option<MetricType>,
    name: String,
    #[serde(default)]
    labels: BTreeMap<String, String>,
    #[serde(default)]
    help: String,
    #[serde(default)]
    action: Action,
    scale: Option<f64>,
    #[serde(alias = "timer_type")]
    observer_type: Option<Observer>,
    #[serde(default)]
    honor_labels: Ignored,
    #[serde(default)]
    ttl: Ignored,
    #[serde(default)]
    buckets: Ignored,
    #[serde(default)]
    quantiles: Ignored,
    #[serde(default)]
    summary_options: Ignored,
    #[serde(default)]
    histogram_options: Ignored,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Observer {
    #[default]
    Summary,
    Histogram,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MatchType {
    #[default]
    Glob,
    Regex,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MetricType {
    Counter,
    Gauge,
    #[serde(alias = "timer")]
    Observer,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Action {
    #[default]
    Map,
    Drop,
}

impl Entry {
    fn applies_to(&self, kind: MetricType) -> bool {
        self.match_metric_type.is_none_or(|wanted| wanted == kind)
    }
}

/// A parsed mapping file.
#[derive(Debug)]
pub(super) struct Mapping {
    /// Entries of the match type `glob` with the parts of `match` between dots, in the order in which they are tried.
    globs: Vec<(Vec<String>, Entry)>,
    /// Entries of the match type `regex`, which are tried after the globs.
    patterns: Vec<(Regex, Entry)>,
    observer: Observer,
}

/// The Prometheus metric of a statsd name.
#[derive(Debug, PartialEq)]
struct Mapped<'m> {
    name: String,
    labels: Labels<'m>,
    help: &'m str,
    scale: f64,
    kind: Kind,
}

impl Mapping {
    /// Reads a mapping file; `None` if the file does not exist.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, TelemetryError> {
        let parsed = match files::read_to_string(path, MAX_FILE_BYTES) {
            Ok(text) => Self::parse(&text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => Err(error.to_string()),
        };
        match parsed {
            Ok(mapping) => Ok(Some(mapping)),
            Err(error) => Err(TelemetryError(format!("{}: {error}", path.display()))),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        // Not a `Config`, which takes a key such as `a[9]` for the tenth element of a list, of any length.
        let table = File::from_str(text, Yaml).collect();
        let file = table.and_then(|table| MappingFile::deserialize(config::Value::new(None, table)));
        let MappingFile { defaults, mappings } = file.map_err(|error| error.to_string())?;
        let mut globs = Vec::new();
        let mut patterns = Vec::new();
        for entry in mappings {
            for name in entry.labels.keys() {
                let mut letters = name.chars();
                let starts_well = letters.next().is_some_and(|letter| letter.is_ascii_alphabetic() || letter == '_');
                if !starts_well || letters.any(|letter| !letter.is_ascii_alphanumeric() && letter != '_') {
                    return Err(format!("invalid label name {name:?}"));
                }
            }
            if entry.name.is_empty() {
                return Err(format!("the mapping of {:?} has no name", entry.r#match));
            }
            match entry.match_type.unwrap_or(defaults.match_type) {
                MatchType::Regex => {
                    let pattern = Regex::new(&entry.r#match);
                    let pattern = pattern.map_err(|error| format!("invalid match {:?}: {error}", entry.r#match))?;
                    patterns.push((pattern, entry));
                }
                MatchType::Glob => {
                    let segments: Vec<String> = entry.r#match.split('.').map(str::to_owned).collect();
                    if segments.iter().any(|segment| segment.is_empty() || segment != "*" && segment.contains('*')) {
                        return Err(format!(
                            "invalid match {:?}: `*` must stand alone between two dots",
                            entry.r#match
                        ));
                    }
                    globs.push((segments, entry));
                }
            }
        }
        if defaults.glob_disable_ordering {
            // The most specific match comes first: at the first segment that differs, a literal precedes a `*`.
            globs.sort_by_cached_key(|(segments, _)| segments.iter().map(|segment| segment == "*").collect::<Vec<_>>());
        }
        Ok(Self { globs, patterns, observer: defaults.observer_type })
    }

    /// Returns all counters under their new names, and the response time.
    pub(super) fn families(&self, totals: &Totals, response_time: Distribution) -> Vec<Family<'_>> {
        let mut families = Families::default();
        for (name, total) in totals {
            if let Some(mapped) = self.map(name, MetricType::Counter) {
                let value = Value::Number(*total as f64 * mapped.scale);
                families.add(mapped, value);
            }
        }
        if let Some(mapped) = self.map(RESPONSE_TIME, MetricType::Observer) {
            let units = MILLISECONDS * mapped.scale;
            let is_seconds = (units - 1.0).abs() < 1e-9;
            let scaled = if is_seconds { response_time } else { response_time.scaled(units) };
            families.add(mapped, Value::Distribution(scaled));
        }
        families.into_vec()
    }

    /// Returns whether the file has an entry for the statsd name of a counter.
    pub(super) fn has_entry(&self, name: &str) -> bool {
        let kind = MetricType::Counter;
        self.globs.iter().any(|(segments, entry)| entry.applies_to(kind) && captured(segments, name).is_some())
            || self.patterns.iter().any(|(pattern, entry)| entry.applies_to(kind) && pattern.is_match(name))
    }

    /// Returns the metric for a statsd name; `None` if the file drops it.
    fn map(&self, name: &str, kind: MetricType) -> Option<Mapped<'_>> {
        for (segments, entry) in &self.globs {
            if entry.applies_to(kind)
                && let Some(captured) = captured(segments, name)
            {
                return self.mapped(entry, kind, |template| fill(template, name, &captured));
            }
        }
        for (pattern, entry) in &self.patterns {
            if entry.applies_to(kind)
                && let Some(captures) = pattern.captures(name)
            {
                return self.mapped(entry, kind, |template| expand(&captures, template));
            }
        }
        let kind = self.kind(kind, None);
        Some(Mapped { name: escaped(name), labels: Vec::new(), help: "", scale: 1.0, kind })
    }

    fn mapped<'m>(&'m self, entry: &'m Entry, kind: MetricType, fill: impl Fn(&str) -> String) -> Option<Mapped<'m>> {
        if entry.action == Action::Drop {
            return None;
        }
        Some(Mapped {
            name: escaped(&fill(&entry.name)),
            labels: entry.labels.iter().map(|(name, template)| (name.into(), fill(template).into())).collect(),
            help: &entry.help,
            scale: entry.scale.unwrap_or(1.0),
            kind: self.kind(kind, entry.observer_type),
        })
    }

    fn kind(&self, kind: MetricType, observer: Option<Observer>) -> Kind {
        match (kind, observer.unwrap_or(self.observer)) {
            (MetricType::Counter, _) => Kind::Counter,
            (MetricType::Gauge, _) => Kind::Gauge,
            (MetricType::Observer, Observer::Histogram) => Kind::Histogram,
            (MetricType::Observer, Observer::Summary) => Kind::Summary,
        }
    }
}

/// Metrics by name.
#[derive(Default)]
struct Families<'f>(BTreeMap<String, MappedFamily<'f>>);

/// A metric without its name.
struct MappedFamily<'f> {
    help: &'f str,
    kind: Kind,
    samples: BTreeMap<Labels<'f>, Value>,
}

type Labels<'f> = Vec<(Cow<'f, str>, Cow<'f, str>)>;

impl<'f> Families<'f> {
    /// Adds a value. Numbers with the same name and labels are summed.
    ///
    /// Values without a name are omitted. The first value decides the type of a metric, and values of another type are
    /// omitted too.
    fn add(&mut self, Mapped { name, labels, help, kind, .. }: Mapped<'f>, value: Value) {
        if name.is_empty() {
            return;
        }
        let family = self.0.entry(name).or_insert_with(|| MappedFamily { help, kind, samples: BTreeMap::new() });
        if family.kind != kind {
            return;
        }
        match (family.samples.get_mut(&labels), value) {
            (Some(Value::Number(sum)), Value::Number(number)) => *sum += number,
            (Some(_), _) => {}
            (None, value) => drop(family.samples.insert(labels, value)),
        }
    }

    fn into_vec(self) -> Vec<Family<'f>> {
        let mut families = Vec::new();
        for (name, MappedFamily { help, kind, samples }) in self.0 {
            let samples = samples.into_iter().map(|(labels, value)| Sample { labels, value }).collect();
            families.push(Family { name: name.into(), help: help.into(), kind, samples });
        }
        families
    }
}

/// Returns the parts of `name` at the `*` segments; `None` if the name does not match.
fn captured<'n>(segments: &[String], name: &'n str) -> Option<Vec<&'n str>> {
    let mut names = name.split('.');
    let mut captured = Vec::new();
    for segment in segments {
        let part = names.next()?;
        if segment == "*" {
            captured.push(part);
        } else if segment != part {
            return None;
        }
    }
    names.next().is_none().then_some(captured)
}

/// Expands a template: `$1` and `${1}` are the first captured part, `$0` is `name`, and other references are empty.
fn fill(template: &str, name: &str, captured: &[&str]) -> String {
    let mut text = String::new();
    let mut remaining = template;
    while let Some(at) = remaining.find('$') {
        text += &remaining[..at];
        let after_dollar = &remaining[at + 1..];
        let inner = after_dollar.strip_prefix('{').unwrap_or(after_dollar);
        let after =
            inner.trim_start_matches(|letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '$');
        let reference = &inner[..inner.len() - after.len()];
        if reference.is_empty() {
            text.push('$');
            remaining = after_dollar;
            continue;
        }
        text += match reference.parse::<usize>() {
            Ok(0) => name,
            Ok(number) => captured.get(number - 1).copied().unwrap_or_default(),
            Err(_) => "",
        };
        remaining = after.strip_prefix('}').unwrap_or(after);
    }
    text + remaining
}

/// Replaces characters that Prometheus does not allow in names.
fn escaped(name: &str) -> String {
    let starts_with_digit = name.starts_with(|letter: char| letter.is_ascii_digit());
    let mut text = String::from(if starts_with_digit { "_" } else { "" });
    let mut previous = ' ';
    for letter in name.chars() {
        // Consecutive dashes are replaced by one underscore.
        if letter != '-' || previous != '-' {
            text.push(if letter.is_ascii_alphanumeric() { letter } else { '_' });
        }
        previous = letter;
    }
    text
}

#[cfg(test)]
mod tests;
