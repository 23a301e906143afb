//! `sluicegate.admin.v1`, method by method.

use std::{collections::BinaryHeap, time::Instant};

use sluicegate_proto::sluicegate::admin::v1::{self as api, admin_service_server::AdminService};
use tonic::{Request, Response, Status};

use super::{
    auth::{Caller, Role},
    caller,
    convert::{
        counter, descriptor, entry, outcomes, read_change, read_target, reject, reject_candidate, rule, time,
        write_target,
    },
};
use crate::{
    engine::{
        Override, OverrideKind, RankBy, StoreError, TopEntity,
        overrides::{Origin, Target},
    },
    rules::{Entry, SourceFile},
    service::{
        Admin,
        admin::AdminError,
        overrides::{AppliedChange, ChangeInfo},
    },
};

/// Answers calls.
pub(super) struct Service {
    admin: Admin,
    started: Instant,
}

type Answer<T> = Result<Response<T>, Status>;

impl Service {
    pub(super) fn new(admin: Admin) -> Self {
        Self { admin, started: Instant::now() }
    }

    /// Whoever changes something has a info, and has to have the role for it: by whatever way he came in.
    fn info<T>(request: &Request<T>, reason: &str) -> Result<ChangeInfo, Status> {
        let Caller { name: author, role } = caller(request)?;
        if role < Role::Operate {
            return Err(Status::permission_denied(format!("{author} may look, and this changes something")));
        }
        Ok(ChangeInfo { author, reason: reason.to_owned(), at: 0 })
    }

    /// What stands before a counter's name in the store.
    fn prefix(&self) -> &str {
        self.admin.engine.store.key_prefix()
    }

    /// How a switch of an origin other than the store was thrown, or what the store holds.
    fn all_switches(&self) -> Vec<api::Override> {
        let snapshot = self.admin.reloader.rules().load();
        let of = |origin| snapshot.overrides().switches(origin).map(move |switch| entry(switch, origin));
        Origin::ALL.into_iter().flat_map(|origin| of(origin).collect::<Vec<_>>()).collect()
    }
}

