//! The arguments of `sluicegate ctl`.

use std::{path::PathBuf, time::Duration};

use anyhow::Context;
use clap::{Args, Subcommand};
use prost_types::Timestamp;
use sluicegate_proto::sluicegate::admin::v1 as api;

use super::{
    client::Connection,
    parse::{self, Beginning, Expiry, PlannedBeginning, descriptor, planned},
};

const EXAMPLES: &str = "Examples:
  sluicegate ctl top
  sluicegate ctl inspect shop user=bob
  sluicegate ctl limit set shop user=bob 500/minute --for 2h --reason 'ticket 4711'
  sluicegate ctl switch off rule shop per_user --for 30m
  sluicegate ctl --addr http://10.0.0.1:8082,http://10.0.0.2:8082 --token-file token top";

const SET_LIMIT_EXAMPLES: &str = "Examples:
  sluicegate ctl limit set shop user=bob 500/minute --for 2h --reason 'ticket 4711'
  sluicegate ctl limit set shop user=bob 500 per 15 minutes
  sluicegate ctl limit set 'shop|user=bob' unlimited
  sluicegate ctl limit set shop user=bob 5000/minute --from 2026-11-27T00:00:00Z --until 2026-11-30T00:00:00Z
  sluicegate ctl limit set shop user=bob '{unit: minute, requests_per_unit: 500, algorithm: token_bucket, burst: 50}'";

const LIMIT_EXAMPLES: &str = "Examples:
  sluicegate ctl limit set shop user=bob 500/minute
  sluicegate ctl limit list shop";

const SWITCH_EXAMPLES: &str = "Examples:
  sluicegate ctl switch shadow rule shop per_user --for 30m --reason 'incident 42'
  sluicegate ctl switch list";

const TOP_EXAMPLES: &str = "Examples:
  sluicegate ctl top --domain shop -n 50
  sluicegate ctl top --requested --rule per_user";

const ASSIGN_EXAMPLES: &str = "Examples:
  sluicegate ctl plan assign shop tenant=acme pro --reason 'upgraded'
  sluicegate ctl plan assign 'shop|tenant=acme' pro";

const CLEAR_EXAMPLES: &str = "Examples:
  sluicegate ctl switch clear rule shop per_user
  sluicegate ctl switch clear everything --here";

#[expect(missing_docs, reason = "clap would print a comment as the help")]
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct CtlArgs {
    #[command(flatten)]
    pub(super) connection: Connection,
    /// Print responses as JSON, one per line
    #[arg(long, global = true)]
    pub(super) json: bool,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Set and list limits of single entities, which take precedence over the limits of rules
    #[command(after_help = LIMIT_EXAMPLES)]
    #[command(subcommand)]
    Limit(Limit),
    /// Assign entities to plans
    #[command(
        after_help = "Examples:\n  sluicegate ctl plan assign shop tenant=acme pro\n  sluicegate ctl plan list shop"
    )]
    #[command(subcommand)]
    Plan(Plan),
    /// Switch a rule, an algorithm, a domain or everything off, into shadow mode, on, or into denying everything
    #[command(after_help = SWITCH_EXAMPLES)]
    #[command(subcommand)]
    Switch(Switch),
    /// Show the rule, the overrides and the counter of a descriptor
    #[command(
        after_help = "Examples:\n  sluicegate ctl inspect shop user=bob --hits 500\n  sluicegate ctl inspect 'shop|user=bob'"
    )]
    Inspect {
        #[command(flatten)]
        descriptor: Descriptor,
        /// Number of hits of the request that is inspected
        #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
        hits: u32,
    },
    /// Reset the counter of a descriptor
    #[command(after_help = "Example:\n  sluicegate ctl reset shop user=bob --reason 'ticket 4711'")]
    Reset {
        #[command(flatten)]
        descriptor: Descriptor,
        #[command(flatten)]
        reason: Reason,
    },
    /// Return hits to the counter of a descriptor
    #[command(after_help = "Example:\n  sluicegate ctl refund shop user=bob --hits 10 --reason 'failed export'")]
    Refund {
        #[command(flatten)]
        descriptor: Descriptor,
        /// Number of hits to return
        #[arg(long, default_value_t = 1)]
        hits: u64,
        #[command(flatten)]
        reason: Reason,
    },
    /// List the entities with the most denied requests in the last minutes, on all instances of --addr
    #[command(after_help = TOP_EXAMPLES)]
    Top(Top),
    /// Refresh the list of `top` every second, together with health and switches
    #[command(after_help = "Example:\n  sluicegate ctl watch --domain shop")]
    Watch(Top),
    /// List the rules in force
    #[command(after_help = "Example:\n  sluicegate ctl rules shop")]
    Rules {
        /// List only rules of this domain
        domain: Option<String>,
    },
    /// Show the audit log: all changes by operators, with time, author and reason
    #[command(after_help = "Example:\n  sluicegate ctl audit -n 50")]
    Audit {
        /// Maximum number of changes
        #[arg(short = 'n', long, default_value_t = 20)]
        max_results: u32,
        /// Continue to print new changes
        #[arg(long)]
        follow: bool,
    },
    /// Evaluate candidate rules on a share of the traffic, and promote them
    #[command(
        after_help = "Examples:\n  sluicegate ctl candidate upload next --share 10%\n  sluicegate ctl candidate report"
    )]
    #[command(subcommand)]
    Candidate(Candidate),
    /// Show the health of the instances and their stores
    #[command(after_help = "Example:\n  sluicegate ctl health")]
    Health,
    /// Set all overrides of a CSV file with lines of target,value,until, as written by `export`
    #[command(after_help = "Example:\n  sluicegate ctl import overrides.csv --reason 'move to the new cluster'")]
    Import(ImportArgs),
    /// Print all overrides as CSV with lines of target,value,until
    #[command(
        after_help = "Examples:\n  sluicegate ctl export > overrides.csv\n  sluicegate ctl export 'limit|shop|user='"
    )]
    Export {
        /// Print only overrides with targets that begin with this text, such as limit|api|user=
        #[arg(default_value = "", hide_default_value = true)]
        prefix: String,
    },
}

