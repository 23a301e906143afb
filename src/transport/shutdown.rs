//! Waits for the end of the service.

use tokio::sync::watch;

/// Waits until the service shuts down.
pub(super) async fn wait_for_shutdown(shutdown: &mut watch::Receiver<bool>) {
    // An error means that the sender is dropped, which also ends the service.
    let _ = shutdown.wait_for(|down| *down).await;
}
