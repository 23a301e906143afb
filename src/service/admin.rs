//! What operators do to counters, and to limits together with their counters.

use std::sync::Arc;

use super::{
    Candidates, Clock, OverrideSync,
    overrides::{AppliedChange, ChangeError, ChangeInfo, ChangeRequest},
    reload::Reloader,
};
use crate::{
    engine::{CounterLocation, DecideError, Engine, Inspection, RankBy, Ranking, StoreError, overrides::Target},
    rules::Entry,
};

/// Why something has not been done.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// A override.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// The counter's store.
    #[error("the counter cannot be asked now")]
    Store(#[from] StoreError),
    /// The counter's store, or what its rule makes of its absence.
    #[error(transparent)]
    Decide(#[from] DecideError),
    /// There is no counter.
    #[error("nothing is counted of this descriptor; inspect says why")]
    NotCounted,
}

/// The operators' way in. It lives on the runtime that has the connections of its engine.
#[derive(Clone)]
pub struct Admin {
    /// Which asks the store.
    pub engine: Engine,
    /// Which keeps what they say.
    pub overrides: Arc<OverrideSync>,
    /// The rules in force.
    pub reloader: Arc<Reloader>,
    /// Those that are tried out.
    pub candidates: Arc<Candidates>,
    /// What time it is.
    pub clock: Clock,
}

impl Admin {
    /// Says overrides. `additive`: what a new limit has more than the one before is given back to the counter, as far as it
    /// is not there by itself. The number of hits given back goes with each.
    pub async fn put(
        &self,
        requests: &[ChangeRequest],
        info: ChangeInfo,
        additive: bool,
    ) -> Result<(AppliedChange, Vec<u64>), AdminError> {
        let mut before = Vec::new();
        for request in requests {
            before.push(if additive { self.free_capacity(&request.target).await? } else { None });
        }
        let changed = self.overrides.change(requests, info).await?;
        let mut given_back = Vec::new();
        for (request, before) in requests.iter().zip(before) {
            given_back.push(self.add(&request.target, before).await?);
        }
        Ok((changed, given_back))
    }

    /// What remains of a descriptor's limit, and what passes at once.
    async fn free_capacity(&self, target: &Target) -> Result<Option<(u64, u64)>, AdminError> {
        let Target::Limit { domain, entries } = target else {
            return Ok(None);
        };
        let standing = self.inspect(domain, &pairs(entries)).await?.counter;
        Ok(standing.map(|standing| (standing.decision.remaining, standing.limit.policy().0)))
    }

    async fn add(&self, target: &Target, before: Option<(u64, u64)>) -> Result<u64, AdminError> {
        let (Some((remained, burst)), Target::Limit { domain, entries }) = (before, target) else {
            return Ok(0);
        };
        let Some((remains, new_burst)) = self.free_capacity(target).await? else {
            return Ok(0);
        };
        let hits = (remained + new_burst.saturating_sub(burst)).saturating_sub(remains);
        if hits > 0 {
            self.engine.refund(domain, &pairs(entries), hits, self.clock.now()).await?;
        }
        Ok(hits)
    }

    /// What a descriptor meets, and where its counter stands.
    pub async fn inspect(&self, domain: &str, entries: &[Entry<'_>]) -> Result<Inspection, AdminError> {
        Ok(self.engine.inspect(domain, entries, self.clock.now()).await?)
    }

    /// Forgets a descriptor's counter: its name, and whether there was one.
    pub async fn forget(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        info: ChangeInfo,
    ) -> Result<(CounterLocation, bool), AdminError> {
        info.check()?;
        let forgotten = self.engine.forget(domain, entries, self.clock.now()).await?;
        let (counter, existed) = forgotten.ok_or(AdminError::NotCounted)?;
        self.record(&format!("forgot {}", counter.key), info).await?;
        Ok((counter, existed))
    }

    /// Gives hits back to a descriptor's counter.
    pub async fn refund(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        hits: u64,
        info: ChangeInfo,
    ) -> Result<Inspection, AdminError> {
        info.check()?;
        let standing = self.inspect(domain, entries).await?.counter.ok_or(AdminError::NotCounted)?;
        self.engine.refund(domain, entries, hits, self.clock.now()).await?;
        self.record(&format!("gave {hits} back to {}", standing.counter.key), info).await?;
        self.inspect(domain, entries).await
    }

    async fn record(&self, what: &str, info: ChangeInfo) -> Result<(), AdminError> {
        let reason = if info.reason.is_empty() { what.to_owned() } else { format!("{what}: {}", info.reason) };
        Ok(self.overrides.record_action(ChangeInfo { reason, ..info }).await?)
    }

    /// The descriptors that were refused most, or asked most.
    #[must_use]
    pub fn top(&self, by: RankBy, most: usize, fits: impl Fn(&Target, &str) -> bool) -> Ranking {
        let top = self.engine.top.as_ref();
        top.map(|top| top.ranking(by, most, self.clock.now(), fits)).unwrap_or_default()
    }
}

fn pairs(entries: &[(String, String)]) -> Vec<Entry<'_>> {
    entries.iter().map(|(key, value)| Entry { key, value }).collect()
}
