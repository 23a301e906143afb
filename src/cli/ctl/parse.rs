//! What people type, as messages.

use std::time::{Duration, SystemTime};

use anyhow::{Context, bail};
use clap::Args;
use prost_types::Timestamp;
use sluicegate_common::{ESCAPED, escape};
use sluicegate_proto::sluicegate::admin::v1 as api;

/// When something ends.
#[derive(Debug, Args)]
pub(super) struct Expiry {
    /// For so long: 2h, 30m.
    #[arg(long = "for", value_name = "DURATION", conflicts_with = "until")]
    lasting: Option<String>,
    /// Until then: 2026-11-22T04:00:00Z.
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
}

impl Expiry {
    #[allow(clippy::disallowed_methods, reason = "a person's end is one of the wall's clock")]
    pub(super) fn read(&self) -> anyhow::Result<Option<Timestamp>> {
        match (&self.lasting, &self.until) {
            (Some(lasting), _) => {
                let lasting: Duration = humantime::parse_duration(lasting)
                    .with_context(|| format!("{lasting:?} is no duration like 2h"))?;
                let end = SystemTime::now().checked_add(lasting).context("that is too long")?;
                Ok(Some(end.into()))
            }
            (None, Some(until)) => time(until).map(Some),
            (None, None) => Ok(None),
        }
    }
}

/// `10%`, or `0.1`.
pub(super) fn share(text: &str) -> Result<f64, String> {
    let share: Option<f64> = match text.strip_suffix('%') {
        Some(percent) => percent.trim().parse::<f64>().ok().map(|percent| percent / 100.0),
        None => text.parse().ok(),
    };
    share.filter(|share| *share > 0.0 && *share <= 1.0).ok_or_else(|| format!("{text:?} is no share like 10%"))
}

/// A time as people write it.
pub(super) fn time(text: &str) -> anyhow::Result<Timestamp> {
    let time = humantime::parse_rfc3339_weak(text);
    Ok(time.with_context(|| format!("{text:?} is no time like 2026-11-22T04:00:00Z"))?.into())
}

pub(super) fn descriptor(domain: &str, entries: &[String]) -> anyhow::Result<api::Descriptor> {
    let entries = entries.iter().map(|entry| {
        let (key, value) = pair(entry)?;
        Ok(api::Entry { key, value })
    });
    Ok(api::Descriptor { domain: domain.to_owned(), entries: entries.collect::<anyhow::Result<_>>()? })
}

fn pair(entry: &str) -> anyhow::Result<(String, String)> {
    let (key, value) = entry.split_once('=').with_context(|| format!("{entry:?} is not KEY=VALUE"))?;
    Ok((key.to_owned(), value.to_owned()))
}

pub(super) fn plan_of(domain: String, entity: &str) -> anyhow::Result<api::target::Target> {
    let (key, value) = pair(entity)?;
    Ok(api::target::Target::Plan(api::PlanTarget { domain, key, value }))
}

/// The last word is the limit.
pub(super) fn limit_and_entries(words: &[String]) -> anyhow::Result<(&[String], &str)> {
    let (limit, entries) = words.split_last().context("a limit is missing")?;
    if pair(limit).is_ok() && !limit.starts_with('{') {
        bail!(
            "the limit is missing behind {limit:?}: 500/minute, unlimited, blocked, or the words of rate_limit in braces"
        );
    }
    Ok((entries, limit))
}

pub(super) fn scope(words: &[String]) -> anyhow::Result<api::Scope> {
    use api::scope::Scope as Of;
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let scope = match words.as_slice() {
        ["everything"] => Of::Everything(true),
        ["domain", domain] => Of::Domain((*domain).to_owned()),
        ["kind", kind] => Of::Algorithm((*kind).to_owned()),
        ["rule", domain, rule] => Of::Rule(api::RuleScope { domain: (*domain).to_owned(), rule: (*rule).to_owned() }),
        _ => bail!("{:?} is no scope: everything, domain NAME, kind NAME, or rule DOMAIN NAME", words.join(" ")),
    };
    Ok(api::Scope { scope: Some(scope) })
}

pub(super) fn escaped(text: &str) -> String {
    let mut escaped = Vec::new();
    escape(&mut escaped, text, ESCAPED);
    String::from_utf8_lossy(&escaped).into_owned()
}

/// The name of a override about this descriptor.
pub(super) fn name(descriptor: &api::Descriptor) -> String {
    let entries = descriptor.entries.iter().map(|entry| format!("|{}={}", escaped(&entry.key), escaped(&entry.value)));
    format!("limit|{}{}", escaped(&descriptor.domain), entries.collect::<String>())
}

/// The name of a override.
pub(super) fn target_name(target: Option<&api::Target>) -> String {
    use api::{scope::Scope as Of, target::Target as Is};
    match target.and_then(|target| target.target.as_ref()) {
        None => String::new(),
        Some(Is::Limit(descriptor)) => name(descriptor),
        Some(Is::Plan(api::PlanTarget { domain, key, value })) => {
            format!("plan|{}|{}={}", escaped(domain), escaped(key), escaped(value))
        }
        Some(Is::Rules(slot)) => match api::RuleSetSlot::try_from(*slot) {
            Ok(api::RuleSetSlot::InForce) => "rules|in_force".to_owned(),
            Ok(api::RuleSetSlot::Previous) => "rules|before".to_owned(),
            Ok(api::RuleSetSlot::Candidate | api::RuleSetSlot::Unspecified) | Err(_) => "rules|candidate".to_owned(),
        },
        Some(Is::Switch(scope)) => match &scope.scope {
            Some(Of::Rule(api::RuleScope { domain, rule })) => {
                format!("switch|rule|{}|{}", escaped(domain), escaped(rule))
            }
            Some(Of::Algorithm(kind)) => format!("switch|kind|{}", escaped(kind)),
            Some(Of::Domain(domain)) => format!("switch|domain|{}", escaped(domain)),
            Some(Of::Everything(_)) | None => "switch|everything".to_owned(),
        },
    }
}
