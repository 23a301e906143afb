//! [`Settings`]: all settings, built in ascending precedence from defaults, the variables of OpenTelemetry or
//! envoyproxy/ratelimit, a file, variables `SLUICEGATE__…`, and flags.
//!
//! Only this module reads settings files and variables. Each part of the service defines its own `Settings` type.

pub mod envoyproxy;
#[cfg(any(test, fuzzing))]
pub mod fuzz;
mod invalid;
mod memory;
pub mod opentelemetry;
mod schema;
mod store_address;
mod unknown;
mod unread;
mod variables;

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use config::{
    Config, ConfigBuilder, ConfigError, Environment, File, FileFormat, Map, Source, Value, ValueKind,
    builder::DefaultState,
};
use serde::{Deserialize, Serialize};

use self::{
    envoyproxy::EnvoyproxySettings,
    opentelemetry::OpenTelemetrySettings,
    store_address::{is_address, is_memcached},
    variables::has_credentials,
};
pub use self::{invalid::listen_address, memory::Memory, schema::schema};
use crate::{engine, service, store, telemetry, transport, yaml::Yaml};

/// Prefix of environment variables: `SLUICEGATE__GRPC__ADDR` sets `grpc.addr`.
const PREFIX: &str = "SLUICEGATE";
/// Separator between the sections of a variable's name.
const SEPARATOR: &str = "__";
/// Settings that are lists, which only a file can contain. Their empty defaults are not serialized, so they are listed.
const LISTS: [&str; 13] = [
    "admin.operate",
    "admin.read",
    "record.entity_keys",
    "redis.ring",
    "rules.xds.headers",
    "rules.xds.node_metadata",
    "per_second.redis.ring",
    "telemetry.otlp.headers",
    "telemetry.otlp.metrics_headers",
    "telemetry.otlp.resource_attributes",
    "telemetry.otlp.traces_headers",
    "telemetry.statsd.name_mappings",
    "telemetry.statsd.tags",
];

/// All settings of the service.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct Settings {
    /// Store of the counters: `memory`, or the address of Redis as `redis://` (one server), `redis+sentinel://`,
    /// `redis+cluster://`, `redis+ring://` (several servers) or `redis+unix://`. With TLS, the scheme begins with
    /// `rediss`. For memcached, the address is `memcached://host:port[,host:port]`.
    pub store: String,
    /// Number of worker threads, which decide requests; with 0, the number of CPU cores.
    pub workers: usize,
    /// Whether a crash may write the memory of the process, which contains secrets and names of entities, to a file.
    pub core_dumps: bool,
    /// The other instances of the service.
    pub cluster: transport::cluster::Settings,
    /// Source of the rules.
    pub rules: RulesSettings,
    /// Defaults for decisions.
    pub decisions: engine::Settings,
    /// Headers and metadata in responses.
    pub response: transport::ResponseSettings,
    /// The memory that callers can make the process hold.
    pub input: transport::input::Settings,
    /// The gRPC server.
    pub grpc: transport::grpc::Settings,
    /// The HTTP server.
    pub http: transport::http::Settings,
    /// The admin API and its authentication.
    pub admin: transport::admin::Settings,
    /// The web console.
    pub console: transport::console::Settings,
    /// The store `memory`.
    pub memory: store::memory::Settings,
    /// The store `redis…://`.
    pub redis: store::redis::Settings,
    /// The store `memcached://`.
    pub memcached: store::memcached::Settings,
    /// A separate store for limits with the unit `second`.
    pub per_second: PerSecondSettings,
    /// The cache of denials that are still valid.
    pub deny_cache: store::local::DenyCacheSettings,
    /// Leases of hits, for rules with `consistency: leased`.
    pub lease: store::local::LeaseSettings,
    /// Counters that are synchronised with the store at an interval, for rules with `consistency: eventual`.
    pub eventual: store::local::EventualSettings,
    /// Overrides, which operators set while the service runs.
    pub overrides: service::overrides::Settings,
    /// Envoy's quota protocol (RLQS).
    pub quotas: service::quotas::Settings,
    /// Recording of a sample of the requests in files.
    pub record: service::record::Settings,
    /// Logs, metrics and traces.
    pub telemetry: telemetry::Settings,
    /// Shutdown on SIGTERM or SIGINT.
    pub shutdown: ShutdownSettings,
    /// Warnings about the settings, which are logged at startup.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            store: "memory".into(),
            workers: 0,
            core_dumps: false,
            cluster: transport::cluster::Settings::default(),
            rules: RulesSettings::default(),
            decisions: engine::Settings::default(),
            response: transport::ResponseSettings::default(),
            input: transport::input::Settings::default(),
            grpc: transport::grpc::Settings::default(),
            http: transport::http::Settings::default(),
            admin: transport::admin::Settings::default(),
            console: transport::console::Settings::default(),
            memory: store::memory::Settings::default(),
            redis: store::redis::Settings::default(),
            memcached: store::memcached::Settings::default(),
            per_second: PerSecondSettings::default(),
            deny_cache: store::local::DenyCacheSettings::default(),
            lease: store::local::LeaseSettings::default(),
            eventual: store::local::EventualSettings::default(),
            overrides: service::overrides::Settings::default(),
            quotas: service::quotas::Settings::default(),
            record: service::record::Settings::default(),
            telemetry: telemetry::Settings::default(),
            shutdown: ShutdownSettings::default(),
            warnings: Vec::new(),
        }
    }
}

