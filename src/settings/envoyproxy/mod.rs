//! The environment of envoyproxy/ratelimit as settings of ours: for `--compat envoyproxy`, for a service that is started
//! under the name `ratelimit`, and for `sluicegate migrate`.
//!
//! One table has every variable ([`VARIABLES`]): what it is there when nobody sets it, and what becomes of it here. The
//! table in docs/compatibility.md is made from it.

mod redis;
mod values;
mod variables;

use std::{collections::HashMap, path::Path};

use toml::{Table, Value};

use self::redis::Redis;
pub use self::variables::{Effect, VARIABLES, Variable};

/// Where a collector is when nobody says it (the OpenTelemetry specification's own variable and defaults).
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const OTLP_PORTS: [(&str, u16); 2] = [("http", 4_318), ("grpc", 4_317)];

/// A variable that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} {reason}")]
pub struct VariableError {
    name: &'static str,
    value: String,
    reason: String,
}

/// What an environment says.
#[derive(Clone, Debug, Default)]
pub struct EnvoyproxySettings {
    settings: Table,
    without_effect: Vec<(&'static str, &'static str)>,
}

impl EnvoyproxySettings {
    /// Reads all variables; those that nobody knows are left alone.
    pub fn read(environment: &HashMap<String, String>) -> Result<Self, VariableError> {
        let environment = Environment(environment);
        let mut peer = Self::default();
        for Variable { name, effect, .. } in VARIABLES {
            match effect {
                Effect::Is(setting, read) => {
                    if let Some(value) = environment.value(name) {
                        let read = read(value).map_err(|reason| environment.wrong(name, reason))?;
                        peer.set(setting, read);
                    }
                }
                Effect::Nothing(reason) if environment.is_set(name) => peer.without_effect.push((name, reason)),
                Effect::Nothing(_) | Effect::Makes(_) => {}
            }
        }
        peer.listeners(&environment)?;
        peer.rules(&environment)?;
        peer.stores(&environment)?;
        peer.statsd(&environment)?;
        peer.traces(&environment)?;
        Ok(peer)
    }

    /// The settings that say the same, for a file.
    #[must_use]
    pub fn toml(&self) -> String {
        toml::to_string(&self.settings).unwrap_or_else(|error| format!("# {error}\n"))
    }

    /// The variables that are set and do nothing here, each with the reason.
    #[must_use]
    pub fn without_effect(&self) -> &[(&'static str, &'static str)] {
        &self.without_effect
    }

    /// The same as a line for the log.
    #[must_use]
    pub fn remark(&self) -> Option<String> {
        let each = self.without_effect.iter().map(|(name, reason)| format!("{name} ({reason})"));
        let all = each.collect::<Vec<_>>().join(", ");
        (!all.is_empty()).then(|| format!("without effect: {all}"))
    }

    /// Puts a value under a dotted name.
    fn set(&mut self, setting: &str, value: impl Into<Value>) {
        let (path, last) = setting.rsplit_once('.').map_or((None, setting), |(path, last)| (Some(path), last));
        let mut table = &mut self.settings;
        for name in path.into_iter().flat_map(|path| path.split('.')) {
            let inner = table.entry(name).or_insert_with(|| Value::Table(Table::new()));
            let Value::Table(inner) = inner else {
                return;
            };
            table = inner;
        }
        table.insert(last.to_owned(), value.into());
    }

    fn listeners(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        for (setting, host, port) in [
            ("http.addr", "HOST", "PORT"),
            ("http.debug_addr", "DEBUG_HOST", "DEBUG_PORT"),
            ("grpc.addr", "GRPC_HOST", "GRPC_PORT"),
        ] {
            let address = values::address(environment.text(host), environment.text(port));
            self.set(setting, address.map_err(|reason| environment.wrong(port, reason))?);
        }
        if environment.is_true("USE_PROMETHEUS")? {
            let (host, port) = environment.text("PROMETHEUS_ADDR").rsplit_once(':').unwrap_or_default();
            let address = values::address(host, port);
            self.set("http.metrics_addr", address.map_err(|reason| environment.wrong("PROMETHEUS_ADDR", reason))?);
        }
        if environment.is_true("GRPC_SERVER_USE_TLS")? {
            for (setting, name) in [
                ("grpc.tls.cert_file", "GRPC_SERVER_TLS_CERT"),
                ("grpc.tls.key_file", "GRPC_SERVER_TLS_KEY"),
                ("grpc.tls.client_ca_file", "GRPC_CLIENT_TLS_CACERT"),
                ("grpc.tls.client_name", "GRPC_CLIENT_TLS_SAN"),
            ] {
                self.copy(setting, name, environment);
            }
        }
        Ok(())
    }

