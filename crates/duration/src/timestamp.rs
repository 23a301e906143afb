//! [`parse`]: times in RFC 3339, with any offset from UTC.

use std::time::{Duration, SystemTime};

/// Length of `2026-11-22T04:00:00`.
const SECONDS_LENGTH: usize = 19;

/// Parses a time such as `2026-11-22T04:00:00Z`, `2026-11-22T06:00:00.250+02:00` or `2026-11-22 04:00:00`.
///
/// The offset can be written without its colon or its minutes. A time without an offset is in UTC. Returns `None` if the
/// text is not a time, or if the time is before 1970.
pub fn parse(text: &str) -> Option<SystemTime> {
    let text = text.trim().to_ascii_uppercase();
    let fraction_and_offset = text.get(SECONDS_LENGTH..)?;
    let Some(sign) = fraction_and_offset.find(['+', '-']) else {
        return humantime::parse_rfc3339_weak(&text).ok();
    };
    let (local, offset) = text.split_at(SECONDS_LENGTH + sign);
    if local.ends_with('Z') {
        return None;
    }
    let local = humantime::parse_rfc3339_weak(local).ok()?;
    let duration = parse_offset(&offset[1..])?;
    let utc = if offset.starts_with('+') { local.checked_sub(duration)? } else { local.checked_add(duration)? };
    (utc >= SystemTime::UNIX_EPOCH).then_some(utc)
}

/// Parses `HH:MM`, `HHMM` or `HH`.
fn parse_offset(text: &str) -> Option<Duration> {
    let (hours, minutes) = match text.len() {
        2 => (text, "00"),
        4 => (text.get(..2)?, text.get(2..)?),
        _ => text.split_once(':')?,
    };
    let hours = two_digits(hours, 23)?;
    let minutes = two_digits(minutes, 59)?;
    Some(Duration::from_secs(hours * 3_600 + minutes * 60))
}

fn two_digits(text: &str, max: u64) -> Option<u64> {
    if text.len() != 2 || !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok().filter(|number| *number <= max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offset_is_subtracted() {
        for (text, expected) in [
            ("2026-11-27T00:00:00Z", Some(1_795_737_600_000)),
            ("2026-11-27T00:00:00z", Some(1_795_737_600_000)),
            ("2026-11-27t00:00:00.250Z", Some(1_795_737_600_250)),
            ("2026-11-27 00:00:00", Some(1_795_737_600_000)),
            (" 2026-11-27T00:00:00+00:00 ", Some(1_795_737_600_000)),
            ("2026-11-27T00:00:00-00:00", Some(1_795_737_600_000)),
            ("2026-11-27T02:00:00+02:00", Some(1_795_737_600_000)),
            ("2026-11-27T05:30:00.125+05:30", Some(1_795_737_600_125)),
            ("2026-11-26T20:15:00.5-03:45", Some(1_795_737_600_500)),
            ("2026-11-27T02:00:00+0200", Some(1_795_737_600_000)),
            ("2026-11-26T16:00:00-08", Some(1_795_737_600_000)),
            ("1970-01-01T02:00:00+02:00", Some(0)),
            ("1970-01-01T01:59:59+02:00", None),
            ("2026-11-27T00:00:00Z+02:00", None),
            ("2026-11-27T00:00:00+2:00", None),
            ("2026-11-27T00:00:00+24:00", None),
            ("2026-11-27T00:00:00+02:60", None),
            ("2026-11-27T00:00:00+02:00Z", None),
            ("2026-11-27T00:00:00+", None),
            ("2026-11-27T00:00:00++1:0", None),
            ("2026-11-27T00:00:00+0é", None),
            ("2026-11-27T25:00:00+02:00", None),
            ("2026-11-27", None),
            ("noon", None),
            ("", None),
        ] {
            let since_epoch = parse(text).and_then(|time| time.duration_since(SystemTime::UNIX_EPOCH).ok());
            assert_eq!(since_epoch.map(|since_epoch| since_epoch.as_millis()), expected, "{text:?}");
        }
    }
}
