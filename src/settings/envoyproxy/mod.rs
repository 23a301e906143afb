//! [`EnvoyproxySettings`]: settings from the environment variables of envoyproxy/ratelimit.
//!
//! They are used with `--compat envoyproxy`, if the program is started under the name `ratelimit`, and by
//! `sluicegate migrate`. The table [`VARIABLES`] contains every variable with its default and its effect. The table in
//! docs/reference/compatibility.md is generated from it.

mod redis;
mod values;
mod variables;

use std::{collections::HashMap, path::Path};

use regex_lite::Regex;
use toml::{Table, Value};

use self::redis::Redis;
pub use self::variables::{Effect, VARIABLES, Variable};
use super::{
    opentelemetry::OpenTelemetrySettings,
    variables::{insert, is_url},
};

/// Variable and default ports of the OpenTelemetry specification for the collector's address.
const OTLP_ENDPOINT: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
const OTLP_PORTS: [(&str, u16); 2] = [("http", 4_318), ("grpc", 4_317)];
const NAME_MAPPINGS: &str = "USE_DOG_STATSD_MOGRIFIERS";
const SKIP_NAME: &str = "REDIS_TLS_SKIP_HOSTNAME_VERIFICATION";
const XDS_SERVER: &str = "CONFIG_GRPC_XDS_SERVER_URL";
const XDS_HEADERS: &str = "CONFIG_GRPC_XDS_CLIENT_ADDITIONAL_HEADERS";

/// Error returned when the value of a variable is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{name}={value:?} {reason}")]
pub struct VariableError {
    name: &'static str,
    value: String,
    reason: String,
}

/// The settings that correspond to an environment.
#[derive(Clone, Debug, Default)]
pub struct EnvoyproxySettings {
    settings: Table,
    /// The variables of OpenTelemetry, which the exporters of envoyproxy/ratelimit read.
    opentelemetry: OpenTelemetrySettings,
    without_effect: Vec<(&'static str, &'static str)>,
}

impl EnvoyproxySettings {
    /// Reads all variables in [`VARIABLES`] and ignores others.
    ///
    /// # Errors
    ///
    /// Returns an error if a value is invalid or not supported.
    pub fn read(environment: &HashMap<String, String>) -> Result<Self, VariableError> {
        let opentelemetry = OpenTelemetrySettings::read(environment, true);
        let mut result = Self { settings: opentelemetry.table(), opentelemetry, ..Self::default() };
        let environment = Environment(environment);
        for Variable { name, effect, .. } in VARIABLES {
            match effect {
                Effect::Setting(setting, read) => {
                    if let Some(value) = environment.value(name) {
                        let read = read(value).map_err(|reason| environment.error(name, reason))?;
                        result.set(setting, read);
                    }
                }
                Effect::Ignored(reason) if environment.is_set(name) => result.without_effect.push((name, reason)),
                Effect::Ignored(_) | Effect::Combined(_) => {}
            }
        }
        result.listeners(&environment)?;
        result.rules(&environment)?;
        result.stores(&environment)?;
        result.statsd(&environment)?;
        result.traces(&environment)?;
        result.without_effect.extend(result.opentelemetry.without_effect());
        Ok(result)
    }

    /// Returns the settings as TOML for a settings file.
    #[must_use]
    pub fn toml(&self) -> String {
        toml::to_string(&self.settings).unwrap_or_else(|error| format!("# {error}\n"))
    }

    /// Returns the variables that are set but have no effect here, each with the reason.
    #[must_use]
    pub fn without_effect(&self) -> &[(&'static str, &'static str)] {
        &self.without_effect
    }

    /// Returns a warning that lists the variables without effect, if there are any.
    #[must_use]
    pub fn warning(&self) -> Option<String> {
        warning(&self.without_effect)
    }

    /// Sets the value of a setting by its dotted name.
    fn set(&mut self, setting: &str, value: impl Into<Value>) {
        insert(&mut self.settings, setting, value.into());
    }

