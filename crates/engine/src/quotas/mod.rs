//! Quotas for callers of Envoy's quota protocol, which limit requests themselves: [`Engine::assign`] counts the reported
//! requests, and divides the limit among its callers.
//!
//! A quota is a part of the limit as a token bucket: a share of the rate, and the same share of the burst. The shares of
//! all callers are at most the whole limit ([`Assignments`]).
//!
//! The limit's own counter, which callers of the other protocols use too, counts the requests before the caller can
//! admit them ([`Prepayment`]). A report contains the number of admitted ones, and the rest remains for the time until the
//! next report. So callers of both protocols together are within the limit, although a report arrives late.
//!
//! A quota ends `quotas.ttl` after its delivery (`ends_at`). If the share of its caller is to be reduced, it is not
//! extended, so the next one begins when it ends (`unextended_lifetime`). At the caller, it ends earlier than here
//! (`DELIVERY_TIME`).

mod divisible_limit;

pub use divisible_limit::{Prepaid, TokenBucket, Tokens};

use std::{
    hash::{DefaultHasher, Hash, Hasher},
    num::NonZeroU32,
};

use sluicegate_algorithm::{
    Action, Algorithm, Decision, Program,
    assignments::{Assignments, Share},
};
use sluicegate_rules::{Entry, FailurePolicy};
use sluicegate_store::{AHEAD, Charge, Counter, Hit, HitDecision, Store, StoreError, only_answer};
use smallvec::SmallVec;

use self::divisible_limit::{DivisibleLimit, Prepayment, to_signed};
use super::{
    Descriptor, Engine, Micros, Snapshot,
    matching::{AppliedLimit, Match, holder_id},
    statistics::CountContext,
};

/// A report about a bucket, and the lifetime of the next quota.
#[derive(Clone, Debug)]
pub struct BucketReport<'a> {
    /// The namespace of the rules; not empty.
    pub domain: &'a str,
    /// The descriptor of the bucket, in the order of the rules.
    pub entries: SmallVec<[Entry<'a>; 3]>,
    /// Number of the caller, of 48 bits.
    pub caller: u64,
    /// Requests that the caller has admitted since its last report.
    pub allowed: u64,
    /// Requests that the caller has denied since its last report.
    pub denied: u64,
    /// Requests per second that the caller expects; `None` before it is known.
    pub demand: Option<f64>,
    /// Time since the last report; 0 if this is not a report.
    pub elapsed: Micros,
    /// The caller's quota since its last report.
    pub held: HeldQuota,
    /// Normal lifetime of a quota at the caller.
    pub ttl: Micros,
    /// Time after which the next quota has ended in any case: `ttl` and [`DELIVERY_TIME`].
    pub lifetime: Micros,
}

/// The requests that a caller may admit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quota {
    /// All requests.
    AllowAll,
    /// No request.
    DenyAll,
    /// The requests of a token bucket.
    TokenBucket(TokenBucket),
}

/// A quota with the hits that are counted for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct HeldQuota {
    /// The quota; `None` before the first one.
    pub quota: Option<Quota>,
    /// Largest possible number of tokens in the quota's token bucket at the last report.
    pub tokens: Tokens,
    /// The hits that are counted in advance.
    pub prepaid: Prepaid,
    /// Time of the caller's last report.
    pub reported_at: Micros,
    /// Time at which the quota, or that of an earlier stream, ends at the latest.
    pub ends_at: Micros,
}

impl HeldQuota {
    fn token_bucket(&self) -> Option<TokenBucket> {
        match self.quota {
            Some(Quota::TokenBucket(bucket)) => Some(bucket),
            Some(Quota::AllowAll | Quota::DenyAll) | None => None,
        }
    }

    /// Returns the number of requests that the caller may have admitted since its last report, at `until`.
    fn max_admitted(&self, bucket: &TokenBucket, until: Micros) -> u64 {
        bucket.max_admitted(self.tokens, until - self.reported_at)
    }

