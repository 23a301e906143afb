//! [`Series`]: the hit counters of one rule.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use sluicegate_algorithm::Decision;
use sluicegate_metrics::{Counter, Striped, WorkerId};
use sluicegate_rules::Labels;

/// Name of the count of refunded hits in envoyproxy/ratelimit.
pub(super) const REFUNDED_HITS: &str = "total_negative_hits";

/// A count of a series: hits of one kind, or denied requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    Total,
    Within,
    Near,
    Over,
    Shadow,
    Soft,
    DenyCache,
    DeniedRequests,
}

impl Count {
    /// Number of counts. With more than eight, the stripe of a worker would have a second cache line.
    const NUMBER: usize = 8;
    /// The counts of hits, most of them under the names of envoyproxy/ratelimit.
    pub(super) const HITS: [Self; 7] =
        [Self::Total, Self::Within, Self::Near, Self::Over, Self::Shadow, Self::Soft, Self::DenyCache];
    /// Number of exported series for one set of labels: those of [`Count::HITS`], requests, denied requests, and refunded
    /// hits.
    pub(super) const EXPORTED: usize = Self::HITS.len() + 3;

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Total => "total_hits",
            Self::Within => "within_limit",
            Self::Near => "near_limit",
            Self::Over => "over_limit",
            Self::Shadow => "shadow_mode",
            Self::Soft => "soft_limit",
            Self::DenyCache => "over_limit_with_local_cache",
            Self::DeniedRequests => "denied_requests",
        }
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Total => "Hits requested from a rule's limit",
            Self::Within => "Hits within a rule's limit",
            Self::Near => "Hits within a rule's limit, but near it",
            Self::Over => "Hits over a rule's limit: denied, or allowed only because of shadow mode",
            Self::Shadow => "Hits over the limit of a rule in shadow mode",
            Self::Soft => "Hits above a rule's limit that were allowed because it is soft",
            Self::DenyCache => "Hits over a rule's limit that were denied from the deny cache",
            Self::DeniedRequests => "Requests that a rule's limit denied",
        }
    }
}

/// How decided hits are counted: the limit, the near-limit threshold, and flags of the decision.
#[derive(Clone, Copy)]
pub(crate) struct CountContext {
    pub(crate) limit: u64,
    /// Number of requests that the hits belong to.
    pub(crate) requests: u64,
    /// The count above which hits are near the limit.
    pub(crate) near: u64,
    /// Whether the hits of a denied request that were below the limit are counted as within the limit.
    pub(crate) splits_denied: bool,
    /// Whether denied hits are allowed by shadow mode.
    pub(crate) shadow: bool,
    /// Whether the denial came from the deny cache, without a call to the store.
    pub(crate) from_deny_cache: bool,
}

/// The counts of one rule, or of one set of labels.
pub(crate) struct Series {
    labels: Labels,
    workers: usize,
    /// Created at the first hit: of a hundred thousand rules most never match a request, and stripes are large.
    counts: OnceLock<Striped<[AtomicU64; Count::NUMBER]>>,
    /// Hits after the first one of each request, for the number of requests. Most requests have one hit.
    extra_hits: OnceLock<Counter>,
    /// Hits of refunds, which most rules never have.
    refunded_hits: OnceLock<Counter>,
    /// The counts of hits that Envoys have admitted or denied by themselves.
    reports: OnceLock<Box<Self>>,
}

impl Series {
    /// Creates a series. `labels` are the domain and every level.
    pub(super) fn new(labels: &Labels, workers: usize) -> Self {
        let clean: Vec<_> = labels.iter().map(|label| sanitize(label)).collect();
        let is_clean = clean.iter().map(String::as_str).eq(labels.iter().map(|label| &**label));
        let labels = if is_clean { Arc::clone(labels) } else { clean.into_iter().map(Arc::from).collect() };
        Self {
            labels,
            workers,
            counts: OnceLock::new(),
            extra_hits: OnceLock::new(),
            refunded_hits: OnceLock::new(),
            reports: OnceLock::new(),
        }
    }

    pub(super) fn labels(&self) -> &[Arc<str>] {
        &self.labels
    }

    /// Returns the counts of hits that Envoys have admitted or denied by themselves.
    pub(crate) fn reports(&self) -> &Self {
        self.reports.get_or_init(|| Box::new(Self::new(&self.labels, self.workers)))
    }

    /// Returns the sum over all workers and protocols, or `None` if the series was never used.
    pub(super) fn sum(&self, count: Count) -> Option<u64> {
        self.by_protocol(count).map(|(_, sum)| sum).reduce(|calls, reports| calls + reports)
    }

