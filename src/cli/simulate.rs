//! `sluicegate simulate`: replays recorded traffic against other rules and suggests limits.

use std::{
    fs,
    io::{BufRead, BufReader, IsTerminal, Read, Write},
    path::{Path, PathBuf},
    process::ExitCode,
    sync::mpsc::{Receiver, SyncSender, sync_channel},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::json;
use sluicegate_ctl::{eprint, eprintln, println};

use crate::{
    engine::Outcomes,
    replay::{Replay, RuleHits, Suggestions, page},
    rules::source::{LoadError, Source},
    rules::{self, Options, Rule, RuleSet},
    traffic::{
        self, Reader, RecordedRequest,
        access_log::{LineError, Mapping, SkippedLines},
    },
};

/// Number of recorded requests that are sent to the engine together.
const BATCH_REQUESTS: usize = 1_024;
/// Maximum number of batches in the queue between the reader and the engine.
const MAX_QUEUED_BATCHES: usize = 16;
/// Interval between two updates of the progress bar.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(200);
/// Maximum number of entities that are listed for each rule.
const MAX_LISTED_ENTITIES: usize = 10;

/// First bytes of a gzip file, as `record.dir` contains.
const GZIP: [u8; 2] = [0x1f, 0x8b];

const EXAMPLES: &str = "Examples:
  sluicegate simulate --rules next --traffic traffic --html page.html
  sluicegate simulate --rules next --against rules --traffic traffic
  sluicegate simulate --suggest --traffic access.log --mapping mapping.yaml";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct SimulateArgs {
    /// Directory of the rules to evaluate
    #[arg(long, value_name = "DIR", required_unless_present = "suggest")]
    rules: Option<PathBuf>,
    /// Directory of the rules to compare with [default: the recorded decisions]
    #[arg(long, value_name = "DIR")]
    against: Option<PathBuf>,
    /// Recorded traffic: files of record.dir, or the directory; with --mapping, access logs of Envoy in JSON
    #[arg(long, value_name = "FILE", required = true, num_args = 1..)]
    traffic: Vec<PathBuf>,
    /// Mapping from the fields of an access log to descriptors, in YAML
    #[arg(long, value_name = "FILE")]
    mapping: Option<PathBuf>,
    /// Allow several files to define one domain, like the setting `rules.merge_domains`
    #[arg(long)]
    merge_domains: bool,
    /// Write an HTML report with charts to this file
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Suggest limits for every combination of keys in the traffic, and report what they would deny
    #[arg(long)]
    suggest: bool,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// Encoded requests, one after the other, and the byte offset at which each ends.
#[derive(Default)]
struct Batch {
    bytes: Vec<u8>,
    ends: Vec<usize>,
    /// Share of the input that has been read, from 0 to 1.
    progress: f64,
    /// Lines that are not valid access log entries.
    skipped: SkippedLines,
}

impl Batch {
    fn decode(&self) -> anyhow::Result<Vec<RecordedRequest<'_>>> {
        let mut requests = Vec::with_capacity(self.ends.len());
        let mut start = 0;
        for &end in &self.ends {
            let request = traffic::decode(&self.bytes[start..end]);
            requests.push(request.context(
                "the files of --traffic do not contain recorded traffic; an access log needs --mapping FILE",
            )?);
            start = end;
        }
        Ok(requests)
    }
}