    /// Returns whether [`Engine::prepay`] has to count hits.
    #[must_use]
    pub fn is_payment_due(&self, now: Micros) -> bool {
        if self.prepaid.counter.is_none() || now >= self.ends_at {
            return false;
        }
        let Some(bucket) = self.token_bucket() else {
            return false;
        };
        match self.prepaid.window_end {
            // The next window begins so soon that its hits should be counted now.
            Some(end) => now + AHEAD >= end,
            None => self.prepaid.missing(self.max_admitted(&bucket, now + SECOND)) > 0,
        }
    }
}

/// The next quota of a caller, and for how long it lasts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Assignment {
    /// The next quota.
    pub quota: Quota,
    /// Largest possible number of tokens in the quota's token bucket now.
    pub tokens: Tokens,
    /// The hits that are counted in advance.
    pub prepaid: Prepaid,
    /// Share of the limit in millionths; `None` if there is no limit, or none that can be shared.
    pub share: Option<u64>,
    /// Time after which the quota has ended at the caller in any case, including [`DELIVERY_TIME`]; `None` for
    /// [`BucketReport::lifetime`]. If the share is to be reduced, the quota is not extended, and this time is shorter,
    /// but at least [`Assignments::REDUCTION_TIME`].
    pub lifetime: Option<Micros>,
    /// Time after which the quota should be computed again without a report, if it depends on more than reports.
    pub review_in: Option<Micros>,
}

/// The outcome of a report about a bucket.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ReportOutcome {
    /// The next quota. `None` before rules are loaded, and if the failure policy is `error` and the limit cannot be divided
    /// or the store has failed.
    pub assignment: Option<Assignment>,
    /// Whether the reported requests are counted, or need not be. It is `false` if the store has failed; then the quota
    /// is that of the failure policy.
    pub is_counted: bool,
}

impl ReportOutcome {
    fn counted(assignment: Option<Assignment>) -> Self {
        Self { assignment, is_counted: true }
    }
}

/// The hits that are counted in advance after a payment.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Payment {
    /// The hits.
    pub prepaid: Prepaid,
    /// Whether the quota must be computed again, because the limit is used up or has changed.
    pub needs_review: bool,
}

/// Maximum time in which a message with a quota reaches its caller, where its lifetime begins.
pub const DELIVERY_TIME: Micros = Micros::from_secs(2);
/// Time between two payments for a quota.
const SECOND: Micros = Micros::from_secs(1);
/// Time before the end of a quota at the caller at which the quota is reviewed, if it is not extended.
pub const REVIEW_TIME: Micros = Micros::from_secs(2);

impl Assignment {
    fn blanket(quota: Quota) -> Self {
        Self {
            quota,
            tokens: Tokens::default(),
            prepaid: Prepaid::default(),
            share: None,
            lifetime: None,
            review_in: None,
        }
    }

    /// Returns a quota without requests, which is reviewed after `review_in`.
    fn denial(prepaid: Prepaid, review_in: Micros) -> Self {
        Self { prepaid, review_in: Some(review_in), ..Self::blanket(Quota::DenyAll) }
    }

    fn bucket(bucket: TokenBucket, tokens: Tokens) -> Self {
        Self { tokens, ..Self::blanket(Quota::TokenBucket(bucket)) }
    }
}

/// A limit that is divided, and its counter.
struct SharedCounter<'s> {
    applied: AppliedLimit<'s>,
    /// The algorithm of the limit, with the window of the entity.
    algorithm: Algorithm,
    limit: DivisibleLimit,
    key: Vec<u8>,
    /// Hash of the key, by which hits that were counted by another counter are recognised.
    number: NonZeroU32,
}

impl<'a> BucketReport<'a> {
    fn descriptor(&self) -> Descriptor<'a> {
        Descriptor::new(self.entries.clone())
    }
}

