//! The files of the console, embedded in the program. A debug build reads them from `console/`, so that changes are
//! visible without a build.

use std::io::Read;

use axum::{
    Router,
    extract::Path,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_TYPE, ETAG, IF_NONE_MATCH, VARY},
    },
    response::{IntoResponse, Response},
    routing::get,
};
use flate2::{Compression, read::GzEncoder};
use rust_embed::RustEmbed;

/// The file at `/`.
const START_PAGE: &str = "index.html";

#[derive(RustEmbed)]
#[folder = "console"]
#[exclude = "*.md"]
#[exclude = "vendor/LICENSE*"]
struct Files;

/// Returns the routes of the files: the start page at `/`, and the others below `/console/`.
pub(super) fn routes() -> Router {
    Router::new()
        .route("/", get(|headers: HeaderMap| async move { respond(START_PAGE, &headers) }))
        .route("/console/{*path}", get(|Path(path): Path<String>, headers| async move { respond(&path, &headers) }))
}

/// Responds with a file. Browsers revalidate it each time, and receive it only if it has changed.
fn respond(path: &str, headers: &HeaderMap) -> Response {
    let (Some(file), Some(media_type)) = (Files::get(path), media_type(path)) else {
        return (StatusCode::NOT_FOUND, "the console has no such file\n").into_response();
    };
    let hash: String = file.metadata.sha256_hash().iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    let etag = format!("\"{hash}\"");
    let caching = [(ETAG, etag.clone()), (CACHE_CONTROL, "no-cache".to_owned()), (VARY, "accept-encoding".to_owned())];
    if header_text(headers, IF_NONE_MATCH).split(',').any(|known| known.trim().trim_start_matches("W/") == etag) {
        return (StatusCode::NOT_MODIFIED, caching).into_response();
    }
    let content_type = [(CONTENT_TYPE, media_type)];
    if !header_text(headers, ACCEPT_ENCODING).contains("gzip") {
        return (caching, content_type, file.data.into_owned()).into_response();
    }
    let mut compressed = Vec::new();
    // Reading from memory cannot fail.
    let _ = GzEncoder::new(&file.data[..], Compression::default()).read_to_end(&mut compressed);
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
    fn all_files_together_have_at_most_200_kb_when_compressed() {
        let mut sizes = Vec::new();
        for path in Files::iter() {
            let mut compressed = Vec::new();
            GzEncoder::new(&Files::get(&path).unwrap().data[..], Compression::default())
                .read_to_end(&mut compressed)
                .unwrap();
            sizes.push((compressed.len(), path));
        }
        let total: usize = sizes.iter().map(|(size, _)| size).sum();
        assert!(sizes.len() > 10 && total <= 200_000, "{total} bytes: {sizes:?}");
    }

    #[test]
    fn vendored_files_have_the_hashes_in_their_list() {
        let list = std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/console/vendor/README.md")).unwrap();
        let vendored: Vec<_> = Files::iter().filter(|path| path.starts_with("vendor/")).collect();
        assert_eq!(vendored.len(), 5, "{vendored:?}");
        for path in vendored {
            let file = Files::get(&path).unwrap();
            let hash: String = file.metadata.sha256_hash().iter().map(|byte| format!("{byte:02x}")).collect();
            let name = path.trim_start_matches("vendor/");
            let row = list.lines().find(|line| line.starts_with(&format!("| `{name}` |")));
            assert!(row.is_some_and(|row| row.contains(&hash)), "{path}: {hash}");
        }
    }

    #[test]
    fn every_file_has_a_media_type() {
        for path in Files::iter() {
            assert!(media_type(&path).is_some(), "{path}");
        }
        assert!(Files::get(START_PAGE).is_some());
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
