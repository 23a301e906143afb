//! [`Admin`]: the operators' actions on counters, and on overrides together with the counters that they affect.

use std::{collections::BTreeMap, sync::Arc};

use futures_util::future::join_all;

use super::{
    Activity, Candidates, Clock, OverrideSync, Simulator,
    overrides::{AppliedChange, ChangeError, ChangeInfo, ChangeRequest},
    reload::RulesInForce,
};
use crate::{
    engine::{
        CounterLocation, DecideError, Engine, Inspection, RankBy, StoreError, TopEntities,
        overrides::{KnownNames, Target},
    },
    rules::{Entry, Rule},
    store::AnyStore,
};

/// Error returned when an action of an operator fails.
#[derive(Debug, thiserror::Error)]
pub enum AdminError {
    /// The overrides cannot be changed.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// The store cannot delete the counter.
    #[error("the counter cannot be reset")]
    Store(#[from] StoreError),
    /// The engine cannot decide: the store cannot be reached, or there are no rules.
    #[error(transparent)]
    Decide(#[from] DecideError),
    /// No counter belongs to the descriptor.
    #[error("this descriptor has no counter; use inspect to see why")]
    NotCounted,
}

/// Maximum number of entities whose counters [`Admin::usage`] reads.
const MAX_READ_ENTITIES: usize = 200;
/// Number of counters that are read at the same time.
const READ_BATCH: usize = 50;

/// How much of its limit an entity uses.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EntityUsage {
    /// Domain of the entity.
    pub domain: String,
    /// Keys and values of the entity.
    pub entries: Vec<(String, String)>,
    /// Used hits.
    pub used: u64,
    /// Hits that the limit allows.
    pub limit: u64,
}

impl EntityUsage {
    /// Returns the used share of the limit; 1 if the limit allows nothing.
    #[must_use]
    pub fn share(&self) -> f64 {
        if self.limit == 0 { 1.0 } else { self.used as f64 / self.limit as f64 }
    }
}

/// The methods of the admin API, without their protocol. Must be used on the runtime to which the connections of
/// `engine` belong.
#[derive(Clone)]
pub struct Admin {
    /// The engine, which calls the store.
    pub engine: Engine<AnyStore>,
    /// The overrides.
    pub overrides: Arc<OverrideSync>,
    /// The rules in force.
    pub in_force: Arc<RulesInForce>,
    /// The candidate rules.
    pub candidates: Arc<Candidates>,
    /// The decisions of the last hour.
    pub activity: Arc<Activity>,
    /// The simulator of changes.
    pub simulator: Arc<Simulator>,
    /// The clock.
    pub clock: Clock,
}

/// The hits that a counter allows.
#[derive(Clone, Copy)]
struct Capacity {
    /// Hits that the counter allows now.
    remaining: u64,
    /// Maximum number of hits that the counter allows at once.
    burst: u64,
}

impl Admin {
    /// Changes overrides.
    ///
    /// If `additive` is set, the difference between a higher new limit and the previous one is refunded to the counter,
    /// except for the part by which the change of the limit itself raised the remaining hits.
    ///
    /// # Errors
    ///
    /// Returns an error if the overrides cannot be changed, or a counter cannot be read or refunded.
    pub async fn put(
        &self,
        requests: &[ChangeRequest],
        info: ChangeInfo,
        additive: bool,
    ) -> Result<AppliedChange, AdminError> {
        let mut capacities = BTreeMap::new();
        if additive {
            for request in requests {
                if let Some(capacity) = self.capacity(&request.target).await? {
                    capacities.insert(&request.target, capacity);
                }
            }
        }
        let mut applied = self.overrides.change(requests, info).await?;
        for changed in &mut applied.changes {
            if let Some(before) = capacities.get(&changed.target) {
                changed.refunded_hits = self.refund_difference(&changed.target, *before).await?;
            }
        }
        Ok(applied)
    }

    /// Returns a warning for each request that sets an override with a name that the rules in force do not have.
    #[must_use]
    pub fn unknown_names(&self, requests: &[ChangeRequest]) -> Vec<String> {
        let snapshot = self.in_force.snapshot().load();
        if snapshot.awaits_rules() {
            return Vec::new();
        }
        let mut names = KnownNames::new(snapshot.rule_set());
        let mut warnings = Vec::new();
        for request in requests {
            let Some(value) = &request.value else {
                continue;
            };
            if let Some(unknown) = names.unknown_name(&request.target, value) {
                warnings.push(format!("{}: {unknown}", request.target));
            }
        }
        warnings
    }

