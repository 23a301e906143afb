//! Parses a URL and settings into servers, or into a [`Source`] from which servers can be queried.

use std::{io, path::Path, sync::Arc};

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, TlsCertificates,
};
use sluicegate_files as files;

use super::{
    super::{Settings, SetupError, TlsSettings, login::Login},
    Placement, Ring, Server, View,
};
use crate::redact;

/// The parsed address of a store.
pub(super) struct Address {
    pub(super) source: Source,
    /// The initial view, which is empty if servers must be discovered.
    pub(super) view: View,
    /// Credentials that can change. [`Login::follow`] keeps them up to date.
    pub(super) logins: Vec<Arc<Login>>,
}

/// The source of the current view.
pub(super) enum Source {
    /// The address and the settings, which never change.
    Fixed,
    /// A cluster. The view is read from one server that answers: a seed, or a server of the current view.
    Cluster { seeds: Vec<Server>, connector: ServerConnector },
    /// Sentinels that monitor a master of this name.
    Sentinel { sentinels: Vec<Server>, master: String, connector: ServerConnector },
}

/// Credentials and TLS settings for servers that are discovered later.
pub(super) struct ServerConnector {
    redis: RedisConnectionInfo,
    tls: bool,
    access: Access,
}

impl ServerConnector {
    pub(super) fn server(&self, host: &str, port: u16) -> Result<Server, RedisError> {
        let host = host.to_owned();
        let addr = if self.tls {
            ConnectionAddr::TcpTls { host, port, insecure: false, tls_params: None }
        } else {
            ConnectionAddr::Tcp(host, port)
        };
        let info = addr.into_connection_info()?.set_redis_settings(self.redis.clone());
        self.access.server(info, None)
    }
}

/// The parameters of a connection in addition to the address of a server.
#[derive(Clone)]
struct Access {
    login: Option<Arc<Login>>,
    certificates: Option<TlsCertificates>,
    certificate_name: Option<Arc<str>>,
    verify_name: bool,
}

impl Access {
    fn new(settings: &Settings) -> Result<Self, SetupError> {
        let tls = &settings.tls;
        Ok(Self {
            login: Login::new(settings)?,
            certificates: certificates(tls)?,
            certificate_name: tls.server_name.as_deref().map(Arc::from),
            verify_name: tls.verify_name,
        })
    }

    /// Returns the access to sentinels, which have their own credentials.
    fn for_sentinels(&self, settings: &Settings) -> Result<Self, SetupError> {
        let login = match &settings.sentinel.password_file {
            Some(path) => Some(Login::read(path)?),
            None => None,
        };
        Ok(Self { login, ..self.clone() })
    }

    fn servers(&self, infos: Vec<ConnectionInfo>) -> Result<Vec<Server>, RedisError> {
        infos.into_iter().map(|info| self.server(info, None)).collect()
    }

    /// Returns the server of an address. Its name is the address if there is no other.
    fn server(&self, info: ConnectionInfo, name: Option<&str>) -> Result<Server, RedisError> {
        let address = match info.addr() {
            ConnectionAddr::TcpTls { insecure: true, .. } => {
                return Err(invalid("#insecure is not supported; set redis.tls.ca_file or redis.tls.verify_name"));
            }
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
                format!("[{host}]:{port}")
            }
            ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => format!("{host}:{port}"),
            addr => addr.to_string(),
        };
        if self.login.is_some() && info.redis_settings().password().is_some() {
            return Err(invalid(
                "the address contains a password in addition to redis.password_file or redis.password_command",
            ));
        }
        let name = match name {
            Some(name) => name.into(),
            None => address.into(),
        };
        let info = self.with_certificates(info)?;
        Ok(Server { name, info, login: self.login.clone(), certificate_name: self.certificate_name.clone() })
    }

    fn with_certificates(&self, mut info: ConnectionInfo) -> Result<ConnectionInfo, RedisError> {
        if !matches!(info.addr(), ConnectionAddr::TcpTls { .. }) {
            return Ok(info);
        }
        if let Some(certificates) = &self.certificates {
            info = Client::build_with_tls(info, certificates.clone())?.get_connection_info().clone();
        }
        let mut addr = info.addr().clone();
        addr.set_danger_accept_invalid_hostnames(!self.verify_name);
        Ok(info.set_addr(addr))
    }
}

