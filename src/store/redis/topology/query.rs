//! Asking a cluster for its slots, and sentinels for their master.
//!
//! Everybody is asked at once, and the first who answers is believed, unless the answer is of an older epoch than one
//! that is known: a node that was cut off from the rest goes on telling what it knew.

use std::time::Duration;

use redis::{AsyncConnectionConfig, RedisError, RedisResult, Value};
use tokio::{task::JoinSet, time::timeout};

use super::{
    Placement, Server, View,
    address::Source,
    slots::{self, SlotMap},
};

/// So many are asked at once.
const ASKED: usize = 5;

/// What somebody said.
#[derive(Default)]
pub(super) struct TopologyReport {
    epoch: u64,
    pub(super) map: Option<NodeMap>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum NodeMap {
    Slots(SlotMap),
    Master(String, u16),
}

impl Source {
    /// `Ok(None)` when there is nothing to ask; an error when nobody answers.
    pub(super) async fn ask(
        &self,
        servers: &[Server],
        known: &TopologyReport,
        turn: usize,
        connect_timeout: Duration,
    ) -> Result<Option<TopologyReport>, String> {
        let everybody: Vec<&Server> = match self {
            Self::Fixed => return Ok(None),
            Self::Cluster { seeds, .. } => {
                let more = seeds.iter().filter(|seed| servers.iter().all(|server| server.name != seed.name));
                servers.iter().chain(more).collect()
            }
            Self::Sentinel { sentinels, .. } => sentinels.iter().collect(),
        };
        let mut asked = JoinSet::new();
        for server in everybody.iter().cycle().skip(turn % everybody.len().max(1)).take(ASKED.min(everybody.len())) {
            let (server, question) = ((*server).clone(), self.question());
            asked.spawn(async move {
                let answer = timeout(connect_timeout, question.ask(&server)).await;
                answer.map_err(|_| "no answer in time".to_owned())?.map_err(|error| error.to_string())
            });
        }
        let (mut older, mut complaint): (Option<TopologyReport>, _) = (None, "there is nobody to ask".to_owned());
        while let Some(answer) = asked.join_next().await {
            match answer.map_err(|error| error.to_string()).flatten() {
                Ok(found) if found.epoch >= known.epoch => return Ok(Some(found)),
                Ok(found) if older.as_ref().is_none_or(|older| older.epoch < found.epoch) => older = Some(found),
                Ok(_) => {}
                Err(error) => complaint = error,
            }
        }
        older.map(Some).ok_or(complaint)
    }

    /// What was found, as servers to connect to.
    pub(super) fn view(&self, found: &TopologyReport) -> Option<View> {
        match (self, found.map.as_ref()?) {
            (Self::Cluster { dialer, .. }, NodeMap::Slots(map)) => {
                let servers =
                    map.masters.iter().map(|(host, port)| dialer.server(host, *port)).collect::<Result<_, _>>();
                Some(View { servers: servers.ok()?, placement: Placement::Slots(map.owners.clone()) })
            }
            (Self::Sentinel { dialer, .. }, NodeMap::Master(host, port)) => {
                Some(View::one(dialer.server(host, *port).ok()?))
            }
            _ => None,
        }
    }