#[derive(Debug, Args)]
pub(super) struct Descriptor {
    /// Domain of the descriptor; or with its entries as `ctl top` prints them, such as 'shop|user=bob'
    pub(super) domain: String,
    /// Entries of the descriptor
    #[arg(value_name = "KEY=VALUE")]
    pub(super) entries: Vec<String>,
}

/// The arguments of an import.
#[derive(Debug, Args)]
pub(super) struct ImportArgs {
    /// CSV file, or - for standard input
    pub(super) file: PathBuf,
    #[command(flatten)]
    pub(super) reason: Reason,
    /// First line to import, as reported by an import that failed
    #[arg(long, default_value_t = 1)]
    pub(super) from: u64,
}

/// The reason of a change.
#[derive(Debug, Args)]
pub(super) struct Reason {
    /// Reason for the audit log
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(super) reason: String,
}

/// Options of a change of overrides.
#[derive(Debug, Args)]
pub(super) struct ChangeOptions {
    #[command(flatten)]
    pub(super) reason: Reason,
    /// Change only an override of this version, as shown by `get` and `list`; 0 for an override that does not exist
    #[arg(long, value_name = "VERSION")]
    pub(super) if_version: Option<u64>,
}

/// Options of a change that sets an override.
#[derive(Debug, Args)]
pub(super) struct SetOptions {
    #[command(flatten)]
    pub(super) beginning: Beginning,
    #[command(flatten)]
    pub(super) expiry: Expiry,
    #[command(flatten)]
    pub(super) change: ChangeOptions,
    #[command(flatten)]
    pub(super) names: UnknownNames,
}

/// Options of a change that removes an override.
#[derive(Debug, Args)]
pub(super) struct RemoveOptions {
    #[command(flatten)]
    pub(super) change: ChangeOptions,
    #[command(flatten)]
    pub(super) planned: PlannedBeginning,
}

