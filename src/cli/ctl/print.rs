//! Answers for people, or as JSON for programs.

use std::{io::IsTerminal, sync::LazyLock, time::SystemTime};

use anyhow::Context;
use prost::Message;
use prost_reflect::{DescriptorPool, DynamicMessage};
use prost_types::Timestamp;
use sluicegate_proto::{FILE_DESCRIPTOR_SET, sluicegate::admin::v1 as api};

use super::{client::All, parse::target_name};

static POOL: LazyLock<Option<DescriptorPool>> = LazyLock::new(|| DescriptorPool::decode(FILE_DESCRIPTOR_SET).ok());

#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) json: bool,
}

impl Output {
    pub(super) fn changed(self, changed: &api::PutOverridesResponse) -> anyhow::Result<()> {
        if self.json {
            return json("PutOverridesResponse", changed);
        }
        for part in &changed.changes {
            println!("{}", line(part));
            if part.refunded_hits > 0 {
                println!("  {} hits given back", part.refunded_hits);
            }
        }
        println!("version {}, in force everywhere within a second", changed.version);
        Ok(())
    }

    pub(super) fn told(self, addr: &str) {
        if !self.json {
            println!("{addr}: in force here, until it is restarted");
        }
    }

    pub(super) fn overrides(self, overrides: &[api::Override]) -> anyhow::Result<()> {
        if self.json {
            return overrides.iter().try_for_each(|entry| json("Directive", entry));
        }
        let row = |it: &api::Override| {
            let until = it.until.map_or_else(|| "for ever".to_owned(), time);
            let said = format!("{} {}", it.at.map(time).unwrap_or_default(), it.author);
            [target_name(it.target.as_ref()), it.value.clone(), until, it.version.to_string(), said, it.reason.clone()]
        };
        table(
            ["override", "word", "until", "version", "said", "reason"],
            &overrides.iter().map(row).collect::<Vec<_>>(),
        );
        Ok(())
    }

    pub(super) fn inspection(self, it: &api::InspectResponse) -> anyhow::Result<()> {
        if self.json {
            return json("InspectResponse", it);
        }
        it.match_steps.iter().for_each(|step| println!("{step}"));
        for entry in &it.overrides {
            let until = entry.until.map(|until| format!(" until {}", time(until))).unwrap_or_default();
            let why = if entry.reason.is_empty() { String::new() } else { format!(": {}", entry.reason) };
            let (name, word) = (target_name(entry.target.as_ref()), &entry.value);
            println!("over it: {name} {word}{until} (by {}{why})", entry.author);
        }
        match &it.counter {
            Some(counter) => self.counter(counter),
            None => println!("counter: none"),
        }
        let by =
            if it.decided_by == "rule" { "its rule".to_owned() } else { format!("the override ({})", it.decided_by) };
        println!("now: {}, by {by}", if it.allowed { "one request would pass" } else { "a request would be refused" });
        if let Some(since) = it.denied_since {
            println!("refused since {} on this instance", time(since));
        }
        Ok(())
    }

    fn counter(self, it: &api::Counter) {
        println!("counter: {}{}", it.key, if it.node.is_empty() { String::new() } else { format!(" on {}", it.node) });
        println!("  limit {}; used {}, remaining {}", it.limit, it.used, it.remaining);
        println!("  restored in {}", span(it.reset_us));
        if let Some(wait) = it.retry_after_us {
            println!("  refuses for {}", span(wait));
        }
    }

    pub(super) fn forgotten(self, it: &api::ResetCounterResponse) -> anyhow::Result<()> {
        if self.json {
            return json("ResetCounterResponse", it);
        }
        println!("{}: {}", it.key, if it.existed { "forgotten" } else { "there was nothing to forget" });
        Ok(())
    }

    pub(super) fn given_back(self, it: &api::RefundResponse) -> anyhow::Result<()> {
        if self.json {
            return json("RefundResponse", it);
        }
        if let Some(counter) = &it.counter {
            self.counter(counter);
        }
        Ok(())
    }

    pub(super) fn top(self, it: &api::ListTopEntitiesResponse) -> anyhow::Result<()> {
        if self.json {
            return json("ListTopEntitiesResponse", it);
        }
        println!("{} hits in {} s", it.total_hits, it.period_seconds);
        let row = |top: &api::TopEntity| {
            let name = top.descriptor.as_ref().map(super::parse::name).unwrap_or_default();
            let hits = if top.max_error > 0 {
                format!("{} to {}", top.hits - top.max_error, top.hits)
            } else {
                top.hits.to_string()
            };
            let since = top.since.map(time).unwrap_or_default();
            [hits, name.replacen("limit|", "", 1), top.rule.clone(), since]
        };
        table(["hits", "descriptor", "rule", "since"], &it.entities.iter().map(row).collect::<Vec<_>>());
        Ok(())
    }

