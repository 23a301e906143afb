//! Values of the headers `RateLimit-Policy` and `RateLimit` of draft-ietf-httpapi-ratelimit-headers-11.
//!
//! `RateLimit-Policy: "user";q=100;w=60` contains every limit of a request, separated by commas. `RateLimit:
//! "user";r=50;t=30` contains the remaining hits of one limit, and the seconds until more remain.

use std::fmt::Write;

/// Name of the header that contains every limit of a request.
pub const POLICY_HEADER: &str = "RateLimit-Policy";
/// Name of the header that contains the remaining hits of one limit.
pub const LIMIT_HEADER: &str = "RateLimit";

/// Appends a limit to a value of `RateLimit-Policy`: `quota` hits within `window_seconds`, or `quota` requests in
/// flight without a window.
pub fn append_policy(policies: &mut String, name: &str, quota: u64, window_seconds: Option<u64>) {
    if !policies.is_empty() {
        policies.push_str(", ");
    }
    append_quoted(policies, name);
    // Writing to a `String` cannot fail.
    let _ = match window_seconds {
        Some(window) => write!(policies, ";q={quota};w={window}"),
        None => write!(policies, ";q={quota};qu=\"concurrent-requests\""),
    };
}

/// Returns the value of `RateLimit`. `seconds` is the time until more hits remain, if it is known.
#[must_use]
pub fn rate_limit(name: &str, remaining: u64, seconds: Option<u64>) -> String {
    let mut text = String::new();
    append_quoted(&mut text, name);
    let _ = write!(text, ";r={remaining}");
    if let Some(seconds) = seconds {
        let _ = write!(text, ";t={seconds}");
    }
    text
}

/// Appends a name as a string of Structured Fields (RFC 9651): printable ASCII in quotes, which is a JSON string, too.
/// Other characters become `_`.
pub fn append_quoted(text: &mut String, name: &str) {
    text.push('"');
    for character in name.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            ' '..='~' => text.push(character),
            _ => text.push('_'),
        }
    }
    text.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_structured_field_string() {
        for (name, expected) in [("a b~", r#""a b~""#), (r#"a"b\c"#, r#""a\"b\\c""#), ("ä\n", r#""__""#), ("", r#""""#)]
        {
            let mut text = String::new();
            append_quoted(&mut text, name);
            assert_eq!(text, expected);
        }
    }

    #[test]
    fn policies_are_separated_by_commas() {
        let mut policies = String::new();
        append_policy(&mut policies, "user", 100, Some(60));
        append_policy(&mut policies, "slots", 5, None);
        assert_eq!(policies, r#""user";q=100;w=60, "slots";q=5;qu="concurrent-requests""#);
    }

    #[test]
    fn an_unknown_time_is_omitted() {
        assert_eq!(rate_limit("user", 7, Some(30)), r#""user";r=7;t=30"#);
        assert_eq!(rate_limit("user", 7, None), r#""user";r=7"#);
    }
}
