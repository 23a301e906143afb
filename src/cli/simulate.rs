//! `sluicegate simulate`: what other rules would have done with recorded traffic.

use std::{
    fs,
    io::{BufRead, BufReader, IsTerminal, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::json;

use crate::{
    replay::{Hits, Replay, RuleHits, Suggestions, page},
    rules::{self, Options, RuleSet},
    service::reload::{LoadError, Source},
    traffic::{self, Reader, access_log::Mapping},
};

/// Messages that go to the engine together.
const BATCH: usize = 1_024;
/// Batches on their way.
const WAITING: usize = 16;
/// Between two looks at how far it is.
const LOOK: Duration = Duration::from_millis(200);
/// Entities that are named for each rule.
const ENTITIES: usize = 10;

#[derive(Debug, Args)]
pub(super) struct SimulateArgs {
    /// Directory of the rules that are tried.
    #[arg(long, value_name = "DIR", required_unless_present = "suggest")]
    rules: Option<PathBuf>,
    /// Directory of the rules before; without it, what was said when the requests were recorded.
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Recorded traffic: files of record.dir, or the directory; with --mapping, access logs of Envoy in JSON.
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    traffic: Vec<PathBuf>,
    /// How the fields of an access log become descriptors, in YAML.
    #[arg(long, value_name = "FILE")]
    mapping: Option<PathBuf>,
    /// Several files may name one domain, as rules.merge_domains has it.
    #[arg(long)]
    merge_domains: bool,
    /// Write a page with pictures.
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Suggest limits for every list of keys in the traffic, and say what each would have refused.
    #[arg(long)]
    suggest: bool,
    /// The result as JSON.
    #[arg(long)]
    json: bool,
}

/// Requests, one after the other, and where each ends.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// How much of all has been read.
    progress: f64,
    /// Lines that are no lines of an access log.
    strange: u64,
}

pub(super) fn run(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let (sender, receiver) = sync_channel(WAITING);
    let reading = start_reading(args, sender)?;
    let started = Instant::now();
    let mut suggestions = args.suggest.then(Suggestions::default);
    let mut replay = match &args.rules {
        Some(rules) => {
            let against = args.against.as_deref().map(|path| compile(path, args)).transpose()?;
            Some(Replay::new(compile(rules, args)?, against))
        }
        None => None,
    };
    let strange = follow(&receiver, replay.as_mut(), suggestions.as_mut())?;
    reading.join().map_err(|_| anyhow::anyhow!("the traffic could not be read"))??;
    if strange > 0 {
        eprintln!("{strange} lines are none of the access log, or have no time, and were left out");
    }
    if let Some(replay) = &replay {
        let seconds = started.elapsed().as_secs_f64();
        eprintln!("{} requests in {seconds:.1} s, {:.0} a second", replay.requests, replay.requests as f64 / seconds);
        match args.json {
            true => println!("{}", as_json(replay)),
            false => print(replay),
        }
        if let Some(path) = &args.html {
            let files: Vec<_> = args.traffic.iter().map(|path| path.display().to_string()).collect();
            let rules = args.rules.as_ref().map_or_else(String::new, |path| path.display().to_string());
            let title = format!("{rules} on {}", files.join(", "));
            fs::write(path, page(replay, &title)).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    if let Some(suggestions) = suggestions {
        suggest(suggestions, args.json);
    }
    Ok(ExitCode::SUCCESS)
}

fn compile(directory: &Path, args: &SimulateArgs) -> anyhow::Result<RuleSet> {
    let files = Source::directory(directory.to_owned()).read()?;
    if files.is_empty() {
        bail!("{} has no *.yaml", directory.display());
    }
    let options = Options { merge_domains: args.merge_domains, ..Options::default() };
    let (rules, warnings) = rules::compile(&files, options).map_err(LoadError::Invalid)?;
    warnings.iter().for_each(|warning| eprintln!("{warning}"));
    Ok(rules)
}

/// On a thread of its own: to decompress is half the work.
fn start_reading(
    args: &SimulateArgs,
    sender: SyncSender<Batch>,
) -> anyhow::Result<thread::JoinHandle<anyhow::Result<()>>> {
    let paths = args.traffic.clone();
    Ok(match &args.mapping {
        None => {
            let reader = Reader::new(&paths)?;
            thread::spawn(move || read_traffic(reader, &sender))
        }
        Some(mapping) => {
            let text = fs::read_to_string(mapping).with_context(|| format!("cannot read {}", mapping.display()))?;
            let mapping = Mapping::read(&text)?;
            thread::spawn(move || read_access_logs(&paths, &mapping, &sender))
        }
    })
}

fn read_traffic(mut reader: Reader, sender: &SyncSender<Batch>) -> anyhow::Result<()> {
    let (mut batch, mut message) = (Batch::default(), Vec::new());
    while reader.next(&mut message)? {
        batch.bytes.extend_from_slice(&message);
        batch.ends.push(batch.bytes.len());
        if batch.ends.len() == BATCH {
            batch.progress = reader.progress();
            if sender.send(std::mem::take(&mut batch)).is_err() {
                return Ok(());
            }
        }
    }
    let _ = sender.send(batch);
    Ok(())
}

fn read_access_logs(paths: &[PathBuf], mapping: &Mapping, sender: &SyncSender<Batch>) -> anyhow::Result<()> {
    let (mut batch, mut read) = (Batch::default(), 0);
    let mut all = 0;
    for path in paths {
        all += fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    }
    for path in paths {
        let file = fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        for line in BufReader::new(file).lines() {
            let line = line.with_context(|| format!("cannot read {}", path.display()))?;
            read += line.len() as u64 + 1;
            match mapping.encode(&line, &mut batch.bytes) {
                Some(true) => batch.ends.push(batch.bytes.len()),
                Some(false) => {}
                None => batch.strange += u64::from(!line.trim().is_empty()),
            }
            if batch.ends.len() == BATCH {
                batch.progress = read as f64 / all.max(1) as f64;
                if sender.send(std::mem::take(&mut batch)).is_err() {
                    return Ok(());
                }
            }
        }
    }
    let _ = sender.send(batch);
    Ok(())
}

/// Asks everything again; how many lines were strange.
fn follow(
    batches: &Receiver<Batch>,
    mut replay: Option<&mut Replay>,
    mut suggestions: Option<&mut Suggestions>,
) -> anyhow::Result<u64> {
    let (mut strange, mut looked) = (0, Instant::now());
    let shows = std::io::stderr().is_terminal();
    while let Ok(batch) = batches.recv() {
        strange += batch.strange;
        let starts = std::iter::once(0).chain(batch.ends.iter().copied());
        let messages = starts.zip(&batch.ends).map(|(start, end)| traffic::decode(&batch.bytes[start..*end]));
        let requests = messages.collect::<Result<Vec<_>, _>>().context("this is not recorded traffic")?;
        if let Some(replay) = &mut replay {
            replay.ask(&requests);
        }
        if let Some(suggestions) = &mut suggestions {
            requests.iter().for_each(|recorded| suggestions.add(recorded));
        }
        if shows && looked.elapsed() >= LOOK {
            looked = Instant::now();
            bar(batch.progress);
        }
    }
    if shows {
        bar(1.0);
        eprintln!();
    }
    Ok(strange)
}

fn bar(progress: f64) {
    let done = (progress.clamp(0.0, 1.0) * 40.0) as usize;
    eprint!("\r[{}{}] {:3.0}%", "#".repeat(done), " ".repeat(40 - done), progress * 100.0);
    let _ = std::io::stderr().flush();
}

/// The rules that were asked, those that change most first, with their names and limits.
fn asked(replay: &Replay) -> Vec<(String, &RuleHits)> {
    let snapshot = replay.rules();
    let name = |id: usize| match snapshot.rules().rules().get(id) {
        Some(rule) => {
            let limit = rule.limit.as_ref().map_or_else(|| "unlimited".to_owned(), ToString::to_string);
            format!("{}: {limit}", rule.labels.join("."))
        }
        None => "(no rule)".to_owned(),
    };
    let mut asked: Vec<_> = replay.of_rules.iter().enumerate().filter(|(_, it)| it.asked > 0).collect();
    asked.sort_by_key(|(_, it)| std::cmp::Reverse((it.hits.newly_denied + it.hits.newly_allowed, it.hits.denied)));
    asked.into_iter().map(|(id, it)| (name(id), it)).collect()
}

fn print(replay: &Replay) {
    let [refused, before] = replay.refused;
    println!("{} requests: {refused} refused, {before} before", replay.requests);
    if replay.unknown > 0 {
        println!("of {} it is not known what was said before; they count as let pass", replay.unknown);
    }
    if replay.skipped > 0 {
        println!("{} without a domain or descriptors were left out", replay.skipped);
    }
    for (name, of_rule) in asked(replay) {
        let Hits { requested: asked, denied: refused, newly_denied: newly_refused, newly_allowed: newly_passed } =
            of_rule.hits;
        println!("\n{name}");
        println!("  {asked} hits, {refused} refused ({newly_refused} newly), {newly_passed} pass newly");
        println!("  {} entities, {} refused", of_rule.entities.len(), of_rule.touched());
        for entity in of_rule.harmed(ENTITIES) {
            println!("    {}: {} of {}", entity.name, entity.hits.denied, entity.hits.requested);
        }
    }
}

fn as_json(replay: &Replay) -> serde_json::Value {
    let hits = |it: Hits| json!({ "asked": it.requested, "refused": it.denied, "newly_refused": it.newly_denied, "newly_passed": it.newly_allowed });
    let rules: Vec<_> = asked(replay)
        .into_iter()
        .map(|(name, of_rule)| {
            let entity = |it: &crate::replay::Entity| json!({ "entity": it.name, "hits": hits(it.hits) });
            let harmed: Vec<_> = of_rule.harmed(ENTITIES).into_iter().map(entity).collect();
            json!({ "rule": name, "hits": hits(of_rule.hits), "entities": of_rule.entities.len(), "touched": of_rule.touched(), "harmed": harmed })
        })
        .collect();
    let [refused, before] = replay.refused;
    json!({ "requests": replay.requests, "refused": refused, "refused_before": before, "unknown_before": replay.unknown, "rules": rules })
}

fn suggest(suggestions: Suggestions, as_json: bool) {
    let all = suggestions.suggest();
    if as_json {
        for it in all {
            let [p50, p90, p99, p999, max] = it.peaks;
            println!(
                "{}",
                json!({
                    "domain": it.domain, "keys": it.keys, "unit": it.unit.name(), "entities": it.entities,
                    "p50": p50, "p90": p90, "p99": p99, "p999": p999, "max": max,
                    "limit": it.limit, "refused": it.refused, "touched": it.touched,
                })
            );
        }
        return;
    }
    let mut last = None;
    for it in all {
        let shape = (it.domain.clone(), it.keys.clone());
        if last.as_ref() != Some(&shape) {
            println!(
                "\n{} {}: {} entities, by what each asks at its busiest",
                it.domain,
                it.keys.join(", "),
                it.entities
            );
        }
        last = Some(shape);
        let [p50, p90, p99, p999, max] = it.peaks;
        println!("  per {}: half of them {p50}, 90% {p90}, 99% {p99}, 99.9% {p999}, all {max} at most", it.unit.name());
        println!(
            "    {}/{} would have refused {:.2}% of all hits, and something of {} entities",
            it.limit,
            it.unit.name(),
            it.refused * 100.0,
            it.touched
        );
    }
}