    fn question(&self) -> TopologyQuery {
        match self {
            Self::Sentinel { master, .. } => TopologyQuery::Master(master.clone()),
            Self::Fixed | Self::Cluster { .. } => TopologyQuery::Slots,
        }
    }
}

enum TopologyQuery {
    Slots,
    Master(String),
}

impl TopologyQuery {
    async fn ask(&self, server: &Server) -> RedisResult<TopologyReport> {
        let config = AsyncConnectionConfig::new().set_connection_timeout(None).set_response_timeout(None);
        let mut connection = server.client.get_multiplexed_async_connection_with_config(&config).await?;
        let mut pipe = redis::pipe();
        match self {
            Self::Slots => pipe.cmd("CLUSTER").arg("SLOTS").cmd("CLUSTER").arg("INFO"),
            Self::Master(name) => {
                pipe.cmd("SENTINEL").arg("GET-MASTER-ADDR-BY-NAME").arg(name).cmd("SENTINEL").arg("MASTER").arg(name)
            }
        };
        let replies = connection.send_packed_commands(&pipe, 0, 2).await?;
        let [map, about] = replies.as_slice() else {
            return Err(unfit("half an answer"));
        };
        if let Value::ServerError(error) = map {
            return Err(error.clone().into());
        }
        match self {
            Self::Slots => {
                let host = match server.client.get_connection_info().addr() {
                    redis::ConnectionAddr::Tcp(host, _) | redis::ConnectionAddr::TcpTls { host, .. } => host.as_str(),
                    _ => "",
                };
                let map = slots::read(map, host).filter(|map| !map.masters.is_empty());
                let map = map.ok_or_else(|| unfit("no map of slots"))?;
                Ok(TopologyReport { epoch: cluster_epoch(about), map: Some(NodeMap::Slots(map)) })
            }
            Self::Master(_) => {
                let (host, port) = address(map).ok_or_else(|| unfit("the sentinel knows no master of this name"))?;
                Ok(TopologyReport { epoch: config_epoch(about), map: Some(NodeMap::Master(host, port)) })
            }
        }
    }
}

fn unfit(why: &'static str) -> RedisError {
    (redis::ErrorKind::UnexpectedReturnType, why).into()
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

/// Of the text of CLUSTER INFO. 0 where it is not told: then every answer is as good as another.
fn cluster_epoch(reply: &Value) -> u64 {
    let text = slots::text(reply).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix("cluster_current_epoch:")?.trim().parse().ok()).unwrap_or(0)
}

/// Of the pairs of SENTINEL MASTER.
fn config_epoch(reply: &Value) -> u64 {
    let Value::Array(fields) = reply else {
        return 0;
    };
    let mut pairs = fields.chunks_exact(2);
    let epoch = pairs.find(|pair| slots::text(&pair[0]).is_some_and(|name| name == "config-epoch"));
    epoch.and_then(|pair| slots::text(&pair[1])?.parse().ok()).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read, Write},
        net::{TcpListener, TcpStream},
    };

    use super::*;
    use crate::store::redis::{Settings, topology::address};

    /// A node of a cluster that knows of one master, by this epoch; for ever, on a thread of its own.
    fn node(epoch: u64, delay: Duration) -> u16 {
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
            let asked = String::from_utf8_lossy(&read[..bytes]).to_uppercase();
            std::thread::sleep(delay);
            let info = format!("cluster_state:ok\r\ncluster_current_epoch:{epoch}\r\n");
            let slots = format!("*1\r\n*3\r\n:0\r\n:16383\r\n*2\r\n$1\r\na\r\n:{epoch}\r\n");
            let info = format!("${}\r\n{info}\r\n", info.len());
            for word in asked.split("\r\n") {
                let answer = match word {
                    "SETINFO" => "+OK\r\n",
                    "SLOTS" => &slots,
                    "INFO" => &info,
                    _ => continue,
                };
                // Who has heard enough hangs up.
                let _ = stream.write_all(answer.as_bytes());
            }
        }
    }

    async fn asked(ports: &[u16], known: u64, turn: usize) -> Result<u64, String> {
        let hosts: Vec<_> = ports.iter().map(|port| format!("127.0.0.1:{port}")).collect();
        let (source, _) = address::read(&format!("redis+cluster://{}", hosts.join(",")), &Settings::default()).unwrap();
        let known = TopologyReport { epoch: known, map: None };
        let Source::Cluster { dialer, .. } = &source else { panic!("a cluster") };
        // The one server that is known is not there any more: the seeds are asked too.
        let gone = [dialer.server("127.0.0.1", 1).unwrap()];
        let found = source.ask(&gone, &known, turn, Duration::from_secs(10)).await?.unwrap();
        assert_eq!(
            found.map.map(|map| matches!(map, NodeMap::Slots(map) if map.masters[0].1 == found.epoch as u16)),
            Some(true)
        );
        Ok(found.epoch)
    }

    /// A node that was away knows the past: whoever is up to date is believed at once, and nobody else while there is one.
    #[tokio::test]
    async fn the_newest_is_believed() {
        let late = Duration::from_millis(100);
        let (old, older, new) = (node(4, Duration::ZERO), node(3, Duration::ZERO), node(6, late));
        for turn in 0..3 {
            assert_eq!(asked(&[old, older, new], 5, turn).await, Ok(6), "turn {turn}");
            assert_eq!(asked(&[older, old], 5, turn).await, Ok(4), "nobody is up to date");
            assert_eq!(asked(&[node(3, late), old], 5, turn).await, Ok(4));
            assert_eq!(asked(&[old, new], 4, turn).await, Ok(4), "as new as what is known");
        }
        assert!(asked(&[1], 5, 0).await.is_err());
    }

    #[test]
    fn epochs_are_read() {
        let text = |text: &str| Value::BulkString(text.as_bytes().to_vec());
        assert_eq!(cluster_epoch(&text("cluster_state:ok\r\ncluster_current_epoch:17\r\n")), 17);
        assert_eq!((cluster_epoch(&Value::Nil), cluster_epoch(&text("nothing"))), (0, 0));
        let pairs = ["name", "main", "config-epoch", "23", "num-slaves", "1"].map(text).to_vec();
        assert_eq!(config_epoch(&Value::Array(pairs)), 23);
        assert_eq!((config_epoch(&Value::Nil), config_epoch(&Value::Array(vec![]))), (0, 0));
    }
}
