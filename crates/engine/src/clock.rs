//! [`Clock`]: the only wall clock that decisions read.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use sluicegate_algorithm::Micros;

/// A source of the current time.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The wall clock of the host.
    System,
    /// A time that tests set, in microseconds since the Unix epoch.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// Returns the time since the Unix epoch.
    #[must_use]
    pub fn now(&self) -> Micros {
        match self {
            #[expect(clippy::disallowed_methods, reason = "this is the clock")]
            Self::System => {
                // A time before 1970 counts as 1970. The algorithms tolerate clocks that jump.
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Micros::new(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
            }
            Self::Manual(micros) => Micros::new(micros.load(Relaxed)),
        }
    }
}
