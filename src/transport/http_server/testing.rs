//! Tools of the tests of several modules: the output of a connection.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::{MAX_WAITING, Rejection, Rejections, output::Output};
use crate::{
    budget::{Budget, Victim},
    transport::connections::Connections,
};

/// Returns the output of a connection with a budget of a mebibyte.
pub(super) fn output() -> Arc<Output> {
    Arc::new(Output {
        budget: Budget::new("test", 1 << 20, Victim::Oldest),
        rejections: Arc::new(Rejections::new("test")),
        open_connection: Arc::new(Connections::new(1, "test").open(None)),
        requests: Arc::default(),
        waiting: Arc::new(Semaphore::new(MAX_WAITING)),
    })
}

/// Returns the number of responses that were not read.
pub(super) fn unread(output: &Output) -> u64 {
    output.rejections.count(Rejection::Unread)
}
