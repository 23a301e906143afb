//! [`QuotaSession`]: one stream of Envoy's quota protocol, on which a caller reports the requests of its buckets and
//! receives a quota for each.
//!
//! Each report is answered with a quota, which lasts for several intervals between reports. Once a second the session
//! counts hits in advance. It also sends new quotas after a change of rules or overrides, and when a limit has hits
//! again, and instructs the caller to forget buckets without requests.

mod bucket;
mod bucket_id;

pub use bucket_id::BucketId;

use std::{
    collections::HashMap,
    mem,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use futures_util::{
    future::{MaybeDone, join_all, maybe_done},
    poll,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use tokio::task::yield_now;

use self::bucket::Bucket;
use super::Clock;
use crate::{
    algorithm::assignments::Assignments,
    engine::{
        Assignment, BucketReport, DELIVERY_TIME, Engine, HeldQuota, Micros, Quota, ReportOutcome, Snapshot,
        caller_number,
    },
    metrics::{LogThrottle, Meter, Registrar},
    rules::Entry,
    store::AnyStore,
};

/// Time between two calls of [`QuotaSession::tick`].
const TICK: Micros = Micros::from_secs(1);
/// Time before the beginning of a window at which its hits are counted.
const BEFORE_WINDOW: Micros = Micros::new(25_000);
/// Maximum number of quotas that are computed at the same time.
const BATCH: usize = 256;
/// Size in bytes of a name for which a bucket counts as one more bucket.
const NAME_BYTES: usize = 400;
/// Settings of Envoy's quota protocol.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Lifetime of a quota, at least twice the interval of the callers' reports (5 s in Envoy 1.40). In whole seconds, as
    /// Envoy ignores fractions.
    #[serde(with = "sluicegate_duration::Text")]
    pub ttl: Duration,
    /// Time without requests after which callers forget a bucket.
    #[serde(with = "sluicegate_duration::Text")]
    pub idle_timeout: Duration,
    /// Maximum number of buckets on all streams, of about 400 bytes each with short names and counters in memory; a bucket
    /// counts once more for each 400 bytes of its name. A stream can have at most the number of free ones, so that
    /// others always find room. Requests of further buckets are denied if they have a limit.
    pub max_buckets: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(15), idle_timeout: Duration::from_secs(300), max_buckets: 100_000 }
    }
}

impl Settings {
    /// Returns the time after which a quota has ended at the caller in any case.
    fn lifetime(&self) -> Micros {
        Micros::new(self.ttl.as_micros() as u64) + DELIVERY_TIME
    }

    /// Returns a problem of the settings, or `None` if they are valid.
    #[must_use]
    pub fn problem(&self) -> Option<&'static str> {
        let is_whole = self.ttl == Duration::from_secs(self.ttl.as_secs());
        if !is_whole || !(1..=Assignments::MAX_TTL.floor_secs() - 10).contains(&self.ttl.as_secs()) {
            return Some("quotas.ttl must be a whole number of seconds between 1s and 290s");
        }
        None
    }
}

/// A caller's report about one bucket since its last report.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Usage {
    /// The bucket.
    pub bucket: BucketId,
    /// The entries by which rules are found and requests are counted, if they are not those of the bucket's name.
    pub descriptor: Option<BucketId>,
    /// Number of admitted requests.
    pub allowed: u64,
    /// Number of denied requests.
    pub denied: u64,
    /// The caller's time since its last report. If it is above 0 in the first report of a bucket on a stream, the
    /// caller has had the bucket on an earlier stream.
    pub elapsed: Micros,
}

/// An instruction to a caller about a bucket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BucketAction {
    /// Limit the requests of the bucket by the quota for this time.
    Assign(BucketId, Quota, Duration),
    /// Forget the bucket until its next request.
    Abandon(BucketId),
}

impl BucketAction {
    /// Returns whether the caller recognises the bucket.
    fn is_readable(&self) -> bool {
        let (Self::Assign(id, ..) | Self::Abandon(id)) = self;
        id.is_readable()
    }
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
}

