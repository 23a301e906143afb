//! All settings as one typed struct: defaults, then a file, then the environment, then flags. Only this module knows
//! of files and variables; each part of the service has its own `Settings` beside it.

pub mod envoyproxy;
mod schema;

use std::{
    collections::BTreeSet,
    net::SocketAddr,
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};

use config::{Config, Environment, File, FileFormat, Map, Source, Value, ValueKind};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use self::envoyproxy::EnvoyproxySettings;
pub use self::schema::schema;
use crate::{engine, service, store, telemetry, transport};

/// `SLUICEGATE__GRPC__ADDR` is `grpc.addr`.
const PREFIX: &str = "SLUICEGATE";
const SEPARATOR: &str = "__";
/// Settings that are lists, empty by default: a default that is nothing does not show. Only a file can have them.
const LISTS: [&str; 9] = [
    "admin.operate",
    "admin.read",
    "record.entity_keys",
    "redis.ring",
    "rules.xds.headers",
    "rules.xds.node_metadata",
    "per_second.redis.ring",
    "telemetry.statsd.name_mappings",
    "telemetry.statsd.tags",
];

/// Everything that can be set.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct Settings {
    /// `memory`, or the address of Redis: `redis://` (a server), `redis+sentinel://`, `redis+cluster://` or
    /// `redis+ring://` (several), with TLS `rediss://` and so on; `redis+unix://`.
    pub store: String,
    /// Threads that decide; 0: as many as the machine has cores.
    pub workers: usize,
    /// What this instance knows of the others.
    pub cluster: ClusterSettings,
    /// Where rules come from.
    pub rules: RulesSettings,
    /// What holds for all rules.
    pub decisions: engine::Settings,
    /// What answers carry beside the verdict.
    pub response: transport::grpc::ResponseSettings,
    /// How gRPC is served.
    pub grpc: transport::grpc::Settings,
    /// How HTTP is served.
    pub http: transport::http::Settings,
    /// Who may operate the service, and where.
    pub admin: transport::admin::Settings,
    /// The store `memory`.
    pub memory: store::memory::Settings,
    /// The store `redis…://`.
    pub redis: store::redis::Settings,
    /// A store of its own for limits of unit second.
    pub per_second: PerSecondSettings,
    /// Refusals that are remembered rather than asked for again.
    pub deny_cache: store::local::DenyCacheSettings,
    /// Quota that is taken in advance, for rules that want it.
    pub lease: store::local::LeaseSettings,
    /// Counting in arrears, for rules that want it.
    pub eventual: store::local::EventualSettings,
    /// What operators say while the service runs.
    pub overrides: service::overrides::Settings,
    /// A sample of the requests, in files.
    pub record: service::record::Settings,
    /// Logs, metrics, traces.
    pub telemetry: telemetry::Settings,
    /// How to leave.
    pub shutdown: ShutdownSettings,
    /// What is to be said of them at the start.
    #[serde(skip)]
    pub warnings: Vec<String>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            store: "memory".into(),
            workers: 0,
            cluster: ClusterSettings::default(),
            rules: RulesSettings::default(),
            decisions: engine::Settings::default(),
            response: transport::grpc::ResponseSettings::default(),
            grpc: transport::grpc::Settings::default(),
            http: transport::http::Settings::default(),
            admin: transport::admin::Settings::default(),
            memory: store::memory::Settings::default(),
            redis: store::redis::Settings::default(),
            per_second: PerSecondSettings::default(),
            deny_cache: store::local::DenyCacheSettings::default(),
            lease: store::local::LeaseSettings::default(),
            eventual: store::local::EventualSettings::default(),
            overrides: service::overrides::Settings::default(),
            record: service::record::Settings::default(),
            telemetry: telemetry::Settings::default(),
            shutdown: ShutdownSettings::default(),
            warnings: Vec::new(),
        }
    }
}

/// What this instance knows of the others.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ClusterSettings {
    /// How many instances share the store: among them limits are divided when each decides by itself (`on_error: local`).
    pub instances: NonZeroU32,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        Self { instances: NonZeroU32::MIN }
    }
}

/// A store of its own for limits of unit second, which have many more writes than others and shorter lives.
#[derive(Clone, Debug, Default, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct PerSecondSettings {
    /// An address like that of the store; without one they are counted where all are.
    pub store: Option<String>,
    /// How to use it.
    pub redis: store::redis::Settings,
}

/// Where rules come from.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct RulesSettings {
    /// A directory of `*.yaml`; without one, the built-in examples.
    pub dir: Option<PathBuf>,
    /// Every file of it, whatever its name ends with.
    pub all_files: bool,
    /// Several files may name one domain; their descriptors add up.
    pub merge_domains: bool,
    /// Domains that do not say `charge` charge for all limits of a request or for none.
    pub charge_all: bool,
    /// A directory of rules that are tried out on a share of the traffic, and enforced nowhere.
    pub candidate_dir: Option<PathBuf>,
    /// Of the counters that such rules would have, so many are counted; from 0 to 1.
    pub candidate_share: f64,
    /// Health says no while there is no domain.
    pub required_for_health: bool,
    /// A control plane that sends them, in place of a directory.
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