    pub(super) fn rules(self, it: &api::ListRulesResponse) -> anyhow::Result<()> {
        if self.json {
            return json("ListRulesResponse", it);
        }
        println!("loaded {}", it.loaded_at.map(time).unwrap_or_default());
        it.last_error.lines().for_each(|line| println!("last error: {line}"));
        let row = |rule: &api::Rule| {
            let mode = match (rule.switch.as_str(), rule.shadow_mode) {
                ("", true) => "shadow_mode".to_owned(),
                ("", false) => String::new(),
                (switch, _) => format!("switched {switch}"),
            };
            let place = format!("{}:{}", rule.file, rule.line);
            [rule.domain.clone(), rule.name.clone(), rule.limit.clone(), mode, place]
        };
        table(["domain", "rule", "limit", "mode", "place"], &it.rules.iter().map(row).collect::<Vec<_>>());
        Ok(())
    }

    pub(super) fn changes(self, changes: &[api::AuditEntry]) -> anyhow::Result<()> {
        if self.json {
            return changes.iter().rev().try_for_each(|change| json("Change", change));
        }
        for change in changes.iter().rev() {
            let at = change.at.map(time).unwrap_or_default();
            let reason = if change.reason.is_empty() { String::new() } else { format!(": {}", change.reason) };
            println!("{} {at} {}{reason}", change.version, change.author);
            change.changes.iter().for_each(|part| println!("  {}", line(part)));
        }
        Ok(())
    }

    pub(super) fn health(self, all: &All<api::GetHealthResponse>) -> anyhow::Result<()> {
        for (addr, health) in all {
            let health = match health {
                Ok(health) if self.json => {
                    json("GetHealthResponse", health)?;
                    continue;
                }
                Ok(health) => health,
                Err(error) => {
                    eprintln!("{error:#}");
                    continue;
                }
            };
            let uptime = span(health.uptime_seconds * 1_000_000);
            println!("{addr}: version {}, up for {uptime}, overrides {}", health.version, health.overrides_version);
            for server in &health.servers {
                println!("  {}: {}", server.name, if server.up { "up" } else { "out of reach" });
            }
            if !health.overrides_error.is_empty() {
                let age = health.overrides_age_ms.map_or_else(|| "ever".to_owned(), |age| span(age * 1_000));
                println!("  not heard of overrides for {age}: {}", health.overrides_error);
            }
            for switch in &health.switches {
                println!("  {}", thrown(switch));
            }
        }
        if all.iter().all(|(_, health)| health.is_err()) { anyhow::bail!("no instance answers") } else { Ok(()) }
    }

    pub(super) fn switches(self, all: &All<api::GetHealthResponse>) -> anyhow::Result<()> {
        for (addr, health) in all {
            match health {
                Ok(health) if self.json => {
                    health.switches.iter().try_for_each(|switch| json("Directive", switch))?;
                }
                Ok(health) if health.switches.is_empty() => println!("{addr}: no switch is thrown"),
                Ok(health) => health.switches.iter().for_each(|switch| println!("{addr}: {}", thrown(switch))),
                Err(error) => eprintln!("{error:#}"),
            }
        }
        if all.iter().all(|(_, health)| health.is_err()) { anyhow::bail!("no instance answers") } else { Ok(()) }
    }

    pub(super) fn said(self, sentence: &str) {
        if !self.json {
            println!("{sentence}");
        }
    }

