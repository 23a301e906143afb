//! Many overrides at once: from CSV, a hundred a call, with progress, and from any line on.

use std::{
    io::{IsTerminal, Write},
    path::PathBuf,
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;
use sluicegate_proto::sluicegate::admin::v1 as api;

use super::{
    client::{Client, is_passing},
    open, parse,
};
use crate::engine::overrides::{Scope, Target};

/// Overrides of one call.
const CALL: usize = 100;
/// After a call that the store could not answer.
const PAUSES: [Duration; 4] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(3)];

#[derive(Debug, Args)]
pub(super) struct Bulk {
    /// The file; - for standard input.
    file: PathBuf,
    /// Why, for the audit log.
    #[arg(long, default_value = "")]
    reason: String,
    /// Begin with this line: where an import that failed says it stopped.
    #[arg(long, default_value_t = 1)]
    from: u64,
}

/// Says what every line says.
pub(super) async fn import(
    import: &Bulk,
    read: impl Fn(&csv::StringRecord) -> anyhow::Result<api::ChangeRequest>,
    mut client: Client,
) -> anyhow::Result<()> {
    let mut lines = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .comment(Some(b'#'))
        .trim(csv::Trim::All)
        .from_reader(open(&import.file)?);
    let (mut requests, mut first, mut done) = (Vec::new(), 0, 0_u64);
    let mut progress = Progress::new();
    let mut record = csv::StringRecord::new();
    loop {
        let more = lines.read_record(&mut record).context("this is no CSV")?;
        let line = record.position().map_or(0, csv::Position::line);
        if more && line < import.from {
            continue;
        }
        if more {
            if requests.is_empty() {
                first = line;
            }
            let stopped = || format!("line {line} of {}; go on with --from {first}", import.file.display());
            requests.push(read(&record).with_context(stopped)?);
        }
        if requests.len() == CALL || (!more && !requests.is_empty()) {
            let count = requests.len() as u64;
            let reason = import.reason.clone();
            let request =
                api::PutOverridesRequest { changes: std::mem::take(&mut requests), reason, ..Default::default() };
            let file = import.file.display();
            let stopped =
                || format!("lines {first} to {line} of {file}; {done} said before, go on with --from {first}");
            put(&mut client, request).await.with_context(stopped)?;
            done += count;
            progress.show(done);
        }
        if !more {
            progress.end();
            println!("{done} overrides said");
            return Ok(());
        }
    }
}

/// A store that is away for a moment does not end an import: to say the same again changes nothing.
async fn put(client: &mut Client, request: api::PutOverridesRequest) -> anyhow::Result<()> {
    for pause in PAUSES {
        match client.put(request.clone()).await {
            Err(error) if is_passing(&error) => tokio::time::sleep(pause).await,
            result => return result.map(drop),
        }
    }
    client.put(request).await.map(drop)
}

/// `target,word,until`; without a word it is taken back.
pub(super) fn read_overrides(record: &csv::StringRecord) -> anyhow::Result<api::ChangeRequest> {
    let target = record.get(0).unwrap_or_default();
    let until = record.get(2).filter(|until| !until.is_empty()).map(parse::time).transpose()?;
    let target = Some(read_target(target)?);
    if record.len() > 3 {
        bail!("more than target,word,until");
    }
    Ok(api::ChangeRequest {
        target,
        value: record.get(1).unwrap_or_default().to_owned(),
        until,
        expected_version: None,
    })
}

/// `value,plan`.
pub(super) fn read_plans(
    domain: String,
    key: String,
) -> impl Fn(&csv::StringRecord) -> anyhow::Result<api::ChangeRequest> {
    move |record| {
        let [Some(value), Some(plan), None] = [0, 1, 2].map(|place| record.get(place)) else {
            bail!("not value,plan");
        };
        let of = api::PlanTarget { domain: domain.clone(), key: key.clone(), value: value.to_owned() };
        let target = Some(api::Target { target: Some(api::target::Target::Plan(of)) });
        Ok(api::ChangeRequest { target, value: plan.to_owned(), until: None, expected_version: None })
    }
}

fn read_target(name: &str) -> anyhow::Result<api::Target> {
    use api::{scope::Scope as Of, target::Target as Is};
    let target = match Target::parse(name)? {
        Target::Limit { domain, entries } => {
            let entries = entries.into_iter().map(|(key, value)| api::Entry { key, value }).collect();
            Is::Limit(api::Descriptor { domain, entries })
        }
        Target::Plan { domain, key, value } => Is::Plan(api::PlanTarget { domain, key, value }),
        Target::Switch(scope) => {
            let scope = match scope {
                Scope::Rule { domain, rule } => Of::Rule(api::RuleScope { domain, rule }),
                Scope::Algorithm(kind) => Of::Algorithm(kind),
                Scope::Domain(domain) => Of::Domain(domain),
                Scope::Everything => Of::Everything(true),
            };
            Is::Switch(api::Scope { scope: Some(scope) })
        }
        Target::Rules(_) => bail!("{name}: rules are uploaded, promoted and rolled back by `ctl candidate`"),
    };
    Ok(api::Target { target: Some(target) })
}

/// Writes all overrides whose names begin so, as `import` reads them.
pub(super) async fn export(prefix: &str, mut client: Client) -> anyhow::Result<()> {
    let mut lines = csv::Writer::from_writer(std::io::stdout().lock());
    let mut page_token = String::new();
    loop {
        let page = client.page(prefix, page_token).await?;
        let is_rules = |it: &&api::Override| {
            matches!(it.target, Some(api::Target { target: Some(api::target::Target::Rules(_)) }))
        };
        for entry in page.overrides.iter().filter(|it| !is_rules(it)) {
            let until = entry.until.map(super::print::time).unwrap_or_default();
            lines.write_record([&parse::target_name(entry.target.as_ref()), &entry.value, &until])?;
        }
        lines.flush()?;
        if page.next_page_token.is_empty() {
            return Ok(());
        }
        page_token = page.next_page_token;
    }
}

/// How far it is, where somebody looks.
struct Progress {
    started: std::time::Instant,
    shows: bool,
}

impl Progress {
    fn new() -> Self {
        Self { started: std::time::Instant::now(), shows: std::io::stderr().is_terminal() }
    }

    fn show(&mut self, done: u64) {
        if self.shows {
            let rate = done as f64 / self.started.elapsed().as_secs_f64().max(0.001);
            eprint!("\r{done} said, {rate:.0} a second");
            let _ = std::io::stderr().flush();
        }
    }

    fn end(&self) {
        if self.shows {
            eprintln!();
        }
    }
}
