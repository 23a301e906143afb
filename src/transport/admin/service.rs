//! [`Service`]: the methods of `sluicegate.admin.v1.AdminService`.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    sync::Arc,
    time::{Duration, Instant},
};

use sluicegate_proto::sluicegate::admin::v1::{self as api, admin_service_server::AdminService};
use tokio::sync::{Semaphore, watch};
use tonic::{Request, Response, Status};

use super::{
    activity::{UpdateStream, read_query, stream_updates, write_rules, write_unmatched},
    auth::{Caller, Role},
    caller,
    convert::{
        counter, descriptor, files as read_files, outcomes, read_change, read_target, reject, reject_candidate, rule,
        time, write_checked_override, write_override, write_target,
    },
    rule_filter::RuleFilter,
    simulate::{read_simulation, reject as reject_simulation, write_outcome},
};
use crate::{
    engine::{
        Estimate, RankBy, Snapshot, StoreError, TopEntities, TopEntity, bound_hits,
        overrides::{KnownNames, Origin, Scope, Target},
    },
    rules::Entry,
    service::{
        Admin,
        activity::TopQuery,
        admin::AdminError,
        overrides::{AppliedChange, ChangeInfo, ChangeRequest},
        search::{FoundEntity, SearchedValue},
    },
    traffic::{self, access_log::Mapping},
};

/// Maximum number of large responses that are built at the same time.
const MAX_BUILDING: usize = 2;
/// Maximum number of entities that `GetRuleUsage` lists.
const MAX_LISTED_USAGES: usize = 50;
/// Maximum number of unknown names that an error lists.
const MAX_LISTED_NAMES: usize = 3;
/// Maximum number of planned overrides in a response about targets or about a descriptor.
const MAX_PLANNED: usize = 100;

/// Implementation of the methods of the admin API.
pub(super) struct Service {
    admin: Admin,
    started: Instant,
    offer: Offer,
    stopping: watch::Receiver<bool>,
    /// Bounds the number of large responses that are built at the same time, for public and for authenticated callers.
    building: [Arc<Semaphore>; 2],
}

/// Properties of the API that callers can query.
#[derive(Clone, Debug)]
pub(super) struct Offer {
    /// Whether callers can authenticate with tokens.
    pub(super) accepts_tokens: bool,
    /// Link to a dashboard; empty without one.
    pub(super) grafana_url: String,
}

type MethodResult<T> = Result<Response<T>, Status>;

impl Service {
    pub(super) fn new(admin: Admin, offer: Offer, stopping: watch::Receiver<bool>) -> Self {
        let building = [(); 2].map(|()| Arc::new(Semaphore::new(MAX_BUILDING)));
        Self { admin, started: Instant::now(), offer, stopping, building }
    }

    /// Builds, on another thread, a response that can be large, so that it does not block the control runtime.
    ///
    /// # Errors
    ///
    /// Returns an error if the service shuts down.
    pub(super) async fn build<T: Send + 'static>(
        &self,
        caller: &Caller,
        build: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, Status> {
        let building = Arc::clone(&self.building[usize::from(!caller.name.is_empty())]);
        let permit = building.acquire_owned().await.map_err(|_| shutting_down())?;
        let built = tokio::task::spawn_blocking(move || {
            // Also if the caller has disconnected.
            let _permit = permit;
            build()
        });
        built.await.map_err(|_| shutting_down())
    }

    /// Returns the author and reason of a change.
    fn info<T>(request: &Request<T>, reason: &str) -> Result<ChangeInfo, Status> {
        let caller = caller(request)?;
        Ok(ChangeInfo { author: caller.name, reason: reason.to_owned(), at: 0 })
    }

    /// Returns the key prefix of the store.
    fn prefix(&self) -> &str {
        self.admin.engine.store.key_prefix()
    }

    /// Returns the switches of every origin.
    fn all_switches(&self) -> Vec<api::Override> {
        let snapshot = self.admin.in_force.snapshot().load();
        let mut names = KnownNames::new(snapshot.rule_set());
        let mut switches = Vec::new();
        for origin in Origin::ALL {
            for switch in snapshot.overrides().switches(origin) {
                switches.push(write_checked_override(switch, origin, &mut names));
            }
        }
        switches
    }