    /// Returns the capacity of the counter of a limit, or `None` without a counter.
    async fn capacity(&self, target: &Target) -> Result<Option<Capacity>, AdminError> {
        let Target::Limit { domain, entries } = target else {
            return Ok(None);
        };
        let Some(counter) = self.inspect(domain, &pairs(entries), 1).await?.counter else {
            return Ok(None);
        };
        let (burst, _) = counter.limit.policy();
        Ok(Some(Capacity { remaining: counter.decision.remaining, burst }))
    }

    /// Refunds hits after a change, so that the counter allows the remaining hits of `before` and those by which the
    /// limit was raised. Returns the number of refunded hits.
    async fn refund_difference(&self, target: &Target, before: Capacity) -> Result<u64, AdminError> {
        let Target::Limit { domain, entries } = target else {
            return Ok(0);
        };
        let Some(now) = self.capacity(target).await? else {
            return Ok(0);
        };
        let promised = before.remaining + now.burst.saturating_sub(before.burst);
        let hits = promised.saturating_sub(now.remaining);
        if hits > 0 {
            self.engine.refund(domain, &pairs(entries), hits, self.clock.now()).await?;
        }
        Ok(hits)
    }

    /// Returns the rule and the overrides that apply to a descriptor, the state of its counter, and the decision that a
    /// request with this number of hits would receive.
    ///
    /// # Errors
    ///
    /// Returns an error if the store cannot be reached or no rules are loaded.
    pub async fn inspect(&self, domain: &str, entries: &[Entry<'_>], hits: u32) -> Result<Inspection, AdminError> {
        Ok(self.engine.inspect(domain, entries, hits, self.clock.now()).await?)
    }

    /// Deletes the counters and penalties of a descriptor. Returns the location of the first counter, and whether any
    /// of them existed.
    ///
    /// # Errors
    ///
    /// Returns an error if the author or the reason is invalid, the descriptor has no counter, or the store cannot be
    /// written.
    pub async fn reset_counter(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        info: ChangeInfo,
    ) -> Result<(CounterLocation, bool), AdminError> {
        info.check()?;
        let deleted = self.engine.reset_counter(domain, entries, self.clock.now()).await?;
        let (counter, existed) = deleted.ok_or(AdminError::NotCounted)?;
        self.record(&format!("reset {}", counter.key), info).await?;
        Ok((counter, existed))
    }

    /// Refunds hits to a descriptor's counter, and returns the inspection after the refund.
    ///
    /// # Errors
    ///
    /// Returns an error if the author or the reason is invalid, the descriptor has no counter, or the store cannot be
    /// written.
    pub async fn refund(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        hits: u64,
        info: ChangeInfo,
    ) -> Result<Inspection, AdminError> {
        info.check()?;
        let state = self.inspect(domain, entries, 1).await?.counter.ok_or(AdminError::NotCounted)?;
        self.engine.refund(domain, entries, hits, self.clock.now()).await?;
        self.record(&format!("refunded {hits} to {}", state.counter.key), info).await?;
        self.inspect(domain, entries, 1).await
    }

    /// Returns how much of its limit each entity of a rule uses, for the entities with the most requested hits, most used
    /// first, and the number of entities that could not be read.
    pub async fn usage(&self, rule: &Rule) -> (Vec<EntityUsage>, usize) {
        let domain = &*rule.labels[0];
        let policy = &**rule.policy();
        let ranked = match &self.engine.top {
            Some(top) => {
                let period = TopEntities::DEFAULT_PERIOD;
                let now = self.clock.now();
                let ranking =
                    top.ranking(RankBy::Requested, MAX_READ_ENTITIES, period, now, |target, ranked_policy| {
                        let is_of_domain = matches!(target, Target::Limit { domain: ranked, .. } if ranked == domain);
                        is_of_domain && ranked_policy == policy
                    });
                ranking.top
            }
            None => Vec::new(),
        };
        let mut usages = Vec::new();
        let mut failed = 0;
        for chunk in ranked.chunks(READ_BATCH) {
            for usage in join_all(chunk.iter().map(|entity| self.usage_of(&entity.target, rule))).await {
                match usage {
                    Ok(usage) => usages.extend(usage),
                    Err(_) => failed += 1,
                }
            }
        }
        usages.sort_by(|one, other| other.share().total_cmp(&one.share()));
        (usages, failed)
    }

    /// Returns how much of the limit of `rule` an entity uses, or `None` if the rule does not apply to the entity.
    async fn usage_of(&self, target: &Target, rule: &Rule) -> Result<Option<EntityUsage>, AdminError> {
        let Target::Limit { domain, entries } = target else {
            return Ok(None);
        };
        let inspection = self.inspect(domain, &pairs(entries), 1).await?;
        if inspection.rule != Some(rule.id) {
            return Ok(None);
        }
        Ok(inspection.counter.map(|counter| EntityUsage {
            domain: domain.clone(),
            entries: entries.clone(),
            used: counter.decision.used,
            limit: counter.limit.policy().0,
        }))
    }

    async fn record(&self, action: &str, info: ChangeInfo) -> Result<(), AdminError> {
        let reason = if info.reason.is_empty() { action.to_owned() } else { format!("{action}: {}", info.reason) };
        Ok(self.overrides.record_action(ChangeInfo { reason, ..info }).await?)
    }
}

pub(super) fn pairs(entries: &[(String, String)]) -> Vec<Entry<'_>> {
    entries.iter().map(|(key, value)| Entry { key, value }).collect()
}

#[cfg(test)]
mod tests {
    use smallvec::smallvec;

