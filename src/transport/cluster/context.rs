//! [`Context`]: the state that all followers share. Each follower reads the increments of one member.

use std::sync::Arc;

use tokio::sync::{Mutex, watch};

use super::{Phase, members::Members, received::ReadBudget, settings::TlsSettings, violation::Violations};
use crate::{
    service::{Activity, Clock, overrides::MemberExchange},
    store::peers::Peers,
};

/// State that all followers share.
pub(super) struct Context {
    pub(super) peers: Arc<Peers>,
    pub(super) members: Arc<Members>,
    pub(super) clock: Clock,
    /// The exchange of overrides; `None` if they are in Redis.
    pub(super) overrides: Option<MemberExchange>,
    pub(super) activity: Arc<Activity>,
    pub(super) violations: Arc<Violations>,
    /// Bytes of unfinished responses.
    pub(super) read_budget: Arc<ReadBudget>,
    /// Locked while a long batch is decoded, so that the memory of only one is needed.
    pub(super) decoding: Mutex<()>,
    pub(super) tls: Option<TlsSettings>,
    /// Host of the first address in `cluster.peers`: the expected name of instances that DNS does not contain yet.
    pub(super) default_host: Option<String>,
    /// Port of the own listener.
    pub(super) port: u16,
    /// Whether the counters of an instance have been copied; locked during a copy. A copy contains the hits of all
    /// instances that the copied instance follows, so one is enough.
    pub(super) has_copied: Mutex<bool>,
    pub(super) phase: watch::Receiver<Phase>,
    /// Stops the followers.
    pub(super) leaving: watch::Sender<bool>,
}