impl SharedCounter<'_> {
    /// Returns a counter in the store of the limit.
    fn stored(&self, name: Vec<u8>, program: impl Into<Program>) -> Counter {
        Counter { per_second: self.applied.limit.is_per_second(), ..Counter::new(name, program) }
    }

    /// Removes the reported requests from the hits that were counted in advance, and returns the number of others that
    /// must be counted now.
    fn spend(&self, held: &mut HeldQuota, report: &BucketReport<'_>, now: Micros) -> u64 {
        let last_report = held.reported_at;
        let prepaid = &mut held.prepaid;
        if prepaid.counter != Some(self.number) {
            *prepaid = Prepaid::default();
        }
        if report.elapsed > Micros::ZERO {
            held.reported_at = now;
            if let Some(bucket) = report.held.token_bucket() {
                let tokens = held.tokens.plus(bucket.added(now - last_report)).minus(Tokens::whole(report.allowed));
                held.tokens = tokens.min(bucket.full());
            }
        }
        let window_end = match (self.limit.prepayment, prepaid.window_end) {
            (Prepayment::Lifetime, Some(end)) => end,
            (Prepayment::FreeSecond, _) => {
                prepaid.spend(report.allowed);
                // The window forgets older hits.
                prepaid.hits = prepaid.hits.max(-to_signed(self.limit.requests));
                return 0;
            }
            (Prepayment::Lifetime, None) | (Prepayment::Window | Prepayment::Second, _) => {
                prepaid.spend(report.allowed);
                return prepaid.take_debt();
            }
        };
        let has_ended = now >= window_end;
        let window_start = if has_ended { window_end } else { window_end - self.limit.window };
        if has_ended {
            prepaid.hits = 0;
        }
        // The requests of the former window were counted there.
        let most = match report.held.token_bucket() {
            Some(bucket) if last_report < window_start => bucket.max_admitted(Tokens::MAX, now - window_start),
            _ => u64::MAX,
        };
        prepaid.spend(report.allowed.min(most));
        prepaid.take_debt()
    }
}

/// Returns the number of a caller with this name, which is the same on all instances.
#[must_use]
pub fn caller_number(name: &str) -> u64 {
    holder_id(name)
}

impl<S> Engine<S> {
    /// Returns the entries of a bucket in the order of the rules, and whether other orders have a rule as well.
    ///
    /// If no rule applies in any order, the entries stay as they are.
    #[must_use]
    pub fn order<'e>(&self, domain: &str, entries: SmallVec<[Entry<'e>; 3]>) -> (SmallVec<[Entry<'e>; 3]>, bool) {
        if entries.len() == 1 {
            return (entries, false);
        }
        let mut orders = self.rules.load().rule_set().orders(domain, &entries);
        let is_ambiguous = orders.len() > 1;
        (orders.drain(..).next().unwrap_or(entries), is_ambiguous)
    }

    /// Returns whether a limit applies to the bucket, or a rule or override denies all its requests.
    #[must_use]
    pub fn limits(&self, report: &BucketReport<'_>, now: Micros) -> bool {
        let snapshot = &*self.rules.load();
        let descriptor = report.descriptor();
        matches!(self.find_match(snapshot, report.domain, &descriptor, now), Match::Limited(_) | Match::Denied(_))
    }
}

