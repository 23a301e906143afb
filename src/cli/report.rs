//! Machine-readable output of `sluicegate check`: JSON and SARIF.

use serde_json::{Value, json};

use crate::rules::{Diagnostic, Location, Severity};

/// Returns the diagnostics as a JSON list.
pub(super) fn json(diagnostics: &[Diagnostic]) -> Value {
    diagnostics.iter().map(json_diagnostic).collect()
}

fn json_diagnostic(Diagnostic { file, location, severity, message }: &Diagnostic) -> Value {
    let location = if location.line > 0 { Some(location) } else { None };
    json!({
        "file": file,
        "line": location.map(|location| location.line),
        "column": location.map(|location| location.column),
        "severity": name(*severity),
        "message": message,
    })
}

/// Returns the diagnostics in the Static Analysis Results Interchange Format (OASIS SARIF 2.1.0), which code hosts
/// display next to the source lines.
pub(super) fn sarif(diagnostics: &[Diagnostic]) -> Value {
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "sluicegate check",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": [{ "id": "rules", "shortDescription": { "text": "A rule file must be valid." } }],
            } },
            "columnKind": "unicodeCodePoints",
            "results": diagnostics.iter().map(sarif_result).collect::<Vec<_>>(),
        }],
    })
}

fn sarif_result(Diagnostic { file, location, severity, message }: &Diagnostic) -> Value {
    let mut physical_location = json!({ "artifactLocation": { "uri": uri(file) } });
    if let Location { line: 1.., column } = location {
        physical_location["region"] = json!({ "startLine": location.line, "startColumn": column });
    }
    json!({
        "ruleId": "rules",
        "level": name(*severity),
        "message": { "text": message },
        "locations": [{ "physicalLocation": physical_location }],
    })
}

const fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
        Severity::Note => "note",
    }
}

/// Returns a path as a URI reference.
fn uri(path: &str) -> String {
    const UNESCAPED: percent_encoding::AsciiSet =
        percent_encoding::NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_').remove(b'~');
    percent_encoding::utf8_percent_encode(path, &UNESCAPED).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_diagnostic_about_a_whole_file_has_no_line() {
        let diagnostic = |location| Diagnostic {
            file: "a.yaml".to_owned(),
            location,
            severity: Severity::Error,
            message: "message".to_owned(),
        };
        let list = json(&[diagnostic(Location::default()), diagnostic(Location { line: 1, column: 2 })]);
        assert_eq!((&list[0]["line"], &list[0]["column"]), (&Value::Null, &Value::Null));
        assert_eq!((&list[1]["line"], &list[1]["column"]), (&json!(1), &json!(2)));
    }
}
