//! [`Verdict`]: the decision about a whole request, built from one [`Status`] per descriptor.

use std::sync::Arc;

use sluicegate_algorithm::Micros;
use sluicegate_rules::{Denial, Limit, Measure, Metadata};
use sluicegate_store::{Decider, Grant};
use smallvec::SmallVec;

use super::{Request, overrides::Mode};

/// Whether a request or a descriptor is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Allowed.
    Ok,
    /// Denied.
    OverLimit,
}

/// Kind of the override that applied to a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OverrideKind {
    /// A custom limit of the entity.
    Limit,
    /// A switch for the rule.
    Switch(Mode),
}

impl OverrideKind {
    /// Returns the name of the kind in responses.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit => "limit",
            Self::Switch(mode) => mode.name(),
        }
    }
}

/// The limit that applied to a descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CurrentLimit {
    /// Number of requests allowed per window, or at the same time.
    pub requests: u64,
    /// Whether `requests` is per window or at the same time.
    pub measure: Measure,
    /// The name that the rule gives the limit.
    pub name: Option<Arc<str>>,
    /// The name of the limit's policy in response headers, if verdicts contain policies.
    pub policy: Option<Arc<str>>,
    /// Maximum number of hits that can be allowed at one time.
    pub quota: u64,
    /// Time in which `quota` is fully restored.
    pub window: Micros,
}

impl CurrentLimit {
    /// Returns the numbers of a limit, with its name and the name of its policy.
    #[must_use]
    pub fn new(limit: &Limit, name: Option<&Arc<str>>, policy: Option<Arc<str>>) -> Self {
        let (quota, window) = limit.policy();
        Self { requests: limit.requests(), measure: limit.measure(), name: name.cloned(), policy, quota, window }
    }
}

/// Returns whether a denied cost is above the maximum of its limit, so that it is denied at any time.
pub(super) fn never_fits(retry_after: Option<Micros>, quota: u64, cost: u64) -> bool {
    retry_after.is_none() && quota > 0 && cost > quota
}

/// The decision about one descriptor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Status {
    /// Whether the descriptor is allowed.
    pub code: Code,
    /// The limit that applied; `None` if nothing is counted.
    pub limit: Option<CurrentLimit>,
    /// Hits that would still be allowed; `u32::MAX` for an unlimited rule, as in the protocol.
    pub remaining: u64,
    /// Time until the full limit is available again.
    pub reset: Option<Micros>,
    /// Time until more hits remain than now.
    pub next: Micros,
    /// Time until the same cost would be allowed, if it is denied; `None` if it never would.
    pub retry_after: Option<Micros>,
    /// Maximum of the random time that is added to the header `Retry-After`.
    pub retry_jitter: Micros,
    /// Message, headers and status of the rule's denials, if the descriptor is denied.
    pub denial: Option<Arc<Denial>>,
    /// Whether the cost is denied because it is above the largest cost that the limit can allow.
    pub never_fits: bool,
    /// Time that an allowed request must wait before it continues.
    pub delay: Micros,
    /// Whether the descriptor is allowed only because the limit is soft.
    pub soft: bool,
    /// Whether the descriptor is allowed only because a resource has spare capacity.
    pub elastic: bool,
    /// Whether the descriptor is denied because of overload that this caller did not cause.
    pub shed: bool,
    /// The part of the service that decided, such as the store or the deny cache.
    pub decider: Decider,
    /// Kind of the override that took precedence over the rule.
    pub override_kind: Option<OverrideKind>,
    /// Hits that the caller may admit without a request.
    pub grant: Option<Grant>,
    /// Whether a denial must not be cached: denied requests count against the limit, or the denial can end at any time.
    pub denial_counts: bool,
    /// Whether the descriptor is in quota mode: it denies the request only if all others in quota mode do.
    pub quota: bool,
    /// Whether the rule is unlimited, and the status does not influence the overall code.
    pub unlimited: bool,
    /// Statuses by the other limits of a rule with several limits, in no particular order. This status is that of the
    /// limit that denies with the longest wait. If none denies, it is that of the limit of which the smallest part
    /// remains.
    pub others: Vec<Status>,
}