/// Hands out quotas to all streams.
#[derive(Clone)]
pub struct Quotas {
    engine: Engine<AnyStore>,
    clock: Clock,
    settings: Arc<Settings>,
    streams: Arc<Streams>,
}

/// Counts of all streams, and the names of their callers.
#[derive(Default)]
struct Streams {
    count: AtomicU64,
    buckets: AtomicU64,
    /// Number of buckets. One with a long name counts several times.
    used: AtomicU64,
    /// Number of reports about buckets for which there was no room.
    rejected: AtomicU64,
    log_rejected: LogThrottle,
    log_ambiguous: LogThrottle,
    log_ambiguous_name: LogThrottle,
    /// The random number of the last stream of each named caller, by the number of the caller's name.
    names: Mutex<HashMap<u64, u64>>,
}

impl Quotas {
    /// Creates the component. `engine` counts the reports.
    #[must_use]
    pub fn new(engine: Engine<AnyStore>, clock: Clock, settings: Settings) -> Self {
        Self { engine, clock, settings: Arc::new(settings), streams: Arc::default() }
    }

    /// Registers the numbers of streams and buckets with `meter`.
    pub fn observe(&self, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: &self.streams };
        let description = "Number of open streams of Envoy's quota protocol (RLQS)";
        registrar.gauge("sluicegate_quota_streams", description, |streams| streams.count.load(Relaxed));
        let description = "Number of buckets that callers of Envoy's quota protocol (RLQS) report, on all streams";
        registrar.gauge("sluicegate_quota_buckets", description, |streams| streams.buckets.load(Relaxed));
        let description = "Reports about buckets of Envoy's quota protocol (RLQS) for which there was no room, because \
                           their stream had as many buckets as quotas.max_buckets leaves to it";
        registrar
            .counter("sluicegate_quota_rejected_buckets_total", description, |streams| streams.rejected.load(Relaxed));
    }

    /// Starts the session of a new stream.
    ///
    /// A caller with a name keeps its shares when it connects again, also to another instance. If several open streams
    /// have one name, the last one has these shares: the others may be broken connections.
    #[must_use]
    pub fn session(&self, name: Option<&str>) -> QuotaSession {
        self.streams.count.fetch_add(1, Relaxed);
        let stream = rand::random();
        let named = name.filter(|name| !name.is_empty()).map(caller_number);
        let former = named.and_then(|number| self.streams.names.lock().insert(number, stream));
        if former.is_some() && self.streams.log_ambiguous_name.should_log() {
            tracing::warn!(
                caller = name,
                "two open streams have the same name in sluicegate-caller; the last one keeps the shares"
            );
        }
        QuotaSession {
            quotas: self.clone(),
            domain: "".into(),
            stream,
            name: named,
            buckets: HashMap::new(),
            descriptors: HashMap::new(),
            used: 0,
            rules: None,
            next_tick: Micros::ZERO,
            window_phase: Micros::ZERO,
            is_open: true,
        }
    }
}

/// The state of one stream.
pub struct QuotaSession {
    quotas: Quotas,
    /// The domain of the first message; empty before it.
    domain: Box<str>,
    /// A random number that identifies the stream.
    stream: u64,
    /// The number of the caller's name.
    name: Option<u64>,
    buckets: HashMap<BucketId, Bucket>,
    /// The descriptors of the few buckets that have other entries in their names.
    descriptors: HashMap<BucketId, BucketId>,
    /// Number of buckets. One with a long name counts several times.
    used: u64,
    /// The rules and overrides by which the last quotas were computed.
    rules: Option<Arc<Snapshot>>,
    next_tick: Micros,
    /// The time within a second at which fixed windows begin, by this instance's clock.
    window_phase: Micros,
    is_open: bool,
}

/// The numbers of a report, and those that the session computes from it.
struct Reported {
    allowed: u64,
    denied: u64,
    demand: Option<f64>,
    /// Time since the last report.
    elapsed: Micros,
    /// The rest of the quota's lifetime, if the report does not extend it ([`Bucket::unextended_lifetime`]).
    lifetime: Option<Micros>,
}

