//! [`read`]: descriptors from the text that an operator types or pastes.

use serde::Deserialize;

use super::{
    access_log::{LineError, Mapping},
    decode,
};

/// Maximum number of descriptors in a text.
const MAX_DESCRIPTORS: usize = 100;

/// A descriptor: its domain, and its keys with their values.
pub type OwnedDescriptor = (String, Vec<(String, String)>);

/// Error returned when a text contains no descriptor.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The text is empty.
    #[error("enter a descriptor: a domain and entries, such as `api user=bob`")]
    Empty,
    /// An entry is not a key with a value.
    #[error("{0:?} is not an entry; entries are written as KEY=VALUE after the domain, such as `api user=bob`")]
    Entry(String),
    /// A quotation mark is not closed.
    #[error("a quotation mark is not closed")]
    Quote,
    /// A curl command has no body.
    #[error(
        "the curl command has no body (-d) with a domain and descriptors; enter the descriptor instead, because only the \
         gateway knows the descriptors of a request"
    )]
    NoBody,
    /// The JSON is not a request.
    #[error("the JSON is not a request with a domain and descriptors: {0}")]
    Request(serde_json::Error),
    /// The JSON is a line of an access log, and there is no mapping.
    #[error("this looks like a line of an access log; enter the mapping from its fields to descriptors, too")]
    NoMapping,
    /// The line of an access log has no descriptor.
    #[error("the mapping finds no descriptor in this line: a field is missing")]
    NotInLine,
    /// The line of an access log cannot be read.
    #[error("the line of the access log cannot be read: {0}")]
    Line(LineError),
    /// There are no descriptors, or too many.
    #[error("the text must contain 1 to {MAX_DESCRIPTORS} descriptors with entries")]
    Count,
}

/// A request as JSON, in the form that `/json` accepts.
#[derive(Deserialize)]
struct Request {
    domain: String,
    descriptors: Vec<Descriptor>,
}

#[derive(Deserialize)]
struct Descriptor {
    entries: Vec<Entry>,
}

#[derive(Deserialize)]
struct Entry {
    key: String,
    #[serde(default)]
    value: String,
}

/// Reads descriptors from a text: `domain key=value …` (values with spaces in quotation marks), a request as JSON, a curl
/// command with such a request, or a line of an access log in JSON.
///
/// # Errors
///
/// Returns an error if the text contains no descriptor. `mapping` is required only for a line of an access log.
pub fn read(text: &str, mapping: Option<&Mapping>) -> Result<Vec<OwnedDescriptor>, TextError> {
    let text = text.trim();
    let descriptors = match text.split_whitespace().next() {
        None => return Err(TextError::Empty),
        Some("curl") => read_json(&body_of_curl(text)?, mapping)?,
        Some(first) if first.starts_with('{') => read_json(text, mapping)?,
        Some(_) => vec![read_words(text)?],
    };
    let is_empty = descriptors.iter().any(|(domain, entries)| domain.is_empty() || entries.is_empty());
    if is_empty || !(1..=MAX_DESCRIPTORS).contains(&descriptors.len()) {
        return Err(TextError::Count);
    }
    Ok(descriptors)
}

fn read_words(text: &str) -> Result<OwnedDescriptor, TextError> {
    let mut words = split(text)?.into_iter();
    let domain = words.next().ok_or(TextError::Empty)?;
    let mut entries = Vec::new();
    for word in words {
        match word.split_once('=') {
            Some((key, value)) if !key.is_empty() => entries.push((key.to_owned(), value.to_owned())),
            _ => return Err(TextError::Entry(word)),
        }
    }
    if entries.is_empty() { Err(TextError::Empty) } else { Ok((domain, entries)) }
}

fn read_json(text: &str, mapping: Option<&Mapping>) -> Result<Vec<OwnedDescriptor>, TextError> {
    let error = match serde_json::from_str::<Request>(text) {
        Ok(Request { domain, descriptors }) => {
            // Each descriptor has a copy of the domain.
            if descriptors.len() > MAX_DESCRIPTORS {
                return Err(TextError::Count);
            }
            let mut owned = Vec::new();
            for descriptor in descriptors {
                let entries = descriptor.entries.into_iter().map(|Entry { key, value }| (key, value)).collect();
                owned.push((domain.clone(), entries));
            }
            return Ok(owned);
        }
        Err(error) => error,
    };
    let is_log_line = match serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text) {
        Ok(fields) => !fields.contains_key("descriptors"),
        Err(_) => false,
    };
    let Some(mapping) = mapping else {
        return Err(if is_log_line { TextError::NoMapping } else { TextError::Request(error) });
    };
    let mut bytes = Vec::new();
    match mapping.encode(text, &mut bytes) {
        Ok(true) => {}
        Ok(false) => return Err(TextError::NotInLine),
        Err(error) => return Err(TextError::Line(error)),
    }
    let request = decode(&bytes).map_err(|_| TextError::NotInLine)?.request;
    let mut owned = Vec::new();
    for descriptor in &request.descriptors {
        let entries = descriptor.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.to_owned())).collect();
        owned.push((request.domain.to_owned(), entries));
    }
    Ok(owned)
}

/// Returns the body of a curl command.
fn body_of_curl(text: &str) -> Result<String, TextError> {
    const OPTIONS: [&str; 6] = ["--data", "--data-raw", "--data-binary", "--data-ascii", "--json", "-d"];
    // A backslash at the end of a line continues the command.
    let words = split(&text.replace("\\\r\n", " ").replace("\\\n", " "))?;
    for (index, word) in words.iter().enumerate() {
        if OPTIONS.contains(&word.as_str()) {
            return words.get(index + 1).cloned().ok_or(TextError::NoBody);
        }
        if word.starts_with("--") {
            if let Some((option, body)) = word.split_once('=')
                && OPTIONS.contains(&option)
            {
                return Ok(body.to_owned());
            }
        } else if let Some(body) = word.strip_prefix("-d") {
            return Ok(body.to_owned());
        }
    }
    Err(TextError::NoBody)
}

