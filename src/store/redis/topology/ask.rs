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
pub(super) struct Found {
    epoch: u64,
    pub(super) map: Option<Map>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) enum Map {
    Slots(SlotMap),
    Master(String, u16),
}

impl Source {
    /// `Ok(None)` when there is nothing to ask; an error when nobody answers.
    pub(super) async fn ask(
        &self,
        servers: &[Server],
        known: &Found,
        turn: usize,
        connect_timeout: Duration,
    ) -> Result<Option<Found>, String> {
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
        let (mut older, mut complaint): (Option<Found>, _) = (None, "there is nobody to ask".to_owned());
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
    pub(super) fn view(&self, found: &Found) -> Option<View> {
        match (self, found.map.as_ref()?) {
            (Self::Cluster { dialer, .. }, Map::Slots(map)) => {
                let servers =
                    map.masters.iter().map(|(host, port)| dialer.server(host, *port)).collect::<Result<_, _>>();
                Some(View { servers: servers.ok()?, placement: Placement::Slots(map.owners.clone()) })
            }
            (Self::Sentinel { dialer, .. }, Map::Master(host, port)) => {
                Some(View::one(dialer.server(host, *port).ok()?))
            }
            _ => None,
        }
    }

    fn question(&self) -> Question {
        match self {
            Self::Sentinel { master, .. } => Question::Master(master.clone()),
            Self::Fixed | Self::Cluster { .. } => Question::Slots,
        }
    }
}

enum Question {
    Slots,
    Master(String),
}

impl Question {
    async fn ask(&self, server: &Server) -> RedisResult<Found> {
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
                Ok(Found { epoch: cluster_epoch(about), map: Some(Map::Slots(map)) })
            }
            Self::Master(_) => {
                let (host, port) = address(map).ok_or_else(|| unfit("the sentinel knows no master of this name"))?;
                Ok(Found { epoch: config_epoch(about), map: Some(Map::Master(host, port)) })
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
