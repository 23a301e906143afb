//! The process writes no core dump, needs no capability, and creates files with the permissions of its umask.

use std::{
    fs,
    os::unix::{
        fs::{MetadataExt, PermissionsExt, chown},
        process::ExitStatusExt,
    },
    path::PathBuf,
    process::Command,
};

use crate::support::{Operator, Server, raw_client::Client, request_for, rules, server::Builder, wait_for};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";
/// A user without an entry in any file.
const USER: u32 = 64_321;

/// The program and its files, where another user can read them.
struct Installation {
    folder: tempfile::TempDir,
}

impl Installation {
    fn new() -> Self {
        let folder = rules(&[("api.yaml", RULES)]);
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_sluicegate"), folder.path().join("sluicegate")).unwrap();
        let data = folder.path().join("data");
        fs::create_dir(&data).unwrap();
        chown(&data, Some(USER), Some(USER)).unwrap();
        Self { folder }
    }

    fn data(&self, name: &str) -> PathBuf {
        self.folder.path().join("data").join(name)
    }

    /// Returns a builder for a service of another user without any capability, and without a way to gain one.
    fn unprivileged(&self) -> Builder {
        let mut command = Command::new("setpriv");
        command.args([&format!("--reuid={USER}"), &format!("--regid={USER}"), "--clear-groups", "--no-new-privs"]);
        command.args(["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]);
        command.arg(self.folder.path().join("sluicegate"));
        command.args(["serve", "--grpc-addr", "127.0.0.1:0", "--http-addr", "127.0.0.1:0"]);
        Server::from_command(command).rules(self.folder.path())
    }
}

fn status(server: &Server, field: &str) -> String {
    let status = fs::read_to_string(format!("/proc/{}/status", server.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(&format!("{field}:\t")));
    line.unwrap_or_else(|| panic!("no {field}: {status}")).to_owned()
}

#[tokio::test]
async fn the_service_needs_no_capability() {
    let installation = Installation::new();
    let path = |name: &str| installation.data(name).display().to_string();
    let server = installation
        .unprivileged()
        .set("record.dir", &path("traffic"))
        .set("record.share", "1")
        .set("overrides.file", &path("overrides"))
        .set("grpc.uds", &path("grpc.sock"))
        .start();
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status(&server, set), "0000000000000000", "{set}");
    }
    assert_eq!((status(&server, "NoNewPrivs").as_str(), status(&server, "Groups").trim()), ("1", ""));
    assert!(status(&server, "Uid").starts_with(&format!("{USER}\t{USER}")));
    let socket = format!("unix://{}", path("grpc.sock"));
    let client = Client::connect(tonic::transport::Endpoint::from_shared(socket).unwrap()).await.unwrap();
    assert_eq!(client.check(request_for("api", &[("user", "bob")])).await.unwrap().remaining(), Some(1));
    // The process can read its own state, although it is closed to others.
    assert!(server.metric("process_open_fds") > 0.0 && server.metric("process_resident_memory_bytes") > 0.0);
    server.signal("TERM");
    assert!(server.wait().await.success());
    assert!(fs::read_dir(installation.data("traffic")).unwrap().count() > 0, "requests are recorded");
}

#[tokio::test]
async fn files_have_the_permissions_that_the_umask_leaves() {
    for (umask, expected) in [("077", 0o600), ("022", 0o644)] {
        let (folder, data) = (rules(&[("api.yaml", RULES)]), tempfile::tempdir().unwrap());
        let (traffic, overrides) = (data.path().join("traffic"), data.path().join("overrides"));
        let builder = Server::builder()
            .rules(folder.path())
            .set("record.dir", traffic.to_str().unwrap())
            .set("record.share", "1")
            .set("overrides.file", overrides.to_str().unwrap());
        let operator = Operator::with(builder.umask(umask));
        operator.server.client().await.check(request_for("api", &[("user", "bob")])).await.unwrap();
        operator.ctl(&["limit", "set", "api", "user=bob", "9/year"]);
        let first = || Some(fs::read_dir(&traffic).unwrap().next()?.unwrap().path());
        let recorded = wait_for("a file of recorded requests", first);
        for file in [recorded, overrides] {
            let mode = fs::metadata(&file).unwrap().permissions().mode() & 0o777;
            assert_eq!(mode, expected, "umask {umask}: {} has {mode:o}", file.display());
        }
    }
}

/// The files in `/proc` of a process without core dumps belong to root, so that its own user cannot read its memory.
#[tokio::test]
async fn a_crash_writes_no_core_dump_unless_it_is_configured() {
    let installation = Installation::new();
    for (setting, owner) in [("false", 0), ("true", USER)] {
        let server = installation.unprivileged().set("core_dumps", setting).start();
        let environment = format!("/proc/{}/environ", server.pid());
        assert_eq!(fs::metadata(environment).unwrap().uid(), owner, "core_dumps = {setting}");
        if setting == "false" {
            server.signal("ABRT");
            let status = server.wait().await;
            assert!(status.signal() == Some(6) && !status.core_dumped(), "{status}");
        }
    }
    let server = installation.unprivileged().start();
    assert_eq!(fs::metadata(format!("/proc/{}/environ", server.pid())).unwrap().uid(), 0, "the default");
}