pub(super) fn run(args: &SimulateArgs) -> anyhow::Result<ExitCode> {
    let (sender, receiver) = sync_channel(MAX_QUEUED_BATCHES);
    let reader_thread = start_reading(args, sender)?;
    let started = Instant::now();
    let mut suggestions = if args.suggest { Some(Suggestions::default()) } else { None };
    let mut replay = match &args.rules {
        Some(rules) => {
            let against = args.against.as_deref().map(|path| compile(path, args)).transpose()?;
            Some(Replay::new(compile(rules, args)?, against))
        }
        None => None,
    };
    let (requests, skipped) = replay_batches(&receiver, replay.as_mut(), suggestions.as_mut())?;
    reader_thread.join().map_err(|_| {
        anyhow::anyhow!("cannot read the traffic because of a bug; please report it with the message above")
    })??;
    for (reason, count) in skipped.by_reason() {
        let lines = if count == 1 { "line" } else { "lines" };
        eprintln!("{count} {lines} skipped: {reason}");
    }
    if requests == 0 {
        match &args.mapping {
            Some(mapping) => bail!(
                "the traffic contains no request: no line is a JSON object with the fields that {} names",
                mapping.display()
            ),
            None => bail!("the traffic contains no request; an access log in JSON needs --mapping FILE"),
        }
    }
    if let Some(replay) = &replay {
        let seconds = started.elapsed().as_secs_f64();
        eprintln!("{} requests in {seconds:.1} s, {:.0} per second", replay.requests, replay.requests as f64 / seconds);
        if args.json {
            println!("{}", to_json(replay));
        } else {
            print(replay);
        }
        if let Some(path) = &args.html {
            let files: Vec<_> = args.traffic.iter().map(|path| path.display().to_string()).collect();
            let rules = match &args.rules {
                Some(path) => path.display().to_string(),
                None => String::new(),
            };
            let title = format!("{rules} on {}", files.join(", "));
            fs::write(path, page(replay, &title)).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    if let Some(suggestions) = suggestions {
        print_suggestions(suggestions, args.json);
    }
    if replay.is_some_and(|replay| !replay.has_match()) {
        bail!("no rule matches a request of the traffic, so nothing was limited; compare their domains and keys");
    }
    Ok(ExitCode::SUCCESS)
}

fn compile(directory: &Path, args: &SimulateArgs) -> anyhow::Result<RuleSet> {
    let files = Source::directory(directory.to_owned()).read()?;
    if files.is_empty() {
        bail!("{} contains no *.yaml file", directory.display());
    }
    let options = Options { merge_domains: args.merge_domains, ..Options::default() };
    let (rules, warnings) = rules::compile(&files, options).map_err(LoadError::Invalid)?;
    for warning in warnings {
        eprintln!("{warning}");
    }
    Ok(rules)
}

/// Starts a thread that reads the traffic, because decompression is half of the work.
fn start_reading(
    args: &SimulateArgs,
    sender: SyncSender<Batch>,
) -> anyhow::Result<thread::JoinHandle<anyhow::Result<()>>> {
    let paths = args.traffic.clone();
    Ok(match &args.mapping {
        None => {
            let reader = Reader::new(&paths)?;
            thread::spawn(move || {
                for path in &paths {
                    check_recorded(path)?;
                }
                read_traffic(reader, &sender)
            })
        }
        Some(mapping) => {
            let text = fs::read_to_string(mapping).with_context(|| format!("cannot read {}", mapping.display()))?;
            let mapping = Mapping::read(&text)?;
            thread::spawn(move || read_access_logs(&paths, &mapping, &sender))
        }
    })
}

/// Rejects a file that is not compressed, such as an access log.
fn check_recorded(path: &Path) -> anyhow::Result<()> {
    if !path.is_file() {
        return Ok(());
    }
    let mut start = Vec::new();
    let file = fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
    file.take(2).read_to_end(&mut start).with_context(|| format!("cannot read {}", path.display()))?;
    if !start.is_empty() && start != GZIP {
        bail!(
            "cannot use {} as recorded traffic: it is not compressed as the files of record.dir are; an access log in \
             JSON needs --mapping FILE",
            path.display()
        );
    }
    Ok(())
}

fn read_traffic(mut reader: Reader, sender: &SyncSender<Batch>) -> anyhow::Result<()> {
    let mut batch = Batch::default();
    let mut message = Vec::new();
    while reader.next(&mut message)? {
        batch.bytes.extend_from_slice(&message);
        batch.ends.push(batch.bytes.len());
        if batch.ends.len() == BATCH_REQUESTS {
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
    let mut batch = Batch::default();
    let mut read = 0;
    let mut all = 0;
    for path in paths {
        all += fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?.len();
    }
    for path in paths {
        let file = fs::File::open(path).with_context(|| format!("cannot read {}", path.display()))?;
        for line in BufReader::new(file).split(b'\n') {
            let line = line.with_context(|| format!("cannot read {}", path.display()))?;
            read += line.len() as u64 + 1;
            let encoded = match std::str::from_utf8(&line) {
                Ok(line) if line.trim().is_empty() => continue,
                Ok(line) => mapping.encode(line, &mut batch.bytes),
                Err(_) => Err(LineError::NotUtf8),
            };
            match encoded {
                Ok(true) => batch.ends.push(batch.bytes.len()),
                Ok(false) => {}
                Err(error) => batch.skipped.add(error),
            }
            if batch.ends.len() == BATCH_REQUESTS {
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

/// Replays all batches, and returns the number of requests and the lines that were skipped.
fn replay_batches(
    batches: &Receiver<Batch>,
    mut replay: Option<&mut Replay>,
    mut suggestions: Option<&mut Suggestions>,
) -> anyhow::Result<(usize, SkippedLines)> {
    let mut skipped = SkippedLines::default();
    let mut count = 0;
    let mut last_shown = Instant::now();
    let is_terminal = std::io::stderr().is_terminal();
    while let Ok(batch) = batches.recv() {
        skipped.merge(&batch.skipped);
        let requests = batch.decode()?;
        count += requests.len();
        if let Some(replay) = &mut replay {
            replay.process(&requests);
        }
        if let Some(suggestions) = &mut suggestions {
            for recorded in &requests {
                suggestions.add(recorded);
            }
        }
        if is_terminal && last_shown.elapsed() >= PROGRESS_INTERVAL {
            last_shown = Instant::now();
            print_progress(batch.progress);
        }
    }
    if is_terminal {
        print_progress(1.0);
        eprintln!();
    }
    Ok((count, skipped))
}

fn print_progress(progress: f64) {
    let done = (progress.clamp(0.0, 1.0) * 40.0) as usize;
    eprint!("\r[{}{}] {:3.0}%", "#".repeat(done), " ".repeat(40 - done), progress * 100.0);
    let _ = std::io::stderr().flush();
}

/// A rule that matched requests.
struct MatchedRule<'r> {
    /// Name and limit of the rule.
    name: String,
    hits: &'r RuleHits,
}

/// Returns the rules that matched requests, in descending order of changed decisions.
fn matched_rules(replay: &Replay) -> Vec<MatchedRule<'_>> {
    let snapshot = replay.rules();
    let mut matched = Vec::new();
    for (id, hits) in replay.by_rule.iter().enumerate() {
        if hits.descriptors > 0 {
            matched.push(MatchedRule { name: name_and_limit(snapshot.rule_set().rules().get(id)), hits });
        }
    }
    matched.sort_by_key(|rule| {
        let Outcomes { denied, newly_denied, newly_allowed, .. } = rule.hits.hits;
        std::cmp::Reverse((newly_denied + newly_allowed, denied))
    });
    matched
}

fn name_and_limit(rule: Option<&Rule>) -> String {
    let Some(rule) = rule else {
        return "(no rule)".to_owned();
    };
    let name = rule.labels.join(".");
    match &rule.limit {
        Some(limit) => format!("{name}: {limit}"),
        None => format!("{name}: unlimited"),
    }
}

fn print(replay: &Replay) {
    let [denied, denied_before] = replay.denied;
    println!("{} requests: {denied} denied, {denied_before} denied before", replay.requests);
    if replay.unknown > 0 {
        println!("the earlier decision of {} requests is unknown; they count as allowed", replay.unknown);
    }
    if replay.skipped > 0 {
        println!("{} requests without a domain or descriptors were skipped", replay.skipped);
    }
    for MatchedRule { name, hits: rule_hits } in matched_rules(replay) {
        let Outcomes { requested, denied, newly_denied, newly_allowed } = rule_hits.hits;
        println!("\n{name}");
        println!("  {requested} hits, {denied} denied ({newly_denied} newly), {newly_allowed} newly allowed");
        println!("  {} entities, {} with denied hits", rule_hits.entities.len(), rule_hits.entities_denied());
        for entity in rule_hits.most_denied(MAX_LISTED_ENTITIES) {
            println!("    {}: {} of {} hits denied", entity.name, entity.hits.denied, entity.hits.requested);
        }
    }
}

fn to_json(replay: &Replay) -> serde_json::Value {
    let rules: Vec<_> = matched_rules(replay).iter().map(rule_to_json).collect();
    let [denied, denied_before] = replay.denied;
    json!({
        "requests": replay.requests, "denied": denied, "denied_before": denied_before,
        "unknown_before": replay.unknown, "rules": rules,
    })
}

fn rule_to_json(MatchedRule { name, hits }: &MatchedRule<'_>) -> serde_json::Value {
    let mut most_denied = Vec::new();
    for entity in hits.most_denied(MAX_LISTED_ENTITIES) {
        most_denied.push(json!({ "entity": entity.name, "hits": hits_to_json(entity.hits) }));
    }
    json!({
        "rule": name, "hits": hits_to_json(hits.hits), "entities": hits.entities.len(),
        "entities_denied": hits.entities_denied(), "most_denied": most_denied,
    })
}

fn hits_to_json(hits: Outcomes) -> serde_json::Value {
    json!({
        "requested": hits.requested, "denied": hits.denied,
        "newly_denied": hits.newly_denied, "newly_allowed": hits.newly_allowed,
    })
}

fn print_suggestions(suggestions: Suggestions, as_json: bool) {
    let suggestions = suggestions.suggest();
    if as_json {
        for suggestion in suggestions {
            let [p50, p90, p99, p999, max] = suggestion.peaks;
            println!(
                "{}",
                json!({
                    "domain": suggestion.domain, "keys": suggestion.keys, "unit": suggestion.unit.name(),
                    "entities": suggestion.entities,
                    "p50": p50, "p90": p90, "p99": p99, "p999": p999, "max": max,
                    "limit": suggestion.limit, "denied_share": suggestion.denied_share,
                    "entities_denied": suggestion.entities_denied,
                })
            );
        }
        return;
    }
    let mut previous = None;
    for suggestion in suggestions {
        let domain_and_keys = (suggestion.domain.clone(), suggestion.keys.clone());
        if previous.as_ref() != Some(&domain_and_keys) {
            println!(
                "\n{} {}: {} entities, by the peak usage of each",
                suggestion.domain,
                suggestion.keys.join(", "),
                suggestion.entities
            );
        }
        previous = Some(domain_and_keys);
        let [p50, p90, p99, p999, max] = suggestion.peaks;
        println!("  per {}: p50 {p50}, p90 {p90}, p99 {p99}, p99.9 {p999}, max {max}", suggestion.unit.name());
        println!(
            "    {}/{} would deny {:.2}% of all hits, affecting {} entities",
            suggestion.limit,
            suggestion.unit.name(),
            suggestion.denied_share * 100.0,
            suggestion.entities_denied
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_logs_are_read_in_batches_with_the_share_that_was_read() {
        let folder = tempfile::tempdir().unwrap();
        let lines = "{\"at\": 1700000000, \"user\": \"a\"}\n".repeat(BATCH_REQUESTS);
        let files = [("a.log", lines.as_str()), ("b.log", lines.as_str()), ("c.log", "\n\nnot json\n\n")];
        let paths = files.map(|(name, text)| {
            let path = folder.path().join(name);
            fs::write(&path, text).unwrap();
            path
        });
        let mapping = Mapping::read("domain: api\ntime: at\ndescriptors:\n- [{ key: user, field: user }]\n").unwrap();
        let (sender, receiver) = sync_channel(MAX_QUEUED_BATCHES);
        let reader_thread = thread::spawn(move || read_access_logs(&paths, &mapping, &sender));
        let skipped = |batch: &Batch| batch.skipped.by_reason().map(|(_, count)| count).sum::<u64>();
        let batch = |batch: Batch| (batch.ends.len(), format!("{:.3}", batch.progress), skipped(&batch));
        let batches: Vec<_> = receiver.iter().map(batch).collect();
        reader_thread.join().unwrap().unwrap();
        let progress = |text: &str| text.to_owned();
        assert_eq!(
            batches,
            [(BATCH_REQUESTS, progress("0.500"), 0), (BATCH_REQUESTS, progress("1.000"), 0), (0, progress("0.000"), 1)]
        );
    }
}
