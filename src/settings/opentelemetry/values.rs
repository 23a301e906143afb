//! Parsers for the values of variables, as the specification of OpenTelemetry defines them.

use std::time::Duration;

use http::{HeaderName, HeaderValue};
use percent_encoding::percent_decode_str;
use toml::Value;

use super::super::variables::{has_credentials, is_url};

/// A function that converts a variable's value to a setting's value. Errors contain no part of the value.
pub(super) type Parser = fn(&str) -> Result<Value, &'static str>;

pub(super) fn text(text: &str) -> Result<Value, &'static str> {
    Ok(text.into())
}

pub(super) fn url(text: &str) -> Result<Value, &'static str> {
    if !is_url(text) {
        return Err("it is not a URL such as http://host:4317");
    }
    if has_credentials(text) {
        return Err("it contains credentials, which belong to OTEL_EXPORTER_OTLP_HEADERS");
    }
    Ok(text.into())
}

/// Parses `name=value,…` with percent-encoded values. As in envoyproxy/ratelimit, an invalid pair is skipped.
pub(super) fn headers(text: &str) -> Result<Value, &'static str> {
    let mut headers = Vec::new();
    for pair in text.split(',') {
        if let Some(header) = parse_header(pair) {
            headers.push(header.into());
        }
    }
    if headers.is_empty() {
        return Err("it contains no header such as name=value");
    }
    Ok(Value::Array(headers))
}

fn parse_header(pair: &str) -> Option<String> {
    let (name, value) = pair.split_once('=')?;
    let name = HeaderName::try_from(name.trim()).ok()?;
    let value = percent_decode_str(value).decode_utf8().ok()?;
    let value = value.trim();
    // The names of binary metadata of gRPC end in `-bin`.
    if HeaderValue::from_str(value).is_err() || name.as_str().ends_with("-bin") {
        return None;
    }
    Some(format!("{name}={value}"))
}

/// Parses `name=value,…` with percent-encoded values. As in envoyproxy/ratelimit, an invalid pair is skipped, and a value
/// that cannot be decoded is used as it is.
pub(super) fn attributes(text: &str) -> Result<Value, &'static str> {
    let mut attributes = Vec::new();
    for pair in text.split(',') {
        let Some((name, value)) = pair.split_once('=') else {
            continue;
        };
        let name = name.trim();
        let value = value.trim();
        if name.is_empty() {
            continue;
        }
        let decoded = percent_decode_str(value).decode_utf8();
        let decoded = decoded.as_deref().unwrap_or(value);
        attributes.push(format!("{name}={decoded}").into());
    }
    if attributes.is_empty() {
        return Err("it contains no attribute such as name=value");
    }
    Ok(Value::Array(attributes))
}

pub(super) fn milliseconds(text: &str) -> Result<Value, &'static str> {
    let milliseconds: u32 = text.parse().unwrap_or(0);
    if milliseconds == 0 {
        return Err("it is not a number of milliseconds between 1 and 4294967295");
    }
    let duration = Duration::from_millis(milliseconds.into());
    Ok(humantime::format_duration(duration).to_string().into())
}

pub(super) fn protocol(text: &str) -> Result<Value, &'static str> {
    match text {
        "grpc" => Ok("grpc".into()),
        "http/protobuf" => Ok("http".into()),
        _ => Err("it is neither grpc nor http/protobuf"),
    }
}

pub(super) fn compression(text: &str) -> Result<Value, &'static str> {
    match text {
        "gzip" | "none" => Ok(text.into()),
        _ => Err("it is neither gzip nor none"),
    }
}

/// Parses `OTEL_SDK_DISABLED`, and returns whether exports are enabled. As in the specification, only `true` disables
/// them.
pub(super) fn enabled(text: &str) -> Result<Value, &'static str> {
    Ok(Value::from(!text.eq_ignore_ascii_case("true")))
}

/// Returns the share of requests for which `sampler` starts a trace, from 0 to 1. `argument` is the value of
/// `OTEL_TRACES_SAMPLER_ARG`.
pub(super) fn sample_ratio(sampler: &str, argument: Option<&str>) -> Result<f64, &'static str> {
    match sampler {
        "parentbased_always_on" => Ok(1.0),
        "parentbased_always_off" => Ok(0.0),
        "parentbased_traceidratio" => {
            let ratio = argument.unwrap_or("1").parse().unwrap_or(f64::NAN);
            if !(0.0..=1.0).contains(&ratio) {
                return Err("OTEL_TRACES_SAMPLER_ARG is not between 0 and 1");
            }
            Ok(ratio)
        }
        _ => Err("only parentbased_always_on, parentbased_always_off and parentbased_traceidratio are supported"),
    }
}
