//! Warnings about variables and settings that do not have the effect that an operator expects, and about unsafe
//! settings.

use std::{collections::BTreeSet, sync::LazyLock};

use config::Map;
use serde_json::Value;

use super::{PREFIX, Settings, unknown};

/// Returns a warning for each variable or setting that has no effect or is unsafe. Warnings contain no values, which
/// may be secrets.
///
/// `known` are the names of all settings. `is_compatible` is true if the variables of envoyproxy/ratelimit are read.
/// `is_from_variables` returns whether variables of OpenTelemetry, which may be meant for other programs, set a setting.
pub(super) fn warnings(
    settings: &Settings,
    known: &BTreeSet<String>,
    environment: &Map<String, String>,
    is_compatible: bool,
    is_from_variables: impl Fn(&str) -> bool,
) -> Vec<String> {
    let mut all = Vec::new();
    for name in environment.keys() {
        let Some(words) = words_of(name) else { continue };
        if let Some(setting) = known.iter().find(|setting| setting.replace('.', "_") == words) {
            let variable = format!("{PREFIX}__{}", setting.replace('.', "__").to_uppercase());
            all.push(format!("the variable {name} is not read; {setting} is set by {variable}, with two underscores"));
        } else if let Some(hint) = mistake_in(&words) {
            all.push(format!("the variable {name} is not read; {hint}"));
        }
    }
    all.sort();
    let has_redis = environment.get("REDIS_URL").is_some_and(|url| !url.is_empty());
    if has_redis && !is_compatible && settings.store == "memory" {
        all.push(
            "the variable REDIS_URL is not read, and this instance counts in its own memory; set store, or start the \
             program as `ratelimit` to use the variables of envoyproxy/ratelimit"
                .to_owned(),
        );
    }
    let has_rules = settings.rules.dir.is_some() || settings.rules.xds.server.is_some();
    let has_runtime = ["RUNTIME_ROOT", "RUNTIME_SUBDIRECTORY"].iter().any(|name| environment.contains_key(*name));
    if has_runtime && !is_compatible && !has_rules {
        all.push(
            "the variables RUNTIME_ROOT and RUNTIME_SUBDIRECTORY are not read, and the built-in example rules apply; set \
             rules.dir, or start the program as `ratelimit` to use the variables of envoyproxy/ratelimit"
                .to_owned(),
        );
    }
    if settings.admin.token_file.is_some() && settings.admin.addr.is_none() {
        all.push(
            "admin.token_file has no effect without admin.addr: there is no admin API, and nobody can sign in to the \
             console"
                .to_owned(),
        );
    }
    for (setting, redis) in
        [("redis.tls.verify_name", &settings.redis), ("per_second.redis.tls.verify_name", &settings.per_second.redis)]
    {
        if !redis.tls.verify_name {
            all.push(format!(
                "{setting} is false: any server with a certificate of a trusted authority is accepted as Redis; prefer \
                 redis.tls.server_name"
            ));
        }
    }
    if !is_compatible {
        all.extend(without_effect(settings, is_from_variables));
    }
    all
}

/// Returns the name of a variable that begins with the prefix of settings but is not read, without the prefix, in lower
/// case and with single underscores.
fn words_of(name: &str) -> Option<String> {
    let name = name.to_ascii_uppercase();
    let rest = name.strip_prefix(PREFIX)?.strip_prefix('_')?;
    if rest.starts_with('_') {
        return None;
    }
    let words: Vec<&str> = rest.split('_').filter(|word| !word.is_empty()).collect();
    Some(words.join("_").to_ascii_lowercase())
}

/// Returns the setting to use in place of a variable such as `SLUICEGATE_REDIS_URL` or `SLUICEGATE_LOG_LEVEL`.
fn mistake_in(words: &str) -> Option<&'static str> {
    // Kubernetes sets such a variable for each Service.
    if words == "port" || words.ends_with("_port") {
        return None;
    }
    let section = words.replacen('_', ".", 1);
    unknown::known_mistake(words).or_else(|| unknown::known_mistake(&section))
}