impl Status {
    /// The status of a descriptor for which nothing is counted.
    pub const NO_LIMIT: Self = Self::without_limit(0, false);
    /// The status of a descriptor with an unlimited rule.
    pub const UNLIMITED: Self = Self::without_limit(u32::MAX as u64, true);

    const fn without_limit(remaining: u64, unlimited: bool) -> Self {
        Self {
            code: Code::Ok,
            limit: None,
            remaining,
            reset: None,
            next: Micros::ZERO,
            retry_after: None,
            retry_jitter: Micros::ZERO,
            denial: None,
            never_fits: false,
            delay: Micros::ZERO,
            soft: false,
            elastic: false,
            shed: false,
            decider: Decider::Store,
            override_kind: None,
            grant: None,
            denial_counts: false,
            quota: false,
            unlimited,
            others: Vec::new(),
        }
    }

    /// Returns whether the descriptor is denied.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.code == Code::OverLimit
    }

    /// Returns the status of a denied descriptor, with `never_fits` set by its cost.
    ///
    /// A missing `retry_after` alone does not mean that the cost never fits: it can have other reasons, such as the
    /// failure policy.
    #[must_use]
    pub(super) fn with_cost(self, cost: u64) -> Self {
        let quota = match &self.limit {
            Some(limit) => limit.quota,
            None => u64::MAX,
        };
        Self { never_fits: never_fits(self.retry_after, quota, cost), ..self }
    }

    /// Adds the status by a further limit of the same rule.
    pub(super) fn join(&mut self, mut other: Self) {
        if other.precedes(self) {
            std::mem::swap(self, &mut other);
            self.others = std::mem::take(&mut other.others);
        }
        self.others.push(other);
    }

    /// Returns whether this status represents the descriptor rather than `other`, by another limit of the same rule.
    fn precedes(&self, other: &Self) -> bool {
        match (self.is_over(), other.is_over()) {
            (true, false) => true,
            (false, true) => false,
            (true, true) => self.is_later_than(other),
            (false, false) => self.part_per_quota() < other.part_per_quota(),
        }
    }

    /// Returns whether this denial ends later than `other`. A denial without an end is the last.
    pub(super) fn is_later_than(&self, other: &Self) -> bool {
        match (self.retry_after, other.retry_after) {
            (Some(wait), Some(other_wait)) => wait > other_wait,
            (None, Some(_)) => true,
            (_, None) => false,
        }
    }

    /// Returns the remaining part of the limit, infinite if nothing is counted.
    fn part_per_quota(&self) -> f64 {
        match &self.limit {
            Some(limit) if !self.unlimited => self.remaining as f64 / limit.quota.max(1) as f64,
            _ => f64::INFINITY,
        }
    }

    /// Removes the numbers of the limit. A denial still says when to try again.
    pub(super) fn hide(&mut self) {
        self.limit = None;
        self.remaining = 0;
        self.next = Micros::ZERO;
        self.soft = false;
        self.elastic = false;
        if !self.is_over() {
            self.reset = None;
        }
    }

    /// Returns the reset time for callers, in whole seconds rounded up.
    ///
    /// For a denied descriptor, this is the time until the request would be allowed, at least 1. Otherwise it is the
    /// time until the full limit is available again.
    #[must_use]
    pub fn reset_seconds(&self) -> Option<u64> {
        let reset = self.reset?;
        if self.is_over() {
            return Some(self.retry_after.unwrap_or(reset).ceil_secs().max(1));
        }
        Some(reset.ceil_secs())
    }
}

