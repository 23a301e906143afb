//! What operators want to be said: held against everything that could be wrong with it, and written.

use std::sync::Arc;

use super::{
    ChangeError, ChangeInfo, ChangeRequest, MAX_VALUE_BYTES, OverrideSync, SyncState, all, entry, format, lock,
};
use crate::{
    algorithm::Micros,
    engine::{Overrides, overrides::Target},
    store::{
        StoreError,
        overrides::{Change, Cursor, MAX_CHANGES, OverrideChange, OverrideStore, Write, WriteOutcome},
    },
};

impl OverrideSync {
    pub(super) fn check(&self, requests: &[ChangeRequest], info: &ChangeInfo) -> Result<(), ChangeError> {
        info.check()?;
        if requests.iter().filter_map(|request| request.value.as_ref()).any(|word| word.len() > MAX_VALUE_BYTES) {
            return Err(ChangeError::Info);
        }
        let mut targets: Vec<&Target> = requests.iter().map(|request| &request.target).collect();
        targets.sort_unstable();
        targets.dedup();
        if !(1..=MAX_CHANGES).contains(&requests.len()) || targets.len() < requests.len() {
            return Err(ChangeError::Count);
        }
        for request in requests {
            let wrong = |source| ChangeError::Invalid { target: request.target.clone(), source };
            match &request.value {
                Some(word) => {
                    let entry = entry(request, word, info, Micros::ZERO);
                    Overrides::check(&entry, self.options).map_err(wrong)?;
                }
                None => request.target.check().map_err(|error| wrong(error.into()))?,
            }
        }
        Ok(())
    }

    pub(super) async fn write(
        &self,
        known: &mut SyncState,
        requests: &[ChangeRequest],
        info: &ChangeInfo,
    ) -> Result<Change, ChangeError> {
        let now = Micros::new(info.at);
        // What this instance could not put in force, others could not either.
        let mut trial = known.overrides.clone();
        for request in requests {
            if let Some(word) = &request.value {
                let entry = entry(request, word, info, now);
                let wrong = |source| ChangeError::Invalid { target: request.target.clone(), source };
                trial.put(entry, self.options).map_err(wrong)?;
            }
        }
        let parts: Vec<Write> = requests
            .iter()
            .map(|request| Write {
                target: request.target.to_string(),
                text: request.value.as_ref().map(|word| format::write(&entry(request, word, info, now))),
                expected: request.expected,
            })
            .collect();
        let id = format!("{:016x}", rand::random::<u64>());
        let head = serde_json::to_string(info).unwrap_or_default();
        let (mark, change) = match &self.store {
            OverrideStore::Journal(journal) => {
                let change = self.next_change(known, id, head, parts)?;
                let (journal, line, kept) = (Arc::clone(journal), change.clone(), known.overrides.clone());
                let (mark, [limits, plans, switches]) = (known.cursor.clone(), kept.counts());
                let written = tokio::task::spawn_blocking(move || {
                    lock(&journal).write(&line, limits + plans + switches, || (mark, all(&kept)))
                });
                // What may not have been written is not in force.
                written.await.map_err(|_| StoreError::Rejected)??;
                (Cursor { version: change.version, ..known.cursor.clone() }, change)
            }
            OverrideStore::Redis(redis) => {
                let longest = self.settings.audit_log_entries;
                let mut written = redis.put_overrides((&id, &head), &parts, (&known.cursor, false), longest).await?;
                if written.is_none() {
                    // It has lost something, and is told again first.
                    self.poll_store(known).await?;
                    written = redis.put_overrides((&id, &head), &parts, (&known.cursor, false), longest).await?;
                }
                match written {
                    Some(WriteOutcome::Done(mark, change)) => (mark, change),
                    Some(WriteOutcome::Conflict { target, version }) => {
                        return Err(ChangeError::Conflict { target, version });
                    }
                    None => return Err(StoreError::Rejected.into()),
                }
            }
        };
        if mark.version == known.cursor.version + 1 && (known.cursor.epoch == mark.epoch || known.cursor.version == 0) {
            self.apply(known, &change);
            known.cursor = mark;
            self.note_sync(known, Ok(()));
        } else {
            let heard = self.poll_store(known).await;
            self.note_sync(known, heard);
        }
        Ok(change)
    }

    /// As the script has it for Redis.
    fn next_change(
        &self,
        known: &SyncState,
        id: String,
        head: String,
        puts: Vec<Write>,
    ) -> Result<Change, ChangeError> {
        let mut change = Change { version: known.cursor.version + 1, id, info: head, changes: Vec::new() };
        for Write { target, text, expected } in puts {
            let before = Target::parse(&target).ok().and_then(|target| known.overrides.get(&target));
            let version = before.as_ref().map_or(0, |before| before.version);
            if expected.is_some_and(|expected| expected != version) {
                return Err(ChangeError::Conflict { target, version });
            }
            change.changes.push(OverrideChange { target, before: before.as_ref().map(format::write), after: text });
        }
        Ok(change)
    }
}
