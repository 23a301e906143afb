//! Windows of the calendar, compared with a table that another program derived, and their laws.

use proptest::prelude::*;

use super::*;

fn micros(text: &str) -> u64 {
    let timestamp: Timestamp = text.parse().unwrap();
    timestamp.as_microsecond().unsigned_abs()
}

fn weekday(name: &str) -> Weekday {
    match name {
        "monday" => Weekday::Monday,
        "thursday" => Weekday::Thursday,
        "sunday" => Weekday::Sunday,
        _ => panic!("add {name}"),
    }
}

/// Reads a calendar as the table has it: zone, unit, multiplier, fields of the anchor.
fn read_calendar(text: &str) -> Calendar {
    let mut parts = text.split(' ');
    let zone = Zone::find(parts.next().unwrap()).unwrap();
    let unit = parts.next().unwrap();
    let multiplier: u32 = parts.next().unwrap().parse().unwrap();
    let period = match unit {
        "hour" => Period::Hour,
        "day" => Period::Day,
        "week" => Period::Week,
        "month" => Period::months(multiplier).unwrap(),
        _ => Period::months(12 * multiplier).unwrap(),
    };
    let mut anchor = Anchor { zone: Some(zone), ..Anchor::default() };
    for field in parts {
        match field.split_once('=').unwrap() {
            ("at", value) => anchor.at = Some(value.parse().unwrap()),
            ("day", value) => anchor.day = Some(value.parse().unwrap()),
            ("month", value) => anchor.month = Some(value.parse().unwrap()),
            (_, value) => anchor.week_starts = Some(weekday(value)),
        }
    }
    Calendar::new(period, anchor).unwrap()
}

#[test]
fn windows_are_those_of_the_table() {
    let mut lines = 0;
    for line in include_str!("cases.txt").lines().filter(|line| !line.starts_with('#')) {
        let (question, answer) = line.split_once(" -> ").unwrap();
        let (instant, calendar) = question.split_once(' ').unwrap();
        let (start, end) = answer.split_once(' ').unwrap();
        let calendar = read_calendar(calendar);
        let boundaries = calendar.compute_boundaries(micros(instant));
        let shown =
            [boundaries.start, boundaries.end].map(|at| Timestamp::from_microsecond(at as i64).unwrap().to_string());
        assert_eq!(shown, [start, end], "{line}");
        lines += 1;
    }
    assert!(lines > 60, "{lines}");
}

#[test]
fn only_fields_that_windows_have_are_accepted() {
    let day = Anchor { day: Some(15), ..Anchor::default() };
    let month = Anchor { month: Some(4), ..Anchor::default() };
    let week_starts = Anchor { week_starts: Some(Weekday::Sunday), ..Anchor::default() };
    let at = Anchor { at: "06:00".parse().ok(), ..Anchor::default() };
    let every = [Period::Hour, Period::Day, Period::Week, Period::Months(1), Period::Months(12)];
    for (anchor, accepted) in [
        (day, [false, false, false, true, true]),
        (month, [false, false, false, false, true]),
        (week_starts, [false, false, true, false, false]),
        (at, [false, true, true, true, true]),
        (Anchor::default(), [true; 5]),
        (Anchor { day: Some(0), ..day }, [false; 5]),
        (Anchor { day: Some(32), ..day }, [false; 5]),
        (Anchor { month: Some(13), ..month }, [false; 5]),
        (Anchor { month: Some(0), ..month }, [false; 5]),
    ] {
        assert_eq!(every.map(|period| Calendar::new(period, anchor).is_ok()), accepted, "{anchor:?}");
        for period in every {
            let plain = Calendar::new(period, Anchor::default()).unwrap();
            // An anchor of an entity changes those of its windows that have its fields.
            if let Ok(calendar) = Calendar::new(period, anchor) {
                assert_eq!(plain.anchored(anchor), calendar);
                assert_eq!(Calendar::new(period, calendar.anchor()), Ok(calendar));
            } else if anchor.day.unwrap_or(1) == 15 {
                assert_eq!(plain.anchored(anchor), plain, "{period:?} {anchor:?}");
            }
        }
    }
}

#[test]
fn months_divide_a_year() {
    let periods: Vec<_> = (0..=24).chain([268]).filter(|months| Period::months(*months).is_some()).collect();
    assert_eq!(periods, [1, 2, 3, 4, 6, 12]);
}

#[test]
fn zones_are_found_by_their_names() {
    let berlin = Zone::find("europe/BERLIN").unwrap();
    assert_eq!((berlin.name(), Some(berlin)), ("Europe/Berlin", Zone::find("Europe/Berlin").ok()));
    assert_eq!(Zone::find("utc"), Ok(Zone::default()));
    for name in ["Europe/Berln", "", "../etc/passwd", "CEST5"] {
        assert_eq!(Zone::find(name), Err(UnknownZone), "{name}");
    }
    assert!(Zone::names().contains(&"Asia/Kolkata".to_owned()));
}

fn calendars() -> impl Strategy<Value = Calendar> {
    let zones = ["UTC", "Europe/Berlin", "Australia/Lord_Howe", "Asia/Kathmandu", "America/St_Johns", "Pacific/Apia"];
    let period = prop::sample::select(vec![
        Period::Hour,
        Period::Day,
        Period::Week,
        Period::Months(1),
        Period::Months(3),
        Period::Months(12),
    ]);
    (prop::sample::select(zones.to_vec()), period, 1_u8..=12, 1_u8..=31, 0_u32..86_400).prop_map(
        |(zone, period, month, day, seconds)| {
            let anchor = Anchor {
                zone: Zone::find(zone).ok(),
                week_starts: Some(if day % 2 == 0 { Weekday::Sunday } else { Weekday::Thursday }),
                month: Some(month),
                day: Some(day),
                at: TimeOfDay::from_seconds(seconds),
            };
            Calendar::new(period, Anchor::default()).unwrap().anchored(anchor)
        },
    )
}

proptest! {
    #[test]
    fn every_instant_is_in_one_window(
        calendar in calendars(), instant in 86_400_000_000 * 800..4_102_444_800_000_000_u64,
    ) {
        let Boundaries { before, start, end, after } = calendar.compute_boundaries(instant);
        prop_assert!(before < start && start <= instant && instant < end && end < after);
        for other in [start, end - 1] {
            prop_assert_eq!(calendar.compute_boundaries(other), Boundaries { before, start, end, after });
        }
        let next = calendar.compute_boundaries(end);
        prop_assert_eq!((next.before, next.start, next.end), (start, end, after));
        let previous = calendar.compute_boundaries(start - 1);
        prop_assert_eq!((previous.start, previous.end, previous.after), (before, start, end));
        // A remembered window also determines its neighbours.
        prop_assert_eq!(calendar.boundaries_at(instant), Boundaries { before, start, end, after });
        for (other, window) in [
            (start - 1, Window { start: before, end: start }),
            (start, Window { start, end }),
            (end, Window { start: end, end: after }),
            (before - 1, Window { start: previous.before.min(before - 1), end: before }),
        ] {
            let found = calendar.window_at(other);
            prop_assert_eq!(found.end, window.end);
            prop_assert!(found.start <= other);
        }
        prop_assert_eq!(calendar.window_at(after).start, after);
    }

    #[test]
    fn any_number_is_an_instant(calendar in calendars(), instant in any::<u64>()) {
        let window = calendar.window_at(instant);
        prop_assert!(window.start < window.end);
    }
}
