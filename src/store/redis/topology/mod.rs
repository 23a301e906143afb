//! Which servers there are, and which of them has a key.
//!
//! A view says it as far as is known. That of one server or of a ring never changes; Sentinel and Cluster are asked
//! for theirs: again and again, and at once when somebody is in doubt (a server is out of reach, or says that a key is
//! elsewhere). All workers share what is found out; each has connections of its own.

mod address;
mod query;
pub mod slots;

use std::{sync::Arc, time::Duration};

use redis::Client;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use sluicegate_common::Ring;

use self::{address::Source, query::TopologyReport};
use super::{Settings, SetupError};

/// A healthy cluster is asked so often, and so are the sentinels.
const REFRESH_INTERVAL: Duration = Duration::from_secs(2);
/// However great the doubt, no more often than this.
const MIN_REFRESH_INTERVAL: Duration = Duration::from_millis(50);

/// A server that can be connected to.
#[derive(Clone)]
pub(super) struct Server {
    /// Its address; in a ring also its name. It tells servers apart.
    pub(super) name: Arc<str>,
    pub(super) client: Client,
}

/// The servers that hold counters, and which of them has which shard.
pub(super) struct View {
    pub(super) servers: Vec<Server>,
    placement: Placement,
}

enum Placement {
    One,
    Ring(Ring),
    /// Of each slot the server's place.
    Slots(Box<[u16]>),
}

impl View {
    fn one(server: Server) -> Self {
        Self { servers: vec![server], placement: Placement::One }
    }

    /// The place of the shard's server; `None` when nobody is known to have it.
    pub(super) fn place_of<S: AsRef<[u8]>>(&self, shard: impl FnOnce() -> S) -> Option<usize> {
        let place = match &self.placement {
            Placement::One => 0,
            Placement::Ring(ring) => ring.node_of(shard().as_ref())?,
            Placement::Slots(owners) => (*owners.get(usize::from(slots::slot(shard().as_ref())))?).into(),
        };
        (place < self.servers.len()).then_some(place)
    }
}

/// Where a key is, as far as that follows from the address and the settings alone.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeyLocation {
    /// On this server.
    Server(String),
    /// In this slot, which is on one server of the cluster or another.
    Slot(u16),
    /// On the master that the sentinels name.
    Master(String),
}

/// Where a key is: what operators ask.
pub fn place(url: &str, settings: &Settings, key: &str) -> Result<KeyLocation, SetupError> {
    let (source, view) = address::read(url, settings)?;
    let shard = hash_tag(key.as_bytes()).unwrap_or(key.as_bytes());
    Ok(match source {
        Source::Cluster { .. } => KeyLocation::Slot(slots::slot(shard)),
        Source::Sentinel { master, .. } => KeyLocation::Master(master),
        Source::Fixed => {
            let server = view.place_of(|| shard).and_then(|place| view.servers.get(place));
            KeyLocation::Server(server.map_or_else(String::new, |server| server.name.to_string()))
        }
    })
}

/// The nodes of a ring with their weights; empty for everything else.
pub fn nodes(url: &str, settings: &Settings) -> Result<Vec<(String, u32)>, SetupError> {
    let (_, view) = address::read(url, settings)?;
    let is_ring = matches!(view.placement, Placement::Ring(_));
    let weight = |name: &str| settings.ring.iter().find(|node| node.name == name).map_or(1, |node| node.weight);
    Ok(view.servers.iter().filter(|_| is_ring).map(|node| (node.name.to_string(), weight(&node.name))).collect())
}

/// What of a key chooses its place in Redis: what stands between the first `{` and the next `}`, unless that is nothing.
pub(super) fn hash_tag(key: &[u8]) -> Option<&[u8]> {
    let start = key.iter().position(|byte| *byte == b'{')? + 1;
    let length = key[start..].iter().position(|byte| *byte == b'}')?;
    (length > 0).then(|| &key[start..start + length])
}

