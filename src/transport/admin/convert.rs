//! Conversions between the messages of `sluicegate.admin.v1` and the types of the service.

use std::time::Duration;

use prost_types::Timestamp;
use sluicegate_proto::sluicegate::admin::v1 as api;
use tonic::Status;

use crate::{
    engine::{
        self, CounterPart, CounterState, Micros, Outcomes, Snapshot,
        overrides::{KnownNames, Origin, RuleSetSlot, Scope, Target},
    },
    rules::{self, CustomLimit, SourceFile},
    service::{
        admin::AdminError,
        candidates::CandidateError,
        overrides::{ChangeError, ChangeRequest},
    },
    store::{AnyStore, overrides::JournalError},
};

/// Converts a target. Rejects sets of rules, which have their own methods.
pub(super) fn read_target(target: Option<api::Target>) -> Result<Target, Status> {
    use api::{scope::Scope as ScopeKind, target::Target as TargetKind};
    let target = target.and_then(|target| target.target).ok_or_else(|| missing("a limit, a plan or a switch"))?;
    let target = match target {
        TargetKind::Limit(api::Descriptor { domain, entries }) => {
            let entries = entries.into_iter().map(|entry| (entry.key, entry.value)).collect();
            Target::Limit { domain, entries }
        }
        TargetKind::Plan(api::PlanTarget { domain, key, value }) => Target::Plan { domain, key, value },
        TargetKind::Switch(scope) => {
            Target::Switch(match scope.scope.ok_or_else(|| missing("a scope for its switch"))? {
                ScopeKind::Rule(api::RuleScope { domain, rule }) => Scope::Rule { domain, rule },
                ScopeKind::Algorithm(kind) => Scope::Algorithm(kind),
                ScopeKind::Domain(domain) => Scope::Domain(domain),
                ScopeKind::Everything(true) => Scope::Everything,
                ScopeKind::Everything(false) => return Err(missing("a scope: everything must be true")),
            })
        }
        TargetKind::Planned(api::PlannedTarget { from, target }) => {
            let from = read_time("from", &from.ok_or_else(|| missing("from: the time at which its override begins"))?)?;
            let target = target.map(|target| api::Target { target: Some(begun_kind(target)) });
            let planned = read_target(target)?.planned(from);
            planned.ok_or_else(|| Status::invalid_argument("from must be at most 2106-02-07T06:28:15Z"))?
        }
        TargetKind::Rules(_) => {
            return Err(Status::invalid_argument(
                "rules can only be changed by UploadCandidate, DropCandidate, PromoteCandidate and RollbackRules",
            ));
        }
    };
    Ok(target.with_bounded_values())
}

/// Returns the target that a planned override has after its beginning.
fn begun_kind(target: api::planned_target::Target) -> api::target::Target {
    use api::planned_target::Target as Planned;
    match target {
        Planned::Limit(limit) => api::target::Target::Limit(limit),
        Planned::Plan(plan) => api::target::Target::Plan(plan),
        Planned::Switch(scope) => api::target::Target::Switch(scope),
    }
}

/// Returns the target of a planned override. One that cannot be planned is empty.
fn write_planned(from: Micros, target: &Target) -> api::PlannedTarget {
    use api::planned_target::Target as Planned;
    let target = match write_target(target).target {
        Some(api::target::Target::Limit(limit)) => Some(Planned::Limit(limit)),
        Some(api::target::Target::Plan(plan)) => Some(Planned::Plan(plan)),
        Some(api::target::Target::Switch(scope)) => Some(Planned::Switch(scope)),
        Some(api::target::Target::Rules(_) | api::target::Target::Planned(_)) | None => None,
    };
    api::PlannedTarget { from: Some(time(from)), target }
}

/// Returns the error for a target without a required part.
fn missing(part: &str) -> Status {
    Status::invalid_argument(format!("a target needs {part}"))
}

