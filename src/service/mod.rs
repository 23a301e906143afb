//! The use cases, protocol-neutral: [`check`] decides a request, [`reload`] keeps the rules current, [`admin`] is what operators may do,
//! [`directives`] what operators say over them, [`candidates`] those that are tried out, [`resources`] knows what resources say of themselves.

pub mod admin;
mod apart;
pub mod candidates;
pub mod check;
mod clock;
pub mod directives;
pub mod record;
pub mod reload;
pub mod resources;

pub use admin::Admin;
pub use apart::apart;
pub use candidates::Candidates;
pub use check::{Check, CheckError};
pub use clock::Clock;
pub use directives::Keeper;
pub use record::Recorder;
pub use resources::Reports;