#[tonic::async_trait]
impl AdminService for Service {
    async fn put_overrides(&self, request: Request<api::PutOverridesRequest>) -> Answer<api::PutOverridesResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let api::PutOverridesRequest { changes, additive, this_instance, .. } = request.into_inner();
        let requests = changes.into_iter().map(read_change).collect::<Result<Vec<_>, _>>()?;
        if this_instance {
            return self.switch_this_instance(&requests, info).await;
        }
        let applied = self.admin.put(&requests, info, additive).await;
        let (applied, refunded) = applied.map_err(|error| reject(&error))?;
        let version = applied.version;
        let changes = override_changes(applied).into_iter().zip(refunded);
        let changes = changes.map(|(change, refunded_hits)| api::OverrideChange { refunded_hits, ..change }).collect();
        Ok(Response::new(api::PutOverridesResponse { version, changes }))
    }

    async fn list_overrides(&self, request: Request<api::ListOverridesRequest>) -> Answer<api::ListOverridesResponse> {
        let api::ListOverridesRequest { prefix, page_size, page_token } = request.into_inner();
        let size = page(page_size, 100);
        let snapshot = self.admin.reloader.rules().load_full();
        let [limits, plans, switches] = snapshot.overrides().counts().map(|count| count as u64);
        // With a million of them this is work for a while; the control runtime has others waiting.
        let listed = tokio::task::spawn_blocking(move || {
            let fits = |name: &str| name.starts_with(&prefix) && (page_token.is_empty() || name > page_token.as_str());
            let all = snapshot.overrides();
            let thrown = all.switches(Origin::Store).map(|switch| switch.target.to_string());
            let mut first = BinaryHeap::new();
            for name in all.targets().map(str::to_owned).chain(thrown).filter(|name| fits(name)) {
                first.push(name);
                if first.len() > size + 1 {
                    first.pop();
                }
            }
            let mut names = first.into_sorted_vec();
            let more = names.len() > size;
            names.truncate(size);
            let next = names.last().filter(|_| more).cloned().unwrap_or_default();
            let get = |name: &String| all.get(&Target::parse(name).ok()?);
            (names.iter().filter_map(get).map(|it| entry(&it, Origin::Store)).collect(), next)
        });
        let (overrides, next_page_token) = listed.await.map_err(|_| Status::unavailable("the service is going"))?;
        let version = self.admin.overrides.status().version;
        let answer = api::ListOverridesResponse { overrides, next_page_token, version, limits, plans, switches };
        Ok(Response::new(answer))
    }

    async fn list_audit_log(&self, request: Request<api::ListAuditLogRequest>) -> Answer<api::ListAuditLogResponse> {
        let api::ListAuditLogRequest { before_version, page_size } = request.into_inner();
        let before = if before_version == 0 { u64::MAX } else { before_version };
        let changes =
            self.admin.overrides.audit_log(before, page(page_size, 50)).await.map_err(|error| unavailable(&error))?;
        let change = |changed: AppliedChange| api::AuditEntry {
            version: changed.version,
            author: changed.info.author.clone(),
            reason: changed.info.reason.clone(),
            at: Some(time(crate::engine::Micros::new(changed.info.at))),
            changes: override_changes(changed),
        };
        Ok(Response::new(api::ListAuditLogResponse { entries: changes.into_iter().map(change).collect() }))
    }

    async fn inspect(&self, request: Request<api::InspectRequest>) -> Answer<api::InspectResponse> {
        let (domain, pairs) = read_descriptor(request.into_inner().descriptor)?;
        let inspected = self.admin.inspect(&domain, &entries(&pairs)).await.map_err(|error| reject(&error))?;
        let snapshot = self.admin.reloader.rules().load_full();
        let met = inspected.rule.and_then(|id| snapshot.rules().rules().get(id));
        let target = Target::Limit { domain, entries: pairs };
        let refused = self.admin.top(RankBy::Denied, 1, |ranked, _| *ranked == target);
        Ok(Response::new(api::InspectResponse {
            match_steps: inspected.match_steps,
            rule: met.map(|met| rule(met, snapshot.modes().of(&met.labels[0], Some(met)))),
            overrides: inspected.overrides.iter().map(|(origin, it)| entry(it, *origin)).collect(),
            counter: inspected.counter.map(|it| counter(&it, &self.admin.engine.store, self.prefix())),
            allowed: inspected.allowed,
            decided_by: inspected.override_kind.map_or("rule", OverrideKind::name).to_owned(),
            denied_since: refused.top.first().map(|ranked| time(ranked.since)),
        }))
    }

    async fn reset_counter(&self, request: Request<api::ResetCounterRequest>) -> Answer<api::ResetCounterResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let (domain, pairs) = read_descriptor(request.into_inner().descriptor)?;
        let forgotten = self.admin.forget(&domain, &entries(&pairs), info).await;
        let (counter, existed) = forgotten.map_err(|error| reject(&error))?;
        let key = format!("{}{}", self.prefix(), counter.key);
        Ok(Response::new(api::ResetCounterResponse { key, existed }))
    }

    async fn refund(&self, request: Request<api::RefundRequest>) -> Answer<api::RefundResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let api::RefundRequest { descriptor, hits, .. } = request.into_inner();
        if hits == 0 {
            return Err(Status::invalid_argument("at least one hit can be given back"));
        }
        let (domain, pairs) = read_descriptor(descriptor)?;
        let given = self.admin.refund(&domain, &entries(&pairs), hits, info).await;
        let standing = given.map_err(|error| reject(&error))?.counter;
        let counter = standing.map(|it| counter(&it, &self.admin.engine.store, self.prefix()));
        Ok(Response::new(api::RefundResponse { counter }))
    }

    async fn list_rules(&self, request: Request<api::ListRulesRequest>) -> Answer<api::ListRulesResponse> {
        let domain = request.into_inner().domain;
        let (status, snapshot) = (self.admin.reloader.status(), self.admin.reloader.rules().load_full());
        let fits = |met: &&crate::rules::Rule| domain.is_empty() || *met.labels[0] == *domain;
        let rules = snapshot.rules().rules().iter().filter(fits);
        let rules = rules.map(|met| rule(met, snapshot.modes().of(&met.labels[0], Some(met)))).collect();
        let last_error = status.last_error.unwrap_or_default();
        Ok(Response::new(api::ListRulesResponse { loaded_at: status.loaded_at.map(time), last_error, rules }))
    }

    async fn list_top_entities(
        &self,
        request: Request<api::ListTopEntitiesRequest>,
    ) -> Answer<api::ListTopEntitiesResponse> {
        let api::ListTopEntitiesRequest { rank_by, domain, rule, max_results } = request.into_inner();
        let rank_by = match api::RankBy::try_from(rank_by) {
            Ok(api::RankBy::Denied) => RankBy::Denied,
            Ok(api::RankBy::Requested) => RankBy::Requested,
            Err(_) => return Err(Status::invalid_argument("rank_by must be RANK_BY_DENIED or RANK_BY_REQUESTED")),
        };
        let fits = |target: &Target, of: &str| {
            let is_of = |wanted: &str| matches!(target, Target::Limit { domain, .. } if domain == wanted);
            (domain.is_empty() || is_of(&domain)) && (rule.is_empty() || rule == of)
        };
        let ranking = self.admin.top(rank_by, page(max_results, 20), fits);
        let entities = ranking.top.into_iter().filter_map(top_entity).collect();
        let period_seconds = ranking.period.ceil_secs();
        Ok(Response::new(api::ListTopEntitiesResponse { entities, period_seconds, total_hits: ranking.total }))
    }

    async fn get_health(&self, _: Request<api::GetHealthRequest>) -> Answer<api::GetHealthResponse> {
        let status = self.admin.overrides.status();
        let servers = self.admin.engine.store.servers().into_iter();
        Ok(Response::new(api::GetHealthResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            servers: servers.map(|(name, up)| api::StoreServer { name: name.to_string(), up }).collect(),
            overrides_version: status.version,
            overrides_age_ms: status.last_sync.and_then(|heard| u64::try_from(heard.elapsed().as_millis()).ok()),
            overrides_error: status.error.unwrap_or_default(),
            switches: self.all_switches(),
        }))
    }

    async fn upload_candidate(
        &self,
        request: Request<api::UploadCandidateRequest>,
    ) -> Answer<api::UploadCandidateResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        let api::UploadCandidateRequest { files, share, .. } = request.into_inner();
        let share = if share == 0.0 { 0.1 } else { share };
        let files = files.into_iter().map(|file| SourceFile { name: file.name, text: file.text }).collect();
        let uploaded = self.admin.candidates.upload(files, share, info).await;
        let warnings = uploaded.map_err(reject_candidate)?.iter().map(ToString::to_string).collect();
        Ok(Response::new(api::UploadCandidateResponse { warnings }))
    }

    async fn drop_candidate(&self, request: Request<api::DropCandidateRequest>) -> Answer<api::DropCandidateResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        self.admin.candidates.drop_candidate(info).await.map_err(reject_candidate)?;
        Ok(Response::new(api::DropCandidateResponse {}))
    }

    async fn promote_candidate(
        &self,
        request: Request<api::PromoteCandidateRequest>,
    ) -> Answer<api::PromoteCandidateResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        self.admin.candidates.promote(info).await.map_err(reject_candidate)?;
        Ok(Response::new(api::PromoteCandidateResponse {}))
    }

    async fn rollback_rules(&self, request: Request<api::RollbackRulesRequest>) -> Answer<api::RollbackRulesResponse> {
        let info = Self::info(&request, &request.get_ref().reason)?;
        self.admin.candidates.rollback(info).await.map_err(reject_candidate)?;
        Ok(Response::new(api::RollbackRulesResponse {}))
    }

    async fn get_candidate(&self, _: Request<api::GetCandidateRequest>) -> Answer<api::GetCandidateResponse> {
        let error = self.admin.candidates.error().unwrap_or_default();
        let snapshot = self.admin.reloader.rules().load_full();
        let Some(trial) = snapshot.candidate() else {
            return Ok(Response::new(api::GetCandidateResponse { error, ..Default::default() }));
        };
        let rules = trial.rules();
        let of = |id: usize| rules.rules().rules().get(id).map(|met| rule(met, None));
        let asked = trial.outcomes().enumerate().filter(|(_, it)| it.requested > 0);
        let mut of_rules: Vec<_> =
            asked.map(|(id, it)| api::RuleOutcomes { rule: of(id), outcomes: Some(outcomes(it)) }).collect();
        let changes = |it: &api::RuleOutcomes| it.outcomes.map_or(0, |it| it.newly_denied + it.newly_allowed);
        of_rules.sort_by_key(|it| std::cmp::Reverse(changes(it)));
        let minute = |(minute, it)| api::MinuteOutcomes { minute: Some(time(minute)), outcomes: Some(outcomes(it)) };
        let harmed = trial.newly_denied.ranking(RankBy::Denied, 20, self.admin.clock.now(), |_, _| true);
        let first = trial.first().into_iter().map(|it| TopEntity {
            target: it.target,
            rule: it.rule,
            hits: 0,
            max_error: 0,
            since: it.at,
        });
        Ok(Response::new(api::GetCandidateResponse {
            active: true,
            since: Some(time(trial.since())),
            share: trial.share(),
            rules: of_rules,
            minutes: trial.minutes().into_iter().map(minute).collect(),
            first_newly_denied: first.filter_map(top_entity).collect(),
            most_newly_denied: harmed.top.into_iter().filter_map(top_entity).collect(),
            skipped_requests: trial.skipped(),
            error,
        }))
    }
}

