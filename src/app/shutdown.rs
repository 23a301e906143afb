//! The shutdown phase: stops the parts of the other phases, in reverse order.

use std::sync::{Arc, atomic::Ordering::Relaxed};

use tokio::time::{sleep, timeout};
use tonic_health::ServingStatus;

use super::{
    servers::{RunningServers, set_health},
    signals::Signals,
    telemetry::{StatsdExport, Telemetry},
};
use crate::{
    service::{Clock, Recorder},
    settings::ShutdownSettings,
    transport::{HEALTH_NAMES, cluster::Cluster},
};

/// Stops the servers after the next signal.
///
/// ## Serving ⟶ Leaving
/// After a signal, health checks fail, and requests are still decided: callers have `shutdown.delay` to notice.
///
/// ## Leaving ⟶ Draining
/// Connections are closed gracefully and no new ones are accepted. Calls in progress have `shutdown.grace` to finish.
/// Then leases and pending hits are returned to the store, and other instances receive the last hits.
///
/// ## Draining ⟶ Stopped
/// A second signal skips the rest of these steps, also the return of leases and pending hits.
pub(super) async fn stop_servers(
    servers: RunningServers,
    cluster: Option<&Cluster>,
    mut signals: Signals,
    settings: &ShutdownSettings,
    clock: &Clock,
) {
    let RunningServers { http, grpc, store, mut health, leaving, stop } = servers;
    signals.next().await;
    tracing::info!(delay = ?settings.delay, grace = ?settings.grace, "shutting down");
    leaving.store(true, Relaxed);
    set_health(&health, ServingStatus::NotServing).await;
    let drain = async {
        sleep(settings.delay).await;
        stop.send_replace(true);
        // Streams that watch the health would keep their connections open.
        for name in HEALTH_NAMES {
            health.clear_service_status(name).await;
        }
        let drained = async { tokio::join!(grpc, http) };
        if timeout(settings.grace, drained).await.is_err() {
            tracing::warn!("some calls did not finish within shutdown.grace; closing their connections");
        }
        // A client that keeps its connection open must not cost the last hits. Both have timeouts of their own.
        store.return_all(clock.now()).await;
        if let Some(cluster) = cluster {
            cluster.leave().await;
        }
    };
    tokio::select! {
        () = drain => tracing::info!("shutdown complete"),
        () = signals.next() => tracing::warn!(
            "received a second termination signal; exiting without waiting for calls in progress, and without returning \
             leases and pending hits"
        ),
    }
}

/// Exports the metrics, recorded requests and traces that are still buffered.
pub(super) async fn stop_exporters(
    statsd: Option<StatsdExport>,
    recorder: Option<Arc<Recorder>>,
    telemetry: Telemetry,
) {
    if let Some(statsd) = statsd {
        statsd.stop().await;
    }
    if let Some(recorder) = recorder {
        let _ = tokio::task::spawn_blocking(move || recorder.finish()).await;
    }
    telemetry.stop().await;
}