/// How to leave, on SIGTERM or SIGINT.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(default)]
pub struct ShutdownSettings {
    /// Health says NOT_SERVING for so long before connections are asked to go: time for callers to notice.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub delay: Duration,
    /// And calls under way have so long after that.
    #[serde(with = "crate::duration")]
    #[schemars(schema_with = "crate::duration::schema")]
    pub grace: Duration,
}

impl Default for ShutdownSettings {
    fn default() -> Self {
        Self { delay: Duration::from_secs(1), grace: Duration::from_secs(10) }
    }
}

/// What flags may say over all else.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--rules`.
    pub rules: Option<PathBuf>,
    /// `--store`.
    pub store: Option<String>,
    /// `--grpc-addr`.
    pub grpc_addr: Option<SocketAddr>,
    /// `--http-addr`.
    pub http_addr: Option<SocketAddr>,
    /// `--compat`: what the environment of another service says, under the file.
    pub envoyproxy: Option<EnvoyproxySettings>,
}

/// Settings that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// A key that nothing knows.
    #[error("unknown setting {key:?} in {origin}{}", .nearest.as_ref().map(|near| format!("; did you mean {near:?}?")).unwrap_or_default())]
    Unknown {
        /// The key.
        key: String,
        /// Where it stood.
        origin: String,
        /// What was most likely meant.
        nearest: Option<String>,
    },
    /// A file or value that cannot be read.
    #[error("the settings cannot be read")]
    Read(#[from] config::ConfigError),
    /// A value that makes no sense.
    #[error("{0}")]
    Invalid(String),
}

impl Settings {
    /// Puts the layers together. `environment`: in place of the process' own, for tests.
    pub fn load(
        file: Option<&Path>,
        environment: Option<Map<String, String>>,
        overrides: Flags,
    ) -> Result<Self, SettingsError> {
        let defaults = Config::try_from(&Self::default())?;
        let mut known = keys(&defaults.collect()?);
        known.extend(LISTS.map(str::to_owned));
        let environment =
            Environment::with_prefix(PREFIX).prefix_separator(SEPARATOR).separator(SEPARATOR).source(environment);
        reject_unknown(&known, &environment.collect()?, "the environment")?;
        let mut builder = Config::builder().add_source(defaults);
        if let Some(peer) = &overrides.envoyproxy {
            builder = builder.add_source(File::from_str(&peer.toml(), FileFormat::Toml));
        }
        if let Some(path) = file {
            let file = File::from(path);
            reject_unknown(&known, &file.collect()?, &path.display().to_string())?;
            builder = builder.add_source(file);
        }
        builder = builder
            .add_source(environment)
            .set_override_option("rules.dir", overrides.rules.map(|path| path.to_string_lossy().into_owned()))?
            .set_override_option("store", overrides.store)?
            .set_override_option("grpc.addr", overrides.grpc_addr.map(|addr| addr.to_string()))?
            .set_override_option("http.addr", overrides.http_addr.map(|addr| addr.to_string()))?;
        let mut settings: Self = builder.build()?.try_deserialize()?;
        settings.validate()?;
        settings.warnings.extend(overrides.envoyproxy.iter().filter_map(EnvoyproxySettings::remark));
        Ok(settings)
    }

    fn validate(&self) -> Result<(), SettingsError> {
        let is_header = |name: &str| http::HeaderName::try_from(name).is_ok();
        let response = &self.response;
        let headers = [&response.limit_header, &response.remaining_header, &response.reset_header];
        let zero = Duration::ZERO;
        let redis = [&self.redis, &self.per_second.redis];
        for (fine, complaint) in [
            (
                self.store == "memory" || self.store.contains("://"),
                "store must be memory or an address like redis://host:6379",
            ),
            ((0.0..=1.0).contains(&self.decisions.near_limit_ratio), "decisions.near_limit_ratio must be from 0 to 1"),
            ((0.0..=1.0).contains(&self.record.share), "record.share must be from 0 to 1"),
            ((0.0..=1.0).contains(&self.rules.candidate_share), "rules.candidate_share must be from 0 to 1"),
            (
                (0.0..=1.0).contains(&self.telemetry.otlp.sample_ratio),
                "telemetry.otlp.sample_ratio must be from 0 to 1",
            ),
            (headers.into_iter().all(|name| is_header(name)), "response.*_header must be names of HTTP headers"),
            (
                self.per_second.store.as_ref().is_none_or(|store| store.contains("://") && self.store != "memory"),
                "per_second.store must be an address like redis://host:6379, beside a store that is one too",
            ),
            (
                redis.iter().all(|redis| redis.timeout > zero && redis.connect_timeout > zero),
                "redis timeouts must be above 0",
            ),
            (
                redis.iter().all(|redis| !redis.key_prefix.contains(['{', '}'])),
                "redis.key_prefix must not have braces: they say what chooses a key's shard",
            ),
            (
                self.rules.dir.is_none() || self.rules.xds.server.is_none(),
                "rules come from rules.dir or from rules.xds.server, not from both",
            ),
            (
                self.rules.xds.retry_min > zero && self.rules.xds.retry_min <= self.rules.xds.retry_max,
                "rules.xds.retry_min must be above 0, and no more than retry_max",
            ),
            (
                self.rules.xds.connect_timeout > zero && self.rules.xds.max_message_bytes > 0,
                "rules.xds.connect_timeout and rules.xds.max_message_bytes must be above 0",
            ),
            (self.grpc.max_connection_age > zero, "grpc.max_connection_age must be above 0"),
            (self.telemetry.statsd.interval > zero, "telemetry.statsd.interval must be above 0"),
            (self.grpc.keepalive_interval > zero, "grpc.keepalive_interval must be above 0"),
            (
                self.http.metrics_path.starts_with('/') && !self.http.metrics_path.contains(['{', '}', '*', ':']),
                "http.metrics_path must be a path like /metrics",
            ),
            (self.grpc.max_connections > 0, "grpc.max_connections must be above 0"),
            (
                self.http.max_connections > 0 && self.admin.max_connections > 0,
                "http.max_connections and admin.max_connections must be above 0",
            ),
            (self.memory.max_counters > 0, "memory.max_counters must be above 0"),
        ] {
            if !fine {
                return Err(SettingsError::Invalid(complaint.to_owned()));
            }
        }
        Ok(())
    }

