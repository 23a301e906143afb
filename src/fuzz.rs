//! The fuzz targets. Each takes any bytes, and panics if the code does not do what it promises for all input.
//!
//! The folder `fuzz` runs them with libFuzzer (`make fuzz`). Unit tests run them with the inputs in `fuzz/seeds`.

pub use crate::{
    algorithm::fuzz::counter_state,
    app::fuzz::{admin_call, json_request, resource_report},
    engine::fuzz::{override_target, top_entities},
    rules::fuzz::{rule_file, wildcard},
    service::{activity::fuzz::activity_report, overrides::fuzz::override_journal},
    settings::fuzz::{envoyproxy_environment, settings_file},
    store::redis::fuzz::{redis_address, redis_reply},
    telemetry::fuzz::statsd_mapping,
    traffic::fuzz::{access_log, descriptor_text, recorded_traffic},
    transport::{
        admin::fuzz::token_file,
        cluster::fuzz::peer_message,
        grpc::fuzz::{check_frame, check_request, http2, quota_reports},
        xds::fuzz::xds_resource,
    },
};

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    /// Runs a target with each of its seeds.
    fn run_seeds(name: &str, target: fn(&[u8])) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/seeds").join(name);
        let mut seeds: Vec<_> = fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        seeds.sort();
        assert!(!seeds.is_empty(), "{} has no seeds", folder.display());
        for seed in seeds {
            eprintln!("{}", seed.display());
            target(&fs::read(&seed).unwrap());
        }
    }

    macro_rules! seeds_of {
        ($($target:ident),+ $(,)?) => {
            $(
                #[test]
                fn $target() {
                    run_seeds(stringify!($target), super::$target);
                }
            )+

            /// The names of all targets.
            const NAMES: &[&str] = &[$(stringify!($target)),+];
        };
    }

    seeds_of![
        access_log,
        activity_report,
        admin_call,
        check_frame,
        check_request,
        counter_state,
        descriptor_text,
        envoyproxy_environment,
        http2,
        json_request,
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
    fn every_target_has_a_program() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
        let files = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        let mut programs: Vec<_> = files.map(|path| path.file_stem().unwrap().to_str().unwrap().to_owned()).collect();
        programs.sort();
        assert_eq!(programs, NAMES);
    }
}