pub(super) fn write_target(target: &Target) -> api::Target {
    use api::{scope::Scope as ScopeKind, target::Target as TargetKind};
    let target = match target.clone() {
        Target::Limit { domain, entries } => TargetKind::Limit(descriptor(domain, entries)),
        Target::Plan { domain, key, value } => TargetKind::Plan(api::PlanTarget { domain, key, value }),
        Target::Switch(scope) => {
            let scope = match scope {
                Scope::Rule { domain, rule } => ScopeKind::Rule(api::RuleScope { domain, rule }),
                Scope::Algorithm(kind) => ScopeKind::Algorithm(kind),
                Scope::Domain(domain) => ScopeKind::Domain(domain),
                Scope::Everything => ScopeKind::Everything(true),
            };
            TargetKind::Switch(api::Scope { scope: Some(scope) })
        }
        Target::Rules(RuleSetSlot::Candidate) => TargetKind::Rules(api::RuleSetSlot::Candidate.into()),
        Target::Rules(RuleSetSlot::InForce) => TargetKind::Rules(api::RuleSetSlot::InForce.into()),
        Target::Rules(RuleSetSlot::Previous) => TargetKind::Rules(api::RuleSetSlot::Previous.into()),
        Target::Planned { from_seconds, target } => {
            TargetKind::Planned(write_planned(Micros::from_secs(from_seconds.into()), &target))
        }
    };
    api::Target { target: Some(target) }
}

pub(super) fn descriptor(domain: String, entries: Vec<(String, String)>) -> api::Descriptor {
    let entries = entries.into_iter().map(|(key, value)| api::Entry { key, value }).collect();
    api::Descriptor { domain, entries }
}

/// Converts a change request. An empty value removes the override.
pub(super) fn read_change(request: api::ChangeRequest) -> Result<ChangeRequest, Status> {
    let target = read_target(request.target)?;
    let mut value = request.value;
    if let Target::Limit { .. } = target.begun() {
        value = CustomLimit::stored_form(&value).into_owned();
    }
    Ok(ChangeRequest {
        target,
        value: (!value.is_empty()).then_some(value),
        until: request.until.map(|until| read_time("until", &until)).transpose()?,
        expected: request.expected_version,
    })
}

/// Converts the time of a field.
fn read_time(field: &str, time: &Timestamp) -> Result<Micros, Status> {
    let seconds = match u64::try_from(time.seconds) {
        Ok(seconds) if (0..1_000_000_000).contains(&time.nanos) => seconds,
        _ => return Err(Status::invalid_argument(format!("{field} must be a time after 1970"))),
    };
    let micros = seconds.saturating_mul(1_000_000).saturating_add(u64::from(time.nanos.unsigned_abs()) / 1_000);
    Ok(Micros::new(micros))
}

pub(super) fn time(micros: Micros) -> Timestamp {
    (std::time::UNIX_EPOCH + Duration::from_micros(micros.get())).into()
}

pub(super) fn write_override(entry: &engine::Override, origin: Origin) -> api::Override {
    api::Override {
        target: Some(write_target(&entry.target)),
        value: entry.value.to_string(),
        until: entry.until.map(time),
        author: entry.author.to_string(),
        reason: entry.reason.to_string(),
        at: if entry.at > Micros::ZERO { Some(time(entry.at)) } else { None },
        version: entry.version,
        origin: match origin {
            Origin::Store => api::Origin::Store,
            Origin::File => api::Origin::File,
            Origin::Instance => api::Origin::Instance,
        }
        .into(),
        matches_nothing: String::new(),
    }
}

/// Converts an override. `matches_nothing` is the name in its target or value that the rules do not contain, if any.
pub(super) fn write_checked_override(
    entry: &engine::Override,
    origin: Origin,
    names: &mut KnownNames<'_>,
) -> api::Override {
    let unknown = names.name_without_effect(&entry.target, &entry.value);
    let matches_nothing = unknown.map(|unknown| unknown.to_string()).unwrap_or_default();
    api::Override { matches_nothing, ..write_override(entry, origin) }
}

