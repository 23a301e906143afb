//! The command line: `serve` (also without a word), `check`, `shard`, `simulate`, `ctl`, `health`, `migrate`, and
//! what people and editors read: `schema`, `man` and `completions`.

mod ctl;
mod health;
mod report;
mod shard;
mod simulate;

use std::{
    collections::HashMap,
    ffi::OsString,
    io::{self, Write},
    net::SocketAddr,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};

use crate::{
    app,
    rules::{self, Entry, Options},
    service::reload::{LoadError, Source},
    settings::{self, Flags, Settings, envoyproxy::EnvoyproxySettings},
};

/// The name under which this program is another.
const PEER: &str = "ratelimit";

/// The rate-limit decision service: Envoy's protocol, counters in memory or in Redis.
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
    /// Serve decisions (the default). Without --rules, the built-in examples.
    Serve(ServeArgs),
    /// Validate rule files: every error of every file, exit code 1 if there are any.
    Check(CheckArgs),
    /// Say where a descriptor's counter is, and what other nodes would change about it.
    Shard(shard::ShardArgs),
    /// Ask recorded traffic again of other rules: what they would have refused, and whom.
    Simulate(simulate::SimulateArgs),
    /// Operate a running service: limits of single customers, switches, who is refused and why.
    Ctl(Box<ctl::CtlArgs>),
    /// Ask the service on this machine whether it is well: exit code 1 if it is not. For health checks of containers.
    Health(HealthArgs),
    /// Print the settings file that says what another service's environment says.
    Migrate(MigrateArgs),
    /// Print the JSON Schema of rule files or of settings files, by which editors complete and check them.
    Schema {
        /// Of which files.
        #[arg(value_enum)]
        files: Files,
    },
    /// Write the manual page (roff) of this program, or of one of its words.
    Man {
        /// Which word.
        word: Option<String>,
    },
    /// Write what completes these words in a shell.
    Completions {
        /// Which shell.
        shell: clap_complete::Shell,
    },
}

#[derive(Debug, Args)]
struct ServeArgs {
    /// Directory of rule files (*.yaml), followed while running.
    #[arg(long, value_name = "DIR")]
    rules: Option<PathBuf>,
    /// Where gRPC listens [default: 0.0.0.0:8081].
    #[arg(long, value_name = "ADDR")]
    grpc_addr: Option<SocketAddr>,
    /// Where HTTP listens [default: 0.0.0.0:8080].
    #[arg(long, value_name = "ADDR")]
    http_addr: Option<SocketAddr>,
    /// Where counters are kept: memory, redis://…, redis+sentinel://…, redis+cluster://…, redis+ring://… (rediss… for
    /// TLS), redis+unix://… [default: memory].
    #[arg(long, value_name = "STORE")]
    store: Option<String>,
    /// Settings file, TOML or YAML. Environment variables (SLUICEGATE__GRPC__ADDR) and flags win over it.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Take the environment variables of another service; so does a link to this program that has its name, `ratelimit`.
    #[arg(long, value_name = "SERVICE")]
    compat: Option<Compat>,
    /// Print the settings that result, secrets masked, and exit.
    #[arg(long)]
    print_settings: bool,
}

/// A service that this one takes the place of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Compat {
    /// envoyproxy/ratelimit.
    Envoyproxy,
}

#[derive(Debug, Args)]
struct HealthArgs {
    /// Where its HTTP listens [default: what the settings say].
    #[arg(long, value_name = "ADDR")]
    http_addr: Option<SocketAddr>,
    /// Its settings file.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// It takes the environment variables of another service.
    #[arg(long, value_name = "SERVICE")]
    compat: Option<Compat>,
}

#[derive(Debug, Args)]
struct MigrateArgs {
    /// From the environment variables of envoyproxy/ratelimit, as they are set here.
    #[arg(long, required = true)]
    from_env: bool,
}

#[derive(Debug, Args)]
struct CheckArgs {
    /// Directory of rule files.
    dir: PathBuf,
    /// Let several files name one domain, as rules.merge_domains does.
    #[arg(long)]
    merge_domains: bool,
    /// Show which rule a descriptor meets, and why.
    #[arg(long, num_args = 1.., value_names = ["DOMAIN", "KEY=VALUE"])]
    explain: Vec<String>,
    /// How what is wrong is written.
    #[arg(long, value_enum, default_value_t, conflicts_with = "explain")]
    format: Format,
}

#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum Format {
    /// A line each, for people.
    #[default]
    Text,
    /// A list of objects.
    Json,
    /// SARIF 2.1.0, as code hosts show it beside the lines.
    Sarif,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Files {
    /// Rule files.
    Rules,
    /// Settings files.
    Settings,
}

