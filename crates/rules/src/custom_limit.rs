//! [`CustomLimit`]: a limit outside of a rule, which an operator's override gives to one entity.

use std::borrow::Cow;

use sluicegate_algorithm::{Algorithm, Consistency, MAX_NUMBER};

use super::limit::{FailurePolicy, Limit, Unit};

/// A limit that applies to a descriptor in place of its rule's limit.
#[derive(Clone, Debug)]
pub struct CustomLimit {
    /// Whether `limit` applies, everything is allowed, or everything is denied.
    pub allowance: Allowance,
    /// The limit if `allowance` is [`Allowance::Limited`], otherwise [`Limit::DENY_ALL`].
    pub limit: Limit,
    /// One instance's share of the limit; `None` if that is the whole limit.
    pub divided_limit: Option<Box<Limit>>,
    /// Failure policy; `None` if the rule's policy applies.
    pub on_error: Option<FailurePolicy>,
    /// How exactly the counter is shared between instances.
    pub consistency: Consistency,
    /// Limits that replace single limits of a rule with several, by name. If there are any, `limit` does not apply.
    pub by_name: Vec<(Box<str>, Self)>,
}

/// The hits that a custom limit allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// The hits within the limit.
    Limited,
    /// All hits, without counting.
    Unlimited,
    /// No hits, without a call to the store.
    Blocked,
}

/// Value that denies everything without a counter. A limit of 0 denies everything as well, but has a counter.
pub(super) const BLOCKED: &str = "blocked";
/// Value that allows everything without a counter.
pub(super) const UNLIMITED: &str = "unlimited";

impl CustomLimit {
    /// Returns the stored form of a limit in its printed form, such as `500 per minute`: `500/minute`, or the keywords
    /// of `rate_limit`. Returns other texts unchanged.
    ///
    /// Version 0.1.0 cannot read the printed forms, and may share the store.
    #[must_use]
    pub fn stored_form(text: &str) -> Cow<'_, str> {
        match PrintedLimit::parse(text) {
            Some(limit) => Cow::Owned(limit.stored_form()),
            None => Cow::Borrowed(text),
        }
    }

    /// Returns the limit that replaces a rule's limit with this name: the only one, or the one of this name.
    #[must_use]
    pub fn for_limit(&self, name: Option<&str>) -> Option<&Self> {
        if self.by_name.is_empty() {
            return Some(self);
        }
        let name = name?;
        let named = self.by_name.iter().find(|(known, _)| **known == *name);
        named.map(|(_, limit)| limit)
    }

    pub(super) const fn with_allowance(allowance: Allowance) -> Self {
        Self {
            allowance,
            limit: Limit::DENY_ALL,
            divided_limit: None,
            on_error: None,
            consistency: Consistency::Exact,
            by_name: Vec::new(),
        }
    }
}

/// Parses the short form `500/minute` into a number of requests and a unit.
pub(super) fn parse_shorthand(text: &str) -> Option<(u64, Unit)> {
    let (requests, unit) = text.split_once('/')?;
    Some((parse_number(requests)?, Unit::from_name(unit.trim())?))
}

/// Parses a number with or without separators of thousands.
fn parse_number(text: &str) -> Option<u64> {
    let digits: String = text.trim().chars().filter(|letter| !THOUSANDS.contains(letter)).collect();
    let number: u64 = digits.parse().ok()?;
    if number <= MAX_NUMBER { Some(number) } else { None }
}

/// Separators of thousands: `_` of rule files, a comma, and the spaces that do not break a line.
const THOUSANDS: [char; 4] = ['_', ',', '\u{a0}', '\u{202f}'];

/// A limit in the form that [`Limit`]'s `Display` writes, such as `500 per 15 minutes, gcra, burst 1000`.
struct PrintedLimit<'t> {
    requests: u64,
    measure: PrintedMeasure<'t>,
    algorithm: &'t str,
    /// The burst, if it differs from the number of requests.
    burst: Option<u64>,
}

