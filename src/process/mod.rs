//! Measurements of the process itself: [`Pauses`] of the whole process, [`Stalls`] of its threads, and its use of CPU,
//! memory and files.

mod pauses;
mod stalls;
mod usage;

pub use pauses::Pauses;
pub use stalls::{Stalls, Watchdog};
pub use usage::observe_usage;
