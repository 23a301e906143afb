//! Quotas for callers of Envoy's quota protocol, which limit requests themselves: [`Engine::assign`] counts the reported
//! requests, and divides the limit among its callers.
//!
//! A quota is a part of the limit as a token bucket: a share of the rate, and the same share of the burst. The shares of
//! all callers are at most the whole limit ([`Assignments`]), so all callers together are admitted at most
//! `burst + rate × t` in any time `t`, and once more the burst of each token bucket that changes.
//!
//! Reported requests are counted by the limit's own counter, which callers of the other protocols use too. A quota
//! ends when that counter is used up, unless the limit's window is so short that the report is late anyway.

use smallvec::SmallVec;

use super::{
    Descriptor, Engine, Micros,
    applied_limit::{AppliedLimit, Match},
    key,
    statistics::Threshold,
};
use crate::{
    algorithm::{Action, Algorithm, Decision, MAX_NUMBER, RequestContext, assignments::Assignments},
    rules::{Entry, FailurePolicy, Rule},
    store::{Charge, Hit, HitDecision, Store},
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
    /// Time since the last report.
    pub elapsed: Micros,
    /// Lifetime of the quota.
    pub ttl: Micros,
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

/// A token bucket. Each request takes one token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    /// Capacity of the bucket.
    pub max_tokens: u32,
    /// Number of tokens that are added in each interval.
    pub tokens: u32,
    /// Length of the interval in seconds.
    pub interval_secs: u64,
}

/// A quota with the reason for its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Assignment {
    /// The quota.
    pub quota: Quota,
    /// Share of the limit in millionths; `None` if there is no limit, or none that can be shared.
    pub share: Option<u64>,
    /// Time after which the quota should be replaced, if it denies all requests because the limit is used up.
    pub denied_for: Option<Micros>,
}

/// Demand of a caller until it is known: an eighth of the limit.
const FIRST_DEMAND: u64 = Assignments::WHOLE / 8;
/// Number of tokens of a whole limit per interval. Shares are multiples of one token.
const TOKENS_PER_INTERVAL: u64 = 1_000;
/// Smallest capacity of a token bucket, if the burst permits it. A bucket of one token is full while the next request
/// arrives, and loses tokens.
const MIN_TOKENS: u64 = 2;
/// Number of quota lifetimes that a window must have, so that its counter decides about quotas.
const MIN_LIFETIMES: u64 = 2;
/// Maximum time in which a message with a quota reaches its caller, where its lifetime begins.
const DELIVERY_TIME: Micros = Micros::from_secs(2);
/// Divisor of the burst of a limit with a shorter window.
const SHORT_WINDOW_BURST: u64 = 10;

impl Assignment {
    fn blanket(quota: Quota) -> Self {
        Self { quota, share: None, denied_for: None }
    }
}

/// The numbers of a limit that can be divided.
#[derive(Clone, Copy, Debug)]
struct DivisibleLimit {
    requests: u64,
    window: Micros,
    burst: u64,
    /// Whether the counter decides about quotas.
    is_slow: bool,
}

impl DivisibleLimit {
    /// Returns `None` if the limit is not a rate, or if it delays requests.
    fn new(applied: &AppliedLimit<'_>, ttl: Micros) -> Option<Self> {
        let spec = applied.limit.algorithm().spec().filter(|spec| spec.queue.is_none())?;
        let (requests, window) = (u64::from(applied.limit.requests()), applied.limit.measure().window());
        let is_slow = window.get() >= MIN_LIFETIMES * ttl.get();
        let short_burst = requests.div_ceil(SHORT_WINDOW_BURST).max(MIN_TOKENS).min(requests);
        let default_burst = if is_slow { requests } else { short_burst };
        Some(Self { requests, window, burst: spec.burst.map_or(default_burst, u64::from), is_slow })
    }

    /// Returns the demand in millionths of the limit.
    fn demand(&self, per_second: Option<f64>) -> u64 {
        let Some(per_second) = per_second else {
            return FIRST_DEMAND;
        };
        let rate = self.requests as f64 / self.window.get().max(1) as f64 * 1e6;
        ((per_second / rate * Assignments::WHOLE as f64) as u64).min(Assignments::WHOLE)
    }

    /// Returns the token bucket of a share. A new bucket starts full, so its capacity is at most `free`.
    fn token_bucket(&self, share: u64, free: u64) -> TokenBucket {
        let part = |whole: u128| (whole * u128::from(share) / u128::from(Assignments::WHOLE)) as u64;
        let window_secs = (self.window.get() / 1_000_000).max(1);
        let interval_secs = (TOKENS_PER_INTERVAL * window_secs).div_ceil(self.requests.max(1));
        let per_interval = u128::from(self.requests) * u128::from(interval_secs) / u128::from(window_secs);
        let max_tokens = part(self.burst.into()).max(MIN_TOKENS.min(self.burst)).min(free).max(1);
        let narrow = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        TokenBucket { max_tokens: narrow(max_tokens), tokens: narrow(part(per_interval)).max(1), interval_secs }
    }
}

