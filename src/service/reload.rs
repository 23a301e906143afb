//! [`RulesInForce`]: reads rules from their source, compiles them, and swaps them in. If new rules are invalid, the
//! previous rules stay in force.
//!
//! The rules are those of promoted candidate rules ([`RulesInForce::promote`], by operators) if there are any, else those
//! that a control plane pushes ([`RulesInForce::push`]), else those of the directory. Overrides and candidate rules are
//! layers above them.
//!
//! The directory is polled four times a second. It is read when two consecutive polls agree, so a file that an editor
//! writes in two steps is not read between them. A poll costs a `stat` per file. It also detects changes that file
//! notifications miss: symlinks that are swapped anywhere in the path (Kubernetes' `ConfigMap`s), and changes on
//! network file systems.

use std::{sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use super::{Clock, compile_thread::run_on_compile_thread, compressed_files::CompressedFiles};
use crate::{
    algorithm::Micros,
    debounce::Debounce,
    engine::{Candidate, Overrides, Resources, Snapshot, Statistics},
    metrics::{Counter, Meter, Registrar, Totals, WorkerId},
    rules::{
        self, Diagnostic, Options, RuleSet, SourceFile,
        source::{Contents, Fingerprint, LoadError, Source, fingerprint},
    },
};

/// Interval between two polls of the directory.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Delay before replaced rules are dropped. By then no worker reads them, so no worker has to free a large rule set.
const RETIRE_DELAY: Duration = Duration::from_secs(2);

/// State of the rules in force.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// Time at which the rules were loaded, or `None` before the first rules.
    pub loaded_at: Option<Micros>,
    /// The error of a later attempt to load rules, or `None` if there was none.
    pub last_error: Option<String>,
}

/// Everything that stays in force when the rules are replaced.
#[derive(Default)]
struct ActiveLayers {
    overrides: Overrides,
    candidate: Option<Arc<Candidate>>,
    /// Promoted rule files, which replace those of the source.
    promoted: Option<Vec<SourceFile>>,
    /// The last valid files that were pushed.
    pushed: Option<CompressedFiles>,
}

/// Holds the rules in force, and replaces them when their source changes.
pub struct RulesInForce {
    source: Source,
    /// Fingerprint of the directory before it was first read.
    first_fingerprint: Option<Fingerprint>,
    options: Options,
    clock: Clock,
    statistics: Arc<Statistics>,
    resources: Arc<Resources>,
    rules: Arc<ArcSwap<Snapshot>>,
    /// Overrides, candidate rules, and promoted and pushed files. Locked while a snapshot is swapped.
    layers: Mutex<ActiveLayers>,
    status: Mutex<Status>,
    /// Whether rules have ever been loaded.
    loaded: watch::Sender<bool>,
    successes: Counter,
    failures: Counter,
}

impl RulesInForce {
    /// Creates the holder of rules, and loads the first ones unless they are pushed later.
    ///
    /// # Errors
    ///
    /// Returns an error if the rules cannot be read or are invalid.
    pub fn start(
        source: Source,
        options: Options,
        clock: Clock,
        statistics: Arc<Statistics>,
        resources: Arc<Resources>,
    ) -> Result<Arc<Self>, LoadError> {
        let first_fingerprint = match &source {
            Source::Directory(directory, filter) => Some(fingerprint(directory, *filter)),
            Source::BuiltIn(_) | Source::Pushed => None,
        };
        let successes = Counter::new(1);
        let failures = Counter::new(1);
        let (loaded_at, snapshot) = match source {
            Source::Pushed => (None, Snapshot::awaiting()),
            Source::Directory(..) | Source::BuiltIn(_) => {
                let (rules, warnings) = source.read_contents()?.compile(options).map_err(LoadError::Invalid)?;
                warn(&warnings);
                if matches!(source, Source::BuiltIn(_)) {
                    tracing::info!("rules.dir is not set, so the built-in example rules are in force");
                }
                tracing::info!(domains = rules.domains(), rules = rules.rules().len(), "rules loaded");
                successes.add(WorkerId(0), 1);
                (Some(clock.now()), Snapshot::new(rules, &statistics, &resources))
            }
        };
        let status = Status { loaded_at, last_error: None };
        Ok(Arc::new(Self {
            source,
            first_fingerprint,
            options,
            clock,
            statistics,
            resources,
            rules: Arc::new(ArcSwap::from_pointee(snapshot)),
            layers: Mutex::default(),
            loaded: watch::Sender::new(status.loaded_at.is_some()),
            status: Mutex::new(status),
            successes,
            failures,
        }))
    }

