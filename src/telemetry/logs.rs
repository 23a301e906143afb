//! [`LogSettings`]: log lines on standard error, as text or JSON, with a level for each target.

use std::io::IsTerminal;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    filter::{ParseError, Targets},
    fmt::{self, FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt,
    registry::LookupSpan,
    util::SubscriberInitExt,
};

use super::{TelemetryError, one_line::OneLine, wall_clock};

/// Settings of the log.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct LogSettings {
    /// Minimum level (`info`), or levels by target (`warn,sluicegate::store=debug`).
    pub level: String,
    /// Format of log lines: `text`, `json` or `logstash`.
    pub format: LogFormat,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Text }
    }
}

/// Format of log lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text for people.
    #[default]
    Text,
    /// JSON, one object per line.
    Json,
    /// JSON with the field names of Logstash, like envoyproxy/ratelimit.
    Logstash,
}

impl LogSettings {
    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        if !is_level(&self.level) {
            return Some(
                "telemetry.log.level must be off, error, warn, info, debug or trace, or directives such as info,h2=debug",
            );
        }
        None
    }

    /// Starts logging for the whole process.
    ///
    /// # Errors
    ///
    /// Returns an error if the level is invalid or if a logger is already set.
    pub fn start(&self) -> Result<(), TelemetryError> {
        let targets = targets(&self.level)
            .map_err(|error| TelemetryError(format!("invalid telemetry.log.level {:?}: {error}", self.level)))?;
        let registry = tracing_subscriber::registry().with(targets);
        let has_colours = self.format == LogFormat::Text && std::io::stderr().is_terminal();
        let layer = fmt::layer().with_writer(move || OneLine::stderr(has_colours));
        let started = match self.format {
            LogFormat::Text => registry.with(layer.with_ansi(has_colours)).try_init(),
            LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
            LogFormat::Logstash => registry.with(layer.event_format(Logstash)).try_init(),
        };
        started.map_err(|error| TelemetryError(error.to_string()))
    }
}

/// Returns whether a text can be meant as `telemetry.log.level`. A single word other than a level or `sluicegate` is
/// not: the filter would take it for a module, log everything of this module, and nothing of all others. A filter by
/// span or field (`target[span]=level`) is not, either: the filter would take it for a module that does not exist.
fn is_level(text: &str) -> bool {
    let levels = ["off", "error", "warn", "info", "debug", "trace"];
    let is_word = text.chars().all(|letter| letter.is_ascii_alphabetic());
    let is_known = levels.iter().any(|level| level.eq_ignore_ascii_case(text));
    is_known || !is_word && !text.contains('[') || text == "sluicegate"
}

/// Parses `telemetry.log.level`.
fn targets(level: &str) -> Result<Targets, ParseError> {
    // h2 warns of each flooded connection: a caller could fill the log. They are counted instead (`CallerErrors`).
    let mut directives = String::from("h2=error");
    for directive in level.split(',').map(str::trim) {
        if !directive.is_empty() {
            directives.push(',');
            directives.push_str(directive);
        }
    }
    directives.parse()
}

/// Formatter that writes `@timestamp`, `@message`, `level` and `logger`, and the event's own fields.
struct Logstash;

impl<S, N> FormatEvent<S, N> for Logstash
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(&self, _: &FmtContext<'_, S, N>, mut writer: Writer<'_>, event: &Event<'_>) -> std::fmt::Result {
        let mut line = JsonLine(Map::new());
        event.record(&mut line);
        let level = match *event.metadata().level() {
            Level::ERROR => "error",
            Level::WARN => "warning",
            Level::INFO => "info",
            Level::DEBUG => "debug",
            Level::TRACE => "trace",
        };
        let message = line.0.remove("message").unwrap_or_default();
        let now = humantime::format_rfc3339_nanos(wall_clock()).to_string();
        line.0.extend([
            ("@timestamp".to_owned(), now.into()),
            ("@message".to_owned(), message),
            ("level".to_owned(), level.into()),
            ("logger".to_owned(), event.metadata().target().into()),
        ]);
        writeln!(writer, "{}", Value::Object(line.0))
    }
}

struct JsonLine(Map<String, Value>);

impl JsonLine {
    fn add(&mut self, field: &Field, value: impl Into<Value>) {
        self.0.insert(field.name().to_owned(), value.into());
    }
}

impl Visit for JsonLine {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.add(field, format!("{value:?}"));
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.add(field, value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.add(field, value);
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.add(field, value);
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.add(field, value);
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.add(field, value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn h2_has_its_own_level_unless_it_is_named() {
        for (level, h2, store, http) in [
            ("info", Level::ERROR, Level::INFO, Level::INFO),
            ("warn, sluicegate::store=DEBUG,", Level::ERROR, Level::DEBUG, Level::WARN),
            ("info,h2=debug", Level::DEBUG, Level::INFO, Level::INFO),
        ] {
            let targets = targets(level).unwrap();
            for (target, expected) in [("h2::proto", h2), ("sluicegate::store", store), ("sluicegate::http", http)] {
                let is_logged = |level| targets.would_enable(target, &level);
                let levels = [Level::ERROR, Level::WARN, Level::INFO, Level::DEBUG, Level::TRACE];
                let most = levels.into_iter().rfind(|level| is_logged(*level));
                assert_eq!(most, Some(expected), "{target} with {level:?}");
            }
        }
        assert!(targets("info,h2=loud").is_err());
    }

    #[test]
    fn a_level_that_would_match_nothing_is_rejected() {
        let problem = |level: &str| LogSettings { level: level.to_owned(), ..LogSettings::default() }.problem();
        for level in ["INFO", "off", "sluicegate", "warn,sluicegate::store=debug"] {
            assert_eq!(problem(level), None, "{level}");
        }
        for level in ["", "verbose", "info,[check]=debug", "info,sluicegate[check{domain=api}]=debug", "h2[{peer}]"] {
            assert!(problem(level).is_some(), "{level}");
        }
    }

    #[test]
    fn the_format_logstash_contains_fields_of_all_types() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let layer = fmt::layer().event_format(Logstash).with_writer(file.reopen().unwrap());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(layer), || {
            tracing::debug!(text = "a", signed = -1_i64, float = 0.5, flag = true, "done");
        });
        let line: Value = serde_json::from_str(&std::fs::read_to_string(file.path()).unwrap()).unwrap();
        let fields = ["@message", "text", "signed", "float", "flag"].map(|name| line[name].clone());
        let expected = [Value::from("done"), Value::from("a"), Value::from(-1), Value::from(0.5), Value::from(true)];
        assert_eq!(fields, expected, "{line}");
    }
}
