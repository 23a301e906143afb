//! The cluster phase: the exchange of counted hits with other instances.

use std::sync::Arc;

use super::{
    AppError,
    engine::EngineFactory,
    operators::OperatorServices,
    tasks::{self, Tasks},
    telemetry::Telemetry,
};
use crate::{
    settings::Settings,
    store::{Peers, peers},
    transport::cluster::Cluster,
};

/// Starts the exchange of hits with other instances, and copies the counters of one of them. Returns `None` if there
/// are no `cluster.peers`.
///
/// Must run before the servers accept connections, so that no request is decided without the copied counters.
pub(super) async fn start(
    settings: &Settings,
    engines: &EngineFactory,
    telemetry: &Telemetry,
    operators: &OperatorServices,
    tasks: &mut Tasks,
) -> Result<Option<Arc<Cluster>>, AppError> {
    if !settings.cluster.has_peers() {
        return Ok(None);
    }
    // With Redis, these are the counters of `on_error: local`.
    let peers = Peers::new(Arc::clone(&engines.local), peers::Metrics::new());
    let overrides = operators.overrides.member_exchange();
    let activity = Arc::clone(&operators.activity);
    activity.set_has_peers();
    let cluster = Cluster::bind(&settings.cluster, peers, overrides, activity, telemetry.clock.clone()).await?;
    let cluster = Arc::new(cluster);
    cluster.observe(&telemetry.meters);
    tasks.spawn(&tasks::PUBLISH, Arc::clone(&cluster).publish());
    tasks.spawn(&tasks::PEERS, Arc::clone(&cluster).follow());
    cluster.join().await;
    Ok(Some(cluster))
}
