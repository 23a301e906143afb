//! Rules that follow their source: read, compile, swap; a bad set keeps the last good one.
//!
//! The directory is looked at four times a second, and taken when two looks in a row agree: an editor that writes a
//! file in two steps is not read half-way. Looking costs a `stat` per file and sees everything that file
//! notifications miss: symlinks swapped anywhere in the path (Kubernetes' ConfigMaps), network file systems.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, SystemTime},
};

use arc_swap::ArcSwap;
use opentelemetry::metrics::Meter;
use tokio::sync::watch;

use super::{Clock, compile_thread::run_on_compile_thread};
use crate::{
    algorithm::Micros,
    debounce::Debounce,
    engine::{Candidate, Overrides, Resources, Snapshot, Statistics},
    metrics::{Counter, Totals, WorkerId, observe_counter, observe_gauge},
    rules::{self, Diagnostic, Options, RuleSet, SourceFile},
};

/// Between two looks at the directory.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// The old rules are dropped after this: no worker still reads them, so none has to take a large set apart.
const RETIRE: Duration = Duration::from_secs(2);

/// Why a directory's rules are not in force.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// The directory or one of its files.
    #[error("cannot read the rules in {path}")]
    Read {
        /// What was read.
        path: PathBuf,
        /// What went wrong.
        source: io::Error,
    },
    /// What the files say; every mistake, and the warnings.
    #[error("{}", list(.0))]
    Invalid(Vec<Diagnostic>),
}

fn list(problems: &[Diagnostic]) -> String {
    problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

/// Where rules come from.
#[derive(Clone, Debug)]
pub enum Source {
    /// Files of a directory.
    Directory(PathBuf, FileFilter),
    /// Files that are part of the program.
    BuiltIn(Vec<SourceFile>),
    /// Whatever [`Reloader::feed`] brings; nothing until then.
    Pushed,
}

/// Of a directory's files; those whose names begin with a dot are never looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileFilter {
    /// `*.yaml` and `*.yml`.
    Yaml,
    /// Whatever their names end with, as the peer reads them.
    All,
}

impl Source {
    /// The rule files of a directory, by their usual names.
    #[must_use]
    pub const fn directory(path: PathBuf) -> Self {
        Self::Directory(path, FileFilter::Yaml)
    }

    /// The files, in the order of their names.
    pub fn read(&self) -> Result<Vec<SourceFile>, LoadError> {
        match self {
            Self::BuiltIn(files) => Ok(files.clone()),
            Self::Pushed => Ok(Vec::new()),
            Self::Directory(directory, which) => {
                let read = |path: PathBuf| match fs::read_to_string(&path) {
                    Ok(text) => Ok(SourceFile { name: path.display().to_string(), text }),
                    Err(source) => Err(LoadError::Read { path, source }),
                };
                let error = |source| LoadError::Read { path: directory.clone(), source };
                files(directory, *which).map_err(error)?.into_iter().map(read).collect()
            }
        }
    }
}

/// The rule files of a directory, by name.
fn files(directory: &Path, which: FileFilter) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let hidden = entry.file_name().to_string_lossy().starts_with('.');
        let path = entry.path();
        let is_one = which == FileFilter::All || path.extension().is_some_and(|end| end == "yaml" || end == "yml");
        if is_one && !hidden && path.is_file() {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

/// What tells one state of a directory from another, without reading it: through symlinks, the files behind them.
/// An error is a state too: a directory that is gone is a change, and so is its return.
pub(super) type Fingerprint = Result<Vec<(PathBuf, PathBuf, u64, Option<SystemTime>)>, io::ErrorKind>;

pub(super) fn fingerprint(directory: &Path, which: FileFilter) -> Fingerprint {
    let look = |path: PathBuf| {
        let metadata = fs::metadata(&path)?;
        let real = fs::canonicalize(&path)?;
        Ok((path, real, metadata.len(), metadata.modified().ok()))
    };
    let all = files(directory, which).and_then(|paths| paths.into_iter().map(look).collect());
    all.map_err(|error| error.kind())
}

/// What to tell about the rules in force.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// When they were loaded; `None` before the first have come.
    pub loaded_at: Option<Micros>,
    /// Why a later set was refused, if it was.
    pub last_error: Option<String>,
}

/// Files that are there to be compared, and in case they are wanted again: a tenth of their size.
#[derive(PartialEq, Eq)]
struct CompressedFiles(Vec<u8>);

impl CompressedFiles {
    /// `None` should never be; then they are not there.
    fn new(files: &[SourceFile]) -> Option<Self> {
        let files: Vec<_> = files.iter().map(|file| (&file.name, &file.text)).collect();
        zstd::encode_all(&*serde_json::to_vec(&files).ok()?, 1).ok().map(Self)
    }

