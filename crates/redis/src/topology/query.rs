//! Queries a cluster for its slots, and sentinels for their master.
//!
//! Several servers are queried concurrently and the first answer is used, unless its epoch is older than the last known
//! one: a node that was partitioned from the others continues to report its old state.

use std::time::Duration;

use redis::{ConnectionAddr, RedisError, RedisResult, Value};
use sluicegate_deadline::within;
use tokio::task::JoinSet;

use super::{
    Placement, Server, View,
    address::Source,
    slots::{self, SlotMap},
};
use crate::{failure::Failure, tls_mismatch::TlsMismatch};

/// Maximum number of servers that are queried concurrently.
const MAX_CONCURRENT_QUERIES: usize = 5;

/// A server's answer. `epoch` is the version of the topology that Redis counts (`cluster_current_epoch` or
/// `config-epoch`), 0 if unknown.
#[derive(Default)]
pub(super) struct TopologyAnswer {
    epoch: u64,
    pub(super) map: Option<NodeMap>,
}

/// The servers that have the keys, as one server reports them.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum NodeMap {
    /// Slots of a cluster.
    Slots(SlotMap),
    /// Host and port of the master that the sentinels monitor.
    Master(String, u16),
}

/// Error returned when no server answers a query: the error of the last one.
pub(super) struct QueryError {
    pub(super) failure: Failure,
    pub(super) description: String,
}

impl QueryError {
    /// Describes the error of a query. Searches for a mismatch of TLS if the error can be its effect.
    async fn new(server: &Server, error: &RedisError, connect_timeout: Duration) -> Self {
        let failure = Failure::of(error);
        if failure == Failure::NoAuth {
            server.report_rejected_login();
        }
        if failure.can_be_tls_mismatch()
            && let Some(mismatch) = TlsMismatch::find(server.addr(), connect_timeout).await
        {
            return Self { failure: Failure::Tls, description: format!("{}: {error}", mismatch.description()) };
        }
        Self { failure, description: failure.describe(error) }
    }

    fn other(description: String) -> Self {
        Self { failure: Failure::Other, description }
    }
}

impl Source {
    /// Queries `servers` (those of the view) and the configured ones. Returns `None` if the source is fixed, and an
    /// error if no server answers.
    ///
    /// A report of an epoch older than that of `last_answer` is only used if no server has a newer one. `offset`
    /// selects which servers are queried if there are more than [`MAX_CONCURRENT_QUERIES`].
    pub(super) async fn query(
        &self,
        servers: &[Server],
        last_answer: &TopologyAnswer,
        offset: usize,
        connect_timeout: Duration,
    ) -> Result<Option<TopologyAnswer>, QueryError> {
        let mut all_servers: Vec<&Server> = match self {
            Self::Fixed => return Ok(None),
            Self::Cluster { seeds, .. } => {
                let other_seeds = seeds.iter().filter(|seed| servers.iter().all(|server| server.name != seed.name));
                servers.iter().chain(other_seeds).collect()
            }
            Self::Sentinel { sentinels, .. } => sentinels.iter().collect(),
        };
        let mut queries = JoinSet::new();
        let first = offset % all_servers.len().max(1);
        all_servers.rotate_left(first);
        all_servers.truncate(MAX_CONCURRENT_QUERIES);
        for server in all_servers {
            let server = server.clone();
            let query = self.topology_query();
            queries.spawn(async move {
                let answer =
                    within(connect_timeout, query.send(&server)).await.unwrap_or_else(|_| Err(timeout_error()));
                match answer {
                    Ok(report) => Ok(report),
                    Err(error) => Err(QueryError::new(&server, &error, connect_timeout).await),
                }
            });
        }
        let mut outdated: Option<TopologyAnswer> = None;
        let mut last_error = QueryError::other("no server to query".to_owned());
        while let Some(answer) = queries.join_next().await {
            match answer.map_err(|error| QueryError::other(error.to_string())).flatten() {
                Ok(report) if report.epoch >= last_answer.epoch => return Ok(Some(report)),
                Ok(report) if outdated.as_ref().is_none_or(|other| other.epoch < report.epoch) => {
                    outdated = Some(report);
                }
                Ok(_) => {}
                Err(error) => last_error = error,
            }
        }
        outdated.map(Some).ok_or(last_error)
    }

