//! [`QuotaSession`]: one stream of Envoy's quota protocol, on which a caller reports the requests of its buckets and
//! receives a quota for each.
//!
//! Each report is answered with a quota, so a quota lasts for several intervals between reports. Between reports the
//! session looks once a second for quotas that a change of rules or overrides affects, for limits that have hits again,
//! and for buckets without requests, which the caller is to forget.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::future::join_all;
use opentelemetry::metrics::Meter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::Clock;
use crate::{
    algorithm::assignments::Assignments,
    engine::{Assignment, BucketReport, Engine, Micros, Quota, Snapshot, TokenBucket},
    metrics::{LogThrottle, observe_gauge},
    rules::Entry,
};

/// Time between two calls of [`QuotaSession::tick`].
pub(crate) const TICK: Duration = Duration::from_secs(1);
/// Maximum number of quotas that are computed at the same time.
const BATCH: usize = 256;
/// Shortest time between two reports from which a rate is computed.
const MIN_ELAPSED: Micros = Micros::new(500_000);

/// Settings of Envoy's quota protocol.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// Lifetime of a quota, at least twice the interval of the callers' reports (5 s in Envoy 1.40). In whole seconds, as
    /// Envoy ignores fractions.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub ttl: Duration,
    /// Time without requests after which callers forget a bucket.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub idle_timeout: Duration,
    /// Maximum number of buckets on all streams, of about 300 bytes each with short names.
    pub max_buckets: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(15), idle_timeout: Duration::from_secs(300), max_buckets: 100_000 }
    }
}

impl Settings {
    /// Returns whether the lifetime is in whole seconds and has a valid length.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let secs = Duration::from_secs(self.ttl.as_secs());
        self.ttl == secs && (1..=Assignments::MAX_TTL.floor_secs() - 10).contains(&self.ttl.as_secs())
    }
}

/// The name of a bucket: keys with their values, in ascending order of the keys.
pub type BucketId = Box<[(Box<str>, Box<str>)]>;

/// A caller's report about one bucket since its last report.
#[derive(Clone, Debug)]
pub struct Usage {
    /// The bucket.
    pub bucket: BucketId,
    /// Number of admitted requests.
    pub allowed: u64,
    /// Number of denied requests.
    pub denied: u64,
    /// The caller's time since its last report. Above 0 in the first report of a bucket on a stream, the caller has had the
    /// bucket on an earlier stream.
    pub elapsed: Micros,
}

/// An instruction to a caller about a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketAction {
    /// Limit its requests by the quota for this time.
    Assign(BucketId, Quota, Duration),
    /// Forget the bucket until its next request.
    Abandon(BucketId),
}

/// Error that ends a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QuotaError {
    /// The first message has no domain.
    #[error("the first message must have a domain")]
    NoDomain,
    /// A later message has another domain.
    #[error("all messages of a stream must have the domain of the first one")]
    OtherDomain,
    /// A bucket has no entries.
    #[error("a bucket_id must have at least one entry")]
    NoEntries,
    /// All streams together have too many buckets.
    #[error("all streams together would have more than {0} buckets (quotas.max_buckets)")]
    TooManyBuckets(usize),
}

/// Hands out quotas to all streams.
#[derive(Clone)]
pub struct Quotas {
    engine: Engine,
    clock: Clock,
    settings: Arc<Settings>,
    metrics: Arc<Metrics>,
}

/// Numbers of all streams.
#[derive(Default)]
struct Metrics {
    streams: AtomicU64,
    buckets: AtomicU64,
    log_ambiguous: LogThrottle,
}

impl Quotas {
    /// Creates the component. `engine` counts the reports.
    #[must_use]
    pub fn new(engine: Engine, clock: Clock, settings: Settings) -> Self {
        Self { engine, clock, settings: Arc::new(settings), metrics: Arc::default() }
    }

    /// Registers the numbers of streams and buckets with `meter`.
    pub fn observe(&self, meter: &Meter) {
        let (streams, buckets) = (Arc::clone(&self.metrics), Arc::clone(&self.metrics));
        let description = "Number of open streams of Envoy's quota protocol (RLQS)";
        observe_gauge(meter, "sluicegate_quota_streams", description, move || streams.streams.load(Relaxed));
        let description = "Number of buckets that callers of Envoy's quota protocol (RLQS) report, on all streams";
        observe_gauge(meter, "sluicegate_quota_buckets", description, move || buckets.buckets.load(Relaxed));
    }

    /// Starts the session of a new stream.
    #[must_use]
    pub fn session(&self) -> QuotaSession {
        self.metrics.streams.fetch_add(1, Relaxed);
        QuotaSession {
            quotas: self.clone(),
            domain: "".into(),
            caller: rand::random::<u64>() | 1,
            buckets: HashMap::new(),
            rules: None,
        }
    }
}