/// Suffixes of the URL scheme that select a topology, after `redis` or `rediss`.
const CLUSTER: &str = "+cluster";
const SENTINEL: &str = "+sentinel";
const RING: &str = "+ring";

/// Schemes of the addresses of one server.
const SINGLE_SCHEMES: [&str; 7] = ["redis", "rediss", "valkey", "valkeys", "redis+unix", "valkey+unix", "unix"];

/// A URL with several hosts.
struct MultiHostUrl<'u> {
    scheme: &'static str,
    /// Credentials with the trailing `@`, or an empty string.
    credentials: &'u str,
    hosts: Vec<&'u str>,
    /// Path without the leading `/`.
    path: &'u str,
}

impl<'u> MultiHostUrl<'u> {
    /// Parses a URL if its scheme has the suffix `topology`. Returns `None` for another scheme.
    fn parse(url: &'u str, topology: &str) -> Option<Self> {
        let (scheme, remainder) = url.split_once("://")?;
        let scheme = match scheme.strip_suffix(topology)? {
            "redis" => "redis",
            "rediss" => "rediss",
            _ => return None,
        };
        let (credentials, remainder) = match remainder.rfind('@') {
            Some(at) => remainder.split_at(at + 1),
            None => ("", remainder),
        };
        let (hosts, path) = remainder.split_once('/').unwrap_or((remainder, ""));
        let hosts = hosts.split(',').filter(|host| !host.is_empty()).collect();
        Some(Self { scheme, credentials, hosts, path })
    }

    fn infos(&self, default_port: u16, path: &str) -> Result<Vec<ConnectionInfo>, RedisError> {
        if self.hosts.is_empty() {
            return Err(invalid("the address must contain at least one host"));
        }
        let mut infos = Vec::with_capacity(self.hosts.len());
        for host in &self.hosts {
            // The port follows the last colon, unless that colon is inside the brackets of an IPv6 address.
            let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
            let port = if has_port { String::new() } else { format!(":{default_port}") };
            let url = format!("{}://{}{host}{port}/{path}", self.scheme, self.credentials);
            infos.push(url.into_connection_info()?);
        }
        Ok(infos)
    }
}

fn invalid(reason: &'static str) -> RedisError {
    (ErrorKind::InvalidClientConfig, reason).into()
}

/// Parses the address of a store, and reads the certificates and the password.
pub(super) fn parse(url: &str, settings: &Settings) -> Result<Address, SetupError> {
    let access = Access::new(settings)?;
    let mut logins = Vec::from_iter(access.login.clone());
    let address = |source| SetupError::Address { url: redact(url), source };
    let empty_view = View { servers: Vec::new(), placement: Placement::One };
    if let Some(multi_host) = MultiHostUrl::parse(url, CLUSTER) {
        if !matches!(multi_host.path, "" | "0") {
            return Err(address(invalid("a cluster has only database 0")));
        }
        let infos = multi_host.infos(6_379, "").map_err(address)?;
        let connector = connector(&infos, access.clone());
        let seeds = access.servers(infos).map_err(address)?;
        return Ok(Address { source: Source::Cluster { seeds, connector }, view: empty_view, logins });
    }
    if let Some(multi_host) = MultiHostUrl::parse(url, SENTINEL) {
        let (master, database) = multi_host.path.split_once('/').unwrap_or((multi_host.path, ""));
        if master.is_empty() {
            return Err(address(invalid("the address of sentinels must end with the name of the master")));
        }
        let infos = multi_host.infos(26_379, database).map_err(address)?;
        let connector = connector(&infos, access.clone());
        // A mistake in the address of the master is reported now, not when it is discovered.
        access.servers(infos.clone()).map_err(address)?;
        let infos = infos.iter().map(|info| sentinel(info, settings)).collect::<Result<_, _>>().map_err(address)?;
        let sentinel_access = access.for_sentinels(settings)?;
        let sentinels = sentinel_access.servers(infos).map_err(address)?;
        logins.extend(sentinel_access.login);
        let source = Source::Sentinel { sentinels, master: master.to_owned(), connector };
        return Ok(Address { source, view: empty_view, logins });
    }
    let view = if let Some(multi_host) = MultiHostUrl::parse(url, RING) {
        ring(&multi_host, settings, &access).map_err(address)?
    } else {
        check_single(url).map_err(address)?;
        let info = url.into_connection_info().map_err(|error| address(explained(url, error)))?;
        View::one(access.server(info, None).map_err(address)?)
    };
    Ok(Address { source: Source::Fixed, view, logins })
}

