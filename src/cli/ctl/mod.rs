//! `sluicegate ctl`: operating a running service over its admin API.

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
    parse::{Expiry, descriptor, limit_and_entries, scope},
    print::Output,
};

use crate::{rules::SourceFile, service::reload::Source};

/// Between two looks of `watch` and `audit --follow`.
const LOOK: Duration = Duration::from_secs(1);

#[derive(Debug, Args)]
pub(super) struct CtlArgs {
    #[command(flatten)]
    connection: Connection,
    /// The answers as JSON, one a line.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Limits of single entities, over what their rules say.
    #[command(subcommand)]
    Limit(Limit),
    /// Plans of entities.
    #[command(subcommand)]
    Plan(Plan),
    /// What is enforced: of a rule, a kind of limiter, a domain, or everything.
    #[command(subcommand)]
    Switch(Switch),
    /// What a descriptor meets, and where its counter stands.
    Inspect(Descriptor),
    /// Forget a descriptor's counter.
    Forget {
        #[command(flatten)]
        descriptor: Descriptor,
        /// Why, for the audit log.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Give hits back to a descriptor's counter.
    GiveBack {
        #[command(flatten)]
        descriptor: Descriptor,
        /// How many.
        #[arg(long, default_value_t = 1)]
        hits: u64,
        /// Why, for the audit log.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Who was refused most over the last minutes, on all instances of --addr.
    Top(Top),
    /// The same again and again, with switches and health.
    Watch(Top),
    /// The rules in force.
    Rules {
        /// Only those of this domain.
        domain: Option<String>,
    },
    /// What was changed, when, by whom and why.
    Audit {
        /// How many changes.
        #[arg(short = 'n', long, default_value_t = 20)]
        most: u32,
        /// Go on as changes come.
        #[arg(long)]
        follow: bool,
    },
    /// Rules that are tried out before they are enforced.
    #[command(subcommand)]
    Candidate(Candidate),
    /// How the instances and their stores are.
    Health,
    /// Say all overrides of a file: `target,word,until` a line, as `export` writes it.
    Import(bulk::Bulk),
    /// Write all overrides as `target,word,until`.
    Export {
        /// Only those whose name begins so: limit|api|user=
        #[arg(default_value = "")]
        prefix: String,
    },
}

#[derive(Debug, Args)]
struct Descriptor {
    /// The domain.
    domain: String,
    /// The descriptor's entries.
    #[arg(required = true, value_name = "KEY=VALUE")]
    entries: Vec<String>,
}

/// What goes with every change.
#[derive(Debug, Args)]
struct Change {
    /// Why, for the audit log.
    #[arg(long, default_value = "")]
    reason: String,
    #[command(flatten)]
    end: Expiry,
    /// Only if this is its version (`get` shows it; 0: only if nothing has been said).
    #[arg(long, value_name = "VERSION")]
    if_version: Option<u64>,
}

#[derive(Debug, Subcommand)]
enum Limit {
    /// Give a descriptor, and all that begin with it, a limit of their own.
    Set {
        /// The domain.
        domain: String,
        /// The entries, and then the limit: 500/minute, unlimited, blocked, or '{unit: minute, requests_per_unit: 500}'
        /// with whatever else rate_limit knows.
        #[arg(required = true, num_args = 2.., value_name = "KEY=VALUE… LIMIT")]
        words: Vec<String>,
        #[command(flatten)]
        change: Change,
        /// What the new limit has more is there at once, also in a bucket that is empty.
        #[arg(long)]
        additive: bool,
    },
    /// The limit that a descriptor was given.
    Get(Descriptor),
    /// Take it back.
    Unset {
        #[command(flatten)]
        descriptor: Descriptor,
        #[command(flatten)]
        change: Change,
    },
    /// All of them.
    List {
        /// Only of this domain.
        domain: Option<String>,
        /// Only those that begin with these entries.
        #[arg(value_name = "KEY=VALUE")]
        entries: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
enum Plan {
    /// Give an entity a plan.
    Assign {
        /// The domain.
        domain: String,
        /// The entity.
        #[arg(value_name = "KEY=VALUE")]
        entity: String,
        /// The plan.
        plan: String,
        #[command(flatten)]
        change: Change,
    },
    /// Take it back.
    Unassign {
        /// The domain.
        domain: String,
        /// The entity.
        #[arg(value_name = "KEY=VALUE")]
        entity: String,
        #[command(flatten)]
        change: Change,
    },
    /// All of them.
    List {
        /// Only of this domain.
        domain: Option<String>,
    },
    /// Assign all of a CSV file, `value,plan` a line, to entries of this key.
    Import {
        /// The domain.
        domain: String,
        /// The entries' key.
        entity: String,
        #[command(flatten)]
        import: bulk::Bulk,
    },
}

#[derive(Debug, Subcommand)]
enum Switch {
    /// Everything passes, and nothing is counted.
    Off(SetSwitch),
    /// Counted, and never refused.
    Shadow(SetSwitch),
    /// Enforced, also where a file says shadow_mode.
    Enforce(SetSwitch),
    /// Everything is refused.
    Deny(SetSwitch),
    /// Take a switch back.
    Clear(SetSwitch),
    /// All of them.
    List,
}

#[derive(Debug, Subcommand)]
enum Candidate {
    /// Try the rules of a directory out on a share of the traffic; nobody is refused by them.
    Upload {
        /// The directory of rule files.
        dir: PathBuf,
        /// Of the counters that they would have: 10%, or 0.1.
        #[arg(long, default_value = "10%", value_parser = parse::share)]
        share: f64,
        /// Why, for the audit log.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// What they would have done so far, on all instances of --addr.
    Report,
    /// Put them in force, on all instances, in place of the instances' own directories.
    Promote {
        /// Why, for the audit log.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Put in force what was before the last promotion.
    Rollback {
        /// Why, for the audit log.
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Try them no more.
    Drop {
        /// Why, for the audit log.
        #[arg(long, default_value = "")]
        reason: String,
    },
}

#[derive(Debug, Args)]
struct SetSwitch {
    /// everything, domain NAME, kind NAME (an algorithm, or shedding), or rule DOMAIN NAME.
    #[arg(required = true, num_args = 1..=3)]
    scope: Vec<String>,
    #[command(flatten)]
    change: Change,
    /// Only the instances of --addr, whether they reach their store or not; until they are restarted.
    #[arg(long)]
    here: bool,
}

#[derive(Debug, Args)]
struct Top {
    /// Who asked most, instead.
    #[arg(long)]
    asked: bool,
    /// Only of this domain.
    #[arg(long, default_value = "")]
    domain: String,
    /// Only of this rule.
    #[arg(long, default_value = "")]
    rule: String,
    /// How many.
    #[arg(short = 'n', long, default_value_t = 20)]
    most: u32,
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
            let descriptor = Some(descriptor.read()?);
            output.inspection(&client.inspect(api::InspectRequest { descriptor }).await?)
        }
        Command::Forget { descriptor, reason } => {
            let descriptor = Some(descriptor.read()?);
            output.forgotten(&client.forget(api::ResetCounterRequest { descriptor, reason }).await?)
        }
        Command::GiveBack { descriptor, hits, reason } => {
            let descriptor = Some(descriptor.read()?);
            output.given_back(&client.give_back(api::RefundRequest { descriptor, hits, reason }).await?)
        }
        Command::Top(top) => output.top(&client.top(&top.read()).await?),
        Command::Watch(top) => watch(&top, client, output).await,
        Command::Rules { domain } => {
            let domain = domain.unwrap_or_default();
            output.rules(&client.rules(api::ListRulesRequest { domain }).await?)
        }
        Command::Audit { most, follow } => audit(most, follow, client, output).await,
        Command::Candidate(candidate) => execute_candidate(candidate, client, output).await,
        Command::Health => output.health(&client.health().await),
        Command::Import(import) => bulk::import(&import, bulk::read_overrides, client).await,
        Command::Export { prefix } => bulk::export(&prefix, client).await,
    }
}

async fn execute_limit(limit: Limit, mut client: Client, output: Output) -> anyhow::Result<()> {
    match limit {
        Limit::Set { domain, words, change, additive } => {
            let (entries, limit) = limit_and_entries(&words)?;
            let target = api::target::Target::Limit(descriptor(&domain, entries)?);
            let request = change.change_request(target, limit)?;
            let request = api::PutOverridesRequest { additive, ..put(request, &change) };
            output.changed(&client.put(request).await?)
        }
        Limit::Get(descriptor) => {
            let descriptor = descriptor.read()?;
            let name = parse::name(&descriptor);
            let overrides = client.list(&name).await?;
            let exact = |entry: &&api::Override| {
                entry.target.as_ref().and_then(|target| target.target.as_ref())
                    == Some(&api::target::Target::Limit(descriptor.clone()))
            };
            match overrides.iter().find(exact) {
                Some(entry) => output.overrides(std::slice::from_ref(entry)),
                None => bail!("nothing has been said of {name}"),
            }
        }
        Limit::Unset { descriptor, change } => {
            let request = change.change_request(api::target::Target::Limit(descriptor.read()?), "")?;
            output.changed(&client.put(put(request, &change)).await?)
        }
        Limit::List { domain, entries } => {
            let prefix = match domain {
                Some(domain) if entries.is_empty() => format!("limit|{}|", parse::escaped(&domain)),
                Some(domain) => parse::name(&descriptor(&domain, &entries)?),
                None => "limit|".to_owned(),
            };
            output.overrides(&client.list(&prefix).await?)
        }
    }
}

async fn execute_plan(plan: Plan, mut client: Client, output: Output) -> anyhow::Result<()> {
    match plan {
        Plan::Assign { domain, entity, plan, change } => {
            let request = change.change_request(parse::plan_of(domain, &entity)?, &plan)?;
            output.changed(&client.put(put(request, &change)).await?)
        }
        Plan::Unassign { domain, entity, change } => {
            let request = change.change_request(parse::plan_of(domain, &entity)?, "")?;
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
    let (word, throw) = match switch {
        Switch::Off(throw) => ("off", throw),
        Switch::Shadow(throw) => ("shadow", throw),
        Switch::Enforce(throw) => ("enforce", throw),
        Switch::Deny(throw) => ("deny", throw),
        Switch::Clear(throw) => ("", throw),
        Switch::List => {
            let health = client.health().await;
            return output.switches(&health);
        }
    };
    let request = throw.change.change_request(api::target::Target::Switch(scope(&throw.scope)?), word)?;
    let request = api::PutOverridesRequest { this_instance: throw.here, ..put(request, &throw.change) };
    if throw.here {
        return client.put_everywhere(request, &output).await;
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
            output.said("tried out everywhere within a second; `ctl candidate report` says what they would do");
        }
        Candidate::Report => return output.candidate(&client.candidate().await?),
        Candidate::Promote { reason } => {
            client.promote(api::PromoteCandidateRequest { reason }).await?;
            output.said("in force everywhere within a second; `ctl candidate rollback` brings the rules before back");
        }
        Candidate::Rollback { reason } => {
            client.rollback(api::RollbackRulesRequest { reason }).await?;
            output.said("the rules before are in force everywhere within a second");
        }
        Candidate::Drop { reason } => {
            client.drop_candidate(api::DropCandidateRequest { reason }).await?;
            output.said("not tried any more");
        }
    }
    Ok(())
}

async fn watch(top: &Top, mut client: Client, output: Output) -> anyhow::Result<()> {
    loop {
        let (health, ranking) = (client.health().await, client.top(&top.read()).await);
        output.clear();
        output.health(&health)?;
        match ranking {
            Ok(ranking) => output.top(&ranking)?,
            Err(error) => println!("\n{error:#}"),
        }
        tokio::time::sleep(LOOK).await;
    }
}

async fn audit(most: u32, follow: bool, mut client: Client, output: Output) -> anyhow::Result<()> {
    let mut newest = 0;
    loop {
        let changes = client.changes(api::ListAuditLogRequest { before_version: 0, page_size: most }).await?.entries;
        let new: Vec<_> = changes.into_iter().filter(|change| change.version > newest).collect();
        newest = new.first().map_or(newest, |change| change.version);
        output.changes(&new)?;
        if !follow {
            return Ok(());
        }
        tokio::time::sleep(LOOK).await;
    }
}

impl Descriptor {
    fn read(&self) -> anyhow::Result<api::Descriptor> {
        descriptor(&self.domain, &self.entries)
    }
}

impl Top {
    fn read(&self) -> api::ListTopEntitiesRequest {
        let by = if self.asked { api::RankBy::Requested } else { api::RankBy::Denied };
        api::ListTopEntitiesRequest {
            rank_by: by.into(),
            domain: self.domain.clone(),
            rule: self.rule.clone(),
            max_results: self.most,
        }
    }
}

impl Change {
    fn change_request(&self, target: api::target::Target, word: &str) -> anyhow::Result<api::ChangeRequest> {
        Ok(api::ChangeRequest {
            target: Some(api::Target { target: Some(target) }),
            value: word.to_owned(),
            until: self.end.read().context("this is no end")?,
            expected_version: self.if_version,
        })
    }
}

fn put(request: api::ChangeRequest, change: &Change) -> api::PutOverridesRequest {
    api::PutOverridesRequest { changes: vec![request], reason: change.reason.clone(), ..Default::default() }
}

/// A file to read from, or standard input for `-`.
fn open(path: &PathBuf) -> anyhow::Result<Box<dyn std::io::Read>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(std::io::stdin()));
    }
    let file = std::fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Box::new(file))
}
