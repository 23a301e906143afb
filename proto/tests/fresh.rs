//! Checks that the committed code in `src/gen` is generated from the current `.proto` files.
//! `UPDATE_GENERATED=1 cargo test -p sluicegate-proto` (or `make proto`) regenerates it.

use std::{fs, path::Path};

/// The compiled files. Their imports are compiled as well.
const FILES: [&str; 9] = [
    "envoy/service/discovery/v3/ads.proto",
    "envoy/service/rate_limit_quota/v3/rlqs.proto",
    "envoy/service/ratelimit/v3/rls.proto",
    "ratelimit/config/ratelimit/v3/rls_conf.proto",
    "sluicegate/admin/v1/admin.proto",
    "sluicegate/cluster/v1/cluster.proto",
    "sluicegate/v1/decisions.proto",
    "sluicegate/v1/resources.proto",
    "sluicegate/v1/traffic.proto",
];
/// The encoded `FileDescriptorSet` for reflection. `src/lib.rs` contains the same name.
const DESCRIPTOR_SET: &str = "descriptor_set.bin";

#[test]
fn generated_code_is_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = tempfile::tempdir().unwrap();
    let set = protox::compile(FILES, [root.join("proto")]).unwrap();
    fs::write(generated.path().join(DESCRIPTOR_SET), prost_encode(&set)).unwrap();
    let configuration = tonic_prost_build::configure().bytes(".sluicegate.cluster.v1");
    // A batch has up to 200,000 limits, and few of them follow a calendar or are large.
    let configuration = configuration.boxed(".sluicegate.cluster.v1.Limit.calendar");
    let configuration = configuration.boxed(".sluicegate.cluster.v1.Limit.large");
    configuration.btree_map(".envoy.service.rate_limit_quota.v3").out_dir(generated.path()).compile_fds(set).unwrap();

    let committed = root.join("src/gen");
    for entry in fs::read_dir(generated.path()).unwrap() {
        let entry = entry.unwrap();
        let fresh = fs::read(entry.path()).unwrap();
        let committed_file = committed.join(entry.file_name());
        if std::env::var_os("UPDATE_GENERATED").is_some() {
            fs::write(&committed_file, &fresh).unwrap();
        }
        assert!(
            fs::read(&committed_file).unwrap_or_default() == fresh,
            "{} is out of date; run `make proto`",
            committed_file.display(),
        );
    }
}

fn prost_encode(set: &impl prost::Message) -> Vec<u8> {
    set.encode_to_vec()
}
