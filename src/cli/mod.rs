//! The command line: `serve` (the default), `check`, `shard`, `simulate`, `ctl`, `health`, `migrate`, `schema`, `man`
//! and `completions`.

mod ctl;
mod health;
mod report;
mod shard;
mod simulate;

use std::{
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::{
    allocator, app,
    rules::{self, Entry, Options, Severity},
    service::source::{LoadError, Source},
    settings::{self, Flags, Memory, Settings, envoyproxy::EnvoyproxySettings},
};

/// Name of the program file with which it reads the environment variables of envoyproxy/ratelimit.
const COMPAT_PROGRAM_NAME: &str = "ratelimit";

/// Rate limit service for Envoy, with counters in memory or in Redis
#[derive(Debug, Parser)]
#[command(version, args_conflicts_with_subcommands = true)]
struct Cli {
    #[command(flatten)]
    serve: ServeArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Serve rate limit decisions (the default command)
    Serve(ServeArgs),
    /// Validate rule files and print all errors and warnings (exit code 1 if there is an error)
    Check(CheckArgs),
    /// Show which Redis server holds a descriptor's counter, and which counters would move if the ring had other nodes
    Shard(shard::ShardArgs),
    /// Replay recorded traffic against other rules and report what they would deny
    Simulate(simulate::SimulateArgs),
    /// Operate a running service by its admin API: limits, plans, switches, counters and candidate rules
    Ctl(Box<ctl::CtlArgs>),
    /// Check the health of the local service (exit code 1 if unhealthy)
    Health(HealthArgs),
    /// Print the settings file that corresponds to the environment variables of another service
    Migrate(MigrateArgs),
    /// Print the JSON Schema of rule files or of settings files, for editors
    Schema {
        /// Type of the files
        #[arg(value_enum)]
        files: Files,
    },
    /// Print the manual page (roff) of this program or of one of its commands
    Man {
        /// Command to describe; the whole program by default
        command: Option<String>,
    },
    /// Generate shell completions
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
    /// for TLS) or redis+unix://… [default: memory]
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

#[derive(Debug, Args)]
struct CheckArgs {
    /// Directory of rule files
    dir: PathBuf,
    /// Allow several files to define one domain, like the setting `rules.merge_domains`
    #[arg(long)]
    merge_domains: bool,
    /// Explain which rule matches a descriptor
    #[arg(long, num_args = 1.., value_names = ["DOMAIN", "KEY=VALUE"])]
    explain: Vec<String>,
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
    let cli = Cli::parse();
    match cli.command {
        None => serve(cli.serve),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::Health(HealthArgs { http_addr, config, compat })) => {
            let flags = Flags { http_addr, envoyproxy: envoyproxy_settings(compat)?, ..Flags::default() };
            health::run(Settings::load(config.as_deref(), None, flags)?.http.addr)
        }
        Some(Command::Migrate(_)) => migrate(),
        Some(Command::Check(args)) => check(&args),
        Some(Command::Shard(args)) => shard::run(args),
        Some(Command::Simulate(args)) => simulate::run(&args),
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
            clap_complete::generate(shell, &mut Cli::command(), "sluicegate", &mut io::stdout());
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

/// Returns the environment variables that are valid UTF-8.
fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let mut contents = Source::directory(args.dir.clone()).read_contents()?;
    // The service starts without rule files, but to check an empty directory is a mistake.
    if contents.files.is_empty() {
        for diagnostic in &mut contents.diagnostics {
            diagnostic.severity = Severity::Error;
        }
    }
    let files = contents.files.len();
    let options = Options { merge_domains: args.merge_domains, ..Options::default() };
    let compiled = contents.compile(options);
    let code = if compiled.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let diagnostics = compiled.as_ref().map_or_else(|diagnostics| diagnostics, |(_, warnings)| warnings);
    match args.format {
        Format::Json => writeln!(io::stdout(), "{:#}", report::json(diagnostics))?,
        Format::Sarif => writeln!(io::stdout(), "{:#}", report::sarif(diagnostics))?,
        Format::Text => match compiled {
            Err(diagnostics) => println!("{}", LoadError::Invalid(diagnostics)),
            Ok((set, warnings)) => {
                for warning in warnings {
                    println!("{warning}");
                }
                let Some((domain, pairs)) = args.explain.split_first() else {
                    println!("{files} files, {} domains, {} limits: no errors", set.domains(), set.rules().len());
                    return Ok(code);
                };
                for line in set.explain(domain, &parse_entries(pairs)?) {
                    println!("{line}");
                }
            }
        },
    }
    Ok(code)
}

/// Parses the entries of a descriptor from `key=value`.
fn parse_entries(pairs: &[String]) -> anyhow::Result<Vec<Entry<'_>>> {
    let mut entries = Vec::new();
    for pair in pairs {
        let (key, value) = pair.split_once('=').with_context(|| format!("{pair:?} is not KEY=VALUE"))?;
        entries.push(Entry { key, value });
    }
    Ok(entries)
}