    /// As TOML that `--config` takes, without passwords.
    #[must_use]
    pub fn masked(&self) -> String {
        let per_second = PerSecondSettings {
            store: self.per_second.store.as_deref().map(store::redact),
            redis: self.per_second.redis.masked(),
        };
        let rules = RulesSettings { xds: self.rules.xds.masked(), ..self.rules.clone() };
        let (store, redis) = (store::redact(&self.store), self.redis.masked());
        let masked = Self { store, redis, per_second, rules, ..self.clone() };
        toml::to_string(&masked).unwrap_or_else(|error| format!("# {error}\n"))
    }
}

/// The dotted keys of all leaves.
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

fn reject_unknown(known: &BTreeSet<String>, table: &Map<String, Value>, origin: &str) -> Result<(), SettingsError> {
    let Some(key) = keys(table).into_iter().find(|key| !known.contains(key)) else {
        return Ok(());
    };
    // The last word counts most: people get the section right or forget it.
    let distance = |near: &&String| strsim::damerau_levenshtein(&key, near);
    let last = |text: &str| text.rsplit('.').next().unwrap_or_default().to_owned();
    let same_word = known.iter().find(|near| last(near) == last(&key));
    let nearest = same_word.or_else(|| known.iter().min_by_key(distance).filter(|near| distance(near) <= 6));
    Err(SettingsError::Unknown { nearest: nearest.cloned(), key, origin: origin.to_owned() })
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn load(toml: &str, environment: &[(&str, &str)]) -> Result<Settings, SettingsError> {
        let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        file.write_all(toml.as_bytes()).unwrap();
        let environment = environment.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        Settings::load(Some(file.path()), Some(environment), Flags::default())
    }

    #[test]
    fn later_layers_win() {
        let toml = "workers = 3\n[grpc]\naddr = '127.0.0.1:1'\n[redis]\ntimeout = '5ms'\n";
        let settings = load(toml, &[("SLUICEGATE__GRPC__ADDR", "127.0.0.1:2")]).unwrap();
        assert_eq!(settings.workers, 3);
        assert_eq!(settings.grpc.addr.port(), 2);
        assert_eq!(settings.redis.timeout, Duration::from_millis(5));
        assert_eq!(settings.http.addr.port(), 8080);
        let overrides = Flags { store: Some("redis://x".into()), ..Flags::default() };
        assert_eq!(Settings::load(None, Some(Map::new()), overrides).unwrap().store, "redis://x");
    }

    #[test]
    fn an_unknown_key_is_an_error_that_suggests_the_nearest() {
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
    fn values_that_make_no_sense_are_refused() {
        for toml in [
            "store = 'disk'\n",
            "[redis]\ntimeout = 'soon'\n",
            "[decisions]\non_error = 'maybe'\n",
            "[decisions]\nnear_limit_ratio = 1.5\n",
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
    fn printed_settings_can_be_read_back_and_hold_no_password() {
        let toml = "store = 'redis+ring://'\n[[redis.ring]]\nname = 'a'\nurl = 'redis://:hunter2@host'\n\
                    [redis.sentinel]\npassword = 'hunter2'\n[per_second]\nstore = 'redis+cluster://:hunter2@a,b'\n\
                    [per_second.redis.sentinel]\npassword = 'hunter2'\n";
        let settings = load(toml, &[]).unwrap();
        let printed = settings.masked();
        assert!(!printed.contains("hunter2") && printed.contains("redis://:***@host"), "{printed}");
        assert!(printed.contains("redis+cluster://:***@a,b"), "{printed}");
        assert_eq!(load(&printed, &[]).unwrap().redis.timeout, settings.redis.timeout);
    }
}
