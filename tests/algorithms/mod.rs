//! Every algorithm against its definition, against other implementations, and over the wire.

/// Concurrency limits.
mod concurrency;
/// Every algorithm against vectors derived from its definition: the functions, memory, Redis.
mod golden_vectors;
/// Memory and Redis return the same decisions for random histories of every algorithm.
mod histories;
/// The bucket family compared with other implementations.
mod other_implementations;
/// Every algorithm over the wire, and the example rule files.
mod over_the_wire;
/// The bytes of states, which other versions of the service read.
mod state_bytes;
/// Windows of the calendar under a shifted clock.
mod windows;
