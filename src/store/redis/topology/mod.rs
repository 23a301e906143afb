//! Which servers there are, and which of them has a key.
//!
//! A [`View`] says it as far as is known. That of one server or of a ring never changes; Sentinel and Cluster are asked
//! for theirs: again and again, and at once when somebody is in doubt (a server is out of reach, or says that a key is
//! elsewhere). All workers share what is found out; each has connections of its own.

mod address;
mod ask;
pub mod ring;
pub mod slots;

use std::{sync::Arc, time::Duration};

use redis::Client;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use self::{address::Source, ask::Found, ring::Ring};
use super::{Settings, SetupError};

/// A healthy cluster is asked so often, and so are the sentinels.
const REFRESH: Duration = Duration::from_secs(2);
/// However great the doubt, no more often than this.
const LEAST: Duration = Duration::from_millis(50);

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
    pub(super) fn doubt(&self) {
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
        let mut known = Found::default();
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
                    self.doubt();
                }
            }
            let _ = timeout(jittered(REFRESH), self.doubt.notified()).await;
            sleep_until(asked + jittered(LEAST)).await;
        }
    }
}

/// From half to one and a half times as long: instances that lost one server do not ask in step.
pub(super) fn jittered(pause: Duration) -> Duration {
    pause.mul_f64(0.5 + rand::random::<f64>())
}

/// Longer with every failure, up to half a second, and never in step with others.
pub(super) async fn back_off(failures: u32) {
    let pause = Duration::from_millis(25) * 2_u32.saturating_pow(failures.min(3));
    sleep(jittered(pause)).await;
}
