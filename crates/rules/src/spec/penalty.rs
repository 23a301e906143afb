//! [`PenaltyKeywords`]: `penalty` and `penalty_max`, the time for which all hits are denied after a limit was exceeded.

use sluicegate_algorithm::{Consistency, Micros, penalty::Penalty};

use super::{Reader, algorithm};
use crate::{
    diagnostic::Location,
    limit::{Limit, Measure},
    yaml::Yaml,
};

/// The values and locations of `penalty` and `penalty_max`.
#[derive(Default)]
pub(super) struct PenaltyKeywords {
    shortest: Option<Field>,
    longest: Option<Field>,
}

#[derive(Clone, Copy)]
struct Field {
    /// The length; `None` if it is invalid, which has been reported.
    length: Option<Micros>,
    location: Location,
}

/// The parts of a rule with which a penalty cannot be combined.
pub(super) struct Context<'a> {
    pub(super) limit: &'a Limit,
    pub(super) consistency: Consistency,
    pub(super) has_modifiers: bool,
    pub(super) is_elastic: bool,
    pub(super) count_denied: bool,
}

impl PenaltyKeywords {
    /// Reads one of the keywords.
    pub(super) fn read(&mut self, reader: &mut Reader<'_, '_>, keyword: &str, location: Location, node: &Yaml) {
        let field = Some(Field { length: algorithm::duration(reader, keyword, node), location });
        match keyword {
            "penalty" => self.shortest = field,
            _ => self.longest = field,
        }
    }

    /// Reports the keywords, because an unlimited rule cannot be exceeded.
    pub(super) fn reject_all(&self, reader: &mut Reader<'_, '_>) {
        for (name, field) in [("penalty", self.shortest), ("penalty_max", self.longest)] {
            if let Some(field) = field {
                reader.diagnostics.error(field.location, format!("{name} cannot be combined with unlimited: true"));
            }
        }
    }

    /// Builds the penalty of a limit. Returns `None` if there is none, or if it is invalid.
    pub(super) fn build(&self, reader: &mut Reader<'_, '_>, context: &Context<'_>) -> Option<Penalty> {
        let Some(shortest) = self.shortest else {
            if let Some(longest) = self.longest {
                reader.diagnostics.error(longest.location, "penalty_max requires penalty, the length of the first one");
            }
            return None;
        };
        if let Some(reason) = context.contradiction() {
            reader.diagnostics.error(shortest.location, format!("penalty cannot be combined with {reason}"));
            return None;
        }
        let longest = self.longest.unwrap_or(shortest);
        let penalty = Penalty::new(shortest.length?, longest.length?);
        if penalty.is_none() {
            let message = "penalty must be longer than 0, and penalty_max at least as long and at most 100 years";
            reader.diagnostics.error(longest.location, message);
        }
        penalty
    }
}

impl Context<'_> {
    /// Returns a keyword that excludes penalties, with the reason.
    fn contradiction(&self) -> Option<&'static str> {
        if matches!(self.limit.measure(), Measure::InFlight { .. }) {
            return Some("a limit of requests in flight, which a caller exceeds without a fault of its own");
        }
        if self.has_modifiers {
            return Some("class, because a class can be denied on account of others");
        }
        if self.is_elastic {
            return Some("elastic, because the limit can fall below what a caller has already used");
        }
        if self.count_denied {
            return Some("count_denied: true, because hits in a penalty change nothing");
        }
        match self.consistency {
            Consistency::Exact => None,
            Consistency::Leased => Some("consistency: leased, because a lease allows hits without a call to the store"),
            Consistency::Eventual => {
                Some("consistency: eventual, because instances decide without a call to the store")
            }
        }
    }
}
