//! Fuzz target: the journal of overrides.
#![allow(clippy::missing_panics_doc, reason = "every target panics if a promise is broken")]

use std::{env, fs, process};

use super::format;
use crate::{
    engine::Overrides,
    rules::Options,
    store::overrides::{Change, Journal},
};

/// Loads a journal file, and the overrides in it. A valid journal must still be valid after the next change.
pub fn override_journal(input: &[u8]) {
    let path = env::temp_dir().join(format!("sluicegate-fuzz-journal-{}", process::id()));
    if fs::write(&path, input).is_err() {
        return;
    }
    let (mut journal, mut overrides, mut count) = (Journal::new(Some(path.clone())), Overrides::default(), 0);
    let cursor = journal.load(|target, version, text| {
        count += 1;
        let entry = text.and_then(|text| format::read(target, version, text));
        if let Some(entry) = entry {
            let written = format::write(&entry);
            let again = format::read(&entry.target.to_string(), version, &written);
            assert_eq!(again.map(|again| format::write(&again)), Some(written));
            let _ = overrides.put(entry, Options::default());
        }
    });
    let Ok(cursor) = cursor else {
        return;
    };
    let next = Change { version: cursor.version.saturating_add(1), id: "next".into(), ..Change::default() };
    if journal.write(&next, count, || (cursor, Vec::new())).is_ok() {
        let mut again = Journal::new(Some(path));
        assert!(again.load(|_, _, _| {}).is_ok_and(|cursor| cursor.version == next.version), "{next:?}");
    }
}
