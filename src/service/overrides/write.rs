//! Validation of [`ChangeRequest`]s, and the write of a change to the store.

use super::{
    ChangeError, ChangeInfo, ChangeRequest, MAX_VALUE_BYTES, OverrideSync, SyncState, format, new_override, peer_limits,
};
use crate::{
    algorithm::Micros,
    engine::{Overrides, overrides::Target},
    store::{
        Redis, StoreError,
        overrides::{Change, Cursor, MAX_CHANGES, OverrideChange, OverrideStore, Write, WriteOutcome},
    },
};

/// Maximum number of attempts to write a change while other instances write.
const MAX_ATTEMPTS: u32 = 10;

impl OverrideSync {
    /// Checks everything about the requests that does not depend on the current overrides.
    ///
    /// # Errors
    ///
    /// Returns an error if a target, a value or an end is invalid, if there are too many requests, or if the author or the
    /// reason is.
    pub fn check(&self, requests: &[ChangeRequest], info: &ChangeInfo) -> Result<(), ChangeError> {
        info.check()?;
        if requests.iter().filter_map(|request| request.value.as_ref()).any(|value| value.len() > MAX_VALUE_BYTES) {
            return Err(ChangeError::Info);
        }
        let mut targets: Vec<&Target> = requests.iter().map(|request| &request.target).collect();
        targets.sort_unstable();
        targets.dedup();
        if !(1..=MAX_CHANGES).contains(&requests.len()) || targets.len() < requests.len() {
            return Err(ChangeError::Count);
        }
        for request in requests {
            let invalid = |reason| ChangeError::Invalid { target: request.target.clone(), reason };
            match &request.value {
                Some(value) => {
                    let entry = new_override(request, value, info, Micros::ZERO);
                    Overrides::check(&entry, self.options).map_err(invalid)?;
                    Overrides::check_end(request.until, self.clock.now()).map_err(invalid)?;
                }
                None => request.target.check().map_err(|error| invalid(error.into()))?,
            }
        }
        Ok(())
    }

    /// Writes a change to the store, all of it or nothing, and applies it to `state`. The caller publishes the state.
    ///
    /// With Redis, `state` may also receive changes of other instances.
    pub(super) async fn write(
        &self,
        state: &mut SyncState,
        requests: &[ChangeRequest],
        info: &ChangeInfo,
    ) -> Result<Change, ChangeError> {
        let now = Micros::new(info.at);
        // The checks that depend on the current overrides: other instances could not apply such a change either.
        let mut overrides = state.overrides.clone();
        for request in requests {
            if let Some(value) = &request.value {
                let entry = new_override(request, value, info, now);
                let invalid = |reason| ChangeError::Invalid { target: request.target.clone(), reason };
                overrides.put(entry, self.options).map_err(invalid)?;
            }
        }
        let writes: Vec<Write> = requests
            .iter()
            .map(|request| Write {
                target: request.target.to_string(),
                text: request.value.as_ref().map(|value| format::write(&new_override(request, value, info, now))),
                expected: request.expected,
            })
            .collect();
        let id = format!("{:016x}", rand::random::<u64>());
        let info_json = serde_json::to_string(info).unwrap_or_default();
        let (cursor, change) = match &self.store {
            OverrideStore::Journal(journal) => {
                let change = self.next_change(state, id, info_json, writes)?;
                if !peer_limits::may_be_made(&change, state.override_bytes) {
                    return Err(ChangeError::Full);
                }
                self.write_journal(journal, state, change).await?
            }
            OverrideStore::Redis(redis) => self.write_redis(redis, state, (&id, &info_json), &writes).await?,
        };
        self.apply(state, &change);
        state.cursor = cursor;
        self.note_sync(state, Ok(()));
        Ok(change)
    }

    async fn write_redis(
        &self,
        redis: &Redis,
        state: &mut SyncState,
        id_and_info: (&str, &str),
        writes: &[Write],
    ) -> Result<(Cursor, Change), ChangeError> {
        let max_entries = self.settings.audit_log_entries;
        for _ in 0..MAX_ATTEMPTS {
            match redis.put_overrides(id_and_info, writes, &state.cursor, max_entries).await? {
                Some(WriteOutcome::Done(cursor, change)) => return Ok((cursor, change)),
                Some(WriteOutcome::Conflict { target, version }) => {
                    return Err(ChangeError::Conflict { target, version });
                }
                // The store has changes that this instance lacks, or lacks changes that this instance has.
                None => self.poll_store(state).await?,
            }
        }
        Err(StoreError::Rejected.into())
    }

    /// Builds the next change for the journal, with the same checks and fields as `overrides.lua` for Redis.
    fn next_change(
        &self,
        state: &SyncState,
        id: String,
        info: String,
        writes: Vec<Write>,
    ) -> Result<Change, ChangeError> {
        let mut change = Change { version: state.cursor.version + 1, id, info, changes: Vec::new() };
        for Write { target, text, expected } in writes {
            let before = Target::parse(&target).ok().and_then(|target| state.overrides.get(&target));
            let version = before.as_ref().map_or(0, |before| before.version);
            if expected.is_some_and(|expected| expected != version) {
                return Err(ChangeError::Conflict { target, version });
            }
            change.changes.push(OverrideChange { target, before: before.as_ref().map(format::write), after: text });
        }
        Ok(change)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::merge::tests::member, *};
    use crate::engine::overrides::Scope;

    #[test]
    fn a_value_has_at_most_the_maximum_length() {
        let check = |bytes: usize| {
            let (target, value) = (Target::Switch(Scope::Everything), Some("x".repeat(bytes)));
            let request = ChangeRequest { target, value, until: None, expected: None };
            member().check(&[request], &ChangeInfo { author: "alice".into(), ..ChangeInfo::default() })
        };
        assert!(matches!(check(MAX_VALUE_BYTES), Err(ChangeError::Invalid { .. })));
        assert!(matches!(check(MAX_VALUE_BYTES + 1), Err(ChangeError::Info)));
    }
}
