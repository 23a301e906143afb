//! Names in statsd that become names and labels in Prometheus: a mapping file of statsd_exporter, as envoyproxy/ratelimit
//! takes one (`PROMETHEUS_MAPPER_YAML`).
//!
//! Of timers there is one, the response time. It has the buckets that it is measured in, whatever the file says of buckets
//! and quantiles; `observer_type: histogram` shows them, everything else the count and the sum alone.

use std::{borrow::Cow, collections::BTreeMap, path::Path};

use config::{Config, File, FileFormat};
use regex::Regex;
use serde::Deserialize;

use super::{
    RESPONSE_TIME, TelemetryError,
    exposition::{Family, Kind, Sample, Value},
};
use crate::metrics::{Distribution, Totals};

/// In a second: as statsd has the response time.
const MILLISECONDS: f64 = 1e3;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct MappingFile {
    #[serde(default)]
    defaults: Defaults,
    #[serde(default)]
    mappings: Vec<Entry>,
}

/// What may stand there and has no effect: options of timers, and when a series that is not counted any more ends.
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
#[expect(dead_code, reason = "of the ignored ones only the names are looked at")]
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

/// A mapping file that was read.
#[derive(Debug)]
pub(super) struct Mapping {
    /// Those with `*`, in the order in which they are tried.
    globs: Vec<(Vec<String>, Entry)>,
    /// They are tried after those.
    patterns: Vec<(Regex, Entry)>,
    observer: Observer,
}

/// What a name becomes.
#[derive(Debug, PartialEq)]
struct Mapped<'m> {
    name: String,
    labels: Labels<'m>,
    help: &'m str,
    scale: f64,
    kind: Kind,
}

impl Mapping {
    /// `None` where the file is not there.
    pub(super) fn read(path: &Path) -> Result<Option<Self>, TelemetryError> {
        let wrong = |error: String| TelemetryError(format!("{}: {error}", path.display()));
        match std::fs::read_to_string(path) {
            Ok(text) => Self::parse(&text).map(Some).map_err(wrong),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(wrong(error.to_string())),
        }
    }