    fn files(&self) -> Option<Vec<SourceFile>> {
        let files: Vec<(String, String)> = serde_json::from_slice(&zstd::decode_all(&*self.0).ok()?).ok()?;
        Some(files.into_iter().map(|(name, text)| SourceFile { name, text }).collect())
    }
}

/// What stands over the rules, or beside them, whichever they are.
#[derive(Default)]
struct ActiveLayers {
    overrides: Overrides,
    trial: Option<Arc<Candidate>>,
    /// In place of the source.
    promoted: Option<Vec<SourceFile>>,
    /// The last that were fed and could be used.
    fed: Option<CompressedFiles>,
}

/// Keeps the rules current.
pub struct Reloader {
    source: Source,
    /// How the directory looked before it was first read.
    first: Option<Fingerprint>,
    options: Options,
    clock: Clock,
    statistics: Arc<Statistics>,
    resources: Arc<Resources>,
    rules: Arc<ArcSwap<Snapshot>>,
    /// For the next set as well. Held while a set is swapped.
    over: Mutex<ActiveLayers>,
    status: Mutex<Status>,
    /// Whether there have been rules.
    loaded: watch::Sender<bool>,
    successes: Counter,
    failures: Counter,
}

impl Reloader {
    /// Loads the first set, if there is one. An error: there is nothing to fall back on.
    pub fn start(
        source: Source,
        options: Options,
        clock: Clock,
        statistics: Arc<Statistics>,
        resources: Arc<Resources>,
    ) -> Result<Arc<Self>, LoadError> {
        let first = match &source {
            Source::Directory(directory, which) => Some(fingerprint(directory, *which)),
            Source::BuiltIn(_) | Source::Pushed => None,
        };
        let (successes, failures) = (Counter::new(1), Counter::new(1));
        let (loaded_at, snapshot) = match source {
            Source::Pushed => (None, Snapshot::awaiting()),
            Source::Directory(..) | Source::BuiltIn(_) => {
                let (rules, warnings) = rules::compile(&source.read()?, options).map_err(LoadError::Invalid)?;
                warn(&warnings);
                let (domains, number) = (rules.domains(), rules.rules().len());
                tracing::info!(domains, rules = number, "rules loaded");
                successes.add(WorkerId(0), 1);
                (Some(clock.now()), Snapshot::new(rules, &statistics, &resources))
            }
        };
        let status = Status { loaded_at, last_error: None };
        Ok(Arc::new(Self {
            source,
            first,
            options,
            clock,
            statistics,
            resources,
            rules: Arc::new(ArcSwap::from_pointee(snapshot)),
            over: Mutex::default(),
            loaded: watch::Sender::new(status.loaded_at.is_some()),
            status: Mutex::new(status),
            successes,
            failures,
        }))
    }

    /// The rules in force, now and later.
    #[must_use]
    pub fn rules(&self) -> &Arc<ArcSwap<Snapshot>> {
        &self.rules
    }

    /// Puts what operators say over them in force.
    pub fn set_overrides(&self, overrides: Overrides) {
        self.change(|over| {
            if let Some(trial) = &over.trial {
                trial.set_overrides(&overrides);
            }
            over.overrides = overrides;
        });
    }

    /// Tries rules out beside them; no others from now on.
    pub fn set_candidate(&self, trial: Option<Arc<Candidate>>) {
        self.change(|over| {
            if let Some(trial) = &trial {
                trial.set_overrides(&over.overrides);
            }
            over.trial = trial;
        });
    }

    fn change(&self, change: impl FnOnce(&mut ActiveLayers)) {
        let mut over = self.over();
        change(&mut over);
        let snapshot = over.above(&self.rules.load(), self.clock.now());
        let old = self.rules.swap(Arc::new(snapshot));
        drop(over);
        retire(old);
    }

    /// Puts these files in force in place of the source, or the source again.
    pub fn promote(&self, files: Option<Vec<SourceFile>>) {
        self.over().promoted = files;
        self.reload();
    }

    /// Puts these files in force, for a source that is fed; but for files that are promoted, which go first. An error: they
    /// cannot be used, and those before stay. `locate` says of problems where they are, for who wrote them.
    /// Takes a while: to be done apart.
    pub fn push(&self, files: &[SourceFile], locate: impl FnOnce(&mut Vec<Diagnostic>)) -> Result<(), LoadError> {
        let packed = CompressedFiles::new(files);
        let is_known = packed.is_some() && self.over().fed == packed;
        if is_known && self.status().last_error.is_none() {
            return Ok(());
        }
        let compiled = rules::compile(files, self.options).map_err(|mut problems| {
            locate(&mut problems);
            LoadError::Invalid(problems)
        });
        if compiled.is_ok() {
            let mut over = self.over();
            over.fed = packed;
            if over.promoted.is_some() {
                drop(over);
                self.status.lock().unwrap_or_else(PoisonError::into_inner).last_error = None;
                return Ok(());
            }
        }
        self.take(compiled)
    }

