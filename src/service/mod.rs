//! The use cases, protocol-neutral: [`check`] decides a request, [`reload`] keeps the rules current, [`admin`] is what operators may do,
//! [`overrides`] what operators say over them, [`candidates`] those that are tried out, [`resources`] knows what resources say of themselves.

pub mod admin;
pub mod candidates;
pub mod check;
mod clock;
mod compile_thread;
pub mod overrides;
pub mod record;
pub mod reload;
pub mod resources;

pub use admin::Admin;
pub use candidates::Candidates;
pub use check::{Check, CheckError};
pub use clock::Clock;
pub use compile_thread::run_on_compile_thread;
pub use overrides::OverrideSync;
pub use record::Recorder;
pub use resources::ResourceReports;