    /// Returns the current snapshot, which is replaced whenever rules, overrides or the candidate change.
    #[must_use]
    pub fn snapshot(&self) -> &Arc<ArcSwap<Snapshot>> {
        &self.rules
    }

    /// Puts overrides in force.
    pub fn set_overrides(&self, overrides: Overrides) {
        self.update_layers(|layers| {
            if let Some(candidate) = &layers.candidate {
                candidate.set_overrides(&overrides);
            }
            layers.overrides = overrides;
        });
    }

    /// Replaces the candidate rules. `None` ends their evaluation.
    pub fn set_candidate(&self, candidate: Option<Arc<Candidate>>) {
        self.update_layers(|layers| {
            if let Some(candidate) = &candidate {
                candidate.set_overrides(&layers.overrides);
            }
            layers.candidate = candidate;
        });
    }

    fn update_layers(&self, change: impl FnOnce(&mut ActiveLayers)) {
        let mut layers = self.layers();
        change(&mut layers);
        let snapshot = layers.apply_to(&self.rules.load(), self.clock.now());
        let old = self.rules.swap(Arc::new(snapshot));
        drop(layers);
        retire(old);
    }

    /// Puts promoted files in force in place of the source. `None` puts the source in force again.
    pub fn promote(&self, files: Option<Vec<SourceFile>>) {
        self.layers().promoted = files;
        self.reload();
    }

    /// Puts files in force for [`Source::Pushed`]. While other files are promoted, the pushed files are only stored.
    ///
    /// `locate` replaces the locations in diagnostics by those in the sender's format. Compiling takes long: call this
    /// function on the compile thread.
    ///
    /// # Errors
    ///
    /// Returns an error if the files are invalid. The previous rules stay in force.
    pub fn push(&self, files: &[SourceFile], locate: impl FnOnce(&mut Vec<Diagnostic>)) -> Result<(), LoadError> {
        let pushed = CompressedFiles::new(files);
        let is_known = pushed.is_some() && self.layers().pushed == pushed;
        if is_known && self.status().last_error.is_none() {
            return Ok(());
        }
        let compiled = rules::compile(files, self.options).map_err(|mut diagnostics| {
            locate(&mut diagnostics);
            LoadError::Invalid(diagnostics)
        });
        if compiled.is_ok() {
            let mut layers = self.layers();
            layers.pushed = pushed;
            if layers.promoted.is_some() {
                drop(layers);
                self.status.lock().last_error = None;
                return Ok(());
            }
        }
        self.install(compiled)
    }

    /// Returns whether the rules have at least one domain.
    #[must_use]
    pub fn has_domains(&self) -> bool {
        self.rules.load().rule_set().has_domains()
    }

    /// Waits until rules have been loaded.
    pub async fn wait_until_loaded(&self) {
        let _ = self.loaded.subscribe().wait_for(|loaded| *loaded).await;
    }

    /// Reads the files to load: promoted files, else pushed files, else those of the source.
    fn read_contents(&self) -> Result<Contents, LoadError> {
        let layers = self.layers();
        let files = layers.promoted.clone().or_else(|| layers.pushed.as_ref()?.files());
        drop(layers);
        match files {
            Some(files) => Ok(Contents { files, ..Contents::default() }),
            None => self.source.read_contents(),
        }
    }

    /// Returns the options for compiling rules.
    #[must_use]
    pub const fn options(&self) -> Options {
        self.options
    }

