//! [`Limits`]: the memory that one run of a fuzz target may use.

use allocation_counter::{AllocationInfo, measure};

/// Maximum memory of one run of a target, on the thread that runs it.
pub(super) struct Limits {
    /// Memory that is in use at the same time.
    pub(super) peak: Bound,
    /// Memory that is allocated in the whole run, which bounds its work, too: most of it reads or writes new memory.
    pub(super) total: Bound,
}

/// A number of bytes that grows with the length of the input.
pub(super) struct Bound {
    /// Bytes for an input of any length.
    pub(super) fixed: u64,
    /// Further bytes for each byte of the input.
    pub(super) per_byte: u64,
}

impl Bound {
    fn bytes(&self, length: usize) -> u64 {
        self.fixed + self.per_byte * length as u64
    }
}

impl Limits {
    /// Runs a target, and asserts that it stays within its limits.
    ///
    /// An input that exceeds them is run again, and must exceed them both times. The first use of a part of the service
    /// initialises statics and caches, and a table that grows is allocated for many inputs at once.
    pub(super) fn run(&self, name: &str, target: fn(&[u8]), input: &[u8]) {
        if self.allow(measure(|| target(input)), input.len()) {
            return;
        }
        let used = measure(|| target(input));
        let (length, peak, total) = (input.len(), used.bytes_max, used.bytes_total);
        assert!(
            self.allow(used, length),
            "{name} used {peak} bytes at the same time (maximum {}) and {total} bytes in total (maximum {}) for an \
             input of {length} bytes",
            self.peak.bytes(length),
            self.total.bytes(length)
        );
    }

    fn allow(&self, used: AllocationInfo, length: usize) -> bool {
        used.bytes_max <= self.peak.bytes(length) && used.bytes_total <= self.total.bytes(length)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { peak: Bound { fixed: 100, per_byte: 2 }, total: Bound { fixed: 1_000, per_byte: 10 } };

    fn run(target: fn(&[u8])) -> bool {
        std::panic::catch_unwind(|| LIMITS.run("test", target, &[7; 100])).is_ok()
    }

    #[test]
    fn memory_is_bounded_at_the_same_time_and_in_total() {
        assert!(run(|input| drop(input.to_vec())));
        assert!(!run(|input| drop(input.repeat(4))), "400 bytes at the same time");
        assert!(run(|input| (0..20).for_each(|_| drop(input.to_vec()))));
        assert!(!run(|input| (0..21).for_each(|_| drop(input.to_vec()))), "2,100 bytes in total");
    }
}
