//! [`Calendar`]: windows that begin at local times, such as the first of each month in Europe/Berlin.

#[cfg(test)]
mod tests;
mod time_of_day;
mod zone;

use std::{cell::Cell, fmt};

use jiff::{
    Timestamp,
    civil::{Date, DateTime, Time},
    tz::AmbiguousOffset,
};

pub use jiff::civil::Weekday;
pub use time_of_day::TimeOfDay;
pub use zone::{UnknownZone, Zone};

/// The length of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Period {
    /// From one instant at which local clocks show a full hour to the next one.
    Hour,
    /// A day.
    Day,
    /// Seven days.
    Week,
    /// A number of months, which [divides](Self::months) a year.
    Months(u8),
}

impl Period {
    /// Returns a period of this number of months; `None` if it does not divide a year.
    #[must_use]
    pub fn months(number: u32) -> Option<Self> {
        let number = u8::try_from(number).ok()?;
        if number == 0 || 12 % number != 0 { None } else { Some(Self::Months(number)) }
    }
}

/// The day and the time at which the windows of a calendar begin. A field that is `None` has its default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Anchor {
    /// The time zone; UTC by default.
    pub zone: Option<Zone>,
    /// The first day of a week; Monday by default.
    pub week_starts: Option<Weekday>,
    /// The first month of a period of several months, from 1; January by default.
    pub month: Option<u8>,
    /// The day of the month, from 1 to 31; 1 by default. In shorter months it is the last day.
    pub day: Option<u8>,
    /// The time of day; midnight by default.
    pub at: Option<TimeOfDay>,
}

impl Anchor {
    /// Returns the name of the first field that has a value.
    #[must_use]
    pub fn first_field(&self) -> Option<&'static str> {
        let Self { zone, week_starts, month, day, at } = self;
        let fields = [
            ("zone", zone.is_some()),
            ("week_starts", week_starts.is_some()),
            ("month", month.is_some()),
            ("day", day.is_some()),
            ("at", at.is_some()),
        ];
        fields.iter().find(|(_, is_set)| *is_set).map(|(name, _)| *name)
    }
}

/// Error returned when an anchor does not fit the period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidAnchor {
    /// Name of the field at fault.
    pub field: &'static str,
    /// Error message.
    pub reason: &'static str,
}

/// An interval of time, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    /// The first instant.
    pub start: u64,
    /// The first instant after the window.
    pub end: u64,
}

/// The boundaries of the window that contains an instant and of its neighbours, in microseconds since the Unix epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundaries {
    /// The start of the window before.
    pub before: u64,
    /// The start of the window.
    pub start: u64,
    /// The end of the window, and the start of the next one.
    pub end: u64,
    /// The end of the next window.
    pub after: u64,
}

impl Boundaries {
    fn contain(&self, instant: u64) -> bool {
        self.start <= instant && instant < self.end
    }
}

/// Successive windows of one period.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Calendar {
    period: Period,
    zone: Zone,
    week_starts: Weekday,
    month: u8,
    day: u8,
    at: TimeOfDay,
}

/// Last instant for which windows are computed, in the year 2255. Every store can hold it as a number.
const MAX_INSTANT: u64 = (1 << 53) - 1;
/// Number of periods before and after the local time in which boundaries are searched: two windows, and one more because a
/// change of clocks can skip a day.
const SEARCHED: i32 = 3;
/// Number of calendars whose boundaries a thread remembers.
const REMEMBERED: usize = 32;

/// A calendar with the boundaries of a window.
type KnownWindow = (Calendar, Boundaries);

thread_local! {
    /// Cache of the windows that this thread has computed last, because to compute one takes a microsecond.
    static KNOWN_WINDOWS: [Cell<Option<KnownWindow>>; REMEMBERED] = const { [const { Cell::new(None) }; REMEMBERED] };
}

