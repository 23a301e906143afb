//! [`TestLog`]: the log messages of a test.

use std::fs;

use tempfile::NamedTempFile;
use tracing::subscriber::{DefaultGuard, set_default, set_global_default};

/// The log messages of the current thread, recorded until this is dropped.
pub struct TestLog {
    file: NamedTempFile,
    _recording: DefaultGuard,
}

impl TestLog {
    /// Starts recording.
    pub fn start() -> Self {
        // Without a global subscriber, an event that another test's thread reaches first is disabled for all threads.
        let _ = set_global_default(tracing_subscriber::registry());
        let file = NamedTempFile::new().unwrap();
        let subscriber = tracing_subscriber::fmt().with_writer(file.reopen().unwrap()).finish();
        Self { file, _recording: set_default(subscriber) }
    }

    /// Returns the messages that have been recorded.
    pub fn text(&self) -> String {
        fs::read_to_string(self.file.path()).unwrap()
    }
}