/// Rejects an address of one server that can only be a mistake.
fn check_single(url: &str) -> Result<(), RedisError> {
    let Some((scheme, rest)) = url.split_once("://") else {
        return Ok(());
    };
    if !SINGLE_SCHEMES.iter().any(|known| known.eq_ignore_ascii_case(scheme)) {
        return Err(invalid(
            "the scheme is none of redis, redis+cluster, redis+sentinel, redis+ring (with TLS, rediss…) and redis+unix, \
             nor is it memcached (with TLS, memcacheds)",
        ));
    }
    let host = rest.rsplit('@').next().unwrap_or(rest).split('/').next().unwrap_or_default();
    if host.contains(',') && !scheme.ends_with("unix") {
        return Err(invalid("several servers need redis+cluster://, redis+sentinel:// or redis+ring://"));
    }
    Ok(())
}

/// Returns the error for an address that cannot be parsed. If the address may contain a password, the error explains
/// how to write special characters.
fn explained(url: &str, error: RedisError) -> RedisError {
    if !url.contains('@') {
        return error;
    }
    invalid("the address cannot be parsed; in a user name or a password, write # / ? @ : % as %23 %2F %3F %40 %3A %25")
}

/// A node of a ring.
struct RingServer {
    server: Server,
    weight: u32,
}

/// Returns the view of a ring with the nodes of the URL, named by their addresses, or those of the settings.
fn ring(multi_host: &MultiHostUrl<'_>, settings: &Settings, access: &Access) -> Result<View, RedisError> {
    let mut nodes = Vec::new();
    if multi_host.hosts.is_empty() {
        for node in &settings.ring {
            let info = node.url.as_str().into_connection_info().map_err(|error| {
                let reason = "the address of a node in redis.ring cannot be parsed";
                let detail = format!("node {:?}, {error}", node.name);
                RedisError::from((ErrorKind::InvalidClientConfig, reason, detail))
            })?;
            let mut access = access.clone();
            // The node has a password of its own.
            if info.redis_settings().password().is_some() {
                access.login = None;
            }
            let server = access.server(info, Some(&node.name))?;
            nodes.push(RingServer { server, weight: node.weight });
        }
    } else {
        for server in access.servers(multi_host.infos(6_379, multi_host.path)?)? {
            nodes.push(RingServer { server, weight: 1 });
        }
    }
    if nodes.is_empty() {
        return Err(invalid("a ring needs at least one node, in the address or in the setting redis.ring"));
    }
    for (index, node) in nodes.iter().enumerate() {
        let name = &node.server.name;
        if nodes[..index].iter().any(|known| known.server.name == *name) {
            return Err(invalid("two nodes of a ring have the same name"));
        }
        if node.weight == 0 || name.is_empty() {
            return Err(invalid("a node of a ring needs a name and a weight of at least 1"));
        }
    }
    let ring = Ring::new(nodes.iter().map(|node| (&*node.server.name, node.weight)));
    let servers = nodes.into_iter().map(|node| node.server).collect();
    Ok(View { servers, placement: Placement::Ring(ring) })
}

/// Replaces credentials and TLS by those for sentinels.
fn sentinel(info: &ConnectionInfo, settings: &Settings) -> Result<ConnectionInfo, RedisError> {
    let sentinel_settings = &settings.sentinel;
    let addr = match (info.addr(), sentinel_settings.tls) {
        (ConnectionAddr::TcpTls { host, port, .. }, Some(false)) => ConnectionAddr::Tcp(host.clone(), *port),
        (ConnectionAddr::Tcp(host, port), Some(true)) => {
            ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
        }
        (addr, _) => addr.clone(),
    };
    let mut redis = RedisConnectionInfo::default();
    if let Some(username) = &sentinel_settings.username {
        redis = redis.set_username(username);
    }
    if let Some(password) = &sentinel_settings.password {
        redis = redis.set_password(password);
    }
    Ok(addr.into_connection_info()?.set_redis_settings(redis))
}

