//! Messages about a setting with a value of the wrong type: the setting, the accepted values, and the value.
//!
//! The accepted values come from the JSON Schema of the settings. The value is not repeated if the setting can contain a
//! secret, or if the value looks like an address with credentials.

use std::{
    net::{IpAddr, SocketAddr},
    sync::LazyLock,
};

use config::{Config, ConfigError};
use serde_json::Value;

use super::schema;

/// The schema of the settings.
static SCHEMA: LazyLock<Value> = LazyLock::new(schema);

/// Maximum length of a value in a message, in characters.
const MAX_VALUE: usize = 64;

/// Returns a message about the value that `error` rejects; `None` for other errors.
pub(super) fn describe(error: &ConfigError, config: &Config) -> Option<String> {
    let (ConfigError::Type { key: Some(key), .. } | ConfigError::At { key: Some(key), .. }) = error else {
        return None;
    };
    // The text of a list or a table could be a secret.
    let value = config.get_string(key).ok().filter(|value| !is_secret(value));
    let actual = value.as_ref().map(|value| format!(", not {value:?}")).unwrap_or_default();
    let value = value.unwrap_or_default();
    let node = resolve(&SCHEMA, key)?;
    if let Some(choices) = choices(node) {
        let hint =
            nearest_choice(&value, &choices).map(|nearest| format!("; did you mean {nearest}?")).unwrap_or_default();
        return Some(format!("{key} must be one of {}{actual}{hint}", choices.join(", ")));
    }
    if error.to_string().contains("socket address") {
        let default = node["default"].as_str().and_then(|text| text.parse().ok());
        let default = default.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 8082)));
        let AddressRule { rule, hint } = AddressRule::new(&value, default);
        return Some(format!("{key} {rule}{actual}{hint}"));
    }
    match type_of(node)? {
        "integer" => {
            let hint = whole_number(&value).map(|number| format!("; write {number}")).unwrap_or_default();
            Some(format!("{key} must be a whole number{actual}{hint}"))
        }
        "number" => {
            let hint = share(&value).map(|share| format!("; write {share}")).unwrap_or_default();
            Some(format!("{key} must be a number such as 0.1{actual}{hint}"))
        }
        "boolean" => Some(format!("{key} must be true or false{actual}")),
        "array" => {
            let name = key.rsplit('.').next().unwrap_or(key);
            let item = if node["items"]["type"] == "string" { "\"…\"" } else { "{ … }" };
            Some(format!("{key} must be a list, which only a settings file can contain: {name} = [{item}]"))
        }
        _ => None,
    }
}

/// Parses an address to listen on.
///
/// # Errors
///
/// Returns a message with the form that an address has.
pub fn listen_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| {
        let AddressRule { rule, hint } = AddressRule::new(text, SocketAddr::from(([0, 0, 0, 0], 8081)));
        format!("it {rule}{hint}")
    })
}

/// Parts of the message about an invalid address to listen on.
struct AddressRule {
    /// The form of a valid address.
    rule: String,
    /// The address that was probably meant, or an empty text if it is unknown.
    hint: String,
}

impl AddressRule {
    fn new(text: &str, default: SocketAddr) -> Self {
        match probable_address(text, default) {
            Some(address) => {
                Self { rule: "must be an IP address and a port".to_owned(), hint: format!("; did you mean {address}?") }
            }
            None => Self { rule: format!("must be an IP address and a port such as {default}"), hint: String::new() },
        }
    }
}

/// Returns the address that `text` probably means.
fn probable_address(text: &str, default: SocketAddr) -> Option<SocketAddr> {
    if let Ok(host) = text.parse::<IpAddr>() {
        return Some(SocketAddr::new(host, default.port()));
    }
    let (host, port) = text.rsplit_once(':').unwrap_or(("", text));
    let host = match host {
        "" | "*" => default.ip(),
        "localhost" => IpAddr::from([127, 0, 0, 1]),
        host => host.parse().ok()?,
    };
    let port = port.parse().ok()?;
    Some(SocketAddr::new(host, port))
}