/// A report that is recorded, with the quota that the caller has had until now.
struct Recorded {
    usage: Usage,
    report: Reported,
    held: HeldQuota,
}

/// Stands for a report where there is none.
const NO_REPORT: Reported = Reported { allowed: 0, denied: 0, demand: None, elapsed: Micros::ZERO, lifetime: None };

impl QuotaSession {
    /// Counts the reports of one message, and returns the next quota of each reported bucket.
    ///
    /// If there is no room for a new bucket, its requests are denied if they have a limit. Without an answer, the
    /// caller would probably admit all of them.
    ///
    /// # Errors
    ///
    /// Returns an error if the message is invalid. Nothing is counted then.
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
        let now = self.quotas.clock.now();
        let lifetime = self.quotas.settings.lifetime();
        let mut accepted = Vec::new();
        let mut rejected = Vec::new();
        for usage in merged(usages) {
            if self.buckets.contains_key(&usage.bucket) {
                accepted.push(usage);
                continue;
            }
            if !self.take_room(&usage) {
                rejected.push(usage);
                continue;
            }
            self.buckets.insert(usage.bucket.clone(), Bucket::new(now, usage.elapsed, lifetime));
            if let Some(descriptor) = &usage.descriptor {
                self.descriptors.insert(usage.bucket.clone(), descriptor.clone());
            }
            accepted.push(usage);
        }
        let mut actions = self.assign(accepted, now, true).await;
        self.reject(rejected, now, &mut actions).await;
        Ok(actions)
    }

    /// Returns the domain of the stream; empty before the first message.
    #[must_use]
    pub fn domain(&self) -> &str {
        &self.domain
    }

    /// Counts a new bucket. Returns `false` if the stream would have more buckets than are free.
    fn take_room(&mut self, usage: &Usage) -> bool {
        let streams = &self.quotas.streams;
        let room = room(&usage.bucket, usage.descriptor.as_ref());
        let free = (self.quotas.settings.max_buckets as u64).saturating_sub(streams.used.load(Relaxed));
        if self.used + room > free {
            return false;
        }
        self.used += room;
        streams.used.fetch_add(room, Relaxed);
        streams.buckets.fetch_add(1, Relaxed);
        true
    }

    /// Adds the actions for buckets for which there was no room.
    async fn reject(&self, usages: Vec<Usage>, now: Micros, actions: &mut Vec<BucketAction>) {
        if usages.is_empty() {
            return;
        }
        let streams = &self.quotas.streams;
        streams.rejected.fetch_add(usages.len() as u64, Relaxed);
        if streams.log_rejected.should_log() {
            tracing::warn!(
                domain = &*self.domain,
                max = self.quotas.settings.max_buckets,
                buckets = self.buckets.len(),
                "no room for further buckets of a quota stream, so their requests are denied, and \
                 sluicegate_quota_rejected_buckets_total counts them; increase quotas.max_buckets, or send fewer descriptors"
            );
        }
        for (index, Usage { bucket, descriptor, .. }) in usages.into_iter().enumerate() {
            if index % BATCH == BATCH - 1 {
                yield_now().await;
            }
            if !bucket.is_readable() {
                continue;
            }
            let descriptor = descriptor.as_ref().unwrap_or(&bucket);
            let is_limited =
                self.quotas.engine.limits(&self.bucket_report(descriptor, &NO_REPORT, HeldQuota::default()), now);
            let quota = if is_limited { Quota::DenyAll } else { Quota::AllowAll };
            actions.push(BucketAction::Assign(bucket, quota, self.quotas.settings.ttl));
        }
    }

    /// Returns the time until the next call of [`Self::tick`].
    #[must_use]
    pub fn until_tick(&self) -> Duration {
        Duration::from_micros((self.next_tick - self.quotas.clock.now()).get())
    }

    /// Counts hits in advance, and returns actions that are due without a report. Must be called once a second, slightly
    /// before fixed windows begin, after [`Self::until_tick`].
    pub async fn tick(&mut self) -> Vec<BucketAction> {
        let now = self.quotas.clock.now();
        let idle_timeout = Micros::new(self.quotas.settings.idle_timeout.as_micros() as u64);
        let since = (now + BEFORE_WINDOW + TICK - self.window_phase) % TICK;
        self.next_tick = now + (TICK - since);
        let lifetime = self.quotas.settings.lifetime();
        self.prepay(now).await;
        let rules = self.quotas.engine.rules.load_full();
        let is_changed = self.rules.as_ref().is_some_and(|former| !Arc::ptr_eq(former, &rules));
        self.rules = Some(rules);
        let mut actions = Vec::new();
        let mut due = Vec::new();
        let mut idle = Vec::new();
        self.buckets.retain(|id, bucket| {
            if bucket.is_idle(idle_timeout, now) {
                if id.is_readable() {
                    actions.push(BucketAction::Abandon(id.clone()));
                }
                self.quotas.streams.buckets.fetch_sub(1, Relaxed);
                let room = room(id, self.descriptors.remove(id).as_ref());
                self.quotas.streams.used.fetch_sub(room, Relaxed);
                self.used -= room;
                if bucket.held.prepaid.is_returnable(now) {
                    idle.push((id.clone(), bucket.held));
                }
                return false;
            }
            // Without reports, the caller may be gone, and others need its share.
            let has_share = bucket.held.quota.is_some();
            let is_alive = !has_share || now < bucket.held.reported_at + lifetime;
            if is_changed || is_alive && bucket.is_review_due(now) {
                let bucket = id.clone();
                due.push(Usage { bucket, descriptor: None, allowed: 0, denied: 0, elapsed: Micros::ZERO });
            }
            true
        });
        self.return_hits(idle, now).await;
        actions.extend(self.assign(due, now, false).await);
        actions
    }

    /// Ends the session, and returns the time after which [`Self::return_unused`] must be called, if any hits of the
    /// caller may be unused.
    pub fn close(&mut self) -> Option<Duration> {
        if self.is_open {
            self.is_open = false;
            self.quotas.streams.count.fetch_sub(1, Relaxed);
            if let Some(name) = self.name.filter(|name| self.owns(*name)) {
                self.quotas.streams.names.lock().remove(&name);
            }
        }
        let now = self.quotas.clock.now();
        let streams = &self.quotas.streams;
        self.buckets.retain(|id, bucket| {
            if bucket.held.prepaid.is_returnable(now) {
                return true;
            }
            let room = room(id, self.descriptors.get(id));
            self.used -= room;
            streams.used.fetch_sub(room, Relaxed);
            streams.buckets.fetch_sub(1, Relaxed);
            false
        });
        let last = self.buckets.values().map(|bucket| bucket.held.ends_at).max()?;
        Some(Duration::from_micros((last - now).get()))
    }

    /// Returns the hits that the caller has not used to their counters. The caller's quotas must have ended.
    pub async fn return_unused(&mut self) {
        let now = self.quotas.clock.now();
        let unused = self.buckets.iter().map(|(id, bucket)| (id.clone(), bucket.held)).collect();
        self.return_hits(unused, now).await;
    }

    async fn return_hits(&self, unused: Vec<(BucketId, HeldQuota)>, now: Micros) {
        for batch in unused.chunks(BATCH) {
            run_together(batch.iter().map(async |(id, held)| {
                self.quotas.engine.return_unused(&self.bucket_report(id, &NO_REPORT, *held), now).await;
            }))
            .await;
        }
    }

    /// Counts hits in advance. A quota becomes due for a review if its limit is used up or has changed.
    async fn prepay(&mut self, now: Micros) {
        let session = &*self;
        let mut payments = Vec::new();
        let due: Vec<_> = self.buckets.iter().filter(|(_, bucket)| bucket.held.is_payment_due(now)).collect();
        for batch in due.chunks(BATCH) {
            let batch = batch.iter().map(async |(id, bucket)| {
                session.quotas.engine.prepay(&session.bucket_report(id, &NO_REPORT, bucket.held), now).await
            });
            payments.extend(run_together(batch).await);
        }
        let due = self.buckets.values_mut().filter(|bucket| bucket.held.is_payment_due(now));
        for (bucket, payment) in due.zip(payments) {
            bucket.held.prepaid = payment.prepaid;
            if payment.needs_review {
                bucket.review_at(Some(now));
            }
        }
    }

    /// Returns the number of the caller: that of its name. Without a name, or if a later stream has the same name, it
    /// is that of the stream.
    fn caller(&self) -> u64 {
        self.name.filter(|name| self.owns(*name)).unwrap_or(self.stream | 1)
    }

    fn owns(&self, name: u64) -> bool {
        self.quotas.streams.names.lock().get(&name) == Some(&self.stream)
    }

    /// Returns the report about a bucket for the engine.
    fn bucket_report<'a>(&'a self, bucket: &'a BucketId, report: &Reported, held: HeldQuota) -> BucketReport<'a> {
        let bucket = self.descriptors.get(bucket).unwrap_or(bucket);
        BucketReport {
            domain: &self.domain,
            entries: self.order(bucket.entries().collect()),
            caller: self.caller(),
            allowed: report.allowed,
            denied: report.denied,
            demand: report.demand,
            elapsed: report.elapsed,
            held,
            ttl: Micros::new(self.quotas.settings.ttl.as_micros() as u64),
            lifetime: report.lifetime.unwrap_or(self.quotas.settings.lifetime()),
        }
    }

    /// Returns the next quota of each bucket, in batches. The calls of a batch share a round trip to the store.
    async fn assign(&mut self, usages: Vec<Usage>, now: Micros, are_reports: bool) -> Vec<BucketAction> {
        let caller = self.caller();
        let mut actions = Vec::with_capacity(usages.len());
        let mut usages = usages.into_iter().peekable();
        let mut is_first = true;
        while usages.peek().is_some() {
            if !mem::take(&mut is_first) {
                // Other streams have their turn.
                yield_now().await;
            }
            let mut batch = Vec::new();
            for usage in usages.by_ref().take(BATCH) {
                batch.push(self.record(usage, now, are_reports));
            }
            let session = &*self;
            let outcomes = run_together(batch.iter().map(async |recorded| {
                let Recorded { usage, report, held } = recorded;
                session.quotas.engine.assign(&session.bucket_report(&usage.bucket, report, *held), now).await
            }))
            .await;
            for (recorded, outcome) in batch.into_iter().zip(outcomes) {
                if let Some(action) = self.accept(recorded.usage, outcome, now, are_reports, caller) {
                    actions.push(action);
                }
            }
        }
        actions.retain(BucketAction::is_readable);
        actions
    }

    /// Records a report of a bucket, and returns it with the caller's quota until now.
    fn record(&mut self, usage: Usage, now: Micros, is_report: bool) -> Recorded {
        let Some(bucket) = self.buckets.get_mut(&usage.bucket) else {
            return Recorded { usage, report: NO_REPORT, held: HeldQuota::default() };
        };
        let mut elapsed = Micros::ZERO;
        if is_report {
            elapsed = bucket.record(usage.allowed.saturating_add(usage.denied), now);
        }
        let report = Reported {
            allowed: usage.allowed,
            denied: usage.denied,
            demand: bucket.demand(),
            elapsed,
            lifetime: bucket.unextended_lifetime(elapsed, now),
        };
        Recorded { usage, report, held: bucket.held }
    }

    /// Stores the outcome of a report, and returns the quota to send, if there is one. `caller` is for the log.
    fn accept(
        &mut self,
        usage: Usage,
        outcome: ReportOutcome,
        now: Micros,
        is_report: bool,
        caller: u64,
    ) -> Option<BucketAction> {
        let normal_lifetime = self.quotas.settings.lifetime();
        let bucket = self.buckets.get_mut(&usage.bucket)?;
        if is_report {
            bucket.held.reported_at = now;
        }
        if !outcome.is_counted {
            bucket.held.prepaid.spend(usage.allowed);
            // While the counters are unavailable, all shares stay as they are.
            if let Some(former @ Quota::TokenBucket(_)) = bucket.held.quota {
                bucket.held.ends_at = now + normal_lifetime;
                return Some(BucketAction::Assign(usage.bucket, former, self.quotas.settings.ttl));
            }
        }
        let assignment = outcome.assignment?;
        if bucket.keeps_former(&assignment, now) {
            bucket.review_at(Some(now + TICK));
            return None;
        }
        let Assignment { quota, tokens, prepaid, share, lifetime, review_in } = assignment;
        let lifetime = lifetime.unwrap_or(normal_lifetime);
        if let Some(end) = prepaid.window_end() {
            self.window_phase = end % TICK;
        }
        bucket.review_at(review_in.map(|wait| now + wait.max(TICK)));
        let is_new = is_report || bucket.held.quota != Some(quota) || bucket.is_renewal_due(normal_lifetime, now);
        bucket.held = HeldQuota { quota: Some(quota), tokens, prepaid, ..bucket.held };
        if !is_new {
            return None;
        }
        // Without the bucket: its values can be personal data.
        tracing::debug!(caller, demand = bucket.demand(), share_millionths = share, ?quota, "quota sent");
        bucket.held.ends_at = now + lifetime;
        let ttl = Duration::from_secs((lifetime - DELIVERY_TIME).floor_secs());
        Some(BucketAction::Assign(usage.bucket, quota, ttl))
    }

    /// Returns the entries in the order of the rules.
    fn order<'e>(&self, entries: SmallVec<[Entry<'e>; 3]>) -> SmallVec<[Entry<'e>; 3]> {
        let (order, is_ambiguous) = self.quotas.engine.order(&self.domain, entries);
        if is_ambiguous && self.quotas.streams.log_ambiguous.should_log() {
            let keys: Vec<_> = order.iter().map(|entry| entry.key).collect();
            tracing::warn!(
                domain = &*self.domain,
                order = keys.join(", "),
                "several rules match the entries of a quota bucket, in different orders of its keys; only the rule \
                 with this order applies"
            );
        }
        order
    }
}

