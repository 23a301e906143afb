//! Switches in a file beside this instance: in force also while no store can be asked.
//!
//! A line each, `MODE SCOPE [until TIME] [# reason]`:
//!
//! ```text
//! off everything                                    # incident 42
//! shadow domain api until 2026-11-22T04:00:00Z
//! deny kind shedding
//! enforce rule api user.path
//! ```

use std::path::Path;

use crate::{
    algorithm::Micros,
    engine::{
        Override,
        overrides::{Mode, Scope, Target},
    },
};

/// All switches of the file; an error names the first line that is none.
pub(super) fn read(path: &Path) -> Result<Vec<Override>, String> {
    let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
    parse(&text).map_err(|(line, why)| format!("{}:{line}: {why}", path.display()))
}

fn parse(text: &str) -> Result<Vec<Override>, (usize, String)> {
    let mut switches = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let (words, reason) = line.split_once('#').unwrap_or((line, ""));
        let words: Vec<&str> = words.split_whitespace().collect();
        if !words.is_empty() {
            switches.push(switch(&words, reason.trim()).map_err(|why| (number + 1, why))?);
        }
    }
    Ok(switches)
}

fn switch(words: &[&str], reason: &str) -> Result<Override, String> {
    let (words, until) = match words {
        [words @ .., "until", time] => {
            let until = humantime::parse_rfc3339_weak(time).ok();
            let until = until.and_then(|until| until.duration_since(std::time::UNIX_EPOCH).ok());
            let until = until.ok_or_else(|| format!("{time:?} is no time like 2026-11-22T04:00:00Z"))?;
            (words, Some(Micros::from_secs(until.as_secs())))
        }
        words => (words, None),
    };
    let [mode, scope @ ..] = words else {
        return Err("a mode is missing".to_owned());
    };
    let mode = Mode::from_name(mode).ok_or_else(|| format!("{mode:?} is no mode: off, shadow, enforce or deny"))?;
    let scope = match scope {
        ["everything"] => Scope::Everything,
        ["domain", domain] => Scope::Domain((*domain).to_owned()),
        ["kind", kind] => Scope::Algorithm((*kind).to_owned()),
        ["rule", domain, rule] => Scope::Rule { domain: (*domain).to_owned(), rule: (*rule).to_owned() },
        _ => {
            let expected = "everything, domain NAME, kind NAME, or rule DOMAIN NAME";
            return Err(format!("{:?} is no scope: {expected}", scope.join(" ")));
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
    fn a_line_is_a_switch() {
        let text = "# all\noff everything # incident 42\n\n  shadow domain api until 2026-11-22T04:00:00Z\ndeny kind gcra\n\
                    enforce rule api user.path_/v1#why\n";
        let read: Vec<_> = parse(text).unwrap();
        let short = |it: &Override| format!("{} {} {}", it.value, it.target, it.reason);
        let lines: Vec<_> = read.iter().map(short).collect();
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
    fn a_line_that_is_none_says_why() {
        for (text, line, expected) in [
            ("off everything\nmaybe everything", 2, "is no mode"),
            ("off", 1, "is no scope"),
            ("off rule api", 1, "is no scope"),
            ("off everything until tomorrow", 1, "is no time"),
            ("until 2026-11-22T04:00:00Z", 1, "a mode is missing"),
        ] {
            let (at, why) = parse(text).unwrap_err();
            assert!(at == line && why.contains(expected), "{text}: {at} {why}");
        }
    }
}