    use super::*;
    use crate::{
        engine::{Descriptor, Request},
        metrics::WorkerId,
        service::testing::admin,
        store::{self, AnyStore, Local, TimeSource, local, redis},
    };

    const RULES: &str = "domain: api
descriptors:
- { key: user, rate_limit: { unit: hour, requests_per_unit: 10 } }
- { key: path, rate_limit: { unit: hour, requests_per_unit: 4 } }
";

    fn ask(admin: &Admin, key: &str, value: &str) {
        let entries = smallvec![Entry { key, value }];
        let descriptors = smallvec![Descriptor::new(entries)];
        let request = Request { domain: "api", descriptors, feedback: Vec::new() };
        let memory = admin.engine.store.memory().unwrap();
        admin.engine.decide_in(memory, &request, admin.clock.now()).unwrap();
    }

    #[tokio::test]
    async fn the_usage_of_a_rule_does_not_depend_on_entities_of_other_rules() {
        let admin = admin(RULES);
        for user in 0..=MAX_READ_ENTITIES {
            (0..2).for_each(|_| ask(&admin, "user", &user.to_string()));
        }
        ask(&admin, "path", "/a");
        let snapshot = admin.in_force.snapshot().load_full();
        let rule = snapshot.rule_set().rules().iter().find(|rule| rule.path() == "api.path").unwrap();
        let entries = vec![("path".to_owned(), "/a".to_owned())];
        let expected = EntityUsage { domain: "api".into(), entries, used: 1, limit: 4 };
        assert_eq!(admin.usage(rule).await, (vec![expected], 0));
    }

    #[tokio::test]
    async fn entities_that_cannot_be_read_are_counted() {
        let admin = admin(RULES);
        ["/a", "/b"].into_iter().for_each(|path| ask(&admin, "path", path));
        let (metrics, worker) = (store::Metrics::new(1), WorkerId(0));
        let settings = redis::Settings::default();
        let setup = redis::Setup::new("redis://127.0.0.1:1", &settings, TimeSource::Own, Arc::clone(&metrics.redis));
        let (deny_cache, leases, eventual) = Default::default();
        let shared =
            local::LocalState::new(&deny_cache, &leases, &eventual, TimeSource::Own, Arc::clone(&metrics.local));
        let store = AnyStore::Redis(Local::new(setup.unwrap().connect(worker), shared, worker));
        let admin = Admin { engine: admin.engine.with_store(store), ..admin };
        let snapshot = admin.in_force.snapshot().load_full();
        let rule = snapshot.rule_set().rules().iter().find(|rule| rule.path() == "api.path").unwrap();
        assert_eq!(admin.usage(rule).await, (Vec::new(), 2));
    }
}