/// The state of one stream.
pub struct QuotaSession {
    quotas: Quotas,
    /// The domain of the first message; empty before it.
    domain: Box<str>,
    caller: u64,
    buckets: HashMap<BucketId, Bucket>,
    /// The rules and overrides by which the last quotas were computed.
    rules: Option<Arc<Snapshot>>,
}

/// A bucket that the caller reports.
struct Bucket {
    reported_at: Micros,
    used_at: Micros,
    /// Requests per second, smoothed; `None` before the second report.
    rate: Option<f64>,
    quota: Option<Quota>,
    /// Whether the caller has had the bucket, and probably still a quota, before this stream.
    is_resumed: bool,
    /// When the quota is to be computed again without a report.
    review_at: Option<Micros>,
}

impl Bucket {
    /// Creates a bucket that was last reported on another stream if `elapsed` is above 0.
    fn new(now: Micros, elapsed: Micros) -> Self {
        let is_resumed = elapsed > Micros::ZERO;
        Self { reported_at: now - elapsed, used_at: now, rate: None, quota: None, is_resumed, review_at: None }
    }

    /// Returns whether the caller may keep the quota of an earlier stream: nothing is free as long as that is reserved.
    fn keeps_former(&self, assignment: &Assignment) -> bool {
        self.is_resumed && self.quota.is_none() && assignment.share == Some(0)
    }

    /// Records a report, and returns the time since the last one.
    fn record(&mut self, requests: u64, now: Micros) -> Micros {
        let elapsed = now - self.reported_at;
        self.reported_at = now;
        self.used_at = if requests > 0 { now } else { self.used_at };
        if elapsed >= MIN_ELAPSED {
            let rate = requests as f64 / elapsed.get() as f64 * 1e6;
            // The rate rises immediately, and falls by half with each report.
            self.rate = Some(self.rate.map_or(rate, |former| rate.max((former + rate) / 2.0)));
        }
        elapsed
    }

    /// Returns the next quota: the former one if only its capacity would change. A changed bucket starts full.
    fn next_quota(&self, quota: Quota) -> Quota {
        let (Some(Quota::TokenBucket(former)), Quota::TokenBucket(next)) = (self.quota, quota) else {
            return quota;
        };
        let is_similar = former.max_tokens <= next.max_tokens.saturating_mul(2)
            && next.max_tokens <= former.max_tokens.saturating_mul(2);
        match (former.tokens, former.interval_secs) == (next.tokens, next.interval_secs) {
            true if is_similar => Quota::TokenBucket(former),
            // Envoy takes buckets that differ only in the interval for the same.
            false if (former.max_tokens, former.tokens) == (next.max_tokens, next.tokens) => {
                Quota::TokenBucket(TokenBucket { tokens: next.tokens.saturating_sub(1).max(1), ..next })
            }
            _ => quota,
        }
    }
}

impl QuotaSession {
    /// Counts the reports of one message, and returns the next quota of each reported bucket.
    ///
    /// # Errors
    ///
    /// Returns an error if the message is invalid or contains too many new buckets. Nothing is counted then.
    pub async fn report(&mut self, domain: &str, usages: Vec<Usage>) -> Result<Vec<BucketAction>, QuotaError> {
        match (self.domain.is_empty(), domain) {
            (true, "") => return Err(QuotaError::NoDomain),
            (true, domain) => self.domain = domain.into(),
            (false, domain) if domain.is_empty() || *domain == *self.domain => {}
            (false, _) => return Err(QuotaError::OtherDomain),
        }
        if usages.iter().any(|usage| usage.bucket.is_empty()) {
            return Err(QuotaError::NoEntries);
        }
        let max_buckets = self.quotas.settings.max_buckets;
        let new = usages.iter().filter(|usage| !self.buckets.contains_key(&usage.bucket)).count();
        if self.quotas.metrics.buckets.load(Relaxed) + new as u64 > max_buckets as u64 {
            return Err(QuotaError::TooManyBuckets(max_buckets));
        }
        let now = self.quotas.clock.now();
        for usage in &usages {
            if !self.buckets.contains_key(&usage.bucket) {
                self.buckets.insert(usage.bucket.clone(), Bucket::new(now, usage.elapsed));
                self.quotas.metrics.buckets.fetch_add(1, Relaxed);
            }
        }
        Ok(self.assign(usages, now, true).await)
    }