/// Whether names are accepted that the rules do not have.
#[derive(Clone, Copy, Debug, Args)]
pub(super) struct UnknownNames {
    /// Accept domains, rules, plans and keys that the rules in force do not have
    #[arg(long)]
    pub(super) allow_unknown: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum Limit {
    /// Set the limit of a descriptor and of all descriptors that begin with its entries
    #[command(
        after_help = SET_LIMIT_EXAMPLES,
        override_usage = "sluicegate ctl limit set [OPTIONS] <DOMAIN> <KEY=VALUE>... <LIMIT>"
    )]
    Set {
        /// Domain of the descriptor; or with its entries as `ctl top` prints them, such as 'shop|user=bob'
        domain: String,
        /// Entries and limit: 500/minute or 500 per minute, unlimited, blocked, or keywords of `rate_limit` in braces,
        /// such as `'{unit: minute, requests_per_unit: 500}'`
        #[arg(required = true, num_args = 1.., value_name = "KEY=VALUE… LIMIT")]
        entries_and_limit: Vec<String>,
        #[command(flatten)]
        options: SetOptions,
        /// Make the additional hits of a higher limit available at once, even if the counter is used up
        #[arg(long, conflicts_with = "from")]
        additive: bool,
    },
    /// Show the limit that was set for a descriptor
    #[command(after_help = "Example:\n  sluicegate ctl limit get shop user=bob")]
    Get(Descriptor),
    /// Remove the limit that was set for a descriptor
    #[command(after_help = "Example:\n  sluicegate ctl limit unset shop user=bob")]
    Unset {
        #[command(flatten)]
        descriptor: Descriptor,
        #[command(flatten)]
        options: RemoveOptions,
    },
    /// List the limits that were set for descriptors, also planned ones
    #[command(after_help = "Examples:\n  sluicegate ctl limit list\n  sluicegate ctl limit list shop user=bob")]
    List {
        /// List only limits of this domain; or a descriptor as `ctl top` prints it
        domain: Option<String>,
        /// List only descriptors that begin with these entries
        #[arg(value_name = "KEY=VALUE")]
        entries: Vec<String>,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum Plan {
    /// Assign an entity to a plan
    #[command(after_help = ASSIGN_EXAMPLES)]
    Assign {
        /// Domain of the entity; or with its entry as `plan list` prints them, such as 'shop|tenant=acme'
        domain: String,
        /// Entry that identifies the entity
        #[arg(value_name = "KEY=VALUE")]
        entity: String,
        /// Name of the plan
        plan: Option<String>,
        #[command(flatten)]
        options: SetOptions,
    },
    /// Remove an entity's assignment to a plan
    #[command(after_help = "Example:\n  sluicegate ctl plan unassign shop tenant=acme")]
    Unassign {
        /// Domain of the entity; or with its entry as `plan list` prints them, such as 'shop|tenant=acme'
        domain: String,
        /// Entry that identifies the entity
        #[arg(value_name = "KEY=VALUE")]
        entity: Option<String>,
        #[command(flatten)]
        options: RemoveOptions,
    },
    /// List the assignments to plans, also planned ones
    #[command(after_help = "Example:\n  sluicegate ctl plan list shop")]
    List {
        /// List only assignments of this domain
        domain: Option<String>,
    },
    /// Assign all entities of a CSV file with lines of value,plan
    #[command(after_help = "Example:\n  sluicegate ctl plan import shop tenant plans.csv")]
    Import {
        /// Domain of the entities
        domain: String,
        /// Key of the entries that identify the entities
        entity: String,
        #[command(flatten)]
        import: ImportArgs,
        #[command(flatten)]
        names: UnknownNames,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum Switch {
    /// Allow everything without counting
    #[command(after_help = "Example:\n  sluicegate ctl switch off rule shop per_user --for 30m --reason 'incident 42'")]
    Off(SetSwitch),
    /// Count, but deny nothing
    #[command(after_help = "Example:\n  sluicegate ctl switch shadow domain shop --for 30m")]
    Shadow(SetSwitch),
    /// Enforce rules, including those in shadow mode
    #[command(after_help = "Example:\n  sluicegate ctl switch enforce rule shop per_user")]
    Enforce(SetSwitch),
    /// Deny everything
    #[command(after_help = "Example:\n  sluicegate ctl switch deny rule shop signup --for 10m")]
    Deny(SetSwitch),
    /// Remove a switch
    #[command(after_help = CLEAR_EXAMPLES)]
    Clear(ClearSwitch),
    /// List the switches, also planned ones
    #[command(after_help = "Example:\n  sluicegate ctl switch list")]
    List,
}

#[derive(Debug, Subcommand)]
pub(super) enum Candidate {
    /// Evaluate the rules of a directory on a share of the traffic, without enforcing them
    #[command(after_help = "Example:\n  sluicegate ctl candidate upload next --share 10%")]
    Upload {
        /// Directory of rule files
        dir: PathBuf,
        /// Share of the rules' counters to evaluate, such as 10% or 0.1
        #[arg(long, default_value = "10%", value_parser = parse::share)]
        share: f64,
        #[command(flatten)]
        reason: Reason,
    },
    /// Show how decisions would change, on all instances of --addr
    #[command(after_help = "Example:\n  sluicegate ctl candidate report")]
    Report,
    /// Put the candidate rules in force on all instances, in place of the instances' own directories
    #[command(after_help = "Example:\n  sluicegate ctl candidate promote --reason 'reviewed'")]
    Promote {
        #[command(flatten)]
        reason: Reason,
    },
    /// Restore the rules that the last promotion replaced
    #[command(after_help = "Example:\n  sluicegate ctl candidate rollback --reason 'too strict'")]
    Rollback {
        #[command(flatten)]
        reason: Reason,
    },
    /// Stop evaluating the candidate rules
    #[command(after_help = "Example:\n  sluicegate ctl candidate drop")]
    Drop {
        #[command(flatten)]
        reason: Reason,
    },
}

#[derive(Debug, Args)]
pub(super) struct SetSwitch {
    /// Scope: everything, domain NAME, algorithm NAME (or shedding), or rule DOMAIN NAME (or rule PATH, such as
    /// shop.user)
    #[arg(required = true, num_args = 1..=3)]
    pub(super) scope: Vec<String>,
    #[command(flatten)]
    pub(super) options: SetOptions,
    /// Set the switch only on the instances of --addr, even if their store is unavailable, until they restart
    #[arg(long, conflicts_with = "from")]
    pub(super) here: bool,
}

#[derive(Debug, Args)]
pub(super) struct ClearSwitch {
    /// Scope: everything, domain NAME, algorithm NAME (or shedding), or rule DOMAIN NAME (or rule PATH, such as
    /// shop.user)
    #[arg(required = true, num_args = 1..=3)]
    pub(super) scope: Vec<String>,
    #[command(flatten)]
    pub(super) options: RemoveOptions,
    /// Clear the switch only on the instances of --addr, even if their store is unavailable
    #[arg(long, conflicts_with = "from")]
    pub(super) here: bool,
}

#[derive(Debug, Args)]
pub(super) struct Top {
    /// Rank by requested hits instead of denied requests
    #[arg(long)]
    pub(super) requested: bool,
    /// Count the last DURATION, up to 1h [default: 5m]
    #[arg(long, value_name = "DURATION", value_parser = parse::period)]
    pub(super) last: Option<Duration>,
    /// List only entities of this domain
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(super) domain: String,
    /// List only entities of this rule: its name, or its path such as shop.user
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(super) rule: String,
    /// Maximum number of entities
    #[arg(short = 'n', long, default_value_t = 20)]
    pub(super) max_results: u32,
}

impl Descriptor {
    pub(super) fn to_message(&self) -> anyhow::Result<api::Descriptor> {
        descriptor(&self.domain, &self.entries)
    }
}

impl Top {
    pub(super) fn to_message(&self) -> api::ListTopEntitiesRequest {
        let rank_by = if self.requested { api::RankBy::Requested } else { api::RankBy::Denied };
        let period_seconds = match self.last {
            Some(period) => u32::try_from(period.as_secs()).unwrap_or(u32::MAX),
            None => 0,
        };
        api::ListTopEntitiesRequest {
            rank_by: rank_by.into(),
            domain: self.domain.clone(),
            rule: self.rule.clone(),
            max_results: self.max_results,
            period_seconds,
            all_instances: false,
        }
    }
}

impl RemoveOptions {
    /// Returns the request to remove an override.
    pub(super) fn request(self, target: api::target::Target) -> anyhow::Result<api::PutOverridesRequest> {
        let target = self.planned.apply_to(target)?;
        Ok(self.change.request(target, "", None))
    }
}

impl ChangeOptions {
    fn request(self, target: api::target::Target, value: &str, until: Option<Timestamp>) -> api::PutOverridesRequest {
        let change = api::ChangeRequest {
            target: Some(api::Target { target: Some(target) }),
            value: value.to_owned(),
            until,
            expected_version: self.if_version,
        };
        api::PutOverridesRequest { changes: vec![change], reason: self.reason.reason, ..Default::default() }
    }
}

impl SetOptions {
    /// Returns the request to set an override.
    pub(super) fn request(self, target: api::target::Target, value: &str) -> anyhow::Result<api::PutOverridesRequest> {
        let from = self.beginning.read()?;
        let until = self.expiry.read(from).context("the expiry is invalid")?;
        let target = match from {
            Some(from) => planned(target, from)?,
            None => target,
        };
        let request = self.change.request(target, value, until);
        Ok(api::PutOverridesRequest { reject_unknown_names: !self.names.allow_unknown, ..request })
    }
}