    /// Returns the sum over all workers for each protocol that was used: of calls, without a name, and of reports.
    pub(super) fn by_protocol(&self, count: Count) -> impl Iterator<Item = (Option<&'static str>, u64)> {
        let calls = self.sum_of_calls(count).map(|sum| (None, sum));
        let reports = self.reports.get().and_then(|reports| reports.sum_of_calls(count));
        let reports = reports.map(|sum| (Some("rlqs"), sum));
        [calls, reports].into_iter().flatten()
    }

    /// Returns the sum over all workers without the reports, or `None` if nothing was counted.
    fn sum_of_calls(&self, count: Count) -> Option<u64> {
        let stripes = self.counts.get()?.iter();
        Some(stripes.map(|stripe| stripe[count as usize].load(Relaxed)).sum())
    }

    /// Returns the number of requests with at least one hit for each protocol, as [`Series::by_protocol`].
    pub(super) fn requests_by_protocol(&self) -> impl Iterator<Item = (Option<&'static str>, u64)> {
        let extra_hits = match self.extra_hits.get() {
            Some(extra_hits) => extra_hits.get(),
            None => 0,
        };
        // In a report, each hit is a request. Workers count while the two sums are read.
        self.by_protocol(Count::Total).map(move |(protocol, hits)| match protocol {
            None => (protocol, hits.saturating_sub(extra_hits)),
            Some(_) => (protocol, hits),
        })
    }

    /// Returns the number of requests with at least one hit, or `None` if the series was never used.
    pub(super) fn requests(&self) -> Option<u64> {
        self.requests_by_protocol().map(|(_, sum)| sum).reduce(|calls, reports| calls + reports)
    }

    /// Returns the number of refunded hits, or `None` if there was no refund.
    pub(super) fn refunded(&self) -> Option<u64> {
        self.refunded_hits.get().map(Counter::get)
    }

    /// Counts hits that a caller refunds, also if the counter has fewer.
    pub(crate) fn count_refunded(&self, worker: WorkerId, hits: u64) {
        self.refunded_hits.get_or_init(|| Counter::new(self.workers)).add(worker, hits);
    }

    fn add(&self, worker: WorkerId, count: Count, hits: u64) {
        if hits > 0 {
            let counts = self.counts.get_or_init(|| Striped::new(self.workers));
            counts.of(worker)[count as usize].fetch_add(hits, Relaxed);
        }
    }

    /// Counts the requested hits of some requests, whether they are allowed or not.
    pub(crate) fn count_requested(&self, worker: WorkerId, hits: u64, requests: u64) {
        self.add(worker, Count::Total, hits);
        if hits > requests {
            self.extra_hits.get_or_init(|| Counter::new(self.workers)).add(worker, hits - requests);
        }
    }

    /// Counts decided hits.
    ///
    /// A request that crosses a threshold is split: of 5 hits at a count of 8 and a limit of 10, 2 are within the limit
    /// and 3 are over it.
    pub(crate) fn count_decision(&self, worker: WorkerId, hits: u64, decision: &Decision, context: CountContext) {
        let CountContext { limit, requests, near, splits_denied, shadow, from_deny_cache } = context;
        let after = decision.used;
        let before = after.saturating_sub(hits);
        let within = if decision.allowed {
            hits
        } else if splits_denied {
            limit.saturating_sub(before).min(hits)
        } else {
            0
        };
        let over = hits - within;
        // Hits near the limit are those within the limit and above the near-limit threshold.
        let near = within.min((before + within).saturating_sub(near.max(before)));
        self.add(worker, Count::Within, within);
        self.add(worker, Count::Near, near);
        self.add(worker, Count::Over, over);
        if shadow {
            self.add(worker, Count::Shadow, over);
        } else if !decision.allowed {
            self.add(worker, Count::DeniedRequests, requests);
        }
        if from_deny_cache {
            self.add(worker, Count::DenyCache, over);
        }
        if decision.soft {
            self.add(worker, Count::Soft, after.saturating_sub(limit).min(hits));
        }
    }
}

/// Replaces the characters that names in envoyproxy/ratelimit must not contain: `:`, `|` and the dots of IPv4
/// addresses. Also replaces the beginnings of lines and tags in statsd: control characters and `.__`.
pub(super) fn sanitize(label: &str) -> String {
    let text = label.replace(|letter: char| letter == ':' || letter == '|' || letter.is_control(), "_");
    let mut text = text.replace(".__", "___");
    let numbers = text.split(|letter: char| !letter.is_ascii_digit() && letter != '.');
    let addresses: Vec<String> = numbers.filter(|part| is_ipv4(part)).map(str::to_owned).collect();
    for address in addresses {
        text = text.replace(&address, &address.replace('.', "_"));
    }
    text
}

fn is_ipv4(text: &str) -> bool {
    text.parse::<std::net::Ipv4Addr>().is_ok()
}