    fn parse(text: &str) -> Result<Self, String> {
        let file = Config::builder().add_source(File::from_str(text, FileFormat::Yaml)).build();
        let file = file.and_then(Config::try_deserialize).map_err(|error| error.to_string());
        let MappingFile { defaults, mappings } = file?;
        let (mut globs, mut patterns) = (Vec::new(), Vec::new());
        for entry in mappings {
            for name in entry.labels.keys() {
                let mut letters = name.chars();
                let begins = letters.next().is_some_and(|letter| letter.is_ascii_alphabetic() || letter == '_');
                if !begins || letters.any(|letter| !letter.is_ascii_alphanumeric() && letter != '_') {
                    return Err(format!("{name:?} is no name for a label"));
                }
            }
            if entry.name.is_empty() {
                return Err(format!("what matches {:?} has no name", entry.r#match));
            }
            match entry.match_type.unwrap_or(defaults.match_type) {
                MatchType::Regex => patterns.push((Regex::new(&entry.r#match).map_err(|it| it.to_string())?, entry)),
                MatchType::Glob => {
                    let parts: Vec<String> = entry.r#match.split('.').map(str::to_owned).collect();
                    if parts.iter().any(|part| part.is_empty() || part != "*" && part.contains('*')) {
                        return Err(format!(
                            "{:?} is no match: each * is all there is between two dots",
                            entry.r#match
                        ));
                    }
                    globs.push((parts, entry));
                }
            }
        }
        if defaults.glob_disable_ordering {
            // The most specific one first, which is told by the first part in which two differ.
            globs.sort_by_cached_key(|(parts, _)| parts.iter().map(|part| part == "*").collect::<Vec<_>>());
        }
        Ok(Self { globs, patterns, observer: defaults.observer_type })
    }

    /// Everything that is counted, under its new names, and the response time.
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
        families.all()
    }

    /// `None` for what is not to be shown.
    fn map(&self, name: &str, kind: MetricType) -> Option<Mapped<'_>> {
        let concerns = |entry: &Entry| entry.match_metric_type.is_none_or(|wanted| wanted == kind);
        let glob = self.globs.iter().filter(|(_, entry)| concerns(entry));
        let glob = glob.filter_map(|(parts, entry)| Some((captured(parts, name)?, entry))).next();
        if let Some((captured, entry)) = glob {
            return self.mapped(entry, kind, |template| fill(template, name, &captured));
        }
        let pattern = self.patterns.iter().filter(|(_, entry)| concerns(entry));
        let pattern = pattern.filter_map(|(pattern, entry)| Some((pattern.captures(name)?, entry))).next();
        if let Some((captured, entry)) = pattern {
            return self.mapped(entry, kind, |template| {
                let mut text = String::new();
                captured.expand(template, &mut text);
                text
            });
        }
        let kind = self.kind(kind, None);
        Some(Mapped { name: escaped(name), labels: Vec::new(), help: "", scale: 1.0, kind })
    }

    fn mapped<'m>(&'m self, entry: &'m Entry, kind: MetricType, fill: impl Fn(&str) -> String) -> Option<Mapped<'m>> {
        let labels = entry.labels.iter().map(|(name, template)| (name.into(), fill(template).into()));
        let mapped = || Mapped {
            name: escaped(&fill(&entry.name)),
            labels: labels.collect(),
            help: &entry.help,
            scale: entry.scale.unwrap_or(1.0),
            kind: self.kind(kind, entry.observer_type),
        };
        (entry.action == Action::Map).then(mapped)
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

/// By name, and then by labels.
#[derive(Default)]
struct Families<'f>(BTreeMap<String, (&'f str, Kind, BTreeMap<Labels<'f>, Value>)>);

type Labels<'f> = Vec<(Cow<'f, str>, Cow<'f, str>)>;

impl<'f> Families<'f> {
    /// Numbers with the same name and labels are added up. A name is of one kind, that of what came first; what has none
    /// left is not shown.
    fn add(&mut self, Mapped { name, labels, help, kind, .. }: Mapped<'f>, value: Value) {
        if name.is_empty() {
            return;
        }
        let (_, known, samples) = self.0.entry(name).or_insert_with(|| (help, kind, BTreeMap::new()));
        if *known != kind {
            return;
        }
        match (samples.get_mut(&labels), value) {
            (Some(Value::Number(sum)), Value::Number(number)) => *sum += number,
            (Some(_), _) => {}
            (None, value) => drop(samples.insert(labels, value)),
        }
    }

    fn all(self) -> Vec<Family<'f>> {
        let family = |(name, (help, kind, samples)): (String, (&'f str, Kind, BTreeMap<Labels<'f>, Value>))| {
            let samples = samples.into_iter().map(|(labels, value)| Sample { labels, value });
            Family { name: name.into(), help: help.into(), kind, samples: samples.collect() }
        };
        self.0.into_iter().map(family).collect()
    }
}

/// What stands where the stars are, if the name fits.
fn captured<'n>(parts: &[String], name: &'n str) -> Option<Vec<&'n str>> {
    let mut words = name.split('.');
    let mut captured = Vec::new();
    for part in parts {
        let word = words.next()?;
        if part == "*" {
            captured.push(word);
        } else if part != word {
            return None;
        }
    }
    words.next().is_none().then_some(captured)
}

/// `$1` and `${1}` are what was captured first, and so on; `$0` is the whole name. What was not captured is nothing.
fn fill(template: &str, name: &str, captured: &[&str]) -> String {
    let mut text = String::new();
    let mut rest = template;
    while let Some(at) = rest.find('$') {
        text += &rest[..at];
        let behind = &rest[at + 1..];
        let inner = behind.strip_prefix('{').unwrap_or(behind);
        let is_part = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '$';
        let after = inner.trim_start_matches(is_part);
        let reference = &inner[..inner.len() - after.len()];
        if reference.is_empty() {
            text.push('$');
            rest = behind;
            continue;
        }
        text += match reference.parse::<usize>() {
            Ok(0) => name,
            Ok(number) => captured.get(number - 1).copied().unwrap_or_default(),
            Err(_) => "",
        };
        rest = after.strip_prefix('}').unwrap_or(after);
    }
    text + rest
}

/// As a name that Prometheus can have.
fn escaped(name: &str) -> String {
    let digit = name.starts_with(|letter: char| letter.is_ascii_digit());
    let mut text = String::from(if digit { "_" } else { "" });
    let mut before = ' ';
    for letter in name.chars() {
        // Dashes that follow each other are one.
        if letter != '-' || before != '-' {
            text.push(if letter.is_ascii_alphanumeric() { letter } else { '_' });
        }
        before = letter;
    }
    text
}

#[cfg(test)]
mod tests;
