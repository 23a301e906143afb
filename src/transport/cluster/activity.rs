//! [`follow`]: reads the activity of another instance while the console of this one shows the sum over all instances.

use std::{net::SocketAddr, sync::Arc};

use sluicegate_proto::sluicegate::cluster::v1 as proto;
use tokio::time::sleep;

use super::{PROTOCOL, calls::Calls};
use crate::service::{Activity, activity::INTERVAL};

/// Reads the activity of the instance at an address at an interval. Never returns. Without an answer, the last report
/// becomes outdated; an earlier version of the service does not answer at all.
pub(super) async fn follow(activity: &Arc<Activity>, calls: &mut Calls, address: SocketAddr) {
    loop {
        sleep(INTERVAL).await;
        if !activity.reads_from_peers() {
            continue;
        }
        match calls.activity(proto::ActivityRequest { protocol: PROTOCOL }).await {
            Ok(response) => activity.add_report(address, &response.report),
            Err(error) => tracing::debug!(peer = %address, %error, "cannot read the activity of a peer"),
        }
    }
}