    /// Returns actions that are due without a report. Must be called once a second.
    pub async fn tick(&mut self) -> Vec<BucketAction> {
        let (now, idle_timeout) = (self.quotas.clock.now(), self.quotas.settings.idle_timeout.as_micros() as u64);
        let rules = self.quotas.engine.rules.load_full();
        let is_changed = self.rules.as_ref().is_some_and(|former| !Arc::ptr_eq(former, &rules));
        self.rules = Some(rules);
        let (mut actions, mut due) = (Vec::new(), Vec::new());
        self.buckets.retain(|id, bucket| {
            let is_idle = (now - bucket.used_at).get() > idle_timeout;
            if is_idle {
                actions.push(BucketAction::Abandon(id.clone()));
                self.quotas.metrics.buckets.fetch_sub(1, Relaxed);
            } else if is_changed || bucket.review_at.is_some_and(|at| at <= now) {
                due.push(Usage { bucket: id.clone(), allowed: 0, denied: 0, elapsed: Micros::ZERO });
            }
            !is_idle
        });
        actions.extend(self.assign(due, now, false).await);
        actions
    }

    /// Returns the next quota of each bucket, in batches whose calls share a round trip to the store.
    async fn assign(&mut self, usages: Vec<Usage>, now: Micros, are_reports: bool) -> Vec<BucketAction> {
        let (ttl, mut actions) = (self.quotas.settings.ttl, Vec::with_capacity(usages.len()));
        let mut usages = usages.into_iter().peekable();
        while usages.peek().is_some() {
            let batch: Vec<Usage> = usages.by_ref().take(BATCH).collect();
            let elapsed: Vec<_> = batch.iter().map(|usage| self.record(usage, now, are_reports)).collect();
            let (session, micros) = (&*self, Micros::new(ttl.as_micros() as u64));
            let assigned = join_all(batch.iter().zip(elapsed).map(|(usage, (demand, elapsed))| async move {
                let entries: Vec<_> = usage.bucket.iter().map(|(key, value)| Entry { key, value }).collect();
                let report = BucketReport {
                    domain: &session.domain,
                    entries: session.order(&entries),
                    caller: session.caller,
                    allowed: usage.allowed,
                    denied: usage.denied,
                    demand,
                    elapsed,
                    ttl: micros,
                };
                session.quotas.engine.assign(&report, now).await
            }))
            .await;
            for (usage, assigned) in batch.into_iter().zip(assigned) {
                let Some(bucket) = self.buckets.get_mut(&usage.bucket) else {
                    continue;
                };
                let assignment = match (assigned, bucket.quota) {
                    // While the counters are unavailable, all shares stay as they are.
                    (Err(_), Some(former @ Quota::TokenBucket(_))) => {
                        actions.push(BucketAction::Assign(usage.bucket, former, ttl));
                        continue;
                    }
                    (Ok(None) | Err(None), _) => continue,
                    (Ok(Some(assignment)) | Err(Some(assignment)), _) => assignment,
                };
                if bucket.keeps_former(&assignment) {
                    bucket.review_at = Some(now + Micros::from_secs(1));
                    continue;
                }
                let quota = bucket.next_quota(assignment.quota);
                bucket.quota = Some(quota);
                // Without the bucket, whose values can be personal data.
                tracing::debug!(
                    caller = self.caller,
                    rate = bucket.rate,
                    share = assignment.share,
                    ?quota,
                    "assigning a quota"
                );
                bucket.review_at = assignment.denied_for.map(|wait| now + wait.max(Micros::from_secs(1)));
                actions.push(BucketAction::Assign(usage.bucket, quota, ttl));
            }
        }
        actions
    }

    /// Records a report of a bucket, and returns its demand and the time since the last report.
    fn record(&mut self, usage: &Usage, now: Micros, is_report: bool) -> (Option<f64>, Micros) {
        let Some(bucket) = self.buckets.get_mut(&usage.bucket) else {
            return (None, Micros::ZERO);
        };
        let elapsed =
            if is_report { bucket.record(usage.allowed.saturating_add(usage.denied), now) } else { Micros::ZERO };
        (bucket.rate, elapsed)
    }

    /// Returns the entries in the order of the rules.
    fn order<'e>(&self, entries: &[Entry<'e>]) -> smallvec::SmallVec<[Entry<'e>; 3]> {
        let (order, is_ambiguous) = self.quotas.engine.order(&self.domain, entries);
        if is_ambiguous && self.quotas.metrics.log_ambiguous.should_log() {
            let keys: Vec<_> = order.iter().map(|entry| entry.key).collect();
            tracing::warn!(
                domain = &*self.domain,
                order = keys.join(", "),
                "rules match the entries of a quota bucket in several orders; using the first one"
            );
        }
        order
    }
}

impl Drop for QuotaSession {
    fn drop(&mut self) {
        self.quotas.metrics.streams.fetch_sub(1, Relaxed);
        self.quotas.metrics.buckets.fetch_sub(self.buckets.len() as u64, Relaxed);
    }
}

#[cfg(test)]
mod tests;