    fn layers(&self) -> MutexGuard<'_, ActiveLayers> {
        self.layers.lock()
    }

    /// Returns when the rules were loaded, and the error of a later attempt.
    #[must_use]
    pub fn status(&self) -> Status {
        self.status.lock().clone()
    }

    /// Polls the directory and reloads the rules when it changes. Never returns if the source is a directory.
    pub async fn follow(self: Arc<Self>) {
        let (Source::Directory(directory, filter), Some(first)) = (&self.source, &self.first_fingerprint) else {
            return;
        };
        let mut debounce = Debounce::new(first.clone());
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            if debounce.poll(fingerprint(directory, *filter)) {
                let this = Arc::clone(&self);
                let _ = run_on_compile_thread(move || this.reload()).await;
            }
        }
    }

    fn reload(&self) {
        let compiled =
            self.read_contents().and_then(|contents| contents.compile(self.options).map_err(LoadError::Invalid));
        // `install` has logged an error and stored it in the status.
        let _ = self.install(compiled);
    }

    /// Puts compiled rules in force. Logs an error and stores it in the status, and the previous rules stay in force.
    fn install(&self, compiled: Result<(RuleSet, Vec<Diagnostic>), LoadError>) -> Result<(), LoadError> {
        let compiled =
            compiled.map(|(rules, warnings)| (Snapshot::new(rules, &self.statistics, &self.resources), warnings));
        let mut status = self.status.lock();
        match compiled {
            Ok((snapshot, warnings)) => {
                warn(&warnings);
                let domains = snapshot.rule_set().domains();
                let rules = snapshot.rule_set().rules().len();
                let layers = self.layers();
                let old = self.rules.swap(Arc::new(layers.apply_to(&snapshot, self.clock.now())));
                drop(layers);
                *status = Status { loaded_at: Some(self.clock.now()), last_error: None };
                self.successes.add(WorkerId(0), 1);
                let first = !self.loaded.send_replace(true);
                tracing::info!(domains, rules, "rules {}", if first { "loaded" } else { "reloaded" });
                drop(status);
                retire(old);
                Ok(())
            }
            Err(error) => {
                let chain = crate::metrics::chain(&error);
                self.failures.add(WorkerId(0), 1);
                let in_force = if *self.loaded.borrow() { "the previous rules stay" } else { "no rules are" };
                tracing::error!("cannot load the changed rules; {in_force} in force:\n{chain}");
                status.last_error = Some(chain);
                Err(error)
            }
        }
    }

    /// Adds the counts to `totals`, under the statsd names of envoyproxy/ratelimit.
    pub fn add_totals(&self, totals: &mut Totals) {
        totals.insert("ratelimit.service.config_load_success".to_owned(), self.successes.get());
        totals.insert("ratelimit.service.config_load_error".to_owned(), self.failures.get());
    }

    /// Registers the metrics of the rules with `meter`, under the names of envoyproxy/ratelimit where it has them.
    pub fn observe(self: &Arc<Self>, meter: &dyn Meter) {
        let registrar = Registrar { meter, source: self };
        registrar.counter(
            "ratelimit_service_config_load_success",
            "Number of times that rules were put in force",
            |this| this.successes.get(),
        );
        registrar.counter(
            "ratelimit_service_config_load_error",
            "Number of times that rules could not be loaded",
            |this| this.failures.get(),
        );
        registrar.gauge("sluicegate_rules", "Number of rules in force", |this| {
            this.rules.load().rule_set().rules().len() as u64
        });
        registrar.gauge(
            "sluicegate_rules_loaded_timestamp_seconds",
            "Unix time at which the rules in force were loaded, in seconds",
            |this| match this.status().loaded_at {
                Some(loaded_at) => loaded_at.floor_secs(),
                None => 0,
            },
        );
    }
}

impl ActiveLayers {
    fn apply_to(&self, rules: &Snapshot, now: Micros) -> Snapshot {
        rules.with(self.overrides.clone(), self.candidate.clone(), now)
    }
}

fn warn(warnings: &[Diagnostic]) {
    for warning in warnings {
        tracing::warn!("{warning}");
    }
}

/// Drops a snapshot on another thread, once no worker reads it any more.
fn retire(old: Arc<Snapshot>) {
    let Ok(runtime) = tokio::runtime::Handle::try_current() else {
        return;
    };
    runtime.spawn(async move {
        tokio::time::sleep(RETIRE_DELAY).await;
        // If only the overrides have changed, the next snapshot shares the rules, and little is freed here.
        if old.shares_rules() {
            let _ = tokio::task::spawn_blocking(move || drop(old)).await;
        } else {
            let _ = run_on_compile_thread(move || drop(old)).await;
        }
    });
}
