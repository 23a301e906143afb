//! Parser for the switch file: switches of one instance that are in force even if the store cannot be reached.
//!
//! Each line is one switch, `MODE SCOPE [until TIME] [# reason]`:
//!
//! ```text
//! off everything                                    # incident 42
//! shadow domain api until 2026-11-22T04:00:00Z
//! deny algorithm shedding
//! enforce rule api user.path
//! ```

use std::path::Path;

use sluicegate_duration::timestamp;
use sluicegate_files as files;

use crate::{
    algorithm::Micros,
    engine::{
        Override,
        overrides::{Mode, Scope, Target},
    },
};

/// Reads all switches of the file. The error names the first invalid line.
pub(super) fn read(path: &Path) -> Result<Vec<Override>, String> {
    let text = files::read_to_string(path, files::MAX_BYTES).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text).map_err(|(line, error)| format!("{}:{line}: {error}", path.display()))
}

fn parse(text: &str) -> Result<Vec<Override>, (usize, String)> {
    let mut switches = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let (words, reason) = line.split_once('#').unwrap_or((line, ""));
        let words: Vec<&str> = words.split_whitespace().collect();
        if !words.is_empty() {
            switches.push(parse_switch(&words, reason.trim()).map_err(|error| (number + 1, error))?);
        }
    }
    Ok(switches)
}

fn parse_switch(words: &[&str], reason: &str) -> Result<Override, String> {
    let (words, until) = match words {
        [words @ .., "until", time] => {
            let until = timestamp::parse(time).and_then(|until| until.duration_since(std::time::UNIX_EPOCH).ok());
            let until = until.ok_or_else(|| format!("{time:?} is not a time such as 2026-11-22T04:00:00Z"))?;
            (words, Some(Micros::from_secs(until.as_secs())))
        }
        words => (words, None),
    };
    let [mode, scope @ ..] = words else {
        return Err("the mode is missing".to_owned());
    };
    let mode = Mode::from_name(mode)
        .ok_or_else(|| format!("{mode:?} is not a mode: expected off, shadow, enforce or deny"))?;
    let scope = match scope {
        ["everything"] => Scope::Everything,
        ["domain", domain] => Scope::Domain((*domain).to_owned()),
        ["algorithm", algorithm] => Scope::Algorithm((*algorithm).to_owned()),
        ["rule", domain, rule] => Scope::Rule { domain: (*domain).to_owned(), rule: (*rule).to_owned() },
        _ => {
            let expected = "everything, domain NAME, algorithm NAME, or rule DOMAIN NAME";
            return Err(format!("{:?} is not a scope: expected {expected}", scope.join(" ")));
        }
    };
    Ok(Override {
        target: Target::Switch(scope),
        value: mode.name().into(),
        until,
        author: "file".into(),
        reason: reason.into(),
        at: Micros::ZERO,
        version: 0,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_one_switch_per_line() {
        let text = "# all\noff everything # incident 42\n\n  shadow domain api until 2026-11-22T04:00:00Z\ndeny algorithm gcra\n\
                    enforce rule api user.path_/v1#why\n";
        let read: Vec<_> = parse(text).unwrap();
        let summary = |entry: &Override| format!("{} {} {}", entry.value, entry.target, entry.reason);
        let lines: Vec<_> = read.iter().map(summary).collect();
        assert_eq!(
            lines,
            [
                "off switch|everything incident 42",
                "shadow switch|domain|api ",
                "deny switch|kind|gcra ",
                "enforce switch|rule|api|user.path_/v1 why",
            ]
        );
        assert_eq!(read[1].until, Some(Micros::from_secs(1_795_320_000)));
        assert_eq!(read[0].until, None);
    }

    #[test]
    fn rejects_an_invalid_line_with_its_number() {
        for (text, line, expected) in [
            ("off everything\nmaybe everything", 2, "is not a mode"),
            ("off", 1, "is not a scope"),
            ("off rule api", 1, "is not a scope"),
            ("off everything until tomorrow", 1, "is not a time"),
            ("until 2026-11-22T04:00:00Z", 1, "the mode is missing"),
        ] {
            let (at, reason) = parse(text).unwrap_err();
            assert!(at == line && reason.contains(expected), "{text}: {at} {reason}");
        }
    }
}
