//! Parsers for the values of variables, which accept the same forms as Go does.

use std::{
    net::{Ipv6Addr, ToSocketAddrs, UdpSocket},
    time::Duration,
};

use http::{HeaderName, HeaderValue};
use toml::Value;

/// A function that converts a variable's value to a setting's value. The error completes a sentence: `NAME=value …`.
pub(super) type Parser = fn(&str) -> Result<Value, String>;

/// Approximate memory that a cached denial uses.
const BYTES_PER_CACHED_DENIAL: u64 = 360;
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
    let ratio: f64 = text.parse().map_err(|_| "is not a number".to_owned())?;
    if !(0.0..=1.0).contains(&ratio) {
        return Err("is not between 0 and 1".into());
    }
    Ok(ratio.into())
}

pub(super) fn header_name(text: &str) -> Result<Value, String> {
    HeaderName::try_from(text).map_err(|_| "is not the name of an HTTP header".to_owned())?;
    Ok(text.into())
}

/// Parses the path of a page.
pub(super) fn path(text: &str) -> Result<Value, String> {
    if !text.starts_with('/') || text.contains(['{', '}', '*', ':']) {
        return Err("is not a path such as /metrics".into());
    }
    Ok(text.into())
}

pub(super) fn key_prefix(text: &str) -> Result<Value, String> {
    if text.contains(['{', '}']) {
        return Err("contains a brace, which marks the shard key in Redis".into());
    }
    Ok(text.into())
}

/// Parses a list of tags, which become a part of lines of statsd.
pub(super) fn tags(text: &str) -> Result<Value, String> {
    let mut tags = Vec::new();
    for tag in text.split(',').map(str::trim).filter(|tag| !tag.is_empty()) {
        let is_pair = tag.split_once(':').is_some_and(|(name, _)| !name.is_empty());
        if !is_pair || tag.contains('|') || tag.contains(char::is_control) {
            return Err(format!(
                "is not a list of tags such as name:value without | and control characters, because of {tag:?}"
            ));
        }
        tags.push(tag.into());
    }
    Ok(Value::Array(tags))
}

/// Parses the headers of calls to a control plane: `name:value,…`. Errors contain no value, which may be a secret.
pub(super) fn headers(text: &str) -> Result<Value, String> {
    let mut headers = Vec::new();
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let (name, value) = pair.split_once(':').ok_or("is not a list of headers such as name:value")?;
        let name = name.trim();
        let value = value.trim();
        // The names of binary metadata of gRPC end in `-bin`.
        if HeaderName::try_from(name).is_err() || name.to_lowercase().ends_with("-bin") {
            return Err(format!("contains {name:?}, which is not the name of a header with text"));
        }
        if HeaderValue::from_str(value).is_err() {
            return Err(format!("contains a value of {name} with characters that a header cannot have"));
        }
        headers.push(format!("{name}={value}").into());
    }
    Ok(Value::Array(headers))
}

/// Parses the metadata of a node: `name=value,…`.
pub(super) fn metadata(text: &str) -> Result<Value, String> {
    let mut pairs = Vec::new();
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let pair = pair.split_once('=').map(|(name, value)| (name.trim(), value.trim()));
        let Some((name, value)) = pair.filter(|(name, _)| !name.is_empty()) else {
            return Err("is not a list of pairs such as name=value".into());
        };
        pairs.push(format!("{name}={value}").into());
    }
    Ok(Value::Array(pairs))
}

/// Parses the number of a port.
pub(super) fn port(text: &str) -> Result<u16, String> {
    text.parse().map_err(|_| "is not a port number".into())
}

/// Parses a name or an IP address. Returns it in brackets if it is an IPv6 address.
pub(super) fn host(text: &str) -> Result<String, String> {
    let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']')).unwrap_or(text);
    if inner.parse::<Ipv6Addr>().is_ok() {
        return Ok(format!("[{inner}]"));
    }
    let is_name = text.chars().all(|letter| letter.is_alphanumeric() || matches!(letter, '-' | '.' | '_'));
    if text.is_empty() || !is_name {
        return Err("is not a host name or an IP address".into());
    }
    Ok(text.to_owned())
}

/// Checks `host:port` or, where the port has a default, `host`.
pub(super) fn check_endpoint(text: &str, has_default_port: bool) -> Result<(), String> {
    if text.parse::<Ipv6Addr>().is_ok() {
        return Err("is an IPv6 address without brackets".into());
    }
    // The port follows the last colon, unless that colon is inside the brackets of an IPv6 address.
    match text.rsplit_once(':').filter(|(_, port)| !port.ends_with(']')) {
        Some((name, number)) => {
            port(number).map_err(|reason| format!("contains {number:?}, which {reason}"))?;
            host(name).map(drop).map_err(|reason| format!("contains {name:?}, which {reason}"))
        }
        None if has_default_port => host(text).map(drop).map_err(|reason| format!("contains {text:?}, which {reason}")),
        None => Err("has no port".into()),
    }
}

/// Parses a duration as Go's `time.ParseDuration` does: numbers with units (`1h30m`, `1.5s`), or 0 without a unit.
pub(super) fn duration(text: &str) -> Result<Duration, String> {
    const NOT_A_DURATION: &str = "is not a duration such as 10s";
    if text == "0" {
        return Ok(Duration::ZERO);
    }
    if text.is_empty() {
        return Err(NOT_A_DURATION.into());
    }
    let mut remaining = text;
    let mut seconds = 0.0;
    while !remaining.is_empty() {
        let digits = remaining.find(|letter: char| !letter.is_ascii_digit() && letter != '.').ok_or(NOT_A_DURATION)?;
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
            _ => return Err(NOT_A_DURATION.into()),
        };
        seconds += number.parse::<f64>().map_err(|_| NOT_A_DURATION)? * unit;
        remaining = rest_of_text;
    }
    Duration::try_from_secs_f64(seconds).map_err(|_| NOT_A_DURATION.into())
}

/// Formats a duration as in settings files.
pub(super) fn format_duration(duration: Duration) -> Value {
    humantime::format_duration(duration).to_string().into()
}

/// Parses a duration that must not be 0.
pub(super) fn positive_duration(text: &str) -> Result<Duration, String> {
    let duration = duration(text)?;
    if duration.is_zero() {
        return Err("is not greater than 0".into());
    }
    Ok(duration)
}

pub(super) fn interval(text: &str) -> Result<Value, String> {
    positive_duration(text).map(format_duration)
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

/// Returns the address of a host and a port. An empty host means all addresses. Errors concern the host.
pub(super) fn address(host: &str, port: u16) -> Result<Value, String> {
    let host = match host.trim_matches(['[', ']']) {
        // Go listens on IPv6 and IPv4, or on IPv4 alone if the host does not support IPv6.
        "" if UdpSocket::bind("[::]:0").is_err() => "0.0.0.0",
        "" => "::",
        host => host,
    };
    let mut addresses =
        (host, port).to_socket_addrs().map_err(|error| format!("is not a host with an address: {error}"))?;
    addresses.next().map(|addr| addr.to_string().into()).ok_or_else(|| "is a host without an address".to_owned())
}
