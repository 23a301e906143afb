//! [`Signals`]: SIGTERM and SIGINT, which end the service.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end the service.
pub(super) struct Signals {
    terminate: Signal,
    interrupt: Signal,
}

impl Signals {
    /// Registers the handlers. From here on the signals no longer end the process by themselves.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { terminate: signal(SignalKind::terminate())?, interrupt: signal(SignalKind::interrupt())? })
    }

    /// Waits for SIGTERM or SIGINT.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
