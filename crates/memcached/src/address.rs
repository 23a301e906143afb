//! [`parse`]: the servers in the address of a store, `memcached://host:port[,host:port]`, or `memcacheds://` with TLS.

/// Port of a server whose address contains none.
const DEFAULT_PORT: u16 = 11_211;

/// Error returned for an invalid address of a memcached store.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid memcached store address {url}: {reason}")]
pub struct InvalidAddress {
    /// The address.
    pub url: String,
    /// Reason for the rejection.
    pub reason: String,
}

/// The servers of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Address {
    /// Host and port of each server.
    pub(crate) servers: Vec<String>,
    pub(crate) has_tls: bool,
}

/// Parses the address of a store.
///
/// # Errors
///
/// Returns an error if there is no server, a server twice, an invalid host or port, or anything else.
pub(crate) fn parse(url: &str) -> Result<Address, InvalidAddress> {
    let invalid = |reason: String| InvalidAddress { url: redacted(url), reason };
    let (servers, has_tls) = match url.split_once("://") {
        Some(("memcached", servers)) => (servers, false),
        Some(("memcacheds", servers)) => (servers, true),
        _ => return Err(invalid("must begin with memcached:// or, with TLS, memcacheds://".into())),
    };
    if servers.contains('@') {
        return Err(invalid("memcached has no users and passwords in its text protocol".into()));
    }
    let mut names = Vec::new();
    for server in servers.trim_end_matches('/').split(',') {
        let name = name_of(server).map_err(invalid)?;
        if names.contains(&name) {
            return Err(invalid(format!("contains the server {name} twice")));
        }
        names.push(name);
    }
    Ok(Address { servers: names, has_tls })
}

/// Returns the host in the name of a server, without brackets.
pub(crate) fn host_of(name: &str) -> &str {
    let host = match name.rsplit_once(':') {
        Some((host, _)) => host,
        None => name,
    };
    host.trim_matches(['[', ']'])
}

/// Returns the host and port of a server.
fn name_of(server: &str) -> Result<String, String> {
    let is_bracketed = server.starts_with('[');
    let host_end = if is_bracketed { server.find(']').map(|end| end + 1) } else { server.find(':') };
    let (host, port) = server.split_at(host_end.unwrap_or(server.len()));
    let is_name = host.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'-' | b'_'));
    let is_valid = if is_bracketed { is_ipv6(host) } else { is_name && !host.is_empty() };
    if !is_valid {
        return Err(format!("host {host:?} is not a name, an IPv4 address, or an IPv6 address in brackets"));
    }
    if port.is_empty() {
        return Ok(format!("{host}:{DEFAULT_PORT}"));
    }
    match port.strip_prefix(':').map(str::parse::<u16>) {
        Some(Ok(port)) if port > 0 => Ok(format!("{host}:{port}")),
        _ => Err(format!("port {port:?} of the server {host} is not a number from 1 to 65535")),
    }
}

fn is_ipv6(host: &str) -> bool {
    let address = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    address.is_some_and(|address| address.parse::<std::net::Ipv6Addr>().is_ok())
}

/// Returns the address without credentials.
fn redacted(url: &str) -> String {
    let Some((before, servers)) = url.rsplit_once('@') else {
        return url.to_owned();
    };
    match before.split_once("://") {
        Some((scheme, _)) => format!("{scheme}://***@{servers}"),
        None => format!("***@{servers}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_have_a_host_and_a_port() {
        for (url, servers) in [
            ("memcached://cache", vec!["cache:11211"]),
            ("memcached://127.0.0.1:1/", vec!["127.0.0.1:1"]),
            ("memcached://a:1,b.example:2,[::1]:3,[::1]", vec!["a:1", "b.example:2", "[::1]:3", "[::1]:11211"]),
        ] {
            assert_eq!(parse(url).unwrap().servers, servers, "{url}");
        }
        assert_eq!([parse("memcached://a").unwrap().has_tls, parse("memcacheds://a").unwrap().has_tls], [false, true]);
        assert_eq!(["a:1", "[::1]:1"].map(host_of), ["a", "::1"]);
    }

    #[test]
    fn an_invalid_address_names_the_problem_and_no_password() {
        for (url, reason) in [
            ("memcached://", "host \"\" is not"),
            ("memcached://a,", "host \"\" is not"),
            ("memcached://a:x", "port \":x\" of the server a is not"),
            ("memcached://a:0", "is not a number from 1"),
            ("memcached://a:99999", "is not a number from 1"),
            ("memcached://[::g]:1", "host \"[::g]\" is not"),
            ("memcached://[::1", "is not"),
            ("memcached://::1", "host \"\" is not"),
            ("memcached://a:1,a:1", "contains the server a:1 twice"),
            ("memcached://a b", "host \"a b\" is not"),
            ("memcached://u:hunter2@a", "has no users"),
            ("u:hunter2@a", "must begin with memcached://"),
            ("u:hunter2@memcached://a", "must begin with memcached://"),
            ("memcache://a", "must begin with memcached://"),
        ] {
            let message = parse(url).unwrap_err().to_string();
            assert!(message.contains(reason) && !message.contains("hunter2"), "{url}: {message}");
        }
    }
}
