//! [`OpenTelemetrySettings`]: settings from the environment variables of OpenTelemetry.
//!
//! They replace the defaults of `telemetry.otlp`. The variables of envoyproxy/ratelimit, a settings file, the variables
//! `SLUICEGATE__…` and flags have precedence. The table [`VARIABLES`] contains every variable with its effect. The table
//! in docs/reference/compatibility.md is generated from it.

mod values;
mod variables;

use std::collections::{BTreeMap, HashMap};

use toml::{Table, Value};

pub use self::variables::{Effect, VARIABLES, Variable};
use super::variables::insert;

/// Settings of traces and metrics together, each with the settings of traces or metrics alone that refine it. A general
/// setting that an operator sets replaces refinements from variables of OpenTelemetry.
pub(super) const REFINEMENTS: [(&str, [&str; 2]); 2] = [
    ("telemetry.otlp.endpoint", ["telemetry.otlp.traces_endpoint", "telemetry.otlp.metrics_endpoint"]),
    ("telemetry.otlp.headers", ["telemetry.otlp.traces_headers", "telemetry.otlp.metrics_headers"]),
];

const SERVICE_NAME: &str = "OTEL_SERVICE_NAME";
const SAMPLER: &str = "OTEL_TRACES_SAMPLER";
const SAMPLER_ARG: &str = "OTEL_TRACES_SAMPLER_ARG";
const PROTOCOL: &str = "telemetry.otlp.protocol";
const ENDPOINT: &str = "telemetry.otlp.endpoint";

/// Settings that correspond to the variables of OpenTelemetry.
#[derive(Clone, Debug, Default)]
pub struct OpenTelemetrySettings {
    /// Values by the dotted names of the settings.
    values: BTreeMap<&'static str, Value>,
    without_effect: Vec<(&'static str, &'static str)>,
}

impl OpenTelemetrySettings {
    /// Reads all variables in [`VARIABLES`] and ignores others. Invalid values have no effect.
    ///
    /// `is_compatible` is true if the variables of envoyproxy/ratelimit are read as well.
    #[must_use]
    pub fn read(environment: &HashMap<String, String>, is_compatible: bool) -> Self {
        let mut result = Self::default();
        for variable in VARIABLES {
            let Some(value) = value_of(environment, variable.name) else {
                continue;
            };
            if is_compatible && let Some(reason) = variable.overridden {
                result.without_effect.push((variable.name, reason));
                continue;
            }
            match variable.effect {
                Effect::Setting(setting, parse) => match parse(value) {
                    Ok(value) => {
                        result.values.insert(setting, value);
                    }
                    Err(reason) => result.without_effect.push((variable.name, reason)),
                },
                Effect::Ignored(reason) => result.without_effect.push((variable.name, reason)),
                Effect::Combined(_) | Effect::Sdk => {}
            }
        }
        if !is_compatible {
            result.read_service_name(value_of(environment, SERVICE_NAME));
            result.read_sampler(value_of(environment, SAMPLER), value_of(environment, SAMPLER_ARG));
            result.set_default_port();
        }
        result
    }

    /// Returns the settings as a TOML table.
    pub(super) fn table(&self) -> Table {
        let mut all = Table::new();
        for (setting, value) in &self.values {
            insert(&mut all, setting, value.clone());
        }
        all
    }

    /// Returns whether a variable sets this setting.
    pub(super) fn has(&self, setting: &str) -> bool {
        self.values.contains_key(setting)
    }

    /// Returns the variables that are set but have no effect, each with the reason.
    #[must_use]
    pub fn without_effect(&self) -> &[(&'static str, &'static str)] {
        &self.without_effect
    }

    /// Reads the name of the service, which can be one of the resource attributes, too.
    fn read_service_name(&mut self, name: Option<&str>) {
        if let Some(name) = name {
            self.values.insert("telemetry.otlp.service_name", name.into());
            return;
        }
        let attributes = self.values.get("telemetry.otlp.resource_attributes").and_then(Value::as_array);
        let mut texts = attributes.into_iter().flatten().filter_map(Value::as_str);
        let name = texts.find_map(|text| text.strip_prefix("service.name=")).map(str::to_owned);
        if let Some(name) = name {
            self.values.insert("telemetry.otlp.service_name", name.into());
        }
    }

    fn read_sampler(&mut self, sampler: Option<&str>, argument: Option<&str>) {
        let Some(sampler) = sampler else {
            if argument.is_some() {
                self.without_effect.push((SAMPLER_ARG, "OTEL_TRACES_SAMPLER is not set"));
            }
            return;
        };
        match values::sample_ratio(sampler, argument) {
            Ok(ratio) => {
                self.values.insert("telemetry.otlp.sample_ratio", ratio.into());
            }
            Err(reason) => self.without_effect.push((SAMPLER, reason)),
        }
    }

    /// Sets the endpoint to the specification's default for the protocol `http`, unless a variable sets the endpoint.
    fn set_default_port(&mut self) {
        let is_http = self.values.get(PROTOCOL).and_then(Value::as_str) == Some("http");
        if is_http && !self.has(ENDPOINT) {
            self.values.insert(ENDPOINT, "http://127.0.0.1:4318".into());
        }
    }
}

/// Returns the table of variables for the documentation, in Markdown.
#[must_use]
pub fn table() -> String {
    let mut text = "| variable | effect | in envoyproxy/ratelimit |\n| --- | --- | --- |\n".to_owned();
    for variable in VARIABLES {
        let mut effect = match variable.effect {
            Effect::Setting(setting, _) | Effect::Combined(setting) => format!("`{setting}`"),
            Effect::Sdk => "read by the library of OpenTelemetry".to_owned(),
            Effect::Ignored(reason) => format!("none: {reason}"),
        };
        if let Some(reason) = variable.overridden {
            effect += &format!("; none with the variables of envoyproxy/ratelimit: {reason}");
        }
        let there = if variable.is_read_there { "read" } else { "no effect" };
        text += &format!("| `{}` | {effect} | {there} |\n", variable.name);
    }
    text
}

/// Returns the value of a variable without surrounding spaces, or `None` if it is empty.
fn value_of<'e>(environment: &'e HashMap<String, String>, name: &str) -> Option<&'e str> {
    let value = environment.get(name)?.trim();
    if value.is_empty() { None } else { Some(value) }
}

#[cfg(test)]
mod tests;
