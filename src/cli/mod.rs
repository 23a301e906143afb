//! The command line: `serve` (the default), `check`, `shard`, `simulate`, `request`, `ctl`, `health`, `migrate`,
//! `schema`, `man` and `completions`.

// The macros of the standard library panic after the reader of the output has closed the pipe. Those of the crate ctl do not.
#![warn(clippy::print_stderr, clippy::print_stdout)]

mod check;
mod health;
mod report;
mod shard;
mod simulate;
#[cfg(test)]
mod tests;
mod tips;

use std::{
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use sluicegate_ctl::{ctl, output, print, println, request};

use crate::{
    allocator, app, rules,
    settings::{self, Flags, Memory, Settings, envoyproxy::EnvoyproxySettings},
};

/// Name of the program file that has the effect of `--compat envoyproxy`.
const COMPAT_PROGRAM_NAME: &str = "ratelimit";

const EXAMPLES: &str = "Examples:
  sluicegate --rules rules
  sluicegate check rules
  sluicegate request shop user=bob
  sluicegate ctl top";

const SERVE_EXAMPLES: &str = "Examples:
  sluicegate serve --rules rules --store redis://redis:6379
  sluicegate serve --config sluicegate.toml --print-settings";

/// Rate limit service for Envoy, with counters in memory, in Redis or in memcached
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true, after_help = EXAMPLES)]
struct Cli {
    #[command(flatten)]
    serve: ServeArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve rate limit decisions (the default command)
    #[command(after_help = SERVE_EXAMPLES)]
    Serve(ServeArgs),
    /// Validate rule files and print all errors and warnings (exit code 1 if there is an error)
    Check(check::CheckArgs),
    /// Show which server of the store holds a descriptor's counter, and which counters would move if the ring had other nodes
    Shard(shard::ShardArgs),
    /// Replay recorded traffic against other rules and report what they would deny
    Simulate(simulate::SimulateArgs),
    /// Send one rate limit request by gRPC and print the response (exit code 1 if it is denied, 2 on an error)
    Request(request::RequestArgs),
    /// Operate a running service by its admin API: limits, plans, switches, counters and candidate rules
    Ctl(Box<ctl::CtlArgs>),
    /// Check the health of the local service (exit code 1 if unhealthy)
    #[command(after_help = "Example:\n  sluicegate health --http-addr 127.0.0.1:8080")]
    Health(HealthArgs),
    /// Print the settings file that corresponds to the environment variables of another service
    #[command(after_help = "Example:\n  sluicegate migrate --from-env > sluicegate.toml")]
    Migrate(MigrateArgs),
    /// Print the JSON Schema of rule files or of settings files, for editors
    #[command(after_help = "Example:\n  sluicegate schema rules > rules.schema.json")]
    Schema {
        /// Type of the files
        #[arg(value_enum)]
        files: Files,
    },
    /// Print the manual page (roff) of this program or of one of its commands
    #[command(after_help = "Example:\n  sluicegate man ctl | man -l -")]
    Man {
        /// Command to describe; the whole program by default
        command: Option<String>,
    },
    /// Generate shell completions
    #[command(
        after_help = "Example:\n  sluicegate completions bash > ~/.local/share/bash-completion/completions/sluicegate"
    )]
    Completions {
        /// Shell that reads the completions
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Directory of rule files (*.yaml), reloaded when they change [default: built-in examples]
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// Listen address of the gRPC server [default: 0.0.0.0:8081]
    #[arg(long, value_name = "ADDR", value_parser = settings::listen_address)]
    grpc_addr: Option<SocketAddr>,
    /// Listen address of the HTTP server [default: 0.0.0.0:8080]
    #[arg(long, value_name = "ADDR", value_parser = settings::listen_address)]
    http_addr: Option<SocketAddr>,
    /// Store of the counters: memory, redis://…, redis+sentinel://…, redis+cluster://…, redis+ring://… (rediss…
    /// for TLS), redis+unix://… or memcached://… (memcacheds://… for TLS) [default: memory]
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// Settings file in TOML or YAML; environment variables (`SLUICEGATE__GRPC__ADDR`) and flags override it
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the environment variables of another service; also enabled if this program is started as `ratelimit`
    #[arg(long, value_name = "SERVICE")]
    compat: Option<Compat>,
    /// Print the resulting settings without secrets and the largest memory that callers can take, and exit
    #[arg(long)]
    print_settings: bool,
}