impl<S: Store> Engine<S> {
    /// Counts the reported requests, and returns the caller's next quota.
    pub async fn assign(&self, report: &BucketReport<'_>, now: Micros) -> ReportOutcome {
        let snapshot = &*self.rules.load();
        if snapshot.awaits_rules() {
            return ReportOutcome::counted(None);
        }
        let descriptor = report.descriptor();
        let matched = self.find_match(snapshot, report.domain, &descriptor, now);
        // A renewal without a report is no request.
        if report.allowed > 0 || report.denied > 0 {
            self.count_unmatched(report.domain, &descriptor, &matched, now);
        }
        let counter = match matched {
            Match::None | Match::NoDomain | Match::NoRule | Match::Off | Match::Unlimited(..) => {
                return ReportOutcome::counted(Some(Assignment::blanket(Quota::AllowAll)));
            }
            Match::Denied(applied) => {
                self.count_reported(report, &applied, &Decision::default(), now);
                let quota = if self.is_shadow(snapshot, &applied) { Quota::AllowAll } else { Quota::DenyAll };
                return ReportOutcome::counted(Some(Assignment::blanket(quota)));
            }
            Match::Limited(applied) => self.shared_counter(snapshot, report, applied),
        };
        let counter = match counter {
            Ok(counter) => counter,
            Err(applied) => {
                self.count_reported(report, &applied, &Decision::default(), now);
                self.log_indivisible(report.domain, &applied);
                return ReportOutcome::counted(self.blanket(snapshot, &applied));
            }
        };
        let SharedCounter { applied, limit, .. } = &counter;
        let mut held = report.held;
        let unpaid = counter.spend(&mut held, report, now);
        // The bucket of a quota that has ended is not replaced, so the next one begins full.
        if now >= held.ends_at {
            held.quota = None;
        }
        // The last part of a long report is all that still counts in a short window.
        let elapsed = report.elapsed.max(limit.window).get();
        let counted = (u128::from(unpaid) * u128::from(limit.window.get()) / u128::from(elapsed.max(1))) as u64;
        let recording = counter.algorithm.recording();
        let action = if counted > 0 { Action::Take } else { Action::Peek };
        let shares = Assignments::new(report.lifetime).with_caller(report.caller).with_held(limit.share(&held));
        let shares_name = self.counter_name(snapshot, report.domain, &report.entries, applied, shares);
        let shares = counter.stored(shares_name, shares);
        let record = counter.stored(counter.key.clone(), recording);
        let record = Hit { action, ..record.take(counted) };
        let answers = self.store.apply(&[shares.take(limit.demand(report.demand)), record], Charge::Each, now).await;
        let (Some(Ok(share)), Some(Ok(HitDecision { decision, .. }))) = (answers.first(), answers.get(1)) else {
            self.count_reported(report, applied, &Decision::default(), now);
            let policy = self.on_error(applied);
            self.statistics.on_error[policy as usize].add(self.worker, 1);
            return ReportOutcome { assignment: self.blanket(snapshot, applied), is_counted: false };
        };
        // Hits that were counted in advance are not used yet.
        let unused = held.prepaid.hits.max(0).unsigned_abs();
        let used = decision.used.saturating_sub(unused);
        self.count_reported(report, applied, &Decision { used, ..*decision }, now);
        if self.is_shadow(snapshot, applied) {
            return ReportOutcome::counted(Some(Assignment::blanket(Quota::AllowAll)));
        }
        let share = Assignments::read(&share.decision);
        // A caller for which there was no room has no assignment.
        let lifetime = if share.millionths > 0 { share.lifetime.min(report.lifetime) } else { report.lifetime };
        let share = Share { lifetime, ..share };
        let assignment = match limit.prepayment {
            _ if limit.requests == 0 => Assignment::denial(Prepaid::default(), decision.next),
            Prepayment::Lifetime => self.assign_counted(&counter, report, held, share, decision, now).await,
            Prepayment::Window | Prepayment::Second | Prepayment::FreeSecond => {
                self.assign_part(&counter, report, held, share.millionths, decision, now).await
            }
        };
        let is_elastic = applied.rule.is_some_and(|rule| rule.elastic.is_some());
        let ends_soon =
            if lifetime < report.ttl + DELIVERY_TIME { Some(lifetime - DELIVERY_TIME - REVIEW_TIME) } else { None };
        let reviews = [assignment.review_in, is_elastic.then_some(SECOND), share.more_in, ends_soon];
        let review_in = reviews.into_iter().flatten().min();
        let share = Some(share.millionths);
        let lifetime = Some(lifetime);
        ReportOutcome::counted(Some(Assignment { share, lifetime, review_in, ..assignment }))
    }