enum PrintedMeasure<'t> {
    Rate { unit: Unit, multiplier: u32 },
    InFlight { hold: Option<&'t str> },
}

impl<'t> PrintedLimit<'t> {
    fn parse(text: &'t str) -> Option<Self> {
        let mut parts = text.trim().split(", ");
        let quantity = parts.next()?;
        let (requests, mut measure) = match quantity.split_once(" per ") {
            Some((requests, window)) => (requests, parse_window(window)?),
            None => (quantity.strip_suffix(" in flight")?, PrintedMeasure::InFlight { hold: None }),
        };
        let requests = parse_number(requests)?;
        let mut algorithm = match measure {
            PrintedMeasure::Rate { .. } => Algorithm::DEFAULT.name,
            PrintedMeasure::InFlight { .. } => "concurrency",
        };
        let mut burst = None;
        for part in parts {
            if let Some(number) = part.strip_prefix("burst ") {
                burst = Some(parse_number(number)?);
                continue;
            }
            match (part.strip_prefix("each for at most "), &mut measure) {
                (Some(time), PrintedMeasure::InFlight { hold }) if is_duration(time) => *hold = Some(time),
                _ => algorithm = Algorithm::named().find(|kind| kind.name == part)?.name,
            }
        }
        Some(Self { requests, measure, algorithm, burst })
    }

    fn stored_form(&self) -> String {
        let Self { requests, algorithm, .. } = self;
        let burst = match self.burst {
            Some(burst) => format!(", burst: {burst}"),
            None => String::new(),
        };
        match &self.measure {
            PrintedMeasure::Rate { unit, multiplier: 1 }
                if *algorithm == Algorithm::DEFAULT.name && burst.is_empty() =>
            {
                format!("{requests}/{}", unit.name())
            }
            PrintedMeasure::Rate { unit, multiplier } => {
                let unit = unit.name();
                let window = format!("unit: {unit}, unit_multiplier: {multiplier}");
                format!("{{{window}, requests_per_unit: {requests}, algorithm: {algorithm}{burst}}}")
            }
            PrintedMeasure::InFlight { hold } => {
                let hold = match hold {
                    Some(hold) => format!(", hold: {hold}"),
                    None => String::new(),
                };
                format!("{{algorithm: {algorithm}, limit: {requests}{hold}{burst}}}")
            }
        }
    }
}

/// Parses `minute` or `15 minutes`.
fn parse_window<'t>(window: &str) -> Option<PrintedMeasure<'t>> {
    let Some((multiplier, unit)) = window.trim().split_once(' ') else {
        return Some(PrintedMeasure::Rate { unit: Unit::from_name(window.trim())?, multiplier: 1 });
    };
    let unit = unit.trim();
    let unit = Unit::from_name(unit.strip_suffix('s').unwrap_or(unit))?;
    Some(PrintedMeasure::Rate { unit, multiplier: u32::try_from(parse_number(multiplier)?).ok()? })
}