/// A service with supported environment variables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Compat {
    /// envoyproxy/ratelimit
    Envoyproxy,
}

#[derive(Debug, Args)]
struct HealthArgs {
    /// Address of the service's HTTP server [default: from the settings]
    #[arg(long, value_name = "ADDR")]
    http_addr: Option<SocketAddr>,
    /// Settings file of the service
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Read the environment variables of another service, as the checked service does
    #[arg(long, value_name = "SERVICE")]
    compat: Option<Compat>,
}

#[derive(Debug, Args)]
struct MigrateArgs {
    /// Read the environment variables of envoyproxy/ratelimit from the current environment
    #[arg(long, required = true)]
    from_env: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Files {
    /// Rule files
    Rules,
    /// Settings files
    Settings,
}

/// Parses the command line and runs the command.
///
/// # Errors
///
/// Returns an error if the command fails. `main` prints it.
pub fn run() -> anyhow::Result<ExitCode> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => tips::add(error, &Cli::command(), &arguments).exit(),
    };
    let code = execute(cli)?;
    output::finish().context("cannot write the output")?;
    Ok(code)
}

fn execute(cli: Cli) -> anyhow::Result<ExitCode> {
    match cli.command {
        None => serve(cli.serve),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::Health(HealthArgs { http_addr, config, compat })) => {
            let flags = Flags { http_addr, envoyproxy: envoyproxy_settings(compat)?, ..Flags::default() };
            health::run(Settings::load(config.as_deref(), None, flags)?.http.addr)
        }
        Some(Command::Migrate(_)) => migrate(),
        Some(Command::Check(args)) => check::run(&args),
        Some(Command::Shard(args)) => shard::run(args),
        Some(Command::Simulate(args)) => simulate::run(&args),
        Some(Command::Request(args)) => Ok(request::run(&args)),
        Some(Command::Ctl(args)) => ctl::run(*args),
        Some(Command::Schema { files }) => {
            let schema = match files {
                Files::Rules => rules::schema(),
                Files::Settings => settings::schema(),
            };
            writeln!(io::stdout(), "{schema:#}")?;
            Ok(ExitCode::SUCCESS)
        }
        Some(Command::Man { command }) => print_manual(command.as_deref()),
        Some(Command::Completions { shell }) => {
            // It panics if it cannot write.
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "sluicegate", &mut script);
            io::stdout().write_all(&script)?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn print_manual(command: Option<&str>) -> anyhow::Result<ExitCode> {
    let mut all = Cli::command();
    all.build();
    let command = match command {
        Some(command) => all.find_subcommand(command).with_context(|| format!("unknown command {command:?}"))?.clone(),
        None => all,
    };
    // An empty date needs the quotes, or readers of the page take the version for the date.
    let page = clap_mangen::Man::new(command).date("\"\"").source(concat!("sluicegate ", env!("CARGO_PKG_VERSION")));
    page.manual("User Commands").render(&mut io::stdout())?;
    Ok(ExitCode::SUCCESS)
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let envoyproxy = envoyproxy_settings(args.compat)?;
    let ServeArgs { rules, store, grpc_addr, http_addr, config, print_settings, .. } = args;
    let flags = Flags { rules, store, grpc_addr, http_addr, envoyproxy };
    let settings = Settings::load(config.as_deref(), None, flags)?;
    if print_settings {
        print!("{}\n{}", settings.masked(), Memory::new(&settings));
        return Ok(ExitCode::SUCCESS);
    }
    allocator::configure();
    app::run(settings)?;
    Ok(ExitCode::SUCCESS)
}

/// Returns settings from the variables of another service, if `--compat` or the name of the program selects it.
fn envoyproxy_settings(compat: Option<Compat>) -> anyhow::Result<Option<EnvoyproxySettings>> {
    let name = std::env::args_os().next().and_then(|path| Some(Path::new(&path).file_stem()?.to_owned()));
    let is_compat = compat.is_some() || name.is_some_and(|name| name == COMPAT_PROGRAM_NAME);
    Ok(if is_compat { Some(EnvoyproxySettings::read(&settings::process_environment())?) } else { None })
}

fn migrate() -> anyhow::Result<ExitCode> {
    let envoyproxy = EnvoyproxySettings::read(&settings::process_environment())?;
    for (name, reason) in envoyproxy.without_effect() {
        println!("# {name} has no effect: {reason}");
    }
    print!("{}", envoyproxy.toml());
    Ok(ExitCode::SUCCESS)
}