    /// Whether there are rules for anybody.
    #[must_use]
    pub fn has_domains(&self) -> bool {
        self.rules.load().rules().has_domains()
    }

    /// Until there are rules.
    pub async fn loaded(&self) {
        let _ = self.loaded.subscribe().wait_for(|loaded| *loaded).await;
    }

    /// The files in force, or to be.
    fn source_files(&self) -> Result<Vec<SourceFile>, LoadError> {
        let over = self.over();
        let files = over.promoted.clone().or_else(|| over.fed.as_ref()?.files());
        drop(over);
        files.map_or_else(|| self.source.read(), Ok)
    }

    /// How files become rules.
    #[must_use]
    pub const fn options(&self) -> Options {
        self.options
    }

    fn over(&self) -> MutexGuard<'_, ActiveLayers> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// When they were loaded, and what was wrong with a later set.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Follows the directory for ever.
    pub async fn follow(self: Arc<Self>) {
        let (Source::Directory(directory, which), Some(first)) = (&self.source, &self.first) else {
            return;
        };
        let mut settled = Debounce::new(first.clone());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if settled.poll(fingerprint(directory, *which)) {
                let this = Arc::clone(&self);
                let _ = run_on_compile_thread(move || this.reload()).await;
            }
        }
    }

    fn reload(&self) {
        let compiled =
            self.source_files().and_then(|files| rules::compile(&files, self.options).map_err(LoadError::Invalid));
        // It is told and kept in the status.
        let _ = self.take(compiled);
    }

    /// Puts a set in force, or says why not.
    fn take(&self, compiled: Result<(RuleSet, Vec<Diagnostic>), LoadError>) -> Result<(), LoadError> {
        let compiled =
            compiled.map(|(rules, warnings)| (Snapshot::new(rules, &self.statistics, &self.resources), warnings));
        let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
        match compiled {
            Ok((snapshot, warnings)) => {
                warn(&warnings);
                let (domains, rules) = (snapshot.rules().domains(), snapshot.rules().rules().len());
                let over = self.over();
                let old = self.rules.swap(Arc::new(over.above(&snapshot, self.clock.now())));
                drop(over);
                *status = Status { loaded_at: Some(self.clock.now()), last_error: None };
                self.successes.add(WorkerId(0), 1);
                let first = !self.loaded.send_replace(true);
                tracing::info!(domains, rules, "rules {}", if first { "loaded" } else { "reloaded" });
                drop(status);
                retire(old);
                Ok(())
            }
            Err(error) => {
                let chain = crate::errors::chain(&error);
                self.failures.add(WorkerId(0), 1);
                tracing::error!("the rules changed, but not for the better; those before stay in force:\n{chain}");
                status.last_error = Some(chain);
                Err(error)
            }
        }
    }

    /// Adds it up under the peer's names in statsd.
    pub fn total(&self, totals: &mut Totals) {
        totals.insert("ratelimit.service.config_load_success".to_owned(), self.successes.get());
        totals.insert("ratelimit.service.config_load_error".to_owned(), self.failures.get());
    }

    /// Shows everything to the meter, under the peer's names where it has some.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        observe_counter(meter, "ratelimit_service_config_load_success", "Sets of rules put in force", move || {
            this.successes.get()
        });
        let this = Arc::clone(self);
        observe_counter(meter, "ratelimit_service_config_load_error", "Sets of rules that were refused", move || {
            this.failures.get()
        });
        let this = Arc::clone(self);
        observe_gauge(meter, "sluicegate_rules", "Rules in force", move || {
            this.rules.load().rules().rules().len() as u64
        });
        let this = Arc::clone(self);
        observe_gauge(meter, "sluicegate_rules_loaded_timestamp_seconds", "When the rules were loaded", move || {
            this.status().loaded_at.map_or(0, Micros::floor_secs)
        });
    }
}

impl ActiveLayers {
    fn above(&self, rules: &Snapshot, now: Micros) -> Snapshot {
        rules.with(self.overrides.clone(), self.trial.clone(), now)
    }
}

fn warn(warnings: &[Diagnostic]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

/// Drops a set on a thread of its own, once no worker has it any more.
fn retire(old: Arc<Snapshot>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else {
        return;
    };
    runtime.spawn(async move {
        tokio::time::sleep(RETIRE).await;
        // A change of overrides leaves the rules to the next one.
        let _ = match old.shares_rules() {
            true => tokio::task::spawn_blocking(move || drop(old)).await.map_err(io::Error::other),
            false => run_on_compile_thread(move || drop(old)).await,
        };
    });
}
