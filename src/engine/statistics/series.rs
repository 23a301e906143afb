//! The counts of one rule.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU64, Ordering::Relaxed},
};

use crate::{
    algorithm::Decision,
    metrics::{Striped, WorkerId},
    rules::Labels,
};

/// What is counted, in hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Count {
    Total,
    Within,
    Near,
    Over,
    Shadow,
    Soft,
    Known,
}

impl Count {
    pub(super) const ALL: [Self; 7] =
        [Self::Total, Self::Within, Self::Near, Self::Over, Self::Shadow, Self::Soft, Self::Known];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Total => "total_hits",
            Self::Within => "within_limit",
            Self::Near => "near_limit",
            Self::Over => "over_limit",
            Self::Shadow => "shadow_mode",
            Self::Soft => "soft_limit",
            Self::Known => "over_limit_with_local_cache",
        }
    }

    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Total => "Hits asked of a rule's limit",
            Self::Within => "Hits within a rule's limit",
            Self::Near => "Hits within a rule's limit, but near it",
            Self::Over => "Hits over a rule's limit",
            Self::Shadow => "Hits over the limit of a rule in shadow mode",
            Self::Soft => "Hits above a rule's limit that passed because it is soft",
            Self::Known => "Hits over a rule's limit that were refused without asking the store",
        }
    }
}

/// What decided hits are held against.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Threshold {
    pub(in crate::engine) limit: u64,
    /// From here on hits are near the limit.
    pub(in crate::engine) near: u64,
    /// A refused request was counted: what of it lay below the limit was within it.
    pub(in crate::engine) splits: bool,
    /// Refused hits pass all the same.
    pub(in crate::engine) shadow: bool,
    /// The refusal was known; the store was not asked.
    pub(in crate::engine) known: bool,
}

/// The counts of one rule, or of one set of labels.
pub(in crate::engine) struct Series {
    labels: Labels,
    workers: usize,
    /// Made at the first hit: of a hundred thousand rules most are never met, and stripes are wide.
    counts: OnceLock<Striped<[AtomicU64; Count::ALL.len()]>>,
}

impl Series {
    /// `labels`: the domain and every level.
    pub(super) fn new(labels: &Labels, workers: usize) -> Self {
        let clean: Vec<_> = labels.iter().map(|label| sanitize(label)).collect();
        let is_clean = clean.iter().map(String::as_str).eq(labels.iter().map(|label| &**label));
        let labels = if is_clean { Arc::clone(labels) } else { clean.into_iter().map(Arc::from).collect() };
        Self { labels, workers, counts: OnceLock::new() }
    }

    pub(super) fn labels(&self) -> &[Arc<str>] {
        &self.labels
    }

    /// `None` for a series never used.
    pub(super) fn sum(&self, count: Count) -> Option<u64> {
        let counts = self.counts.get()?;
        Some(counts.iter().map(|stripe| stripe[count as usize].load(Relaxed)).sum())
    }

    fn add(&self, worker: WorkerId, count: Count, hits: u64) {
        if hits > 0 {
            let counts = self.counts.get_or_init(|| Striped::new(self.workers));
            counts.of(worker)[count as usize].fetch_add(hits, Relaxed);
        }
    }

    /// Hits are asked, whatever comes of it.
    pub(in crate::engine) fn count_requested(&self, worker: WorkerId, hits: u64) {
        self.add(worker, Count::Total, hits);
    }

    /// Hits were decided. A request that crosses a threshold is split: of 5 hits that come at 8 of 10, 2 are within
    /// the limit and 3 over it.
    pub(in crate::engine) fn count_decision(
        &self,
        worker: WorkerId,
        hits: u64,
        decision: &Decision,
        threshold: Threshold,
    ) {
        let Threshold { limit, near, splits, shadow, known } = threshold;
        let after = decision.used;
        let before = after.saturating_sub(hits);
        let within = match decision.allowed {
            true => hits,
            false if splits => limit.saturating_sub(before).min(hits),
            false => 0,
        };
        let over = hits - within;
        // Of the hits within, those above the near threshold.
        let near = within.min((before + within).saturating_sub(near.max(before)));
        self.add(worker, Count::Within, within);
        self.add(worker, Count::Near, near);
        self.add(worker, Count::Over, over);
        if shadow {
            self.add(worker, Count::Shadow, over);
        }
        if known {
            self.add(worker, Count::Known, over);
        }
        if decision.soft {
            self.add(worker, Count::Soft, after.saturating_sub(limit).min(hits));
        }
    }
}

/// What the peer's names allow: no `:` or `|`, and no dots in an IPv4 address.
pub(super) fn sanitize(label: &str) -> String {
    let mut text = label.replace([':', '|'], "_");
    let is_part = |letter: char| letter.is_ascii_digit() || letter == '.';
    let candidates: Vec<String> =
        text.split(|letter| !is_part(letter)).filter(|part| is_ipv4(part)).map(str::to_owned).collect();
    for address in candidates {
        text = text.replace(&address, &address.replace('.', "_"));
    }
    text
}

fn is_ipv4(text: &str) -> bool {
    text.parse::<std::net::Ipv4Addr>().is_ok()
}
