//! `sluicegate.admin.v1`, method by method.

use std::{collections::BinaryHeap, time::Instant};

use sluicegate_proto::sluicegate::admin::v1::{self as api, admin_service_server::AdminService};
use tonic::{Request, Response, Status};

use super::{
    auth::{Caller, Role},
    caller,
    convert::{
        counter, descriptor, directive, outcomes, read_target, read_wish, refuse, refuse_candidate, rule, time,
        write_target,
    },
};
use crate::{
    engine::{
        By, Directed, Directive, Ranked, StoreError,
        directives::{Origin, Target},
    },
    rules::{Entry, SourceFile},
    service::{
        Admin,
        admin::AdminError,
        directives::{Changed, Mandate},
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

    /// Whoever changes something has a mandate, and has to have the role for it: by whatever way he came in.
    fn mandate<T>(request: &Request<T>, reason: &str) -> Result<Mandate, Status> {
        let Caller { name: author, role } = caller(request)?;
        if role < Role::Operate {
            return Err(Status::permission_denied(format!("{author} may look, and this changes something")));
        }
        Ok(Mandate { author, reason: reason.to_owned(), at: 0 })
    }

    /// What stands before a counter's name in the store.
    fn prefix(&self) -> &str {
        self.admin.engine.store.key_prefix()
    }

    /// How a switch of an origin other than the store was thrown, or what the store holds.
    fn all_switches(&self) -> Vec<api::Directive> {
        let snapshot = self.admin.reloader.rules().load();
        let of = |origin| snapshot.directives().switches(origin).map(move |switch| directive(switch, origin));
        Origin::ALL.into_iter().flat_map(|origin| of(origin).collect::<Vec<_>>()).collect()
    }
}

#[tonic::async_trait]
impl AdminService for Service {
    async fn put_directives(&self, request: Request<api::PutDirectivesRequest>) -> Answer<api::PutDirectivesResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        let api::PutDirectivesRequest { wishes, additive, this_instance, .. } = request.into_inner();
        let wishes = wishes.into_iter().map(read_wish).collect::<Result<Vec<_>, _>>()?;
        if this_instance {
            return self.switch_here(&wishes, mandate).await;
        }
        let put = self.admin.put(&wishes, mandate, additive).await;
        let (changed, given_back) = put.map_err(|error| refuse(&error))?;
        let version = changed.version;
        let parts = parts(changed).into_iter().zip(given_back);
        let parts = parts.map(|(part, given_back)| api::Part { given_back, ..part }).collect();
        Ok(Response::new(api::PutDirectivesResponse { version, parts }))
    }

    async fn list_directives(
        &self,
        request: Request<api::ListDirectivesRequest>,
    ) -> Answer<api::ListDirectivesResponse> {
        let api::ListDirectivesRequest { prefix, page_size, page_token } = request.into_inner();
        let size = page(page_size, 100);
        let snapshot = self.admin.reloader.rules().load_full();
        let [limits, plans, switches] = snapshot.directives().counts().map(|count| count as u64);
        // With a million of them this is work for a while; the control runtime has others waiting.
        let listed = tokio::task::spawn_blocking(move || {
            let fits = |name: &str| name.starts_with(&prefix) && (page_token.is_empty() || name > page_token.as_str());
            let all = snapshot.directives();
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
            (names.iter().filter_map(get).map(|it| directive(&it, Origin::Store)).collect(), next)
        });
        let (directives, next_page_token) = listed.await.map_err(|_| Status::unavailable("the service is going"))?;
        let version = self.admin.keeper.status().version;
        let answer = api::ListDirectivesResponse { directives, next_page_token, version, limits, plans, switches };
        Ok(Response::new(answer))
    }

    async fn list_changes(&self, request: Request<api::ListChangesRequest>) -> Answer<api::ListChangesResponse> {
        let api::ListChangesRequest { before, most } = request.into_inner();
        let before = if before == 0 { u64::MAX } else { before };
        let changes = self.admin.keeper.log(before, page(most, 50)).await.map_err(|error| unavailable(&error))?;
        let change = |changed: Changed| api::Change {
            version: changed.version,
            author: changed.mandate.author.clone(),
            reason: changed.mandate.reason.clone(),
            at: Some(time(crate::engine::Micros::new(changed.mandate.at))),
            parts: parts(changed),
        };
        Ok(Response::new(api::ListChangesResponse { changes: changes.into_iter().map(change).collect() }))
    }

    async fn inspect(&self, request: Request<api::InspectRequest>) -> Answer<api::InspectResponse> {
        let (domain, pairs) = read_descriptor(request.into_inner().descriptor)?;
        let inspected = self.admin.inspect(&domain, &entries(&pairs)).await.map_err(|error| refuse(&error))?;
        let snapshot = self.admin.reloader.rules().load_full();
        let met = inspected.rule.and_then(|id| snapshot.rules().rules().get(id));
        let target = Target::Limit { domain, entries: pairs };
        let refused = self.admin.top(By::Refused, 1, |ranked, _| *ranked == target);
        Ok(Response::new(api::InspectResponse {
            walk: inspected.walk,
            rule: met.map(|met| rule(met, snapshot.modes().of(&met.labels[0], Some(met)))),
            directives: inspected.directives.iter().map(|(origin, it)| directive(it, *origin)).collect(),
            counter: inspected.standing.map(|it| counter(&it, &self.admin.engine.store, self.prefix())),
            allowed: inspected.allowed,
            decided_by: inspected.directed.map_or("rule", Directed::name).to_owned(),
            refused_since: refused.top.first().map(|ranked| time(ranked.since)),
        }))
    }

    async fn forget(&self, request: Request<api::ForgetRequest>) -> Answer<api::ForgetResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        let (domain, pairs) = read_descriptor(request.into_inner().descriptor)?;
        let forgotten = self.admin.forget(&domain, &entries(&pairs), mandate).await;
        let (counter, existed) = forgotten.map_err(|error| refuse(&error))?;
        let key = format!("{}{}", self.prefix(), counter.key);
        Ok(Response::new(api::ForgetResponse { key, existed }))
    }

    async fn give_back(&self, request: Request<api::GiveBackRequest>) -> Answer<api::GiveBackResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        let api::GiveBackRequest { descriptor, hits, .. } = request.into_inner();
        if hits == 0 {
            return Err(Status::invalid_argument("at least one hit can be given back"));
        }
        let (domain, pairs) = read_descriptor(descriptor)?;
        let given = self.admin.give_back(&domain, &entries(&pairs), hits, mandate).await;
        let standing = given.map_err(|error| refuse(&error))?.standing;
        let counter = standing.map(|it| counter(&it, &self.admin.engine.store, self.prefix()));
        Ok(Response::new(api::GiveBackResponse { counter }))
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

    async fn list_top(&self, request: Request<api::ListTopRequest>) -> Answer<api::ListTopResponse> {
        let api::ListTopRequest { by, domain, rule, most } = request.into_inner();
        let by = match api::By::try_from(by) {
            Ok(api::By::Refused) => By::Refused,
            Ok(api::By::Asked) => By::Asked,
            Err(_) => return Err(Status::invalid_argument("by is BY_REFUSED or BY_ASKED")),
        };
        let fits = |target: &Target, of: &str| {
            let is_of = |wanted: &str| matches!(target, Target::Limit { domain, .. } if domain == wanted);
            (domain.is_empty() || is_of(&domain)) && (rule.is_empty() || rule == of)
        };
        let ranking = self.admin.top(by, page(most, 20), fits);
        let (top, seconds) = (ranking.top.into_iter().filter_map(top).collect(), ranking.span.ceil_secs());
        Ok(Response::new(api::ListTopResponse { top, seconds, all: ranking.all }))
    }

    async fn get_health(&self, _: Request<api::GetHealthRequest>) -> Answer<api::GetHealthResponse> {
        let status = self.admin.keeper.status();
        let servers = self.admin.engine.store.servers().into_iter();
        Ok(Response::new(api::GetHealthResponse {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            uptime_seconds: self.started.elapsed().as_secs(),
            servers: servers.map(|(name, up)| api::StoreServer { name: name.to_string(), up }).collect(),
            directives_version: status.version,
            directives_age_ms: status.heard.and_then(|heard| u64::try_from(heard.elapsed().as_millis()).ok()),
            directives_error: status.error.unwrap_or_default(),
            switches: self.all_switches(),
        }))
    }

    async fn upload_candidate(
        &self,
        request: Request<api::UploadCandidateRequest>,
    ) -> Answer<api::UploadCandidateResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        let api::UploadCandidateRequest { files, share, .. } = request.into_inner();
        let share = if share == 0.0 { 0.1 } else { share };
        let files = files.into_iter().map(|file| SourceFile { name: file.name, text: file.text }).collect();
        let uploaded = self.admin.candidates.upload(files, share, mandate).await;
        let warnings = uploaded.map_err(refuse_candidate)?.iter().map(ToString::to_string).collect();
        Ok(Response::new(api::UploadCandidateResponse { warnings }))
    }

    async fn drop_candidate(&self, request: Request<api::DropCandidateRequest>) -> Answer<api::DropCandidateResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        self.admin.candidates.drop_candidate(mandate).await.map_err(refuse_candidate)?;
        Ok(Response::new(api::DropCandidateResponse {}))
    }

    async fn promote_candidate(
        &self,
        request: Request<api::PromoteCandidateRequest>,
    ) -> Answer<api::PromoteCandidateResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        self.admin.candidates.promote(mandate).await.map_err(refuse_candidate)?;
        Ok(Response::new(api::PromoteCandidateResponse {}))
    }

    async fn rollback_rules(&self, request: Request<api::RollbackRulesRequest>) -> Answer<api::RollbackRulesResponse> {
        let mandate = Self::mandate(&request, &request.get_ref().reason)?;
        self.admin.candidates.rollback(mandate).await.map_err(refuse_candidate)?;
        Ok(Response::new(api::RollbackRulesResponse {}))
    }

    async fn get_candidate(&self, _: Request<api::GetCandidateRequest>) -> Answer<api::GetCandidateResponse> {
        let error = self.admin.candidates.error().unwrap_or_default();
        let snapshot = self.admin.reloader.rules().load_full();
        let Some(trial) = snapshot.trial() else {
            return Ok(Response::new(api::GetCandidateResponse { error, ..Default::default() }));
        };
        let rules = trial.rules();
        let of = |id: usize| rules.rules().rules().get(id).map(|met| rule(met, None));
        let asked = trial.outcomes().enumerate().filter(|(_, it)| it.asked > 0);
        let mut of_rules: Vec<_> =
            asked.map(|(id, it)| api::RuleOutcomes { rule: of(id), outcomes: Some(outcomes(it)) }).collect();
        let changes = |it: &api::RuleOutcomes| it.outcomes.map_or(0, |it| it.newly_refused + it.newly_passed);
        of_rules.sort_by_key(|it| std::cmp::Reverse(changes(it)));
        let minute = |(minute, it)| api::MinuteOutcomes { minute: Some(time(minute)), outcomes: Some(outcomes(it)) };
        let harmed = trial.harmed.ranking(By::Refused, 20, self.admin.clock.now(), |_, _| true);
        let first = trial.first().into_iter().map(|it| Ranked {
            target: it.target,
            rule: it.rule,
            hits: 0,
            over: 0,
            since: it.at,
        });
        Ok(Response::new(api::GetCandidateResponse {
            tried: true,
            since: Some(time(trial.since())),
            share: trial.share(),
            rules: of_rules,
            minutes: trial.minutes().into_iter().map(minute).collect(),
            first: first.filter_map(top).collect(),
            most: harmed.top.into_iter().filter_map(top).collect(),
            left_out: trial.left_out(),
            error,
        }))
    }
}

