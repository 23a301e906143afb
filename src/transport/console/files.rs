//! The files of the console, embedded in the program. A debug build reads them from `console/`, so that changes are
//! visible without a build.

use std::{borrow::Cow, fs, io::Read, path::Path};

use axum::{
    Router, extract,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, ETAG, IF_NONE_MATCH, VARY},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use flate2::{Compression, read::GzEncoder};
use sha2::{Digest, Sha256};

/// The file at `/`.
const START_PAGE: &str = "index.html";

/// The folder with the files. Only debug builds contain its path.
const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/console");

/// A file of the console.
struct File {
    /// Path below the folder.
    path: &'static str,
    embedded: &'static [u8],
}

/// Returns a slice of the files with the given paths.
macro_rules! embed {
    ($($path:literal,)*) => {
        &[$(File { path: $path, embedded: include_bytes!(concat!("../../../console/", $path)) }),*]
    };
}

/// The files of the console, without its README and the licences of its libraries.
const FILES: &[File] = embed![
    "activity.js",
    "api.js",
    "app.js",
    "base.js",
    "change_model.js",
    "chart.js",
    "confirm.js",
    "files.js",
    "format.js",
    "icon.svg",
    "index.html",
    "known_names.js",
    "pages/audit_log.js",
    "pages/candidate.js",
    "pages/change.js",
    "pages/change_fields.js",
    "pages/change_forms.js",
    "pages/change_steps.js",
    "pages/counter_form.js",
    "pages/counter_picture.js",
    "pages/customer.js",
    "pages/descriptor.js",
    "pages/effect.js",
    "pages/inspection.js",
    "pages/now.js",
    "pages/now_charts.js",
    "pages/now_tables.js",
    "pages/override_list.js",
    "pages/rule.js",
    "pages/rule_grid_row.js",
    "pages/rules.js",
    "pages/simulate.js",
    "pages/simulation_report.js",
    "pages/usage.js",
    "parts.js",
    "rule_rows.js",
    "scope.js",
    "session.js",
    "sign_in.js",
    "state.js",
    "stream.js",
    "style.css",
    "vendor/hooks.mjs",
    "vendor/htm.mjs",
    "vendor/preact.mjs",
    "vendor/uplot.css",
    "vendor/uplot.js",
    "words.js",
];

impl File {
    /// Returns the file with a path below the folder.
    fn find(path: &str) -> Option<&'static Self> {
        FILES.iter().find(|file| file.path == path)
    }

    /// Returns the content: in a debug build that in the folder, otherwise the embedded one.
    fn content(&self) -> Cow<'static, [u8]> {
        if cfg!(debug_assertions)
            && let Ok(content) = fs::read(Path::new(FOLDER).join(self.path))
        {
            return content.into();
        }
        self.embedded.into()
    }
}

/// Returns the routes of the files: the start page at `/`, and the others below `/console/`.
pub(super) fn routes() -> Router {
    Router::new()
        .route("/", get(|headers: HeaderMap| async move { respond(START_PAGE, &headers) }))
        .route("/console/{*path}", get(|path: extract::Path<String>, headers| async move { respond(&path, &headers) }))
}