/// Returns a warning for each section with settings that differ from the defaults, although the setting that enables
/// the section is missing.
fn without_effect(settings: &Settings, is_from_variables: impl Fn(&str) -> bool) -> Vec<String> {
    let is_memory = settings.store == "memory";
    let has_collector = settings.telemetry.otlp.metrics || settings.telemetry.otlp.traces;
    let sections = [
        ("cluster.", !settings.cluster.has_peers(), "cluster.peers"),
        ("rules.xds.", settings.rules.xds.server.is_none(), "rules.xds.server"),
        ("rules.candidate_share", settings.rules.candidate_dir.is_none(), "rules.candidate_dir"),
        ("admin.", settings.admin.addr.is_none(), "admin.addr"),
        ("redis.", is_memory || settings.uses_memcached(), "the address of Redis in store"),
        ("memcached.", !settings.uses_memcached(), "the address of memcached in store"),
        ("per_second.redis.", settings.per_second.store.is_none(), "per_second.store"),
        ("deny_cache.", is_memory, "the address of Redis or memcached in store"),
        ("lease.", is_memory, "the address of Redis or memcached in store"),
        ("eventual.", is_memory, "the address of Redis or memcached in store"),
        ("record.", settings.record.dir.is_none(), "record.dir"),
        ("telemetry.otlp.", !has_collector, "telemetry.otlp.metrics or telemetry.otlp.traces"),
        ("telemetry.statsd.", settings.telemetry.statsd.addr.is_none(), "telemetry.statsd.addr"),
    ];
    let mut changed = changed(settings);
    changed.retain(|setting| !is_from_variables(setting));
    let mut warnings = Vec::new();
    for (section, is_off, missing) in sections {
        if !is_off {
            continue;
        }
        let mut names = Vec::new();
        for name in &changed {
            // `cluster.instances` needs no peers, and the token file has its own message.
            let has_other_use = matches!(name.as_str(), "cluster.instances" | "admin.token_file");
            if name.starts_with(section) && !has_other_use {
                names.push(name.as_str());
            }
        }
        if !names.is_empty() {
            let verb = if names.len() == 1 { "has" } else { "have" };
            warnings.push(format!("{} {verb} no effect without {missing}", names.join(", ")));
        }
    }
    warnings
}

/// The default values of the settings.
static DEFAULTS: LazyLock<Value> = LazyLock::new(|| values(&Settings::default()));

/// Returns the values of settings, or null if they cannot be written as JSON.
fn values(settings: &Settings) -> Value {
    serde_json::to_value(settings).unwrap_or_default()
}

/// Returns the names of the settings that differ from their defaults.
fn changed(settings: &Settings) -> Vec<String> {
    let mut names = Vec::new();
    collect_changed(String::new(), &values(settings), &DEFAULTS, &mut names);
    names.sort();
    names
}

fn collect_changed(path: String, now: &Value, default: &Value, names: &mut Vec<String>) {
    let (Value::Object(section), Value::Object(defaults)) = (now, default) else {
        if now != default {
            names.push(path);
        }
        return;
    };
    for (name, value) in section {
        let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
        collect_changed(path, value, defaults.get(name).unwrap_or(&Value::Null), names);
    }
}

#[cfg(test)]
mod tests {
    use config::{Config, Source};

    use super::{super::Flags, *};

    fn warnings_of(environment: &[(&str, &str)], flags: Flags) -> Vec<String> {
        let environment = environment.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        Settings::load(None, Some(environment), flags).unwrap().warnings
    }