    fn listeners(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        for (setting, host, port) in [
            ("http.addr", "HOST", "PORT"),
            ("http.debug_addr", "DEBUG_HOST", "DEBUG_PORT"),
            ("grpc.addr", "GRPC_HOST", "GRPC_PORT"),
        ] {
            let port = environment.read(port, values::port)?;
            let address = values::address(environment.text(host), port);
            self.set(setting, address.map_err(|reason| environment.error(host, reason))?);
        }
        if environment.is_true("USE_PROMETHEUS")? {
            let (host, port) = environment.text("PROMETHEUS_ADDR").rsplit_once(':').unwrap_or_default();
            let address = values::port(port)
                .map_err(|reason| format!("contains {port:?}, which {reason}"))
                .and_then(|port| values::address(host, port));
            self.set("http.metrics_addr", address.map_err(|reason| environment.error("PROMETHEUS_ADDR", reason))?);
        }
        if environment.is_true("GRPC_SERVER_USE_TLS")? {
            for (setting, name) in [
                ("grpc.tls.cert_file", "GRPC_SERVER_TLS_CERT"),
                ("grpc.tls.key_file", "GRPC_SERVER_TLS_KEY"),
                ("grpc.tls.client_ca_file", "GRPC_CLIENT_TLS_CACERT"),
                ("grpc.tls.client_name", "GRPC_CLIENT_TLS_SAN"),
            ] {
                self.copy_if_set(setting, name, environment);
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
                // As in envoyproxy/ratelimit, the extension does not matter.
                self.set("rules.all_files", true);
                Ok(())
            }
            "GRPC_XDS_SOTW" => self.xds(environment),
            _ => Err(environment.error("CONFIG_TYPE", "is neither FILE nor GRPC_XDS_SOTW")),
        }
    }

    fn xds(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        let tls = environment.is_true("CONFIG_GRPC_XDS_SERVER_USE_TLS")?;
        let scheme = if tls { "https" } else { "http" };
        let server = environment.text(XDS_SERVER);
        values::check_endpoint(server, false)
            .map_err(|reason| environment.error(XDS_SERVER, format!("{reason}; it must be host:port")))?;
        self.set("rules.xds.server", format!("{scheme}://{server}"));
        self.copy_if_set("rules.xds.node_id", "CONFIG_GRPC_XDS_NODE_ID", environment);
        self.set("rules.xds.node_metadata", environment.read("CONFIG_GRPC_XDS_NODE_METADATA", values::metadata)?);
        self.set("rules.xds.headers", environment.read(XDS_HEADERS, values::headers)?);
        if tls {
            for (file, name) in [
                ("cert_file", "CONFIG_GRPC_XDS_CLIENT_TLS_CERT"),
                ("key_file", "CONFIG_GRPC_XDS_CLIENT_TLS_KEY"),
                ("ca_file", "CONFIG_GRPC_XDS_SERVER_TLS_CACERT"),
                ("server_name", "CONFIG_GRPC_XDS_SERVER_TLS_SAN"),
            ] {
                self.copy_if_set(&format!("rules.xds.tls.{file}"), name, environment);
            }
        }
        let first = "XDS_CLIENT_BACKOFF_INITIAL_INTERVAL";
        let last = "XDS_CLIENT_BACKOFF_MAX_INTERVAL";
        if environment.is_set(first) || environment.is_set(last) {
            let min = environment.read(first, values::positive_duration)?;
            let max = environment.read(last, values::positive_duration)?;
            if min > max {
                if environment.is_set(last) {
                    return Err(environment.error(last, format!("is less than {first}={}", environment.text(first))));
                }
                return Err(environment.error(first, format!("is greater than {last}={}", environment.text(last))));
            }
            self.set("rules.xds.retry_min", values::format_duration(min));
            self.set("rules.xds.retry_max", values::format_duration(max));
        }
        if environment.is_set("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES") {
            let size = environment.read("XDS_CLIENT_MAX_MSG_SIZE_IN_BYTES", values::number)?;
            // 0 means the default in envoyproxy/ratelimit as well.
            if let Some(size) = i64::try_from(size).ok().filter(|size| *size > 0) {
                self.set("rules.xds.max_message_bytes", size);
            }
        }
        Ok(())
    }

