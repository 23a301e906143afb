//! The use cases, protocol-neutral: [`check`] decides a request, [`reload`] keeps the rules current.

pub mod check;
mod clock;
pub mod reload;

pub use check::{Check, CheckError};
pub use clock::Clock;
