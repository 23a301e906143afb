//! `sluicegate shard`: where a counter is, and what other nodes would move.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use clap::Args;

use super::entries;
use sluicegate_common::Ring;

use crate::{
    app, engine,
    rules::{self, Options},
    service::reload::LoadError,
    settings::{Flags, Settings},
    store::redis::topology::{self, KeyLocation},
};

#[derive(Debug, Args)]
pub(super) struct ShardArgs {
    /// The domain.
    domain: String,
    /// The descriptor's entries.
    #[arg(required = true, value_name = "KEY=VALUE")]
    entries: Vec<String>,
    /// Directory of rule files: what is counted, and by what it is sharded.
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// Where counters are kept: redis+ring://…, redis+cluster://… and so on.
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// Settings file, TOML or YAML.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Other nodes for a ring, by their names: what would move? A weight stands behind a star: a,b,c*2.
    #[arg(long, value_name = "NODES")]
    nodes: Option<String>,
}

/// So many shards show what a ring would move.
const SAMPLE: usize = 100_000;

pub(super) fn run(args: ShardArgs) -> anyhow::Result<ExitCode> {
    let overrides = Flags { rules: args.rules, store: args.store, ..Flags::default() };
    let settings = Settings::load(args.config.as_deref(), None, overrides)?;
    let options = Options { merge_domains: settings.rules.merge_domains, ..Options::default() };
    let (set, _) = rules::compile(&app::source(&settings).read()?, options).map_err(LoadError::Invalid)?;
    let Some((name, per_second)) = engine::counter(&set, &args.domain, &entries(&args.entries)?) else {
        println!("no limit applies (sluicegate check DIR --explain says why): nothing is counted");
        return Ok(ExitCode::SUCCESS);
    };
    if settings.store == "memory" {
        bail!("the store is memory, of which every instance has its own; --store names another");
    }
    let (store, redis) = match &settings.per_second.store {
        Some(store) if per_second => (store, &settings.per_second.redis),
        _ => (&settings.store, &settings.redis),
    };
    let key = format!("{}{name}", redis.key_prefix);
    println!("key   {key}");
    let shard = name.trim_start_matches('{').split('}').next().unwrap_or_default();
    println!("shard {shard}");
    match topology::place(store, redis, &key)? {
        KeyLocation::Server(name) => println!("node  {name}"),
        KeyLocation::Slot(slot) => println!("slot  {slot}"),
        KeyLocation::Master(name) => println!("node  the master {name:?} of the sentinels"),
    }
    let Some(nodes) = args.nodes else {
        return Ok(ExitCode::SUCCESS);
    };
    let before = topology::nodes(store, redis)?;
    if before.is_empty() {
        bail!("--nodes is about redis+ring://; in a cluster slots move as redis-cli --cluster reshard is told");
    }
    let after = nodes.split(',').map(node).collect::<anyhow::Result<Vec<_>>>()?;
    moves(shard, &before, &after);
    Ok(ExitCode::SUCCESS)
}

/// `name` or `name*weight`.
fn node(text: &str) -> anyhow::Result<(String, u32)> {
    let (name, weight) = text.split_once('*').unwrap_or((text, "1"));
    let weight = weight.parse().ok().filter(|weight| *weight > 0);
    let weight = weight.filter(|_| !name.is_empty()).with_context(|| format!("{text:?} is not NAME or NAME*WEIGHT"))?;
    Ok((name.to_owned(), weight))
}

/// Prints what would become of the shard, and of many others.
fn moves(shard: &str, before: &[(String, u32)], after: &[(String, u32)]) {
    let ring = |nodes: &[(String, u32)]| Ring::new(nodes.iter().map(|(name, weight)| (name.as_str(), *weight)));
    let (old, new) = (ring(before), ring(after));
    let name = |nodes: &[(String, u32)], ring: &Ring, shard: &str| {
        ring.node_of(shard.as_bytes()).map(|place| nodes[place].0.clone()).unwrap_or_default()
    };
    let (from, to) = (name(before, &old, shard), name(after, &new, shard));
    println!("then  {}", if from == to { format!("stays on {from}") } else { format!("moves from {from} to {to}") });
    let mut shares: BTreeMap<String, [usize; 2]> = BTreeMap::new();
    let mut moved = 0;
    for number in 0..SAMPLE {
        let shard = format!("sample|{number}");
        let (from, to) = (name(before, &old, &shard), name(after, &new, &shard));
        moved += usize::from(from != to);
        shares.entry(from).or_default()[0] += 1;
        shares.entry(to).or_default()[1] += 1;
    }
    let percent = |count: usize| count as f64 * 100.0 / SAMPLE as f64;
    println!("{:.1}% of all shards move", percent(moved));
    for (name, [from, to]) in shares {
        println!("  {name}: {:.1}% now, {:.1}% then", percent(from), percent(to));
    }
}
