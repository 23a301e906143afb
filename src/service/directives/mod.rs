//! Directives on their way from operators to decisions: kept in the store, heard of by every instance within a second, and in
//! force from then on.
//!
//! Every instance looks at the store four times a second and applies what has changed; one that cannot reach it goes on with
//! what it knows. Nor is anything lost when the store itself loses something: an instance that knows more than the store (a
//! failover to a replica that had not heard the latest, an emptied server) says it again, under the version that it
//! had. So a change is lost only when every instance that had heard of it is gone as well.

mod hear;
mod metrics;
mod said;
mod say;
mod switch_file;

pub use said::Mandate;

use std::{
    collections::VecDeque,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant, SystemTime},
};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{sync::Mutex as AsyncMutex, time::interval};

use super::{Clock, reload::Reloader};
use crate::{
    algorithm::Micros,
    allocator,
    engine::{
        Directive, Directives,
        directives::{DirectiveError, Origin, Scope, Target},
    },
    metrics::{Counter, Episode},
    rules::Options,
    settled::Settled,
    store::{
        StoreError,
        directives::{Change, DirectiveStore, JournalError, Kept, MOST_PARTS, Mark, Part},
    },
};

/// Between two looks at the store, and at the file of switches.
const LOOK: Duration = Duration::from_millis(250);
/// Between two moves of all that decisions read. What was there before is held for a while longer, and is large.
const GATHER: Duration = Duration::from_secs(10);
/// Changes that an instance remembers for a store that goes back behind them.
const REMEMBERED: usize = 256;
/// The longest name of an author, and the longest reason, in bytes.
const LONGEST_AUTHOR: usize = 256;
const LONGEST_REASON: usize = 1_024;
/// The longest word of a directive: the text of a limit.
const LONGEST_WORD: usize = 4_096;

/// Where directives are kept, beside the store.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
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
                None => hear::remove(&mut known.directives, target),
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
        if known.directives.gather() {
            allocator::give_back();
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
        let (mut tick, mut gathered) = (interval(LOOK), Instant::now());
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
            if gathered.elapsed() > GATHER && known.directives.gather() {
                gathered = Instant::now();
                self.publish(&known);
            }
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
