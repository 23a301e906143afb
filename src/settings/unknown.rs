//! Messages about names that are not settings.

use std::collections::BTreeSet;

/// Names in other programs, without `_` and `-`, and the setting to use.
const HINTS: &[(&[&str], &str)] = &[
    (
        &[
            "redis.password",
            "redis.pass",
            "redis.auth",
            "redis.username",
            "redis.user",
            "redis.url",
            "redis.uri",
            "redis.addr",
            "redis.address",
            "redis.addresses",
            "redis.host",
            "redis.hosts",
            "redis.port",
            "redis.db",
            "redis.database",
            "redis.servers",
            "redis.nodes",
            "redis",
            "redisurl",
            "redishost",
            "redisaddr",
            "redispassword",
            "store.url",
            "store.address",
            "store.redis",
            "store.password",
            "store.type",
        ],
        "the server, the user name, the password and the database of Redis are parts of store: \
         redis://USER:PASSWORD@HOST:6379/0",
    ),
    (
        &[
            "persecond.redis.password",
            "persecond.redis.auth",
            "persecond.redis.username",
            "persecond.redis.url",
            "persecond.redis.host",
            "persecond.redis.port",
            "persecond.redis.db",
            "persecond.url",
        ],
        "the server, the user name, the password and the database of Redis are parts of per_second.store: \
         redis://USER:PASSWORD@HOST:6379/0",
    ),
    (
        &["redis.tls", "redis.ssl", "redis.usetls", "redis.tls.enabled"],
        "TLS is on if the scheme of store begins with rediss: rediss://HOST:6379",
    ),
    (
        &["admin.token", "admin.tokens", "admin.password", "admin.apikey"],
        "tokens are in the file that admin.token_file names, one a line: operate TOKEN NAME",
    ),
    (&["grpc.port", "grpc.host", "grpc.listen", "grpc.address", "grpc.bind"], "set grpc.addr: 0.0.0.0:8081"),
    (&["http.port", "http.host", "http.listen", "http.address", "http.bind", "port"], "set http.addr: 0.0.0.0:8080"),
    (&["admin.port", "admin.host", "admin.listen", "admin.address"], "set admin.addr: 127.0.0.1:8082"),
    (
        &["rules", "rule", "rules.file", "rules.files", "rules.path", "rules.directory", "config.dir", "rulesdir"],
        "set rules.dir, a directory of rule files (*.yaml)",
    ),
    (
        &["loglevel", "log.level", "logging.level", "telemetry.loglevel", "telemetry.level", "verbosity", "debug"],
        "set telemetry.log.level: debug",
    ),
    (
        &["domain", "descriptors"],
        "this is a rule file, not a file of settings: start the service with --rules and its directory",
    ),
    (&["config", "configfile", "settings"], "start the service with --config and a file of settings"),
    (&["logformat", "log.format", "logging.format"], "set telemetry.log.format: json"),
    (
        &["metrics.addr", "metrics.port", "prometheus.addr", "telemetry.prometheus.addr", "telemetry.prometheus.port"],
        "metrics are on http.addr, and also on http.metrics_addr if it is set",
    ),
    (
        &["instances", "replicas", "cluster.replicas", "cluster.size"],
        "set cluster.instances, the number of instances, or cluster.peers, their addresses",
    ),
];

/// Returns the end of a message about an unknown setting: the setting to use.
pub(super) fn hint(key: &str, known: &BTreeSet<String>) -> String {
    if let Some(hint) = known_mistake(key) {
        return format!("; {hint}");
    }
    let section = format!("{key}.");
    if let Some(first) = known.iter().find(|name| name.starts_with(&section)) {
        return format!("; it is a section of settings such as {first}");
    }
    match nearest(key, known) {
        Some(nearest) => format!("; did you mean {nearest:?}?"),
        None => String::new(),
    }
}

/// Returns the setting to use in place of a name of another program.
pub(super) fn known_mistake(key: &str) -> Option<&'static str> {
    let simple = key.replace(['_', '-'], "").to_ascii_lowercase();
    let (_, hint) = HINTS.iter().find(|(names, _)| names.contains(&simple.as_str()))?;
    Some(hint)
}

/// Returns the most similar setting.
///
/// A setting with the same last segments is preferred, because a wrong section is the most frequent mistake.
fn nearest<'k>(key: &str, known: &'k BTreeSet<String>) -> Option<&'k String> {
    let words = separated(key);
    let same_words = known.iter().filter(|candidate| separated(candidate).ends_with(&words));
    if let Some(nearest) = most_similar(key, same_words) {
        return Some(nearest);
    }
    let last_segment = key.rsplit('.').next().unwrap_or_default();
    let same_name = known.iter().filter(|candidate| candidate.rsplit('.').next() == Some(last_segment));
    if let Some(nearest) = most_similar(key, same_name) {
        return Some(nearest);
    }
    most_similar(key, known.iter()).filter(|nearest| strsim::damerau_levenshtein(key, nearest) <= 6)
}

fn most_similar<'k>(key: &str, candidates: impl Iterator<Item = &'k String>) -> Option<&'k String> {
    candidates.min_by_key(|candidate| strsim::damerau_levenshtein(key, candidate))
}

/// Returns the words of a name in lower case, each after an underscore.
fn separated(name: &str) -> String {
    format!("_{}", name.replace(['.', '-'], "_").to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{super::*, HINTS};

    fn error_of(setting: &str) -> String {
        let variable = format!("SLUICEGATE__{}", setting.replace('.', "__").to_uppercase());
        let environment = HashMap::from([(variable, "x".to_owned())]);
        Settings::load(None, Some(environment), Flags::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_name_of_another_program_has_a_hint_what_to_set() {
        for (setting, expected) in [
            ("redis.password", "are parts of store: redis://USER:PASSWORD@HOST:6379/0"),
            ("redis.url", "are parts of store: "),
            ("per_second.redis.password", "are parts of per_second.store: "),
            ("admin.token", "in the file that admin.token_file names"),
            ("grpc.port", "set grpc.addr: 0.0.0.0:8081"),
            ("rules.path", "set rules.dir"),
            ("log_level", "set telemetry.log.level: debug"),
            ("rules", "set rules.dir"),
            ("redis", "are parts of store: "),
            ("descriptors", "this is a rule file, not a file of settings"),
            ("response", "it is a section of settings such as response.dynamic_metadata"),
        ] {
            let error = error_of(setting);
            assert!(error.starts_with(&format!("unknown setting {setting:?} in the environment; ")), "{error}");
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn the_nearest_setting_is_in_the_nearest_section() {
        for (setting, expected) in [
            ("timeout", "redis.timeout"),
            ("log.max_dynamic_series", "telemetry.max_dynamic_series"),
            ("redis_timeout", "redis.timeout"),
            ("sample_ratio", "telemetry.otlp.sample_ratio"),
            ("redis.tls.certfile", "redis.tls.cert_file"),
        ] {
            let error = error_of(setting);
            assert!(error.ends_with(&format!("; did you mean {expected:?}?")), "{error}");
        }
        assert!(error_of("frobnicate_everything_now").ends_with("in the environment"));
    }

    #[test]
    fn hints_are_about_names_that_are_not_settings() {
        let known = keys(&Config::try_from(&Settings::default()).unwrap().collect().unwrap());
        for name in HINTS.iter().flat_map(|(names, _)| *names) {
            assert!(known.iter().all(|setting| setting.replace('_', "") != **name), "{name}");
        }
    }
}
