//! [`Output`]: prints responses as text or as JSON.

use std::io::IsTerminal;

use anyhow::bail;
use prost::Message;
use sluicegate_proto::sluicegate::admin::v1 as api;
use sluicegate_rules::Currency;

use super::{
    super::grpc,
    changes::{changes_nothing, print_warnings},
    client::PerInstance,
    parse::{beginning_of, escaped, format_time, target_name},
};

/// Maximum number of combinations of keys without a rule that are printed.
const MAX_UNMATCHED: usize = 20;

#[derive(Clone, Copy)]
pub(super) struct Output {
    pub(super) json: bool,
}

impl Output {
    pub(super) fn changed(self, changed: &api::PutOverridesResponse) -> anyhow::Result<()> {
        print_warnings(&changed.warnings);
        if self.json {
            print_json("PutOverridesResponse", changed)?;
        } else {
            for change in &changed.changes {
                print_change(change);
            }
            for planned in &changed.planned {
                println!("still planned: {}: {}", target_name(planned.target.as_ref()), value_until(planned));
            }
        }
        if changes_nothing(changed) {
            if changed.planned.is_empty() {
                bail!("nothing was removed");
            }
            bail!("nothing was removed; --from TIME removes a planned override");
        }
        if self.json {
            return Ok(());
        }
        let is_planned = changed.changes.iter().any(|change| beginning_of(change.target.as_ref()).is_some());
        let effect = if is_planned { "known to" } else { "in force on" };
        println!("version {}, {effect} all instances within 1 s", changed.version);
        Ok(())
    }

    pub(super) fn put_on_instance(self, addr: &str, changed: &api::PutOverridesResponse) {
        if self.json {
            return;
        }
        if changes_nothing(changed) {
            println!("{addr}: this instance had no such switch of its own");
        } else {
            println!("{addr}: in force on this instance until it restarts");
        }
    }

    pub(super) fn overrides(self, overrides: &[api::Override]) -> anyhow::Result<()> {
        if self.json {
            return overrides.iter().try_for_each(|entry| print_json("Override", entry));
        }
        let mut rows = Vec::new();
        for entry in overrides {
            let until = match entry.until {
                Some(until) => format_time(until),
                None => "no expiry".to_owned(),
            };
            let changed = format!("{} {}", entry.at.map(format_time).unwrap_or_default(), entry.author);
            rows.push([
                target_name(entry.target.as_ref()),
                entry.value.clone(),
                until,
                entry.version.to_string(),
                changed,
                entry.reason.clone(),
            ]);
        }
        print_table(["override", "value", "until", "version", "changed", "reason"], &rows);
        for entry in overrides {
            if !entry.matches_nothing.is_empty() {
                println!("{} matches nothing: {}", target_name(entry.target.as_ref()), entry.matches_nothing);
            }
        }
        Ok(())
    }

    pub(super) fn inspection(self, response: &api::InspectResponse) -> anyhow::Result<()> {
        if self.json {
            return print_json("InspectResponse", response);
        }
        for step in &response.match_steps {
            println!("{step}");
        }
        // Without a rule, only an override of exactly this descriptor applies. Then it has decided.
        let has_limit = response.rule.is_some() || response.decided_by != "rule";
        let label = if has_limit { "override" } else { "override without effect, because no rule applies" };
        for entry in &response.overrides {
            let until = entry.until.map(|until| format!(" until {}", format_time(until))).unwrap_or_default();
            let why = why(&entry.reason);
            let name = target_name(entry.target.as_ref());
            println!("{label}: {name} {}{until} (by {}{why})", entry.value, entry.author);
            if !entry.matches_nothing.is_empty() {
                println!("  it matches nothing: {}", entry.matches_nothing);
            }
        }
        for entry in &response.planned {
            let name = target_name(entry.target.as_ref());
            println!("planned override: {name} {} (by {}{})", value_until(entry), entry.author, why(&entry.reason));
        }
        match &response.counter {
            Some(counter) => self.counter(counter),
            None => println!("counter: none"),
        }
        for counter in &response.others {
            self.counter(counter);
        }
        if !has_limit {
            println!("now: no rule applies, so a request is allowed without being counted");
            return Ok(());
        }
        let decided_by = if response.decided_by == "rule" {
            "the rule".to_owned()
        } else {
            format!("an override ({})", response.decided_by)
        };
        let decision = if response.allowed { "allowed" } else { "denied" };
        println!("now: a request would be {decision} by {decided_by}");
        if let Some(max_hits) = response.max_hits {
            println!("never: the limit allows at most {max_hits} hits in one request");
        }
        if let Some(since) = response.denied_since {
            println!("first denied at {} on this instance, in the last hour", format_time(since));
        }
        Ok(())
    }