fn is_duration(text: &str) -> bool {
    humantime::parse_duration(text).is_ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sluicegate_algorithm::{LimitSpec, Micros};

    use super::*;
    use crate::Measure;
    use crate::options::Options;

    fn read(text: &str) -> Result<CustomLimit, String> {
        CustomLimit::read(text, Options::default())
            .map_err(|diagnostics| diagnostics.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }

    #[test]
    fn accepts_the_keywords_of_rate_limit_and_the_short_forms() {
        for (text, requests, algorithm) in [
            ("500/minute", 500, "fixed_window"),
            ("1_000 / Hour", 1_000, "fixed_window"),
            ("{unit: minute, requests_per_unit: 7, algorithm: token_bucket, burst: 20}", 7, "token_bucket"),
            ("{algorithm: concurrency, limit: 3}", 3, "concurrency"),
            ("unit: day\nrequests_per_unit: 0\n", 0, "fixed_window"),
            ("100,000/minute", 100_000, "fixed_window"),
            ("500 per minute", 500, "fixed_window"),
            ("1,000 per 15 minutes", 1_000, "fixed_window"),
            ("7 per hour, gcra", 7, "gcra"),
            ("5 in flight, each for at most 1m 30s, concurrency", 5, "concurrency"),
        ] {
            let limit = read(text).unwrap().limit;
            assert_eq!((limit.requests(), limit.algorithm().name()), (requests, algorithm), "{text}");
        }
        assert_eq!(read("unlimited").unwrap().allowance, Allowance::Unlimited);
        assert_eq!(read("{unlimited: true}").unwrap().allowance, Allowance::Unlimited);
        assert_eq!(read("blocked").unwrap().allowance, Allowance::Blocked);
        let custom_limit = read("{unit: minute, requests_per_unit: 9, on_error: allow, consistency: leased}").unwrap();
        assert_eq!(
            (custom_limit.on_error, custom_limit.consistency),
            (Some(FailurePolicy::Allow), Consistency::Leased)
        );
        let options = Options { instances: std::num::NonZeroU32::new(3).unwrap(), ..Options::default() };
        assert_eq!(CustomLimit::read("90/minute", options).unwrap().divided_limit.unwrap().requests(), 30);
    }

    #[test]
    fn rejects_invalid_limits_and_keywords_of_rules_with_the_reason() {
        for (text, expected) in [
            ("", "the limit is empty"),
            ("lots", "500/minute"),
            ("500/fortnight", "500/minute"),
            ("-1/minute", "500/minute"),
            ("500 per fortnight", "500/minute"),
            ("500 per 0 minutes", "unit_multiplier must be at least 1"),
            ("500 per minute, no_algorithm", "500/minute"),
            ("500 per minute, each for at most 1m", "500/minute"),
            ("{unit: minute}", "requests_per_unit"),
            ("{unit: minute, requests_per_unti: 4}", "did you mean requests_per_unit?"),
            (
                "{unit: minute, requests_per_unit: 4, elastic: {resource: db, extra: 50%, idle: 30%, busy: 80%}}",
                "elastic is only allowed in rule files",
            ),
            ("{by_plan: calls}", "by_plan is only allowed in rule files"),
            ("{algorithm: concurrency, limit: 3, holder: request}", "holder is only allowed in rule files"),
            ("{unit: minute, requests_per_unit: 4, replaces: [{name: x}]}", "replaces is only allowed in rule files"),
            ("{unit: minute, requests_per_unit: 4, unlimited: true}", "unlimited: true cannot be combined with unit"),
            ("[1, 2]", "the limit must be a map such as { unit: minute, requests_per_unit: 100 }, not a list"),
            ("{a: *b}", "invalid YAML"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn a_printed_limit_is_stored_in_a_form_that_version_0_1_0_reads() {
        for (text, expected) in [
            ("500 per minute", "500/minute"),
            (
                "100,000 per 2 days",
                "{unit: day, unit_multiplier: 2, requests_per_unit: 100000, algorithm: fixed_window}",
            ),
            (
                "500 per minute, gcra, burst 1,000",
                "{unit: minute, unit_multiplier: 1, requests_per_unit: 500, algorithm: gcra, burst: 1000}",
            ),
            ("5 in flight, each for at most 1m, concurrency", "{algorithm: concurrency, limit: 5, hold: 1m}"),
            ("500/minute", "500/minute"),
            ("{unit: day, requests_per_unit: 3}", "{unit: day, requests_per_unit: 3}"),
            ("blocked", "blocked"),
        ] {
            assert_eq!(CustomLimit::stored_form(text), expected);
        }
    }

    /// Returns limits that their text describes completely: they have no other keywords than numbers and the algorithm.
    fn printed_limit() -> impl Strategy<Value = Limit> {
        let rates = ["fixed_window", "sliding_window", "sliding_log", "token_bucket", "leaky_bucket", "gcra"];
        let rate = (
            0..=100_000_u64,
            prop::sample::select(Unit::ALL.to_vec()),
            1..=50_u32,
            prop::sample::select(rates.to_vec()),
            prop::option::of(1..=100_000_u64),
        )
            .prop_filter_map("the algorithm has bounds", |(requests, unit, multiplier, name, burst)| {
                let kind = Algorithm::named().find(|kind| kind.name == name)?;
                // Without a limit there is no burst.
                let has_burst = ["token_bucket", "gcra"].contains(&name) && requests > 0;
                let spec = LimitSpec { burst: burst.filter(|_| has_burst), ..LimitSpec::default() };
                Limit::from_spec(requests, Measure::Rate { unit, multiplier }, kind, spec).ok()
            });
        let in_flight = (1..=1_000_u64, 1_000..=86_400_000_u64).prop_filter_map("bounds", |(limit, millis)| {
            let kind = Algorithm::named().find(|kind| kind.name == "concurrency")?;
            let measure = Measure::InFlight { hold: Micros::new(millis * 1_000) };
            Limit::from_spec(limit, measure, kind, LimitSpec::default()).ok()
        });
        prop_oneof![rate, in_flight]
    }

    proptest! {
        #[test]
        fn the_text_of_a_limit_is_read_as_this_limit(limit in printed_limit()) {
            let text = limit.to_string();
            prop_assert_eq!(read(&text).map(|custom_limit| custom_limit.limit.to_string()), Ok(text.clone()));
            let stored = CustomLimit::stored_form(&text).into_owned();
            prop_assert_eq!(read(&stored).unwrap().limit, limit, "{}", stored);
        }
    }

    #[test]
    fn a_null_limit_is_rejected_with_the_reason() {
        for text in ["~", "null", "# a comment"] {
            assert!(read(text).unwrap_err().contains("the limit is empty"), "{text}");
        }
    }

    #[test]
    fn limits_by_name_replace_the_limits_of_these_names() {
        let custom_limit =
            read("{limits: {per_day: 500/day, per_month: unlimited, burst: {unit: second, requests_per_unit: 3}}}");
        let custom_limit = custom_limit.unwrap();
        let requests = |name| custom_limit.for_limit(name).map(|limit| (limit.allowance, limit.limit.requests()));
        assert_eq!(requests(Some("per_day")), Some((Allowance::Limited, 500)));
        assert_eq!(requests(Some("per_month")), Some((Allowance::Unlimited, 0)));
        assert_eq!(requests(Some("burst")), Some((Allowance::Limited, 3)));
        assert_eq!([requests(Some("other")), requests(None)], [None, None]);
        assert_eq!(read("5/day").unwrap().for_limit(Some("any")).map(|limit| limit.limit.requests()), Some(5));
        for (text, expected) in [
            ("{limits: {}}", "limits requires at least one limit"),
            ("{limits: [5/day]}", "limits must be a map, not a list"),
            ("{limits: {a: 5/dy}}", "is not a limit"),
            ("{limits: {a: {unit: day, requests_per_unit: 5, name: b}}}", "name is only allowed in rule files"),
            ("{limits: {a: 5/day, a: 6/day}}", "duplicate key"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }

    #[test]
    fn an_instance_has_a_share_of_a_limit_unless_it_is_the_whole_limit() {
        let options = Options { instances: std::num::NonZeroU32::new(3).unwrap(), ..Options::default() };
        for (text, expected) in [
            ("90/minute", Some(30)),
            ("1/minute", None),
            ("{unit: minute, requests_per_unit: 90}", Some(30)),
            ("{unit: minute, requests_per_unit: 1}", None),
        ] {
            let custom_limit = CustomLimit::read(text, options).unwrap();
            assert_eq!(custom_limit.divided_limit.map(|limit| limit.requests()), expected, "{text}");
        }
    }
}
