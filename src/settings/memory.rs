//! [`Memory`]: the largest memory that callers can make the process hold, as it follows from the settings.
//!
//! The sizes of counters, of cached denials, of leases and of gRPC connections were measured. The others are computed from
//! the maximum numbers and sizes in the code. `tests/security/strangers.rs` attacks a service that has no more memory than
//! the sum.

use std::fmt;

use super::Settings;

const MB: u64 = 1_000_000;
/// The process without callers, with the examples as rules. Measured: 17 MB.
const IDLE_BYTES: u64 = 30 * MB;
/// Memory for each byte of `input.max_bytes`: the allocator rounds sizes up, and returns freed memory later. Measured with
/// messages of 2 MiB that make room for each other: 1.7.
const BYTES_PER_INPUT_BYTE: u64 = 2;
const COUNTER_BYTES: u64 = 45;
/// A quota bucket and the part of its name that counts as one bucket.
const BUCKET_BYTES: u64 = 800;
const CACHED_DENIAL_BYTES: u64 = 360;
const LEASE_BYTES: u64 = 500;
const EVENTUAL_COUNTER_BYTES: u64 = 400;
/// Number of entities that one thread ranks by requested hits and by denied requests: 500 for each of the last 5
/// minutes, and 100 for each of the 12 older windows, which are 5 minutes long.
const RANKED_ENTITIES: u64 = 2 * (5 * 500 + 12 * 100);
const RANKED_ENTITY_BYTES: u64 = 250;
/// Size of the names of the entities that one thread ranks.
const RANKED_NAME_BYTES: u64 = 2 * (5 * 256_000 + 12 * 50_000);
/// A series with values of callers in its labels: a tenth of the memory for one combination of values, which has ten
/// series.
const SERIES_BYTES: u64 = 190;
/// The last hour of the console (18 MB), and the values that aliases copy in the text of one simulation.
const CONSOLE_BYTES: u64 = 50 * MB;
/// A gRPC connection with 64 KiB of data of calls for which no memory is reserved, in buffers of twice this size.
/// Measured: 19 KB for an idle connection.
const GRPC_CONNECTION_BYTES: u64 = 150_000;
/// Memory that a gRPC connection keeps for each call that was in progress at the same time. Measured: 620 bytes.
const GRPC_CALL_BYTES: u64 = 800;
/// A connection to an HTTP listener: its buffers, and a head of 16 KiB with the shortest names and values.
const HTTP_CONNECTION_BYTES: u64 = 100_000;
/// Connections, unfinished messages, copies, overrides and the hits of members, apart from their counters.
const MEMBERS_BYTES: u64 = 500 * MB;
/// Memory of the exchange with members for a counter.
const EXCHANGED_COUNTER_BYTES: u64 = 4;

/// The largest memory that callers can make the process hold.
pub struct Memory {
    parts: Vec<Part>,
}

struct Part {
    bytes: u64,
    description: String,
}

impl Memory {
    /// Computes the parts from settings.
    #[must_use]
    pub fn new(settings: &Settings) -> Self {
        let mut memory = Self { parts: Vec::new() };
        memory.add_fixed(settings);
        memory.add_counters(settings);
        memory.add_connections(settings);
        memory
    }

