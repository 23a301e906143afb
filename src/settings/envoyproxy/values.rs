//! Parsers for the values of variables, which accept the same forms as Go does.

use std::{
    net::{ToSocketAddrs, UdpSocket},
    time::Duration,
};

use toml::Value;

/// A function that converts a variable's value to a setting's value. The error completes a sentence: `NAME=value …`.
pub(super) type Parser = fn(&str) -> Result<Value, String>;

/// Approximate memory that a cached denial uses.
const BYTES_PER_CACHED_DENIAL: u64 = 250;
/// Stands for an unlimited time.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

pub(super) fn text(text: &str) -> Result<Value, String> {
    Ok(text.into())
}

/// Parses a boolean as Go's `strconv.ParseBool` does.
pub(super) fn is_true(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err("is not a boolean (true or false)".into()),
    }
}

pub(super) fn flag(text: &str) -> Result<Value, String> {
    is_true(text).map(Value::from)
}

pub(super) fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "is not a number".into())
}

pub(super) fn ratio(text: &str) -> Result<Value, String> {
    text.parse::<f64>().map(Value::from).map_err(|_| "is not a number".into())
}

/// Parses a duration as Go's `time.ParseDuration` does: numbers with units (`1h30m`, `1.5s`), or 0 without a unit.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let error = || "is not a duration such as 10s".to_owned();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut remaining, mut seconds) = (text, 0.0);
    while !remaining.is_empty() {
        let digits = remaining.find(|letter: char| !letter.is_ascii_digit() && letter != '.').ok_or_else(error)?;
        let (number, unit) = remaining.split_at(digits);
        let end = unit.find(|letter: char| letter.is_ascii_digit() || letter == '.').unwrap_or(unit.len());
        let (unit, rest_of_text) = unit.split_at(end);
        let unit = match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            _ => return Err(error()),
        };
        seconds += number.parse::<f64>().map_err(|_| error())? * unit;
        remaining = rest_of_text;
    }
    if text.is_empty() { Err(error()) } else { Duration::try_from_secs_f64(seconds).map_err(|_| error()) }
}

/// Formats a duration as in settings files.
pub(super) fn format_duration(duration: Duration) -> Value {
    humantime::format_duration(duration).to_string().into()
}

pub(super) fn interval(text: &str) -> Result<Value, String> {
    duration(text).map(format_duration)
}

/// Parses a maximum age, where 0 means no maximum in envoyproxy/ratelimit.
pub(super) fn age(text: &str) -> Result<Value, String> {
    let age = duration(text)?;
    Ok(format_duration(if age.is_zero() { CENTURY } else { age }))
}

/// Parses a log level of Go's logrus.
pub(super) fn level(text: &str) -> Result<Value, String> {
    Ok(match text.to_lowercase().as_str() {
        "panic" | "fatal" | "error" => "error",
        "warn" | "warning" => "warn",
        "info" => "info",
        "debug" => "debug",
        "trace" => "trace",
        _ => return Err("is not a log level (panic, fatal, error, warn, info, debug or trace)".into()),
    }
    .into())
}

/// Parses a log format. As in envoyproxy/ratelimit, every value except `json` means text.
pub(super) fn log_format(text: &str) -> Result<Value, String> {
    Ok(if text == "json" { "logstash" } else { "text" }.into())
}

pub(super) fn cache_size(text: &str) -> Result<Value, String> {
    Ok(i64::try_from(number(text)? / BYTES_PER_CACHED_DENIAL).unwrap_or(i64::MAX).into())
}

/// Returns the address of a host and a port. An empty host means all addresses.
pub(super) fn address(host: &str, port: &str) -> Result<Value, String> {
    let port: u16 = port.parse().map_err(|_| "is not a port number".to_owned())?;
    let host = match host.trim_matches(['[', ']']) {
        // Go listens on IPv6 and IPv4, or on IPv4 alone if the host does not support IPv6.
        "" if UdpSocket::bind("[::]:0").is_err() => "0.0.0.0",
        "" => "::",
        host => host,
    };
    let mut addresses =
        (host, port).to_socket_addrs().map_err(|error| format!("cannot be combined with host {host:?}: {error}"))?;
    addresses
        .next()
        .map(|addr| addr.to_string().into())
        .ok_or_else(|| format!("cannot be combined with host {host:?}, which has no address"))
}