    fn stores(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        match environment.text("BACKEND_TYPE") {
            "redis" => {}
            "memcache" => return self.memcached(environment),
            _ => return Err(environment.error("BACKEND_TYPE", "is neither redis nor memcache")),
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
            self.set(
                &format!("{section}.expiry_jitter"),
                values::format_duration(std::time::Duration::from_secs(jitter)),
            );
            self.set(&format!("{section}.bound_expiry_jitter"), false);
            if environment.is_set("CACHE_KEY_PREFIX") {
                let prefix = environment.read("CACHE_KEY_PREFIX", values::key_prefix)?;
                self.set(&format!("{section}.key_prefix"), prefix);
            }
            for (file, name) in [
                ("cert_file", "REDIS_TLS_CLIENT_CERT"),
                ("key_file", "REDIS_TLS_CLIENT_KEY"),
                ("ca_file", "REDIS_TLS_CACERT"),
            ] {
                self.copy_if_set(&format!("{section}.tls.{file}"), name, environment);
            }
            if environment.is_true(SKIP_NAME)? {
                self.set(&format!("{section}.tls.verify_name"), false);
            }
            self.copy_if_set(&format!("{section}.password_file"), redis.auth_file, environment);
            if environment.is_set(redis.timeout) {
                let timeout = environment.read(redis.timeout, values::positive_duration)?;
                self.set(&format!("{section}.connect_timeout"), values::format_duration(timeout));
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
        let dogstatsd = environment.is_true("USE_DOG_STATSD")?;
        // envoyproxy/ratelimit requires exactly one of the three sinks, and statsd is the default. It does not start
        // with two of them, so another sink implies that statsd is off.
        let statsd = environment.is_true("USE_STATSD")? && !prometheus && !dogstatsd;
        if environment.is_true("DISABLE_STATS")? || !(dogstatsd || statsd) {
            return Ok(());
        }
        let host = environment.read("STATSD_HOST", values::host)?;
        let port = environment.read("STATSD_PORT", values::port)?;
        self.set("telemetry.statsd.addr", format!("{host}:{port}"));
        self.set("telemetry.statsd.protocol", if dogstatsd { "udp" } else { "tcp" });
        self.set("telemetry.statsd.tags", environment.read("EXTRA_TAGS", values::tags)?);
        if !dogstatsd {
            return Ok(());
        }
        let mut name_mappings = Vec::new();
        for name in environment.text(NAME_MAPPINGS).split(',').filter(|name| !name.is_empty()) {
            name_mappings.push(Value::Table(environment.name_mapping(name)?));
        }
        self.set("telemetry.statsd.name_mappings", name_mappings);
        Ok(())
    }

    fn traces(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        let protocol = environment.text("TRACING_EXPORTER_PROTOCOL");
        let Some((protocol, port)) = OTLP_PORTS.into_iter().find(|(name, _)| *name == protocol) else {
            return Err(environment.error("TRACING_EXPORTER_PROTOCOL", "is neither http nor grpc"));
        };
        self.set("telemetry.otlp.protocol", protocol);
        let configured = environment.0.get(OTLP_ENDPOINT).filter(|endpoint| !endpoint.is_empty());
        if environment.is_true("TRACING_ENABLED")? && configured.is_some_and(|endpoint| !is_url(endpoint)) {
            return Err(environment.error(OTLP_ENDPOINT, "is not a URL such as http://host:4317"));
        }
        let endpoint = configured.cloned().unwrap_or_else(|| format!("http://localhost:{port}"));
        self.set("telemetry.otlp.endpoint", endpoint);
        Ok(())
    }

    fn memcached(&mut self, environment: &Environment<'_>) -> Result<(), VariableError> {
        if environment.is_set("MEMCACHE_SRV") {
            let reason = "is not supported: list the servers in MEMCACHE_HOST_PORT";
            return Err(environment.error("MEMCACHE_SRV", reason));
        }
        let Some(servers) = environment.value("MEMCACHE_HOST_PORT") else {
            return Err(
                environment.error("MEMCACHE_HOST_PORT", "must list the servers, because BACKEND_TYPE is memcache")
            );
        };
        let scheme = if environment.is_true("MEMCACHE_TLS")? { "memcacheds" } else { "memcached" };
        self.set("store", format!("{scheme}://{servers}"));
        if environment.is_set("CACHE_KEY_PREFIX") {
            self.set("memcached.key_prefix", environment.read("CACHE_KEY_PREFIX", values::key_prefix)?);
        }
        for (file, name) in [
            ("cert_file", "MEMCACHE_TLS_CLIENT_CERT"),
            ("key_file", "MEMCACHE_TLS_CLIENT_KEY"),
            ("ca_file", "MEMCACHE_TLS_CACERT"),
        ] {
            self.copy_if_set(&format!("memcached.tls.{file}"), name, environment);
        }
        if environment.is_true("MEMCACHE_TLS_SKIP_HOSTNAME_VERIFICATION")? {
            self.set("memcached.tls.verify_name", false);
        }
        Ok(())
    }

    fn copy_if_set(&mut self, setting: &str, name: &'static str, environment: &Environment<'_>) {
        if let Some(value) = environment.value(name) {
            self.set(setting, value);
        }
    }
}

/// The variables of the process, with the defaults of envoyproxy/ratelimit. An empty variable counts as not set.
struct Environment<'e>(&'e HashMap<String, String>);

impl Environment<'_> {
    fn is_set(&self, name: &str) -> bool {
        self.0.get(name).is_some_and(|value| !value.is_empty())
    }