impl Engine {
    /// Returns the entries of a bucket in the order of the rules, and whether other orders have a rule as well.
    ///
    /// If no rule applies in any order, the entries stay as they are.
    #[must_use]
    pub fn order<'e>(&self, domain: &str, entries: &[Entry<'e>]) -> (SmallVec<[Entry<'e>; 3]>, bool) {
        let mut orders = self.rules.load().rules().orders(domain, entries);
        let is_ambiguous = orders.len() > 1;
        (orders.drain(..).next().unwrap_or_else(|| entries.into()), is_ambiguous)
    }

    /// Counts the reported requests, and returns the caller's next quota.
    ///
    /// Returns `None` before rules are loaded, and for a limit that cannot be divided if its failure policy is `error`.
    ///
    /// # Errors
    ///
    /// If the store fails, returns the quota by the failure policy, or `None` if the policy is `error`.
    pub async fn assign(
        &self,
        report: &BucketReport<'_>,
        now: Micros,
    ) -> Result<Option<Assignment>, Option<Assignment>> {
        let snapshot = &*self.rules.load();
        if snapshot.compiled.awaiting_rules {
            return Ok(None);
        }
        let descriptor = Descriptor { entries: report.entries.clone(), hits: 1, refund: false, requested_limit: None };
        let applied = match self.find_match(snapshot, report.domain, &descriptor, now) {
            Match::None | Match::Off | Match::Unlimited(..) => return Ok(Some(Assignment::blanket(Quota::AllowAll))),
            Match::Denied(applied) => {
                self.count_reported(report, &applied, &Decision::default());
                let quota = if applied.is_shadow() { Quota::AllowAll } else { Quota::DenyAll };
                return Ok(Some(Assignment::blanket(quota)));
            }
            Match::Limited(applied) => applied,
        };
        let Some(limit) = DivisibleLimit::new(&applied, report.ttl) else {
            self.count_reported(report, &applied, &Decision::default());
            return Ok(self.blanket_rule(&applied));
        };
        let domain = snapshot.rules().settings_of(report.domain);
        let shard_by = domain.map_or([].as_slice(), |domain| &domain.shard_by);
        let entries = &descriptor.entries[..descriptor.entries.len() - Rule::modifier_count(&applied.path)];
        let name = |algorithm: &Algorithm| {
            let hash = self.settings.value_hash.as_ref();
            key::name(self.scope, report.domain, shard_by, entries, &applied.path, algorithm, hash)
        };
        let context = RequestContext { holder: report.caller, ..RequestContext::default() };
        let shares = Algorithm::from(Assignments::new(report.ttl + DELIVERY_TIME)).with_context(context);
        let (counter_key, shares_key) = (name(applied.limit.algorithm()), name(&shares));
        // The last part of a long report is all that still counts in a short window.
        let elapsed = report.elapsed.max(limit.window).get();
        let counted = (u128::from(report.allowed) * u128::from(limit.window.get()) / u128::from(elapsed.max(1))) as u64;
        let recording = applied.limit.algorithm().recording();
        let action = if counted > 0 { Action::Take } else { Action::Peek };
        let per_second = applied.limit.is_per_second();
        let calls = [
            Hit { per_second, ..Hit::take(&shares_key, &shares, limit.demand(report.demand)) },
            Hit { action, per_second, ..Hit::take(&counter_key, &recording, counted.min(MAX_NUMBER)) },
        ];
        let answers = self.store.apply(&calls, Charge::Each, now).await;
        let (Some(Ok(share)), Some(Ok(HitDecision { decision: counter, .. }))) = (answers.first(), answers.get(1))
        else {
            self.count_reported(report, &applied, &Decision::default());
            return Err(self.blanket_rule(&applied));
        };
        self.count_reported(report, &applied, counter);
        if applied.is_shadow() || self.settings.shadow_mode {
            return Ok(Some(Assignment::blanket(Quota::AllowAll)));
        }
        let share = Assignments::read(&share.decision);
        let assignment = Assignment { quota: Quota::DenyAll, share: Some(share), denied_for: None };
        let is_used_up = limit.is_slow && counter.remaining == 0;
        if limit.requests == 0 || is_used_up {
            return Ok(Some(Assignment { denied_for: Some(counter.next), ..assignment }));
        }
        if share == 0 {
            return Ok(Some(Assignment { denied_for: Some(Micros::ZERO), ..assignment }));
        }
        let free = if limit.is_slow { counter.remaining } else { u64::MAX };
        Ok(Some(Assignment { quota: Quota::TokenBucket(limit.token_bucket(share, free)), ..assignment }))
    }

    /// Returns the quota for a limit that cannot be divided, and while counters are unavailable.
    fn blanket_rule(&self, applied: &AppliedLimit<'_>) -> Option<Assignment> {
        let policy = self.on_error(applied);
        self.statistics.on_error[policy as usize].add(self.worker, 1);
        match policy {
            FailurePolicy::Error => None,
            FailurePolicy::Allow => Some(Assignment::blanket(Quota::AllowAll)),
            FailurePolicy::Deny | FailurePolicy::Local => Some(Assignment::blanket(Quota::DenyAll)),
        }
    }

    /// Counts the decisions of a caller.
    fn count_reported(&self, report: &BucketReport<'_>, applied: &AppliedLimit<'_>, counter: &Decision) {
        let (limit, _) = applied.limit.policy();
        let near = self.statistics.near_threshold(limit);
        let shadow = applied.is_shadow();
        for (hits, allowed) in [(report.allowed, true), (report.denied, false)] {
            let hits = hits.min(MAX_NUMBER);
            if hits > 0 {
                let threshold = Threshold { limit, near, splits_denied: false, shadow, from_deny_cache: false };
                applied.series.count_requested(self.worker, hits);
                applied.series.count_decision(self.worker, hits, &Decision { allowed, ..*counter }, threshold);
            }
        }
    }
}
