//! The help of every command.

use clap::{Command, CommandFactory, Parser};

use super::Cli;

/// Splits a command line of a shell. Ends at a pipe or a redirection.
fn split(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut is_quoted = false;
    for letter in line.chars() {
        match letter {
            '\'' => is_quoted = !is_quoted,
            ' ' if !is_quoted => words.push(String::new()),
            '|' | '>' if !is_quoted => break,
            letter => words.last_mut().unwrap().push(letter),
        }
    }
    words.retain(|word| !word.is_empty());
    words
}

fn each_command(command: &Command, path: &str, check: &mut impl FnMut(&str, &Command)) {
    check(path, command);
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        each_command(subcommand, &format!("{path} {}", subcommand.get_name()), check);
    }
}

#[test]
fn every_help_has_examples_of_its_command_that_can_be_parsed() {
    let mut commands = 0;
    each_command(&Cli::command(), "sluicegate", &mut |path, command| {
        commands += 1;
        let help = command.get_after_help().unwrap_or_else(|| panic!("{path} has no example")).to_string();
        let lines: Vec<&str> = help.lines().filter_map(|line| line.strip_prefix("  ")).collect();
        assert!(help.starts_with("Example") && !lines.is_empty(), "{path}: {help}");
        for line in lines {
            let words = split(line);
            assert!(line.starts_with(path), "{path} has an example of another command: {line}");
            if let Err(error) = Cli::try_parse_from(&words) {
                panic!("{line}: {error}");
            }
        }
    });
    assert!(commands > 40, "{commands} commands");
}

/// The options of a command are separate from those of all `ctl` commands.
#[test]
fn options_of_connections_have_a_heading_of_their_own() {
    let mut cli = Cli::command();
    cli.build();
    let ctl = cli.find_subcommand("ctl").unwrap();
    for id in ["addr", "token_file", "token", "ca", "cert", "key"] {
        let argument = ctl.get_arguments().find(|argument| argument.get_id() == id).unwrap();
        assert_eq!(argument.get_help_heading(), Some("Connection"), "{id}");
    }
    let set = ctl.find_subcommand("limit").and_then(|limit| limit.find_subcommand("set")).unwrap();
    let headings: Vec<_> = set.get_arguments().filter(|argument| argument.get_help_heading().is_some()).collect();
    assert_eq!(headings.len(), 6, "{headings:?}");
}
