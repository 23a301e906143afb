//! Conversion of the calendar of a limit. Every number is checked on arrival.

use sluicegate_calendar::{Anchor, Period, TimeOfDay, Weekday, Zone};
use sluicegate_proto::sluicegate::cluster::v1::{self as proto, calendar::Period as ProtoPeriod};

/// Encodes when the windows of a limit begin.
pub(super) fn encode(period: Period, anchor: &Anchor) -> proto::Calendar {
    // Without `..`, a new field must be added here.
    let Anchor { zone, week_starts, month, day, at } = *anchor;
    proto::Calendar {
        period: Some(match period {
            Period::Hour => ProtoPeriod::Hours(1),
            Period::Day => ProtoPeriod::Days(1),
            Period::Week => ProtoPeriod::Weeks(1),
            Period::Months(number) => ProtoPeriod::Months(number.into()),
        }),
        zone: zone.unwrap_or_default().name().to_owned(),
        week_starts: week_starts.map(|day| day.to_monday_one_offset().unsigned_abs().into()),
        month: month.map(u32::from),
        day: day.map(u32::from),
        at_s: at.map(TimeOfDay::seconds),
    }
}

/// Decodes when the windows of a limit begin. Returns `None` if this version does not have the period or the zone, or
/// if a number is out of range.
pub(super) fn decode(calendar: &proto::Calendar) -> Option<(Period, Anchor)> {
    let period = match calendar.period? {
        ProtoPeriod::Hours(1) => Period::Hour,
        ProtoPeriod::Days(1) => Period::Day,
        ProtoPeriod::Weeks(1) => Period::Week,
        ProtoPeriod::Months(number) => Period::months(number)?,
        ProtoPeriod::Hours(_) | ProtoPeriod::Days(_) | ProtoPeriod::Weeks(_) => return None,
    };
    let mut anchor = Anchor { zone: Some(Zone::find(&calendar.zone).ok()?), ..Anchor::default() };
    if let Some(day) = calendar.week_starts {
        anchor.week_starts = Some(Weekday::from_monday_one_offset(i8::try_from(day).ok()?).ok()?);
    }
    if let Some(month) = calendar.month {
        anchor.month = Some(u8::try_from(month).ok()?);
    }
    if let Some(day) = calendar.day {
        anchor.day = Some(u8::try_from(day).ok()?);
    }
    if let Some(seconds) = calendar.at_s {
        anchor.at = Some(TimeOfDay::from_seconds(seconds)?);
    }
    Some((period, anchor))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calendars_arrive_as_they_were_sent() {
        let zone = Zone::find("Europe/Berlin").ok();
        for (period, anchor) in [
            (Period::Hour, Anchor { zone, ..Anchor::default() }),
            (Period::Day, Anchor { zone, at: "06:30".parse().ok(), ..Anchor::default() }),
            (Period::Week, Anchor { zone, week_starts: Some(Weekday::Sunday), ..Anchor::default() }),
            (Period::Months(3), Anchor { zone, month: Some(2), day: Some(31), ..Anchor::default() }),
        ] {
            assert_eq!(decode(&encode(period, &anchor)), Some((period, anchor)));
        }
    }

    #[test]
    fn calendars_that_this_version_does_not_have_are_ignored() {
        let valid = encode(Period::Day, &Anchor::default());
        for calendar in [
            proto::Calendar { period: None, ..valid.clone() },
            proto::Calendar { period: Some(ProtoPeriod::Hours(2)), ..valid.clone() },
            proto::Calendar { period: Some(ProtoPeriod::Months(5)), ..valid.clone() },
            proto::Calendar { zone: "Mars/Olympus".to_owned(), ..valid.clone() },
            proto::Calendar { week_starts: Some(0), ..valid.clone() },
            proto::Calendar { week_starts: Some(8), ..valid.clone() },
            proto::Calendar { month: Some(300), ..valid.clone() },
            proto::Calendar { day: Some(u32::MAX), ..valid.clone() },
            proto::Calendar { at_s: Some(86_400), ..valid.clone() },
        ] {
            assert_eq!(decode(&calendar), None, "{calendar:?}");
        }
    }
}