/// Returns the choice that an invalid value probably means: in another case, abbreviated, or with a typing error.
fn nearest_choice<'c>(value: &str, choices: &[&'c str]) -> Option<&'c str> {
    let value = value.trim().to_ascii_lowercase();
    if let Some(same) = choices.iter().find(|choice| **choice == value) {
        return Some(same);
    }
    if value.len() >= 3
        && let Some(longer) = choices.iter().find(|choice| choice.starts_with(&value))
    {
        return Some(longer);
    }
    let nearest = choices.iter().min_by_key(|choice| strsim::damerau_levenshtein(&value, choice))?;
    let distance = strsim::damerau_levenshtein(&value, nearest);
    (distance <= 2 && distance * 2 < value.chars().count()).then_some(nearest)
}

/// Returns whether a value could contain a secret.
fn is_secret(value: &str) -> bool {
    value.contains("://") || value.contains('@') || value.chars().count() > MAX_VALUE
}

/// Returns the number that `1_000`, `1e6`, `10k` or `64MB` mean.
fn whole_number(value: &str) -> Option<u64> {
    let value = value.replace(['_', ','], "").to_ascii_lowercase();
    if let Some((digits, exponent)) = value.split_once('e') {
        let factor = 10_u64.checked_pow(exponent.parse().ok()?)?;
        return digits.parse::<u64>().ok()?.checked_mul(factor);
    }
    let digits = value.bytes().take_while(u8::is_ascii_digit).count();
    let (digits, unit) = value.split_at(digits);
    let factor = match unit.trim().strip_suffix('b').unwrap_or(unit.trim()) {
        "" => 1,
        "k" => 1_000,
        "m" => 1_000_000,
        "g" => 1_000_000_000,
        "ki" => 1 << 10,
        "mi" => 1 << 20,
        "gi" => 1 << 30,
        _ => return None,
    };
    digits.parse::<u64>().ok()?.checked_mul(factor)
}

/// Returns the share that a percentage means.
fn share(value: &str) -> Option<f64> {
    let percent: f64 = value.strip_suffix('%')?.trim_end().parse().ok()?;
    (0.0..=100.0).contains(&percent).then_some(percent / 100.0)
}

/// Returns the schema of the setting with this dotted name.
fn resolve<'s>(root: &'s Value, key: &str) -> Option<&'s Value> {
    let mut node = root;
    for name in key.split('.') {
        node = definition(root, node)["properties"].get(name)?;
    }
    // The default of a setting is in the same object as its `$ref`.
    let definition = definition(root, node);
    Some(if choices(definition).is_some() { definition } else { node })
}

fn definition<'s>(root: &'s Value, node: &'s Value) -> &'s Value {
    let name = node["$ref"].as_str().and_then(|name| name.strip_prefix("#/$defs/"));
    match name {
        Some(name) => &root["$defs"][name],
        None => node,
    }
}

fn choices(node: &Value) -> Option<Vec<&str>> {
    node["oneOf"].as_array()?.iter().map(|choice| choice["const"].as_str()).collect()
}

