//! Access to the console: the role of callers without a token.
//!
//! Callers on this host count as local only if they use a loopback name or address, because a name of an attacker can
//! resolve to this host (DNS rebinding). [`browser_security`](crate::transport::browser_security) rejects requests of
//! other sites.

use std::net::IpAddr;

use axum::{
    extract::{Request, State},
    http::{HeaderMap, header::FORWARDED, uri::Authority},
    middleware::Next,
    response::Response,
};

use super::Visibility;
use crate::transport::{
    admin::{Api, Caller, Role},
    browser_security::authority,
    http_server::Authenticated,
};

/// What determines the role of the callers on one connection of the HTTP listener.
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
        Some(Ok(caller)) => {
            Authenticated::record(&request);
            caller
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::testing::request;

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
}