/// Converts the state of a counter. `prefix` is the key prefix of the store.
pub(super) fn counter(state: &CounterState, store: &AnyStore, prefix: &str) -> api::Counter {
    let CounterState { limit, currency, counter, decision, at, .. } = state;
    let node = store.server_of(counter.key.as_bytes(), counter.per_second);
    let retry_after = if decision.allowed { None } else { decision.retry_after };
    let mut forecast = Vec::new();
    for (after, remaining) in state.forecast() {
        forecast.push(api::Forecast { after_us: after.get(), remaining });
    }
    api::Counter {
        limit: limit.text(currency.as_ref()),
        key: format!("{prefix}{}", counter.key),
        node: node.map(|node| node.to_string()).unwrap_or_default(),
        used: decision.used,
        remaining: decision.remaining,
        reset_us: decision.reset.get(),
        retry_after_us: retry_after.map(Micros::get),
        algorithm: limit.algorithm().name().to_owned(),
        hash_slot: store.hash_slot_of(counter.key.as_bytes(), counter.per_second).map(u32::from),
        at: Some(time(*at)),
        parts: state.parts().into_iter().map(write_part).collect(),
        forecast,
        quotas: state.quotas.map(|(callers, millionths)| api::Quotas { callers, share: millionths as f64 / 1e6 }),
        penalty_us: if state.penalty > Micros::ZERO { Some(state.penalty.get()) } else { None },
        currency: currency.as_ref().map(|unit| api::Currency { code: unit.code.to_string(), hits: unit.hits }),
    }
}

fn write_part(part: CounterPart) -> api::CounterPart {
    api::CounterPart { from_us: part.from.get(), until_us: part.until.get(), hits: part.hits }
}

/// Converts a rule with the mode of the switch that applies to it in `snapshot`.
pub(super) fn rule(rule: &rules::Rule, snapshot: Option<&Snapshot>) -> api::Rule {
    let (domain, levels) = match rule.labels.split_first() {
        Some((domain, levels)) => (&**domain, levels),
        None => ("", [].as_slice()),
    };
    let name = match rule.name.as_deref() {
        Some(name) => name.to_owned(),
        None => levels.join("."),
    };
    let (limit, algorithm) = match &rule.limit {
        Some(limit) => (limit.text(rule.currency.as_deref()), limit.algorithm().name()),
        None => ("unlimited".to_owned(), ""),
    };
    let switch = match snapshot.and_then(|snapshot| snapshot.modes().mode_of(domain, Some(rule))) {
        Some(mode) => mode.name(),
        None => "",
    };
    api::Rule {
        domain: domain.to_owned(),
        name,
        limit,
        file: rule.file.to_string(),
        line: u32::try_from(rule.location.line).unwrap_or(u32::MAX),
        switch: switch.to_owned(),
        shadow_mode: rule.shadow_mode,
        algorithm: algorithm.to_owned(),
        consistency: rule.consistency.name().to_owned(),
        path: rule.path(),
        path_without_plan: rule.labels_without_plan().map(|labels| labels.join(".")).unwrap_or_default(),
    }
}

/// Converts uploaded rule files.
pub(super) fn files(files: Vec<api::RuleFile>) -> Vec<SourceFile> {
    files.into_iter().map(|file| SourceFile { name: file.name, text: file.text }).collect()
}

pub(super) fn outcomes(outcomes: Outcomes) -> api::Outcomes {
    let Outcomes { requested, denied, newly_denied, newly_allowed } = outcomes;
    api::Outcomes { requested, denied, newly_denied, newly_allowed }
}

