//! [`ClientLog`]: the log events of the clients in this process.

use std::sync::{Arc, LazyLock, Mutex};

use tracing_subscriber::{
    filter::{LevelFilter, Targets},
    fmt,
    layer::SubscriberExt,
    registry,
    util::SubscriberInitExt,
};

/// Log of the process. Each test finds its lines by an address or a domain.
static LOG: LazyLock<ClientLog> = LazyLock::new(|| {
    let log = ClientLog::default();
    let writer = log.clone();
    let layer = fmt::layer().with_ansi(false).with_writer(move || writer.clone());
    let client = Targets::new().with_target("sluicegate_client", LevelFilter::TRACE);
    // The subscriber is global: a thread-local one misses events if another thread reached their call site first.
    registry().with(layer).with(client).init();
    log
});

/// The output of the subscriber.
#[derive(Clone, Default)]
pub(super) struct ClientLog(Arc<Mutex<Vec<u8>>>);

impl ClientLog {
    /// Starts the log, if no test has done so.
    pub(super) fn start() -> Self {
        LOG.clone()
    }

    /// Returns the lines that contain `text`.
    pub(super) fn lines_with(&self, text: &str) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().filter(|line| line.contains(text)).map(ToOwned::to_owned).collect()
    }
}

impl std::io::Write for ClientLog {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}
