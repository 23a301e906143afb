//! What later versions must keep, as docs/reference/stability.md promises.
//!
//! The files in `tests/golden/released` were written by the last release. A later version may add lines to a list, but
//! it must keep every line. `UPDATE_RELEASED=1` writes the lists of the present version, which is a step of a release.

/// What is stored in Redis and in files: names of counters, overrides, journals.
mod stored;
/// Protocols, settings, rule files, metrics and the command line.
mod surface;
/// Two versions on one Redis.
mod upgrade;

use std::{collections::BTreeSet, fs, path::PathBuf};

use crate::support::repository;

/// Returns the path of a file that the last release wrote.
fn released(name: &str) -> PathBuf {
    repository("tests/golden/released").join(name)
}

/// Requires that `present` contains every line of the released list.
fn assert_keeps(name: &str, present: &BTreeSet<String>) {
    let path = released(name);
    if std::env::var_os("UPDATE_RELEASED").is_some() {
        let lines: String = present.iter().map(|line| format!("{line}\n")).collect();
        fs::write(&path, lines).unwrap();
    }
    let released = fs::read_to_string(&path).unwrap();
    assert!(released.lines().count() > 5, "{} is too short", path.display());
    let missing: Vec<_> = released.lines().filter(|line| !present.contains(*line)).collect();
    assert!(missing.is_empty(), "{name}: the last release has what this version lacks:\n{}", missing.join("\n"));
}
