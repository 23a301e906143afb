//! [`Pool`]: one worker's connections to all servers of a topology, and the selection of the server for a key.

use std::{borrow::Cow, sync::Arc, time::Duration};

use arc_swap::ArcSwap;
use redis::{Cmd, Value};
use sluicegate_deadline::within;
use sluicegate_metrics::WorkerId;
use sluicegate_placement::hash_tag;
use sluicegate_store::StoreError;
use tokio::sync::watch;

use super::{
    Deployment,
    batch::Batcher,
    node::{CallError, Redirect},
    response_batching::CallGroups,
    topology::{View, slots},
};

/// Maximum number of redirects that one call follows. A migrating slot causes one or two.
pub(super) const MAX_REDIRECTS: usize = 5;
/// Maximum number of servers that redirects have named and that the current [`View`] does not contain.
const MAX_EXTRA_SERVERS: usize = 64;

/// One worker's connections to all servers.
pub(super) struct Pool {
    deployment: Arc<Deployment>,
    worker: WorkerId,
    groups: Arc<CallGroups>,
    routes: ArcSwap<Routes>,
}

/// A view and its batchers, which are replaced as a whole.
struct Routes {
    view: Arc<View>,
    /// Batchers in the order of the view's servers.
    batchers: Vec<Arc<Batcher>>,
    /// Batchers of servers that only redirects have named.
    extra: Vec<Arc<Batcher>>,
}

/// The server of a key, and the slot if calls to this server are restricted to one slot.
#[derive(Clone)]
pub(super) struct Target {
    pub(super) batcher: Arc<Batcher>,
    /// Slot of the key, or `None` if a call to this server may have keys of several slots.
    pub(super) slot: Option<u16>,
}

impl Target {
    /// Returns whether hits of both targets can share a call.
    pub(super) fn shares_call_with(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.batcher, &other.batcher) && self.slot == other.slot
    }
}

impl Pool {
    /// Connects to all servers and follows changes of the topology until the current runtime ends.
    pub(super) fn start(deployment: Arc<Deployment>, worker: WorkerId) -> Arc<Self> {
        let mut views = deployment.topology.view();
        let view = Arc::clone(&views.borrow_and_update());
        let groups = Arc::default();
        let routes = Routes::new(view, &[], &deployment, worker, &groups);
        let pool = Arc::new(Self { deployment, worker, groups, routes: ArcSwap::from_pointee(routes) });
        tokio::spawn(Arc::clone(&pool).follow(views));
        pool
    }

    async fn follow(self: Arc<Self>, mut views: watch::Receiver<Arc<View>>) {
        while views.changed().await.is_ok() {
            let view = Arc::clone(&views.borrow_and_update());
            let old = self.routes.load_full();
            let known: Vec<_> = old.all().cloned().collect();
            let routes = Routes::new(view, &known, &self.deployment, self.worker, &self.groups);
            let routes = Arc::new(routes);
            self.routes.store(Arc::clone(&routes));
            for batcher in known {
                if !routes.all().any(|current| Arc::ptr_eq(current, &batcher)) {
                    batcher.close();
                }
            }
        }
    }

    /// Returns the server that has the key, or `None` if it is unknown.
    pub(super) fn target(&self, key: &[u8]) -> Option<Target> {
        let routes = self.routes.load();
        let Some(index) = routes.view.index_of(|| self.shard_key(key)) else {
            self.deployment.topology.request_refresh();
            return None;
        };
        let batcher = Arc::clone(routes.batchers.get(index)?);
        let slot = if batcher.requires_single_slot() { Some(self.slot(key)) } else { None };
        Some(Target { batcher, slot })
    }

    /// Returns the server that has the overrides. In a ring this is the first node, which stays the same when other
    /// nodes are added or removed.
    pub(super) fn overrides_batcher(&self, key: &[u8]) -> Option<Arc<Batcher>> {
        match self.routes.load().batchers.first() {
            Some(first) if !self.deployment.topology.is_cluster() => Some(Arc::clone(first)),
            _ => self.target(key).map(|target| target.batcher),
        }
    }

    pub(super) fn is_cluster(&self) -> bool {
        self.deployment.topology.is_cluster()
    }