    /// Converts a report into a view. Returns `None` if it does not fit the source or an address is invalid.
    pub(super) fn view(&self, report: &TopologyAnswer) -> Option<View> {
        match (self, report.map.as_ref()?) {
            (Self::Cluster { connector, .. }, NodeMap::Slots(map)) => {
                let servers =
                    map.masters.iter().map(|(host, port)| connector.server(host, *port)).collect::<Result<_, _>>();
                Some(View { servers: servers.ok()?, placement: Placement::Slots(map.owners.clone()) })
            }
            (Self::Sentinel { connector, .. }, NodeMap::Master(host, port)) => {
                Some(View::one(connector.server(host, *port).ok()?))
            }
            _ => None,
        }
    }

    fn topology_query(&self) -> TopologyQuery {
        match self {
            Self::Sentinel { master, .. } => TopologyQuery::Master(master.clone()),
            Self::Fixed | Self::Cluster { .. } => TopologyQuery::Slots,
        }
    }
}

/// A query to one server: the slots of its cluster, or the address of the master with this name.
enum TopologyQuery {
    Slots,
    Master(String),
}

impl TopologyQuery {
    async fn send(&self, server: &Server) -> RedisResult<TopologyAnswer> {
        let mut connection = server.connect().await?.connection;
        let mut pipe = redis::pipe();
        match self {
            Self::Slots => pipe.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO"),
            Self::Master(name) => {
                pipe.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name).cmd("SENTINEL").arg("MASTER").arg(name)
            }
        };
        let replies = connection.send_packed_commands(&pipe, 0, 2).await?;
        let [map, info] = replies.as_slice() else {
            return Err(unexpected_reply("incomplete reply"));
        };
        if let Value::ServerError(error) = map {
            return Err(error.clone().into());
        }
        match self {
            Self::Slots => {
                let host = match server.addr() {
                    ConnectionAddr::Tcp(host, _) | ConnectionAddr::TcpTls { host, .. } => host.as_str(),
                    _ => "",
                };
                let map = slots::parse(map, host).filter(|map| !map.masters.is_empty());
                let map = map.ok_or_else(|| unexpected_reply("reply contains no slots"))?;
                Ok(TopologyAnswer { epoch: cluster_epoch(info), map: Some(NodeMap::Slots(map)) })
            }
            Self::Master(_) => {
                let (host, port) =
                    address(map).ok_or_else(|| unexpected_reply("the sentinel monitors no master of this name"))?;
                Ok(TopologyAnswer { epoch: config_epoch(info), map: Some(NodeMap::Master(host, port)) })
            }
        }
    }
}

fn timeout_error() -> RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer within connect_timeout").into()
}

fn unexpected_reply(reason: &'static str) -> RedisError {
    (redis::ErrorKind::UnexpectedReturnType, reason).into()
}

fn address(reply: &Value) -> Option<(String, u16)> {
    let Value::Array(parts) = reply else {
        return None;
    };
    let [host, port] = parts.as_slice() else {
        return None;
    };
    Some((slots::text(host)?, slots::text(port)?.parse().ok()?))
}

/// Returns the epoch in the reply to `CLUSTER INFO`, or 0 if there is none. With epoch 0 all answers are equally good.
fn cluster_epoch(reply: &Value) -> u64 {
    let text = slots::text(reply).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:")?.trim().parse().ok()).unwrap_or(0)
}

/// Returns the epoch in the reply to `SENTINEL MASTER`, or 0 if there is none.
fn config_epoch(reply: &Value) -> u64 {
    let Value::Array(fields) = reply else {
        return 0;
    };
    let mut pairs = fields.chunks_exact(2);
    let epoch = pairs.find(|pair| slots::text(&pair[0]).is_some_and(|name| name == "config-epoch"));
    epoch.and_then(|pair| slots::text(&pair[1])?.parse().ok()).unwrap_or(0)
}