/// The decision about a request.
#[derive(Clone, Debug, PartialEq)]
pub struct Verdict {
    /// Whether the request is allowed.
    pub overall: Code,
    /// One status per descriptor, in their order.
    pub statuses: SmallVec<[Status; 1]>,
    /// Merged metadata of the rules of the allowed descriptors.
    pub metadata: Option<Metadata>,
}

/// Numbers of the tightest limit, for response headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Binding {
    /// Number of requests allowed per window, or at the same time.
    pub limit: u64,
    /// Hits that would still be allowed.
    pub remaining: u64,
    /// Reset time in whole seconds: see [`Status::reset_seconds`].
    pub reset_seconds: u64,
}

impl Verdict {
    /// Returns the verdict of a request without limits.
    pub(super) fn without_limits(request: &Request<'_>) -> Self {
        let statuses = request.descriptors.iter().map(|_| Status::NO_LIMIT).collect();
        Self { overall: Code::Ok, statuses, metadata: None }
    }

    /// Returns `OverLimit` if a descriptor outside of quota mode is denied, or if there are descriptors in quota mode
    /// and all of them are denied.
    pub(super) fn overall(statuses: &[Status]) -> Code {
        let mut has_quota = false;
        let mut all_quota_over = true;
        for status in statuses {
            if status.unlimited {
                continue;
            }
            if status.quota {
                has_quota = true;
                all_quota_over &= status.is_over();
            } else if status.is_over() {
                return Code::OverLimit;
            }
        }
        if has_quota && all_quota_over { Code::OverLimit } else { Code::Ok }
    }

    /// Returns the last denied status that is not in quota mode, or else the status with the fewest remaining hits.
    #[must_use]
    pub fn binding_status(&self) -> Option<&Status> {
        let denied = self.statuses.iter().rfind(|status| status.limit.is_some() && !status.quota && status.is_over());
        if denied.is_some() {
            return denied;
        }
        let limited = self.statuses.iter().filter(|status| status.limit.is_some());
        limited.min_by_key(|status| status.remaining)
    }

    /// Returns the numbers of [`Verdict::binding_status`].
    #[must_use]
    pub fn binding(&self) -> Option<Binding> {
        let status = self.binding_status()?;
        Some(Binding {
            limit: status.limit.as_ref()?.requests,
            remaining: status.remaining,
            reset_seconds: status.reset_seconds().unwrap_or_default(),
        })
    }

    /// Returns whether the request is denied.
    #[must_use]
    pub fn is_denied(&self) -> bool {
        self.overall == Code::OverLimit
    }

    /// Returns the largest cost that a limit can allow, if the request is denied because it costs more than that.
    ///
    /// A repetition of such a request is always denied. Returns the smallest of several limits.
    #[must_use]
    pub fn max_cost(&self) -> Option<u64> {
        if self.overall != Code::OverLimit {
            return None;
        }
        let too_large = self.statuses.iter().filter(|status| status.never_fits);
        too_large.filter_map(|status| status.limit.as_ref()).map(|limit| limit.quota).min()
    }

    /// Returns whether the request is denied only because of overload that its caller did not cause.
    #[must_use]
    pub fn is_shed(&self) -> bool {
        self.overall == Code::OverLimit && self.statuses.iter().all(|status| status.shed || !status.is_over())
    }

    /// Returns the maximum of the random time that is added to the header `Retry-After`.
    #[must_use]
    pub fn retry_jitter(&self) -> Micros {
        let denied = self.statuses.iter().filter(|status| status.is_over());
        denied.map(|status| status.retry_jitter).max().unwrap_or_default()
    }

