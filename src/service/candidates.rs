//! [`Candidates`]: evaluates candidate rules on a share of the traffic, promotes them, and rolls a promotion back.
//!
//! An uploaded rule set is stored under its digest. An override for each [`RuleSetSlot`] names the digest of the rule
//! set in that slot. All instances therefore evaluate the same candidate rules, and switch to promoted rules within a
//! second. A directory of candidate rules (`rules.candidate_dir`) concerns only this instance until it is promoted.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::{Mutex, MutexGuard};
use tokio::time::interval;

use super::{
    Clock, OverrideSync,
    compile_thread::run_on_compile_thread,
    overrides::{
        ChangeError, ChangeInfo, ChangeRequest,
        rule_sets::{DIRECTORY, MAX_RULE_SET_BYTES, digest_in, digest_of, parse_candidate},
    },
    reload::RulesInForce,
};
use crate::{
    debounce::Debounce,
    engine::{
        Candidate, Resources, Snapshot,
        overrides::{RuleSetSlot, Target},
    },
    metrics::Meter,
    rules::{
        self, Diagnostic, SourceFile,
        source::{FileFilter, Fingerprint, LoadError, Source, fingerprint},
    },
    store::overrides::OverrideStoreError,
};

/// Interval between two polls of the overrides and the candidate directory.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between two checks that the store still has the rule sets that overrides name.
const RESTORE_INTERVAL: Duration = Duration::from_secs(5);

