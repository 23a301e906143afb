//! Rules on their way into force: tried out on a share of the traffic, promoted, and rolled back.
//!
//! A set of rules is kept in the store under its digest, and overrides say what it is for; so all instances try the same rules
//! and change over within a second. A directory of candidates (`rules.candidate_dir`) is this instance's own, until it is promoted.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use opentelemetry::metrics::Meter;
use sha2::{Digest, Sha256};
use tokio::time::interval;

use super::{
    Clock, OverrideSync,
    compile_thread::run_on_compile_thread,
    overrides::{ChangeError, ChangeInfo, ChangeRequest},
    reload::{FileFilter, Fingerprint, LoadError, Reloader, Source, fingerprint},
};
use crate::{
    debounce::Debounce,
    engine::{
        Candidate, Resources,
        overrides::{RuleSetSlot, Target},
    },
    rules::{self, Diagnostic, SourceFile},
    store::overrides::OverrideStoreError,
};

/// Between two looks.
const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Between two looks whether the store still has what the overrides name.
const RETENTION: Duration = Duration::from_secs(5);
/// The largest set of rules that can be uploaded, in bytes.
const MAX_BYTES: usize = 512 * 1_024;
/// What stands in a slot for the rules of each instance's directory.
const DIRECTORY: &str = "directory";

