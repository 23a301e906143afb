//! Import of overrides from CSV, with 100 overrides per call, progress output and resumption at any line; and export.

use std::{
    io::{self, IsTerminal, Write},
    time::{Duration, SystemTime},
};

use anyhow::{Context, bail};
use prost_types::Timestamp;
use sluicegate_proto::sluicegate::admin::v1 as api;

use super::{
    args::ImportArgs,
    client::{Client, is_retryable},
    open, parse,
};

/// Number of overrides that are set by one call.
const OVERRIDES_PER_CALL: usize = 100;
/// Maximum number of warnings that an import prints.
const MAX_PRINTED_WARNINGS: usize = 20;
/// Pauses before retries of a call that failed because the store or the instance is unavailable.
const RETRY_PAUSES: [Duration; 4] =
    [Duration::from_millis(50), Duration::from_millis(200), Duration::from_secs(1), Duration::from_secs(3)];

/// Sets the override of each line. Lines with an end in the past are skipped, and planned overrides with a beginning in the
/// past are set immediately.
pub(super) async fn import(
    import: &ImportArgs,
    reject_unknown_names: bool,
    read: impl Fn(&csv::StringRecord) -> anyhow::Result<api::ChangeRequest>,
    client: Client,
) -> anyhow::Result<()> {
    let mut lines = csv::ReaderBuilder::new()
        .has_headers(false)
        .flexible(true)
        .comment(Some(b'#'))
        .trim(csv::Trim::All)
        .from_reader(open(&import.file)?);
    let mut batch = Batch::new(import, reject_unknown_names, client);
    let mut ended = 0_u64;
    let mut record = csv::StringRecord::new();
    while lines.read_record(&mut record).context("the file is not valid CSV")? {
        let line = record.position().map(csv::Position::line).unwrap_or_default();
        if line < import.from {
            continue;
        }
        let first_line = batch.first_line(line);
        let request = read(&record)
            .with_context(|| format!("line {line} of {}; continue with --from {first_line}", import.file.display()))?;
        if has_ended(&request) {
            ended += 1;
            continue;
        }
        if has_begun(&request) {
            batch.begun.push(Line { number: line, request });
            continue;
        }
        batch.add(Line { number: line, request }).await?;
    }
    batch.send().await?;
    // They replace the overrides that their targets had before.
    for line in std::mem::take(&mut batch.begun) {
        batch.add(line.begin()).await?;
    }
    batch.send().await?;
    batch.progress.end();
    batch.warnings.print_rest();
    if ended > 0 {
        eprintln!("{ended} overrides skipped: their end has passed");
    }
    println!("{} overrides set", batch.done);
    Ok(())
}

/// A line of the file.
struct Line {
    number: u64,
    request: api::ChangeRequest,
}

impl Line {
    /// Returns the line with a request to set its planned override immediately.
    fn begin(self) -> Self {
        let target = self.request.target.as_ref().and_then(parse::begun);
        let request = api::ChangeRequest { target: Some(api::Target { target }), ..self.request };
        Self { request, ..self }
    }
}

/// The overrides of the next call.
struct Batch<'i> {
    import: &'i ImportArgs,
    reject_unknown_names: bool,
    client: Client,
    requests: Vec<api::ChangeRequest>,
    /// Numbers of the first and the last line of the call.
    first_line: u64,
    last_line: u64,
    /// Planned overrides with a beginning in the past, which are set after all others.
    begun: Vec<Line>,
    /// Number of overrides that were set.
    done: u64,
    warnings: Warnings,
    progress: Progress,
}

impl<'i> Batch<'i> {
    fn new(import: &'i ImportArgs, reject_unknown_names: bool, client: Client) -> Self {
        Self {
            import,
            reject_unknown_names,
            client,
            requests: Vec::new(),
            first_line: 0,
            last_line: 0,
            begun: Vec::new(),
            done: 0,
            warnings: Warnings::default(),
            progress: Progress::new(),
        }
    }

    /// Returns the first line that is not set yet, up to this one.
    fn first_line(&self, line: u64) -> u64 {
        let first_line = if self.requests.is_empty() { line } else { self.first_line };
        match self.begun.first() {
            Some(begun) => first_line.min(begun.number),
            None => first_line,
        }
    }

    /// Adds a line, and sends the call when it is full. A call can change a target once.
    async fn add(&mut self, line: Line) -> anyhow::Result<()> {
        if self.requests.iter().any(|other| other.target == line.request.target) {
            self.send().await?;
        }
        if self.requests.is_empty() {
            self.first_line = line.number;
        }
        self.last_line = line.number;
        self.requests.push(line.request);
        if self.requests.len() == OVERRIDES_PER_CALL {
            self.send().await?;
        }
        Ok(())
    }

