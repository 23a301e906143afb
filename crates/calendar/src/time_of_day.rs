//! [`TimeOfDay`]: a local time such as `06:00`.

use std::{fmt, str::FromStr};

/// A local time of day, from 00:00:00 to 23:59:59.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TimeOfDay {
    /// Seconds since midnight by a clock that does not change.
    seconds: u32,
}

/// Number of seconds of a day.
const DAY: u32 = 86_400;

impl TimeOfDay {
    /// Creates a time from the seconds since midnight; `None` if they are a whole day or more.
    #[must_use]
    pub const fn from_seconds(seconds: u32) -> Option<Self> {
        if seconds < DAY { Some(Self { seconds }) } else { None }
    }

    /// Returns the seconds since midnight.
    #[must_use]
    pub const fn seconds(self) -> u32 {
        self.seconds
    }

    /// Returns the hour, the minute and the second.
    pub(crate) fn parts(self) -> [i8; 3] {
        [self.seconds / 3_600, self.seconds / 60 % 60, self.seconds % 60].map(|part| part as i8)
    }
}

impl fmt::Display for TimeOfDay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [hour, minute, second] = self.parts();
        write!(f, "{hour:02}:{minute:02}")?;
        if second == 0 { Ok(()) } else { write!(f, ":{second:02}") }
    }
}

impl FromStr for TimeOfDay {
    type Err = ();

    /// Parses `06:00` or `06:00:30`.
    fn from_str(text: &str) -> Result<Self, ()> {
        let mut parts = text.split(':');
        let hour = parse_part(parts.next(), 23)?;
        let minute = parse_part(parts.next(), 59)?;
        let second = match parts.next() {
            Some(part) => parse_part(Some(part), 59)?,
            None => 0,
        };
        if parts.next().is_some() {
            return Err(());
        }
        Ok(Self { seconds: hour * 3_600 + minute * 60 + second })
    }
}

/// Parses one or two digits.
fn parse_part(part: Option<&str>, max: u32) -> Result<u32, ()> {
    let part = part.ok_or(())?;
    if part.len() > 2 || !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(());
    }
    let number: u32 = part.parse().map_err(drop)?;
    if number <= max { Ok(number) } else { Err(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_two_or_three_parts() {
        for (text, expected) in [
            ("06:00", Some("06:00")),
            ("6:05", Some("06:05")),
            ("23:59:59", Some("23:59:59")),
            ("00:00:00", Some("00:00")),
            ("24:00", None),
            ("12:60", None),
            ("12:00:60", None),
            ("12", None),
            ("12:00:00:00", None),
            ("12:", None),
            ("+1:00", None),
            ("012:00", None),
            ("", None),
        ] {
            let parsed = text.parse::<TimeOfDay>().ok();
            assert_eq!(parsed.map(|time| time.to_string()).as_deref(), expected, "{text:?}");
            assert_eq!(parsed.and_then(|time| TimeOfDay::from_seconds(time.seconds())), parsed);
        }
        assert_eq!(TimeOfDay::from_seconds(DAY), None);
    }
}
