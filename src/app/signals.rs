//! [`Signals`]: SIGTERM and SIGINT, which end the service. On Windows, these are Ctrl-Break and Ctrl-C.

use std::io;

use crate::platform::{self, Interrupt, Terminate};

/// The signals that end the service.
pub(super) struct Signals {
    terminate: Terminate,
    interrupt: Interrupt,
}

impl Signals {
    /// Registers the handlers. From here on the signals no longer end the process by themselves.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self { terminate: platform::terminate()?, interrupt: platform::interrupt()? })
    }

    /// Waits for SIGTERM or SIGINT.
    pub(super) async fn next(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }
}