    /// Returns the next quota of a limit with [`Prepayment::Lifetime`].
    async fn assign_counted(
        &self,
        counter: &SharedCounter<'_>,
        report: &BucketReport<'_>,
        held: HeldQuota,
        share: Share,
        decision: &Decision,
        now: Micros,
    ) -> Assignment {
        let lifetime = decision.reset.min(share.lifetime);
        let share = share.millionths;
        let former = held.token_bucket();
        let limit = &counter.limit;
        let mut prepaid =
            Prepaid { counter: Some(counter.number), window_end: Some(now + decision.reset), ..held.prepaid };
        let paid = prepaid.hits.unsigned_abs();
        let free = decision.remaining + paid;
        let mut next = limit.counted_token_bucket(share, former, free, held.tokens, report.demand, lifetime);
        let mut needed = match next {
            Some(bucket) => bucket.max_admitted_after(former, held.tokens, lifetime),
            None => 0,
        };
        if !self.count_missing(counter, &mut prepaid, needed, false, now).await {
            next = limit.counted_token_bucket(share, former, paid, held.tokens, report.demand, lifetime);
            needed = paid;
        }
        let returned = prepaid.unneeded(needed, next != former, now, held.ends_at.max(now));
        if returned > 0 && self.pay(counter, Action::Refund, returned, false, now).await.is_ok() {
            prepaid.spend(returned);
        }
        let Some(bucket) = next else {
            let review_in = if share == 0 || decision.remaining > 0 { SECOND } else { decision.next };
            return Assignment::denial(prepaid, review_in);
        };
        let tokens = bucket.tokens_after(former, held.tokens);
        Assignment { prepaid, ..Assignment::bucket(bucket, tokens) }
    }

    /// Returns the next quota of a limit without [`Prepayment::Lifetime`]: a part of its rate and of its burst.
    async fn assign_part(
        &self,
        counter: &SharedCounter<'_>,
        report: &BucketReport<'_>,
        held: HeldQuota,
        share: u64,
        decision: &Decision,
        now: Micros,
    ) -> Assignment {
        let limit = &counter.limit;
        let former = held.token_bucket();
        let mut prepaid = Prepaid { counter: Some(counter.number), window_end: None, ..held.prepaid };
        if share == 0 {
            return Assignment::denial(prepaid, SECOND);
        }
        let bucket = limit.token_bucket(share, former, decision.remaining);
        let mut until = now + SECOND;
        if limit.prepayment == Prepayment::Window {
            until = now + decision.reset;
            prepaid.window_end = Some(until);
        }
        // Until now, a caller without a bucket has admitted nothing.
        let since = if former.is_some() { held.reported_at } else { now };
        let tokens = bucket.tokens_after(former, held.tokens);
        let needed = bucket.max_admitted(tokens, until - since);
        // Unused tokens of former windows and seconds cannot be used any more.
        if report.elapsed > Micros::ZERO {
            prepaid.hits = prepaid.hits.min(to_signed(needed));
        }
        let is_counted = self.count_missing(counter, &mut prepaid, needed, false, now).await;
        let is_used_up = if former.is_some() { prepaid.is_used_up(&bucket, needed) } else { !is_counted };
        if limit.prepayment == Prepayment::FreeSecond && is_used_up {
            return Assignment::denial(prepaid, decision.next);
        }
        Assignment { prepaid, ..Assignment::bucket(bucket, tokens) }
    }

