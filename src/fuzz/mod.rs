//! The fuzz targets. Each takes any bytes, and panics if the code does not do what it promises for all input, or if it
//! uses more memory than its [`Limits`] allow.
//!
//! The folder `fuzz` runs them with libFuzzer (`make fuzz`). Unit tests run them with the inputs in `fuzz/seeds`, and with
//! those of `shapes`, which are larger.

mod memory;
#[cfg(test)]
mod shapes;

use self::memory::{Bound, Limits};
use crate::{
    algorithm::fuzz::counter_state,
    app::fuzz::{admin_call, json_request, resource_report},
    engine::fuzz::{override_target, top_entities},
    rules::fuzz::{rule_file, wildcard},
    service::{activity::fuzz::activity_report, overrides::fuzz::override_journal},
    settings::fuzz::{envoyproxy_environment, settings_file},
    store::{
        memcached::fuzz::{memcached_address, memcached_reply},
        redis::fuzz::{redis_address, redis_reply},
    },
    telemetry::fuzz::statsd_mapping,
    traffic::fuzz::{access_log, descriptor_text, recorded_traffic},
    transport::{
        admin::fuzz::token_file,
        cluster::fuzz::peer_message,
        fuzz::{check_frame, check_request, framed_message, http2, quota_reports},
        xds::fuzz::xds_resource,
    },
};

/// A fuzz target.
struct Target {
    name: &'static str,
    run: fn(&[u8]),
    limits: Limits,
}

/// All targets, each with the limits of its peak and its total memory: bytes, and bytes for each byte of the input.
const TARGETS: &[Target] = &[
    target("access_log", access_log, [5_600_000, 100], [23_000_000, 300]),
    target("activity_report", activity_report, [12_000_000, 0], [16_000_000, 0]),
    target("admin_call", admin_call, [2_000_000, 150], [4_000_000, 300]),
    target("check_frame", check_frame, [50_000, 130], [100_000, 240]),
    target("check_request", check_request, [250_000, 39], [580_000, 260]),
    target("counter_state", counter_state, [60_000, 0], [300_000, 0]),
    target("descriptor_text", descriptor_text, [50_000, 130], [100_000, 260]),
    target("envoyproxy_environment", envoyproxy_environment, [230_000, 210], [18_000_000, 1_300]),
    target("framed_message", framed_message, [560_000, 1], [560_000, 1]),
    target("http2", http2, [2_000_000, 0], [2_500_000, 24]),
    target("json_request", json_request, [240_000, 59], [300_000, 98]),
    target("memcached_address", memcached_address, [50_000, 10], [100_000, 20]),
    target("memcached_reply", memcached_reply, [8_700_000, 40], [9_000_000, 60]),
    target("override_journal", override_journal, [50_000, 6], [100_000, 55]),
    target("override_target", override_target, [50_000, 10], [100_000, 13]),
    target("peer_message", peer_message, [80_000_000, 7], [130_000_000, 14]),
    target("quota_reports", quota_reports, [180_000, 85], [440_000, 370]),
    target("recorded_traffic", recorded_traffic, [40_000_000, 3], [200_000_000, 140]),
    target("redis_address", redis_address, [370_000, 7], [1_100_000, 13]),
    target("redis_reply", redis_reply, [700_000, 46], [1_500_000, 65]),
    target("resource_report", resource_report, [50_000, 25], [100_000, 40]),
    target("rule_file", rule_file, [50_000_000, 540], [110_000_000, 3_000]),
    target("settings_file", settings_file, [290_000, 500], [18_000_000, 1_300]),
    target("statsd_mapping", statsd_mapping, [33_000_000, 290], [110_000_000, 600]),
    target("token_file", token_file, [50_000, 8], [100_000, 11]),
    target("top_entities", top_entities, [530_000, 0], [2_200_000, 78]),
    target("wildcard", wildcard, [50_000, 33], [100_000, 46]),
    target("xds_resource", xds_resource, [50_000, 1_300], [100_000, 2_600]),
];

/// Creates a target. Each limit is a number of bytes, and a number for each byte of the input.
const fn target(name: &'static str, run: fn(&[u8]), peak: [u64; 2], total: [u64; 2]) -> Target {
    let (peak, total) = (Bound { fixed: peak[0], per_byte: peak[1] }, Bound { fixed: total[0], per_byte: total[1] });
    Target { name, run, limits: Limits { peak, total } }
}

/// Runs the target with this name.
///
/// # Panics
///
/// Panics if the code breaks a promise, or if there is no such target.
pub fn run(name: &str, input: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    let target = target.unwrap_or_else(|| panic!("unknown target {name}"));
    target.limits.run(name, target.run, input);
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    use super::*;

    /// Runs a target with each of its seeds and shapes.
    fn run_all(name: &str) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
        let mut paths: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        assert!(!paths.is_empty(), "{} has no seeds", folder.display());
        let mut seeds = Vec::new();
        for path in paths {
            eprintln!("{}", path.display());
            let seed = fs::read(&path).unwrap();
            run(name, &seed);
            seeds.push(seed);
        }
        for (shape, input) in shapes::of(name, &seeds) {
            eprintln!("{name}: {shape}, {} bytes", input.len());
            run(name, &input);
        }
    }

    macro_rules! run_targets {
        ($($target:ident),+ $(,)?) => {
            $(
                #[test]
                fn $target() {
                    run_all(stringify!($target));
                }
            )+

            /// The names of the targets that have a test.
            const NAMES: &[&str] = &[$(stringify!($target)),+];
        };
    }

    run_targets![
        access_log,
        activity_report,
        admin_call,
        check_frame,
        check_request,
        counter_state,
        descriptor_text,
        envoyproxy_environment,
        framed_message,
        http2,
        json_request,
        memcached_address,
        memcached_reply,
        override_journal,
        override_target,
        peer_message,
        quota_reports,
        recorded_traffic,
        redis_address,
        redis_reply,
        resource_report,
        rule_file,
        settings_file,
        statsd_mapping,
        token_file,
        top_entities,
        wildcard,
        xds_resource,
    ];

    #[test]
    fn every_target_has_a_test_and_a_program() {
        let names: Vec<_> = TARGETS.iter().map(|target| target.name).collect();
        assert_eq!(names, NAMES);
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut programs: Vec<_> = files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        programs.sort();
        assert_eq!(programs, names);
    }
}