    /// Returns the planned switches.
    fn planned_switches(&self) -> Vec<api::Override> {
        let snapshot = self.admin.in_force.snapshot().load();
        let mut names = KnownNames::new(snapshot.rule_set());
        let mut switches = Vec::new();
        for planned in snapshot.overrides().planned() {
            if matches!(planned.target.begun(), Target::Switch(_)) {
                switches.push(write_checked_override(planned, Origin::Store, &mut names));
            }
        }
        switches
    }

    /// Returns the planned overrides of the targets of a change, except those that the change itself has set.
    fn planned_for(&self, applied: &AppliedChange) -> Vec<api::Override> {
        let snapshot = self.admin.in_force.snapshot().load();
        let mut planned = Vec::new();
        for changed in &applied.changes {
            for entry in snapshot.overrides().planned_for(changed.target.begun()) {
                let is_listed = planned.len() < MAX_PLANNED;
                if is_listed && applied.changes.iter().all(|other| other.target != entry.target) {
                    planned.push(write_override(entry, Origin::Store));
                }
            }
        }
        planned
    }
}

#[tonic::async_trait]
impl AdminService for Service {
    async fn put_overrides(
        &self,
        request: Request<api::PutOverridesRequest>,
    ) -> MethodResult<api::PutOverridesResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let mut request = request.into_inner();
        let changes = std::mem::take(&mut request.changes);
        let requests = changes.into_iter().map(read_change).collect::<Result<Vec<_>, _>>()?;
        check_options(&request, &requests)?;
        let warnings = self.admin.unknown_names(&requests);
        if request.reject_unknown_names && !warnings.is_empty() {
            return Err(reject_unknown_names(&warnings));
        }
        if request.validate_only {
            self.admin.overrides.check(&requests, &info).map_err(|error| reject(&error.into()))?;
            return Ok(Response::new(api::PutOverridesResponse { warnings, ..Default::default() }));
        }
        if request.this_instance {
            return self.switch_this_instance(&requests, info, warnings).await;
        }
        let applied = self.admin.put(&requests, info, request.additive).await;
        let applied = applied.map_err(|error| reject(&error))?;
        let version = applied.version;
        let planned = self.planned_for(&applied);
        let changes = override_changes(applied, Origin::Store);
        Ok(Response::new(api::PutOverridesResponse { version, changes, warnings, planned }))
    }

    async fn list_overrides(
        &self,
        request: Request<api::ListOverridesRequest>,
    ) -> MethodResult<api::ListOverridesResponse> {
        let caller = caller(&request)?;
        let api::ListOverridesRequest { prefix, page_size, page_token } = request.into_inner();
        let size = page(page_size, 100);
        let snapshot = self.admin.in_force.snapshot().load_full();
        let [limits, plans, switches] = snapshot.overrides().counts().map(|count| count as u64);
        let planned = snapshot.overrides().planned_count() as u64;
        // With a million overrides this takes long.
        let page = self.build(&caller, move || list_page(&snapshot, &prefix, &page_token, size));
        let OverridePage { overrides, next_page_token } = page.await?;
        let version = self.admin.overrides.status().version;
        let response =
            api::ListOverridesResponse { overrides, next_page_token, version, limits, plans, switches, planned };
        Ok(Response::new(response))
    }

    async fn list_audit_log(
        &self,
        request: Request<api::ListAuditLogRequest>,
    ) -> MethodResult<api::ListAuditLogResponse> {
        let api::ListAuditLogRequest { before_version, page_size } = request.into_inner();
        let before = if before_version == 0 { u64::MAX } else { before_version };
        let changes =
            self.admin.overrides.audit_log(before, page(page_size, 50)).await.map_err(|error| unavailable(&error))?;
        let mut entries = Vec::with_capacity(changes.len());
        for applied in changes {
            entries.push(api::AuditEntry {
                version: applied.version,
                author: applied.info.author.clone(),
                reason: applied.info.reason.clone(),
                at: Some(time(crate::engine::Micros::new(applied.info.at))),
                changes: override_changes(applied, Origin::Store),
            });
        }
        Ok(Response::new(api::ListAuditLogResponse { entries }))
    }

    async fn inspect(&self, request: Request<api::InspectRequest>) -> MethodResult<api::InspectResponse> {
        let api::InspectRequest { descriptor, hits } = request.into_inner();
        let (domain, pairs) = read_descriptor(descriptor)?;
        let inspection = self.admin.inspect(&domain, &entries(&pairs), hits.max(1)).await;
        let inspection = inspection.map_err(|error| reject(&error))?;
        let snapshot = self.admin.in_force.snapshot().load_full();
        let matched = inspection.rule.and_then(|id| snapshot.rule_set().rules().get(id));
        let mut names = KnownNames::new(snapshot.rule_set());
        let mut overrides = Vec::new();
        for (origin, entry) in &inspection.overrides {
            overrides.push(write_checked_override(entry, *origin, &mut names));
        }
        let mut planned = Vec::new();
        let planned_overrides = snapshot.overrides().planned_for_descriptor(&domain, &entries(&pairs), matched);
        for entry in planned_overrides.into_iter().take(MAX_PLANNED) {
            planned.push(write_checked_override(entry, Origin::Store, &mut names));
        }
        let target = Target::Limit { domain, entries: pairs };
        let query = TopQuery { max_entities: 1, period: TopEntities::MAX_PERIOD, ..TopQuery::default() };
        let (denied, _) = self.admin.activity.top(&query, |ranked, _| *ranked == target);
        let decided_by = match inspection.override_kind {
            Some(kind) => kind.name(),
            None => "rule",
        };
        Ok(Response::new(api::InspectResponse {
            match_steps: inspection.match_steps,
            rule: matched.map(|matched| rule(matched, Some(&snapshot))),
            overrides,
            counter: inspection.counter.map(|state| counter(&state, &self.admin.engine.store, self.prefix())),
            others: inspection
                .others
                .iter()
                .map(|state| counter(state, &self.admin.engine.store, self.prefix()))
                .collect(),
            allowed: inspection.allowed,
            decided_by: decided_by.to_owned(),
            denied_since: denied.top.first().map(|ranked| time(ranked.since)),
            max_hits: inspection.max_hits,
            planned,
        }))
    }

    async fn reset_counter(
        &self,
        request: Request<api::ResetCounterRequest>,
    ) -> MethodResult<api::ResetCounterResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let (domain, pairs) = read_descriptor(request.into_inner().descriptor)?;
        let reset = self.admin.reset_counter(&domain, &entries(&pairs), info).await;
        let (counter, existed) = reset.map_err(|error| reject(&error))?;
        let key = format!("{}{}", self.prefix(), counter.key);
        Ok(Response::new(api::ResetCounterResponse { key, existed }))
    }

    async fn refund(&self, request: Request<api::RefundRequest>) -> MethodResult<api::RefundResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let api::RefundRequest { descriptor, hits, .. } = request.into_inner();
        if hits == 0 {
            return Err(Status::invalid_argument("hits must be at least 1"));
        }
        let (domain, pairs) = read_descriptor(descriptor)?;
        let inspection = self.admin.refund(&domain, &entries(&pairs), bound_hits(hits), info).await;
        let state = inspection.map_err(|error| reject(&error))?.counter;
        let counter = state.map(|state| counter(&state, &self.admin.engine.store, self.prefix()));
        Ok(Response::new(api::RefundResponse { counter }))
    }

    async fn list_rules(&self, request: Request<api::ListRulesRequest>) -> MethodResult<api::ListRulesResponse> {
        let caller = caller(&request)?;
        let domain = request.into_inner().domain;
        let status = self.admin.in_force.status();
        let snapshot = self.admin.in_force.snapshot().load_full();
        let rules = self.build(&caller, move || {
            let mut rules = Vec::new();
            for listed in snapshot.rule_set().rules() {
                if domain.is_empty() || *listed.labels[0] == *domain {
                    rules.push(rule(listed, Some(&snapshot)));
                }
            }
            rules
        });
        let rules = rules.await?;
        let last_error = status.last_error.unwrap_or_default();
        Ok(Response::new(api::ListRulesResponse { loaded_at: status.loaded_at.map(time), last_error, rules }))
    }

    async fn list_top_entities(
        &self,
        request: Request<api::ListTopEntitiesRequest>,
    ) -> MethodResult<api::ListTopEntitiesResponse> {
        let api::ListTopEntitiesRequest { rank_by, domain, rule, max_results, all_instances, period_seconds } =
            request.into_inner();
        let rank_by = match api::RankBy::try_from(rank_by) {
            Ok(api::RankBy::Denied) => RankBy::Denied,
            Ok(api::RankBy::Requested) => RankBy::Requested,
            Err(_) => return Err(Status::invalid_argument("rank_by must be RANK_BY_DENIED or RANK_BY_REQUESTED")),
        };
        let snapshot = self.admin.in_force.snapshot().load_full();
        let filter = RuleFilter::new(snapshot.rule_set(), &rule);
        let period = match period_seconds {
            0 => TopEntities::DEFAULT_PERIOD,
            seconds => Duration::from_secs(seconds.into()),
        };
        let query = TopQuery { rank_by, max_entities: page(max_results, 20), period, all_instances };
        let activity = &self.admin.activity;
        let (ranking, instances) = activity.top(&query, |target, ranked_rule| match target {
            Target::Limit { domain: ranked_domain, .. } => {
                (domain.is_empty() || domain == *ranked_domain) && filter.matches(ranked_domain, ranked_rule)
            }
            Target::Plan { .. } | Target::Switch(_) | Target::Rules(_) | Target::Planned { .. } => false,
        });
        let mut unmatched = if rule.is_empty() { activity.unmatched(all_instances) } else { Vec::new() };
        unmatched.retain(|group| domain.is_empty() || group.domain == domain);
        Ok(Response::new(api::ListTopEntitiesResponse {
            entities: ranking.top.into_iter().filter_map(|ranked| top_entity(ranked, &snapshot)).collect(),
            period_seconds: ranking.period.ceil_secs(),
            total_hits: ranking.hits,
            total_requests: ranking.requests,
            unmatched: unmatched.into_iter().map(write_unmatched).collect(),
            instances,
        }))
    }

    async fn find_entities(
        &self,
        request: Request<api::FindEntitiesRequest>,
    ) -> MethodResult<api::FindEntitiesResponse> {
        let caller = caller(&request)?;
        let api::FindEntitiesRequest { value, prefix } = request.into_inner();
        if value.is_empty() {
            return Err(Status::invalid_argument("value must not be empty"));
        }
        let admin = self.admin.clone();
        let searched = SearchedValue::new(&value, prefix);
        let candidates = self.build(&caller, move || admin.candidates_for(&searched)).await?;
        let found = self.admin.find_entities(candidates).await;
        let snapshot = self.admin.in_force.snapshot().load_full();
        let mut names = KnownNames::new(snapshot.rule_set());
        let entities = found.entities.into_iter().map(|entity| self.write_found(entity, &snapshot, &mut names));
        Ok(Response::new(api::FindEntitiesResponse { entities: entities.collect(), incomplete: found.is_incomplete }))
    }

    async fn get_health(&self, request: Request<api::GetHealthRequest>) -> MethodResult<api::GetHealthResponse> {
        let mut switches = self.all_switches();
        let mut planned_switches = self.planned_switches();
        if caller(&request)?.role < Role::Read {
            for switch in switches.iter_mut().chain(&mut planned_switches) {
                switch.author.clear();
                switch.reason.clear();
            }
        }
        let status = self.admin.overrides.status();
        let servers = self.admin.engine.store.servers().into_iter();
        Ok(Response::new(api::GetHealthResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            servers: servers.map(|(name, up)| api::StoreServer { name: name.to_string(), up }).collect(),
            overrides_version: status.version,
            overrides_age_ms: status
                .last_sync
                .and_then(|last_sync| u64::try_from(last_sync.elapsed().as_millis()).ok()),
            overrides_error: status.error.unwrap_or_default(),
            switches,
            planned_switches,
        }))
    }

    async fn upload_candidate(
        &self,
        request: Request<api::UploadCandidateRequest>,
    ) -> MethodResult<api::UploadCandidateResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let api::UploadCandidateRequest { files, share, .. } = request.into_inner();
        let share = if share == 0.0 { 0.1 } else { share };
        let uploaded = self.admin.candidates.upload(read_files(files), share, info).await;
        let warnings = uploaded.map_err(reject_candidate)?.iter().map(ToString::to_string).collect();
        Ok(Response::new(api::UploadCandidateResponse { warnings }))
    }

    async fn drop_candidate(
        &self,
        request: Request<api::DropCandidateRequest>,
    ) -> MethodResult<api::DropCandidateResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        self.admin.candidates.drop_candidate(info).await.map_err(reject_candidate)?;
        Ok(Response::new(api::DropCandidateResponse {}))
    }

    async fn promote_candidate(
        &self,
        request: Request<api::PromoteCandidateRequest>,
    ) -> MethodResult<api::PromoteCandidateResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        self.admin.candidates.promote(info).await.map_err(reject_candidate)?;
        Ok(Response::new(api::PromoteCandidateResponse {}))
    }

    async fn rollback_rules(
        &self,
        request: Request<api::RollbackRulesRequest>,
    ) -> MethodResult<api::RollbackRulesResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        self.admin.candidates.rollback(info).await.map_err(reject_candidate)?;
        Ok(Response::new(api::RollbackRulesResponse {}))
    }

    async fn get_candidate(&self, _: Request<api::GetCandidateRequest>) -> MethodResult<api::GetCandidateResponse> {
        let error = self.admin.candidates.error().unwrap_or_default();
        let snapshot = self.admin.in_force.snapshot().load_full();
        let Some(candidate) = snapshot.candidate() else {
            return Ok(Response::new(api::GetCandidateResponse { error, ..Default::default() }));
        };
        let rules = candidate.rules();
        let mut rule_outcomes = Vec::new();
        for (id, counts) in candidate.outcomes().enumerate() {
            if counts.requested == 0 {
                continue;
            }
            let matched = rules.rule_set().rules().get(id);
            rule_outcomes.push(api::RuleOutcomes {
                rule: matched.map(|matched| rule(matched, None)),
                outcomes: Some(outcomes(counts)),
            });
        }
        rule_outcomes.sort_by_key(|rule| Reverse(changed_hits(rule)));
        let mut minutes = Vec::new();
        for (minute, counts) in candidate.minutes() {
            minutes.push(api::MinuteOutcomes { minute: Some(time(minute)), outcomes: Some(outcomes(counts)) });
        }
        let now = self.admin.clock.now();
        let newly_denied =
            candidate.newly_denied.ranking(RankBy::Denied, 20, TopEntities::MAX_PERIOD, now, |_, _| true);
        let mut first_newly_denied = Vec::new();
        for denied in candidate.first_newly_denied() {
            let entity = TopEntity {
                target: denied.target,
                rule: denied.rule,
                requests: Estimate::default(),
                hits: Estimate::default(),
                since: denied.at,
            };
            first_newly_denied.extend(top_entity(entity, &rules));
        }
        Ok(Response::new(api::GetCandidateResponse {
            active: true,
            since: Some(time(candidate.since())),
            share: candidate.share(),
            rules: rule_outcomes,
            minutes,
            first_newly_denied,
            most_newly_denied: newly_denied.top.into_iter().filter_map(|ranked| top_entity(ranked, &rules)).collect(),
            skipped_requests: candidate.skipped(),
            error,
        }))
    }

    async fn get_session(&self, request: Request<api::GetSessionRequest>) -> MethodResult<api::GetSessionResponse> {
        let Caller { name, role } = caller(&request)?;
        Ok(Response::new(api::GetSessionResponse {
            role: role.name().to_owned(),
            caller: name,
            accepts_tokens: self.offer.accepts_tokens,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            store: self.admin.engine.store.topology().to_owned(),
            grafana_url: self.offer.grafana_url.clone(),
            records_requests: self.admin.simulator.records_requests(),
            instance: self.admin.activity.instance().name.clone(),
            algorithms: Scope::algorithms().map(str::to_owned).collect(),
            has_instances: self.admin.activity.has_others(),
        }))
    }

    type WatchActivityStream = UpdateStream;

    async fn watch_activity(
        &self,
        request: Request<api::WatchActivityRequest>,
    ) -> MethodResult<Self::WatchActivityStream> {
        let Caller { name, role } = caller(&request)?;
        let viewer = self.admin.activity.watch(request.into_inner().all_instances, !name.is_empty());
        let viewer = viewer.map_err(|error| Status::resource_exhausted(error.to_string()))?;
        Ok(Response::new(stream_updates(viewer, role, self.stopping.clone())))
    }

    async fn list_rule_activity(
        &self,
        request: Request<api::ListRuleActivityRequest>,
    ) -> MethodResult<api::ListRuleActivityResponse> {
        let caller = caller(&request)?;
        let query = read_query(request.into_inner())?;
        let status = self.admin.in_force.status();
        let activity = Arc::clone(&self.admin.activity);
        // With 100,000 rules this takes long.
        let list = self.build(&caller, move || write_rules(activity.list_rules(&query))).await?;
        let last_error = status.last_error.unwrap_or_default();
        let loaded_at = status.loaded_at.map(time);
        Ok(Response::new(api::ListRuleActivityResponse { loaded_at, last_error, ..list }))
    }

    async fn get_rule_usage(
        &self,
        request: Request<api::GetRuleUsageRequest>,
    ) -> MethodResult<api::GetRuleUsageResponse> {
        let path = request.into_inner().path;
        let snapshot = self.admin.in_force.snapshot().load_full();
        let rule = snapshot.rule_set().rules().iter().find(|rule| rule.path() == path);
        let rule = rule.ok_or_else(|| Status::not_found(format!("there is no rule with the path {path:?}")))?;
        let (usages, failed) = self.admin.usage(rule).await;
        let mut by_share = vec![0; 11];
        for usage in &usages {
            by_share[((usage.share() * 10.0) as usize).min(10)] += 1;
        }
        let mut entities = Vec::new();
        for usage in usages.iter().take(MAX_LISTED_USAGES) {
            entities.push(api::EntityUsage {
                descriptor: Some(descriptor(usage.domain.clone(), usage.entries.clone())),
                used: usage.used,
                limit: usage.limit,
            });
        }
        Ok(Response::new(api::GetRuleUsageResponse {
            entities_by_share: by_share,
            entities,
            read_entities: u32::try_from(usages.len()).unwrap_or(u32::MAX),
            failed_entities: u32::try_from(failed).unwrap_or(u32::MAX),
        }))
    }

    async fn read_descriptors(
        &self,
        request: Request<api::ReadDescriptorsRequest>,
    ) -> MethodResult<api::ReadDescriptorsResponse> {
        let api::ReadDescriptorsRequest { text, mapping } = request.into_inner();
        let mapping = if mapping.trim().is_empty() {
            None
        } else {
            Some(Mapping::read(&mapping).map_err(|error| invalid(&error))?)
        };
        let descriptors = traffic::text::read(&text, mapping.as_ref()).map_err(|error| invalid(&error))?;
        let descriptors = descriptors.into_iter().map(|(domain, entries)| descriptor(domain, entries)).collect();
        Ok(Response::new(api::ReadDescriptorsResponse { descriptors }))
    }

    async fn simulate(&self, request: Request<api::SimulateRequest>) -> MethodResult<api::SimulateResponse> {
        let caller = caller(&request)?;
        let simulation = read_simulation(request.into_inner())?;
        let outcome = self.admin.simulator.run(simulation).await.map_err(|error| reject_simulation(&error))?;
        Ok(Response::new(self.build(&caller, move || write_outcome(&outcome)).await?))
    }
}