impl Calendar {
    /// Creates a calendar.
    ///
    /// # Errors
    ///
    /// Returns the field of the anchor that is out of range, or that windows of this period do not have.
    pub fn new(period: Period, anchor: Anchor) -> Result<Self, InvalidAnchor> {
        let error = |field, reason| Err(InvalidAnchor { field, reason });
        let has_months = matches!(period, Period::Months(_));
        if anchor.week_starts.is_some() && period != Period::Week {
            return error("week_starts", "week_starts requires windows of a week");
        }
        if anchor.day.is_some() && !has_months {
            return error("day", "day requires windows of months or years");
        }
        if anchor.month.is_some() && (!has_months || period == Period::Months(1)) {
            return error("month", "month requires windows of several months, or of a year");
        }
        if anchor.at.is_some() && period == Period::Hour {
            return error("at", "at cannot be combined with windows of an hour, which begin at minute 0");
        }
        if anchor.day.is_some_and(|day| !(1..=31).contains(&day)) {
            return error("day", "day must be a day of the month, from 1 to 31");
        }
        if anchor.month.is_some_and(|month| !(1..=12).contains(&month)) {
            return error("month", "month must be from 1 to 12");
        }
        let default = Self {
            period,
            zone: Zone::default(),
            week_starts: Weekday::Monday,
            month: 1,
            day: 1,
            at: TimeOfDay::default(),
        };
        Ok(default.anchored(anchor))
    }

    /// Returns the calendar with the fields of an anchor that its windows have; others are ignored.
    #[must_use]
    pub fn anchored(self, anchor: Anchor) -> Self {
        let mut calendar = Self { zone: anchor.zone.unwrap_or(self.zone), ..self };
        match self.period {
            Period::Hour => {}
            Period::Day => calendar.at = anchor.at.unwrap_or(self.at),
            Period::Week => {
                calendar.week_starts = anchor.week_starts.unwrap_or(self.week_starts);
                calendar.at = anchor.at.unwrap_or(self.at);
            }
            Period::Months(number) => {
                calendar.day = anchor.day.unwrap_or(self.day);
                calendar.at = anchor.at.unwrap_or(self.at);
                if number > 1 {
                    calendar.month = anchor.month.unwrap_or(self.month);
                }
            }
        }
        calendar
    }

    /// Returns the length of the windows.
    #[must_use]
    pub fn period(&self) -> Period {
        self.period
    }

    /// Returns the time zone.
    #[must_use]
    pub fn zone(&self) -> Zone {
        self.zone
    }

    /// Returns the anchor from which [`Self::new`] creates the same calendar: all fields that its windows have.
    #[must_use]
    pub fn anchor(&self) -> Anchor {
        let zone = Some(self.zone);
        let at = Some(self.at);
        match self.period {
            Period::Hour => Anchor { zone, ..Anchor::default() },
            Period::Day => Anchor { zone, at, ..Anchor::default() },
            Period::Week => Anchor { zone, at, week_starts: Some(self.week_starts), ..Anchor::default() },
            Period::Months(1) => Anchor { zone, at, day: Some(self.day), ..Anchor::default() },
            Period::Months(_) => Anchor { zone, at, day: Some(self.day), month: Some(self.month), ..Anchor::default() },
        }
    }

    /// Returns the window that contains an instant, in microseconds since the Unix epoch.
    #[must_use]
    pub fn window_at(&self, instant: u64) -> Window {
        let Boundaries { before, start, end, after } = self.known_boundaries(instant);
        if instant < start {
            Window { start: before, end: start }
        } else if instant < end {
            Window { start, end }
        } else {
            Window { start: end, end: after }
        }
    }

    /// Returns the boundaries of the window that contains an instant, in microseconds since the Unix epoch, and of its
    /// neighbours.
    #[must_use]
    pub fn boundaries_at(&self, instant: u64) -> Boundaries {
        KNOWN_WINDOWS.with(|windows| {
            let slot = &windows[self.slot()];
            if let Some((calendar, boundaries)) = slot.get()
                && calendar == *self
                && boundaries.contain(instant)
            {
                return boundaries;
            }
            let boundaries = self.compute_boundaries(instant.min(MAX_INSTANT));
            slot.set(Some((*self, boundaries)));
            boundaries
        })
    }

    /// Returns boundaries between which the instant is.
    fn known_boundaries(&self, instant: u64) -> Boundaries {
        let known = KNOWN_WINDOWS.with(|windows| windows[self.slot()].get());
        match known {
            Some((calendar, boundaries))
                if calendar == *self && boundaries.before <= instant && instant < boundaries.after =>
            {
                boundaries
            }
            _ => self.boundaries_at(instant),
        }
    }

    /// Returns the index in [`KNOWN_WINDOWS`] of a window of this calendar.
    fn slot(&self) -> usize {
        let period = match self.period {
            Period::Hour => 0,
            Period::Day => 1,
            Period::Week => 2,
            Period::Months(number) => 3 + usize::from(number),
        };
        (period + usize::from(self.day) * 5 + self.zone.number() * 7) % REMEMBERED
    }

