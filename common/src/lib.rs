//! What Sluicegate's service and its client do alike: the placement of shards, so that a caller's shard is the service's,
//! what is remembered for a while, how a limit follows latency, what a box sheds, and the wire format of the messages between
//! them.

pub mod adaptive;
mod identity;
mod ring;
mod set_associative_cache;
pub mod shedder;
mod text;
pub mod wire;

pub use identity::Identity;
pub use ring::Ring;
pub use set_associative_cache::{Expiring, SetAssociativeCache};
pub use text::{ESCAPED, ESCAPED_PATTERN, escape};