/// A page of overrides, ordered by name.
struct OverridePage {
    overrides: Vec<api::Override>,
    /// Name of the last override on the page; empty if no others follow.
    next_page_token: String,
}

/// Returns the first `size` overrides with names that begin with `prefix` and follow `page_token`.
fn list_page(snapshot: &Snapshot, prefix: &str, page_token: &str, size: usize) -> OverridePage {
    let all = snapshot.overrides();
    let store_switches = all.switches(Origin::Store).map(|switch| switch.target.to_string());
    let planned = all.planned().map(|planned| planned.target.to_string());
    // The smallest names: those of the page, and one more if others follow.
    let mut first = BinaryHeap::new();
    for name in all.targets().map(str::to_owned).chain(store_switches).chain(planned) {
        let is_on_previous_page = !page_token.is_empty() && name.as_str() <= page_token;
        if is_on_previous_page || !has_prefix(&name, prefix) {
            continue;
        }
        first.push(name);
        if first.len() > size + 1 {
            first.pop();
        }
    }
    let mut names = first.into_sorted_vec();
    let mut next_page_token = String::new();
    if names.len() > size {
        names.truncate(size);
        next_page_token = names.last().cloned().unwrap_or_default();
    }
    let mut known = KnownNames::new(snapshot.rule_set());
    let mut overrides = Vec::new();
    for name in &names {
        if let Ok(target) = Target::parse(name)
            && let Some(entry) = all.get(&target)
        {
            overrides.push(write_checked_override(&entry, Origin::Store, &mut known));
        }
    }
    OverridePage { overrides, next_page_token }
}

