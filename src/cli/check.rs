//! `sluicegate check`: validates rule files, and explains which rule matches a descriptor.

use std::{
    io::{self, Write},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Context;
use clap::{Args, ValueEnum};
use sluicegate_ctl::entries::{Entity, printed};
use sluicegate_ctl::println;

use super::report;
use crate::{
    rules::source::{Contents, LoadError, Source},
    rules::{Lookup, Options, RuleSet, Severity},
};

const EXAMPLES: &str = "Examples:
  sluicegate check rules
  sluicegate check rules/shop.yaml
  sluicegate check rules --format sarif
  sluicegate check rules --explain shop user=bob path=/v1/charges
  sluicegate check rules --explain shop user=bob --require-limit";

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CheckArgs {
    /// Directory of rule files, or one rule file
    dir: PathBuf,
    /// Allow several files to define one domain, like the setting `rules.merge_domains`
    #[arg(long)]
    merge_domains: bool,
    /// Explain which rule matches a descriptor: its domain, and its entries as KEY=VALUE in the order in which the
    /// caller sends them; or both as `ctl top` prints them, such as 'shop|user=bob'
    #[arg(long, num_args = 1.., value_names = ["DOMAIN", "KEY=VALUE"])]
    explain: Vec<String>,
    /// With --explain: exit code 1 if no limit applies to the descriptor
    #[arg(long, requires = "explain")]
    require_limit: bool,
    /// Output format of errors and warnings
    #[arg(long, value_enum, default_value_t, conflicts_with = "explain")]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// One line each
    #[default]
    Text,
    /// A list of objects
    Json,
    /// SARIF 2.1.0, which code hosts display next to the source lines
    Sarif,
}

/// Prints the errors, warnings and notes of rule files. The exit code is 1 if there is an error.
pub(super) fn run(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let mut contents = if args.dir.is_file() {
        Contents::of_file(&args.dir)
    } else {
        Source::directory(args.dir.clone()).read_contents()?
    };
    // The service starts without rule files, but to check an empty directory is a mistake.
    if contents.files.is_empty() {
        for diagnostic in &mut contents.diagnostics {
            diagnostic.severity = Severity::Error;
        }
    }
    let files = contents.files.len();
    let options = Options { merge_domains: args.merge_domains, notes: args.explain.is_empty(), ..Options::default() };
    let compiled = contents.compile(options);
    let code = if compiled.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let diagnostics = match &compiled {
        Ok((_, warnings)) => warnings,
        Err(diagnostics) => diagnostics,
    };
    match args.format {
        Format::Json => writeln!(io::stdout(), "{:#}", report::json(diagnostics))?,
        Format::Sarif => writeln!(io::stdout(), "{:#}", report::sarif(diagnostics))?,
        Format::Text => match compiled {
            Err(diagnostics) => println!("{}", LoadError::Invalid(diagnostics)),
            Ok((set, warnings)) => {
                for warning in warnings {
                    println!("{warning}");
                }
                if !args.explain.is_empty() {
                    return explain(&set, args);
                }
                println!("{files} files, {} domains, {} limits: no errors", set.domains(), set.rules().len());
            }
        },
    }
    Ok(code)
}

/// Prints which rule applies to the descriptor.
fn explain(set: &RuleSet, args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let (domain, pairs) = args.explain.split_first().context("--explain needs a domain")?;
    // A domain without entries is explained, too.
    let entity = match pairs {
        [] => printed(domain).unwrap_or_else(|| Entity { domain: domain.clone(), entries: Vec::new() }),
        pairs => Entity::read(domain, pairs)?,
    };
    for line in set.explain(&entity.domain, &entity.entries()) {
        println!("{line}");
    }
    let has_limit = match set.find(&entity.domain, entity.entries().into_iter()) {
        Lookup::Rule(rule, _) => rule.limit.is_some(),
        Lookup::UnknownDomain | Lookup::NoLimit => false,
    };
    if args.require_limit && !has_limit {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}