    pub(super) fn topology(&self) -> &'static str {
        self.deployment.topology.name()
    }

    pub(super) fn key_prefix(&self) -> &str {
        &self.deployment.settings.key_prefix
    }

    /// Returns the slot of a key. Every server accepts several keys of the same slot in one call.
    pub(super) fn slot(&self, key: &[u8]) -> u16 {
        slots::slot(&self.shard_key(key))
    }

    /// Returns the part of a key that selects its server in Redis: the hash tag, or else the whole key.
    fn shard_key<'k>(&self, key: &'k [u8]) -> Cow<'k, [u8]> {
        match hash_tag(key) {
            Some(tag) => tag.into(),
            None => [self.deployment.settings.key_prefix.as_bytes(), key].concat().into(),
        }
    }

    /// Returns the server that a redirect names, or `None` outside of a cluster or if there are too many such servers.
    pub(super) fn batcher_at(&self, host: &str, port: u16) -> Option<Arc<Batcher>> {
        let server = self.deployment.topology.server(host, port)?;
        let routes = self.routes.load_full();
        if let Some(known) = routes.all().find(|batcher| *batcher.node().name() == server.name) {
            return Some(Arc::clone(known));
        }
        if routes.extra.len() >= MAX_EXTRA_SERVERS {
            return None;
        }
        let batcher = Batcher::start(server, Arc::clone(&self.deployment), self.worker, &self.groups);
        let Routes { view, batchers, extra } = &*routes;
        let extra = extra.iter().cloned().chain([Arc::clone(&batcher)]).collect();
        self.routes.store(Arc::new(Routes { view: Arc::clone(view), batchers: batchers.clone(), extra }));
        Some(batcher)
    }

    /// Sends one command that is not a decision, and follows redirects.
    pub(super) async fn command(&self, mut batcher: Arc<Batcher>, command: &Cmd) -> Result<Value, StoreError> {
        let mut asking = false;
        for _ in 0..MAX_REDIRECTS {
            let (host, port) = match batcher.node().call(command, asking).await {
                Ok(reply) => return Ok(reply),
                Err(CallError::Failed(error)) => return Err(error),
                Err(CallError::Redirected(Redirect::DeclareKeys | Redirect::Split)) => {
                    return Err(StoreError::Rejected);
                }
                Err(CallError::Redirected(Redirect::Moved(host, port))) => {
                    asking = false;
                    (host, port)
                }
                Err(CallError::Redirected(Redirect::Ask(host, port))) => {
                    asking = true;
                    (host, port)
                }
            };
            batcher = self.batcher_at(&host, port).ok_or(StoreError::Unavailable)?;
        }
        Err(StoreError::Unavailable)
    }

    /// Returns the time limit for following redirects, which is that of a single call.
    pub(super) fn deadline(&self) -> Duration {
        self.deployment.settings.timeout
    }

    /// Returns whether all servers are connected.
    pub(super) fn is_up(&self) -> bool {
        let routes = self.routes.load();
        !routes.batchers.is_empty() && routes.batchers.iter().all(|batcher| batcher.node().is_up())
    }

    /// Waits until all servers are connected, at most for `max_wait`, and returns whether that succeeded.
    pub(super) async fn wait_until_up(&self, max_wait: Duration) -> bool {
        let all_up = async {
            let mut views = self.deployment.topology.view();
            while !self.is_up() {
                let routes = self.routes.load_full();
                let all = async {
                    for batcher in &routes.batchers {
                        batcher.node().wait_until_up().await;
                    }
                };
                tokio::select! {
                    () = all => tokio::task::yield_now().await,
                    _ = views.changed() => tokio::task::yield_now().await,
                }
            }
        };
        within(max_wait, all_up).await.is_ok()
    }
}

impl Routes {
    /// Creates the routes of a view. Servers that have a batcher in `known` keep it.
    fn new(
        view: Arc<View>,
        known: &[Arc<Batcher>],
        deployment: &Arc<Deployment>,
        worker: WorkerId,
        groups: &Arc<CallGroups>,
    ) -> Self {
        let mut batchers = Vec::with_capacity(view.servers.len());
        for server in &view.servers {
            let existing = known.iter().find(|batcher| *batcher.node().name() == server.name);
            batchers.push(match existing {
                Some(batcher) => Arc::clone(batcher),
                None => Batcher::start(server.clone(), Arc::clone(deployment), worker, groups),
            });
        }
        Self { view, batchers, extra: Vec::new() }
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Batcher>> {
        self.batchers.iter().chain(&self.extra)
    }
}