pub(super) fn reject_candidate(error: CandidateError) -> Status {
    match error {
        CandidateError::Change(error) => reject(&AdminError::Change(error)),
        CandidateError::Load(_) | CandidateError::Size | CandidateError::Share => {
            Status::invalid_argument(crate::metrics::chain(&error))
        }
        CandidateError::NoCandidate | CandidateError::NoPrevious => Status::failed_precondition(error.to_string()),
        CandidateError::Store(_)
        | CandidateError::MissingRuleSet(_)
        | CandidateError::WrongRuleSet(_)
        | CandidateError::Thread(_) => Status::unavailable(crate::metrics::chain(&error)),
    }
}

pub(super) fn reject(error: &AdminError) -> Status {
    let message = crate::metrics::chain(error);
    match error {
        AdminError::Change(ChangeError::Conflict { .. }) => Status::aborted(message),
        AdminError::Change(ChangeError::Invalid { .. } | ChangeError::Info | ChangeError::Count) => {
            Status::invalid_argument(message)
        }
        AdminError::Change(ChangeError::Full) => Status::resource_exhausted(message),
        AdminError::Change(ChangeError::Journal(JournalError::Locked { .. })) => Status::failed_precondition(message),
        AdminError::Change(ChangeError::Journal(JournalError::Changed { .. })) => Status::unavailable(message),
        AdminError::Change(ChangeError::Journal(_)) => Status::internal(message),
        AdminError::NotCounted => Status::failed_precondition(message),
        AdminError::Change(ChangeError::Store(_)) | AdminError::Store(_) | AdminError::Decide(_) => {
            Status::unavailable(message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expiry_is_read_to_the_microsecond() {
        let read = |seconds, nanos| read_time("until", &Timestamp { seconds, nanos }).map_err(|status| status.code());
        assert_eq!(read(1, 5_999), Ok(Micros::new(1_000_005)));
        assert_eq!(read(0, 999_999_999), Ok(Micros::new(999_999)));
        for (seconds, nanos) in [(-1, 0), (1, -1), (1, 1_000_000_000)] {
            assert_eq!(read(seconds, nanos), Err(tonic::Code::InvalidArgument));
        }
    }

    #[test]
    fn a_planned_target_is_written_as_it_is_read() {
        for text in [
            "planned|2026-12-01T00:00:00Z|limit|api|user=bob",
            "planned|2026-12-01T00:00:00Z|plan|api|tenant=acme",
            "planned|2026-12-01T00:00:00Z|switch|rule|api|user",
        ] {
            let target = Target::parse(text).unwrap();
            assert_eq!(read_target(Some(write_target(&target))).unwrap(), target, "{text}");
        }
        let planned = |seconds, nanos| {
            let target = Some(api::planned_target::Target::Plan(api::PlanTarget::default()));
            let planned = api::PlannedTarget { from: Some(Timestamp { seconds, nanos }), target };
            read_target(Some(api::Target { target: Some(api::target::Target::Planned(planned)) }))
        };
        assert_eq!(planned(9, 1_000).unwrap().beginning(), Some(Micros::from_secs(10)));
        assert!(planned(1 << 32, 0).is_err() && planned(-1, 0).is_err());
        for incomplete in [
            api::PlannedTarget { from: Some(Timestamp::default()), target: None },
            api::PlannedTarget { from: None, target: Some(api::planned_target::Target::Limit(Default::default())) },
        ] {
            let target = api::Target { target: Some(api::target::Target::Planned(incomplete)) };
            assert!(read_target(Some(target)).is_err());
        }
    }

    #[test]
    fn an_override_has_the_time_at_which_it_was_set_if_it_is_known() {
        let set_at = |at| {
            let target = Target::Switch(Scope::Everything);
            let (value, author, reason) = ("off".into(), "alice".into(), "".into());
            let entry = engine::Override { target, value, until: None, author, reason, at, version: 1 };
            write_override(&entry, Origin::Store).at
        };
        assert_eq!(set_at(Micros::ZERO), None);
        assert_eq!(set_at(Micros::new(1_500_000)), Some(Timestamp { seconds: 1, nanos: 500_000_000 }));
    }
}