/// Responds with a file. Browsers revalidate it each time, and receive it only if it has changed.
fn respond(path: &str, headers: &HeaderMap) -> Response {
    let (Some(file), Some(media_type)) = (File::find(path), media_type(path)) else {
        return (StatusCode::NOT_FOUND, "the console has no such file\n").into_response();
    };
    let content = file.content();
    let hash: String = Sha256::digest(&content).iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let etag = format!("\"{hash}\"");
    let caching = [(ETAG, etag.clone()), (CACHE_CONTROL, "no-cache".to_owned()), (VARY, "accept-encoding".to_owned())];
    if header_text(headers, IF_NONE_MATCH).split(',').any(|known| known.trim().trim_start_matches("W/") == etag) {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    let content_type = [(CONTENT_TYPE, media_type)];
    if !header_text(headers, ACCEPT_ENCODING).contains("gzip") {
        return (caching, content_type, content.into_owned()).into_response();
    }
    let mut compressed = Vec::new();
    // Reading from memory cannot fail.
    let _ = GzEncoder::new(&content[..], Compression::default()).read_to_end(&mut compressed);
    (caching, content_type, [(CONTENT_ENCODING, "gzip")], compressed).into_response()
}

/// Returns the value of a header; empty if there is none, or if it is not a text.
fn header_text(headers: &HeaderMap, name: http::HeaderName) -> &str {
    headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
}

/// Returns the media type of a file by its name, or `None` for files that are not part of the console.
fn media_type(path: &str) -> Option<&'static str> {
    Some(match path.rsplit_once('.')?.1 {
        "html" => "text/html; charset=utf-8",
        "js" | "mjs" => "text/javascript; charset=utf-8",
        "css" => "text/css; charset=utf-8",
        "svg" => "image/svg+xml",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_are_those_of_the_folder() {
        fn walk(folder: &Path, paths: &mut Vec<String>) {
            for entry in fs::read_dir(folder).unwrap() {
                let path = entry.unwrap().path();
                if path.is_dir() {
                    walk(&path, paths);
                } else {
                    let path = path.strip_prefix(FOLDER).unwrap();
                    paths.push(path.to_str().unwrap().replace('\\', "/"));
                }
            }
        }
        let mut paths = Vec::new();
        walk(Path::new(FOLDER), &mut paths);
        paths.retain(|path| !path.ends_with(".md") && !path.starts_with("vendor/LICENSE"));
        paths.sort();
        assert_eq!(FILES.iter().map(|file| file.path).collect::<Vec<_>>(), paths);
    }

    #[test]
    fn all_files_together_have_at_most_200_kb_when_compressed() {
        let mut sizes = Vec::new();
        for file in FILES {
            let mut compressed = Vec::new();
            GzEncoder::new(file.embedded, Compression::default()).read_to_end(&mut compressed).unwrap();
            sizes.push((compressed.len(), file.path));
        }
        let total: usize = sizes.iter().map(|(size, _)| size).sum();
        assert!(total <= 200_000, "{total} bytes: {sizes:?}");
    }

    #[test]
    fn vendored_files_have_the_hashes_in_their_list() {
        let list = fs::read_to_string(Path::new(FOLDER).join("vendor/README.md")).unwrap();
        let mut count = 0;
        for file in FILES {
            let Some(name) = file.path.strip_prefix("vendor/") else {
                continue;
            };
            count += 1;
            let hash: String = Sha256::digest(file.embedded).iter().map(|byte| format!("{byte:02x}")).collect();
            let row = list.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
            assert!(row.is_some_and(|row| row.contains(&hash)), "{name}: {hash}");
        }
        assert_eq!(count, 5);
    }

    #[test]
    fn every_file_has_a_media_type() {
        for file in FILES {
            assert!(media_type(file.path).is_some(), "{}", file.path);
        }
        assert!(File::find(START_PAGE).is_some());
    }

    #[test]
    fn a_file_outside_of_the_folder_does_not_exist() {
        for path in ["../Cargo.toml", "/etc/passwd", "vendor/../../Cargo.toml", "README.md", "vendor", ""] {
            assert_eq!(respond(path, &HeaderMap::new()).status(), StatusCode::NOT_FOUND, "{path}");
        }
    }

    #[test]
    fn a_known_file_is_not_sent_again() {
        let etag = respond(START_PAGE, &HeaderMap::new()).headers()[ETAG].clone();
        let with = |known: &str| {
            let headers = HeaderMap::from_iter([(IF_NONE_MATCH, known.parse().unwrap())]);
            respond(START_PAGE, &headers).status()
        };
        assert_eq!(with(etag.to_str().unwrap()), StatusCode::NOT_MODIFIED);
        assert_eq!(with(&format!("\"other\", W/{}", etag.to_str().unwrap())), StatusCode::NOT_MODIFIED);
        assert_eq!(with("\"other\""), StatusCode::OK);
    }

    #[test]
    fn a_file_is_compressed_if_the_browser_accepts_it() {
        let encoding = |accepted: &str| {
            let headers = HeaderMap::from_iter([(ACCEPT_ENCODING, accepted.parse().unwrap())]);
            respond(START_PAGE, &headers).headers().get(CONTENT_ENCODING).cloned()
        };
        assert_eq!(encoding("br, gzip").unwrap(), "gzip");
        assert_eq!(encoding("br"), None);
    }
}
