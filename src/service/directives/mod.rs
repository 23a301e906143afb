//! Directives on their way from operators to decisions: kept in the store, heard of by every instance within a second, and in
//! force from then on.
//!
//! Every instance looks at the store four times a second and applies what has changed; one that cannot reach it goes on with
//! what it knows. Nor is anything lost when the store itself loses something: an instance that knows more than the store (a
//! failover to a replica that had not heard the latest, an emptied server) says it again, under the version that it
//! had. So a change is lost only when every instance that had heard of it is gone as well.

mod said;
mod switch_file;

pub use said::Mandate;

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use opentelemetry::{KeyValue, metrics::Meter};
use serde::{Deserialize, Serialize};
use tokio::{sync::Mutex as AsyncMutex, time::interval};

use super::{Clock, reload::Reloader};
use crate::{
    algorithm::Micros,
    engine::{
        Directive, Directives,
        directives::{DirectiveError, Origin, Scope, Target},
    },
    metrics::{Counter, Episode, WorkerId, observe_counter, observe_gauge},
    rules::Options,
    settled::Settled,
    store::{
        StoreError,
        directives::{Change, DirectiveStore, JournalError, Kept, MOST_PARTS, Mark, News, Part, Put, Written},
    },
};

/// Between two looks at the store, and at the file of switches.
const LOOK: Duration = Duration::from_millis(250);
/// Changes that an instance remembers for a store that goes back behind them.
const REMEMBERED: usize = 256;
/// The longest name of an author, and the longest reason, in bytes.
const LONGEST_AUTHOR: usize = 256;
const LONGEST_REASON: usize = 1_024;
/// The longest word of a directive: the text of a limit.
const LONGEST_WORD: usize = 4_096;

/// Where directives are kept, beside the store.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default)]
pub struct Settings {
    /// With the store `memory`: the file that keeps them. Without one they end with the process.
    pub file: Option<PathBuf>,
    /// A file of switches for this instance alone, followed while running.
    pub switch_file: Option<PathBuf>,
    /// Changes that the log in Redis holds, about.
    pub log_entries: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { file: None, switch_file: None, log_entries: 10_000 }
    }
}

/// What somebody wants to be said.
#[derive(Clone, Debug)]
pub struct Wish {
    /// Of what.
    pub target: Target,
    /// What; `None` takes it back.
    pub word: Option<String>,
    /// Until when.
    pub until: Option<Micros>,
    /// The version that it must have now; 0: there must be none. `None`: whatever there is.
    pub expected: Option<u64>,
}

/// Why something has not been said.
#[derive(Debug, thiserror::Error)]
pub enum PutError {
    /// It makes no sense.
    #[error("{target}: {source}")]
    Wish {
        /// What it is about.
        target: Target,
        /// What is wrong with it.
        source: DirectiveError,
    },
    /// The author or the reason.
    #[error("an author has 1 to {LONGEST_AUTHOR} bytes, a reason {LONGEST_REASON} at most, and a limit {LONGEST_WORD}")]
    Mandate,
    /// Too much, too little, or the same twice.
    #[error("1 to {MOST_PARTS} directives can be changed at once, each once")]
    Number,
    /// Somebody else has said something.
    #[error("{target} has been changed meanwhile: it has version {version}")]
    Conflict {
        /// Of what.
        target: String,
        /// The version that it has; 0: there is none.
        version: u64,
    },
    /// The store.
    #[error("the directives cannot be kept now")]
    Store(#[from] StoreError),
    /// The file.
    #[error("the directives cannot be kept now")]
    Journal(#[from] JournalError),
}

/// A change that has been made.
#[derive(Clone, Debug)]
pub struct Changed {
    /// Its version.
    pub version: u64,
    /// Who, when, and why.
    pub mandate: Mandate,
    /// What was said before of what, and what is said now.
    pub parts: Vec<(Target, Option<Directive>, Option<Directive>)>,
}

/// How it stands with the store.
#[derive(Clone, Debug, Default)]
pub struct Status {
    /// The last change that this instance knows.
    pub version: u64,
    /// When it last heard of the store; `None`: never, since it was started.
    pub heard: Option<Instant>,
    /// Why it has not heard of it at the last look.
    pub error: Option<String>,
}

/// Keeps the directives of this instance true.
pub struct Keeper {
    store: DirectiveStore,
    settings: Settings,
    options: Options,
    clock: Clock,
    reloader: Arc<Reloader>,
    known: AsyncMutex<Known>,
    status: Mutex<Status>,
    unread: Counter,
    not_understood: Episode,
    away: Episode,
}

/// What this instance knows.
#[derive(Default)]
struct Known {
    directives: Directives,
    mark: Mark,
    /// The latest changes, the last at the end.
    recent: VecDeque<Change>,
}

impl Keeper {
    /// Knows nothing yet.
    #[must_use]
    pub fn new(
        store: DirectiveStore,
        settings: Settings,
        options: Options,
        clock: Clock,
        reloader: Arc<Reloader>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store,
            settings,
            options,
            clock,
            reloader,
            known: AsyncMutex::default(),
            status: Mutex::default(),
            unread: Counter::new(1),
            not_understood: Episode::default(),
            away: Episode::default(),
        })
    }

