//! Tips for commands that do not exist, but have another name here.

use std::ffi::OsString;

use clap::{
    Command, Error,
    error::{ContextKind, ContextValue},
};

/// Words that are no commands, each with the commands of the same meaning. Only commands of the group in which the word
/// stands are suggested.
const SYNONYMS: &[(&str, &[&str])] = &[
    ("disable", &["off"]),
    ("enable", &["enforce", "clear"]),
    ("on", &["enforce", "clear"]),
    ("block", &["deny"]),
    ("dry-run", &["shadow"]),
    ("add", &["set", "assign"]),
    ("remove", &["unset", "unassign", "clear", "drop"]),
    ("delete", &["unset", "unassign", "clear", "drop"]),
    ("show", &["list", "inspect"]),
    ("validate", &["check"]),
    ("test", &["request"]),
    ("start", &["serve"]),
    ("run", &["serve"]),
    ("status", &["health"]),
];

/// Adds the commands that [`SYNONYMS`] has for an unknown command to the error about it. They replace similar names.
pub(super) fn add(mut error: Error, program: &Command, arguments: &[OsString]) -> Error {
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidSubcommand) else {
        return error;
    };
    let mut group = program;
    for argument in arguments {
        if argument.to_str() == Some(word) {
            break;
        }
        group = group.find_subcommand(argument).unwrap_or(group);
    }
    let Some((_, synonyms)) = SYNONYMS.iter().find(|(synonym, _)| synonym == word) else {
        return error;
    };
    let mut names = Vec::new();
    for name in *synonyms {
        if group.find_subcommand(name).is_some() {
            names.push((*name).to_owned());
        }
    }
    if !names.is_empty() {
        error.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(names));
    }
    error
}
