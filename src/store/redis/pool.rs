//! One worker's connections to all servers of a topology, and the way from a key to one of them.

use std::{borrow::Cow, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use redis::{Cmd, Value};
use tokio::{sync::watch, time::timeout};

use super::{
    Shared,
    batch::Batcher,
    node::{CallError, Redirect},
    response_batching::CallGroups,
    topology::{Server, View, hash_tag, slots},
};
use crate::{metrics::WorkerId, store::StoreError};

/// Redirects that one call follows. A slot that moves needs one or two.
pub(super) const REDIRECTS: usize = 5;
/// Servers beside those of the view, to which others have pointed, at most.
const MOST_EXTRA: usize = 64;

pub(super) struct Pool {
    shared: Arc<Shared>,
    worker: WorkerId,
    groups: Arc<CallGroups>,
    routes: ArcSwap<Routes>,
}

/// What was known at one time: replaced as a whole.
struct Routes {
    view: Arc<View>,
    /// In the order of the view's servers.
    batchers: Vec<Arc<Batcher>>,
    /// Servers that a redirect named before the view did.
    extra: Vec<Arc<Batcher>>,
}

/// A server, and which calls to it a hit may share.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) batcher: Arc<Batcher>,
    /// Where calls have to keep to slots: the key's.
    pub(super) slot: Option<u16>,
}

impl Target {
    /// Whether hits of both can go into one call.
    pub(super) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.batcher, &other.batcher) && self.slot == other.slot
    }
}

impl Pool {
    /// Connects, and follows the topology for as long as the current runtime lives.
    pub(super) fn start(shared: Arc<Shared>, worker: WorkerId) -> Arc<Self> {
        let mut views = shared.topology.view();
        let view = Arc::clone(&views.borrow_and_update());
        let groups = Arc::default();
        let routes = Routes::new(view, &[], &shared, worker, &groups);
        let pool = Arc::new(Self { shared, worker, groups, routes: ArcSwap::from_pointee(routes) });
        tokio::spawn(Arc::clone(&pool).follow(views));
        pool
    }

    async fn follow(self: Arc<Self>, mut views: watch::Receiver<Arc<View>>) {
        while views.changed().await.is_ok() {
            let view = Arc::clone(&views.borrow_and_update());
            let old = self.routes.load_full();
            let known: Vec<_> = old.all().cloned().collect();
            let routes = Routes::new(view, &known, &self.shared, self.worker, &self.groups);
            let gone = known.into_iter().filter(|known| !routes.all().any(|batcher| Arc::ptr_eq(batcher, known)));
            let gone: Vec<_> = gone.collect();
            self.routes.store(Arc::new(routes));
            gone.iter().for_each(|batcher| batcher.close());
        }
    }

    /// The server that has the key; `None` when none is known to.
    pub(super) fn target(&self, key: &[u8]) -> Option<Target> {
        let routes = self.routes.load();
        let Some(place) = routes.view.place_of(|| self.shard(key)) else {
            self.shared.topology.request_refresh();
            return None;
        };
        let batcher = Arc::clone(routes.batchers.get(place)?);
        let slot = batcher.keeps_to_slots().then(|| self.slot(key));
        Some(Target { batcher, slot })
    }

    /// The server that has what is not a counter: of a ring the first, which no other node moves.
    pub(super) fn home(&self, key: &[u8]) -> Option<Arc<Batcher>> {
        match self.routes.load().batchers.first() {
            Some(first) if !self.shared.topology.is_cluster() => Some(Arc::clone(first)),
            _ => self.target(key).map(|target| target.batcher),
        }
    }

    pub(super) fn key_prefix(&self) -> &str {
        &self.shared.settings.key_prefix
    }

    /// Of two keys of one slot a server can decide in one call, whatever it says of keys elsewhere.
    pub(super) fn slot(&self, key: &[u8]) -> u16 {
        slots::slot(&self.shard(key))
    }