fn top_entity(ranked: TopEntity) -> Option<api::TopEntity> {
    let Target::Limit { domain, entries } = ranked.target else {
        return None;
    };
    Some(api::TopEntity {
        descriptor: Some(descriptor(domain, entries)),
        rule: ranked.rule.to_string(),
        hits: ranked.hits,
        max_error: ranked.max_error,
        since: Some(time(ranked.since)),
    })
}

impl Service {
    /// Switches of this instance alone: each by itself, since nobody else hears of them.
    async fn switch_this_instance(
        &self,
        requests: &[crate::service::overrides::ChangeRequest],
        info: ChangeInfo,
    ) -> Answer<api::PutOverridesResponse> {
        let mut parts = Vec::new();
        for request in requests {
            let Target::Switch(scope) = &request.target else {
                return Err(Status::invalid_argument("this_instance is for switches: all else is kept in the store"));
            };
            let put = self
                .admin
                .overrides
                .switch_this_instance(scope, request.value.as_deref(), request.until, info.clone())
                .await;
            put.map_err(|error| reject(&AdminError::Change(error)))?;
            parts.push(api::OverrideChange {
                target: Some(write_target(&request.target)),
                ..api::OverrideChange::default()
            });
        }
        Ok(Response::new(api::PutOverridesResponse { version: 0, changes: parts }))
    }
}