    fn rules(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        match environment.text("CONFIG_TYPE") {
            "FILE" => {
                let directory = Path::new(environment.text("RUNTIME_ROOT"))
                    .join(environment.text("RUNTIME_SUBDIRECTORY"))
                    .join(environment.text("RUNTIME_APPDIRECTORY"));
                self.set("rules.dir", directory.to_string_lossy().into_owned());
                // Whatever their names end with, as there.
                self.set("rules.all_files", true);
                Ok(())
            }
            "GRPC_XDS_SOTW" => self.control_plane(environment),
            _ => Err(environment.wrong("CONFIG_TYPE", "is neither FILE nor GRPC_XDS_SOTW")),
        }
    }

    fn control_plane(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        let tls = environment.is_true("CONFIG_GRPC_XDS_SERVER_USE_TLS")?;
        let scheme = if tls { "https" } else { "http" };
        self.set("rules.xds.server", format!("{scheme}://{}", environment.text("CONFIG_GRPC_XDS_SERVER_URL")));
        self.copy("rules.xds.node_id", "CONFIG_GRPC_XDS_NODE_ID", environment);
        for (setting, name, separator) in [
            ("rules.xds.node_metadata", "CONFIG_GRPC_XDS_NODE_METADATA", '='),
            ("rules.xds.headers", "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS", ':'),
        ] {
            let mut pairs = Vec::new();
            for text in environment.text(name).split(',').filter(|text| !text.is_empty()) {
                let wrong = || environment.wrong(name, format!("wants pairs like name{separator}value"));
                let (name, value) = text.split_once(separator).ok_or_else(wrong)?;
                pairs.push(format!("{}={}", name.trim(), value.trim()).into());
            }
            self.set(setting, Value::Array(pairs));
        }
        if tls {
            for (file, name) in [
                ("cert_file", "CONFIG_GRPC_XDS_CLIENT_TLS_CERT"),
                ("key_file", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY"),
                ("ca_file", "CONFIG_GRPC_XDS_SERVER_TLS_CACERT"),
                ("server_name", "CONFIG_GRPC_XDS_SERVER_TLS_SAN"),
            ] {
                self.copy(&format!("rules.xds.tls.{file}"), name, environment);
            }
        }
        let pauses = [
            ("rules.xds.retry_min", "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL"),
            ("rules.xds.retry_max", "XDS_CLIENT_BACKOFF_MAX_INTERVAL"),
        ];
        if pauses.iter().any(|(_, name)| environment.is_set(name)) {
            for (setting, name) in pauses {
                self.set(setting, values::written(environment.read(name, values::duration)?));
            }
        }
        if environment.is_set("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES") {
            let size = environment.read("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", values::number)?;
            // 0 is the default there as well.
            if let Some(size) = i64::try_from(size).ok().filter(|size| *size > 0) {
                self.set("rules.xds.max_message_bytes", size);
            }
        }
        Ok(())
    }

    fn stores(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        match environment.text("BACKEND_TYPE") {
            "redis" => {}
            "memcache" => {
                return Err(environment.wrong("BACKEND_TYPE", "cannot be had: counters are in Redis or in memory"));
            }
            _ => return Err(environment.wrong("BACKEND_TYPE", "is not redis")),
        }
        let all = Redis::MAIN;
        self.set("store", all.address(environment)?);
        let mut sections = vec![("redis", all)];
        if environment.is_true("REDIS_PERSECOND")? {
            self.set("per_second.store", Redis::PER_SECOND.address(environment)?);
            sections.push(("per_second.redis", Redis::PER_SECOND));
        }
        for (section, redis) in sections {
            let jitter = environment.read("EXPIRATION_JITTER_MAX_SECONDS", values::number)?;
            self.set(&format!("{section}.expiry_jitter"), values::written(std::time::Duration::from_secs(jitter)));
            self.copy(&format!("{section}.key_prefix"), "CACHE_KEY_PREFIX", environment);
            for (file, name) in [
                ("cert_file", "REDIS_TLS_CLIENT_CERT"),
                ("key_file", "REDIS_TLS_CLIENT_KEY"),
                ("ca_file", "REDIS_TLS_CACERT"),
            ] {
                self.copy(&format!("{section}.tls.{file}"), name, environment);
            }
            if environment.is_set(redis.timeout) {
                let timeout = environment.read(redis.timeout, values::duration)?;
                self.set(&format!("{section}.connect_timeout"), values::written(timeout));
            }
            if let Some(auth) = environment.value(redis.sentinel_auth) {
                let (user, password) = auth.split_once(':').unwrap_or(("", auth));
                self.set(&format!("{section}.sentinel.password"), password);
                if !user.is_empty() {
                    self.set(&format!("{section}.sentinel.username"), user);
                }
            }
        }
        Ok(())
    }

    fn statsd(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        let prometheus = environment.is_true("USE_PROMETHEUS")?;
        let dog = environment.is_true("USE_DOG_STATSD")?;
        // One of the three has to be chosen there, and this one is unless somebody says no: nor would one who chose another have
        // got any further.
        let lines = environment.is_true("USE_STATSD")? && !prometheus && !dog;
        if environment.is_true("DISABLE_STATS")? || !(dog || lines) {
            return Ok(());
        }
        let address = format!("{}:{}", environment.text("STATSD_HOST"), environment.text("STATSD_PORT"));
        self.set("telemetry.statsd.addr", address);
        self.set("telemetry.statsd.protocol", if dog { "udp" } else { "tcp" });
        let list = |text: &str| -> Vec<Value> {
            text.split(',').map(str::trim).filter(|tag| !tag.is_empty()).map(Value::from).collect()
        };
        self.set("telemetry.statsd.tags", list(environment.text("EXTRA_TAGS")));
        if !dog {
            return Ok(());
        }
        let mut name_mappings = Vec::new();
        for name in environment.text("USE_DOG_STATSD_MOGRIFIERS").split(',').filter(|name| !name.is_empty()) {
            let part = |part: &str| environment.0.get(&format!("DOG_STATSD_MOGRIFIER_{name}_{part}"));
            let (Some(pattern), Some(to)) = (part("PATTERN"), part("NAME")) else {
                let wants = format!("wants DOG_STATSD_MOGRIFIER_{name}_PATTERN and …_NAME");
                return Err(environment.wrong("USE_DOG_STATSD_MOGRIFIERS", wants));
            };
            let tags = list(part("TAGS").map_or("", String::as_str));
            let fields = [("pattern", pattern.as_str().into()), ("name", to.as_str().into()), ("tags", tags.into())];
            name_mappings.push(Value::Table(
                fields.map(|(name, value): (_, Value)| (name.to_owned(), value)).into_iter().collect(),
            ));
        }
        self.set("telemetry.statsd.name_mappings", name_mappings);
        Ok(())
    }

    fn traces(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        let protocol = environment.text("TRACING_EXPORTER_PROTOCOL");
        let Some((protocol, port)) = OTLP_PORTS.into_iter().find(|(name, _)| *name == protocol) else {
            return Err(environment.wrong("TRACING_EXPORTER_PROTOCOL", "is neither http nor grpc"));
        };
        self.set("telemetry.otlp.protocol", protocol);
        let given = environment.0.get(OTLP_ENDPOINT).filter(|endpoint| !endpoint.is_empty());
        let endpoint = given.cloned().unwrap_or_else(|| format!("http://localhost:{port}"));
        self.set("telemetry.otlp.endpoint", endpoint);
        Ok(())
    }

    fn copy(&mut self, setting: &str, name: &'static str, environment: &Environment<'_>) {
        if let Some(value) = environment.value(name) {
            self.set(setting, value);
        }
    }
}

/// Variables with their defaults. What is set to nothing is not set.
struct Environment<'e>(&'e HashMap<String, String>);