    /// Reads what there is, and the file of switches. An error: the journal cannot be used. A store that is away is one that
    /// will be asked again.
    pub async fn start(&self) -> Result<(), JournalError> {
        let started = Instant::now();
        let mut known = self.known.lock().await;
        if let Some(path) = &self.settings.switch_file {
            self.read_switches(path, &mut known);
        }
        if let DirectiveStore::Journal(journal) = &self.store {
            let known = &mut *known;
            known.mark = lock(journal).load(|target, version, text| match text {
                Some(text) => self.put_one(&mut known.directives, target, version, text),
                None => remove(&mut known.directives, target),
            })?;
            self.heard(known, Ok(()));
        } else {
            let heard = self.load(&mut known).await;
            self.heard(&known, heard);
        }
        let [limits, plans, switches] = known.directives.counts();
        if limits + plans + switches > 0 {
            let took = started.elapsed();
            tracing::info!(limits, plans, switches, version = known.mark.version, ?took, "directives loaded");
        }
        self.publish(&known);
        Ok(())
    }

    /// Follows the store, the file of switches, and the clock, for ever.
    pub async fn follow(self: Arc<Self>) {
        let fingerprint = || {
            let metadata = std::fs::metadata(self.settings.switch_file.as_ref()?).ok()?;
            Some((metadata.len(), metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH)))
        };
        let mut settled = Settled::new(fingerprint());
        let mut tick = interval(LOOK);
        loop {
            tick.tick().await;
            let mut known = self.known.lock().await;
            if let Some(path) = self.settings.switch_file.as_ref().filter(|_| settled.look(fingerprint())) {
                self.read_switches(path, &mut known);
                self.publish(&known);
            }
            if self.store.is_shared() {
                let heard = self.look(&mut known).await;
                self.heard(&known, heard);
            }
            self.end(&mut known).await;
        }
    }

    /// Says all of it, or nothing.
    pub async fn put(&self, wishes: &[Wish], mandate: Mandate) -> Result<Changed, PutError> {
        let mandate = Mandate { at: self.clock.now().get(), ..mandate };
        self.check(wishes, &mandate)?;
        let mut known = self.known.lock().await;
        let change = self.write(&mut known, wishes, &mandate).await;
        let change = change.inspect_err(|error| {
            tracing::warn!(author = mandate.author, error = crate::errors::chain(error), "a directive was refused");
        })?;
        self.publish(&known);
        for Part { target, before, after } in &change.parts {
            let (before, after) = (before.as_deref().unwrap_or("-"), after.as_deref().unwrap_or("-"));
            let Mandate { author, reason, .. } = &mandate;
            tracing::info!(target: "sluicegate::audit", version = change.version, author, reason, target, before, after, "directive");
        }
        Ok(changed(change))
    }

    /// Puts into the log what has been done otherwise.
    pub async fn record(&self, mandate: Mandate) -> Result<(), PutError> {
        let mandate = Mandate { at: self.clock.now().get(), ..mandate };
        let mut known = self.known.lock().await;
        self.write(&mut known, &[], &mandate).await?;
        let Mandate { author, reason, .. } = mandate;
        tracing::info!(target: "sluicegate::audit", version = known.mark.version, author, reason, "done");
        Ok(())
    }

    /// Throws or takes back a switch of this instance alone. It ends with the process.
    pub async fn switch_here(
        &self,
        scope: &Scope,
        word: Option<&str>,
        until: Option<Micros>,
        mandate: Mandate,
    ) -> Result<(), PutError> {
        let at = self.clock.now();
        let wish = Wish { target: Target::Switch(scope.clone()), word: word.map(str::to_owned), until, expected: None };
        self.check(std::slice::from_ref(&wish), &mandate)?;
        let mut known = self.known.lock().await;
        match word {
            Some(word) => known.directives.throw(&directive(&wish, word, &mandate, at), Origin::Instance),
            None => drop(known.directives.take_back(scope, Origin::Instance)),
        }
        let Mandate { author, reason, .. } = mandate;
        tracing::info!(target: "sluicegate::audit", author, reason, target = %wish.target, after = word, "directive for this instance");
        self.publish(&known);
        Ok(())
    }

    /// The latest changes before this version, the last first.
    pub async fn log(&self, before: u64, most: usize) -> Result<Vec<Changed>, StoreError> {
        let changes = match &self.store {
            DirectiveStore::Journal(journal) => lock(journal).changes(before, most),
            DirectiveStore::Redis(redis) => redis.directive_log(before, most).await?,
        };
        Ok(changes.into_iter().map(changed).collect())
    }

    /// Where they are kept.
    pub(super) const fn store(&self) -> &DirectiveStore {
        &self.store
    }

    /// How it stands with the store.
    #[must_use]
    pub fn status(&self) -> Status {
        lock(&self.status).clone()
    }

    /// Shows everything to the meter.
    pub fn observe(self: &Arc<Self>, meter: &Meter) {
        let this = Arc::clone(self);
        let gauge = meter.u64_observable_gauge("sluicegate_directives");
        gauge
            .with_description("Directives of operators in force, by what they are about")
            .with_callback(move |observer| {
                let counts = this.reloader.rules().load().directives().counts();
                for (kind, count) in ["limit", "plan", "switch"].into_iter().zip(counts) {
                    observer.observe(count as u64, &[KeyValue::new("kind", kind)]);
                }
            })
            .build();
        let this = Arc::clone(self);
        let gauge = meter.u64_observable_gauge("sluicegate_switch");
        gauge
            .with_description("1 for each switch in force, by its scope, its mode, and who threw it")
            .with_callback(move |observer| {
                for (scope, mode, origin) in this.reloader.rules().load().modes().in_force() {
                    let scope =
                        KeyValue::new("scope", Target::Switch(scope.clone()).to_string().replacen("switch|", "", 1));
                    let labels = [scope, KeyValue::new("mode", mode.name()), KeyValue::new("origin", origin.name())];
                    observer.observe(1, &labels);
                }
            })
            .build();
        let this = Arc::clone(self);
        observe_gauge(
            meter,
            "sluicegate_directives_version",
            "The last change of directives that is in force",
            move || this.status().version,
        );
        let this = Arc::clone(self);
        observe_gauge(
            meter,
            "sluicegate_directives_age_seconds",
            "Since the store was last heard of what operators say",
            move || this.status().heard.map_or(u64::MAX >> 32, |heard| heard.elapsed().as_secs()),
        );
        let this = Arc::clone(self);
        observe_counter(
            meter,
            "sluicegate_directives_not_understood",
            "Directives in the store that this version of the service does not understand, and ignores",
            move || this.unread.get(),
        );
    }

    fn check(&self, wishes: &[Wish], mandate: &Mandate) -> Result<(), PutError> {
        let words = || wishes.iter().filter_map(|wish| wish.word.as_ref());
        if !(1..=LONGEST_AUTHOR).contains(&mandate.author.len())
            || mandate.reason.len() > LONGEST_REASON
            || words().any(|word| word.len() > LONGEST_WORD)
        {
            return Err(PutError::Mandate);
        }
        let mut targets: Vec<&Target> = wishes.iter().map(|wish| &wish.target).collect();
        targets.sort_unstable();
        targets.dedup();
        if !(1..=MOST_PARTS).contains(&wishes.len()) || targets.len() < wishes.len() {
            return Err(PutError::Number);
        }
        for wish in wishes {
            let wrong = |source| PutError::Wish { target: wish.target.clone(), source };
            match &wish.word {
                Some(word) => {
                    let directive = directive(wish, word, mandate, Micros::ZERO);
                    Directives::check(&directive, self.options).map_err(wrong)?;
                }
                None => wish.target.check().map_err(|error| wrong(error.into()))?,
            }
        }
        Ok(())
    }

    async fn write(&self, known: &mut Known, wishes: &[Wish], mandate: &Mandate) -> Result<Change, PutError> {
        let now = Micros::new(mandate.at);
        // What this instance could not put in force, others could not either.
        let mut trial = known.directives.clone();
        for wish in wishes {
            if let Some(word) = &wish.word {
                let directive = directive(wish, word, mandate, now);
                let wrong = |source| PutError::Wish { target: wish.target.clone(), source };
                trial.put(directive, self.options).map_err(wrong)?;
            }
        }
        let parts: Vec<Put> = wishes
            .iter()
            .map(|wish| Put {
                target: wish.target.to_string(),
                text: wish.word.as_ref().map(|word| said::write(&directive(wish, word, mandate, now))),
                expected: wish.expected,
            })
            .collect();
        let id = format!("{:016x}", rand::random::<u64>());
        let head = serde_json::to_string(mandate).unwrap_or_default();
        let (mark, change) = match &self.store {
            DirectiveStore::Journal(journal) => {
                let change = self.next_change(known, id.clone(), head, parts)?;
                let (journal, line, kept) = (Arc::clone(journal), change.clone(), known.directives.clone());
                let (mark, [limits, plans, switches]) = (known.mark.clone(), kept.counts());
                let written = tokio::task::spawn_blocking(move || {
                    lock(&journal).write(&line, limits + plans + switches, || (mark, all(&kept)))
                });
                written.await.unwrap_or(Ok(()))?;
                (Mark { version: change.version, id, ..known.mark.clone() }, change)
            }
            DirectiveStore::Redis(redis) => {
                match redis.put_directives((&id, &head), &parts, None, self.settings.log_entries).await? {
                    Some(Written::Done(mark, change)) => (mark, change),
                    Some(Written::Conflict { target, version }) => return Err(PutError::Conflict { target, version }),
                    None => return Err(StoreError::Refused.into()),
                }
            }
        };
        if mark.version == known.mark.version + 1 && (known.mark.epoch == mark.epoch || known.mark.version == 0) {
            self.apply(known, &change);
            known.mark = mark;
            self.heard(known, Ok(()));
        } else {
            let heard = self.look(known).await;
            self.heard(known, heard);
        }
        Ok(change)
    }

    /// As the script has it for Redis.
    fn next_change(&self, known: &Known, id: String, head: String, puts: Vec<Put>) -> Result<Change, PutError> {
        let mut change = Change { version: known.mark.version + 1, id, head, parts: Vec::new() };
        for Put { target, text, expected } in puts {
            let before = Target::parse(&target).ok().and_then(|target| known.directives.get(&target));
            let version = before.as_ref().map_or(0, |before| before.version);
            if expected.is_some_and(|expected| expected != version) {
                return Err(PutError::Conflict { target, version });
            }
            change.parts.push(Part { target, before: before.as_ref().map(said::write), after: text });
        }
        Ok(change)
    }

    /// Looks at the store once.
    async fn look(&self, known: &mut Known) -> Result<(), StoreError> {
        let DirectiveStore::Redis(redis) = &self.store else {
            return Ok(());
        };
        loop {
            match redis.directives_since(&known.mark).await? {
                News::Nothing => return Ok(()),
                News::Changes(changes) => {
                    let more = changes.len() == MOST_PARTS;
                    for change in changes {
                        self.apply(known, &change);
                        (known.mark.version, known.mark.id) = (change.version, change.id);
                    }
                    self.publish(known);
                    if !more {
                        return Ok(());
                    }
                }
                News::Empty if known.mark.version == 0 => return Ok(()),
                News::Empty => {
                    let (author, reason) = ("sluicegate".into(), "the store was empty".into());
                    let head = Mandate { author, reason, at: self.clock.now().get() };
                    let head = serde_json::to_string(&head).unwrap_or_default();
                    if redis.restore_directives(&known.mark, &head, &all(&known.directives)).await? {
                        let [limits, plans, switches] = known.directives.counts();
                        tracing::warn!(
                            limits,
                            plans,
                            switches,
                            "the store had lost all directives, and has them again"
                        );
                    }
                    return Ok(());
                }
                News::Behind(mark) => match self.changes_after(known, &mark) {
                    Some(changes) => {
                        tracing::warn!(changes = changes.len(), "the store had lost the latest changes of directives");
                        for Change { version, id, head, parts } in changes {
                            let parts: Vec<_> = parts
                                .into_iter()
                                .map(|part| Put { target: part.target, text: part.after, expected: None })
                                .collect();
                            let (said, base) = ((&*id, &*head), Some(version - 1));
                            redis.put_directives(said, &parts, base, self.settings.log_entries).await?;
                        }
                        return Ok(());
                    }
                    None => return self.load_anew(known).await,
                },
                News::Other => return self.load_anew(known).await,
            }
        }
    }

    /// What this instance knows that the store does not; `None`: the two have parted.
    fn changes_after(&self, known: &Known, mark: &Mark) -> Option<Vec<Change>> {
        let at = known.recent.iter().position(|change| change.version == mark.version && change.id == mark.id)?;
        Some(known.recent.iter().skip(at + 1).cloned().collect())
    }

    async fn load_anew(&self, known: &mut Known) -> Result<(), StoreError> {
        if known.mark.version > 0 {
            tracing::info!(
                version = known.mark.version,
                "the store has other directives than this instance; all are read anew"
            );
        }
        self.load(known).await?;
        self.publish(known);
        Ok(())
    }

    /// Reads all of it, and what changed meanwhile.
    async fn load(&self, known: &mut Known) -> Result<(), StoreError> {
        let DirectiveStore::Redis(redis) = &self.store else {
            return Ok(());
        };
        let mut directives = known.directives.without_the_stores();
        let mark = redis.directives(|kept| self.put_all(&mut directives, kept)).await?;
        known.recent.clear();
        (known.directives, known.mark) = (directives, mark.unwrap_or_default());
        match redis.directives_since(&known.mark).await? {
            News::Changes(changes) => {
                for change in changes {
                    self.apply(known, &change);
                    (known.mark.version, known.mark.id) = (change.version, change.id);
                }
            }
            // The next look will see to it.
            News::Nothing | News::Other | News::Behind(_) | News::Empty => {}
        }
        Ok(())
    }

    fn put_all(&self, directives: &mut Directives, kept: Vec<Kept>) {
        for (target, version, text) in kept {
            self.put_one(directives, &target, version, &text);
        }
    }

    fn put_one(&self, directives: &mut Directives, target: &str, version: u64, text: &str) {
        let put = match said::read(target, version, text) {
            Some(directive) => directives.put(directive, self.options).map_err(|error| error.to_string()),
            None => Err("of another version of the service".to_owned()),
        };
        if let Err(error) = put {
            self.unread.add(WorkerId(0), 1);
            if self.not_understood.begins() {
                tracing::warn!(target, error, "a directive in the store is not understood, and ignored");
            }
        }
    }

    fn apply(&self, known: &mut Known, change: &Change) {
        for Part { target, after, .. } in &change.parts {
            match after {
                Some(text) => self.put_one(&mut known.directives, target, change.version, text),
                None => remove(&mut known.directives, target),
            }
        }
        if known.recent.len() >= REMEMBERED {
            known.recent.pop_front();
        }
        known.recent.push_back(change.clone());
    }

    /// Takes back what is over, and puts switches out of force whose time has passed.
    async fn end(&self, known: &mut Known) {
        let now = self.clock.now();
        let wishes: Vec<Wish> = known
            .directives
            .over(now, MOST_PARTS)
            .map(|over| Wish { target: over.target, word: None, until: None, expected: Some(over.version) })
            .collect();
        let in_force = known.directives.switches_in_force(now);
        if !self.reloader.rules().load().modes().in_force().iter().eq(&in_force) {
            self.publish(known);
        }
        if !wishes.is_empty() {
            let mandate = Mandate { author: "sluicegate".into(), reason: "its time is over".into(), at: now.get() };
            // Where several instances try, one succeeds, and the others hear of it.
            if self.write(known, &wishes, &mandate).await.is_ok() {
                self.publish(known);
            }
        }
    }

    fn read_switches(&self, path: &std::path::Path, known: &mut Known) {
        match switch_file::read(path) {
            Ok(switches) => {
                tracing::info!(path = %path.display(), switches = switches.len(), "switches read");
                known.directives.throw_all(&switches, Origin::File);
            }
            // A file that is not there has no switches: taking it away is how they end.
            Err(_) if !path.exists() => known.directives.throw_all(&[], Origin::File),
            Err(error) => tracing::error!(error, "the switches cannot be read; those before stay in force"),
        }
    }

    fn heard(&self, known: &Known, heard: Result<(), StoreError>) {
        let mut status = lock(&self.status);
        status.version = known.mark.version;
        match heard {
            Ok(()) => {
                if status.error.take().is_some() {
                    tracing::info!(version = status.version, "what operators say is heard of again");
                }
                status.heard = Some(Instant::now());
            }
            Err(error) => {
                if self.away.begins() {
                    tracing::warn!(
                        kind = error.kind(),
                        version = status.version,
                        "what operators say is not heard of; the last that was known holds"
                    );
                }
                status.error = Some(error.to_string());
            }
        }
    }

    fn publish(&self, known: &Known) {
        self.reloader.direct(known.directives.clone());
    }
}

fn directive(wish: &Wish, word: &str, mandate: &Mandate, at: Micros) -> Directive {
    Directive {
        target: wish.target.clone(),
        word: word.into(),
        until: wish.until,
        author: mandate.author.as_str().into(),
        reason: mandate.reason.as_str().into(),
        at,
        version: 0,
    }
}

fn remove(directives: &mut Directives, target: &str) {
    if let Ok(target) = Target::parse(target) {
        directives.remove(&target);
    }
}

fn all(directives: &Directives) -> Vec<Kept> {
    directives.iter().map(|it| (it.target.to_string(), it.version, said::write(&it))).collect()
}

fn changed(change: Change) -> Changed {
    let version = change.version;
    let parts = change.parts.into_iter().filter_map(|Part { target, before, after }| {
        let read = |text: Option<String>, version| text.and_then(|text| said::read(&target, version, &text));
        Some((Target::parse(&target).ok()?, read(before, 0), read(after, version)))
    });
    Changed { version, parts: parts.collect(), mandate: serde_json::from_str(&change.head).unwrap_or_default() }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