/// A separate store for limits with the unit `second`. Their counters have more writes and shorter lifetimes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct PerSecondSettings {
    /// Address of the separate store, in the format of `store`. By default, all limits use the same store.
    pub store: Option<String>,
    /// Redis settings of the separate store.
    pub redis: store::redis::Settings,
}

/// Source of the rules.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct RulesSettings {
    /// Directory of rule files (`*.yaml`). By default, the built-in examples are used.
    pub dir: Option<PathBuf>,
    /// Whether every file of the directory is a rule file, independently of its extension.
    pub all_files: bool,
    /// Whether several files may define one domain, so that their descriptors are combined.
    pub merge_domains: bool,
    /// Whether domains without `charge` take a request's hits from all of its limits or from none.
    pub charge_all: bool,
    /// Directory of candidate rules, which are evaluated on a share of the traffic and never enforced.
    pub candidate_dir: Option<PathBuf>,
    /// Share of the candidate rules' counters that are evaluated, from 0 to 1.
    pub candidate_share: f64,
    /// Whether the service is unhealthy while no domain is defined.
    pub required_for_health: bool,
    /// Control plane that sends rules by xDS in place of a directory.
    pub xds: transport::xds::Settings,
}

impl Default for RulesSettings {
    fn default() -> Self {
        Self {
            dir: None,
            all_files: false,
            merge_domains: false,
            charge_all: false,
            candidate_dir: None,
            candidate_share: 0.1,
            required_for_health: false,
            xds: transport::xds::Settings::default(),
        }
    }
}

impl RulesSettings {
    fn problem(&self) -> Option<&'static str> {
        if !(0.0..=1.0).contains(&self.candidate_share) {
            return Some("rules.candidate_share must be between 0 and 1");
        }
        if self.dir.is_some() && self.xds.server.is_some() {
            return Some("rules.dir and rules.xds.server cannot be combined");
        }
        self.xds.problem()
    }
}

/// Shutdown on SIGTERM or SIGINT.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[cfg_attr(test, derive(schemars::JsonSchema))]
#[serde(default)]
pub struct ShutdownSettings {
    /// Time for which health checks report `NOT_SERVING` before connections are closed, so that callers notice.
    #[serde(with = "sluicegate_duration::Text")]
    pub delay: Duration,
    /// Time after `delay` in which calls in progress can finish.
    #[serde(with = "sluicegate_duration::Text")]
    pub grace: Duration,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { delay: Duration::from_secs(1), grace: Duration::from_secs(10) }
    }
}

