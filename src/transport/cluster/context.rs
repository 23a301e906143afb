//! [`Context`]: the state that the tasks share of which each reads the increments of one member (`follower`).

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
    /// First host in the settings.
    pub(super) default_host: Option<String>,
    /// Port of the own listener.
    pub(super) port: u16,
    /// Whether the counters of an instance have been copied; locked during a copy. One copy is enough for all origins
    /// that the copied instance follows.
    pub(super) has_copied: Mutex<bool>,
    pub(super) phase: watch::Receiver<Phase>,
    /// Stops the followers.
    pub(super) leaving: watch::Sender<bool>,
}
