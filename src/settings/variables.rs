//! Functions that `opentelemetry` and `envoyproxy` share for reading environment variables.

use http::Uri;
use toml::{Table, Value};

/// Inserts the value of a setting by its dotted name.
pub(super) fn insert(settings: &mut Table, setting: &str, value: Value) {
    let mut table = settings;
    let mut name = setting;
    while let Some((section, remaining)) = name.split_once('.') {
        let inner = table.entry(section).or_insert_with(|| Value::Table(Table::new()));
        let Value::Table(inner) = inner else {
            return;
        };
        table = inner;
        name = remaining;
    }
    table.insert(name.to_owned(), value);
}

/// Returns whether a text is a URL of HTTP.
pub(super) fn is_url(text: &str) -> bool {
    text.parse::<Uri>().is_ok_and(|url| matches!(url.scheme_str(), Some("http" | "https")))
}

/// Returns whether a URL contains a user or a password.
pub(super) fn has_credentials(url: &str) -> bool {
    let authority = url.split_once("://").and_then(|(_, rest)| rest.split(['/', '?', '#']).next());
    authority.is_some_and(|authority| authority.contains('@'))
}