/// Does what the command line says.
pub fn run() -> anyhow::Result<ExitCode> {
    let cli = Cli::parse();
    match cli.command {
        None => serve(cli.serve),
        Some(Command::Serve(args)) => serve(args),
        Some(Command::Health(HealthArgs { http_addr, config, compat })) => {
            let overrides = Flags { http_addr, envoyproxy: peer(compat)?, ..Flags::default() };
            health::run(Settings::load(config.as_deref(), None, overrides)?.http.addr)
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
        Some(Command::Man { word }) => manual(word.as_deref()),
        Some(Command::Completions { shell }) => {
            clap_complete::generate(shell, &mut Cli::command(), "sluicegate", &mut io::stdout());
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn manual(word: Option<&str>) -> anyhow::Result<ExitCode> {
    let mut all = Cli::command();
    all.build();
    let command = match word {
        Some(word) => all.find_subcommand(word).with_context(|| format!("there is no word {word:?}"))?.clone(),
        None => all,
    };
    clap_mangen::Man::new(command).render(&mut io::stdout())?;
    Ok(ExitCode::SUCCESS)
}

fn serve(args: ServeArgs) -> anyhow::Result<ExitCode> {
    let peer = peer(args.compat)?;
    let ServeArgs { rules, store, grpc_addr, http_addr, config, print_settings, .. } = args;
    let overrides = Flags { rules, store, grpc_addr, http_addr, envoyproxy: peer };
    let settings = Settings::load(config.as_deref(), None, overrides)?;
    if print_settings {
        print!("{}", settings.masked());
        return Ok(ExitCode::SUCCESS);
    }
    app::run(settings)?;
    Ok(ExitCode::SUCCESS)
}

/// What the environment of another service says, where that is asked for or this program has its name.
fn peer(compat: Option<Compat>) -> anyhow::Result<Option<EnvoyproxySettings>> {
    let name = std::env::args_os().next().and_then(|path| Some(Path::new(&path).file_stem()?.to_owned()));
    let is_peer = compat.is_some() || name.is_some_and(|name| name == PEER);
    Ok(if is_peer { Some(EnvoyproxySettings::read(&environment())?) } else { None })
}

fn migrate() -> anyhow::Result<ExitCode> {
    let peer = EnvoyproxySettings::read(&environment())?;
    for (name, reason) in peer.without_effect() {
        println!("# {name} has no effect: {reason}");
    }
    print!("{}", peer.toml());
    Ok(ExitCode::SUCCESS)
}

/// What is no text says nothing to anybody.
fn environment() -> HashMap<String, String> {
    let text = |(name, value): (OsString, OsString)| Some((name.into_string().ok()?, value.into_string().ok()?));
    std::env::vars_os().filter_map(text).collect()
}

fn check(args: &CheckArgs) -> anyhow::Result<ExitCode> {
    let files = Source::directory(args.dir.clone()).read()?;
    if files.is_empty() {
        bail!("{} has no *.yaml", args.dir.display());
    }
    let options = Options { merge_domains: args.merge_domains, ..Options::default() };
    let compiled = rules::compile(&files, options);
    let code = if compiled.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    let problems = compiled.as_ref().map_or_else(|problems| problems, |(_, warnings)| warnings);
    match args.format {
        Format::Json => writeln!(io::stdout(), "{:#}", report::json(problems))?,
        Format::Sarif => writeln!(io::stdout(), "{:#}", report::sarif(problems))?,
        Format::Text => match compiled {
            Err(problems) => println!("{}", LoadError::Invalid(problems)),
            Ok((set, warnings)) => {
                for warning in warnings {
                    println!("{warning}");
                }
                let Some((domain, pairs)) = args.explain.split_first() else {
                    println!(
                        "{} files, {} domains, {} limits: all right",
                        files.len(),
                        set.domains(),
                        set.rules().len()
                    );
                    return Ok(code);
                };
                for line in set.explain(domain, &entries(pairs)?) {
                    println!("{line}");
                }
            }
        },
    }
    Ok(code)
}

/// `key=value` for each entry of a descriptor.
fn entries(pairs: &[String]) -> anyhow::Result<Vec<Entry<'_>>> {
    let mut entries = Vec::new();
    for pair in pairs {
        let (key, value) = pair.split_once('=').with_context(|| format!("{pair:?} is not KEY=VALUE"))?;
        entries.push(Entry { key, value });
    }
    Ok(entries)
}
