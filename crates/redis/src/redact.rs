//! [`redact`]: addresses of Redis without their passwords.

/// Returns the address with its password replaced by `***`, for logs and `--print-settings`.
#[must_use]
pub fn redact(url: &str) -> String {
    // Parsers of URLs ignore tabs and line breaks.
    let url = url.replace(['\t', '\n', '\r'], "");
    let Some((scheme, rest)) = url.split_once(':') else {
        return url;
    };
    // The address of a Unix socket (`unix:/path`, `unix:///path`) contains the password as a parameter.
    let is_socket = rest.strip_prefix("//").unwrap_or(rest).starts_with('/');
    if is_socket && let Some((path, query)) = rest.split_once('?') {
        let parameters: Vec<_> = query.split('&').map(redact_parameter).collect();
        return format!("{scheme}:{path}?{}", parameters.join("&"));
    }
    let Some(rest) = rest.strip_prefix("//") else {
        return url;
    };
    // A password can contain an unescaped @ or /, so everything up to the last @ is treated as secret.
    let Some(credentials) = rest.rfind('@').map(|end| &rest[..end]) else {
        return url;
    };
    let (user, _) = credentials.split_once(':').unwrap_or_default();
    format!("{scheme}://{user}:***{}", &rest[credentials.len()..])
}

/// Returns a parameter of a query with its value replaced by `***`, unless it is one that contains no secret.
fn redact_parameter(parameter: &str) -> String {
    match parameter.split_once('=') {
        Some((name, _)) if !matches!(name, "db" | "user" | "protocol") => format!("{name}=***"),
        _ => parameter.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn redacts_every_password() {
        for (url, redacted) in [
            ("memory", "memory"),
            ("redis://localhost:6379/1", "redis://localhost:6379/1"),
            ("redis://:secret@localhost", "redis://:***@localhost"),
            ("rediss://app:s3cr@t@host:1/2", "rediss://app:***@host:1/2"),
            ("redis://secret@host", "redis://:***@host"),
            ("redis://:a/b@host/1", "redis://:***@host/1"),
            ("redis://:a?b@host", "redis://:***@host"),
            ("redis:\t//:sec\nret@host", "redis://:***@host"),
            ("unix:/s?pass=secret", "unix:/s?pass=***"),
            ("redis+unix:///run/redis?db=1", "redis+unix:///run/redis?db=1"),
            ("redis+unix:///run/redis?user=app&pass=s@cret&db=1", "redis+unix:///run/redis?user=app&pass=***&db=1"),
            ("redis+unix:///run/redis?p%61ss=secret", "redis+unix:///run/redis?p%61ss=***"),
        ] {
            assert_eq!(redact(url), redacted);
        }
    }
}