/// Returns whether the text of a target begins with a prefix. In the text of a planned override, the prefix can also
/// follow the time at which the override begins.
fn has_prefix(name: &str, prefix: &str) -> bool {
    if name.starts_with(prefix) {
        return true;
    }
    let mut parts = name.splitn(3, '|');
    parts.next() == Some("planned") && parts.nth(1).is_some_and(|begun| begun.starts_with(prefix))
}

/// Returns the number of hits of a rule that the candidate rules decide differently.
fn changed_hits(rule: &api::RuleOutcomes) -> u64 {
    match rule.outcomes {
        Some(outcomes) => outcomes.newly_denied + outcomes.newly_allowed,
        None => 0,
    }
}

/// Converts an entity with the path of its rule in `snapshot`.
fn top_entity(ranked: TopEntity, snapshot: &Snapshot) -> Option<api::TopEntity> {
    let Target::Limit { domain, entries: pairs } = ranked.target else {
        return None;
    };
    let rule = snapshot.rule_set().rule_for(&domain, &entries(&pairs));
    Some(api::TopEntity {
        rule_path: rule.map(crate::rules::Rule::path).unwrap_or_default(),
        descriptor: Some(descriptor(domain, pairs)),
        rule: ranked.rule.to_string(),
        hits: ranked.hits.count,
        max_error: ranked.hits.max_error,
        requests: ranked.requests.count,
        max_request_error: ranked.requests.max_error,
        since: Some(time(ranked.since)),
    })
}