impl Environment<'_> {
    fn is_set(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_empty())
    }

    /// Empty where it is not set and has no default.
    fn text(&self, name: &str) -> &str {
        let default =
            || VARIABLES.iter().find(|variable| variable.name == name).map_or("", |variable| variable.default);
        self.0.get(name).filter(|value| !value.is_empty()).map_or_else(default, String::as_str)
    }

    fn value(&self, name: &str) -> Option<&str> {
        Some(self.text(name)).filter(|value| !value.is_empty())
    }

    fn read<T>(&self, name: &'static str, read: fn(&str) -> Result<T, String>) -> Result<T, VariableError> {
        read(self.text(name)).map_err(|reason| self.wrong(name, reason))
    }

    fn is_true(&self, name: &'static str) -> Result<bool, VariableError> {
        self.read(name, values::is_true)
    }

    fn wrong(&self, name: &'static str, reason: impl Into<String>) -> VariableError {
        VariableError { name, value: self.text(name).to_owned(), reason: reason.into() }
    }
}

/// All variables, as a table for people.
#[must_use]
pub fn table() -> String {
    let mut text = "| variable | there | here |\n| --- | --- | --- |\n".to_owned();
    for Variable { name, default, effect } in VARIABLES {
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        let here = match effect {
            Effect::Is(setting, _) => format!("`{setting}`"),
            Effect::Makes(settings) => match settings.split_once(", when") {
                Some((setting, when)) => format!("`{setting}`, when{when}"),
                None => settings.split(", ").map(|it| format!("`{it}`")).collect::<Vec<_>>().join(", "),
            },
            Effect::Nothing(reason) => format!("nothing: {reason}"),
        };
        text += &format!("| `{name}` | {default} | {here} |\n");
    }
    text
}

#[cfg(test)]
mod tests;
