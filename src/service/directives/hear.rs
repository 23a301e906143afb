//! What the store has to say: heard of, applied, and put in force; and said again where the store has lost it.

use std::{path::Path, time::Instant};

use super::{Keeper, Known, Mandate, REMEMBERED, Wish, all, lock, said, switch_file};
use crate::{
    engine::{
        Directives,
        directives::{Origin, Target},
    },
    metrics::WorkerId,
    store::{
        StoreError,
        directives::{Change, DirectiveStore, Kept, MOST_PARTS, Mark, News, Part, Put, Written},
    },
};

impl Keeper {
    /// Looks at the store once.
    pub(super) async fn look(&self, known: &mut Known) -> Result<(), StoreError> {
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
                News::Behind => {
                    if self.say_again(known).await? {
                        self.load_anew(known).await?;
                    }
                    return Ok(());
                }
                News::Other => {
                    self.say_again(known).await?;
                    return self.load_anew(known).await;
                }
            }
        }
    }

    /// The store has gone back behind what this instance knows, or has gone another way since: what it does not have is said
    /// again. Where the two last agreed its log says; of another beginning it says nothing. What others have said since
    /// stays. True when the store has something that this instance has not.
    async fn say_again(&self, known: &Known) -> Result<bool, StoreError> {
        let DirectiveStore::Redis(redis) = &self.store else {
            return Ok(false);
        };
        let log = redis.directive_log(u64::MAX, REMEMBERED).await?;
        let is_common = |change: &Change| log.iter().any(|it| it.version == change.version && it.id == change.id);
        let (Some(last), Some(first)) = (known.recent.iter().rposition(is_common), log.first()) else {
            return Ok(true);
        };
        let common = known.recent[last].version;
        let lost: Vec<Change> = known.recent.iter().skip(last + 1).cloned().collect();
        let newer = || log.iter().filter(|it| it.version > common);
        let untouched = |part: &Part| !newer().any(|it| it.parts.iter().any(|newer| newer.target == part.target));
        if !lost.is_empty() {
            tracing::warn!(
                changes = lost.len(),
                "the store had lost the latest changes of directives, and is told again"
            );
        }
        let mut mark = Mark { version: first.version, id: first.id.clone(), ..known.mark.clone() };
        for Change { id, head, parts, .. } in lost {
            let parts = parts.into_iter().filter(|part| untouched(part));
            let parts: Vec<_> =
                parts.map(|part| Put { target: part.target, text: part.after, expected: None }).collect();
            let longest = self.settings.log_entries;
            // Where somebody is faster, the rest is his.
            let said = redis.put_directives((&id, &head), &parts, (&mark, true), longest).await?;
            let Some(Written::Done(now, _)) = said else {
                break;
            };
            mark = now;
        }
        Ok(newer().next().is_some())
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
    pub(super) async fn load(&self, known: &mut Known) -> Result<(), StoreError> {
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
            News::Nothing | News::Other | News::Behind | News::Empty => {}
        }
        Ok(())
    }

    fn put_all(&self, directives: &mut Directives, kept: Vec<Kept>) {
        for (target, version, text) in kept {
            self.put_one(directives, &target, version, &text);
        }
    }

    pub(super) fn put_one(&self, directives: &mut Directives, target: &str, version: u64, text: &str) {
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

    pub(super) fn apply(&self, known: &mut Known, change: &Change) {
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
    pub(super) async fn end(&self, known: &mut Known) {
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

    pub(super) fn read_switches(&self, path: &Path, known: &mut Known) {
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

    pub(super) fn heard(&self, known: &Known, heard: Result<(), StoreError>) {
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

    pub(super) fn publish(&self, known: &Known) {
        self.reloader.direct(known.directives.clone());
    }
}

pub(super) fn remove(directives: &mut Directives, target: &str) {
    if let Ok(target) = Target::parse(target) {
        directives.remove(&target);
    }
}
