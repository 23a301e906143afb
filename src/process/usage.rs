//! The metrics `process_*` that exporters for Prometheus have in common: CPU time, memory, files and threads.

use std::fs;

use crate::{
    engine::Micros,
    metrics::{Instrument, Meter},
    platform::{max_open_files, process_cpu_time},
};

/// State of the process, with lines such as `VmRSS:     1234 kB`.
const STATUS: &str = "/proc/self/status";
/// A folder with an entry for each open file descriptor.
const OPEN_FILES: &str = "/proc/self/fd";

/// Registers the metrics with `meter`. They are read from `/proc`, so there are none on systems other than Linux.
pub fn observe_usage(meter: &dyn Meter, start: Micros) {
    if !cfg!(target_os = "linux") {
        return;
    }
    meter.register(Instrument::f64_counter(
        "process_cpu_seconds_total",
        "CPU time in user and kernel mode",
        |observer| {
            if let Some(used) = process_cpu_time() {
                observer.observe(used.as_secs_f64(), []);
            }
        },
    ));
    gauge(meter, "process_resident_memory_bytes", "Resident memory", || Some(status("VmRSS:")? * 1_024));
    gauge(meter, "process_virtual_memory_bytes", "Virtual memory", || Some(status("VmSize:")? * 1_024));
    gauge(meter, "process_threads", "Number of threads", || status("Threads:"));
    gauge(meter, "process_open_fds", "Number of open file descriptors", open_files);
    gauge(meter, "process_max_fds", "Maximum number of open file descriptors", max_open_files);
    meter.register(Instrument::f64_gauge("process_start_time_seconds", "Unix time of the start", move |observer| {
        observer.observe(start.get() as f64 / 1e6, []);
    }));
}

/// Registers a gauge without labels, which has no series while its value cannot be read.
fn gauge(
    meter: &dyn Meter,
    name: &'static str,
    description: &'static str,
    read: impl Fn() -> Option<u64> + Send + Sync + 'static,
) {
    meter.register(Instrument::gauge(name, description, move |observer| {
        if let Some(value) = read() {
            observer.observe(value, []);
        }
    }));
}

/// Returns the number in the line of [`STATUS`] that begins with `key`.
fn status(key: &str) -> Option<u64> {
    let status = fs::read_to_string(STATUS).ok()?;
    let value = status.lines().find_map(|line| line.strip_prefix(key))?;
    value.split_whitespace().next()?.parse().ok()
}

/// Returns the number of open file descriptors, without that of the folder that is read.
fn open_files() -> Option<u64> {
    let count = fs::read_dir(OPEN_FILES).ok()?.count();
    Some((count as u64).saturating_sub(1))
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::metrics::Registry;

    #[test]
    fn the_values_are_those_of_the_process() {
        let registry = Registry::default();
        observe_usage(&registry, Micros::new(1_500_000));
        let metrics = registry.collect().into_iter();
        let values: BTreeMap<_, _> = metrics.map(|metric| (metric.name, metric.series[0].value.as_f64())).collect();
        assert_eq!((values.len(), values["process_start_time_seconds"]), (7, 1.5));
        assert!(values["process_cpu_seconds_total"] > 0.0);
        let resident = values["process_resident_memory_bytes"];
        assert!(resident > 1e6 && resident < values["process_virtual_memory_bytes"], "{values:?}");
        // The main thread of the test program, and that of this test.
        assert!(values["process_threads"] >= 2.0, "{values:?}");
        let open = values["process_open_fds"];
        assert!(open >= 3.0 && open < values["process_max_fds"], "{values:?}");
    }
}
