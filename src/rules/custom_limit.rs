//! The words of `rate_limit` without a rule around them: what an operator gives one customer while the service runs.

use super::{
    compile::Options,
    diagnostic::{Diagnostic, Diagnostics},
    limit::{FailurePolicy, Limit, Unit},
    spec,
};
use crate::algorithm::Consistency;

/// What a descriptor may have, whatever its rule says.
#[derive(Clone, Debug)]
pub struct CustomLimit {
    /// How much.
    pub allowance: Allowance,
    /// The limit, where it is one; else nothing at all.
    pub limit: Limit,
    /// One instance's part of a limit, where that is less.
    pub part: Option<Box<Limit>>,
    /// What happens when the store cannot answer; `None`: as the rule says.
    pub on_error: Option<FailurePolicy>,
    /// What its answers may owe to what the shared counter has not been asked.
    pub consistency: Consistency,
}

/// How much passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowance {
    /// What the limit says.
    Limited,
    /// Everything, uncounted.
    Unlimited,
    /// Nothing, and the store is not asked.
    Blocked,
}

/// The word for a descriptor of which nothing passes. A limit that does the same is a counter's.
pub(super) const BLOCKED: &str = "blocked";
/// The word for one that is not counted.
pub(super) const UNLIMITED: &str = "unlimited";

impl CustomLimit {
    /// Reads `{unit: minute, requests_per_unit: 500}` and whatever else `rate_limit` takes, `500/minute` for short, or
    /// `unlimited`, or `blocked`. An error has every mistake, with its place in the text.
    pub fn read(text: &str, options: Options) -> Result<Self, Vec<Diagnostic>> {
        let mut list = Vec::new();
        let mut problems = Diagnostics::new("limit", &mut list);
        let terms = spec::read_terms(text, options, &mut problems);
        problems.sort();
        // Nobody would see a warning.
        terms.filter(|_| list.is_empty()).ok_or(list)
    }

    pub(super) const fn plain(allowance: Allowance) -> Self {
        Self { allowance, limit: Limit::NOTHING, part: None, on_error: None, consistency: Consistency::Exact }
    }
}

/// `500/minute`: so many in a unit.
pub(super) fn short(text: &str) -> Option<(u32, Unit)> {
    let (requests, unit) = text.split_once('/')?;
    Some((requests.trim().replace('_', "").parse().ok()?, Unit::from_name(unit.trim())?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<CustomLimit, String> {
        CustomLimit::read(text, Options::default())
            .map_err(|problems| problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))
    }

    #[test]
    fn what_a_rule_may_say_of_its_limit_an_operator_may_say_of_a_customer() {
        for (text, requests, algorithm) in [
            ("500/minute", 500, "fixed_window"),
            ("1_000 / Hour", 1_000, "fixed_window"),
            ("{unit: minute, requests_per_unit: 7, algorithm: token_bucket, burst: 20}", 7, "token_bucket"),
            ("{algorithm: concurrency, limit: 3}", 3, "concurrency"),
            ("unit: day\nrequests_per_unit: 0\n", 0, "fixed_window"),
        ] {
            let limit = read(text).unwrap().limit;
            assert_eq!((limit.requests(), limit.algorithm().name()), (requests, algorithm), "{text}");
        }
        assert_eq!(read("unlimited").unwrap().allowance, Allowance::Unlimited);
        assert_eq!(read("{unlimited: true}").unwrap().allowance, Allowance::Unlimited);
        assert_eq!(read("blocked").unwrap().allowance, Allowance::Blocked);
        let terms = read("{unit: minute, requests_per_unit: 9, on_error: allow, consistency: leased}").unwrap();
        assert_eq!((terms.on_error, terms.consistency), (Some(FailurePolicy::Allow), Consistency::Leased));
        let options = Options { instances: std::num::NonZeroU32::new(3).unwrap(), ..Options::default() };
        assert_eq!(CustomLimit::read("90/minute", options).unwrap().part.unwrap().requests(), 30);
    }

    #[test]
    fn what_cannot_be_one_customers_limit_is_refused_with_the_reason() {
        for (text, expected) in [
            ("", "a limit is expected"),
            ("lots", "500/minute"),
            ("500/fortnight", "500/minute"),
            ("-1/minute", "500/minute"),
            ("{unit: minute}", "requests_per_unit"),
            ("{unit: minute, requests_per_unti: 4}", "did you mean requests_per_unit?"),
            (
                "{unit: minute, requests_per_unit: 4, elastic: {resource: db, extra: 50%, idle: 30%, busy: 80%}}",
                "elastic belongs to a rule",
            ),
            ("{by_plan: calls}", "by_plan belongs to a rule"),
            ("{algorithm: concurrency, limit: 3, holder: request}", "holder belongs to a rule"),
            ("{unit: minute, requests_per_unit: 4, replaces: [{name: x}]}", "replaces belongs to a rule"),
            ("{unit: minute, requests_per_unit: 4, unlimited: true}", "not both"),
            ("[1, 2]", "a map was expected"),
            ("{a: *b}", "not YAML"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(expected), "{text}: {error}");
        }
    }
}
