//! `sluicegate shard`: shows which server of the store holds a counter, and which shards would move in a changed ring.

use std::{collections::BTreeMap, path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use clap::Args;
use sluicegate_ctl::entries::Entity;
use sluicegate_ctl::println;
use sluicegate_placement::Ring;

use crate::{
    app, engine,
    rules::{Options, source::LoadError},
    service::read_hash_key,
    settings::{Flags, Settings},
    store::{
        memcached,
        redis::topology::{self, KeyLocation},
    },
};

const EXAMPLES: &str = "Examples:
  sluicegate shard shop user=bob --rules rules --store redis+ring://a,b
  sluicegate shard shop user=bob --rules rules --store redis+ring://a,b --nodes a,b,c";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ShardArgs {
    /// Domain of the request; or with the descriptor as `ctl top` prints it, such as 'shop|user=bob'
    domain: String,
    /// Entries of the descriptor
    #[arg(value_name = "KEY=VALUE")]
    entries: Vec<String>,
    /// Directory of rule files, which determine the counter and its shard key
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// Store of the counters: redis+ring://…, redis+cluster://…, redis+sentinel://…, redis://… or memcached://…
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// Settings file in TOML or YAML
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Nodes of a changed ring, with optional weights (a,b,c*2): show which counters would move
    #[arg(long, value_name = "NODES")]
    nodes: Option<String>,
}

/// Number of shards that are sampled to estimate how many a change of the ring moves.
const SAMPLED_SHARDS: usize = 100_000;

pub(super) fn run(args: ShardArgs) -> anyhow::Result<ExitCode> {
    let flags = Flags { rules: args.rules, store: args.store, ..Flags::default() };
    let settings = Settings::load(args.config.as_deref(), None, flags)?;
    let options = Options { merge_domains: settings.rules.merge_domains, ..Options::default() };
    let (set, _) = app::source(&settings).read_contents()?.compile(options).map_err(LoadError::Invalid)?;
    let hash_key = settings.decisions.hash_key_file.as_deref().map(read_hash_key).transpose();
    let hash_key = hash_key.context("cannot read decisions.hash_key_file")?;
    let hash = hash_key.map(|key| engine::ValueHash::new(&key));
    let entity = Entity::read(&args.domain, &args.entries)?;
    let Some((name, per_second)) = engine::counter(&set, &entity.domain, &entity.entries(), hash.as_ref()) else {
        println!("no limit applies, so nothing is counted (sluicegate check DIR --explain shows why)");
        return Ok(ExitCode::SUCCESS);
    };
    if settings.store == "memory" {
        bail!("the store is memory, which is separate in every instance; use --store to name a Redis store");
    }
    if settings.uses_memcached() {
        return locate_in_memcached(&settings, &name, args.nodes.is_some());
    }
    let (store, redis) = match &settings.per_second.store {
        Some(store) if per_second => (store, &settings.per_second.redis),
        _ => (&settings.store, &settings.redis),
    };
    let key = format!("{}{name}", redis.key_prefix);
    println!("key   {key}");
    let shard = name.trim_start_matches('{').split('}').next().unwrap_or_default();
    println!("shard {shard}");
    match topology::locate(store, redis, &key)? {
        KeyLocation::Server(name) => println!("node  {name}"),
        KeyLocation::Slot(slot) => println!("slot  {slot}"),
        KeyLocation::Master(name) => println!("node  master {name:?} of the sentinels"),
    }
    let Some(nodes) = args.nodes else {
        return Ok(ExitCode::SUCCESS);
    };
    let before = topology::ring_nodes(store, redis)?;
    if before.is_empty() {
        bail!("--nodes requires a redis+ring:// store; in a cluster, redis-cli --cluster reshard moves slots");
    }
    let after = nodes.split(',').map(parse_node).collect::<anyhow::Result<Vec<_>>>()?;
    print_moves(shard, &before, &after);
    Ok(ExitCode::SUCCESS)
}

/// Prints the key and the server of a counter in memcached.
fn locate_in_memcached(settings: &Settings, name: &str, has_nodes: bool) -> anyhow::Result<ExitCode> {
    if has_nodes {
        bail!("--nodes requires a redis+ring:// store");
    }
    let location = memcached::locate(&settings.store, &settings.memcached, name)?;
    println!("key   {}", location.key);
    println!("node  {}", location.server);
    Ok(ExitCode::SUCCESS)
}

/// Parses a node as `name` or `name*weight`.
fn parse_node(text: &str) -> anyhow::Result<(String, u32)> {
    let (name, weight) = text.split_once('*').unwrap_or((text, "1"));
    match weight.parse::<u32>() {
        Ok(weight) if weight > 0 && !name.is_empty() => Ok((name.to_owned(), weight)),
        _ => bail!("node {text:?} of --nodes is not NAME or NAME*WEIGHT with a weight of at least 1"),
    }
}

/// Prints whether the shard would move, and the shares of the nodes before and after the change.
fn print_moves(shard: &str, before: &[(String, u32)], after: &[(String, u32)]) {
    let old = ring(before);
    let new = ring(after);
    let from = node_name(before, &old, shard);
    let to = node_name(after, &new, shard);
    println!("after {}", if from == to { format!("stays on {from}") } else { format!("moves from {from} to {to}") });
    let mut shares: BTreeMap<&str, Shares> = BTreeMap::new();
    let mut moved = 0;
    for number in 0..SAMPLED_SHARDS {
        let shard = format!("sample|{number}");
        let from = node_name(before, &old, &shard);
        let to = node_name(after, &new, &shard);
        moved += usize::from(from != to);
        shares.entry(from).or_default().before += 1;
        shares.entry(to).or_default().after += 1;
    }
    println!("{:.1}% of all shards move", percent(moved));
    for (name, Shares { before, after }) in shares {
        println!("  {name}: {:.1}% before, {:.1}% after", percent(before), percent(after));
    }
}

/// Number of sampled shards of one node, before and after the change of the ring.
#[derive(Default)]
struct Shares {
    before: usize,
    after: usize,
}

fn ring(nodes: &[(String, u32)]) -> Ring {
    Ring::new(nodes.iter().map(|(name, weight)| (name.as_str(), *weight)))
}

/// Returns the name of the node that has the shard, or an empty name if the ring has no nodes.
fn node_name<'n>(nodes: &'n [(String, u32)], ring: &Ring, shard: &str) -> &'n str {
    match ring.node_of(shard.as_bytes()) {
        Some(index) => &nodes[index].0,
        None => "",
    }
}

/// Returns a number of sampled shards as a percentage of all of them.
fn percent(shards: usize) -> f64 {
    shards as f64 * 100.0 / SAMPLED_SHARDS as f64
}
