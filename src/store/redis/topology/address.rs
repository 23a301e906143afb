//! From a URL and settings to servers, or to those who know them.

use std::{path::PathBuf, sync::Arc};

use redis::{
    Client, ClientTlsConfig, ConnectionAddr, ConnectionInfo, ErrorKind, IntoConnectionInfo, RedisConnectionInfo,
    RedisError, TlsCertificates,
};

use super::{
    super::{Settings, SetupError, settings::TlsSettings},
    Placement, Ring, Server, View,
};
use crate::store::redact;

/// Where a view comes from.
pub(super) enum Source {
    /// It never changes.
    Fixed,
    /// Servers of the cluster, of which one that answers is enough.
    Cluster { seeds: Vec<Server>, dialer: ServerConnector },
    /// Sentinels that watch a master of this name.
    Sentinel { sentinels: Vec<Server>, master: String, dialer: ServerConnector },
}

/// How to connect to a server of which only the address is known.
pub(super) struct ServerConnector {
    redis: RedisConnectionInfo,
    tls: bool,
    certificates: Option<TlsCertificates>,
}

impl ServerConnector {
    pub(super) fn server(&self, host: &str, port: u16) -> Result<Server, RedisError> {
        let addr = match self.tls {
            true => ConnectionAddr::TcpTls { host: host.to_owned(), port, insecure: false, tls_params: None },
            false => ConnectionAddr::Tcp(host.to_owned(), port),
        };
        let info = addr.into_connection_info()?.set_redis_settings(self.redis.clone());
        server(info, self.certificates.clone(), None)
    }
}

/// The forms that a URL can have; what stands before `://`, without the `s` of TLS.
const CLUSTER: &str = "+cluster";
const SENTINEL: &str = "+sentinel";
const RING: &str = "+ring";

/// Several addresses in one URL.
struct MultiHostUrl<'u> {
    scheme: &'static str,
    /// With its `@`, or empty.
    credentials: &'u str,
    hosts: Vec<&'u str>,
    /// Without its `/`.
    path: &'u str,
}

impl<'u> MultiHostUrl<'u> {
    /// `None` when this is the URL of one server.
    fn read(url: &'u str, topology: &str) -> Option<Self> {
        let (scheme, rest) = url.split_once("://")?;
        let scheme = match scheme.strip_suffix(topology)? {
            "redis" => "redis",
            "rediss" => "rediss",
            _ => return None,
        };
        let (credentials, rest) = rest.split_at(rest.rfind('@').map_or(0, |at| at + 1));
        let (hosts, path) = rest.split_once('/').unwrap_or((rest, ""));
        let hosts = hosts.split(',').filter(|host| !host.is_empty()).collect();
        Some(Self { scheme, credentials, hosts, path })
    }

    fn infos(&self, default_port: u16, path: &str) -> Result<Vec<ConnectionInfo>, RedisError> {
        if self.hosts.is_empty() {
            return Err(refused("an address needs at least one host"));
        }
        let info = |host: &&str| {
            // A port stands behind the last colon, and behind the brackets of an IPv6 address.
            let has_port = host.rsplit_once(':').is_some_and(|(_, port)| !port.contains(']'));
            let port = if has_port { String::new() } else { format!(":{default_port}") };
            format!("{}://{}{host}{port}/{path}", self.scheme, self.credentials).into_connection_info()
        };
        self.hosts.iter().map(info).collect()
    }
}

fn refused(why: &'static str) -> RedisError {
    (ErrorKind::InvalidClientConfig, why).into()
}

pub(super) fn read(url: &str, settings: &Settings) -> Result<(Source, View), SetupError> {
    let certificates = certificates(&settings.tls)?;
    let address = |source| SetupError::Address { url: redact(url), source };
    let unknown = View { servers: Vec::new(), placement: Placement::One };
    if let Some(many) = MultiHostUrl::read(url, CLUSTER) {
        if !matches!(many.path, "" | "0") {
            return Err(address(refused("a cluster has no databases but 0")));
        }
        let infos = many.infos(6_379, "").map_err(address)?;
        let dialer = dialer(&infos, certificates.clone());
        let seeds = servers(infos, certificates.as_ref()).map_err(address)?;
        return Ok((Source::Cluster { seeds, dialer }, unknown));
    }
    if let Some(many) = MultiHostUrl::read(url, SENTINEL) {
        let (master, database) = many.path.split_once('/').unwrap_or((many.path, ""));
        if master.is_empty() {
            return Err(address(refused("an address of sentinels ends with the name of the master they watch")));
        }
        let infos = many.infos(26_379, database).map_err(address)?;
        let dialer = dialer(&infos, certificates.clone());
        let infos = infos.iter().map(|info| sentinel(info, settings)).collect::<Result<_, _>>().map_err(address)?;
        let sentinels = servers(infos, certificates.as_ref()).map_err(address)?;
        return Ok((Source::Sentinel { sentinels, master: master.to_owned(), dialer }, unknown));
    }
    if let Some(many) = MultiHostUrl::read(url, RING) {
        return Ok((Source::Fixed, ring(&many, settings, certificates.as_ref()).map_err(address)?));
    }
    let info = url.into_connection_info().map_err(address)?;
    Ok((Source::Fixed, View::one(server(info, certificates, None).map_err(address)?)))
}

