//! Log lines on standard error, as text or JSON, with a level for each target.

use std::io::IsTerminal;

use serde::{Deserialize, Serialize};
use tracing_subscriber::{EnvFilter, fmt, layer::SubscriberExt, util::SubscriberInitExt};

use super::TelemetryError;

/// What is logged, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct LogSettings {
    /// A level (`info`), or levels by target (`warn,sluicegate::store=debug`).
    pub level: String,
    /// `text` or `json`.
    pub format: LogFormat,
}

impl Default for LogSettings {
    fn default() -> Self {
        Self { level: "info".into(), format: LogFormat::Text }
    }
}

/// How a line looks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// For machines: one object a line.
    Json,
}

impl LogSettings {
    /// Starts logging for the whole process.
    pub fn start(&self) -> Result<(), TelemetryError> {
        let filter = EnvFilter::try_new(&self.level).map_err(|error| {
            TelemetryError(format!("telemetry.log.level {:?} is not a filter: {error}", self.level))
        })?;
        let registry = tracing_subscriber::registry().with(filter);
        let layer = fmt::layer().with_writer(std::io::stderr);
        let started = match self.format {
            LogFormat::Text => registry.with(layer.with_ansi(std::io::stderr().is_terminal())).try_init(),
            LogFormat::Json => registry.with(layer.json().flatten_event(true)).try_init(),
        };
        started.map_err(|error| TelemetryError(error.to_string()))
    }
}