    fn compute_boundaries(&self, instant: u64) -> Boundaries {
        let now = i64::try_from(instant).unwrap_or(i64::MAX);
        let mut boundaries = self.boundaries_near(now);
        boundaries.sort_unstable();
        boundaries.dedup();
        let next = boundaries.partition_point(|boundary| *boundary <= now);
        let at = |index: Option<usize>| {
            let boundary = index.and_then(|index| boundaries.get(index));
            debug_assert!(boundary.is_some(), "the windows around {instant} have no boundary");
            // The first windows begin with the epoch.
            u64::try_from(boundary.copied().unwrap_or(i64::MAX)).unwrap_or(0)
        };
        Boundaries {
            before: at(next.checked_sub(2)),
            start: at(next.checked_sub(1)),
            end: at(Some(next)),
            after: at(Some(next + 1)),
        }
    }

    /// Returns the boundaries of windows around an instant, in arbitrary order.
    fn boundaries_near(&self, now: i64) -> Vec<i64> {
        let mut boundaries = Vec::new();
        let Ok(timestamp) = Timestamp::from_microsecond(now) else {
            return boundaries;
        };
        let local = self.zone.time_zone().to_datetime(timestamp);
        for periods in -SEARCHED..=SEARCHED {
            if let Some(boundary) = self.local_boundary(local, periods) {
                self.push_instants(boundary, &mut boundaries);
            }
        }
        boundaries
    }

    /// Returns the local time at which a window begins, `periods` windows after one that begins near `local`.
    fn local_boundary(&self, local: DateTime, periods: i32) -> Option<DateTime> {
        let date = match self.period {
            Period::Hour => {
                let hour = local.date().at(local.hour(), 0, 0, 0);
                return hour.checked_add(jiff::Span::new().hours(periods)).ok();
            }
            Period::Day => local.date().checked_add(jiff::Span::new().days(periods)).ok()?,
            Period::Week => {
                let weekdays = i32::from(local.date().weekday().since(self.week_starts));
                local.date().checked_add(jiff::Span::new().days(periods * 7 - weekdays)).ok()?
            }
            Period::Months(number) => {
                let number = i32::from(number);
                let first = i32::from(self.month) - 1;
                let months = i32::from(local.year()) * 12 + i32::from(local.month()) - 1;
                let period = (months - first).div_euclid(number) + periods;
                self.day_of_month(period * number + first)?
            }
        };
        Some(DateTime::from_parts(date, self.at.into()))
    }

    /// Returns the day of a month; `months` counts from the year 0.
    fn day_of_month(&self, months: i32) -> Option<Date> {
        let year = i16::try_from(months.div_euclid(12)).ok()?;
        let month = i8::try_from(months.rem_euclid(12) + 1).ok()?;
        let first = Date::new(year, month, 1).ok()?;
        let day = i8::try_from(self.day).ok()?.min(first.days_in_month());
        Date::new(year, month, day).ok()
    }

    /// Adds the instants of a local time as RFC 5545 (section 3.3.5) has them: a skipped local time uses the offset before
    /// the gap, and a repeated one is its first instant. For windows of an hour, both instants of a repeated local time
    /// are added.
    fn push_instants(&self, local: DateTime, instants: &mut Vec<i64>) {
        let ambiguous = self.zone.time_zone().to_ambiguous_timestamp(local);
        if self.period == Period::Hour
            && let AmbiguousOffset::Fold { after, .. } = ambiguous.offset()
            && let Ok(second) = after.to_timestamp(local)
        {
            instants.push(second.as_microsecond());
        }
        if let Ok(first) = ambiguous.compatible() {
            instants.push(first.as_microsecond());
        }
    }
}

impl fmt::Display for Calendar {
    /// Writes when windows begin, such as `from day 15 at 06:00 in Europe/Berlin`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { zone, week_starts, month, day, at, .. } = self;
        match self.period {
            Period::Hour => f.write_str("from minute 0")?,
            Period::Day => write!(f, "from {at}")?,
            Period::Week => write!(f, "from {week_starts:?} at {at}")?,
            Period::Months(1) => write!(f, "from day {day} at {at}")?,
            Period::Months(_) => write!(f, "from day {day} of month {month} at {at}")?,
        }
        write!(f, " in {}", zone.name())
    }
}

impl From<TimeOfDay> for Time {
    fn from(time: TimeOfDay) -> Self {
        let [hour, minute, second] = time.parts();
        Self::constant(hour, minute, second, 0)
    }
}
