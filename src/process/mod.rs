//! Measurements of the process itself: [`Pauses`] of the whole process, and [`Stalls`] of its threads.

mod pauses;
mod stalls;

pub use pauses::Pauses;
pub use stalls::{Stalls, Watchdog};