    pub(super) fn candidate(self, all: &[(String, api::GetCandidateResponse)]) -> anyhow::Result<()> {
        for (addr, it) in all {
            if self.json {
                json("GetCandidateResponse", it)?;
                continue;
            }
            if !it.error.is_empty() {
                println!("{addr}: what should be tried or in force is not: {}", it.error);
            }
            if !it.active {
                println!("{addr}: no rules are tried out");
                continue;
            }
            let since = it.since.map(time).unwrap_or_default();
            println!("{addr}: since {since}, {} of all counters", percent(it.share));
            let row = |of: &api::RuleOutcomes| {
                let outcomes = of.outcomes.unwrap_or_default();
                let rule = of.rule.as_ref().map_or_else(
                    || "(no rule of the candidate)".to_owned(),
                    |rule| format!("{} {}: {}", rule.domain, rule.name, rule.limit),
                );
                let [asked, refused, newly_refused, newly_passed] =
                    [outcomes.requested, outcomes.denied, outcomes.newly_denied, outcomes.newly_allowed]
                        .map(|hits| hits.to_string());
                [rule, asked, refused, newly_refused, newly_passed]
            };
            let rows: Vec<_> = it.rules.iter().map(row).collect();
            table(["rule", "hits", "would refuse", "newly", "would pass newly"], &rows);
            for (word, list) in
                [("refused most, newly", &it.most_newly_denied), ("refused first, newly", &it.first_newly_denied)]
            {
                let name = |top: &api::TopEntity| {
                    let name = top.descriptor.as_ref().map(super::parse::name).unwrap_or_default();
                    let hits = if top.hits > 0 { top.hits.to_string() } else { String::new() };
                    [name.replacen("limit|", "", 1), top.rule.clone(), hits, top.since.map(time).unwrap_or_default()]
                };
                let rows: Vec<_> = list.iter().take(10).map(name).collect();
                if !rows.is_empty() {
                    println!();
                    table([word, "rule", "hits", "since"], &rows);
                }
            }
            let minutes: Vec<_> = it.minutes.iter().rev().take(10).rev().map(minute).collect();
            println!();
            table(["minute", "hits", "would refuse", "newly", "would pass newly"], &minutes);
            if it.skipped_requests > 0 {
                println!("{} requests were left out: too many waited for the store", it.skipped_requests);
            }
        }
        Ok(())
    }

    /// For what is drawn again and again.
    pub(super) fn clear(self) {
        if !self.json && std::io::stdout().is_terminal() {
            print!("\x1b[2J\x1b[H");
        }
    }
}

fn minute(it: &api::MinuteOutcomes) -> [String; 5] {
    let outcomes = it.outcomes.unwrap_or_default();
    let hits = [outcomes.requested, outcomes.denied, outcomes.newly_denied, outcomes.newly_allowed];
    let [asked, refused, newly_refused, newly_passed] = hits.map(|hits| hits.to_string());
    [it.minute.map(time).unwrap_or_default(), asked, refused, newly_refused, newly_passed]
}

fn percent(share: f64) -> String {
    format!("{}%", (share * 1_000.0).round() / 10.0)
}

/// What became of what.
fn line(part: &api::OverrideChange) -> String {
    let word = |it: Option<&api::Override>| {
        it.map(|it| it.until.map_or_else(|| it.value.clone(), |until| format!("{} until {}", it.value, time(until))))
    };
    let (before, after) = (word(part.before.as_ref()), word(part.after.as_ref()));
    let name = target_name(part.target.as_ref());
    match (before, after) {
        (None, Some(after)) => format!("{name}: {after}"),
        (Some(before), Some(after)) => format!("{name}: {after}, before {before}"),
        (Some(before), None) => format!("{name}: taken back, before {before}"),
        (None, None) => format!("{name}: nothing had been said"),
    }
}

fn thrown(switch: &api::Override) -> String {
    let name = target_name(switch.target.as_ref()).replacen("switch|", "", 1);
    let until = switch.until.map(|until| format!(" until {}", time(until))).unwrap_or_default();
    let origin = match switch.origin() {
        api::Origin::Store => "",
        api::Origin::File => ", by this instance's file",
        api::Origin::Instance => ", on this instance alone",
    };
    let why = if switch.reason.is_empty() { String::new() } else { format!(": {}", switch.reason) };
    format!("switch {name} {}{until}{origin} (by {}{why})", switch.value, switch.author)
}

pub(super) fn time(time: Timestamp) -> String {
    let time = SystemTime::try_from(time).unwrap_or(SystemTime::UNIX_EPOCH);
    humantime::format_rfc3339_seconds(time).to_string()
}

/// Microseconds as people say them: to the millisecond.
fn span(micros: u64) -> String {
    let millis = std::time::Duration::from_millis(micros.div_ceil(1_000));
    humantime::format_duration(millis).to_string()
}

fn table<const COLUMNS: usize>(head: [&str; COLUMNS], rows: &[[String; COLUMNS]]) {
    let head = head.map(str::to_owned);
    let width = |column: usize| std::iter::once(&head).chain(rows).map(|row| row[column].chars().count()).max();
    let widths: [usize; COLUMNS] = std::array::from_fn(|column| width(column).unwrap_or_default());
    for row in std::iter::once(&head).chain(rows) {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", cells.join("  ").trim_end());
    }
}

fn json(name: &str, message: &impl Message) -> anyhow::Result<()> {
    let descriptor = POOL.as_ref().and_then(|pool| pool.get_message_by_name(&format!("sluicegate.admin.v1.{name}")));
    let descriptor = descriptor.context("there is no JSON of this")?;
    let message = DynamicMessage::decode(descriptor, &message.encode_to_vec()[..])?;
    println!("{}", serde_json::to_string(&message)?);
    Ok(())
}