/// The nodes of the URL, by their addresses, or those of the settings, by their names.
fn ring(
    many: &MultiHostUrl<'_>,
    settings: &Settings,
    certificates: Option<&TlsCertificates>,
) -> Result<View, RedisError> {
    let mut nodes = Vec::new();
    if many.hosts.is_empty() {
        for node in &settings.ring {
            let server = server(node.url.as_str().into_connection_info()?, certificates.cloned(), Some(&node.name))?;
            nodes.push((node.name.clone(), node.weight, server));
        }
    } else {
        for server in servers(many.infos(6_379, many.path)?, certificates)? {
            nodes.push((server.name.to_string(), 1, server));
        }
    }
    if nodes.is_empty() {
        return Err(refused("a ring needs nodes, in the address or as redis.ring in the settings file"));
    }
    for (place, (name, weight, _)) in nodes.iter().enumerate() {
        if nodes[..place].iter().any(|(known, ..)| known == name) {
            return Err(refused("two nodes of a ring have the same name"));
        }
        if *weight == 0 || name.is_empty() {
            return Err(refused("a node of a ring needs a name and a weight of at least 1"));
        }
    }
    let ring = Ring::new(nodes.iter().map(|(name, weight, _)| (name.as_str(), *weight)));
    Ok(View { servers: nodes.into_iter().map(|(.., server)| server).collect(), placement: Placement::Ring(ring) })
}

/// The sentinels themselves have credentials of their own, and TLS perhaps.
fn sentinel(info: &ConnectionInfo, settings: &Settings) -> Result<ConnectionInfo, RedisError> {
    let own = &settings.sentinel;
    let addr = match (info.addr(), own.tls) {
        (ConnectionAddr::TcpTls { host, port, .. }, Some(false)) => ConnectionAddr::Tcp(host.clone(), *port),
        (ConnectionAddr::Tcp(host, port), Some(true)) => {
            ConnectionAddr::TcpTls { host: host.clone(), port: *port, insecure: false, tls_params: None }
        }
        (addr, _) => addr.clone(),
    };
    let mut redis = RedisConnectionInfo::default();
    if let Some(username) = &own.username {
        redis = redis.set_username(username);
    }
    if let Some(password) = &own.password {
        redis = redis.set_password(password);
    }
    Ok(addr.into_connection_info()?.set_redis_settings(redis))
}

fn dialer(infos: &[ConnectionInfo], certificates: Option<TlsCertificates>) -> ServerConnector {
    let redis = infos.first().map(|info| info.redis_settings().clone()).unwrap_or_default();
    let tls = matches!(infos.first().map(ConnectionInfo::addr), Some(ConnectionAddr::TcpTls { .. }));
    ServerConnector { redis, tls, certificates }
}

fn servers(infos: Vec<ConnectionInfo>, certificates: Option<&TlsCertificates>) -> Result<Vec<Server>, RedisError> {
    infos.into_iter().map(|info| server(info, certificates.cloned(), None)).collect()
}

fn server(
    info: ConnectionInfo,
    certificates: Option<TlsCertificates>,
    name: Option<&str>,
) -> Result<Server, RedisError> {
    let address = match info.addr() {
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } if host.contains(':') => {
            format!("[{host}]:{port}")
        }
        ConnectionAddr::Tcp(host, port) | ConnectionAddr::TcpTls { host, port, .. } => format!("{host}:{port}"),
        addr => addr.to_string(),
    };
    let is_tls = matches!(info.addr(), ConnectionAddr::TcpTls { .. });
    let client = match certificates.filter(|_| is_tls) {
        Some(certificates) => Client::build_with_tls(info, certificates)?,
        None => Client::open(info)?,
    };
    let name: Arc<str> = name.map_or(address, str::to_owned).into();
    Ok(Server { name, client })
}

