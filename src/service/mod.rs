//! The use cases, protocol-neutral: [`check`] decides a request, [`reload`] keeps the rules current,
//! [`resources`] knows what resources say of themselves.

pub mod check;
mod clock;
pub mod reload;
pub mod resources;

pub use check::{Check, CheckError};
pub use clock::Clock;
pub use resources::Reports;