    /// Returns the time until a denied request would be allowed.
    ///
    /// All descriptors outside of quota mode must allow it and, if all descriptors in quota mode deny, the first of
    /// these. Returns `None` if the request is allowed, or would never be allowed.
    #[must_use]
    pub fn retry_after(&self) -> Option<Micros> {
        if self.overall != Code::OverLimit {
            return None;
        }
        let mut wait = Micros::ZERO;
        for status in &self.statuses {
            if !status.quota && status.is_over() {
                wait = wait.max(status.retry_after?);
            }
        }
        if self.statuses.iter().any(|status| status.quota && !status.unlimited && !status.is_over()) {
            return Some(wait);
        }
        let mut denied_quota = self.statuses.iter().filter(|status| status.quota && status.is_over()).peekable();
        if denied_quota.peek().is_none() {
            return Some(wait);
        }
        let first = denied_quota.filter_map(|status| status.retry_after).min()?;
        Some(wait.max(first))
    }
}

#[cfg(test)]
mod tests {
    use sluicegate_rules::Unit;

    use super::*;

    fn status(code: Code, quota: bool, remaining: u64) -> Status {
        let limit = Limit::new(100 + remaining, Unit::Minute, 1).unwrap();
        let limit = Some(CurrentLimit::new(&limit, None, None));
        Status { code, limit, remaining, reset: Some(Micros::new(1)), quota, ..Status::NO_LIMIT }
    }

    #[test]
    fn quota_descriptors_deny_only_together() {
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
    fn a_request_that_costs_more_than_a_limit_allows_has_a_maximum() {
        use Code::{Ok, OverLimit as Over};
        let costs = |code, remaining, wait: Option<u64>, cost| {
            Status { retry_after: wait.map(Micros::new), ..status(code, false, remaining) }.with_cost(cost)
        };
        for (statuses, expected) in [
            (vec![costs(Over, 0, None, 101)], Some(100)),
            (vec![costs(Over, 9, None, 110), costs(Over, 3, None, 110)], Some(103)),
            (vec![costs(Over, 0, None, 100)], None),
            (vec![costs(Over, 0, Some(3), 101)], None),
            (vec![status(Ok, false, 0)], None),
        ] {
            let overall = Verdict::overall(&statuses);
            let verdict = Verdict { overall, statuses: statuses.into(), metadata: None };
            assert_eq!(verdict.max_cost(), expected, "{:?}", verdict.statuses);
        }
    }

    #[test]
    fn headers_describe_the_tightest_limit_or_the_last_denial() {
        use Code::{Ok, OverLimit as Over};
        let limit = |statuses: Vec<Status>| {
            let verdict = Verdict { overall: Ok, statuses: statuses.into(), metadata: None };
            verdict.binding().map(|binding| (binding.limit, binding.reset_seconds))
        };
        assert_eq!(limit(vec![Status::UNLIMITED]), None);
        assert_eq!(limit(vec![status(Ok, false, 5), status(Ok, false, 3), status(Ok, false, 9)]), Some((103, 1)));
        assert_eq!(limit(vec![status(Over, false, 2), status(Over, false, 7), status(Ok, false, 1)]), Some((107, 1)));
        assert_eq!(limit(vec![status(Over, true, 4), status(Ok, false, 1)]), Some((101, 1)));
        assert_eq!(limit(vec![Status::UNLIMITED, status(Ok, false, 5_000_000_000)]), Some((5_000_000_100, 1)));
    }

    #[test]
    fn a_request_is_shed_if_only_overload_denies_it() {
        use Code::{Ok, OverLimit as Over};
        let shed = || Status { shed: true, ..status(Over, false, 0) };
        for (statuses, denied, is_shed) in [
            (vec![status(Ok, false, 1)], false, false),
            (vec![status(Ok, false, 1), shed()], true, true),
            (vec![status(Over, false, 0)], true, false),
            (vec![shed(), status(Over, false, 0)], true, false),
        ] {
            let overall = Verdict::overall(&statuses);
            let verdict = Verdict { overall, statuses: statuses.into(), metadata: None };
            assert_eq!((verdict.is_denied(), verdict.is_shed()), (denied, is_shed), "{:?}", verdict.statuses);
        }
    }
}