fn connector(infos: &[ConnectionInfo], access: Access) -> ServerConnector {
    let redis = infos.first().map(|info| info.redis_settings().clone()).unwrap_or_default();
    let tls = matches!(infos.first().map(ConnectionInfo::addr), Some(ConnectionAddr::TcpTls { .. }));
    ServerConnector { redis, tls, access }
}

fn certificates(tls: &TlsSettings) -> Result<Option<TlsCertificates>, SetupError> {
    if tls.ca_file.is_none() && tls.cert_file.is_none() {
        return Ok(None);
    }
    let client_tls = match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig {
            client_cert: files::read_certificates(cert).map_err(|error| certificate_error(cert, error))?,
            client_key: files::read_key(key).map_err(|error| certificate_error(key, error))?,
        }),
        _ => None,
    };
    let root_cert = match &tls.ca_file {
        Some(ca) => Some(files::read_authorities(ca).map_err(|error| certificate_error(ca, error))?),
        None => None,
    };
    Ok(Some(TlsCertificates { client_tls, root_cert }))
}

fn certificate_error(path: &Path, source: io::Error) -> SetupError {
    SetupError::Certificate { path: path.display().to_string(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{RingNode, SentinelSettings};

    fn names(servers: &[Server]) -> Vec<&str> {
        servers.iter().map(|server| &*server.name).collect()
    }

    fn rejection(url: &str, settings: &Settings) -> String {
        let Err(SetupError::Address { url: redacted, source }) = parse(url, settings) else {
            panic!("{url} is accepted");
        };
        assert!(!redacted.contains("secret"), "{redacted}");
        source.to_string()
    }

    #[test]
    fn parses_the_address_of_one_server() {
        let Address { source, view, .. } = parse("redis://localhost:7/3", &Settings::default()).unwrap();
        assert!(matches!(source, Source::Fixed));
        assert_eq!(names(&view.servers), ["localhost:7"]);
        assert_eq!(view.index_of(|| b"any"), Some(0));
    }

    #[test]
    fn parses_the_seeds_of_a_cluster_with_a_default_port() {
        let url = "redis+cluster://app:s%40cret@a:7000,b,[::1]:7001,[::1]/0";
        let Address { source: Source::Cluster { seeds, connector }, view, .. } =
            parse(url, &Settings::default()).unwrap()
        else {
            panic!("not a cluster");
        };
        assert_eq!(names(&seeds), ["a:7000", "b:6379", "[::1]:7001", "[::1]:6379"]);
        assert_eq!(
            (connector.redis.username(), connector.redis.password(), connector.tls),
            (Some("app"), Some("s@cret"), false)
        );
        assert_eq!(&*connector.server("c", 1).unwrap().name, "c:1");
        assert_eq!(view.index_of(|| b"any"), None, "the slots are unknown until a node is queried");
    }

    #[test]
    fn sentinels_have_their_own_credentials() {
        let own = SentinelSettings {
            username: Some("watch".into()),
            password: Some("dog".into()),
            password_file: None,
            tls: Some(false),
        };
        let settings = Settings { sentinel: own, ..Settings::default() };
        let url = "rediss+sentinel://app:secret@a,b:7/main/2";
        let Source::Sentinel { sentinels, master, connector } = parse(url, &settings).unwrap().source else {
            panic!("not sentinels");
        };
        assert_eq!((names(&sentinels), master.as_str()), (vec!["a:26379", "b:7"], "main"));
        let info = &sentinels[0].info;
        assert_eq!((info.redis_settings().username(), info.redis_settings().password()), (Some("watch"), Some("dog")));
        assert!(matches!(info.addr(), ConnectionAddr::Tcp(..)));
        assert_eq!((connector.redis.password(), connector.redis.db(), connector.tls), (Some("secret"), 2, true));
        let Source::Sentinel { sentinels, .. } = parse(url, &Settings::default()).unwrap().source else {
            panic!("not sentinels");
        };
        let info = &sentinels[0].info;
        assert!(matches!(info.addr(), ConnectionAddr::TcpTls { .. }) && info.redis_settings().password().is_none());
    }

    #[test]
    fn nodes_of_a_ring_come_from_the_url_or_the_settings() {
        let Address { view, .. } = parse("redis+ring://a,b:7,c:8/1", &Settings::default()).unwrap();
        assert_eq!(names(&view.servers), ["a:6379", "b:7", "c:8"]);
        let node = |name: &str, url: &str, weight| RingNode { name: name.into(), url: url.into(), weight };
        let ring = vec![node("one", "redis://x:1", 1), node("two", "rediss://:secret@y:2", 1_000_000)];
        let settings = Settings { ring, ..Settings::default() };
        let Address { view, .. } = parse("redis+ring://", &settings).unwrap();
        assert_eq!(names(&view.servers), ["one", "two"]);
        assert_eq!(view.index_of(|| b"any"), Some(1), "weights select the node");
        for (ring, expected) in [
            (vec![node("a", "redis://x", 1), node("a", "redis://y", 1)], "same name"),
            (vec![node("a", "redis://x", 0)], "weight"),
            (vec![node("", "redis://x", 1)], "name"),
            (vec![node("a", "x", 1)], "node \"a\""),
            (vec![], "at least one node"),
        ] {
            let error = rejection("redis+ring://", &Settings { ring, ..Settings::default() });
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn rejects_incomplete_and_contradictory_addresses() {
        for (url, expected) in [
            ("redis+cluster://", "at least one host"),
            ("redis+cluster://:secret@a/3", "only database 0"),
            ("redis+sentinel://a,b", "name of the master"),
            ("redis+sentinel://:secret@/main", "at least one host"),
            ("redis+star://a", "the scheme is none of redis, redis+cluster, "),
            ("http://a", "the scheme is none of redis, redis+cluster, "),
            ("redis://:secret@a,b:7", "several servers need redis+cluster://"),
            ("redis://:secret#1@a", "write # / ? @ : % as %23 %2F %3F %40 %3A %25"),
            ("redis://a:port", "did not parse"),
            ("redis+ring://a,a", "same name"),
            ("rediss://:secret@a/#insecure", "#insecure is not supported; set redis.tls.ca_file"),
        ] {
            let error = rejection(url, &Settings::default());
            assert!(error.contains(expected), "{url}: {error}");
        }
    }

    /// A password in a file is not that of nodes that have one of their own.
    #[test]
    fn a_password_has_one_source() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, "secret").unwrap();
        let node = |name: &str, url: &str| RingNode { name: name.into(), url: url.into(), weight: 1 };
        let ring = vec![node("own", "redis://:other@x:1"), node("file", "redis://app@y:2")];
        let settings = Settings { password_file: Some(file.path().into()), ring, ..Settings::default() };
        for url in [
            "redis://:secret@a",
            "redis+unix:///redis.sock?pass=secret",
            "redis+cluster://:secret@a",
            "redis+sentinel://:secret@a/main",
            "redis+ring://:secret@a",
        ] {
            let error = rejection(url, &settings);
            assert!(error.contains("a password in addition to redis.password_file"), "{url}: {error}");
        }
        let parsed = parse("redis+ring://", &settings).unwrap();
        let has_login: Vec<_> = parsed.view.servers.iter().map(|server| server.login.is_some()).collect();
        assert_eq!(has_login, [false, true]);
        assert_eq!(parsed.logins.len(), 1);
        let sentinel = SentinelSettings { password_file: Some(file.path().into()), ..SentinelSettings::default() };
        let settings = Settings { sentinel, ..Settings::default() };
        let parsed = parse("redis+sentinel://:secret@a/main", &settings).unwrap();
        let Source::Sentinel { sentinels, connector, .. } = parsed.source else { panic!("not sentinels") };
        assert!(sentinels[0].login.is_some() && connector.access.login.is_none());
        assert_eq!(parsed.logins.len(), 1);
    }

    #[test]
    fn each_certificate_file_is_read() {
        let path = |name: &str| Some(Path::new("/nowhere").join(name));
        for (tls, expected) in [
            (TlsSettings { ca_file: path("ca"), ..TlsSettings::default() }, Some("/nowhere/ca")),
            (
                TlsSettings { cert_file: path("cert"), key_file: path("key"), ..TlsSettings::default() },
                Some("/nowhere/cert"),
            ),
            (TlsSettings::default(), None),
        ] {
            let unreadable = match parse("redis://a", &Settings { tls, ..Settings::default() }) {
                Err(SetupError::Certificate { path, .. }) => Some(path),
                Ok(_) | Err(_) => None,
            };
            assert_eq!(unreadable.as_deref(), expected);
        }
    }
}
