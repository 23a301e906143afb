//! Conversion of command line arguments to messages of the admin API.

use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use clap::Args;
use prost_types::Timestamp;
use sluicegate_duration::timestamp;
use sluicegate_engine::{
    TopEntities,
    overrides::{Scope, Target},
};
use sluicegate_placement::{ESCAPED, escape};
use sluicegate_proto::sluicegate::admin::v1 as api;

use super::super::entries::Entity;

/// Beginning of an override.
#[derive(Debug, Args)]
pub(super) struct Beginning {
    /// Date and time when the override begins, such as 2026-12-01T00:00:00Z; without it, at once
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
}

impl Beginning {
    pub(super) fn read(&self) -> anyhow::Result<Option<Timestamp>> {
        beginning(self.from.as_deref())
    }
}

/// Beginning of a planned override to remove.
#[derive(Debug, Args)]
pub(super) struct PlannedBeginning {
    /// Remove the planned override that begins at this date and time, such as 2026-12-01T00:00:00Z
    #[arg(long, value_name = "TIME")]
    from: Option<String>,
}

impl PlannedBeginning {
    /// Returns the target of the planned override, or the target itself without a beginning.
    pub(super) fn apply_to(&self, target: api::target::Target) -> anyhow::Result<api::target::Target> {
        match beginning(self.from.as_deref())? {
            Some(from) => planned(target, from),
            None => Ok(target),
        }
    }
}

/// Reads the beginning of an override.
fn beginning(from: Option<&str>) -> anyhow::Result<Option<Timestamp>> {
    let from = from.map(time).transpose().context("the beginning is invalid")?;
    Ok(from.map(to_full_second))
}

/// Rounds a time up to a full second, at which overrides begin and end. Rounded here, all commands print the same time.
fn to_full_second(time: Timestamp) -> Timestamp {
    Timestamp { seconds: time.seconds + i64::from(time.nanos > 0), nanos: 0 }
}

/// Expiry of an override.
#[derive(Debug, Args)]
pub(super) struct Expiry {
    /// Time until the override expires, such as 2h or 30m; with --from, after its beginning
    #[arg(long = "for", value_name = "DURATION", conflicts_with = "until")]
    duration: Option<String>,
    /// Date and time when the override expires, such as 2026-11-22T04:00:00Z
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
}

impl Expiry {
    #[allow(clippy::disallowed_methods, reason = "an expiry is wall clock time")]
    pub(super) fn read(&self, from: Option<Timestamp>) -> anyhow::Result<Option<Timestamp>> {
        if let Some(duration) = &self.duration {
            let duration: Duration = humantime::parse_duration(duration)
                .with_context(|| format!("{duration:?} is not a duration such as 2h"))?;
            let beginning = match from {
                Some(from) => SystemTime::try_from(from).context("the beginning is too late")?,
                None => SystemTime::now(),
            };
            let expiry = beginning.checked_add(duration).context("the duration is too long")?;
            let expiry = Timestamp::from(expiry);
            if duration.is_zero() {
                return Ok(Some(Timestamp { nanos: 0, ..expiry }));
            }
            return Ok(Some(to_full_second(expiry)));
        }
        match &self.until {
            Some(until) => time(until).map(Some),
            None => Ok(None),
        }
    }
}

/// Parses a share such as `10%` or `0.1`.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let share: Option<f64> = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().ok().map(|percent| percent / 100.0),
        None => text.parse().ok(),
    };
    share.filter(|share| *share > 0.0 && *share <= 1.0).ok_or_else(|| format!("{text:?} is not a share such as 10%"))
}

/// Parses the time that a ranking covers.
pub(super) fn period(text: &str) -> Result<Duration, String> {
    let period = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    if period < Duration::from_secs(1) || period > TopEntities::MAX_PERIOD {
        return Err("the duration must be from 1s to 1h, because entities are kept for one hour".to_owned());
    }
    Ok(period)
}