    /// Counts the hits that a caller can use until the next payment. Must be called when [`HeldQuota::is_payment_due`].
    pub async fn prepay(&self, report: &BucketReport<'_>, now: Micros) -> Payment {
        let snapshot = &*self.rules.load();
        let descriptor = report.descriptor();
        let held = &report.held;
        let mut prepaid = held.prepaid;
        let Match::Limited(applied) = self.find_match(snapshot, report.domain, &descriptor, now) else {
            return Payment { prepaid, needs_review: true };
        };
        let Ok(counter) = self.shared_counter(snapshot, report, applied) else {
            return Payment { prepaid, needs_review: true };
        };
        if prepaid.counter != Some(counter.number) {
            return Payment { prepaid, needs_review: true };
        }
        let Some(bucket) = held.token_bucket() else {
            return Payment { prepaid, needs_review: true };
        };
        let needed = match (counter.limit.prepayment, prepaid.window_end) {
            (Prepayment::Second | Prepayment::FreeSecond, _) => {
                prepaid.window_end = None;
                held.max_admitted(&bucket, now + SECOND)
            }
            (Prepayment::Window, Some(start)) => {
                let end = start + counter.limit.window;
                prepaid.window_end = Some(end);
                held.max_admitted(&bucket, end)
            }
            (Prepayment::Lifetime, Some(start)) => {
                let end = start + counter.limit.window;
                prepaid.window_end = Some(end);
                prepaid.hits = 0;
                bucket.max_admitted(Tokens::MAX, held.ends_at.min(end) - start)
            }
            // The limit has become a fixed window since the last payment.
            (Prepayment::Window | Prepayment::Lifetime, None) => return Payment { prepaid, needs_review: true },
        };
        let is_counted = self.count_missing(&counter, &mut prepaid, needed, true, now).await;
        let needs_review = match counter.limit.prepayment {
            Prepayment::Window | Prepayment::Second => false,
            Prepayment::FreeSecond => prepaid.is_used_up(&bucket, needed),
            Prepayment::Lifetime => !is_counted,
        };
        Payment { prepaid, needs_review }
    }

    /// Counts hits so that `needed` are counted, as far as the limit's [`Prepayment`] permits it. Returns whether all are
    /// counted.
    async fn count_missing(
        &self,
        counter: &SharedCounter<'_>,
        prepaid: &mut Prepaid,
        needed: u64,
        is_ahead: bool,
        now: Micros,
    ) -> bool {
        let missing = prepaid.missing(needed);
        // Without an answer, the next payment includes these hits.
        if missing > 0
            && let Ok(decision) = self.pay(counter, Action::Take, missing, is_ahead, now).await
        {
            let is_recorded = matches!(counter.limit.prepayment, Prepayment::Window | Prepayment::Second);
            if decision.allowed || is_recorded {
                prepaid.add(missing);
            } else if counter.limit.prepayment == Prepayment::FreeSecond && decision.remaining > 0 {
                let part = decision.remaining.min(missing);
                let paid = self.pay(counter, Action::Take, part, is_ahead, now).await;
                if paid.is_ok_and(|paid| paid.allowed) {
                    prepaid.add(part);
                }
            }
        }
        prepaid.missing(needed) == 0
    }

    /// Returns unused hits of a caller to the counter, when its quota has ended.
    pub async fn return_unused(&self, report: &BucketReport<'_>, now: Micros) {
        let snapshot = &*self.rules.load();
        let descriptor = report.descriptor();
        let prepaid = report.held.prepaid;
        if !prepaid.is_returnable(now) {
            return;
        }
        let Match::Limited(applied) = self.find_match(snapshot, report.domain, &descriptor, now) else {
            return;
        };
        if let Ok(counter) = self.shared_counter(snapshot, report, applied)
            && prepaid.counter == Some(counter.number)
        {
            // Without an answer, the hits count until the window ends.
            let _ = self.pay(&counter, Action::Refund, prepaid.hits.unsigned_abs(), false, now).await;
        }
    }

