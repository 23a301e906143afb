//! Operations of the admin API on one descriptor: inspecting and deleting its counter, and refunding hits.

use sluicegate_algorithm::{
    Action, Algorithm, CounterPart, Decision, Micros, Operation, Program, State, assignments::Assignments, forecast,
    penalty::Penalty,
};
use sluicegate_rules::{Currency, Entry, Limit, Measure, Rule};
use sluicegate_store::{Counter, Store, StoreError};
use smallvec::{SmallVec, smallvec};

use super::{
    DecideError, Descriptor, Engine, Override, OverrideKind, Request, Snapshot, key,
    matching::{AppliedLimit, Match, MatchOf},
    overrides::Origin,
    penalty,
    verdict::never_fits,
};

/// The rule, overrides and counter state that apply to a descriptor.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// The steps of matching the rules, one line each.
    pub match_steps: Vec<String>,
    /// The id of the matched rule.
    pub rule: Option<usize>,
    /// The overrides that apply, with their origins, highest precedence first.
    pub overrides: Vec<(Origin, Override)>,
    /// The kind of the override that is in force.
    pub override_kind: Option<OverrideKind>,
    /// The state of the counter, of the first limit if there are several; `None` if nothing is counted.
    pub counter: Option<CounterState>,
    /// The states of the counters of further limits.
    pub others: Vec<CounterState>,
    /// Whether a request with the inspected hits would be allowed.
    pub allowed: bool,
    /// The maximum number of hits in one request, if the limit can never allow the inspected hits.
    pub max_hits: Option<u64>,
}

/// The state of a counter.
#[derive(Clone, Debug)]
pub struct CounterState {
    /// The limit that applies.
    pub limit: Limit,
    /// The unit in which the rule displays hits; `None` for requests in flight.
    pub currency: Option<Currency>,
    /// The counter's name and store.
    pub counter: CounterLocation,
    /// The decision that a request with the inspected hits would receive.
    pub decision: Decision,
    /// Number of callers with a quota, and the millionths of the limit that they can use; `None` if there are none.
    pub quotas: Option<(u32, u64)>,
    /// Time until the penalty in force ends, zero if there is none.
    pub penalty: Micros,
    /// Time of the state, by the store's clock.
    pub at: Micros,
    algorithm: Algorithm,
    state: State,
}

impl CounterState {
    /// Returns the hits that the counter contains, with the times for which they count. Empty for buckets.
    #[must_use]
    pub fn parts(&self) -> Vec<CounterPart> {
        self.algorithm.parts(&self.state, self.at)
    }

    /// Returns the remaining hits from now on, if no other requests arrive (see [`forecast`]).
    #[must_use]
    pub fn forecast(&self) -> Vec<(Micros, u64)> {
        forecast(&self.algorithm, &self.state, self.at)
    }
}

/// The name of a counter, and which store has it.
#[derive(Clone, Debug)]
pub struct CounterLocation {
    /// Name of the counter in the store.
    pub key: String,
    /// Whether its limit is per second. Such counters may be in a store of their own.
    pub per_second: bool,
}