/// Parses a reply as the answer to each query, for a fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(crate) fn read_any(reply: &Value) {
    if let Some(map) = slots::parse(reply, "127.0.0.1") {
        let masters = map.masters.len();
        assert!(map.owners.iter().all(|owner| *owner == slots::UNASSIGNED || usize::from(*owner) < masters));
    }
    let _ = (address(reply), cluster_epoch(reply), config_epoch(reply));
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::{Settings, topology::address};

    /// Starts a fake cluster node with one master and this epoch, and returns its port.
    fn start_node(epoch: u64, delay: Duration) -> u16 {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                std::thread::spawn(move || answer(stream.unwrap(), epoch, delay));
            }
        });
        port
    }

    fn answer(mut stream: TcpStream, epoch: u64, delay: Duration) {
        let mut read = [0; 4_096];
        while let Ok(bytes @ 1..) = stream.read(&mut read) {
            let request = String::from_utf8_lossy(&read[..bytes]).to_uppercase();
            std::thread::sleep(delay);
            let info = format!("cluster_state:ok\r\ncluster_current_epoch:{epoch}\r\n");
            let slots = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:{epoch}\r\n");
            let info = format!("${}\r\n{info}\r\n", info.len());
            for argument in request.split("\r\n") {
                let answer = match argument {
                    "SETINFO" => "+OK\r\n",
                    "SLOTS" => &slots,
                    "INFO" => &info,
                    _ => continue,
                };
                // Writing fails if the client has already closed the connection.
                let _ = stream.write_all(answer.as_bytes());
            }
        }
    }

    /// Returns the epoch of the report that is used.
    async fn queried_epoch(ports: &[u16], last_epoch: u64, offset: usize) -> Result<u64, String> {
        let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let url = format!("redis+cluster://{}", hosts.join(","));
        let source = address::parse(&url, &Settings::default()).unwrap().source;
        let last_answer = TopologyAnswer { epoch: last_epoch, map: None };
        let Source::Cluster { connector, .. } = &source else { panic!("not a cluster") };
        // The only server of the view has gone, so the seeds must be queried, too.
        let gone = [connector.server("127.0.0.1", 1).unwrap()];
        let report = source.query(&gone, &last_answer, offset, Duration::from_secs(10)).await;
        let report = report.map_err(|error| error.description)?.unwrap();
        assert_eq!(
            report.map.map(|map| matches!(map, NodeMap::Slots(map) if map.masters[0].1 == report.epoch as u16)),
            Some(true)
        );
        Ok(report.epoch)
    }

    /// A node that was partitioned reports an old state. An up-to-date report is used immediately, and an older one
    /// only if there is no other.
    #[tokio::test]
    async fn the_newest_report_is_used() {
        let late = Duration::from_millis(100);
        let (old, older, new) = (start_node(4, Duration::ZERO), start_node(3, Duration::ZERO), start_node(6, late));
        for offset in 0..3 {
            assert_eq!(queried_epoch(&[old, older, new], 5, offset).await, Ok(6), "offset {offset}");
            assert_eq!(queried_epoch(&[older, old], 5, offset).await, Ok(4), "no node is up to date");
            assert_eq!(queried_epoch(&[start_node(3, late), old], 5, offset).await, Ok(4));
            assert_eq!(queried_epoch(&[old, new], 4, offset).await, Ok(4), "as new as the last report");
        }
        assert!(queried_epoch(&[1], 5, 0).await.is_err());
    }

    #[test]
    fn parses_epochs() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        assert_eq!(cluster_epoch(&text("cluster_state:ok\r\ncluster_current_epoch:17\r\n")), 17);
        assert_eq!((cluster_epoch(&Value::Nil), cluster_epoch(&text("nothing"))), (0, 0));
        let pairs = ["name", "main", "config-epoch", "23", "num-slaves", "1"].map(text).to_vec();
        assert_eq!(config_epoch(&Value::Array(pairs)), 23);
        assert_eq!((config_epoch(&Value::Nil), config_epoch(&Value::Array(vec![]))), (0, 0));
    }
}
