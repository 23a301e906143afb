//! `sluicegate ctl`: operates a running service through its admin API.

mod args;
mod bulk;
mod changes;
mod client;
mod names;
mod parse;
mod print;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use sluicegate_proto::sluicegate::admin::v1 as api;

pub use self::args::CtlArgs;
use sluicegate_rules::{SourceFile, source::Source};

use self::{
    args::{Candidate, ClearSwitch, Command, Limit, Plan, Reason, SetSwitch, Switch, Top},
    client::Client,
    parse::{descriptor, split_limit},
    print::Output,
};
use super::{entries, grpc, output::is_closed};

/// Poll interval of `watch` and `audit --follow`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Runs the command.
///
/// # Errors
///
/// Returns an error if the service cannot be reached or rejects a call.
pub fn run(args: CtlArgs) -> anyhow::Result<ExitCode> {
    grpc::block_on(async {
        let client = Client::new(&args.connection).await?;
        let output = Output { json: args.json };
        execute(args.command, client, output).await
    })?;
    Ok(ExitCode::SUCCESS)
}

async fn execute(command: Command, mut client: Client, output: Output) -> anyhow::Result<()> {
    match command {
        Command::Limit(limit) => execute_limit(limit, client, output).await,
        Command::Plan(plan) => execute_plan(plan, client, output).await,
        Command::Switch(switch) => execute_switch(switch, client, output).await,
        Command::Inspect { descriptor, hits } => {
            let descriptor = Some(descriptor.to_message()?);
            let request = api::InspectRequest { descriptor, hits };
            output.inspection(&client.call(async |service| service.inspect(request).await).await?)
        }
        Command::Reset { descriptor, reason: Reason { reason } } => {
            let descriptor = Some(descriptor.to_message()?);
            let request = api::ResetCounterRequest { descriptor, reason };
            output.reset(&client.call(async |service| service.reset_counter(request).await).await?)
        }
        Command::Refund { descriptor, hits, reason: Reason { reason } } => {
            let descriptor = Some(descriptor.to_message()?);
            let request = api::RefundRequest { descriptor, hits, reason };
            output.refund(&client.call(async |service| service.refund(request).await).await?)
        }
        Command::Top(top) => {
            let ranking = client.top(&top.to_message()).await?;
            if ranking.entities.is_empty() {
                names::check_filter(&top.domain, &top.rule, &mut client).await?;
            }
            output.top(&ranking)
        }
        Command::Watch(top) => watch(&top, client, output).await,
        Command::Rules { domain } => {
            let domain = domain.unwrap_or_default();
            let rules = client.rules(api::ListRulesRequest { domain: domain.clone() }).await?;
            if rules.rules.is_empty() {
                names::check_filter(&domain, "", &mut client).await?;
            }
            output.rules(&rules)
        }
        Command::Audit { max_results, follow } => audit(max_results, follow, client, output).await,
        Command::Candidate(candidate) => execute_candidate(candidate, client, output).await,
        Command::Health => output.health(&client.health().await),
        // An export can contain names of rules that were removed since.
        Command::Import(import) => bulk::import(&import, false, bulk::read_overrides, client).await,
        Command::Export { prefix } => bulk::export(&prefix, client).await,
    }
}

async fn execute_limit(limit: Limit, mut client: Client, output: Output) -> anyhow::Result<()> {
    match limit {
        Limit::Set { domain, entries_and_limit, options, additive } => {
            let (entries, limit) = split_limit(&entries_and_limit)?;
            let target = api::target::Target::Limit(descriptor(&domain, entries)?);
            let request = api::PutOverridesRequest { additive, ..options.request(target, &limit)? };
            output.changed(&client.put(request).await?)
        }
        Limit::Get(descriptor) => {
            let descriptor = descriptor.to_message()?;
            let name = parse::limit_target_name(&descriptor);
            let overrides = client.list(&name).await?;
            let target = Some(api::target::Target::Limit(descriptor));
            let is_of_target = |entry: &api::Override| entry.target.as_ref().and_then(parse::begun) == target;
            let found: Vec<_> = overrides.into_iter().filter(is_of_target).collect();
            if found.is_empty() {
                bail!("no limit is set for {name}");
            }
            output.overrides(&found)
        }
        Limit::Unset { descriptor, options } => {
            let target = api::target::Target::Limit(descriptor.to_message()?);
            output.changed(&client.put(options.request(target)?).await?)
        }
        Limit::List { domain, entries } => {
            let prefix = match domain {
                Some(domain) if entries.is_empty() && entries::printed(&domain).is_none() => {
                    format!("limit|{}|", parse::escaped(&domain))
                }
                Some(domain) => parse::limit_target_name(&descriptor(&domain, &entries)?),
                None => "limit|".to_owned(),
            };
            output.overrides(&client.list(&prefix).await?)
        }
    }
}