fn certificates(tls: &TlsSettings) -> Result<Option<TlsCertificates>, SetupError> {
    if tls.ca_file.is_none() && tls.cert_file.is_none() {
        return Ok(None);
    }
    let read = |path: &PathBuf| {
        std::fs::read(path).map_err(|source| SetupError::Certificate { path: path.display().to_string(), source })
    };
    let client_tls = match (&tls.cert_file, &tls.key_file) {
        (Some(cert), Some(key)) => Some(ClientTlsConfig { client_cert: read(cert)?, client_key: read(key)? }),
        _ => None,
    };
    let root_cert = tls.ca_file.as_ref().map(read).transpose()?;
    Ok(Some(TlsCertificates { client_tls, root_cert }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::redis::settings::{RingNode, SentinelSettings};

    fn names(servers: &[Server]) -> Vec<&str> {
        servers.iter().map(|server| &*server.name).collect()
    }

    fn complaint(url: &str, settings: &Settings) -> String {
        let Err(SetupError::Address { url: shown, source }) = read(url, settings) else {
            panic!("{url} is taken");
        };
        assert!(!shown.contains("secret"), "{shown}");
        source.to_string()
    }

    #[test]
    fn one_server_is_what_the_crate_understands() {
        let (source, view) = read("redis://localhost:7/3", &Settings::default()).unwrap();
        assert!(matches!(source, Source::Fixed));
        assert_eq!(names(&view.servers), ["localhost:7"]);
        assert_eq!(view.place_of(|| b"any"), Some(0));
    }

    #[test]
    fn a_cluster_is_known_by_its_seeds_and_a_default_port() {
        let url = "redis+cluster://app:s%40cret@a:7000,b,[::1]:7001,[::1]/0";
        let (Source::Cluster { seeds, dialer }, view) = read(url, &Settings::default()).unwrap() else {
            panic!("no cluster");
        };
        assert_eq!(names(&seeds), ["a:7000", "b:6379", "[::1]:7001", "[::1]:6379"]);
        assert_eq!(
            (dialer.redis.username(), dialer.redis.password(), dialer.tls),
            (Some("app"), Some("s@cret"), false)
        );
        assert_eq!(&*dialer.server("c", 1).unwrap().name, "c:1");
        assert_eq!(view.place_of(|| b"any"), None, "nobody has said yet");
    }

    #[test]
    fn sentinels_have_credentials_of_their_own() {
        let own = SentinelSettings { username: Some("watch".into()), password: Some("dog".into()), tls: Some(false) };
        let settings = Settings { sentinel: own, ..Settings::default() };
        let url = "rediss+sentinel://app:secret@a,b:7/main/2";
        let (Source::Sentinel { sentinels, master, dialer }, _) = read(url, &settings).unwrap() else {
            panic!("no sentinels");
        };
        assert_eq!((names(&sentinels), master.as_str()), (vec!["a:26379", "b:7"], "main"));
        let info = sentinels[0].client.get_connection_info();
        assert_eq!((info.redis_settings().username(), info.redis_settings().password()), (Some("watch"), Some("dog")));
        assert!(matches!(info.addr(), ConnectionAddr::Tcp(..)));
        assert_eq!((dialer.redis.password(), dialer.redis.db(), dialer.tls), (Some("secret"), 2, true));
        let (Source::Sentinel { sentinels, .. }, _) = read(url, &Settings::default()).unwrap() else {
            panic!("no sentinels");
        };
        let info = sentinels[0].client.get_connection_info();
        assert!(matches!(info.addr(), ConnectionAddr::TcpTls { .. }) && info.redis_settings().password().is_none());
    }

    #[test]
    fn a_ring_is_named_in_the_url_or_in_the_settings() {
        let (_, view) = read("redis+ring://a,b:7,c:8/1", &Settings::default()).unwrap();
        assert_eq!(names(&view.servers), ["a:6379", "b:7", "c:8"]);
        let node = |name: &str, url: &str, weight| RingNode { name: name.into(), url: url.into(), weight };
        let ring = vec![node("one", "redis://x:1", 1), node("two", "rediss://:secret@y:2", 1_000_000)];
        let settings = Settings { ring, ..Settings::default() };
        let (_, view) = read("redis+ring://", &settings).unwrap();
        assert_eq!(names(&view.servers), ["one", "two"]);
        assert_eq!(view.place_of(|| b"any"), Some(1), "by the weights");
        for (ring, expected) in [
            (vec![node("a", "redis://x", 1), node("a", "redis://y", 1)], "same name"),
            (vec![node("a", "redis://x", 0)], "weight"),
            (vec![node("", "redis://x", 1)], "name"),
            (vec![], "needs nodes"),
        ] {
            let error = complaint("redis+ring://", &Settings { ring, ..Settings::default() });
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn an_address_that_says_too_little_or_too_much_is_refused() {
        for (url, expected) in [
            ("redis+cluster://", "at least one host"),
            ("redis+cluster://:secret@a/3", "no databases but 0"),
            ("redis+sentinel://a,b", "name of the master"),
            ("redis+sentinel://:secret@/main", "at least one host"),
            ("redis+star://a", ""),
            ("redis+ring://a,a", "same name"),
        ] {
            let error = complaint(url, &Settings::default());
            assert!(error.contains(expected), "{url}: {error}");
        }
    }
}