/// Settings from command line flags, which take precedence over all other sources.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// Directory of rule files, from `--rules`.
    pub rules: Option<PathBuf>,
    /// Store of the counters, from `--store`.
    pub store: Option<String>,
    /// Address of the gRPC server, from `--grpc-addr`.
    pub grpc_addr: Option<SocketAddr>,
    /// Address of the HTTP server, from `--http-addr`.
    pub http_addr: Option<SocketAddr>,
    /// Settings from the variables of envoyproxy/ratelimit, with `--compat`. The settings file overrides them.
    pub envoyproxy: Option<EnvoyproxySettings>,
}

/// Error returned when settings are invalid or cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A key is not a setting.
    #[error("unknown setting {key:?} in {origin}{hint}")]
    Unknown {
        /// The key.
        key: String,
        /// The file, or the environment.
        origin: String,
        /// A hint to the setting that is probably meant; can be empty.
        hint: String,
    },
    /// A file or a value cannot be read.
    #[error("cannot read the settings: {0}")]
    Read(String),
    /// A value is out of range, or settings contradict each other.
    #[error("{0}")]
    Invalid(String),
}

impl From<ConfigError> for SettingsError {
    fn from(error: ConfigError) -> Self {
        Self::Read(describe(&error))
    }
}

impl Settings {
    /// Loads the settings from the file, the environment and the flags.
    ///
    /// `environment` replaces the variables of the process in tests.
    ///
    /// # Errors
    ///
    /// Returns an error if a setting is unknown or invalid, or if the file cannot be read.
    pub fn load(
        file: Option<&Path>,
        environment: Option<Map<String, String>>,
        flags: Flags,
    ) -> Result<Self, SettingsError> {
        let defaults = Config::try_from(&Self::default())?;
        let mut known = keys(&defaults.collect()?);
        known.extend(LISTS.map(str::to_owned));
        let variables = environment.clone().unwrap_or_else(process_environment);
        let environment =
            Environment::with_prefix(PREFIX).prefix_separator(SEPARATOR).separator(SEPARATOR).source(environment);
        reject_unknown(&known, &environment.collect()?, "the environment")?;
        let mut own = keys(&environment.collect()?);
        let opentelemetry = OpenTelemetrySettings::read(&variables, flags.envoyproxy.is_some());
        let from_variables = match &flags.envoyproxy {
            Some(envoyproxy) => envoyproxy.toml(),
            None => opentelemetry.table().to_string(),
        };
        let mut builder =
            Config::builder().add_source(defaults).add_source(File::from_str(&from_variables, FileFormat::Toml));
        if let Some(path) = file {
            let file = file_source(path).collect()?;
            reject_unknown(&known, &file, &path.display().to_string())?;
            own.extend(keys(&file));
            builder = builder.add_source(vec![file_source(path)]);
        }
        builder = builder
            .add_source(environment)
            .set_override_option("rules.dir", flags.rules.map(|path| path.to_string_lossy().into_owned()))?
            .set_override_option("store", flags.store)?
            .set_override_option("grpc.addr", flags.grpc_addr.map(|addr| addr.to_string()))?
            .set_override_option("http.addr", flags.http_addr.map(|addr| addr.to_string()))?;
        builder = remove_refinements(builder, &own)?;
        let config = builder.build()?;
        let mut settings: Self = match config.clone().try_deserialize() {
            Ok(settings) => settings,
            Err(error) => {
                let message = invalid::describe(&error, &config).map(SettingsError::Invalid);
                return Err(message.unwrap_or_else(|| error.into()));
            }
        };
        settings.validate()?;
        let is_compatible = flags.envoyproxy.is_some();
        let warnings =
            unread::warnings(&settings, &known, &variables, is_compatible, |setting| opentelemetry.has(setting));
        settings.warnings.extend(warnings);
        settings.warnings.extend(flags.envoyproxy.iter().filter_map(EnvoyproxySettings::warning));
        // Variables of OpenTelemetry are often set for all programs of a host.
        let has_collector = settings.telemetry.otlp.metrics || settings.telemetry.otlp.traces;
        if has_collector && !is_compatible {
            settings.warnings.extend(envoyproxy::warning(opentelemetry.without_effect()));
        }
        Ok(settings)
    }