/// Parses a date and time.
pub(super) fn time(text: &str) -> anyhow::Result<Timestamp> {
    let time = timestamp::parse(text);
    Ok(time
        .with_context(|| format!("{text:?} is not a time such as 2026-11-22T04:00:00Z or 2026-11-22T06:00:00+02:00"))?
        .into())
}

/// Returns a time as it is printed.
pub(super) fn format_time(time: Timestamp) -> String {
    let time = SystemTime::try_from(time).unwrap_or(SystemTime::UNIX_EPOCH);
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Returns a descriptor from a domain and `KEY=VALUE…`, or from both as they are printed (`shop|user=bob`).
pub(super) fn descriptor(domain: &str, entries: &[String]) -> anyhow::Result<api::Descriptor> {
    let Entity { domain, entries } = Entity::read(domain, entries)?;
    let entries = entries.into_iter().map(|(key, value)| api::Entry { key, value }).collect();
    Ok(api::Descriptor { domain, entries })
}

/// Returns the target of a plan from DOMAIN and KEY=VALUE, or from both as they are printed.
pub(super) fn plan_target(domain: &str, entity: Option<&str>) -> anyhow::Result<api::target::Target> {
    let entries: Vec<String> = entity.map(str::to_owned).into_iter().collect();
    let Entity { domain, entries } = Entity::read(domain, &entries)?;
    let [(key, value)] = entries.as_slice() else {
        bail!("a plan is assigned to one entry, not to {}", entries.len());
    };
    Ok(api::target::Target::Plan(api::PlanTarget { domain, key: key.clone(), value: value.clone() }))
}

/// Splits arguments into entries and the limit, which begins at the first argument that is not `KEY=VALUE`.
pub(super) fn split_limit(arguments: &[String]) -> anyhow::Result<(&[String], String)> {
    let limit_at = arguments.iter().position(|argument| !argument.contains('=') || argument.starts_with('{'));
    let (entries, words) = arguments.split_at(limit_at.unwrap_or(arguments.len()));
    let limit = words.join(" ");
    if limit.is_empty() {
        let last = match entries.last() {
            Some(entry) => entry.as_str(),
            None => "DOMAIN",
        };
        bail!("the limit is missing after {last:?}: add 500/minute, unlimited, blocked or {{unit: minute, …}}");
    }
    // If another entry follows, the mistake is in the entries, and not in the limit.
    if words.len() > 1 && !limit.starts_with('{') && words.iter().any(|word| word.contains('=')) {
        bail!("{:?} is not KEY=VALUE", words[0]);
    }
    Ok((entries, limit))
}

pub(super) fn scope(arguments: &[String]) -> anyhow::Result<api::Scope> {
    use api::scope::Scope as ScopeMessage;
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let scope = match arguments.as_slice() {
        ["everything"] => ScopeMessage::Everything(true),
        ["domain", domain] => ScopeMessage::Domain((*domain).to_owned()),
        ["algorithm", algorithm] => ScopeMessage::Algorithm((*algorithm).to_owned()),
        ["rule", domain, rule] => {
            ScopeMessage::Rule(api::RuleScope { domain: (*domain).to_owned(), rule: (*rule).to_owned() })
        }
        _ => bail!(
            "{:?} is not a scope: use everything, domain NAME, algorithm NAME, or rule DOMAIN NAME",
            arguments.join(" ")
        ),
    };
    Ok(api::Scope { scope: Some(scope) })
}

/// Reads a scope as it is printed, such as `rule|shop|per_user` or `switch|domain|shop`.
pub(super) fn printed_scope(text: &str) -> Option<api::Scope> {
    let name = text.strip_prefix("switch|").unwrap_or(text);
    match read_target(&format!("switch|{name}")).ok()?.target? {
        api::target::Target::Switch(scope) => Some(scope),
        api::target::Target::Limit(_)
        | api::target::Target::Plan(_)
        | api::target::Target::Rules(_)
        | api::target::Target::Planned(_) => None,
    }
}

/// Returns the target of an override that begins at a time.
pub(super) fn planned(target: api::target::Target, from: Timestamp) -> anyhow::Result<api::target::Target> {
    use api::{planned_target::Target as Planned, target::Target as TargetMessage};
    let target = match target {
        TargetMessage::Limit(limit) => Planned::Limit(limit),
        TargetMessage::Plan(plan) => Planned::Plan(plan),
        TargetMessage::Switch(scope) => Planned::Switch(scope),
        TargetMessage::Rules(_) | TargetMessage::Planned(_) => {
            bail!("only a limit, a plan or a switch can begin later")
        }
    };
    Ok(TargetMessage::Planned(api::PlannedTarget { from: Some(from), target: Some(target) }))
}

/// Returns the target that a planned override has after its beginning, and any other target unchanged. Returns `None`
/// if the message contains no target.
pub(super) fn begun(target: &api::Target) -> Option<api::target::Target> {
    use api::{planned_target::Target as Planned, target::Target as TargetMessage};
    match target.target.clone()? {
        TargetMessage::Planned(planned) => match planned.target? {
            Planned::Limit(limit) => Some(TargetMessage::Limit(limit)),
            Planned::Plan(plan) => Some(TargetMessage::Plan(plan)),
            Planned::Switch(scope) => Some(TargetMessage::Switch(scope)),
        },
        target => Some(target),
    }
}

/// Returns the time at which a planned override begins; `None` for others.
pub(super) fn beginning_of(target: Option<&api::Target>) -> Option<Timestamp> {
    match target?.target.as_ref()? {
        api::target::Target::Planned(planned) => planned.from,
        _ => None,
    }
}

/// Reads a target in the form in which it is printed and exported.
pub(super) fn read_target(name: &str) -> anyhow::Result<api::Target> {
    use api::{scope::Scope as ScopeMessage, target::Target as TargetMessage};
    let target = match Target::parse(name)? {
        Target::Planned { from_seconds, target } => {
            let begun = read_target(&target.to_string())?.target.context("the target is empty")?;
            planned(begun, Timestamp { seconds: from_seconds.into(), nanos: 0 })?
        }
        Target::Limit { domain, entries } => {
            let entries = entries.into_iter().map(|(key, value)| api::Entry { key, value }).collect();
            TargetMessage::Limit(api::Descriptor { domain, entries })
        }
        Target::Plan { domain, key, value } => TargetMessage::Plan(api::PlanTarget { domain, key, value }),
        Target::Switch(scope) => {
            let scope = match scope {
                Scope::Rule { domain, rule } => ScopeMessage::Rule(api::RuleScope { domain, rule }),
                Scope::Algorithm(kind) => ScopeMessage::Algorithm(kind),
                Scope::Domain(domain) => ScopeMessage::Domain(domain),
                Scope::Everything => ScopeMessage::Everything(true),
            };
            TargetMessage::Switch(api::Scope { scope: Some(scope) })
        }
        Target::Rules(_) => {
            bail!("{name} cannot be imported; use `ctl candidate` to upload, promote and roll back rules")
        }
    };
    Ok(api::Target { target: Some(target) })
}

pub(super) fn escaped(text: &str) -> String {
    let mut escaped = Vec::new();
    escape(&mut escaped, text, ESCAPED);
    String::from_utf8_lossy(&escaped).into_owned()
}

/// Returns the target name of the limit of a descriptor.
pub(super) fn limit_target_name(descriptor: &api::Descriptor) -> String {
    let entries = descriptor.entries.iter().map(|entry| format!("|{}={}", escaped(&entry.key), escaped(&entry.value)));
    format!("limit|{}{}", escaped(&descriptor.domain), entries.collect::<String>())
}

/// Returns the name of a target, as in the store and in exported files.
pub(super) fn target_name(target: Option<&api::Target>) -> String {
    use api::{scope::Scope as ScopeMessage, target::Target as TargetMessage};
    match target.and_then(|target| target.target.as_ref()) {
        None => String::new(),
        Some(TargetMessage::Limit(descriptor)) => limit_target_name(descriptor),
        Some(TargetMessage::Plan(api::PlanTarget { domain, key, value })) => {
            format!("plan|{}|{}={}", escaped(domain), escaped(key), escaped(value))
        }
        Some(TargetMessage::Planned(planned)) => {
            let from = planned.from.map(format_time).unwrap_or_default();
            let begun = target.and_then(begun).map(|begun| api::Target { target: Some(begun) });
            format!("planned|{from}|{}", target_name(begun.as_ref()))
        }
        Some(TargetMessage::Rules(slot)) => match api::RuleSetSlot::try_from(*slot) {
            Ok(api::RuleSetSlot::InForce) => "rules|in_force".to_owned(),
            Ok(api::RuleSetSlot::Previous) => "rules|before".to_owned(),
            Ok(api::RuleSetSlot::Candidate | api::RuleSetSlot::Unspecified) | Err(_) => "rules|candidate".to_owned(),
        },
        Some(TargetMessage::Switch(scope)) => match &scope.scope {
            Some(ScopeMessage::Rule(api::RuleScope { domain, rule })) => {
                format!("switch|rule|{}|{}", escaped(domain), escaped(rule))
            }
            Some(ScopeMessage::Algorithm(kind)) => format!("switch|kind|{}", escaped(kind)),
            Some(ScopeMessage::Domain(domain)) => format!("switch|domain|{}", escaped(domain)),
            Some(ScopeMessage::Everything(_)) | None => "switch|everything".to_owned(),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_limit_follows_the_entries() {
        let split = |arguments: &[&str]| {
            let arguments: Vec<String> = arguments.iter().map(|argument| (*argument).to_owned()).collect();
            split_limit(&arguments).ok().map(|(entries, limit)| (entries.len(), limit))
        };
        for limit in ["5/minute", "5 per minute", "{unit: minute, name: a=b}", "blocked"] {
            assert_eq!(split(&["user=bob", limit]), Some((1, limit.to_owned())));
            let words: Vec<&str> = ["user=bob", "path=/a"].into_iter().chain(limit.split(' ')).collect();
            assert_eq!(split(&words), Some((2, limit.to_owned())));
        }
        assert_eq!(split(&["5/minute"]), Some((0, "5/minute".to_owned())), "after a printed descriptor");
        assert_eq!((split(&["user=bob"]), split(&[])), (None, None), "the limit is missing");
        assert_eq!(split(&["user", "path=/a", "5/minute"]), None, "an entry without a value");
    }

    #[test]
    fn a_planned_target_is_read_as_it_is_printed() {
        for name in [
            "planned|2026-12-01T00:00:00Z|limit|api|user=b%7Cb",
            "planned|2026-12-01T00:00:00Z|plan|api|tenant=acme",
            "planned|2026-12-01T00:00:00Z|switch|rule|api|user",
        ] {
            let target = read_target(name).unwrap();
            assert_eq!(target_name(Some(&target)), name);
            assert_eq!(beginning_of(Some(&target)).map(|from| from.seconds), Some(1_796_083_200));
        }
        assert!(read_target("planned|2026-12-01T00:00:00Z|rules|in_force").is_err());
        assert_eq!(beginning_of(read_target("switch|everything").ok().as_ref()), None);
    }

    #[test]
    fn an_override_ends_a_duration_after_its_beginning() {
        let expiry = Expiry { duration: Some("3d".to_owned()), until: None };
        let from = time("2026-11-27T00:00:00.001+01:00").map(to_full_second).unwrap();
        let until = expiry.read(Some(from)).unwrap().unwrap();
        assert_eq!(format_time(until), "2026-11-29T23:00:01Z");
    }

    #[test]
    fn a_plan_belongs_to_one_entry() {
        let target = |domain, entity: Option<&str>| plan_target(domain, entity).ok();
        assert_eq!(target("shop", Some("tenant=a")), target("plan|shop|tenant=a", None));
        assert!(target("shop", Some("tenant=a")).is_some());
        assert_eq!((target("shop|tenant=a|user=b", None), target("shop", None)), (None, None));
    }
}