fn type_of(node: &Value) -> Option<&str> {
    match &node["type"] {
        Value::String(name) => Some(name),
        Value::Array(names) => names.iter().filter_map(Value::as_str).find(|name| *name != "null"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::{super::*, listen_address};

    /// Returns the error of a variable, such as `GRPC__ADDR=:8081`.
    fn error_of(variable: &str) -> String {
        let (name, value) = variable.split_once('=').unwrap();
        let environment = HashMap::from([(format!("SLUICEGATE__{name}"), value.to_owned())]);
        Settings::load(None, Some(environment), Flags::default()).unwrap_err().to_string()
    }

    #[test]
    fn a_value_of_the_wrong_type_is_named_with_the_accepted_values() {
        for (variable, expected) in [
            (
                "DECISIONS__ON_ERROR=allowed",
                "decisions.on_error must be one of error, allow, deny, local, not \"allowed\"; did you mean allow?",
            ),
            (
                "TELEMETRY__LOG__FORMAT=JSON",
                "telemetry.log.format must be one of text, json, logstash, not \"JSON\"; did you mean json?",
            ),
            (
                "RESPONSE__HEADER_STYLE=ietf",
                "response.header_style must be one of separate, ietf-draft-11, both, not \"ietf\"; did you mean \
                 ietf-draft-11?",
            ),
            ("TELEMETRY__STATSD__PROTOCOL=quic", "telemetry.statsd.protocol must be one of tcp, udp, not \"quic\""),
            ("RULES__XDS__PROTOCOL=ads", "rules.xds.protocol must be one of sotw, delta, not \"ads\""),
            ("TELEMETRY__OTLP__PROTOCOL=tcp", "telemetry.otlp.protocol must be one of grpc, http, not \"tcp\""),
            ("CONSOLE__ENTITIES=none", "console.entities must be one of local, token, all, not \"none\""),
            (
                "GRPC__ADDR=:9090",
                "grpc.addr must be an IP address and a port, not \":9090\"; did you mean 0.0.0.0:9090?",
            ),
            ("WORKERS=two", "workers must be a whole number, not \"two\""),
            ("WORKERS=-1", "workers must be a whole number, not \"-1\""),
            (
                "MEMORY__MAX_COUNTERS=1_000_000",
                "memory.max_counters must be a whole number, not \"1_000_000\"; write 1000000",
            ),
            ("MEMORY__MAX_COUNTERS=1e6", "memory.max_counters must be a whole number, not \"1e6\"; write 1000000"),
            ("INPUT__MAX_BYTES=64Mi", "input.max_bytes must be a whole number, not \"64Mi\"; write 67108864"),
            ("RECORD__SHARE=10%", "record.share must be a number such as 0.1, not \"10%\"; write 0.1"),
            ("CORE_DUMPS=enabled", "core_dumps must be true or false, not \"enabled\""),
            ("ADMIN__READ=alice", "admin.read must be a list, which only a settings file can contain: read = [\"…\"]"),
        ] {
            assert_eq!(error_of(variable), expected, "{variable}");
        }
    }

    /// Each setting with a fixed list of values has them in its error.
    #[test]
    fn every_setting_with_choices_names_them() {
        let root = schema();
        let known = keys(&Config::try_from(&Settings::default()).unwrap().collect().unwrap());
        let mut with_choices = 0;
        for setting in known {
            let Some(choices) = super::resolve(&root, &setting).and_then(super::choices) else { continue };
            with_choices += 1;
            let error = error_of(&format!("{}=unknown", setting.replace('.', "__").to_uppercase()));
            assert!(error.contains(&format!("{setting} must be one of {}", choices.join(", "))), "{error}");
        }
        assert!(with_choices >= 7, "{with_choices}");
    }

    #[test]
    fn a_value_that_could_be_a_secret_is_not_repeated() {
        for variable in ["WORKERS=redis://:hunter2@a", "GRPC__ADDR=hunter2@a:1", "DECISIONS__ON_ERROR=https://hunter2"]
        {
            let error = error_of(variable);
            assert!(error.contains(" must be ") && !error.contains("hunter2"), "{error}");
        }
    }

    #[test]
    fn an_incomplete_address_is_completed() {
        for (text, expected) in [
            (":8081", "did you mean 0.0.0.0:8081?"),
            ("8081", "did you mean 0.0.0.0:8081?"),
            ("*:9000", "did you mean 0.0.0.0:9000?"),
            ("localhost:9000", "did you mean 127.0.0.1:9000?"),
            ("10.0.0.1", "did you mean 10.0.0.1:8081?"),
            ("::1", "did you mean [::1]:8081?"),
            ("host:9000", "a port such as 0.0.0.0:8081"),
            ("127.0.0.1:80000", "a port such as 0.0.0.0:8081"),
            ("", "a port such as 0.0.0.0:8081"),
        ] {
            let rule = listen_address(text).unwrap_err();
            assert!(rule.ends_with(expected), "{text}: {rule}");
        }
        assert_eq!(listen_address("[::]:8081"), Ok("[::]:8081".parse().unwrap()));
    }
}