    /// Returns whether the counters are in memcached.
    #[must_use]
    pub fn uses_memcached(&self) -> bool {
        is_memcached(&self.store)
    }

    fn validate(&self) -> Result<(), SettingsError> {
        if self.store != "memory" && !is_address(&self.store) {
            let hint = store_address::hint(&self.store);
            let message = format!("store must be memory or an address such as redis://host:6379{hint}");
            return Err(SettingsError::Invalid(message));
        }
        let problems = [
            self.problem(),
            self.cluster.problem(),
            self.rules.problem(),
            self.decisions.problem(),
            self.response.problem(),
            self.grpc.problem(),
            self.http.problem(),
            self.admin.problem(),
            self.console.problem(),
            self.memory.problem(),
            self.redis.problem(),
            self.memcached.problem(),
            self.per_second.redis.problem(),
            self.quotas.problem(),
            self.record.problem(),
            self.telemetry.problem(),
        ];
        match problems.into_iter().flatten().next() {
            Some(problem) => Err(SettingsError::Invalid(problem.to_owned())),
            None => Ok(()),
        }
    }

    /// Returns a problem of several settings together, or of a URL.
    fn problem(&self) -> Option<&'static str> {
        if let Some(store) = &self.per_second.store
            && (self.store == "memory" || !is_address(store))
        {
            return Some(
                "per_second.store must be an address such as redis://host:6379, and store must be one as well",
            );
        }
        if let Some(store) = &self.per_second.store
            && (self.uses_memcached() || is_memcached(store))
        {
            return Some("per_second.store and memcached cannot be combined");
        }
        // Credentials would not be sent, but be logged.
        if self.telemetry.otlp.endpoints().any(has_credentials) {
            return Some("telemetry.otlp.endpoint must not contain credentials; set telemetry.otlp.headers");
        }
        if self.rules.xds.server.as_deref().is_some_and(has_credentials) {
            return Some("rules.xds.server must not contain credentials; set rules.xds.headers");
        }
        None
    }

    /// Returns the number of worker threads.
    #[must_use]
    pub fn number_of_workers(&self) -> usize {
        if self.workers > 0 {
            return self.workers;
        }
        match thread::available_parallelism() {
            Ok(processors) => processors.get(),
            Err(_) => 1,
        }
    }

    /// Returns the settings as TOML for `--config`, without secrets.
    #[must_use]
    pub fn masked(&self) -> String {
        let per_second = PerSecondSettings {
            store: self.per_second.store.as_deref().map(store::redact),
            redis: self.per_second.redis.masked(),
        };
        let rules = RulesSettings { xds: self.rules.xds.masked(), ..self.rules.clone() };
        let telemetry = telemetry::Settings { otlp: self.telemetry.otlp.masked(), ..self.telemetry.clone() };
        let store = store::redact(&self.store);
        let redis = self.redis.masked();
        let masked = Self { store, redis, per_second, rules, telemetry, ..self.clone() };
        toml::to_string(&masked).unwrap_or_else(|error| format!("# {error}\n"))
    }
}

/// Describes an error without the text of a value or of a line, which may be a secret.
fn describe(error: &ConfigError) -> String {
    let ConfigError::FileParse { uri, cause } = error else {
        let text = error.to_string();
        if text.ends_with("is not of a supported file format") {
            return format!("{text}; it must be TOML (*.toml) or YAML (*.yaml, *.yml)");
        }
        // `invalid type: string "…", expected …`
        return match (text.find("string \""), text.rfind("\", expected ")) {
            (Some(start), Some(end)) if start < end => {
                format!("{}{}", &text[..start + "string".len()], &text[end + 1..])
            }
            // A key such as `redis.ring[0]url`.
            _ => text.replace("]url", "].url").replace("]name", "].name"),
        };
    };
    let text = cause.to_string();
    let lines: Vec<_> = text.lines().filter(|line| !is_source_line(line)).collect();
    lines.join(": ") + &uri.as_ref().map(|uri| format!(" in {uri}")).unwrap_or_default()
}