    fn counter(self, counter: &api::Counter) {
        println!(
            "counter: {}{}",
            counter.key,
            if counter.node.is_empty() { String::new() } else { format!(" on {}", counter.node) }
        );
        let [used, remaining] =
            [counter.used, counter.remaining].map(|hits| hits_text(hits, counter.currency.as_ref()));
        println!("  limit {}; used {used}, remaining {remaining}", counter.limit);
        println!("  reset in {}", format_duration(counter.reset_us));
        if let Some(wait) = counter.retry_after_us {
            println!("  retry after {}", format_duration(wait));
        }
        if let Some(time) = counter.penalty_us {
            println!("  penalty: every request is denied for another {}", format_duration(time));
        }
        if let Some(quotas) = &counter.quotas {
            let callers = quotas.callers;
            let share = format_percent(quotas.share);
            println!("  quotas: {share} of the limit, for Envoys that limit requests by themselves ({callers})");
        }
    }

    pub(super) fn reset(self, response: &api::ResetCounterResponse) -> anyhow::Result<()> {
        if self.json {
            return print_json("ResetCounterResponse", response);
        }
        println!("{}: {}", response.key, if response.existed { "reset" } else { "the counter did not exist" });
        Ok(())
    }

    pub(super) fn refund(self, response: &api::RefundResponse) -> anyhow::Result<()> {
        if self.json {
            return print_json("RefundResponse", response);
        }
        if let Some(counter) = &response.counter {
            self.counter(counter);
        }
        Ok(())
    }

    pub(super) fn top(self, response: &api::ListTopEntitiesResponse) -> anyhow::Result<()> {
        if self.json {
            return print_json("ListTopEntitiesResponse", response);
        }
        let requests = response.total_requests;
        let hits = response.total_hits;
        println!("{requests} requests with {hits} hits in {} s, over all rules", response.period_seconds);
        let mut rows = Vec::new();
        for top in &response.entities {
            let name = top.descriptor.as_ref().map(super::parse::limit_target_name).unwrap_or_default();
            rows.push([
                estimate(top.requests, top.max_request_error),
                estimate(top.hits, top.max_error),
                name.replacen("limit|", "", 1),
                top.rule.clone(),
                top.since.map(format_time).unwrap_or_default(),
            ]);
        }
        print_table(["requests", "hits", "descriptor", "rule", "since"], &rows);
        if response.unmatched.is_empty() {
            return Ok(());
        }
        println!("\ndescriptors that no rule matches, so that they have no limit:");
        let mut rows = Vec::new();
        for group in response.unmatched.iter().take(MAX_UNMATCHED) {
            let keys: Vec<String> = group.keys.iter().map(|key| escaped(key)).collect();
            let (keys, nearest) = if group.unknown_domain {
                ("(unknown domain)".to_owned(), group.nearest_domain.clone())
            } else {
                (keys.join(", "), group.nearest_rule.clone())
            };
            rows.push([
                group.recent.to_string(),
                group.total.to_string(),
                escaped(&group.domain),
                keys,
                nearest,
                group.latest.map(format_time).unwrap_or_default(),
            ]);
        }
        print_table(["in 5 minutes", "total", "domain", "keys", "nearest", "latest"], &rows);
        Ok(())
    }

    pub(super) fn rules(self, response: &api::ListRulesResponse) -> anyhow::Result<()> {
        if self.json {
            return print_json("ListRulesResponse", response);
        }
        println!("rules loaded {}", response.loaded_at.map(format_time).unwrap_or_default());
        for line in response.last_error.lines() {
            println!("last error: {line}");
        }
        let mut rows = Vec::new();
        for rule in &response.rules {
            let mode = match (rule.switch.as_str(), rule.shadow_mode) {
                ("", true) => "shadow_mode".to_owned(),
                ("", false) => String::new(),
                (switch, _) => format!("switch {switch}"),
            };
            let location = format!("{}:{}", rule.file, rule.line);
            rows.push([rule.domain.clone(), rule.name.clone(), rule.limit.clone(), mode, location]);
        }
        print_table(["domain", "rule", "limit", "mode", "location"], &rows);
        Ok(())
    }

    pub(super) fn changes(self, changes: &[api::AuditEntry]) -> anyhow::Result<()> {
        if self.json {
            return changes.iter().rev().try_for_each(|change| print_json("AuditEntry", change));
        }
        for change in changes.iter().rev() {
            let at = change.at.map(format_time).unwrap_or_default();
            let reason = if change.reason.is_empty() { String::new() } else { format!(": {}", change.reason) };
            println!("{} {at} {}{reason}", change.version, change.author);
            for change in &change.changes {
                println!("  {}", change_line(change));
            }
        }
        Ok(())
    }