impl Service {
    fn write_found(&self, entity: FoundEntity, snapshot: &Snapshot, names: &mut KnownNames<'_>) -> api::FoundEntity {
        let FoundEntity { domain, entries, inspection } = entity;
        let mut found =
            api::FoundEntity { descriptor: Some(descriptor(domain, entries)), ..api::FoundEntity::default() };
        let Some(inspection) = inspection else {
            return found;
        };
        if let Some(rule) = inspection.rule.and_then(|id| snapshot.rule_set().rules().get(id)) {
            found.rule_path = rule.path();
        }
        for (origin, entry) in &inspection.overrides {
            found.overrides.push(write_checked_override(entry, *origin, names));
        }
        if let Some(state) = &inspection.counter {
            found.limit = state.limit.text(state.currency.as_ref());
            found.counter = Some(counter(state, &self.admin.engine.store, self.prefix()));
        }
        found
    }

    /// Sets switches that apply to this instance only. Each is set separately, not all or none.
    async fn switch_this_instance(
        &self,
        requests: &[ChangeRequest],
        info: ChangeInfo,
        warnings: Vec<String>,
    ) -> MethodResult<api::PutOverridesResponse> {
        let mut changes = Vec::new();
        for request in requests {
            let Target::Switch(scope) = &request.target else {
                return Err(only_for_switches());
            };
            let overrides = &self.admin.overrides;
            let value = request.value.as_deref();
            let result = overrides.switch_this_instance(scope, value, request.until, info.clone()).await;
            let applied = result.map_err(|error| reject(&AdminError::Change(error)))?;
            changes.extend(override_changes(applied, Origin::Instance));
        }
        Ok(Response::new(api::PutOverridesResponse { version: 0, changes, warnings, ..Default::default() }))
    }
}