    /// Returns the value or the default, or an empty text if there is neither.
    fn text(&self, name: &str) -> &str {
        match self.0.get(name) {
            Some(value) if !value.is_empty() => value,
            _ => default_of(name),
        }
    }

    fn value(&self, name: &str) -> Option<&str> {
        Some(self.text(name)).filter(|value| !value.is_empty())
    }

    fn read<T>(&self, name: &'static str, read: fn(&str) -> Result<T, String>) -> Result<T, VariableError> {
        read(self.text(name)).map_err(|reason| self.error(name, reason))
    }

    fn is_true(&self, name: &'static str) -> Result<bool, VariableError> {
        self.read(name, values::is_true)
    }

    fn error(&self, name: &'static str, reason: impl Into<String>) -> VariableError {
        let value = self.text(name);
        let mut reason = reason.into();
        // `tcp://10.96.0.7:8125`, also as a part of a value with `$(REDIS_PORT)`.
        if value.contains("tcp://") || value.contains("udp://") {
            reason += "; Kubernetes sets variables such as REDIS_PORT=tcp://10.96.0.7:6379 for each Service (service \
                       links): set the variable in the container, or enableServiceLinks: false in the pod";
        }
        let value = match value.rsplit_once('@') {
            _ if name == XDS_HEADERS => "***".to_owned(),
            Some((_, host)) => format!("***@{host}"),
            None => value.to_owned(),
        };
        VariableError { name, value, reason }
    }

    /// Returns the name mapping for statsd with this name, as a table of the setting `telemetry.statsd.name_mappings`.
    fn name_mapping(&self, name: &str) -> Result<Table, VariableError> {
        let prefix = format!("DOG_STATSD_MOGRIFIER_{name}");
        let pattern = self.0.get(&format!("{prefix}_PATTERN"));
        let to = self.0.get(&format!("{prefix}_NAME"));
        let (Some(pattern), Some(to)) = (pattern, to) else {
            return Err(self.error(NAME_MAPPINGS, format!("requires {prefix}_PATTERN and {prefix}_NAME")));
        };
        if let Err(error) = Regex::new(pattern) {
            let reason = format!("names a mapping whose {prefix}_PATTERN is not a regular expression: {error}");
            return Err(self.error(NAME_MAPPINGS, reason));
        }
        let tags = match self.0.get(&format!("{prefix}_TAGS")) {
            Some(tags) => tags,
            None => "",
        };
        let tags = values::tags(tags)
            .map_err(|reason| self.error(NAME_MAPPINGS, format!("names a mapping whose {prefix}_TAGS {reason}")))?;
        let mut mapping = Table::new();
        mapping.insert("pattern".to_owned(), pattern.as_str().into());
        mapping.insert("name".to_owned(), to.as_str().into());
        mapping.insert("tags".to_owned(), tags);
        Ok(mapping)
    }
}

/// Returns the default of a variable in envoyproxy/ratelimit, or an empty text if there is none.
fn default_of(name: &str) -> &'static str {
    match VARIABLES.iter().find(|variable| variable.name == name) {
        Some(variable) => variable.default,
        None => "",
    }
}

/// Returns a warning that lists variables without effect, if there are any.
pub(super) fn warning(without_effect: &[(&'static str, &'static str)]) -> Option<String> {
    if without_effect.is_empty() {
        return None;
    }
    let each: Vec<_> = without_effect.iter().map(|(name, reason)| format!("{name} ({reason})")).collect();
    Some(format!("variables without effect: {}", each.join(", ")))
}

/// Returns the table of variables for the documentation, in Markdown.
#[must_use]
pub fn table() -> String {
    let mut text = "| variable | default in envoyproxy/ratelimit | setting |\n| --- | --- | --- |\n".to_owned();
    for Variable { name, default, effect } in VARIABLES {
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        let setting = match effect {
            Effect::Setting(setting, _) => format!("`{setting}`"),
            Effect::Combined(settings) => match settings.split_once(", when") {
                Some((setting, when)) => format!("`{setting}`, when{when}"),
                None => settings.split(", ").map(|setting| format!("`{setting}`")).collect::<Vec<_>>().join(", "),
            },
            Effect::Ignored(reason) => format!("none: {reason}"),
        };
        text += &format!("| `{name}` | {default} | {setting} |\n");
    }
    text
}

#[cfg(test)]
mod tests;