    pub(super) fn health(self, all: &PerInstance<api::GetHealthResponse>) -> anyhow::Result<()> {
        for (addr, health) in all {
            let health = match health {
                Ok(health) if self.json => {
                    print_json("GetHealthResponse", health)?;
                    continue;
                }
                Ok(health) => health,
                Err(error) => {
                    eprintln!("{error:#}");
                    continue;
                }
            };
            let uptime = format_duration(health.uptime_seconds * 1_000_000);
            println!(
                "{addr}: version {}, up for {uptime}, overrides version {}",
                health.version, health.overrides_version
            );
            for server in &health.servers {
                println!("  {}: {}", server.name, if server.up { "up" } else { "unreachable" });
            }
            if !health.overrides_error.is_empty() {
                let age = match health.overrides_age_ms {
                    Some(age) => format!("for {}", format_duration(age * 1_000)),
                    None => "since the start".to_owned(),
                };
                println!("  overrides not synchronised {age}: {}", health.overrides_error);
            }
            for switch in health.switches.iter().chain(&health.planned_switches) {
                println!("  {}", switch_line(switch));
            }
        }
        if all.iter().all(|(_, health)| health.is_err()) { anyhow::bail!("no instance responded") } else { Ok(()) }
    }

    pub(super) fn switches(self, all: &PerInstance<api::GetHealthResponse>) -> anyhow::Result<()> {
        for (addr, health) in all {
            match health {
                Ok(health) if self.json => {
                    for switch in health.switches.iter().chain(&health.planned_switches) {
                        print_json("Override", switch)?;
                    }
                }
                Ok(health) => {
                    if health.switches.is_empty() {
                        println!("{addr}: no switch is set");
                    }
                    for switch in health.switches.iter().chain(&health.planned_switches) {
                        println!("{addr}: {}", switch_line(switch));
                    }
                }
                Err(error) => eprintln!("{error:#}"),
            }
        }
        if all.iter().all(|(_, health)| health.is_err()) { anyhow::bail!("no instance responded") } else { Ok(()) }
    }

    pub(super) fn message(self, text: &str) {
        if !self.json {
            println!("{text}");
        }
    }

    pub(super) fn candidate(self, all: &[(String, api::GetCandidateResponse)]) -> anyhow::Result<()> {
        for (addr, response) in all {
            if self.json {
                print_json("GetCandidateResponse", response)?;
                continue;
            }
            if !response.error.is_empty() {
                println!("{addr}: candidate or promoted rules are not in use: {}", response.error);
            }
            if !response.active {
                println!("{addr}: no candidate rules");
                continue;
            }
            let since = response.since.map(format_time).unwrap_or_default();
            println!("{addr}: candidate rules since {since}, on {} of all counters", format_percent(response.share));
            let rows: Vec<_> = response.rules.iter().map(rule_row).collect();
            print_table(["rule", "hits", "denied", "newly denied", "newly allowed"], &rows);
            for (heading, list) in [
                ("most newly denied", &response.most_newly_denied),
                ("first newly denied", &response.first_newly_denied),
            ] {
                let rows: Vec<_> = list.iter().take(10).map(entity_row).collect();
                if !rows.is_empty() {
                    println!();
                    print_table([heading, "rule", "hits", "since"], &rows);
                }
            }
            let minutes: Vec<_> = response.minutes.iter().rev().take(10).rev().map(minute_row).collect();
            println!();
            print_table(["minute", "hits", "denied", "newly denied", "newly allowed"], &minutes);
            if response.skipped_requests > 0 {
                println!("{} requests skipped: too many were waiting for the store", response.skipped_requests);
            }
        }
        Ok(())
    }

    /// Clears the terminal before the output is drawn again.
    pub(super) fn clear(self) {
        if !self.json && std::io::stdout().is_terminal() {
            print!("\x1b[2J\x1b[H");
        }
    }
}

/// Returns a row with the decisions of one candidate rule.
fn rule_row(rule_outcomes: &api::RuleOutcomes) -> [String; 5] {
    let rule = match &rule_outcomes.rule {
        Some(rule) => format!("{} {}: {}", rule.domain, rule.name, rule.limit),
        None => "(no candidate rule)".to_owned(),
    };
    outcomes_row(rule, rule_outcomes.outcomes.unwrap_or_default())
}

/// Returns a row with the decisions of the candidate rules in one minute.
fn minute_row(minute: &api::MinuteOutcomes) -> [String; 5] {
    let time = minute.minute.map(format_time).unwrap_or_default();
    outcomes_row(time, minute.outcomes.unwrap_or_default())
}