    /// Counts or returns hits.
    async fn pay(
        &self,
        counter: &SharedCounter<'_>,
        action: Action,
        hits: u64,
        is_ahead: bool,
        now: Micros,
    ) -> Result<Decision, StoreError> {
        let algorithm = counter.algorithm;
        let recording = Program::from(algorithm.recording());
        let program = match counter.limit.prepayment {
            Prepayment::FreeSecond if !algorithm.counts_denied() => Program::Limit(algorithm),
            // Denied hits are not counted.
            Prepayment::Lifetime | Prepayment::FreeSecond => algorithm.leasing().unwrap_or(recording),
            Prepayment::Window | Prepayment::Second => recording,
        };
        let stored = counter.stored(counter.key.clone(), program);
        let hit = Hit { action, is_ahead, ..stored.take(hits) };
        Ok(only_answer(self.store.apply(&[hit], Charge::Each, now).await)?.decision)
    }
}

impl<S> Engine<S> {
    /// Returns the counter of a limit, or the limit if it cannot be divided.
    fn shared_counter<'s>(
        &self,
        snapshot: &Snapshot,
        report: &BucketReport<'_>,
        applied: AppliedLimit<'s>,
    ) -> Result<SharedCounter<'s>, AppliedLimit<'s>> {
        // The parts of several limits would have to be used up together, and Envoy counts requests, not their costs.
        if applied.is_grouped || applied.rule.is_some_and(|rule| rule.cost_per_hit.is_some()) {
            return Err(applied);
        }
        let Some(limit) = DivisibleLimit::new(&applied, report.ttl) else {
            return Err(applied);
        };
        let key = self.counter_name(snapshot, report.domain, &report.entries, &applied, *applied.limit.algorithm());
        let algorithm = applied.limit.algorithm();
        let for_caller = applied.for_caller(algorithm, &report.descriptor(), None, &key);
        let algorithm = for_caller.unwrap_or(*algorithm);
        let mut hasher = DefaultHasher::new();
        key.hash(&mut hasher);
        Ok(SharedCounter { applied, algorithm, limit, key, number: NonZeroU32::MIN | hasher.finish() as u32 })
    }

    /// Returns the quota by the failure policy, for a limit that cannot be divided and while counters are unavailable.
    /// Returns `None` if the policy is `error`.
    fn blanket(&self, snapshot: &Snapshot, applied: &AppliedLimit<'_>) -> Option<Assignment> {
        let quota = match self.on_error(applied) {
            FailurePolicy::Error => return None,
            FailurePolicy::Allow => Quota::AllowAll,
            FailurePolicy::Deny | FailurePolicy::Local if self.is_shadow(snapshot, applied) => Quota::AllowAll,
            FailurePolicy::Deny | FailurePolicy::Local => Quota::DenyAll,
        };
        Some(Assignment::blanket(quota))
    }

    /// Logs that a rule has a limit that cannot be divided, once until rules are loaded again.
    fn log_indivisible(&self, domain: &str, applied: &AppliedLimit<'_>) {
        if let Some(rule) = applied.rule
            && self.statistics.is_first_indivisible(&rule.labels)
        {
            tracing::warn!(
                domain,
                rule = rule.labels[1..].join("."),
                algorithm = applied.limit.algorithm().name(),
                "quotas cannot divide the limit of this rule, so on_error decides what Envoy does with the requests"
            );
        }
    }

    /// Counts the decisions of a caller.
    fn count_reported(&self, report: &BucketReport<'_>, applied: &AppliedLimit<'_>, counter: &Decision, now: Micros) {
        let (limit, _) = applied.limit.policy();
        let near = self.statistics.near_threshold(limit);
        let shadow = applied.is_shadow();
        for (hits, allowed) in [(report.allowed, true), (report.denied, false)] {
            if hits > 0 {
                // Envoy reports requests.
                let requests = hits;
                let context =
                    CountContext { limit, requests, near, splits_denied: false, shadow, from_deny_cache: false };
                applied.series.each(|series| {
                    let series = series.reports();
                    series.count_requested(self.worker, hits, requests);
                    series.count_decision(self.worker, hits, &Decision { allowed, ..*counter }, context);
                });
                self.record_top(report.domain, &Descriptor { hits, ..report.descriptor() }, applied, allowed, now);
            }
        }
    }
}