impl<S: Store> Engine<S> {
    /// Inspects a descriptor for a request with this number of hits, without taking them.
    ///
    /// # Errors
    ///
    /// Returns an error if the store fails.
    pub async fn inspect(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        hits: u32,
        now: Micros,
    ) -> Result<Inspection, StoreError> {
        let snapshot = self.rules.load_full();
        let request = peek_request(domain, entries);
        let descriptor = &request.descriptors[0];
        let mut matches = SmallVec::new();
        self.add_matches(&snapshot, domain, descriptor, now, 0, &mut matches);
        let first = &matches[0].matched;
        let rule = first.rule().or_else(|| snapshot.rule_set().rule_for(domain, entries));
        let mut inspection = Inspection {
            match_steps: snapshot.rule_set().explain(domain, entries),
            rule: rule.map(|rule| rule.id),
            overrides: snapshot.overrides.applicable(domain, entries, rule, now),
            override_kind: match first {
                Match::None | Match::NoDomain | Match::NoRule => None,
                Match::Off => Some(OverrideKind::Switch(super::overrides::Mode::Off)),
                Match::Unlimited(_, override_kind) => *override_kind,
                Match::Limited(applied) | Match::Denied(applied) => applied.override_kind(),
            },
            counter: None,
            others: Vec::new(),
            allowed: true,
            max_hits: None,
        };
        for MatchOf { matched, .. } in &matches {
            match matched {
                Match::Denied(applied) => inspection.allowed &= self.is_shadow(&snapshot, applied),
                Match::Limited(applied) => {
                    self.inspect_limit(&snapshot, &request, applied, hits, now, &mut inspection).await?;
                }
                Match::None | Match::NoDomain | Match::NoRule | Match::Off | Match::Unlimited(..) => {}
            }
        }
        Ok(inspection)
    }

    /// Adds the state of a limit's counter.
    async fn inspect_limit(
        &self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        applied: &AppliedLimit<'_>,
        hits: u32,
        now: Micros,
        inspection: &mut Inspection,
    ) -> Result<(), StoreError> {
        let descriptor = &request.descriptors[0];
        let counter = self.counter_of(request, applied, snapshot);
        let algorithm = applied.limit.algorithm();
        let for_caller = applied.for_caller(algorithm, descriptor, None, counter.key.as_bytes());
        let algorithm = for_caller.unwrap_or(*algorithm);
        // The shared counter is read, not this instance's cache, lease or eventual counter.
        let stored = Counter { per_second: counter.per_second, ..Counter::new(counter.key.as_bytes(), algorithm) };
        let (state, at) = self.store.read(&stored, now).await?;
        let cost = applied.cost_of(descriptor, hits.into());
        let peek = Operation { action: Action::Peek, cost, now: at };
        let mut decision = algorithm.apply(&mut state.clone(), peek);
        let penalty = self.penalty_left(snapshot, request, applied, &stored, now).await?;
        if penalty > Micros::ZERO {
            penalty::deny(&mut decision, penalty);
        }
        let allowed = decision.allowed || self.is_shadow(snapshot, applied);
        let (base_quota, _) = applied.base_limit().policy();
        let quota = match decision.limit {
            Some(limit) => limit.into(),
            None => base_quota,
        };
        inspection.allowed &= allowed;
        if !allowed && never_fits(decision.retry_after, quota, cost) {
            let cost_per_hit = applied.cost_of(descriptor, 1).max(1);
            inspection.max_hits = Some(inspection.max_hits.unwrap_or(u64::MAX).min(quota / cost_per_hit));
        }
        let shares = Assignments::new(Assignments::MAX_TTL);
        let name = self.counter_name(snapshot, request.domain, &descriptor.entries, applied, shares);
        let shares = Counter { name, program: shares.into(), ..stored };
        let (shares_state, _) = self.store.read(&shares, now).await?;
        let quotas = Assignments::assigned(&shares_state, at);
        let currency = match (applied.rule, applied.limit.measure()) {
            (Some(rule), Measure::Rate { .. }) => rule.currency.as_deref().cloned(),
            (Some(_), Measure::InFlight { .. }) | (None, _) => None,
        };
        let state =
            CounterState { limit: *applied.limit, currency, counter, decision, quotas, penalty, at, algorithm, state };
        match inspection.counter {
            None => inspection.counter = Some(state),
            Some(_) => inspection.others.push(state),
        }
        Ok(())
    }

