//! What Sluicegate's service and its client compute alike, so that a caller's shard is the service's shard.

mod identity;
mod ring;
mod text;
pub mod wire;

pub use identity::Identity;
pub use ring::Ring;
pub use text::{ESCAPED, ESCAPED_PATTERN, escape};