/// Finds out which servers there are.
pub(super) struct Topology {
    source: Source,
    connect_timeout: Duration,
    view: watch::Sender<Arc<View>>,
    doubt: Notify,
}

impl Topology {
    /// Reads the address and the certificates; asks nobody yet.
    pub(super) fn new(url: &str, settings: &Settings) -> Result<Self, SetupError> {
        let (source, view) = address::read(url, settings)?;
        let (view, doubt) = (watch::Sender::new(Arc::new(view)), Notify::new());
        Ok(Self { source, connect_timeout: settings.connect_timeout, view, doubt })
    }

    /// What is known now, and what will be.
    pub(super) fn view(&self) -> watch::Receiver<Arc<View>> {
        self.view.subscribe()
    }

    /// Whether keys have slots, of which a server may have any number.
    pub(super) fn is_cluster(&self) -> bool {
        matches!(self.source, Source::Cluster { .. })
    }

    /// Somebody has reason to believe that the view is no longer true.
    pub(super) fn request_refresh(&self) {
        self.doubt.notify_one();
    }

    /// A server that another one named.
    pub(super) fn server(&self, host: &str, port: u16) -> Option<Server> {
        match &self.source {
            Source::Cluster { dialer, .. } => dialer.server(host, port).ok(),
            Source::Fixed | Source::Sentinel { .. } => None,
        }
    }

    /// Keeps the view true, for as long as the current runtime lives. Nothing to do where it never changes.
    pub(super) async fn follow(self: Arc<Self>) {
        let mut known = TopologyReport::default();
        let mut reported = false;
        let mut turn = rand::random::<u32>() as usize;
        loop {
            let asked = Instant::now();
            turn = turn.wrapping_add(1);
            let servers = self.view.borrow().servers.clone();
            match self.source.ask(&servers, &known, turn, self.connect_timeout).await {
                Ok(None) => return,
                Ok(Some(found)) => {
                    reported = false;
                    if found.map != known.map
                        && let Some(view) = self.source.view(&found)
                    {
                        self.view.send_replace(Arc::new(view));
                    }
                    known = found;
                }
                Err(error) => {
                    if !reported {
                        tracing::warn!(error, "nobody says which Redis servers there are; asking on");
                    }
                    reported = true;
                    self.request_refresh();
                }
            }
            let _ = timeout(jittered(REFRESH_INTERVAL), self.doubt.notified()).await;
            sleep_until(asked + jittered(MIN_REFRESH_INTERVAL)).await;
        }
    }
}

/// From half to one and a half times as long: instances that lost one server do not ask in step.
pub(super) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}

/// Longer with every failure, up to 300 ms, and never in step with others.
pub(super) async fn back_off(failures: u32) {
    let pause = Duration::from_millis(25) * 2_u32.saturating_pow(failures.min(3));
    sleep(jittered(pause)).await;
}

#[cfg(test)]
mod tests {
    use super::{back_off, hash_tag};

    /// A server that is down is tried again soon, and not all the time.
    #[tokio::test(start_paused = true)]
    async fn attempts_are_further_and_further_apart() {
        for (failures, least, most) in [(0, 12, 38), (1, 25, 75), (2, 50, 150), (3, 100, 300), (9, 100, 300)] {
            let began = tokio::time::Instant::now();
            back_off(failures).await;
            let millis = began.elapsed().as_millis();
            assert!((least..=most + 1).contains(&millis), "{failures} failures: {millis} ms");
        }
    }

    #[test]
    fn the_hash_tag_is_that_of_redis() {
        for (key, expected) in [
            ("{user1000}.following", Some("user1000")),
            ("foo{}{bar}", None),
            ("foo{{bar}}zap", Some("{bar")),
            ("foo{bar}{zap}", Some("bar")),
            ("foo{bar", None),
            ("foo", None),
        ] {
            assert_eq!(hash_tag(key.as_bytes()), expected.map(str::as_bytes), "{key}");
        }
    }
}
