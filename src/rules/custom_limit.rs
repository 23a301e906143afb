//! [`CustomLimit`]: a limit outside of a rule, which an operator's override gives to one entity.

use super::{
    compile::Options,
    diagnostic::{Diagnostic, Diagnostics},
    limit::{FailurePolicy, Limit, Unit},
    spec,
};
use crate::algorithm::Consistency;

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
    /// Reads a map with the keywords of `rate_limit`, such as `{unit: minute, requests_per_unit: 500}`, or one of the
    /// short forms `500/minute`, `unlimited` and `blocked`.
    ///
    /// # Errors
    ///
    /// Returns every mistake with its location in the text.
    pub fn read(text: &str, options: Options) -> Result<Self, Vec<Diagnostic>> {
        let mut list = Vec::new();
        let mut diagnostics = Diagnostics::new("limit", &mut list);
        let custom_limit = spec::read_custom_limit(text, options, &mut diagnostics);
        diagnostics.sort();
        // Warnings are treated as errors, because a successful call has no way to report them.
        custom_limit.filter(|_| list.is_empty()).ok_or(list)
    }

    pub(super) const fn with_allowance(allowance: Allowance) -> Self {
        Self { allowance, limit: Limit::DENY_ALL, divided_limit: None, on_error: None, consistency: Consistency::Exact }
    }
}

/// Parses the short form `500/minute` into a number of requests and a unit.
pub(super) fn parse_shorthand(text: &str) -> Option<(u32, Unit)> {
    let (requests, unit) = text.split_once('/')?;
    Some((requests.trim().replace('_', "").parse().ok()?, Unit::from_name(unit.trim())?))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_null_limit_is_rejected_with_the_reason() {
        for text in ["~", "null", "# a comment"] {
            assert!(read(text).unwrap_err().contains("the limit is empty"), "{text}");
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