/// Returns the number of buckets that a bucket counts as.
fn room(bucket: &BucketId, descriptor: Option<&BucketId>) -> u64 {
    let mut bytes = bucket.size();
    if let Some(descriptor) = descriptor {
        bytes += descriptor.size();
    }
    1 + (bytes / NAME_BYTES) as u64
}

/// Merges the reports of one message about the same bucket.
fn merged(usages: Vec<Usage>) -> Vec<Usage> {
    let mut merged = Vec::<Usage>::new();
    let mut positions = HashMap::new();
    for usage in usages {
        let position = *positions.entry(usage.bucket.clone()).or_insert(merged.len());
        let Some(first) = merged.get_mut(position) else {
            merged.push(usage);
            continue;
        };
        first.allowed = first.allowed.saturating_add(usage.allowed);
        first.denied = first.denied.saturating_add(usage.denied);
        first.elapsed = first.elapsed.max(usage.elapsed);
    }
    merged
}

/// Runs futures at the same time, and returns their results in their order.
///
/// Most futures do not wait if counters are in memory. [`join_all`] alone would create a task for each.
async fn run_together<F: Future>(futures: impl Iterator<Item = F>) -> Vec<F::Output> {
    let mut started = Vec::with_capacity(futures.size_hint().0);
    for future in futures {
        let mut future = maybe_done(Box::pin(future));
        let _ = poll!(&mut future);
        started.push(future);
    }
    join_all(started.iter_mut().filter(|future| matches!(future, MaybeDone::Future(_)))).await;
    started.iter_mut().filter_map(|future| Pin::new(future).take_output()).collect()
}

impl Drop for QuotaSession {
    fn drop(&mut self) {
        self.close();
        self.quotas.streams.buckets.fetch_sub(self.buckets.len() as u64, Relaxed);
        self.quotas.streams.used.fetch_sub(self.used, Relaxed);
    }
}

#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