fn top(ranked: Ranked) -> Option<api::Top> {
    let Target::Limit { domain, entries } = ranked.target else {
        return None;
    };
    Some(api::Top {
        descriptor: Some(descriptor(domain, entries)),
        rule: ranked.rule.to_string(),
        hits: ranked.hits,
        over: ranked.over,
        since: Some(time(ranked.since)),
    })
}

impl Service {
    /// Switches of this instance alone: each by itself, since nobody else hears of them.
    async fn switch_here(
        &self,
        wishes: &[crate::service::directives::Wish],
        mandate: Mandate,
    ) -> Answer<api::PutDirectivesResponse> {
        let mut parts = Vec::new();
        for wish in wishes {
            let Target::Switch(scope) = &wish.target else {
                return Err(Status::invalid_argument("this_instance is for switches: all else is kept in the store"));
            };
            let put = self.admin.keeper.switch_here(scope, wish.word.as_deref(), wish.until, mandate.clone()).await;
            put.map_err(|error| refuse(&AdminError::Put(error)))?;
            parts.push(api::Part { target: Some(write_target(&wish.target)), ..api::Part::default() });
        }
        Ok(Response::new(api::PutDirectivesResponse { version: 0, parts }))
    }
}

fn parts(changed: Changed) -> Vec<api::Part> {
    let write = |it: Option<Directive>| it.map(|it| directive(&it, Origin::Store));
    let part = |(target, before, after)| api::Part {
        target: Some(write_target(&target)),
        before: write(before),
        after: write(after),
        given_back: 0,
    };
    changed.parts.into_iter().map(part).collect()
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
