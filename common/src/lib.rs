//! Code shared by Sluicegate's service and its client:
//!
//! - [`Ring`]: placement of shards on nodes, so that client and service agree on it;
//! - [`SetAssociativeCache`]: a fixed-size cache of values that expire;
//! - [`within`]: a time limit for an answer, which excludes pauses of the process;
//! - [`Identity`]: a 128-bit hash of a descriptor, and [`escape`] for readable names of counters and shards;
//! - [`adaptive`]: concurrency limits that adapt to latency;
//! - [`shedder`]: load shedding by class;
//! - [`response_headers`]: values of the headers `RateLimit-Policy` and `RateLimit`;
//! - [`wire`]: a protobuf reader and writer for the most frequent messages.

pub mod adaptive;
mod deadline;
mod identity;
pub mod response_headers;
mod ring;
mod set_associative_cache;
pub mod shedder;
mod text;
pub mod wire;

pub use deadline::{Late, within};
pub use identity::Identity;
pub use ring::Ring;
pub use set_associative_cache::{Expiring, SetAssociativeCache};
pub use text::{ESCAPED, ESCAPED_PATTERN, escape};