    /// What of a key chooses its place, as Redis has it: what stands in the first braces, or else all of it.
    fn shard<'k>(&self, key: &'k [u8]) -> Cow<'k, [u8]> {
        match hash_tag(key) {
            Some(tag) => tag.into(),
            None => [self.shared.settings.key_prefix.as_bytes(), key].concat().into(),
        }
    }

    /// The server that a redirect names; `None` when it cannot be one, or there are too many.
    pub(super) fn server(&self, host: &str, port: u16) -> Option<Arc<Batcher>> {
        let server = self.shared.topology.server(host, port)?;
        let routes = self.routes.load_full();
        if let Some(known) = routes.all().find(|batcher| *batcher.node().name() == server.name) {
            return Some(Arc::clone(known));
        }
        if routes.extra.len() >= MOST_EXTRA {
            return None;
        }
        let batcher = Batcher::start(server, Arc::clone(&self.shared), self.worker, &self.groups);
        let Routes { view, batchers, extra } = &*routes;
        let extra = extra.iter().cloned().chain([Arc::clone(&batcher)]).collect();
        self.routes.store(Arc::new(Routes { view: Arc::clone(view), batchers: batchers.clone(), extra }));
        Some(batcher)
    }

    /// One command that is no decision, sent on to wherever its keys are.
    pub(super) async fn command(&self, server: Arc<Batcher>, command: &Cmd) -> Result<Value, StoreError> {
        let (mut server, mut asking) = (server, false);
        for _ in 0..REDIRECTS {
            let (host, port) = match server.node().call(command, asking).await {
                Ok(reply) => return Ok(reply),
                Err(CallError::Failed(error)) => return Err(error),
                Err(CallError::Elsewhere(Redirect::Declared | Redirect::Apart)) => return Err(StoreError::Rejected),
                Err(CallError::Elsewhere(Redirect::Moved(host, port))) => {
                    asking = false;
                    (host, port)
                }
                Err(CallError::Elsewhere(Redirect::Ask(host, port))) => {
                    asking = true;
                    (host, port)
                }
            };
            server = self.server(&host, port).ok_or(StoreError::Unavailable)?;
        }
        Err(StoreError::Unavailable)
    }

    /// A request that has to be sent on has as long as any call.
    pub(super) fn deadline(&self) -> Duration {
        self.shared.settings.timeout
    }

    /// Whether every server can be asked now.
    pub(super) fn is_up(&self) -> bool {
        let routes = self.routes.load();
        !routes.batchers.is_empty() && routes.batchers.iter().all(|batcher| batcher.node().is_up())
    }

    /// Waits until every server can be asked, but no longer than this.
    pub(super) async fn wait_until_up(&self, at_most: Duration) -> bool {
        let all_up = async {
            let mut views = self.shared.topology.view();
            while !self.is_up() {
                let routes = self.routes.load_full();
                let all = async {
                    for batcher in &routes.batchers {
                        batcher.node().up().await;
                    }
                };
                tokio::select! {
                    () = all => tokio::task::yield_now().await,
                    _ = views.changed() => tokio::task::yield_now().await,
                }
            }
        };
        timeout(at_most, all_up).await.is_ok()
    }
}

impl Routes {
    /// Batchers of servers that are known already are kept.
    fn new(
        view: Arc<View>,
        known: &[Arc<Batcher>],
        shared: &Arc<Shared>,
        worker: WorkerId,
        groups: &Arc<CallGroups>,
    ) -> Self {
        let batcher = |server: &Server| {
            let same = known.iter().find(|batcher| *batcher.node().name() == server.name);
            same.map_or_else(|| Batcher::start(server.clone(), Arc::clone(shared), worker, groups), Arc::clone)
        };
        let batchers = view.servers.iter().map(batcher).collect();
        Self { view, batchers, extra: Vec::new() }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Batcher>> {
        self.batchers.iter().chain(&self.extra)
    }
}