/// Why rules have not been tried, promoted or rolled back.
#[derive(Debug, thiserror::Error)]
pub enum CandidateError {
    /// What is wrong with them.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// There are none.
    #[error("there are no candidate rules")]
    None,
    /// There were none before.
    #[error("no other rules were in force before")]
    NoPrevious,
    /// They are too large, or none.
    #[error("a set of rules has at least one file, and {MAX_BYTES} bytes at most")]
    Size,
    /// A share of what?
    #[error("the share of the traffic is above 0 and at most 1")]
    Share,
    /// The overrides.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// The set.
    #[error("the rules cannot be kept now")]
    Store(#[from] OverrideStoreError),
    /// Another instance knows, or knew.
    #[error("the store does not have the rules {0}")]
    Lost(String),
}

/// Tries and promotes rules.
pub struct Candidates {
    overrides: Arc<OverrideSync>,
    reloader: Arc<Reloader>,
    resources: Arc<Resources>,
    clock: Clock,
    workers: usize,
    directory: Option<PathBuf>,
    share: f64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The digest of the promoted set in force here.
    in_force: Option<String>,
    /// What is tried: the override's word, or the directory.
    active: Option<String>,
    /// Why what should be tried is not, or what should be in force.
    error: Option<String>,
    /// The sets that overrides name, for a store that loses them.
    sets: Vec<(String, String)>,
}

impl Candidates {
    /// Nothing is tried yet. `share`: of the traffic, for those of a directory.
    #[must_use]
    pub fn new(
        overrides: Arc<OverrideSync>,
        reloader: Arc<Reloader>,
        resources: Arc<Resources>,
        clock: Clock,
        workers: usize,
        (directory, share): (Option<PathBuf>, f64),
    ) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { overrides: overrides, reloader, resources, clock, workers, directory, share, state })
    }

    /// Follows the overrides and the directory, for ever.
    pub async fn follow(self: Arc<Self>) {
        let look = || self.directory.as_deref().map(|directory| fingerprint(directory, FileFilter::Yaml));
        // What is there at the start is new.
        let mut settled: Debounce<Option<Fingerprint>> = Debounce::new(None);
        let mut tick = interval(POLL_INTERVAL);
        let mut kept = Instant::now();
        loop {
            tick.tick().await;
            let changed = settled.poll(look());
            self.poll(changed).await;
            if kept.elapsed() >= RETENTION {
                kept = Instant::now();
                self.keep().await;
            }
        }
    }

    /// Puts in force, or on trial, what the overrides say now.
    pub async fn poll(&self, directory_changed: bool) {
        let (in_force, candidate) = {
            let snapshot = self.reloader.rules().load();
            let word = |slot| snapshot.overrides().rules(slot).map(|it| it.value.to_string());
            (word(RuleSetSlot::InForce).filter(|word| word != DIRECTORY), word(RuleSetSlot::Candidate))
        };
        if self.state().in_force != in_force {
            self.noting(self.put_in_force(in_force).await);
        }
        let tried = self.state().active.clone();
        match candidate {
            Some(word) if tried.as_ref() != Some(&word) => {
                let result = self.start_uploaded(&word).await;
                if result.is_ok() {
                    self.state().active = Some(word);
                }
                self.noting(result);
            }
            Some(_) => {}
            None => match &self.directory {
                Some(directory) if directory_changed || tried.as_deref() != Some(DIRECTORY) => {
                    let result = self.start_directory(directory.clone()).await;
                    self.state().active = Some(DIRECTORY.to_owned());
                    self.noting(result);
                }
                Some(_) => {}
                None if tried.is_some() => {
                    self.reloader.set_candidate(None);
                    self.state().active = None;
                }
                None => {}
            },
        }
    }

    async fn put_in_force(&self, digest: Option<String>) -> Result<(), CandidateError> {
        let files = match &digest {
            Some(digest) => Some(self.fetch(digest).await?),
            None => None,
        };
        let reloader = Arc::clone(&self.reloader);
        let _ = run_on_compile_thread(move || reloader.promote(files)).await;
        self.state().in_force = digest;
        Ok(())
    }

    async fn start_uploaded(&self, word: &str) -> Result<(), CandidateError> {
        let (digest, share) = read_value(word).ok_or_else(|| CandidateError::Lost(word.to_owned()))?;
        let files = self.fetch(digest).await?;
        self.start(files, share).await
    }

    async fn start_directory(&self, directory: PathBuf) -> Result<(), CandidateError> {
        if !directory.exists() {
            self.reloader.set_candidate(None);
            return Ok(());
        }
        let read = run_on_compile_thread(move || Source::directory(directory).read()).await;
        let files = read.map_err(|_| CandidateError::None)??;
        if files.is_empty() {
            self.reloader.set_candidate(None);
            return Ok(());
        }
        self.start(files, self.share).await
    }

    async fn start(&self, files: Vec<SourceFile>, share: f64) -> Result<(), CandidateError> {
        let options = self.reloader.options();
        let compiled = run_on_compile_thread(move || rules::compile(&files, options)).await;
        let (rules, _) = compiled.map_err(|_| CandidateError::None)?.map_err(LoadError::Invalid)?;
        let count = rules.rules().len();
        let trial = Candidate::new(rules, share, self.clock.now(), self.workers, &self.resources);
        self.reloader.set_candidate(Some(trial));
        tracing::info!(rules = count, share, "candidate rules are tried out");
        Ok(())
    }

    /// Compiles rules and tries them out, on all instances; with what should be looked at.
    pub async fn upload(
        &self,
        files: Vec<SourceFile>,
        share: f64,
        info: ChangeInfo,
    ) -> Result<Vec<Diagnostic>, CandidateError> {
        if !(share > 0.0 && share <= 1.0) {
            return Err(CandidateError::Share);
        }
        let (digest, text) = write_set(&files)?;
        let options = self.reloader.options();
        let compiled = run_on_compile_thread(move || rules::compile(&files, options)).await;
        let (_, warnings) = compiled.map_err(|_| CandidateError::None)?.map_err(LoadError::Invalid)?;
        self.overrides.store().put_rule_set(&digest, &text).await?;
        self.put(&[(RuleSetSlot::Candidate, Some(format!("{digest} {share}")))], info).await?;
        Ok(warnings)
    }

    /// Tries nothing any more, or again what the directory has.
    pub async fn drop_candidate(&self, info: ChangeInfo) -> Result<(), CandidateError> {
        if self.value(RuleSetSlot::Candidate).is_none() {
            return Err(CandidateError::None);
        }
        self.put(&[(RuleSetSlot::Candidate, None)], info).await
    }

    /// Puts the candidate in force, on all instances.
    pub async fn promote(&self, info: ChangeInfo) -> Result<(), CandidateError> {
        let digest = match (self.value(RuleSetSlot::Candidate), &self.directory) {
            (Some(word), _) => read_value(&word).ok_or(CandidateError::None)?.0.to_owned(),
            (None, Some(directory)) => {
                let files = Source::directory(directory.clone()).read()?;
                rules::compile(&files, self.reloader.options()).map_err(LoadError::Invalid)?;
                let (digest, text) = write_set(&files)?;
                self.overrides.store().put_rule_set(&digest, &text).await?;
                digest
            }
            (None, None) => return Err(CandidateError::None),
        };
        let before = self.value(RuleSetSlot::InForce).unwrap_or_else(|| DIRECTORY.to_owned());
        let changes = [
            (RuleSetSlot::InForce, Some(digest)),
            (RuleSetSlot::Previous, Some(before)),
            (RuleSetSlot::Candidate, None),
        ];
        self.put(&changes, info).await
    }

    /// Puts in force what was before; what is now can be brought back the same way.
    pub async fn rollback(&self, info: ChangeInfo) -> Result<(), CandidateError> {
        let before = self.value(RuleSetSlot::Previous).ok_or(CandidateError::NoPrevious)?;
        let now = self.value(RuleSetSlot::InForce).unwrap_or_else(|| DIRECTORY.to_owned());
        self.put(&[(RuleSetSlot::InForce, Some(before)), (RuleSetSlot::Previous, Some(now))], info).await
    }

    /// What should be tried or in force, and cannot be.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.state().error.clone()
    }

    /// Shows what the candidate would do to the meter.
    pub fn observe(&self, meter: &Meter) {
        let reloader = Arc::clone(&self.reloader);
        Candidate::observe_metrics(move || reloader.rules().load().candidate().cloned(), meter);
    }

    async fn put(&self, changes: &[(RuleSetSlot, Option<String>)], info: ChangeInfo) -> Result<(), CandidateError> {
        let before = self.digests();
        let request = |(slot, word): &(RuleSetSlot, Option<String>)| ChangeRequest {
            target: Target::Rules(*slot),
            value: word.clone(),
            until: None,
            expected: None,
        };
        let requests: Vec<ChangeRequest> = changes.iter().map(request).collect();
        self.overrides.change(&requests, info).await?;
        let after = self.digests();
        for digest in before.iter().filter(|digest| !after.contains(digest)) {
            // What nobody names any more is of no use; if it stays, nothing is lost.
            let _ = self.overrides.store().delete_rule_set(digest).await;
            self.state().sets.retain(|(kept, _)| kept != digest);
        }
        self.poll(false).await;
        Ok(())
    }

    fn value(&self, slot: RuleSetSlot) -> Option<String> {
        self.reloader.rules().load().overrides().rules(slot).map(|it| it.value.to_string())
    }

    fn digests(&self) -> Vec<String> {
        let words = [RuleSetSlot::Candidate, RuleSetSlot::InForce, RuleSetSlot::Previous]
            .into_iter()
            .filter_map(|slot| self.value(slot));
        let digest = |word: String| word.split(' ').next().map(str::to_owned);
        words.filter_map(digest).filter(|digest| digest != DIRECTORY).collect()
    }

    async fn fetch(&self, digest: &str) -> Result<Vec<SourceFile>, CandidateError> {
        let text = self.overrides.store().get_rule_set(digest).await?;
        let text = text.ok_or_else(|| CandidateError::Lost(digest.to_owned()))?;
        let files = read_set(&text).ok_or_else(|| CandidateError::Lost(digest.to_owned()))?;
        let mut state = self.state();
        if !state.sets.iter().any(|(kept, _)| kept == digest) {
            state.sets.push((digest.to_owned(), text));
        }
        Ok(files)
    }

    /// Brings sets back that the store has lost.
    async fn keep(&self) {
        let named = self.digests();
        let sets: Vec<_> = {
            let mut state = self.state();
            state.sets.retain(|(digest, _)| named.contains(digest));
            state.sets.clone()
        };
        for (digest, text) in sets {
            if let Ok(None) = self.overrides.store().get_rule_set(&digest).await
                && self.overrides.store().put_rule_set(&digest, &text).await.is_ok()
            {
                tracing::warn!(digest, "the store had lost a set of rules, and has it again");
            }
        }
    }

    fn noting(&self, result: Result<(), CandidateError>) {
        let error = result.err().map(|error| crate::errors::chain(&error));
        let mut state = self.state();
        if let Some(error) = error.as_ref().filter(|error| state.error.as_ref() != Some(error)) {
            tracing::error!("the candidate rules cannot be used:\n{error}");
        }
        state.error = error;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The digest, and the share.
fn read_value(word: &str) -> Option<(&str, f64)> {
    let (digest, share) = word.split_once(' ')?;
    Some((digest, share.parse().ok()?))
}

fn write_set(files: &[SourceFile]) -> Result<(String, String), CandidateError> {
    let pairs: Vec<(&str, &str)> = files.iter().map(|file| (file.name.as_str(), file.text.as_str())).collect();
    let text = serde_json::to_string(&pairs).unwrap_or_default();
    if files.is_empty() || text.len() > MAX_BYTES {
        return Err(CandidateError::Size);
    }
    let digest = Sha256::digest(text.as_bytes());
    let digest = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok((digest, text))
}

fn read_set(text: &str) -> Option<Vec<SourceFile>> {
    let pairs: Vec<(String, String)> = serde_json::from_str(text).ok()?;
    Some(pairs.into_iter().map(|(name, text)| SourceFile { name, text }).collect())
}
