//! What Sluicegate's service and its client do alike: the placement of shards, so that a caller's shard is the service's,
//! what is remembered for a while, how a limit follows latency, what a box sheds, and the wire format of the messages between
//! them.

pub mod adaptive;
mod identity;
mod ring;
pub mod shedder;
mod text;
mod ways;
pub mod wire;

pub use identity::Identity;
pub use ring::Ring;
pub use text::{ESCAPED, ESCAPED_PATTERN, escape};
pub use ways::{Ending, Ways};