fn outcomes_row(name: String, outcomes: api::Outcomes) -> [String; 5] {
    [
        name,
        outcomes.requested.to_string(),
        outcomes.denied.to_string(),
        outcomes.newly_denied.to_string(),
        outcomes.newly_allowed.to_string(),
    ]
}

/// Returns a row with one entity that the candidate rules newly deny.
fn entity_row(top: &api::TopEntity) -> [String; 4] {
    let name = top.descriptor.as_ref().map(super::parse::limit_target_name).unwrap_or_default();
    let hits = if top.hits > 0 { top.hits.to_string() } else { String::new() };
    [name.replacen("limit|", "", 1), top.rule.clone(), hits, top.since.map(format_time).unwrap_or_default()]
}

fn format_percent(share: f64) -> String {
    format!("{}%", (share * 1_000.0).round() / 10.0)
}

/// Returns hits as an amount if their rule has a currency, and otherwise as a number.
fn hits_text(hits: u64, currency: Option<&api::Currency>) -> String {
    match currency {
        Some(unit) => Currency { code: unit.code.as_str().into(), hits: unit.hits }.amount(hits).to_string(),
        None => hits.to_string(),
    }
}

/// Prints a change of an override, and the hits that it has refunded.
fn print_change(change: &api::OverrideChange) {
    println!("{}", change_line(change));
    if change.refunded_hits > 0 {
        println!("  {} hits refunded", change.refunded_hits);
    }
}

/// Returns a line with the values of an override before and after a change.
fn change_line(change: &api::OverrideChange) -> String {
    let before = change.before.as_ref().map(value_until);
    let after = change.after.as_ref().map(value_until);
    let name = target_name(change.target.as_ref());
    match (before, after) {
        (None, Some(after)) => format!("{name}: {after}"),
        (Some(before), Some(after)) => format!("{name}: {after} (before: {before})"),
        (Some(before), None) => format!("{name}: removed (before: {before})"),
        (None, None) => format!("{name}: was not set"),
    }
}

/// Returns the value of an override, and when it expires.
fn value_until(entry: &api::Override) -> String {
    match entry.until {
        Some(until) => format!("{} until {}", entry.value, format_time(until)),
        None => entry.value.clone(),
    }
}

/// Returns the reason of a change to follow its author.
fn why(reason: &str) -> String {
    if reason.is_empty() { String::new() } else { format!(": {reason}") }
}

fn switch_line(switch: &api::Override) -> String {
    let name = target_name(switch.target.as_ref()).replacen("switch|", "", 1);
    let kind = if beginning_of(switch.target.as_ref()).is_some() { "planned switch" } else { "switch" };
    let name = name.replacen("planned|", "", 1);
    let until = switch.until.map(|until| format!(" until {}", format_time(until))).unwrap_or_default();
    let origin = match switch.origin() {
        api::Origin::Store => "",
        api::Origin::File => ", from the file of this instance",
        api::Origin::Instance => ", on this instance only",
    };
    let why = why(&switch.reason);
    let effect = match switch.matches_nothing.as_str() {
        "" => String::new(),
        problem => format!("; it matches nothing: {problem}"),
    };
    format!("{kind} {name} {}{until}{origin} (by {}{why}){effect}", switch.value, switch.author)
}

/// Formats microseconds with a precision of a millisecond.
fn format_duration(micros: u64) -> String {
    let millis = std::time::Duration::from_millis(micros.div_ceil(1_000));
    humantime::format_duration(millis).to_string()
}

/// Formats a number that may be too high by `max_error`.
fn estimate(number: u64, max_error: u64) -> String {
    match max_error {
        0 => number.to_string(),
        max_error => format!("{} to {number}", number.saturating_sub(max_error)),
    }
}

fn print_table<const COLUMNS: usize>(header: [&str; COLUMNS], rows: &[[String; COLUMNS]]) {
    let header = header.map(str::to_owned);
    let mut widths = [0; COLUMNS];
    for row in std::iter::once(&header).chain(rows) {
        for (column, cell) in row.iter().enumerate() {
            widths[column] = widths[column].max(cell.chars().count());
        }
    }
    for row in std::iter::once(&header).chain(rows) {
        let cells: Vec<String> = row.iter().zip(widths).map(|(cell, width)| format!("{cell:<width$}")).collect();
        println!("{}", cells.join("  ").trim_end());
    }
}

fn print_json(name: &str, message: &impl Message) -> anyhow::Result<()> {
    println!("{}", grpc::json(&format!("sluicegate.admin.v1.{name}"), message)?);
    Ok(())
}
