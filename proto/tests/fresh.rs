//! The committed code in `src/gen` is what the `.proto` files say today.
//! `UPDATE_GENERATED=1 cargo test -p sluicegate-proto` (or `make proto`) writes it anew.

use std::{fs, path::Path};

/// What they import comes along.
const FILES: [&str; 7] = [
    "envoy/service/discovery/v3/ads.proto",
    "envoy/service/ratelimit/v3/rls.proto",
    "ratelimit/config/ratelimit/v3/rls_conf.proto",
    "sluicegate/admin/v1/admin.proto",
    "sluicegate/v1/decisions.proto",
    "sluicegate/v1/resources.proto",
    "sluicegate/v1/traffic.proto",
];
/// Also named in `src/lib.rs`: the file with everything reflection needs.
const DESCRIPTOR_SET: &str = "descriptor_set.bin";

#[test]
fn generated_code_is_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let generated = tempfile::tempdir().unwrap();
    let set = protox::compile(FILES, [root.join("proto")]).unwrap();
    fs::write(generated.path().join(DESCRIPTOR_SET), prost_encode(&set)).unwrap();
    tonic_prost_build::configure().out_dir(generated.path()).compile_fds(set).unwrap();

    let committed = root.join("src/gen");
    for entry in fs::read_dir(generated.path()).unwrap() {
        let entry = entry.unwrap();
        let fresh = fs::read(entry.path()).unwrap();
        let place = committed.join(entry.file_name());
        if std::env::var_os("UPDATE_GENERATED").is_some() {
            fs::write(&place, &fresh).unwrap();
        }
        assert!(
            fs::read(&place).unwrap_or_default() == fresh,
            "{} is not what the .proto files say; run `make proto`",
            place.display(),
        );
    }
}

fn prost_encode(set: &impl prost::Message) -> Vec<u8> {
    set.encode_to_vec()
}