/// Splits a text into words as a shell does: quotation marks join words, and a backslash quotes the next character.
fn split(text: &str) -> Result<Vec<String>, TextError> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match (quote, letter) {
            (Some(mark), _) if letter == mark => quote = None,
            (None, '\'' | '"') => {
                quote = Some(letter);
                word.get_or_insert_default();
            }
            (Some('"') | None, '\\') => {
                if let Some(next) = letters.next() {
                    let word = word.get_or_insert_default();
                    // Within quotation marks, a backslash quotes only these.
                    if quote.is_some() && !matches!(next, '"' | '\\' | '$' | '`') {
                        word.push('\\');
                    }
                    word.push(next);
                }
            }
            (None, _) if letter.is_whitespace() => words.extend(word.take()),
            _ => word.get_or_insert_default().push(letter),
        }
    }
    words.extend(word);
    if quote.is_some() { Err(TextError::Quote) } else { Ok(words) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text_of(text: &str, mapping: Option<&str>) -> String {
        let mapping = mapping.map(|mapping| Mapping::read(mapping).unwrap());
        match read(text, mapping.as_ref()) {
            Ok(descriptors) => {
                let pair = |(key, value): &(String, String)| format!("{key}={value}");
                let words = |(domain, entries): &OwnedDescriptor| {
                    format!("{domain}: {}", entries.iter().map(pair).collect::<Vec<_>>().join(", "))
                };
                descriptors.iter().map(words).collect::<Vec<_>>().join("; ")
            }
            Err(error) => format!("error: {error}"),
        }
    }

    #[test]
    fn reads_a_domain_and_entries() {
        assert_eq!(text_of(" api user=bob path=/a=b ", None), "api: user=bob, path=/a=b");
        assert_eq!(text_of("api 'user=bob smith' empty=", None), "api: user=bob smith, empty=");
        assert_eq!(text_of(r#"api user="a \"b\" \c" x=\ y"#, None), r#"api: user=a "b" \c, x= y"#);
    }

    #[test]
    fn reads_a_request() {
        let request = r#"{"domain":"api","descriptors":[{"entries":[{"key":"user","value":"bob"}]},
            {"entries":[{"key":"path"}], "limit": {}}]}"#;
        let expected = "api: user=bob; api: path=";
        assert_eq!(text_of(request, None), expected);
        for curl in [
            format!("curl -H 'content-type: application/json' localhost:8080/json -d '{request}'"),
            format!("curl --data-raw='{request}' \\\n  localhost:8080/json"),
            format!("curl -d'{request}' localhost:8080/json"),
            format!("curl --json {:?} localhost:8080/json", request.replace('\n', " ")),
        ] {
            assert_eq!(text_of(&curl, None), expected, "{curl}");
        }
    }

    #[test]
    fn reads_a_line_of_an_access_log() {
        let line = r#"{"start_time":"2026-01-01T00:00:00Z","user":"bob","path":"/a?b"}"#;
        let mapping = "domain: api\ntime: start_time\ndescriptors:\n- [{ key: user, field: user }]\n";
        assert_eq!(text_of(line, Some(mapping)), "api: user=bob");
        assert!(text_of(line, None).contains("enter the mapping"));
        let other = mapping.replace("field: user", "field: nobody");
        assert!(text_of(line, Some(&other)).contains("finds no descriptor"));
        let other = mapping.replace("time: start_time", "time: path");
        assert!(text_of(line, Some(&other)).contains("cannot be read: the time is neither RFC 3339 nor"));
    }

    #[test]
    fn an_invalid_text_is_an_error() {
        for (text, expected) in [
            ("", "enter a descriptor"),
            ("api", "enter a descriptor"),
            ("api user", "\"user\" is not an entry"),
            ("api =bob", "\"=bob\" is not an entry"),
            ("api user='bob", "not closed"),
            ("curl localhost:8080", "has no body"),
            ("curl -d", "has no body"),
            ("{", "the JSON is not a request"),
            (r#"{"domain":"a","descriptors":1}"#, "the JSON is not a request"),
            (r#"{"domain":"a","descriptors":[]}"#, "1 to 100 descriptors"),
            (r#"{"domain":"a","descriptors":[{"entries":[]}]}"#, "1 to 100 descriptors"),
            (r#"{"domain":"","descriptors":[{"entries":[{"key":"a"}]}]}"#, "1 to 100 descriptors"),
        ] {
            let answer = text_of(text, None);
            assert!(answer.starts_with("error") && answer.contains(expected), "{text}: {answer}");
        }
    }

    #[test]
    fn too_many_descriptors_are_rejected() {
        let request = |count: usize| {
            let descriptors = vec![r#"{"entries":[{"key":"a"}]}"#; count].join(",");
            text_of(&format!(r#"{{"domain":"a","descriptors":[{descriptors}]}}"#), None)
        };
        assert!(!request(MAX_DESCRIPTORS).contains("error"));
        assert!(request(MAX_DESCRIPTORS + 1).contains("1 to 100 descriptors"));
    }

    #[test]
    fn the_body_of_curl_is_not_taken_from_another_option() {
        let curl = r#"curl --request=POST --url=localhost:8080/json --data='{"domain":"api","descriptors":
            [{"entries":[{"key":"user","value":"bob"}]}]}'"#;
        assert_eq!(text_of(curl, None), "api: user=bob");
    }
}
