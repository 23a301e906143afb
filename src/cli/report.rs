//! What `check` found, for machines.

use serde_json::{Value, json};

use crate::rules::{Diagnostic, Location, Severity};

/// A list of what is wrong, empty if nothing is.
pub(super) fn json(problems: &[Diagnostic]) -> Value {
    let problem = |Diagnostic { file, place, severity, message }: &Diagnostic| {
        let place = Some(place).filter(|place| place.line > 0);
        json!({
            "file": file,
            "line": place.map(|place| place.line),
            "column": place.map(|place| place.column),
            "severity": name(*severity),
            "message": message,
        })
    };
    problems.iter().map(problem).collect()
}

/// The same in the Static Analysis Results Interchange Format (OASIS SARIF 2.1.0), as code hosts show it beside the lines.
pub(super) fn sarif(problems: &[Diagnostic]) -> Value {
    let result = |Diagnostic { file, place, severity, message }: &Diagnostic| {
        let mut location = json!({ "artifactLocation": { "uri": uri(file) } });
        if let Location { line: 1.., column } = place {
            location["region"] = json!({ "startLine": place.line, "startColumn": column });
        }
        json!({
            "ruleId": "rules",
            "level": name(*severity),
            "message": { "text": message },
            "locations": [{ "physicalLocation": location }],
        })
    };
    json!({
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [{
            "tool": { "driver": {
                "name": "sluicegate check",
                "version": env!("CARGO_PKG_VERSION"),
                "rules": [{ "id": "rules", "shortDescription": { "text": "A rule file is one that the service can use." } }],
            } },
            "columnKind": "unicodeCodePoints",
            "results": problems.iter().map(result).collect::<Vec<_>>(),
        }],
    })
}

const fn name(severity: Severity) -> &'static str {
    match severity {
        Severity::Error => "error",
        Severity::Warning => "warning",
    }
}

/// A path as a reference that a URI may be.
fn uri(path: &str) -> String {
    const KEPT: percent_encoding::AsciiSet =
        percent_encoding::NON_ALPHANUMERIC.remove(b'/').remove(b'.').remove(b'-').remove(b'_').remove(b'~');
    percent_encoding::utf8_percent_encode(path, &KEPT).to_string()
}
