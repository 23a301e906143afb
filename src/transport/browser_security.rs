//! [`secure`]: protects users of browsers against other sites.
//!
//! A browser sends requests of any site to any address, also to `localhost`. Requests of other sites are therefore
//! rejected by their `Sec-Fetch-Site` or `Origin` header. Browsers send neither if a name of the attacker resolves to
//! this host (DNS rebinding).

use axum::{
    extract::Request,
    http::{
        HeaderName, HeaderValue, Method, StatusCode,
        header::{HOST, ORIGIN},
        uri::Authority,
    },
    middleware::Next,
    response::{IntoResponse, Response},
};

/// Headers of every response: a page loads scripts, styles and images from this service only, and no page of another
/// site may embed it.
const HEADERS: [(&str, &str); 6] = [
    (
        "content-security-policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'",
    ),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
    ("referrer-policy", "no-referrer"),
    ("cross-origin-opener-policy", "same-origin"),
    ("cross-origin-resource-policy", "same-origin"),
];

/// Returns the host and port that the request was sent to.
pub(super) fn authority(request: &Request) -> Option<Authority> {
    if let Some(authority) = request.uri().authority() {
        return Some(authority.clone());
    }
    request.headers().get(HOST)?.to_str().ok()?.parse().ok()
}

/// Rejects with status 403 the requests that another site caused, except GET and HEAD of pages. Adds [`HEADERS`] to all
/// responses.
pub(super) async fn secure(request: Request, next: Next) -> Response {
    let mut response = if !is_page(&request) && is_cross_site(&request) {
        (StatusCode::FORBIDDEN, "requests of other sites are not allowed\n").into_response()
    } else {
        next.run(request).await
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

/// Returns whether a request reads a page, to which other sites may have a link.
fn is_page(request: &Request) -> bool {
    const CALLS: [&str; 3] = ["/v1/", "/json", "/resources/"];
    let is_reading = matches!(*request.method(), Method::GET | Method::HEAD);
    is_reading && !CALLS.iter().any(|call| request.uri().path().starts_with(call))
}

fn is_cross_site(request: &Request) -> bool {
    if let Some(site) = header_text(request, "sec-fetch-site") {
        return !matches!(site, "same-origin" | "none");
    }
    // Browsers send no `Sec-Fetch-Site` to addresses without TLS other than `localhost`.
    let Some(origin) = header_text(request, ORIGIN.as_str()) else {
        return false;
    };
    let origin = origin.split_once("://").and_then(|(_, authority)| authority.parse::<Authority>().ok());
    origin.is_none() || origin != authority(request)
}

/// Returns the value of a header; empty if it is not a text.
fn header_text<'r>(request: &'r Request, name: &str) -> Option<&'r str> {
    let value = request.headers().get(name)?;
    Some(value.to_str().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;
    use crate::transport::testing::request;

    #[test]
    fn only_reading_a_page_is_allowed_to_other_sites() {
        let is_page = |method: Method, path: &str| {
            is_page(&Request::builder().method(method).uri(path).body(Body::empty()).unwrap())
        };
        for path in ["/", "/metrics", "/rlconfig", "/readyz", "/console/app.js"] {
            assert!(is_page(Method::GET, path) && is_page(Method::HEAD, path), "{path}");
            assert!(!is_page(Method::POST, path) && !is_page(Method::DELETE, path), "{path}");
        }
        for path in ["/json", "/resources/db", "/v1/Inspect"] {
            assert!(!is_page(Method::GET, path) && !is_page(Method::POST, path), "{path}");
        }
    }

    #[test]
    fn requests_of_other_sites_are_recognized() {
        let is_cross = |headers: &[(&str, &str)]| is_cross_site(&request(headers));
        assert!(!is_cross(&[]));
        assert!(!is_cross(&[("host", "a:8080"), ("origin", "http://a:8080")]));
        for site in ["same-origin", "none"] {
            assert!(!is_cross(&[("sec-fetch-site", site)]), "{site}");
        }
        for site in ["cross-site", "same-site", "", "\u{ff}"] {
            assert!(is_cross(&[("sec-fetch-site", site), ("host", "a"), ("origin", "http://a")]), "{site}");
        }
        for origin in ["null", "http://b:8080", "http://a", "http://a:80", "file://"] {
            assert!(is_cross(&[("host", "a:8080"), ("origin", origin)]), "{origin}");
        }
    }
}