/// Returns whether a line of an error contains a line of the file, which the parser of TOML shows after a `|`.
fn is_source_line(line: &str) -> bool {
    line.trim_start_matches(|first: char| first == ' ' || first.is_ascii_digit()).starts_with('|')
}

/// Returns the variables of the process that are UTF-8.
#[must_use]
pub fn process_environment() -> Map<String, String> {
    let mut variables = Map::new();
    for (name, value) in std::env::vars_os() {
        if let (Ok(name), Ok(value)) = (name.into_string(), value.into_string()) {
            variables.insert(name, value);
        }
    }
    variables
}

/// Returns the dotted keys of the values that are not tables.
fn keys(table: &Map<String, Value>) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    for (key, value) in table {
        match &value.kind {
            ValueKind::Table(inner) => all.extend(keys(inner).into_iter().map(|inner| format!("{key}.{inner}"))),
            _ => {
                all.insert(key.clone());
            }
        }
    }
    all
}

/// Returns the settings file as a source, by its extension.
fn file_source(path: &Path) -> Box<dyn Source + Send + Sync> {
    if path.extension().is_some_and(|extension| extension == "yaml" || extension == "yml") {
        return Box::new(File::new(&path.to_string_lossy(), Yaml));
    }
    Box::new(File::from(path))
}

/// Removes settings of one signal that come from variables of OpenTelemetry, if an operator sets the general setting.
///
/// `own` are the settings in the file and in the variables `SLUICEGATE__…`.
fn remove_refinements(
    mut builder: ConfigBuilder<DefaultState>,
    own: &BTreeSet<String>,
) -> Result<ConfigBuilder<DefaultState>, ConfigError> {
    for (general, refinements) in opentelemetry::REFINEMENTS {
        for refinement in refinements {
            if own.contains(general) && !own.contains(refinement) {
                let none = if LISTS.contains(&refinement) { ValueKind::Array(Vec::new()) } else { ValueKind::Nil };
                builder = builder.set_override(refinement, none)?;
            }
        }
    }
    Ok(builder)
}