    #[test]
    fn variables_and_settings_without_an_effect_are_named() {
        for (name, value, expected) in [
            ("SLUICEGATE_STORE", "redis://:secret@a", "store is set by SLUICEGATE__STORE"),
            ("SLUICEGATE_GRPC_ADDR", "x", "grpc.addr is set by SLUICEGATE__GRPC__ADDR"),
            (
                "SLUICEGATE_REDIS_CONNECT_TIMEOUT",
                "1s",
                "redis.connect_timeout is set by SLUICEGATE__REDIS__CONNECT_TIMEOUT",
            ),
            ("SLUICEGATE_GRPC__ADDR", "x", "grpc.addr is set by SLUICEGATE__GRPC__ADDR"),
            ("sluicegate_store", "redis://:secret@a", "store is set by SLUICEGATE__STORE"),
            ("SLUICEGATE_REDIS_URL", "redis://:secret@a", "are parts of store: redis://USER:PASSWORD@HOST:6379/0"),
            ("SLUICEGATE_LOG_LEVEL", "debug", "set telemetry.log.level: debug"),
            ("SLUICEGATE_RULES", "/rules", "set rules.dir, a directory of rule files"),
            ("SLUICEGATE_CONFIG", "a.toml", "start the service with --config"),
            ("REDIS_URL", "redis://:secret@a", "counts in its own memory"),
            ("RUNTIME_ROOT", "/srv", "the built-in example rules apply"),
            ("SLUICEGATE__REDIS__TIMEOUT", "9ms", "redis.timeout has no effect without the address of Redis in store"),
            ("SLUICEGATE__TELEMETRY__STATSD__INTERVAL", "1s", "no effect without telemetry.statsd.addr"),
            ("SLUICEGATE__RULES__CANDIDATE_SHARE", "0.5", "no effect without rules.candidate_dir"),
            ("SLUICEGATE__CLUSTER__JOIN_TIMEOUT", "1s", "no effect without cluster.peers"),
            ("SLUICEGATE__RECORD__SHARE", "0.5", "no effect without record.dir"),
            ("SLUICEGATE__ADMIN__TOKEN_FILE", "/tokens", "no effect without admin.addr"),
        ] {
            let all = warnings_of(&[(name, value)], Flags::default());
            assert!(all.len() == 1 && all[0].contains(expected) && !all[0].contains("secret"), "{all:?}");
        }
    }

    /// Every setting has a warning if its variable has one underscore, also one that only a file can contain.
    #[test]
    fn each_setting_has_a_variable_with_two_underscores() {
        let mut known = super::super::keys(&Config::try_from(&Settings::default()).unwrap().collect().unwrap());
        known.extend(super::super::LISTS.map(str::to_owned));
        for setting in &known {
            let name = format!("SLUICEGATE_{}", setting.replace('.', "_").to_uppercase());
            let environment = Map::from([(name.clone(), "x".to_owned())]);
            let all = warnings(&Settings::default(), &known, &environment, false, |_| false);
            let expected = format!("SLUICEGATE__{}, with two", setting.replace('.', "__").to_uppercase());
            assert!(all.len() == 1 && all[0].contains(&expected), "{name}: {all:?}");
        }
    }

    #[test]
    fn printed_settings_have_no_warning() {
        let printed = Settings::default().masked();
        let mut file = tempfile::Builder::new().suffix(".toml").tempfile().unwrap();
        std::io::Write::write_all(&mut file, printed.as_bytes()).unwrap();
        let settings = Settings::load(Some(file.path()), Some(Map::new()), Flags::default()).unwrap();
        assert_eq!(settings.warnings, [""; 0]);
    }

    #[test]
    fn other_variables_have_no_warning() {
        // Kubernetes sets the last ones for a Service with the name sluicegate.
        for (name, value) in [
            ("SLUICEGATE__STORE", "redis://a"),
            ("SLUICEGATE_ADMIN", "http://a:8082"),
            ("SLUICEGATE_SERVICE_HOST", "10.0.0.1"),
            ("SLUICEGATE_PORT_8081_TCP_ADDR", "10.0.0.1"),
            ("SLUICEGATE_GRPC_SERVICE_PORT", "8081"),
            ("SLUICEGATE_REDIS_PORT", "tcp://10.0.0.1:6379"),
            ("SLUICEGATE__CLUSTER__INSTANCES", "2"),
            ("SLUICEGATE__REDIS__TIMEOUT", "20ms"),
            ("REDIS_URL", ""),
        ] {
            assert_eq!(warnings_of(&[(name, value)], Flags::default()), [""; 0], "{name}");
        }
        let with_store = Flags { store: Some("redis://a".into()), ..Flags::default() };
        assert_eq!(warnings_of(&[("REDIS_URL", "b:6379")], with_store), [""; 0]);
        let admin = [("SLUICEGATE__ADMIN__TOKEN_FILE", "/tokens"), ("SLUICEGATE__ADMIN__ADDR", "127.0.0.1:1")];
        assert_eq!(warnings_of(&admin, Flags::default()), [""; 0]);
    }
}
