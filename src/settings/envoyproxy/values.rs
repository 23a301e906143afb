//! How Go reads what stands in a variable.

use std::{
    net::{ToSocketAddrs, UdpSocket},
    time::Duration,
};

use toml::Value;

/// From a text to a setting's value; an error says what it should have been.
pub(super) type Reading = fn(&str) -> Result<Value, String>;

/// What a remembered refusal takes in memory, about.
const BYTES_PER_REFUSAL: u64 = 250;
/// As good as never.
const CENTURY: Duration = Duration::from_secs(100 * 365 * 24 * 3_600);

pub(super) fn text(text: &str) -> Result<Value, String> {
    Ok(text.into())
}

/// `strconv.ParseBool`.
pub(super) fn is_true(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err("is neither true nor false".into()),
    }
}

pub(super) fn flag(text: &str) -> Result<Value, String> {
    is_true(text).map(Value::from)
}

pub(super) fn number(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| "is no number".into())
}

pub(super) fn ratio(text: &str) -> Result<Value, String> {
    text.parse::<f64>().map(Value::from).map_err(|_| "is no number".into())
}

/// `time.ParseDuration`: numbers with units, `1h30m` or `1.5s`; 0 needs none.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || "is no time like 10s".to_owned();
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    let (mut rest, mut seconds) = (text, 0.0);
    while !rest.is_empty() {
        let digits = rest.find(|letter: char| !letter.is_ascii_digit() && letter != '.').ok_or_else(wrong)?;
        let (number, unit) = rest.split_at(digits);
        let end = unit.find(|letter: char| letter.is_ascii_digit() || letter == '.').unwrap_or(unit.len());
        let (unit, behind) = unit.split_at(end);
        let unit = match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            _ => return Err(wrong()),
        };
        seconds += number.parse::<f64>().map_err(|_| wrong())? * unit;
        rest = behind;
    }
    if text.is_empty() { Err(wrong()) } else { Duration::try_from_secs_f64(seconds).map_err(|_| wrong()) }
}

/// As our settings have it.
pub(super) fn written(duration: Duration) -> Value {
    humantime::format_duration(duration).to_string().into()
}

pub(super) fn interval(text: &str) -> Result<Value, String> {
    duration(text).map(written)
}

/// 0 is for ever there.
pub(super) fn age(text: &str) -> Result<Value, String> {
    let age = duration(text)?;
    Ok(written(if age.is_zero() { CENTURY } else { age }))
}

/// The names of logrus.
pub(super) fn level(text: &str) -> Result<Value, String> {
    Ok(match text.to_lowercase().as_str() {
        "panic" | "fatal" | "error" => "error",
        "warn" | "warning" => "warn",
        "info" => "info",
        "debug" => "debug",
        "trace" => "trace",
        _ => return Err("is no level: panic, fatal, error, warn, info, debug or trace".into()),
    }
    .into())
}

/// Whatever is not `json` is text there.
pub(super) fn log_format(text: &str) -> Result<Value, String> {
    Ok(if text == "json" { "logstash" } else { "text" }.into())
}

pub(super) fn cache_size(text: &str) -> Result<Value, String> {
    Ok(i64::try_from(number(text)? / BYTES_PER_REFUSAL).unwrap_or(i64::MAX).into())
}

/// A host, or nothing for all addresses, and a port.
pub(super) fn address(host: &str, port: &str) -> Result<Value, String> {
    let port: u16 = port.parse().map_err(|_| "is no port".to_owned())?;
    let host = match host.trim_matches(['[', ']']) {
        // Go listens on both families, and on one where the machine has no other.
        "" if UdpSocket::bind("[::]:0").is_err() => "0.0.0.0",
        "" => "::",
        host => host,
    };
    let mut found = (host, port).to_socket_addrs().map_err(|error| format!("{host:?}: {error}"))?;
    found.next().map(|addr| addr.to_string().into()).ok_or_else(|| format!("{host:?} has no address"))
}