/// Returns an error with a suggestion if `table` contains a key that is not in `known`.
fn reject_unknown(known: &BTreeSet<String>, table: &Map<String, Value>, origin: &str) -> Result<(), SettingsError> {
    let Some(key) = keys(table).into_iter().find(|key| !known.contains(key)) else {
        return Ok(());
    };
    let hint = unknown::hint(&key, known);
    Err(SettingsError::Unknown { key, origin: origin.to_owned(), hint })
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, io::Write};

    use super::*;

    fn load(toml: &str, environment: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        file.write_all(toml.as_bytes()).unwrap();
        let environment = environment.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Settings::load(Some(file.path()), Some(environment), Flags::default())
    }

    #[test]
    fn a_file_in_yaml_has_one_of_two_extensions() {
        let yaml = "workers: 3\nrules: {candidate_share: 0.5, all_files: true}\nredis: {timeout: 5ms}\n\
                    telemetry:\n  statsd:\n    tags: [a:b, 'c:d']\n";
        for extension in [".yaml", ".yml"] {
            let mut file = tempfile::Builder::new().suffix(extension).tempfile().unwrap();
            file.write_all(yaml.as_bytes()).unwrap();
            let settings = Settings::load(Some(file.path()), Some(HashMap::new()), Flags::default()).unwrap();
            assert_eq!((settings.workers, settings.rules.candidate_share, settings.rules.all_files), (3, 0.5, true));
            assert_eq!(settings.redis.timeout, Duration::from_millis(5));
            assert_eq!(settings.telemetry.statsd.tags, ["a:b", "c:d"]);
        }
    }

    #[test]
    fn an_error_in_yaml_names_the_file() {
        for (yaml, expected) in [
            (format!("store:\n  {}x\n", "- ".repeat(10_000)), "nesting is deeper than 128 levels"),
            ("workers: 1\nworkers: 2\n".to_owned(), "line 2, column 1: the key \"workers\" appears twice"),
        ] {
            let mut file = tempfile::Builder::new().suffix(".yaml").tempfile().unwrap();
            file.write_all(yaml.as_bytes()).unwrap();
            let error = Settings::load(Some(file.path()), Some(HashMap::new()), Flags::default()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(expected) && error.contains(file.path().to_str().unwrap()), "{error}");
        }
    }

    #[test]
    fn a_file_of_another_type_has_the_supported_ones() {
        let file = tempfile::Builder::new().suffix(".json").tempfile().unwrap();
        let error = Settings::load(Some(file.path()), Some(HashMap::new()), Flags::default()).unwrap_err();
        assert!(error.to_string().ends_with("it must be TOML (*.toml) or YAML (*.yaml, *.yml)"), "{error}");
    }

    #[test]
    fn later_sources_take_precedence() {
        let toml = "workers = 3\n[grpc]\naddr = '127.0.0.1:1'\n[redis]\ntimeout = '5ms'\n";
        let settings = load(toml, &[("SLUICEGATE__GRPC__ADDR", "127.0.0.1:2")]).unwrap();
        assert_eq!(settings.workers, 3);
        assert_eq!(settings.grpc.addr.port(), 2);
        assert_eq!(settings.redis.timeout, Duration::from_millis(5));
        assert_eq!(settings.http.addr.port(), 8080);
        let flags = Flags { store: Some("redis://x".into()), ..Flags::default() };
        assert_eq!(Settings::load(None, Some(Map::new()), flags).unwrap().store, "redis://x");
    }

    #[test]
    fn rejects_an_unknown_key_and_suggests_the_most_similar_one() {
        for (toml, environment, expected) in [
            ("[grpc]\nadr = 'x'\n", vec![], "did you mean \"grpc.addr\"?"),
            ("grpc_addr = 'x'\n", vec![], "did you mean \"grpc.addr\"?"),
            ("", vec![("SLUICEGATE__REDIS__TIME_OUT", "1s")], "did you mean \"redis.timeout\"?"),
            ("[rules]\ndirectory = 'x'\n", vec![], "unknown setting \"rules.directory\""),
        ] {
            let error = load(toml, &environment).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn rejects_invalid_values() {
        for toml in [
            "store = 'disk'\n",
            "[redis]\ntimeout = 'soon'\n",
            "[decisions]\non_error = 'maybe'\n",
            "[decisions]\nnear_limit_ratio = 1.5\n",
            "[console]\ngrafana_url = 'javascript:alert(1)'\n",
            "[telemetry.otlp]\nendpoint = 'https://user:hunter2@collector:4317/x'\n",
            "[rules.xds]\nserver = 'http://token@control:18000'\n",
            "[cluster]\ninstances = 0\n",
            "[redis]\nkey_prefix = '{a}'\n",
            "[per_second]\nstore = 'redis://host'\n",
            "store = 'redis://host'\n[per_second]\nstore = 'memory'\n",
            "[[redis.ring]]\nname = 'a'\nurl = 'redis://host'\nwieght = 2\n",
            "[response]\nlimit_header = 'not a header'\n",
            "[grpc]\naddr = 'nowhere'\n",
        ] {
            assert!(load(toml, &[]).is_err(), "{toml}");
        }
    }

    #[test]
    fn errors_contain_the_location_but_no_value() {
        let headers = [("SLUICEGATE__RULES__XDS__HEADERS", "authorization=hunter2")];
        for (toml, environment, expected) in [
            ("[redis.sentinel]\npassword = 'hunter2\n", &[][..], "at line 2, column"),
            ("[redis.sentinel]\npassword = hunter2\n", &[], "at line 2, column"),
            ("", &headers, "rules.xds.headers must be a list"),
            ("redis.ring = 'hunter2'\n", &[], "redis.ring must be a list"),
            ("[[redis.ring]]\nname = 'a'\n", &[], "missing configuration field \"redis.ring[0].url\""),
        ] {
            let error = load(toml, environment).unwrap_err().to_string();
            assert!(error.contains(expected) && !error.contains("hunter2") && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn printed_settings_can_be_loaded_and_contain_no_password() {
        let toml = "store = 'redis+ring://'\n[[redis.ring]]\nname = 'a'\nurl = 'redis://:hunter2@host'\n\
                    [redis.sentinel]\npassword = 'hunter2'\n[per_second]\nstore = 'redis+cluster://:hunter2@a,b'\n\
                    [per_second.redis.sentinel]\npassword = 'hunter2'\n";
        let settings = load(toml, &[]).unwrap();
        let printed = settings.masked();
        assert!(!printed.contains("hunter2") && printed.contains("redis://:***@host"), "{printed}");
        assert!(printed.contains("redis+cluster://:***@a,b"), "{printed}");
        assert_eq!(load(&printed, &[]).unwrap().redis.timeout, settings.redis.timeout);
    }

    #[test]
    fn rejects_values_beyond_the_limits_and_accepts_the_limits() {
        for (name, invalid, valid) in [
            ("redis.timeout", "'0s'", "'1us'"),
            ("redis.connect_timeout", "'0s'", "'1us'"),
            ("rules.dir", "'a'\nrules.xds.server = 'http://a'", "'a'"),
            ("rules.xds.server", "'http://a'\nrules.dir = 'a'", "'http://a'"),
            ("rules.xds.retry_min", "'0s'", "'1us'"),
            ("rules.xds.retry_min", "'2s'\nrules.xds.retry_max = '1s'", "'2s'\nrules.xds.retry_max = '2s'"),
            ("rules.xds.connect_timeout", "'0s'", "'1us'"),
            ("rules.xds.max_message_bytes", "0", "1"),
            ("grpc.max_connection_age", "'0s'", "'1us'"),
            ("grpc.keepalive_interval", "'0s'", "'1us'"),
            ("grpc.max_connections", "0", "1"),
            ("http.max_connections", "0", "1"),
            ("admin.max_connections", "0", "1"),
            ("http.metrics_path", "'metrics'", "'/metrics'"),
            ("http.metrics_path", "'/{a}'", "'/a'"),
            ("telemetry.statsd.interval", "'0s'", "'1us'"),
            ("cluster.sync", "'9ms'", "'10ms'"),
            ("cluster.sync", "'10001ms'", "'10s'"),
            ("quotas.ttl", "'1500ms'", "'1s'"),
            ("quotas.ttl", "'0s'", "'290s'"),
            ("quotas.ttl", "'291s'", "'2s'"),
            ("memory.max_counters", "0", "1"),
            ("telemetry.log.level", "'verbose'", "'DEBUG'"),
            ("telemetry.log.level", "'warning'", "'warn,h2=debug'"),
            ("console.grafana_url", "'ftp://a'", "'http://a'"),
            ("console.grafana_url", "'a'", "'https://a'"),
        ] {
            let error = load(&format!("{name} = {invalid}\n"), &[]).unwrap_err().to_string();
            assert!(error.contains(name.trim_start_matches("per_second.")), "{name} = {invalid}: {error}");
            let loaded = load(&format!("{name} = {valid}\n"), &[]);
            assert!(loaded.is_ok(), "{name} = {valid}: {loaded:?}");
        }
    }

    #[test]
    fn printed_settings_contain_no_secret_of_the_store_or_the_control_plane() {
        let toml = "store = 'redis://:hunter2@host'\n[rules.xds]\nheaders = ['authorization=hunter2']\n";
        let printed = load(toml, &[]).unwrap().masked();
        assert!(!printed.contains("hunter2"), "{printed}");
        assert!(printed.contains("redis://:***@host") && printed.contains("authorization=***"), "{printed}");
    }

    #[test]
    fn only_the_value_is_removed_from_an_error() {
        for (text, expected) in [
            ("invalid type: string \"hunter2\", expected u64", "invalid type: string, expected u64"),
            ("unknown variant `a\", expected string \"b`", "unknown variant `a\", expected string \"b`"),
        ] {
            assert_eq!(describe(&ConfigError::Message(text.to_owned())), expected);
        }
    }
}
