//! The one reader of the wall clock.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use crate::algorithm::Micros;

/// Where the time comes from.
#[derive(Clone, Debug)]
pub enum Clock {
    /// The machine.
    System,
    /// A hand, in tests: microseconds.
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// Now.
    #[must_use]
    pub fn now(&self) -> Micros {
        match self {
            #[expect(clippy::disallowed_methods, reason = "this is the clock")]
            Self::System => {
                // Before 1970 it is 1970: an algorithm copes with clocks that jump.
                let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                Micros::new(u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
            }
            Self::Manual(micros) => Micros::new(micros.load(Relaxed)),
        }
    }
}
