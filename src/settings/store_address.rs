//! Checks the form of the store's address, and suggests the address that an invalid one probably means.

use std::net::IpAddr;

/// Schemes of the addresses of a store. `valkey` and `unix` are other names of `redis` and `redis+unix`.
const SCHEMES: &[&str] = &[
    "redis",
    "rediss",
    "redis+cluster",
    "rediss+cluster",
    "redis+sentinel",
    "rediss+sentinel",
    "redis+ring",
    "rediss+ring",
    "redis+unix",
    "valkey",
    "valkeys",
    "valkey+unix",
    "unix",
    "memcached",
    "memcacheds",
];

/// Returns whether a text begins with a scheme, such as `redis+unix://`.
pub(super) fn is_address(text: &str) -> bool {
    let Some((scheme, _)) = text.split_once("://") else {
        return false;
    };
    !scheme.is_empty() && scheme.chars().all(|letter| letter.is_ascii_alphabetic() || letter == '+')
}

/// Returns whether a text is an address of memcached.
pub(super) fn is_memcached(text: &str) -> bool {
    text.starts_with("memcached://") || text.starts_with("memcacheds://")
}

/// Returns the end of a message about an invalid address, without its credentials.
pub(super) fn hint(text: &str) -> String {
    let suggestion = match text.split_once("://") {
        Some((scheme, _)) => scheme_of(scheme).map(|scheme| format!("{scheme}://…")),
        None if text.contains(['@', '?']) => Some("redis://USER:PASSWORD@HOST:6379".to_owned()),
        None if text.starts_with('/') => Some(format!("redis+unix://{text}")),
        None => host_and_port(text),
    };
    suggestion.map(|suggestion| format!("; did you mean {suggestion}?")).unwrap_or_default()
}

/// Returns the scheme that an unknown one probably means: `redis+cluster` for `redis-cluster`.
fn scheme_of(scheme: &str) -> Option<&'static str> {
    let simple = scheme.to_ascii_lowercase().replace(['-', '_', '.', ':'], "+");
    let scheme = match simple.as_str() {
        "cluster" | "rediscluster" => "redis+cluster",
        "sentinel" | "redissentinel" => "redis+sentinel",
        "redis+socket" | "socket" => "redis+unix",
        "redis+tls" | "redis+ssl" | "tls" | "ssl" => "rediss",
        "http" | "tcp" | "https" => "redis",
        "memcache" => "memcached",
        simple => simple,
    };
    if let Some(same) = SCHEMES.iter().find(|known| **known == scheme) {
        return Some(same);
    }
    SCHEMES.iter().find(|known| strsim::damerau_levenshtein(scheme, known) <= 2).copied()
}

/// Returns the address for a host with a port, or for an IP address. Returns `None` for other texts, which can be
/// passwords.
fn host_and_port(text: &str) -> Option<String> {
    match text.parse::<IpAddr>() {
        Ok(IpAddr::V4(_)) => return Some(format!("redis://{text}:6379")),
        Ok(IpAddr::V6(_)) => return Some(format!("redis://[{text}]:6379")),
        Err(_) => {}
    }
    let (host, port) = text.rsplit_once(':')?;
    let is_name = host.chars().all(|letter| letter.is_ascii_alphanumeric() || matches!(letter, '.' | '-' | '_'));
    let is_host = !host.is_empty() && host.len() <= 64 && is_name;
    if is_host && port.parse::<u16>().is_ok() { Some(format!("redis://{host}:{port}")) } else { None }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::super::*;

    fn error_of(store: &str) -> String {
        let flags = Flags { store: Some(store.to_owned()), ..Flags::default() };
        Settings::load(None, Some(HashMap::new()), flags).unwrap_err().to_string()
    }

    #[test]
    fn an_invalid_address_has_a_suggestion() {
        for (store, expected) in [
            ("redis:6379", "did you mean redis://redis:6379?"),
            ("localhost:7000", "did you mean redis://localhost:7000?"),
            ("10.0.0.1", "did you mean redis://10.0.0.1:6379?"),
            ("10.0.0.1:7000", "did you mean redis://10.0.0.1:7000?"),
            ("::1", "did you mean redis://[::1]:6379?"),
            ("/run/redis.sock", "did you mean redis+unix:///run/redis.sock?"),
            ("redis-cluster://a,b", "did you mean redis+cluster://…?"),
            ("redis_sentinel://a/m", "did you mean redis+sentinel://…?"),
            ("rediss-cluster://a", "did you mean rediss+cluster://…?"),
            ("app:hunter2@host:6379", "did you mean redis://USER:PASSWORD@HOST:6379?"),
        ] {
            let error = error_of(store);
            assert!(error.starts_with("store must be memory or an address such as redis://host:6379"), "{error}");
            assert!(error.ends_with(&format!("; {expected}")) && !error.contains("hunter2"), "{error}");
        }
        for store in ["two words", "hunter2", "localhost"] {
            assert!(error_of(store).ends_with("redis://host:6379"), "{store}");
        }
    }
}