fn override_changes(changed: AppliedChange) -> Vec<api::OverrideChange> {
    let write = |it: Option<Override>| it.map(|it| entry(&it, Origin::Store));
    let part = |(target, before, after)| api::OverrideChange {
        target: Some(write_target(&target)),
        before: write(before),
        after: write(after),
        refunded_hits: 0,
    };
    changed.changes.into_iter().map(part).collect()
}

fn read_descriptor(descriptor: Option<api::Descriptor>) -> Result<(String, Vec<(String, String)>), Status> {
    let target = descriptor.map(|it| api::Target { target: Some(api::target::Target::Limit(it)) });
    let target = read_target(target)?;
    target.check().map_err(|error| Status::invalid_argument(error.to_string()))?;
    let Target::Limit { domain, entries } = target else {
        return Err(Status::invalid_argument("a descriptor has a domain and entries"));
    };
    Ok((domain, entries))
}

fn entries(pairs: &[(String, String)]) -> Vec<Entry<'_>> {
    pairs.iter().map(|(key, value)| Entry { key, value }).collect()
}

/// How many at once.
fn page(wanted: u32, default: usize) -> usize {
    if wanted == 0 { default } else { (wanted as usize).min(1_000) }
}

fn unavailable(error: &StoreError) -> Status {
    Status::unavailable(crate::errors::chain(error))
}