    /// Returns the sum of the parts in bytes.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.bytes).fold(0, u64::saturating_add)
    }

    fn add(&mut self, count: u64, bytes: u64, description: impl Into<String>) {
        self.parts.push(Part { bytes: count.saturating_mul(bytes), description: description.into() });
    }

    /// Adds the parts that depend neither on counters nor on connections.
    fn add_fixed(&mut self, settings: &Settings) {
        self.add(1, IDLE_BYTES, "the process without callers");
        let input = settings.input.max_bytes as u64;
        self.add(input, BYTES_PER_INPUT_BYTE, "unfinished input, unread responses and streams: input.max_bytes");
        let ranked = RANKED_ENTITIES * RANKED_ENTITY_BYTES + RANKED_NAME_BYTES;
        // The control runtime decides requests, too.
        let threads = settings.number_of_workers() as u64 + 1;
        self.add(threads, ranked, "top entities: workers");
        let series = settings.telemetry.max_dynamic_series as u64;
        self.add(series, SERIES_BYTES, "series with values of callers: telemetry.max_dynamic_series");
        if settings.console.enabled {
            self.add(1, CONSOLE_BYTES, "the console and simulations: console.enabled");
        }
        if settings.cluster.has_peers() {
            self.add(1, MEMBERS_BYTES, "the exchange with members: cluster.peers");
        }
    }

    fn add_counters(&mut self, settings: &Settings) {
        let is_exchanged = settings.cluster.has_peers();
        let counter = COUNTER_BYTES + if is_exchanged { EXCHANGED_COUNTER_BYTES } else { 0 };
        self.add(settings.memory.max_counters as u64, counter, "counters in memory: memory.max_counters");
        self.add(settings.quotas.max_buckets as u64, BUCKET_BYTES, "quota buckets: quotas.max_buckets");
        if settings.store == "memory" && settings.per_second.store.is_none() {
            return;
        }
        let denials = settings.deny_cache.max_entries as u64;
        self.add(denials, CACHED_DENIAL_BYTES, "cached denials: deny_cache.max_entries");
        self.add(settings.lease.max_counters as u64, LEASE_BYTES, "leases: lease.max_counters");
        let eventual = settings.eventual.max_counters as u64;
        self.add(eventual, EVENTUAL_COUNTER_BYTES, "eventual counters: eventual.max_counters");
    }

    fn add_connections(&mut self, settings: &Settings) {
        let grpc = settings.grpc.max_connections as u64;
        let bytes = GRPC_CONNECTION_BYTES + GRPC_CALL_BYTES * u64::from(settings.grpc.max_concurrent_streams);
        let setting = "grpc.max_connections, grpc.max_concurrent_streams";
        self.add(grpc, bytes, format!("gRPC connections, {} KB each: {setting}", bytes / 1_000));
        let listeners =
            1 + u64::from(settings.http.debug_addr.is_some()) + u64::from(settings.http.metrics_addr.is_some());
        let mut http = listeners * settings.http.max_connections as u64;
        if settings.admin.addr.is_some() {
            http += settings.admin.max_connections as u64;
        }
        let description = format!(
            "HTTP connections, {} KB each: http.max_connections, admin.max_connections",
            HTTP_CONNECTION_BYTES / 1_000
        );
        self.add(http, HTTP_CONNECTION_BYTES, description);
    }
}

/// Writes the parts as comments of a settings file.
impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "# The largest memory that callers can make this process hold, without rules and overrides,")?;
        writeln!(f, "# in megabytes, with the setting that each part follows from:")?;
        for part in &self.parts {
            writeln!(f, "# {:>6} {}", part.bytes.div_ceil(MB), part.description)?;
        }
        writeln!(f, "# {:>6} in total", self.total_bytes().div_ceil(MB))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_is_at_most_256_megabytes_without_counters_and_connections() {
        let settings = Settings { workers: 2, ..Settings::default() };
        let mut memory = Memory { parts: Vec::new() };
        memory.add_fixed(&settings);
        assert!(memory.total_bytes() - IDLE_BYTES <= 256 * MB, "{memory}");
    }

    #[test]
    fn parts_follow_from_the_settings() {
        let mut settings = Settings { workers: 1, ..Settings::default() };
        settings.memory.max_counters = 2 * 1_000_000;
        let text = Memory::new(&settings).to_string();
        assert!(text.contains("#     90 counters in memory: memory.max_counters\n"), "{text}");
        assert!(!text.contains("leases") && !text.contains("cluster.peers"), "{text}");
        let before = Memory::new(&settings).total_bytes();
        settings.grpc.max_connections += 4;
        assert_eq!(Memory::new(&settings).total_bytes() - before, 4 * 950_000);
        settings.store = "redis://localhost".into();
        settings.cluster.peers = vec!["member:8083".into()];
        let text = Memory::new(&settings).to_string();
        assert!(text.contains("leases: lease.max_counters") && text.contains("cluster.peers"), "{text}");
    }
}