    /// Sets the overrides of the batch, and empties it.
    async fn send(&mut self) -> anyhow::Result<()> {
        if self.requests.is_empty() {
            return Ok(());
        }
        let count = self.requests.len() as u64;
        let next_line = self.first_line(self.last_line);
        let request = api::PutOverridesRequest {
            changes: std::mem::take(&mut self.requests),
            reason: self.import.reason.reason.clone(),
            reject_unknown_names: self.reject_unknown_names,
            ..api::PutOverridesRequest::default()
        };
        let file = self.import.file.display();
        let (first_line, last_line, done) = (self.first_line, self.last_line, self.done);
        let response = put_with_retries(&mut self.client, request).await.with_context(|| {
            format!(
                "lines {first_line} to {last_line} of {file}; {done} overrides set, continue with --from {next_line}"
            )
        })?;
        self.warnings.print(&response.warnings);
        self.done += count;
        self.progress.show(self.done);
        Ok(())
    }
}

/// Sets overrides and retries while the store is unavailable. Setting the same overrides again changes nothing.
async fn put_with_retries(
    client: &mut Client,
    request: api::PutOverridesRequest,
) -> anyhow::Result<api::PutOverridesResponse> {
    for pause in RETRY_PAUSES {
        match client.put(request.clone()).await {
            Err(error) if is_retryable(&error) => tokio::time::sleep(pause).await,
            result => return result,
        }
    }
    client.put(request).await
}

/// Returns whether a request sets an override with an end in the past.
fn has_ended(request: &api::ChangeRequest) -> bool {
    !request.value.is_empty() && request.until.is_some_and(has_passed)
}

/// Returns whether a request sets a planned override with a beginning in the past.
fn has_begun(request: &api::ChangeRequest) -> bool {
    !request.value.is_empty() && parse::beginning_of(request.target.as_ref()).is_some_and(has_passed)
}

#[allow(clippy::disallowed_methods, reason = "the times of an override are wall clock times")]
fn has_passed(time: Timestamp) -> bool {
    SystemTime::try_from(time).is_ok_and(|time| time <= SystemTime::now())
}

/// Reads a line of `target,value,until`. Without a value, the override is removed.
pub(super) fn read_overrides(record: &csv::StringRecord) -> anyhow::Result<api::ChangeRequest> {
    let target = record.get(0).unwrap_or_default();
    let until = record.get(2).filter(|until| !until.is_empty()).map(parse::time).transpose()?;
    let target = Some(parse::read_target(target)?);
    if record.len() > 3 {
        bail!("a line must have at most three fields: target,value,until");
    }
    Ok(api::ChangeRequest {
        target,
        value: record.get(1).unwrap_or_default().to_owned(),
        until,
        expected_version: None,
    })
}

/// Returns a function that reads a line of `value,plan`.
pub(super) fn read_plans(
    domain: String,
    key: String,
) -> impl Fn(&csv::StringRecord) -> anyhow::Result<api::ChangeRequest> {
    move |record| {
        let [Some(value), Some(plan), None] = [0, 1, 2].map(|index| record.get(index)) else {
            bail!("a line must have two fields: value,plan");
        };
        let plan_target = api::PlanTarget { domain: domain.clone(), key: key.clone(), value: value.to_owned() };
        let target = Some(api::Target { target: Some(api::target::Target::Plan(plan_target)) });
        Ok(api::ChangeRequest { target, value: plan.to_owned(), until: None, expected_version: None })
    }
}

/// Prints the overrides of targets that begin with `prefix`, in the format that `import` reads.
pub(super) async fn export(prefix: &str, mut client: Client) -> anyhow::Result<()> {
    let mut page_token = String::new();
    loop {
        let page = client.page(prefix, page_token).await?;
        let mut lines = csv::Writer::from_writer(Vec::new());
        for entry in &page.overrides {
            if matches!(entry.target, Some(api::Target { target: Some(api::target::Target::Rules(_)) })) {
                continue;
            }
            let until = entry.until.map(parse::format_time).unwrap_or_default();
            lines.write_record([&parse::target_name(entry.target.as_ref()), &entry.value, &until])?;
        }
        io::stdout().write_all(&lines.into_inner().map_err(csv::IntoInnerError::into_error)?)?;
        if page.next_page_token.is_empty() {
            return Ok(());
        }
        page_token = page.next_page_token;
    }
}

/// Warnings of an import on standard error. Only the first are printed.
#[derive(Default)]
struct Warnings {
    count: usize,
}

impl Warnings {
    fn print(&mut self, warnings: &[String]) {
        for warning in warnings {
            self.count += 1;
            if self.count <= MAX_PRINTED_WARNINGS {
                eprintln!("warning: {warning}");
            }
        }
    }

    fn print_rest(&self) {
        if self.count > MAX_PRINTED_WARNINGS {
            eprintln!("warning: {} more overrides with unknown names", self.count - MAX_PRINTED_WARNINGS);
        }
    }
}

/// Progress output on standard error, if it is a terminal.
struct Progress {
    started: std::time::Instant,
    is_terminal: bool,
}

impl Progress {
    fn new() -> Self {
        Self { started: std::time::Instant::now(), is_terminal: io::stderr().is_terminal() }
    }

    fn show(&mut self, done: u64) {
        if self.is_terminal {
            let rate = done as f64 / self.started.elapsed().as_secs_f64().max(0.001);
            eprint!("\r{done} set, {rate:.0} per second");
            let _ = io::stderr().flush();
        }
    }

    fn end(&self) {
        if self.is_terminal {
            eprintln!();
        }
    }
}