    /// Returns the time until the limit's penalty ends, zero if none is in force.
    async fn penalty_left(
        &self,
        snapshot: &Snapshot,
        request: &Request<'_>,
        applied: &AppliedLimit<'_>,
        counter: &Counter,
        now: Micros,
    ) -> Result<Micros, StoreError> {
        let Some(penalty) = applied.limit.penalty() else {
            return Ok(Micros::ZERO);
        };
        let name = self.counter_name(snapshot, request.domain, &request.descriptors[0].entries, applied, penalty);
        let (state, at) = self.store.read(&Counter { name, program: penalty.into(), ..counter.clone() }, now).await?;
        Ok(Penalty::time_left(&state, at))
    }

    /// Deletes the counter of a descriptor, those of further limits, and penalties. Returns the name of the first
    /// counter and whether any of them existed, or `None` if nothing is counted.
    ///
    /// # Errors
    ///
    /// Returns an error if the store fails.
    pub async fn reset_counter(
        &self,
        domain: &str,
        entries: &[Entry<'_>],
        now: Micros,
    ) -> Result<Option<(CounterLocation, bool)>, StoreError> {
        let snapshot = self.rules.load_full();
        let request = peek_request(domain, entries);
        let mut matches = SmallVec::new();
        self.add_matches(&snapshot, domain, &request.descriptors[0], now, 0, &mut matches);
        let mut deleted: Option<(CounterLocation, bool)> = None;
        for MatchOf { matched, .. } in &matches {
            let Match::Limited(applied) = matched else {
                continue;
            };
            let counter = self.counter_of(&request, applied, &snapshot);
            let mut existed = self.store.delete(counter.key.as_bytes(), counter.per_second).await?;
            if let Some(penalty) = applied.limit.penalty() {
                let name = self.counter_name(&snapshot, domain, entries, applied, penalty);
                existed |= self.store.delete(&name, counter.per_second).await?;
            }
            match &mut deleted {
                None => deleted = Some((counter, existed)),
                Some((_, any_existed)) => *any_existed |= existed,
            }
        }
        Ok(deleted)
    }

    /// Refunds hits to the counter of a descriptor, up to its full capacity.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Engine::decide`].
    pub async fn refund(&self, domain: &str, entries: &[Entry<'_>], hits: u64, now: Micros) -> Result<(), DecideError> {
        let mut request = peek_request(domain, entries);
        request.descriptors[0].hits = hits;
        request.descriptors[0].refund = true;
        let snapshot = self.rules.load_full();
        Box::pin(self.decide(&snapshot, &request, now)).await.map(drop)
    }
}

impl<S> Engine<S> {
    fn counter_of(&self, request: &Request<'_>, applied: &AppliedLimit<'_>, snapshot: &Snapshot) -> CounterLocation {
        let name = self.counter_name(
            snapshot,
            request.domain,
            &request.descriptors[0].entries,
            applied,
            *applied.limit.algorithm(),
        );
        CounterLocation { key: String::from_utf8_lossy(&name).into_owned(), per_second: applied.limit.is_per_second() }
    }

    /// Returns the name of a counter of a limit: the counter of this program, for the entity in `entries`.
    pub(super) fn counter_name(
        &self,
        snapshot: &Snapshot,
        domain: &str,
        entries: &[Entry<'_>],
        applied: &AppliedLimit<'_>,
        program: impl Into<Program>,
    ) -> Vec<u8> {
        let shard_by = key::shard_by(snapshot.rule_set(), domain);
        let entries = &entries[..entries.len() - Rule::modifier_count(&applied.path)];
        let hash = self.settings.value_hash.as_ref();
        let mut name = key::name(self.scope, domain, shard_by, entries, &applied.path, (&program.into()).into(), hash);
        applied.append_limit_name(&mut name);
        name
    }
}

/// Builds a request that takes no hits.
fn peek_request<'a>(domain: &'a str, entries: &[Entry<'a>]) -> Request<'a> {
    let descriptor = Descriptor { entries: entries.into(), hits: 0, refund: false, requested_limit: None };
    Request { domain, descriptors: smallvec![descriptor], feedback: Vec::new() }
}
