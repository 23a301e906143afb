//! Warnings about variables and settings that have no effect, although an operator expects one.

use std::collections::BTreeSet;

use config::Map;

use super::{PREFIX, Settings};

/// Returns a sentence for each of them. It contains no values, which may be secrets.
///
/// `known` are the names of all settings. `is_compatible` is true if the variables of envoyproxy/ratelimit are read.
pub(super) fn warnings(
    settings: &Settings,
    known: &BTreeSet<String>,
    environment: &Map<String, String>,
    is_compatible: bool,
) -> Vec<String> {
    let mut all = Vec::new();
    for name in environment.keys() {
        if let Some(setting) = known.iter().find(|setting| *name == with_single_underscores(setting)) {
            let variable = format!("{PREFIX}__{}", setting.replace('.', "__").to_uppercase());
            all.push(format!("the variable {name} is not read; {setting} is set by {variable}, with two underscores"));
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
    if settings.admin.token_file.is_some() && settings.admin.addr.is_none() {
        all.push(
            "admin.token_file has no effect without admin.addr: there is no admin API, and nobody can sign in to the \
             console"
                .to_owned(),
        );
    }
    all
}

/// Returns the variable of a setting with one underscore in place of two.
fn with_single_underscores(setting: &str) -> String {
    format!("{PREFIX}_{}", setting.replace('.', "_").to_uppercase())
}

#[cfg(test)]
mod tests {
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
            ("REDIS_URL", "redis://:secret@a", "counts in its own memory"),
            ("SLUICEGATE__ADMIN__TOKEN_FILE", "/tokens", "no effect without admin.addr"),
        ] {
            let all = warnings_of(&[(name, value)], Flags::default());
            assert!(all.len() == 1 && all[0].contains(expected) && !all[0].contains("secret"), "{all:?}");
        }
    }

    #[test]
    fn other_variables_have_no_warning() {
        // Kubernetes sets the last ones for a Service with the name sluicegate.
        for (name, value) in [
            ("SLUICEGATE__STORE", "redis://a"),
            ("SLUICEGATE_ADMIN", "http://a:8082"),
            ("SLUICEGATE_SERVICE_HOST", "10.0.0.1"),
            ("SLUICEGATE_PORT_8081_TCP_ADDR", "10.0.0.1"),
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