/// Error returned when rules cannot be evaluated, promoted or rolled back.
#[derive(Debug, thiserror::Error)]
pub enum CandidateError {
    /// The rules cannot be read or are invalid.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// There are no candidate rules.
    #[error("there are no candidate rules")]
    NoCandidate,
    /// No rules have been promoted that could be rolled back.
    #[error("there are no previous rules to roll back to")]
    NoPrevious,
    /// The rule set has no files or is too large.
    #[error("a rule set must have at least one file and at most {MAX_RULE_SET_BYTES} bytes")]
    Size,
    /// The share is not in the valid range.
    #[error("share must be above 0 and at most 1")]
    Share,
    /// The overrides cannot be changed.
    #[error(transparent)]
    Change(#[from] ChangeError),
    /// The rule set cannot be read from the store or written to it.
    #[error("cannot access the stored rule set")]
    Store(#[from] OverrideStoreError),
    /// The thread that compiles rules could not be started, or has ended early.
    #[error("the compile thread has failed")]
    Thread(#[source] std::io::Error),
    /// An override names a rule set that the store does not have. Contains its digest.
    #[error("the store does not have the rule set {0}")]
    MissingRuleSet(String),
    /// The store has another rule set under this digest.
    #[error("the rule set that is stored as {0} does not have this digest")]
    WrongRuleSet(String),
}

/// Evaluates and promotes candidate rules according to the overrides.
pub struct Candidates {
    overrides: Arc<OverrideSync>,
    in_force: Arc<RulesInForce>,
    resources: Arc<Resources>,
    clock: Clock,
    workers: usize,
    directory: Option<PathBuf>,
    share: f64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Digest of the promoted rule set in force on this instance.
    in_force: Option<String>,
    /// The evaluated candidate: the value of the override, or [`DIRECTORY`].
    active: Option<String>,
    /// Why the candidate rules or the promoted rules cannot be used.
    error: Option<String>,
    /// Digests and texts of the rule sets that overrides name, to restore them in a store that has lost them.
    rule_sets: Vec<(String, String)>,
}

impl Candidates {
    /// Creates the component, without candidate rules. `share` is the share of the traffic for rules in `directory`.
    #[must_use]
    pub fn new(
        overrides: Arc<OverrideSync>,
        in_force: Arc<RulesInForce>,
        resources: Arc<Resources>,
        clock: Clock,
        workers: usize,
        (directory, share): (Option<PathBuf>, f64),
    ) -> Arc<Self> {
        let state = Mutex::default();
        Arc::new(Self { overrides, in_force, resources, clock, workers, directory, share, state })
    }

    /// Polls the overrides and the directory. Never returns.
    pub async fn follow(self: Arc<Self>) {
        // The files that exist at the start count as new.
        let mut debounce: Debounce<Option<Fingerprint>> = Debounce::new(None);
        let mut tick = interval(POLL_INTERVAL);
        let mut last_restore = Instant::now();
        loop {
            tick.tick().await;
            let current = self.directory.as_deref().map(|directory| fingerprint(directory, FileFilter::Yaml));
            let changed = debounce.poll(current);
            self.poll(changed).await;
            if last_restore.elapsed() >= RESTORE_INTERVAL {
                last_restore = Instant::now();
                self.restore_rule_sets().await;
            }
        }
    }

    /// Puts the promoted rules in force and starts or stops evaluating candidate rules, as the overrides specify.
    pub async fn poll(&self, directory_changed: bool) {
        let (in_force, candidate) = {
            let snapshot = self.in_force.snapshot().load();
            let in_force = slot_value(&snapshot, RuleSetSlot::InForce).filter(|value| value != DIRECTORY);
            (in_force, slot_value(&snapshot, RuleSetSlot::Candidate))
        };
        if self.state().in_force != in_force {
            self.record_result(self.put_in_force(in_force).await);
        }
        let active = self.state().active.clone();
        match candidate {
            Some(value) if active.as_ref() != Some(&value) => {
                let result = self.start_uploaded(&value).await;
                // Rules that are invalid stay invalid, and compiling them at each poll would cost much.
                if matches!(result, Ok(()) | Err(CandidateError::Load(LoadError::Invalid(_)))) {
                    self.state().active = Some(value);
                }
                self.record_result(result);
            }
            Some(_) => {}
            None => match &self.directory {
                Some(directory) if directory_changed || active.as_deref() != Some(DIRECTORY) => {
                    let result = self.start_directory(directory.clone()).await;
                    self.state().active = Some(DIRECTORY.to_owned());
                    self.record_result(result);
                }
                Some(_) => {}
                None if active.is_some() => {
                    self.in_force.set_candidate(None);
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
        let in_force = Arc::clone(&self.in_force);
        run_on_compile_thread(move || in_force.promote(files)).await.map_err(CandidateError::Thread)?;
        self.state().in_force = digest;
        Ok(())
    }

    async fn start_uploaded(&self, value: &str) -> Result<(), CandidateError> {
        let (digest, share) = parse_candidate(value).ok_or_else(|| CandidateError::MissingRuleSet(value.to_owned()))?;
        let files = self.fetch(digest).await?;
        self.start(files, share).await
    }

    /// Starts to evaluate the rules in the directory. Stops the evaluation if the directory has no rules.
    async fn start_directory(&self, directory: PathBuf) -> Result<(), CandidateError> {
        // A directory that cannot be read ends no evaluation, a missing one does.
        if directory.try_exists().is_ok_and(|exists| !exists) {
            self.in_force.set_candidate(None);
            return Ok(());
        }
        let read = run_on_compile_thread(move || Source::directory(directory).read()).await;
        let files = read.map_err(CandidateError::Thread)??;
        if files.is_empty() {
            self.in_force.set_candidate(None);
            return Ok(());
        }
        self.start(files, self.share).await
    }

    async fn start(&self, files: Vec<SourceFile>, share: f64) -> Result<(), CandidateError> {
        let options = self.in_force.options();
        let compiled = run_on_compile_thread(move || rules::compile(&files, options)).await;
        let (rules, _) = compiled.map_err(CandidateError::Thread)?.map_err(LoadError::Invalid)?;
        let count = rules.rules().len();
        let candidate = Candidate::new(rules, share, self.clock.now(), self.workers, &self.resources);
        self.in_force.set_candidate(Some(candidate));
        tracing::info!(rules = count, share, "evaluating candidate rules");
        Ok(())
    }

    /// Stores rules as the candidate, so that all instances evaluate them. Returns the warnings about the rules.
    ///
    /// # Errors
    ///
    /// Returns an error if the rules or the share are invalid, or if the store cannot be written.
    pub async fn upload(
        &self,
        files: Vec<SourceFile>,
        share: f64,
        info: ChangeInfo,
    ) -> Result<Vec<Diagnostic>, CandidateError> {
        if !(share > 0.0 && share <= 1.0) {
            return Err(CandidateError::Share);
        }
        let (digest, text) = serialize_rule_set(&files)?;
        let options = self.in_force.options();
        let compiled = run_on_compile_thread(move || rules::compile(&files, options)).await;
        let (_, warnings) = compiled.map_err(CandidateError::Thread)?.map_err(LoadError::Invalid)?;
        self.overrides.store().put_rule_set(&digest, &text).await?;
        self.set_slots(&[(RuleSetSlot::Candidate, Some(format!("{digest} {share}")))], info).await?;
        Ok(warnings)
    }

    /// Stops evaluating the uploaded candidate rules. Instances with a candidate directory evaluate its rules again.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no uploaded candidate rules, or if the store cannot be written.
    pub async fn drop_candidate(&self, info: ChangeInfo) -> Result<(), CandidateError> {
        if self.value(RuleSetSlot::Candidate).is_none() {
            return Err(CandidateError::NoCandidate);
        }
        self.set_slots(&[(RuleSetSlot::Candidate, None)], info).await
    }

    /// Puts the candidate rules in force on all instances.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no candidate rules, if they are invalid, or if the store cannot be written.
    pub async fn promote(&self, info: ChangeInfo) -> Result<(), CandidateError> {
        let digest = match (self.value(RuleSetSlot::Candidate), &self.directory) {
            (Some(value), _) => parse_candidate(&value).ok_or(CandidateError::NoCandidate)?.0.to_owned(),
            (None, Some(directory)) => {
                let files = Source::directory(directory.clone()).read()?;
                rules::compile(&files, self.in_force.options()).map_err(LoadError::Invalid)?;
                let (digest, text) = serialize_rule_set(&files)?;
                self.overrides.store().put_rule_set(&digest, &text).await?;
                digest
            }
            (None, None) => return Err(CandidateError::NoCandidate),
        };
        let current = self.value(RuleSetSlot::InForce).unwrap_or_else(|| DIRECTORY.to_owned());
        let changes = [
            (RuleSetSlot::InForce, Some(digest)),
            (RuleSetSlot::Previous, Some(current)),
            (RuleSetSlot::Candidate, None),
        ];
        self.set_slots(&changes, info).await
    }

    /// Puts the previous rules in force on all instances. Another call reverses the rollback.
    ///
    /// # Errors
    ///
    /// Returns an error if there are no previous rules, or if the store cannot be written.
    pub async fn rollback(&self, info: ChangeInfo) -> Result<(), CandidateError> {
        let previous = self.value(RuleSetSlot::Previous).ok_or(CandidateError::NoPrevious)?;
        let current = self.value(RuleSetSlot::InForce).unwrap_or_else(|| DIRECTORY.to_owned());
        self.set_slots(&[(RuleSetSlot::InForce, Some(previous)), (RuleSetSlot::Previous, Some(current))], info).await
    }

    /// Returns why the candidate rules or the promoted rules cannot be used, or `None` if they can.
    #[must_use]
    pub fn error(&self) -> Option<String> {
        self.state().error.clone()
    }

    /// Registers the metrics of the candidate rules with `meter`.
    pub fn observe(&self, meter: &dyn Meter) {
        let in_force = Arc::clone(&self.in_force);
        Candidate::observe_metrics(move || in_force.snapshot().load().candidate().cloned(), meter);
    }

    /// Sets or clears slots in one change, and deletes rule sets that no slot names any more.
    async fn set_slots(
        &self,
        changes: &[(RuleSetSlot, Option<String>)],
        info: ChangeInfo,
    ) -> Result<(), CandidateError> {
        let before = self.digests();
        let mut requests = Vec::new();
        for (slot, value) in changes {
            requests.push(ChangeRequest {
                target: Target::Rules(*slot),
                value: value.clone(),
                until: None,
                expected: None,
            });
        }
        self.overrides.change(&requests, info).await?;
        let after = self.digests();
        for digest in before.iter().filter(|digest| !after.contains(digest)) {
            // If the deletion fails, an unused rule set stays in the store, which does no harm.
            let _ = self.overrides.store().delete_rule_set(digest).await;
            self.state().rule_sets.retain(|(stored, _)| stored != digest);
        }
        self.poll(false).await;
        Ok(())
    }

    fn value(&self, slot: RuleSetSlot) -> Option<String> {
        slot_value(&self.in_force.snapshot().load(), slot)
    }

    fn digests(&self) -> Vec<String> {
        let values = [RuleSetSlot::Candidate, RuleSetSlot::InForce, RuleSetSlot::Previous]
            .into_iter()
            .filter_map(|slot| self.value(slot));
        values.filter_map(|value| digest_in(&value).map(str::to_owned)).collect()
    }

    /// Reads a rule set from the store, and holds its text to restore it.
    async fn fetch(&self, digest: &str) -> Result<Vec<SourceFile>, CandidateError> {
        let text = self.overrides.store().get_rule_set(digest).await?;
        let text = text.ok_or_else(|| CandidateError::MissingRuleSet(digest.to_owned()))?;
        // A member of version 0.1.0 stored any text that another one sent under the digest.
        if digest_of(&text) != digest {
            return Err(CandidateError::WrongRuleSet(digest.to_owned()));
        }
        let files = parse_rule_set(&text).ok_or_else(|| CandidateError::MissingRuleSet(digest.to_owned()))?;
        let mut state = self.state();
        if !state.rule_sets.iter().any(|(stored, _)| stored == digest) {
            state.rule_sets.push((digest.to_owned(), text));
        }
        Ok(files)
    }

    /// Writes rule sets to the store that it has lost.
    async fn restore_rule_sets(&self) {
        let named = self.digests();
        let rule_sets: Vec<_> = {
            let mut state = self.state();
            state.rule_sets.retain(|(digest, _)| named.contains(digest));
            state.rule_sets.clone()
        };
        for (digest, text) in rule_sets {
            if let Ok(None) = self.overrides.store().get_rule_set(&digest).await
                && self.overrides.store().put_rule_set(&digest, &text).await.is_ok()
            {
                tracing::warn!(digest, "the store was missing a rule set; restored it");
            }
        }
    }

    fn record_result(&self, result: Result<(), CandidateError>) {
        let error = result.err().map(|error| crate::metrics::chain(&error));
        let mut state = self.state();
        if let Some(error) = error.as_ref().filter(|error| state.error.as_ref() != Some(error)) {
            tracing::error!("cannot use the candidate or promoted rules:\n{error}");
        }
        state.error = error;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }
}

fn serialize_rule_set(files: &[SourceFile]) -> Result<(String, String), CandidateError> {
    let pairs: Vec<(&str, &str)> = files.iter().map(|file| (file.name.as_str(), file.text.as_str())).collect();
    let text = serde_json::to_string(&pairs).unwrap_or_default();
    if files.is_empty() || text.len() > MAX_RULE_SET_BYTES {
        return Err(CandidateError::Size);
    }
    Ok((digest_of(&text), text))
}

fn parse_rule_set(text: &str) -> Option<Vec<SourceFile>> {
    let pairs: Vec<(String, String)> = serde_json::from_str(text).ok()?;
    Some(pairs.into_iter().map(|(name, text)| SourceFile { name, text }).collect())
}

/// Returns the value of the override of a slot, or `None` if the slot is empty.
fn slot_value(snapshot: &Snapshot, slot: RuleSetSlot) -> Option<String> {
    snapshot.overrides().rules(slot).map(|entry| entry.value.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::{Admin, testing::admin};

    fn text(key: &str) -> String {
        format!("domain: api\ndescriptors:\n- {{ key: {key}, rate_limit: {{ unit: hour, requests_per_unit: 1 }} }}\n")
    }

    fn files(key: &str) -> Vec<SourceFile> {
        vec![SourceFile { name: "a.yaml".into(), text: text(key) }]
    }

    fn info() -> ChangeInfo {
        ChangeInfo { author: "alice".into(), ..ChangeInfo::default() }
    }

    /// Returns the path of the first rule in force, and of the first candidate rule.
    fn rules(admin: &Admin) -> (String, Option<String>) {
        let snapshot = admin.in_force.snapshot().load_full();
        let candidate = snapshot.candidate().map(|candidate| candidate.rules().rule_set().rules()[0].path());
        (snapshot.rule_set().rules()[0].path(), candidate)
    }

    #[tokio::test]
    async fn an_uploaded_candidate_is_evaluated_until_it_is_promoted_or_dropped() {
        let admin = admin(&text("first"));
        let candidates = &admin.candidates;
        let rejected = candidates.upload(files("other"), 0.0, info()).await;
        assert!(matches!(rejected, Err(CandidateError::Share)));
        candidates.upload(files("other"), 1.0, info()).await.unwrap();
        assert_eq!(rules(&admin), ("api.first".into(), Some("api.other".into())));
        candidates.drop_candidate(info()).await.unwrap();
        assert_eq!(rules(&admin), ("api.first".into(), None));
        candidates.upload(files("other"), 1.0, info()).await.unwrap();
        candidates.promote(info()).await.unwrap();
        assert_eq!(rules(&admin), ("api.other".into(), None));
        candidates.rollback(info()).await.unwrap();
        assert_eq!(rules(&admin), ("api.first".into(), None));
    }

    #[tokio::test]
    async fn rule_sets_that_the_store_lost_are_restored_while_they_are_named() {
        let admin = admin(&text("first"));
        let candidates = &admin.candidates;
        let store = candidates.overrides.store();
        candidates.upload(files("promoted"), 1.0, info()).await.unwrap();
        candidates.promote(info()).await.unwrap();
        candidates.upload(files("candidate"), 1.0, info()).await.unwrap();
        let [promoted, candidate] = ["promoted", "candidate"].map(|key| serialize_rule_set(&files(key)).unwrap().0);
        for digest in [&promoted, &candidate] {
            store.delete_rule_set(digest).await.unwrap();
        }
        candidates.restore_rule_sets().await;
        for digest in [&promoted, &candidate] {
            assert!(store.get_rule_set(digest).await.unwrap().is_some(), "{digest}");
        }
        candidates.drop_candidate(info()).await.unwrap();
        store.delete_rule_set(&promoted).await.unwrap();
        candidates.restore_rule_sets().await;
        assert!(store.get_rule_set(&promoted).await.unwrap().is_some());
        assert!(store.get_rule_set(&candidate).await.unwrap().is_none());
    }

    #[tokio::test]
    async fn a_stored_rule_set_without_its_digest_is_not_put_in_force() {
        let admin = admin(&text("first"));
        let candidates = &admin.candidates;
        candidates.upload(files("other"), 1.0, info()).await.unwrap();
        let (digest, _) = serialize_rule_set(&files("other")).unwrap();
        let (_, lie) = serialize_rule_set(&files("lie")).unwrap();
        candidates.overrides.store().put_rule_set(&digest, &lie).await.unwrap();
        candidates.promote(info()).await.unwrap();
        assert_eq!(rules(&admin).0, "api.first");
        assert!(candidates.error().unwrap().contains("does not have this digest"), "{:?}", candidates.error());
    }

    #[tokio::test]
    async fn a_poll_without_changes_keeps_the_snapshot() {
        let admin = admin(&text("first"));
        let before = admin.in_force.snapshot().load_full();
        admin.candidates.poll(false).await;
        assert!(Arc::ptr_eq(&before, &admin.in_force.snapshot().load_full()));
    }

    #[tokio::test]
    async fn a_directory_is_evaluated_from_the_start_only_if_it_changes() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.yaml"), text("other")).unwrap();
        let Admin { overrides, in_force, clock, .. } = admin(&text("first"));
        let directory = (Some(folder.path().to_owned()), 0.5);
        let candidates = Candidates::new(overrides, Arc::clone(&in_force), Arc::default(), clock, 1, directory);
        let poll = async |directory_changed| {
            candidates.poll(directory_changed).await;
            in_force.snapshot().load().candidate().cloned().expect("candidate rules")
        };
        let first = poll(false).await;
        assert!(Arc::ptr_eq(&first, &poll(false).await));
        assert!(!Arc::ptr_eq(&first, &poll(true).await));
    }

    #[test]
    fn a_rule_set_of_exactly_the_maximum_size_is_accepted() {
        let serialize = |bytes: usize| {
            // The text is `[["a","xxx…"]]`.
            let file = SourceFile { name: "a".into(), text: "x".repeat(bytes - r#"[["a",""]]"#.len()) };
            serialize_rule_set(&[file])
        };
        assert_eq!(serialize(MAX_RULE_SET_BYTES).unwrap().1.len(), MAX_RULE_SET_BYTES);
        assert!(matches!(serialize(MAX_RULE_SET_BYTES + 1), Err(CandidateError::Size)));
    }
}
