//! From single decisions to the answer: shadow and quota mode, the overall code, the binding limit.

use std::sync::Arc;

use smallvec::SmallVec;

use super::overrides::Mode;
use crate::{
    algorithm::Micros,
    rules::{Limit, Measure, Metadata},
    store::{Decider, Grant},
};

/// Whether something passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// It passes.
    Ok,
    /// It is refused.
    OverLimit,
}

/// What an operator has said of a descriptor, over what its rule says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideKind {
    /// It has terms of its own.
    Limit,
    /// Its rule has been switched.
    Switch(Mode),
}

impl OverrideKind {
    /// The word for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Switch(mode) => mode.name(),
        }
    }
}

/// The limit that applied.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentLimit {
    /// How many requests pass in one window, or at once.
    pub requests: u32,
    /// And which of these.
    pub measure: Measure,
    /// The rule's name for it.
    pub name: Option<Arc<str>>,
    /// The name of its policy, where it is wanted.
    pub policy: Option<Arc<str>>,
    /// How much passes at once.
    pub quota: u64,
    /// And in how much time that comes back.
    pub window: Micros,
}

impl CurrentLimit {
    pub(crate) fn new(limit: &Limit, name: Option<&Arc<str>>, policy: Option<Arc<str>>) -> Self {
        let (quota, window) = limit.policy();
        Self { requests: limit.requests(), measure: limit.measure(), name: name.cloned(), policy, quota, window }
    }
}

/// The answer to one descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Whether it passes.
    pub code: Code,
    /// What applied, if anything that is counted.
    pub limit: Option<CurrentLimit>,
    /// Hits that would still pass; `u32::MAX` for an unlimited rule.
    pub remaining: u32,
    /// Until everything is restored.
    pub reset: Option<Micros>,
    /// Until more remains than now.
    pub next: Micros,
    /// When the limit refuses: until the same cost would pass; `None` when it never will.
    pub retry_after: Option<Micros>,
    /// How long to wait before going on.
    pub delay: Micros,
    /// It passes only because the limit is soft.
    pub soft: bool,
    /// It passes only because a resource has capacity to spare.
    pub elastic: bool,
    /// It is refused for overload, and not for what this caller has had.
    pub shed: bool,
    /// Who says so.
    pub decider: Decider,
    /// An operator's word that stood over the rule.
    pub override_kind: Option<OverrideKind>,
    /// Hits that the caller may admit by himself.
    pub grant: Option<Grant>,
    /// Asking again while it is refused makes the wait longer.
    pub denial_counts: bool,
    /// Refuses only together with every other quota descriptor.
    pub quota: bool,
    /// An unlimited rule: it has no say in the overall code.
    pub unlimited: bool,
}

impl Status {
    /// No rule applies, or none that is counted.
    pub const NO_LIMIT: Self = Self {
        code: Code::Ok,
        limit: None,
        remaining: 0,
        reset: None,
        next: Micros::ZERO,
        retry_after: None,
        delay: Micros::ZERO,
        soft: false,
        elastic: false,
        shed: false,
        decider: Decider::Store,
        override_kind: None,
        grant: None,
        denial_counts: false,
        quota: false,
        unlimited: false,
    };
    /// A rule that limits nothing.
    pub const UNLIMITED: Self = Self { remaining: u32::MAX, unlimited: true, ..Self::NO_LIMIT };

    /// Refused.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.code == Code::OverLimit
    }

    /// What a caller is told to wait, in whole seconds rounded up: for a refusal until this request would pass, and
    /// never 0; else until everything is restored.
    #[must_use]
    pub fn reset_seconds(&self) -> Option<u64> {
        let reset = self.reset?;
        let refused = self.is_over().then(|| self.retry_after.unwrap_or(reset).ceil_secs().max(1));
        Some(refused.unwrap_or(reset.ceil_secs()))
    }
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Whether the request passes.
    pub overall: Code,
    /// One for each descriptor, in their order.
    pub statuses: SmallVec<[Status; 1]>,
    /// What the rules of the descriptors that passed have to say.
    pub metadata: Option<Metadata>,
}

/// The limit that a caller should mind, for headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Requests per unit.
    pub limit: u32,
    /// What is left.
    pub remaining: u32,
    /// Whole seconds: see [`Status::reset_seconds`].
    pub reset_seconds: u64,
}

impl Verdict {
    /// Refused iff an ordinary descriptor is over, or every quota descriptor is (and there is one).
    pub(super) fn overall(statuses: &[Status]) -> Code {
        let counted = || statuses.iter().filter(|status| !status.unlimited);
        let ordinary = counted().any(|status| !status.quota && status.is_over());
        let mut quota = counted().filter(|status| status.quota).peekable();
        let all_quota = quota.peek().is_some() && quota.all(Status::is_over);
        if ordinary || all_quota { Code::OverLimit } else { Code::Ok }
    }

    /// The descriptor with the least remaining; or the last ordinary one that is over.
    #[must_use]
    pub fn binding_status(&self) -> Option<&Status> {
        let limited = || self.statuses.iter().filter(|status| status.limit.is_some());
        let over = limited().rfind(|status| !status.quota && status.is_over());
        let least = || limited().filter(|status| status.remaining < u32::MAX).min_by_key(|status| status.remaining);
        over.or_else(least)
    }