async fn execute_plan(plan: Plan, mut client: Client, output: Output) -> anyhow::Result<()> {
    match plan {
        Plan::Assign { domain, entity, plan, options } => {
            // Before the plan there is a domain and an entry, or both as they are printed.
            let (entity, plan) = match &plan {
                Some(plan) => (Some(entity.as_str()), plan),
                None if entries::printed(&domain).is_some() => (None, &entity),
                None => bail!("the plan is missing: use plan assign DOMAIN KEY=VALUE PLAN"),
            };
            let request = options.request(parse::plan_target(&domain, entity)?, plan)?;
            output.changed(&client.put(request).await?)
        }
        Plan::Unassign { domain, entity, options } => {
            let request = options.request(parse::plan_target(&domain, entity.as_deref())?)?;
            output.changed(&client.put(request).await?)
        }
        Plan::List { domain } => {
            let prefix = match domain {
                Some(domain) => format!("plan|{}|", parse::escaped(&domain)),
                None => "plan|".to_owned(),
            };
            output.overrides(&client.list(&prefix).await?)
        }
        Plan::Import { domain, entity, import, names } => {
            bulk::import(&import, !names.allow_unknown, bulk::read_plans(domain, entity), client).await
        }
    }
}

async fn execute_switch(switch: Switch, mut client: Client, output: Output) -> anyhow::Result<()> {
    let (mode, SetSwitch { scope, options, here }) = match switch {
        Switch::Off(switch) => ("off", switch),
        Switch::Shadow(switch) => ("shadow", switch),
        Switch::Enforce(switch) => ("enforce", switch),
        Switch::Deny(switch) => ("deny", switch),
        Switch::Clear(ClearSwitch { scope, options, here }) => {
            let target = api::target::Target::Switch(names::scope(&scope, &mut client).await?);
            return put_switch(options.request(target)?, here, client, output).await;
        }
        Switch::List => {
            let health = client.health().await;
            return output.switches(&health);
        }
    };
    let target = api::target::Target::Switch(names::scope(&scope, &mut client).await?);
    put_switch(options.request(target, mode)?, here, client, output).await
}

async fn put_switch(
    request: api::PutOverridesRequest,
    here: bool,
    mut client: Client,
    output: Output,
) -> anyhow::Result<()> {
    if here {
        let request = api::PutOverridesRequest { this_instance: true, ..request };
        return client.put_on_each_instance(request, |addr, changed| output.put_on_instance(addr, changed)).await;
    }
    output.changed(&client.put(request).await?)
}

async fn execute_candidate(candidate: Candidate, mut client: Client, output: Output) -> anyhow::Result<()> {
    match candidate {
        Candidate::Upload { dir, share, reason: Reason { reason } } => {
            let mut files = Vec::new();
            for SourceFile { name, text } in Source::directory(dir.clone()).read()? {
                files.push(api::RuleFile { name, text });
            }
            let request = api::UploadCandidateRequest { files, share, reason };
            let uploaded = client.call(async |service| service.upload_candidate(request).await).await?;
            for warning in &uploaded.warnings {
                eprintln!("{warning}");
            }
            output.message(
                "the rules are evaluated on all instances within 1 s; `ctl candidate report` shows their decisions",
            );
        }
        Candidate::Report => return output.candidate(&client.candidates().await?),
        Candidate::Promote { reason: Reason { reason } } => {
            let request = api::PromoteCandidateRequest { reason };
            client.call(async |service| service.promote_candidate(request).await).await?;
            output.message(
                "the rules are in force on all instances within 1 s; `ctl candidate rollback` restores the old ones",
            );
        }
        Candidate::Rollback { reason: Reason { reason } } => {
            let request = api::RollbackRulesRequest { reason };
            client.call(async |service| service.rollback_rules(request).await).await?;
            output.message("the previous rules are in force on all instances within 1 s");
        }
        Candidate::Drop { reason: Reason { reason } } => {
            let request = api::DropCandidateRequest { reason };
            client.call(async |service| service.drop_candidate(request).await).await?;
            output.message("candidate rules dropped");
        }
    }
    Ok(())
}

async fn watch(top: &Top, mut client: Client, output: Output) -> anyhow::Result<()> {
    loop {
        let health = client.health().await;
        let ranking = client.top(&top.to_message()).await;
        output.clear();
        output.health(&health)?;
        match ranking {
            Ok(ranking) => output.top(&ranking)?,
            Err(error) => println!("\n{error:#}"),
        }
        if is_closed() {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn audit(max_results: u32, follow: bool, mut client: Client, output: Output) -> anyhow::Result<()> {
    let mut newest_version = 0;
    loop {
        let request = api::ListAuditLogRequest { before_version: 0, page_size: max_results };
        let response = client.call(async |service| service.list_audit_log(request).await).await?;
        let new_entries: Vec<_> =
            response.entries.into_iter().filter(|change| change.version > newest_version).collect();
        if let Some(newest) = new_entries.first() {
            newest_version = newest.version;
        }
        output.changes(&new_entries)?;
        if !follow || is_closed() {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

/// Opens a file, or standard input for `-`.
fn open(path: &PathBuf) -> anyhow::Result<Box<dyn std::io::Read>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(std::io::stdin()));
    }
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Box::new(file))
}
