//! `sluicegate ctl`: operates a running service through its admin API.

mod bulk;
mod client;
mod parse;
mod print;

use std::{path::PathBuf, process::ExitCode, time::Duration};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use sluicegate_proto::sluicegate::admin::v1 as api;

use self::{
    client::{Client, Connection},
    parse::{Expiry, descriptor, scope, split_limit},
    print::Output,
};

use crate::{rules::SourceFile, service::reload::Source};

/// Poll interval of `watch` and `audit --follow`.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct CtlArgs {
    #[command(flatten)]
    connection: Connection,
    /// Print responses as JSON, one per line
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Set and list limits of single entities, which take precedence over the limits of rules
    #[command(subcommand)]
    Limit(Limit),
    /// Assign entities to plans
    #[command(subcommand)]
    Plan(Plan),
    /// Switch a rule, an algorithm, a domain or everything off, into shadow mode, on, or into denying everything
    #[command(subcommand)]
    Switch(Switch),
    /// Show the rule, the overrides and the counter of a descriptor
    Inspect(Descriptor),
    /// Reset the counter of a descriptor
    Reset {
        #[command(flatten)]
        descriptor: Descriptor,
        /// Reason for the audit log
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Return hits to the counter of a descriptor
    Refund {
        #[command(flatten)]
        descriptor: Descriptor,
        /// Number of hits to return
        #[arg(long, default_value_t = 1)]
        hits: u64,
        /// Reason for the audit log
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// List the entities with the most denied hits in the last minutes, on all instances of --addr
    Top(Top),
    /// Refresh the list of `top` every second, together with health and switches
    Watch(Top),
    /// List the rules in force
    Rules {
        /// List only rules of this domain
        domain: Option<String>,
    },
    /// Show the audit log: all changes by operators, with time, author and reason
    Audit {
        /// Maximum number of changes
        #[arg(short = 'n', long, default_value_t = 20)]
        max_results: u32,
        /// Continue to print new changes
        #[arg(long)]
        follow: bool,
    },
    /// Evaluate candidate rules on a share of the traffic, and promote them
    #[command(subcommand)]
    Candidate(Candidate),
    /// Show the health of the instances and their stores
    Health,
    /// Set all overrides of a CSV file with lines of target,value,until, as written by `export`
    Import(bulk::Bulk),
    /// Print all overrides as CSV with lines of target,value,until
    Export {
        /// Print only targets that begin with this text, such as limit|api|user=
        #[arg(default_value = "")]
        prefix: String,
    },
}

#[derive(Debug, Args)]
struct Descriptor {
    /// Domain of the descriptor
    domain: String,
    /// Entries of the descriptor
    #[arg(required = true, value_name = "KEY=VALUE")]
    entries: Vec<String>,
}

/// Options of every change.
#[derive(Debug, Args)]
struct Change {
    /// Reason for the audit log
    #[arg(long, default_value = "")]
    reason: String,
    #[command(flatten)]
    expiry: Expiry,
    /// Change only an override of this version, as shown by `get` and `list`; 0 for an override that does not exist
    #[arg(long, value_name = "VERSION")]
    if_version: Option<u64>,
}

#[derive(Debug, Subcommand)]
enum Limit {
    /// Set the limit of a descriptor and of all descriptors that begin with its entries
    Set {
        /// Domain of the descriptor
        domain: String,
        /// Entries and limit: 500/minute, unlimited, blocked, or keywords of `rate_limit` in braces, such as
        /// `'{unit: minute, requests_per_unit: 500}'`
        #[arg(required = true, num_args = 2.., value_name = "KEY=VALUE… LIMIT")]
        entries_and_limit: Vec<String>,
        #[command(flatten)]
        change: Change,
        /// Make the additional hits of a higher limit available at once, even if the counter is used up
        #[arg(long)]
        additive: bool,
    },
    /// Show the limit that was set for a descriptor
    Get(Descriptor),
    /// Remove the limit that was set for a descriptor
    Unset {
        #[command(flatten)]
        descriptor: Descriptor,
        #[command(flatten)]
        change: Change,
    },
    /// List the limits that were set for descriptors
    List {
        /// List only limits of this domain
        domain: Option<String>,
        /// List only descriptors that begin with these entries
        #[arg(value_name = "KEY=VALUE")]
        entries: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
enum Plan {
    /// Assign an entity to a plan
    Assign {
        /// Domain of the entity
        domain: String,
        /// Entry that identifies the entity
        #[arg(value_name = "KEY=VALUE")]
        entity: String,
        /// Name of the plan
        plan: String,
        #[command(flatten)]
        change: Change,
    },
    /// Remove an entity's assignment to a plan
    Unassign {
        /// Domain of the entity
        domain: String,
        /// Entry that identifies the entity
        #[arg(value_name = "KEY=VALUE")]
        entity: String,
        #[command(flatten)]
        change: Change,
    },
    /// List the assignments to plans
    List {
        /// List only assignments of this domain
        domain: Option<String>,
    },
    /// Assign all entities of a CSV file with lines of value,plan
    Import {
        /// Domain of the entities
        domain: String,
        /// Key of the entries that identify the entities
        entity: String,
        #[command(flatten)]
        import: bulk::Bulk,
    },
}

#[derive(Debug, Subcommand)]
enum Switch {
    /// Allow everything without counting
    Off(SetSwitch),
    /// Count, but deny nothing
    Shadow(SetSwitch),
    /// Enforce rules, including those in shadow mode
    Enforce(SetSwitch),
    /// Deny everything
    Deny(SetSwitch),
    /// Remove a switch
    Clear(SetSwitch),
    /// List the switches
    List,
}

#[derive(Debug, Subcommand)]
enum Candidate {
    /// Evaluate the rules of a directory on a share of the traffic, without enforcing them
    Upload {
        /// Directory of rule files
        dir: PathBuf,
        /// Share of the rules' counters that are evaluated, as 10% or 0.1
        #[arg(long, default_value = "10%", value_parser = parse::share)]
        share: f64,
        /// Reason for the audit log
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Show how decisions would change, on all instances of --addr
    Report,
    /// Put the candidate rules in force on all instances, in place of the instances' own directories
    Promote {
        /// Reason for the audit log
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Restore the rules that the last promotion replaced
    Rollback {
        /// Reason for the audit log
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Stop evaluating the candidate rules
    Drop {
        /// Reason for the audit log
        #[arg(long, default_value = "")]
        reason: String,
    },
}

#[derive(Debug, Args)]
struct SetSwitch {
    /// Scope: everything, domain NAME, algorithm NAME (or shedding), or rule DOMAIN NAME
    #[arg(required = true, num_args = 1..=3)]
    scope: Vec<String>,
    #[command(flatten)]
    change: Change,
    /// Set the switch only on the instances of --addr, even if their store is unavailable, until they restart
    #[arg(long)]
    here: bool,
}

#[derive(Debug, Args)]
struct Top {
    /// Rank by requested hits instead of denied hits
    #[arg(long)]
    requested: bool,
    /// List only entities of this domain
    #[arg(long, default_value = "")]
    domain: String,
    /// List only entities of this rule
    #[arg(long, default_value = "")]
    rule: String,
    /// Maximum number of entities
    #[arg(short = 'n', long, default_value_t = 20)]
    max_results: u32,
}

pub(super) fn run(args: CtlArgs) -> anyhow::Result<ExitCode> {
    let _ = rustls::crypto::ring::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    runtime.block_on(async {
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
        Command::Inspect(descriptor) => {
            let descriptor = Some(descriptor.to_message()?);
            output.inspection(&client.inspect(api::InspectRequest { descriptor }).await?)
        }
        Command::Reset { descriptor, reason } => {
            let descriptor = Some(descriptor.to_message()?);
            output.reset(&client.reset(api::ResetCounterRequest { descriptor, reason }).await?)
        }
        Command::Refund { descriptor, hits, reason } => {
            let descriptor = Some(descriptor.to_message()?);
            output.refund(&client.refund(api::RefundRequest { descriptor, hits, reason }).await?)
        }
        Command::Top(top) => output.top(&client.top(&top.to_message()).await?),
        Command::Watch(top) => watch(&top, client, output).await,
        Command::Rules { domain } => {
            let domain = domain.unwrap_or_default();
            output.rules(&client.rules(api::ListRulesRequest { domain }).await?)
        }
        Command::Audit { max_results, follow } => audit(max_results, follow, client, output).await,
        Command::Candidate(candidate) => execute_candidate(candidate, client, output).await,
        Command::Health => output.health(&client.health().await),
        Command::Import(import) => bulk::import(&import, bulk::read_overrides, client).await,
        Command::Export { prefix } => bulk::export(&prefix, client).await,
    }
}

async fn execute_limit(limit: Limit, mut client: Client, output: Output) -> anyhow::Result<()> {
    match limit {
        Limit::Set { domain, entries_and_limit, change, additive } => {
            let (entries, limit) = split_limit(&entries_and_limit)?;
            let target = api::target::Target::Limit(descriptor(&domain, entries)?);
            let request = change.change_request(target, limit)?;
            let request = api::PutOverridesRequest { additive, ..put(request, &change) };
            output.changed(&client.put(request).await?)
        }
        Limit::Get(descriptor) => {
            let descriptor = descriptor.to_message()?;
            let name = parse::limit_target_name(&descriptor);
            let overrides = client.list(&name).await?;
            let exact = |entry: &&api::Override| {
                entry.target.as_ref().and_then(|target| target.target.as_ref())
                    == Some(&api::target::Target::Limit(descriptor.clone()))
            };
            match overrides.iter().find(exact) {
                Some(entry) => output.overrides(std::slice::from_ref(entry)),
                None => bail!("no limit is set for {name}"),
            }
        }
        Limit::Unset { descriptor, change } => {
            let request = change.change_request(api::target::Target::Limit(descriptor.to_message()?), "")?;
            output.changed(&client.put(put(request, &change)).await?)
        }
        Limit::List { domain, entries } => {
            let prefix = match domain {
                Some(domain) if entries.is_empty() => format!("limit|{}|", parse::escaped(&domain)),
                Some(domain) => parse::limit_target_name(&descriptor(&domain, &entries)?),
                None => "limit|".to_owned(),
            };
            output.overrides(&client.list(&prefix).await?)
        }
    }
}

async fn execute_plan(plan: Plan, mut client: Client, output: Output) -> anyhow::Result<()> {
    match plan {
        Plan::Assign { domain, entity, plan, change } => {
            let request = change.change_request(parse::plan_target(domain, &entity)?, &plan)?;
            output.changed(&client.put(put(request, &change)).await?)
        }
        Plan::Unassign { domain, entity, change } => {
            let request = change.change_request(parse::plan_target(domain, &entity)?, "")?;
            output.changed(&client.put(put(request, &change)).await?)
        }
        Plan::List { domain } => {
            let prefix =
                domain.map_or_else(|| "plan|".to_owned(), |domain| format!("plan|{}|", parse::escaped(&domain)));
            output.overrides(&client.list(&prefix).await?)
        }
        Plan::Import { domain, entity, import } => {
            bulk::import(&import, bulk::read_plans(domain, entity), client).await
        }
    }
}

async fn execute_switch(switch: Switch, mut client: Client, output: Output) -> anyhow::Result<()> {
    let (value, set_switch) = match switch {
        Switch::Off(set_switch) => ("off", set_switch),
        Switch::Shadow(set_switch) => ("shadow", set_switch),
        Switch::Enforce(set_switch) => ("enforce", set_switch),
        Switch::Deny(set_switch) => ("deny", set_switch),
        Switch::Clear(set_switch) => ("", set_switch),
        Switch::List => {
            let health = client.health().await;
            return output.switches(&health);
        }
    };
    let request = set_switch.change.change_request(api::target::Target::Switch(scope(&set_switch.scope)?), value)?;
    let request = api::PutOverridesRequest { this_instance: set_switch.here, ..put(request, &set_switch.change) };
    if set_switch.here {
        return client.put_on_each_instance(request, |addr| output.put_on_instance(addr)).await;
    }
    output.changed(&client.put(request).await?)
}

async fn execute_candidate(candidate: Candidate, mut client: Client, output: Output) -> anyhow::Result<()> {
    match candidate {
        Candidate::Upload { dir, share, reason } => {
            let files = Source::directory(dir.clone()).read()?;
            let file = |file: SourceFile| api::RuleFile { name: file.name, text: file.text };
            let files = files.into_iter().map(file).collect();
            let uploaded = client.upload(api::UploadCandidateRequest { files, share, reason }).await?;
            uploaded.warnings.iter().for_each(|warning| eprintln!("{warning}"));
            output.message(
                "the rules are evaluated on all instances within 1 s; `ctl candidate report` shows their decisions",
            );
        }
        Candidate::Report => return output.candidate(&client.candidates().await?),
        Candidate::Promote { reason } => {
            client.promote(api::PromoteCandidateRequest { reason }).await?;
            output.message(
                "the rules are in force on all instances within 1 s; `ctl candidate rollback` restores the old ones",
            );
        }
        Candidate::Rollback { reason } => {
            client.rollback(api::RollbackRulesRequest { reason }).await?;
            output.message("the previous rules are in force on all instances within 1 s");
        }
        Candidate::Drop { reason } => {
            client.drop_candidate(api::DropCandidateRequest { reason }).await?;
            output.message("candidate rules dropped");
        }
    }
    Ok(())
}

async fn watch(top: &Top, mut client: Client, output: Output) -> anyhow::Result<()> {
    loop {
        let (health, ranking) = (client.health().await, client.top(&top.to_message()).await);
        output.clear();
        output.health(&health)?;
        match ranking {
            Ok(ranking) => output.top(&ranking)?,
            Err(error) => println!("\n{error:#}"),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn audit(max_results: u32, follow: bool, mut client: Client, output: Output) -> anyhow::Result<()> {
    let mut newest_version = 0;
    loop {
        let changes =
            client.audit_log(api::ListAuditLogRequest { before_version: 0, page_size: max_results }).await?.entries;
        let new_entries: Vec<_> = changes.into_iter().filter(|change| change.version > newest_version).collect();
        newest_version = new_entries.first().map_or(newest_version, |change| change.version);
        output.changes(&new_entries)?;
        if !follow {
            return Ok(());
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

impl Descriptor {
    fn to_message(&self) -> anyhow::Result<api::Descriptor> {
        descriptor(&self.domain, &self.entries)
    }
}

impl Top {
    fn to_message(&self) -> api::ListTopEntitiesRequest {
        let rank_by = if self.requested { api::RankBy::Requested } else { api::RankBy::Denied };
        api::ListTopEntitiesRequest {
            rank_by: rank_by.into(),
            domain: self.domain.clone(),
            rule: self.rule.clone(),
            max_results: self.max_results,
        }
    }
}

impl Change {
    fn change_request(&self, target: api::target::Target, value: &str) -> anyhow::Result<api::ChangeRequest> {
        Ok(api::ChangeRequest {
            target: Some(api::Target { target: Some(target) }),
            value: value.to_owned(),
            until: self.expiry.read().context("the expiry is invalid")?,
            expected_version: self.if_version,
        })
    }
}

fn put(request: api::ChangeRequest, change: &Change) -> api::PutOverridesRequest {
    api::PutOverridesRequest { changes: vec![request], reason: change.reason.clone(), ..Default::default() }
}

/// Opens a file, or standard input for `-`.
fn open(path: &PathBuf) -> anyhow::Result<Box<dyn std::io::Read>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(std::io::stdin()));
    }
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Box::new(file))
}
