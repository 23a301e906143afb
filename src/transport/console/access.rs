//! Access to the console: the role of callers without a token, and protection against other sites.
//!
//! A browser sends requests of any site to any address, also to `localhost`. Requests of other sites are therefore
//! rejected by their `Sec-Fetch-Site` or `Origin` header. Browsers send neither if a name of the attacker resolves to
//! this host (DNS rebinding), so callers on this host count as local only if they use a loopback name or address.

use std::net::IpAddr;

use axum::{
    extract::{Request, State},
    http::{
        HeaderMap, HeaderName, HeaderValue, StatusCode,
        header::{FORWARDED, HOST, ORIGIN},
        uri::Authority,
    },
    middleware::Next,
    response::{IntoResponse, Response},
};

use super::Visibility;
use crate::transport::admin::{Api, Caller, Role};

/// Headers of every response. No script, style or image may come from elsewhere, and no other page may embed these.
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

/// Determines the role of a caller on the HTTP listener.
#[derive(Clone)]
pub(super) struct Access {
    api: Api,
    visibility: Visibility,
    peer: IpAddr,
}

impl Access {
    pub(super) fn new(api: Api, visibility: Visibility, peer: IpAddr) -> Self {
        Self { api, visibility, peer }
    }
}

/// Determines the caller of a request: by its token, or by the setting for callers without one.
pub(super) async fn admit(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    let caller = match access.api.caller_with_token(request.headers()) {
        Some(Ok(caller)) => caller,
        Some(Err(response)) => return *response,
        None => Caller { name: String::new(), role: anonymous_role(access.visibility, access.peer, &request) },
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}

/// Returns the role of a caller without a token.
fn anonymous_role(visibility: Visibility, peer: IpAddr, request: &Request) -> Role {
    let may_read = match visibility {
        Visibility::Local => is_local(peer, authority(request).as_ref(), request.headers()),
        Visibility::Token => false,
        Visibility::All => true,
    };
    if may_read { Role::Read } else { Role::Public }
}

/// Returns whether a caller is on this host: the connection comes from a loopback address, the caller uses a loopback
/// name, and no proxy has forwarded the request.
fn is_local(peer: IpAddr, host: Option<&Authority>, headers: &HeaderMap) -> bool {
    const FORWARDED_HEADERS: [&str; 4] = ["x-forwarded-for", "x-forwarded-host", "x-real-ip", "via"];
    let is_forwarded =
        headers.contains_key(FORWARDED) || FORWARDED_HEADERS.iter().any(|name| headers.contains_key(*name));
    let is_loopback_name = host.is_some_and(|host| {
        let name = host.host().trim_start_matches('[').trim_end_matches(']');
        name.eq_ignore_ascii_case("localhost") || name.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
    });
    peer.to_canonical().is_loopback() && is_loopback_name && !is_forwarded
}

/// Returns the host and port that the request was sent to.
fn authority(request: &Request) -> Option<Authority> {
    let host = || request.headers().get(HOST)?.to_str().ok()?.parse().ok();
    request.uri().authority().cloned().or_else(host)
}

/// Rejects requests that another site caused, except for pages without data, and adds [`HEADERS`] to responses.
pub(in crate::transport) async fn secure(request: Request, next: Next) -> Response {
    let is_method = request.uri().path().starts_with("/v1/");
    let mut response = match is_method && is_cross_site(&request) {
        true => (StatusCode::FORBIDDEN, "requests of other sites are not allowed\n").into_response(),
        false => next.run(request).await,
    };
    let headers = response.headers_mut();
    for (name, value) in HEADERS {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
    }
    response
}

fn is_cross_site(request: &Request) -> bool {
    let text = |name: &str| request.headers().get(name).map(|value| value.to_str().unwrap_or_default());
    if let Some(site) = text("sec-fetch-site") {
        return !matches!(site, "same-origin" | "none");
    }
    // Browsers send no `Sec-Fetch-Site` to addresses without TLS other than `localhost`.
    let Some(origin) = text(ORIGIN.as_str()) else {
        return false;
    };
    let origin = origin.split_once("://").and_then(|(_, authority)| authority.parse::<Authority>().ok());
    origin.is_none() || origin != authority(request)
}

#[cfg(test)]
mod tests {
    use axum::body::Body;

    use super::*;

    fn request(headers: &[(&str, &str)]) -> Request {
        let mut request = Request::builder().uri("/v1/Inspect");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(Body::empty()).unwrap()
    }

    #[test]
    fn only_callers_on_this_host_are_local() {
        let role = |peer: &str, headers: &[(&str, &str)]| {
            anonymous_role(Visibility::Local, peer.parse().unwrap(), &request(headers))
        };
        for host in ["localhost:8080", "LOCALHOST", "127.0.0.1:8080", "127.9.9.9", "[::1]:8080"] {
            assert_eq!(role("127.0.0.1", &[("host", host)]), Role::Read, "{host}");
        }
        assert_eq!(role("::ffff:127.0.0.1", &[("host", "localhost")]), Role::Read);
        for host in ["", "evil.example", "localhost.evil.example", "10.0.0.1", "127.0.0.1.evil.example", "[::2]"] {
            assert_eq!(role("127.0.0.1", &[("host", host)]), Role::Public, "{host}");
        }
        assert_eq!(role("127.0.0.1", &[]), Role::Public);
        assert_eq!(role("10.0.0.1", &[("host", "localhost")]), Role::Public);
        for forwarded in ["forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via"] {
            assert_eq!(role("::1", &[("host", "localhost"), (forwarded, "")]), Role::Public, "{forwarded}");
        }
    }

    #[test]
    fn the_setting_decides_for_all_other_callers() {
        let peer = "10.0.0.1".parse().unwrap();
        assert_eq!(anonymous_role(Visibility::All, peer, &request(&[])), Role::Read);
        let local = request(&[("host", "localhost")]);
        assert_eq!(anonymous_role(Visibility::Token, "127.0.0.1".parse().unwrap(), &local), Role::Public);
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
