//! The container image, tested without a container runtime: its contents are assembled in a directory and run as an
//! arbitrary user on a read-only root.

use std::{
    fs,
    os::unix::fs::symlink,
    path::Path,
    process::{Command, Stdio},
};

use crate::support::{Server, repository, request_for, rules};

/// Copies the contents of the image that `deploy/container/Dockerfile` builds: the program and its second name. The
/// program of the image is static; that of the tests needs the libraries that it is linked with.
fn assemble(root: &Path) {
    let program = Path::new(env!("CARGO_BIN_EXE_sluicegate"));
    fs::create_dir_all(root.join("bin")).unwrap();
    fs::copy(program, root.join("bin/sluicegate")).unwrap();
    symlink("sluicegate", root.join("bin/ratelimit")).unwrap();
    let linked = Command::new("ldd").arg(program).output().unwrap();
    for path in String::from_utf8(linked.stdout).unwrap().split_whitespace().filter(|word| word.starts_with('/')) {
        let target = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(target.parent().unwrap()).unwrap();
        fs::copy(path, target).unwrap();
    }
}

#[tokio::test]
async fn the_image_runs_as_any_user_on_a_read_only_root() {
    let text = fs::read_to_string(repository("deploy/container/Dockerfile")).unwrap();
    for line in [
        "ln -s sluicegate /out/bin/ratelimit",
        "USER 65534:65534",
        r#"CMD ["/bin/sluicegate", "health"]"#,
        "COPY target/dist-image/${TARGETARCH}/ /",
    ] {
        assert!(text.contains(line), "{line}");
    }
    let release = fs::read_to_string(repository("deploy/dist/build.sh")).unwrap();
    assert!(
        release.contains(r#"ln -s sluicegate "$root/bin/ratelimit""#),
        "the image of a release has the second name"
    );
    let root = tempfile::tempdir().unwrap();
    assemble(root.path());
    let folder =
        rules(&[("a.yaml", "domain: a\ndescriptors: [{key: k, rate_limit: {unit: hour, requests_per_unit: 5}}]\n")]);
    let data = root.path().join("data/ratelimit/config");
    fs::create_dir_all(&data).unwrap();
    fs::copy(folder.path().join("a.yaml"), data.join("a.yaml")).unwrap();
    // Other users must be able to read the folder; by default only its owner can.
    Command::new("chmod").args(["-R", "a+rX"]).arg(root.path()).status().unwrap();
    let run_in_root = |program: &str| {
        let root = root.path().display();
        let script = format!(
            "mount --bind '{root}' '{root}' && mount -o remount,bind,ro '{root}' && \
             exec chroot --userspec=64321:64321 '{root}' {program}"
        );
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", &script]).env_clear().env("PATH", std::env::var_os("PATH").unwrap());
        command
    };
    let mut command = run_in_root("/bin/ratelimit");
    command.envs([
        ("RUNTIME_ROOT", "/data"),
        ("RUNTIME_SUBDIRECTORY", "ratelimit"),
        ("USE_STATSD", "false"),
        ("LOG_LEVEL", "info"),
        ("REDIS_SOCKET_TYPE", "tcp"),
        ("REDIS_URL", "127.0.0.1:1"),
        ("HOST", "127.0.0.1"),
        ("GRPC_HOST", "127.0.0.1"),
        ("DEBUG_HOST", "127.0.0.1"),
        ("PORT", "0"),
        ("GRPC_PORT", "0"),
        ("DEBUG_PORT", "0"),
        ("SLUICEGATE__STORE", "memory"),
    ]);
    let server = Server::from_command(command).start();
    let answer = server.client().await.check(request_for("a", &[("k", "v")])).await.unwrap();
    assert_eq!(answer.remaining(), Some(4));
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    assert!(status.contains("Uid:\t64321\t64321"), "{status}");
    // The image's health check succeeds.
    let health =
        run_in_root(&format!("/bin/sluicegate health --http-addr {}", server.http)).stdout(Stdio::piped()).output();
    assert_eq!(String::from_utf8(health.unwrap().stdout).unwrap(), "200 OK\n");
}