/// Checks that the options of a request are available for its changes.
fn check_options(request: &api::PutOverridesRequest, changes: &[ChangeRequest]) -> Result<(), Status> {
    for change in changes {
        if request.additive && change.target.beginning().is_some() {
            return Err(Status::invalid_argument("additive is not available for overrides that begin later"));
        }
        if request.this_instance && !matches!(change.target, Target::Switch(_)) {
            return Err(only_for_switches());
        }
    }
    Ok(())
}

fn only_for_switches() -> Status {
    Status::invalid_argument("this_instance is only available for switches that apply at once")
}

/// Returns the error for changes with unknown names. It lists the first of them.
fn reject_unknown_names(warnings: &[String]) -> Status {
    let mut message = warnings.iter().take(MAX_LISTED_NAMES).cloned().collect::<Vec<_>>().join("; ");
    if warnings.len() > MAX_LISTED_NAMES {
        message += &format!("; and {} more", warnings.len() - MAX_LISTED_NAMES);
    }
    message += "; nothing was changed; --allow-unknown, or a call without reject_unknown_names, sets overrides for rules \
                that do not exist yet";
    Status::failed_precondition(message)
}

fn override_changes(applied: AppliedChange, origin: Origin) -> Vec<api::OverrideChange> {
    let mut changes = Vec::new();
    for changed in applied.changes {
        changes.push(api::OverrideChange {
            target: Some(write_target(&changed.target)),
            before: changed.before.map(|entry| write_override(&entry, origin)),
            after: changed.after.map(|entry| write_override(&entry, origin)),
            refunded_hits: changed.refunded_hits,
        });
    }
    changes
}

fn read_descriptor(descriptor: Option<api::Descriptor>) -> Result<(String, Vec<(String, String)>), Status> {
    let missing = || Status::invalid_argument("a descriptor needs a domain and entries");
    let limit = descriptor.ok_or_else(missing)?;
    let target = read_target(Some(api::Target { target: Some(api::target::Target::Limit(limit)) }))?;
    target.check().map_err(|error| Status::invalid_argument(error.to_string()))?;
    let Target::Limit { domain, entries } = target else {
        return Err(missing());
    };
    Ok((domain, entries))
}

fn entries(pairs: &[(String, String)]) -> Vec<Entry<'_>> {
    pairs.iter().map(|(key, value)| Entry { key, value }).collect()
}

/// Returns the page size: the requested size up to 1,000, or the default if it is 0.
fn page(requested: u32, default: usize) -> usize {
    if requested == 0 { default } else { (requested as usize).min(1_000) }
}

fn shutting_down() -> Status {
    Status::unavailable("the service is shutting down")
}

fn invalid(error: &dyn std::error::Error) -> Status {
    Status::invalid_argument(crate::metrics::chain(error))
}

fn unavailable(error: &StoreError) -> Status {
    Status::unavailable(crate::metrics::chain(error))
}