    /// The numbers of that descriptor.
    #[must_use]
    pub fn binding(&self) -> Option<Binding> {
        let status = self.binding_status()?;
        Some(Binding {
            limit: status.limit.as_ref()?.requests,
            remaining: status.remaining,
            reset_seconds: status.reset_seconds().unwrap_or_default(),
        })
    }

    /// Whether the request is refused.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        self.overall == Code::OverLimit
    }

    /// Whether the request is refused for overload that its caller did not cause, and for nothing else.
    #[must_use]
    pub fn is_shed(&self) -> bool {
        let over = || self.statuses.iter().filter(|status| status.is_over());
        self.overall == Code::OverLimit && over().all(|status| status.shed)
    }

    /// When the request is refused: until it would pass; `None` when it never will. Every ordinary descriptor has to let
    /// it pass, and of the quota descriptors, where all of them refuse, the first.
    #[must_use]
    pub fn retry_after(&self) -> Option<Micros> {
        if self.overall != Code::OverLimit {
            return None;
        }
        let over = |quota| self.statuses.iter().filter(move |status| status.quota == quota && status.is_over());
        let ordinary = over(false).try_fold(Micros::ZERO, |longest, status| Some(longest.max(status.retry_after?)))?;
        if self.statuses.iter().any(|status| status.quota && !status.unlimited && !status.is_over()) {
            return Some(ordinary);
        }
        let quota = over(true).filter_map(|status| status.retry_after).min();
        if over(true).next().is_some() { Some(ordinary.max(quota?)) } else { Some(ordinary) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rules::Unit;

    fn status(code: Code, quota: bool, remaining: u32) -> Status {
        let limit = Limit::new(100 + remaining, Unit::Minute, 1).unwrap();
        let limit = Some(CurrentLimit::new(&limit, None, None));
        Status { code, limit, remaining, reset: Some(Micros::new(1)), quota, ..Status::NO_LIMIT }
    }

    #[test]
    fn quota_descriptors_refuse_only_together() {
        use Code::{Ok, OverLimit as Over};
        for (statuses, expected) in [
            (vec![], Ok),
            (vec![Status::NO_LIMIT, Status::UNLIMITED], Ok),
            (vec![status(Over, true, 0), status(Ok, true, 1)], Ok),
            (vec![status(Over, true, 0), status(Over, true, 0)], Over),
            (vec![status(Over, true, 0), status(Ok, false, 1)], Over),
            (vec![status(Ok, true, 1), status(Over, false, 0)], Over),
        ] {
            assert_eq!(Verdict::overall(&statuses), expected, "{statuses:?}");
        }
    }

    #[test]
    fn a_retry_waits_for_every_ordinary_limit_and_for_the_first_quota() {
        use Code::{Ok, OverLimit as Over};
        let over = |quota, wait: Option<u64>| Status { retry_after: wait.map(Micros::new), ..status(Over, quota, 0) };
        for (statuses, expected) in [
            (vec![status(Ok, false, 1)], None),
            (vec![over(false, Some(3)), over(false, Some(5)), status(Ok, false, 1)], Some(5)),
            (vec![over(false, Some(3)), over(false, None)], None),
            (vec![over(false, Some(3)), over(true, Some(9)), status(Ok, true, 1)], Some(3)),
            (vec![over(true, Some(9)), over(true, Some(7)), over(true, None)], Some(7)),
            (vec![over(false, Some(8)), over(true, Some(7))], Some(8)),
            (vec![over(true, None)], None),
            (vec![over(false, Some(3)), over(true, Some(9)), status(Ok, false, 1)], Some(9)),
            (vec![over(false, Some(3)), over(true, Some(9)), Status { quota: true, ..Status::UNLIMITED }], Some(9)),
        ] {
            let overall = Verdict::overall(&statuses);
            let verdict = Verdict { overall, statuses: statuses.into(), metadata: None };
            assert_eq!(verdict.retry_after().map(Micros::get), expected, "{:?}", verdict.statuses);
        }
    }

    #[test]
    fn headers_follow_the_tightest_limit_or_the_last_refusal() {
        use Code::{Ok, OverLimit as Over};
        let limit = |statuses: Vec<Status>| {
            let verdict = Verdict { overall: Ok, statuses: statuses.into(), metadata: None };
            verdict.binding().map(|binding| (binding.limit, binding.reset_seconds))
        };
        assert_eq!(limit(vec![Status::UNLIMITED]), None);
        assert_eq!(limit(vec![status(Ok, false, 5), status(Ok, false, 3), status(Ok, false, 9)]), Some((103, 1)));
        assert_eq!(limit(vec![status(Over, false, 2), status(Over, false, 7), status(Ok, false, 1)]), Some((107, 1)));
        assert_eq!(limit(vec![status(Over, true, 4), status(Ok, false, 1)]), Some((101, 1)));
        // More than can be said is no number to show.
        assert_eq!(limit(vec![Status { remaining: u32::MAX, ..status(Ok, false, 1) }]), None);
    }
}
