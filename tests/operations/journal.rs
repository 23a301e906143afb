//! The file of overrides: it has all acknowledged changes, also if it is no regular file, and one process writes it.

use std::{
    fs,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use serde_json::json;

use crate::support::{
    Disk, Operator, Server, descriptor, raw_client::Request, request_for, rules, wait_for, wait_for_async,
};

const RULES: &str = "domain: api\ndescriptors:\n- key: user\n  rate_limit: { unit: year, requests_per_unit: 2 }\n";

/// Number of lines above which a file is rewritten.
const LONG: u64 = 2_100;

/// A folder with rules, and one for the file of overrides.
struct Site {
    rules: tempfile::TempDir,
    folder: tempfile::TempDir,
}

impl Site {
    fn new() -> Self {
        Self { rules: rules(&[("api.yaml", RULES)]), folder: tempfile::tempdir().unwrap() }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("overrides")
    }

    fn builder(&self, file: &Path) -> crate::support::server::Builder {
        let builder = Server::builder().rules(self.rules.path()).store("memory");
        builder.set("overrides.file", file.to_str().unwrap())
    }

    fn start(&self) -> Operator {
        Operator::with(self.builder(&self.file()))
    }
}

/// Returns the line of a change that sets the limit of a user.
fn line(version: u64, user: &str, limit: &str) -> String {
    let after = json!({"w": limit, "a": "alice", "t": 1}).to_string();
    let change = json!({"target": format!("limit|api|user={user}"), "before": null, "after": after});
    let info = json!({"author": "alice", "reason": "", "at": 1}).to_string();
    let id = format!("{version:016x}");
    format!("{}\n", json!({"change": {"version": version, "id": id, "info": info, "changes": [change]}}))
}

/// Returns so many lines that the next change rewrites the file.
fn long_file() -> String {
    (1..=LONG).map(|version| line(version, "bob", &format!("{version}/year"))).collect()
}

fn set(operator: &Operator, user: &str, limit: &str) -> Result<String, String> {
    operator.try_ctl(&["limit", "set", "api", &format!("user={user}"), limit])
}

fn exported(operator: &Operator) -> String {
    operator.ctl(&["export", "limit"])
}

async fn limit(server: &Server, user: &str) -> u32 {
    let answer = server.client().await.check(request_for("api", &[("user", user)])).await.unwrap();
    answer.0.statuses[0].current_limit.as_ref().unwrap().requests_per_unit
}

fn kill(operator: Operator) {
    operator.server.signal("KILL");
    drop(operator);
}

/// The file is a mount of its own, as with `docker -v file:file` and with `subPath` of Kubernetes, so that no other file
/// can be renamed over it.
#[test]
fn a_file_that_is_a_mount_is_shortened_and_keeps_every_change() {
    for is_folder_read_only in [false, true] {
        let site = Site::new();
        let file = site.file();
        fs::write(&file, long_file()).unwrap();
        let start = || Operator::with(site.builder(&file).mounted_file(&file, is_folder_read_only));
        let operator = start();
        let long = fs::metadata(&file).unwrap().len();
        set(&operator, "eve", "7/year").unwrap();
        assert!(fs::metadata(&file).unwrap().len() < long, "the file was not shortened");
        set(&operator, "max", "8/year").unwrap();
        kill(operator);
        let expected =
            format!("limit|api|user=bob,{LONG}/year,\nlimit|api|user=eve,7/year,\nlimit|api|user=max,8/year,\n");
        assert_eq!(exported(&start()), expected);
        // Without the mount, and therefore for an earlier release, it is a usual file.
        assert_eq!(exported(&site.start()), expected);
        assert!(fs::read_to_string(&file).unwrap().lines().all(|line| !line.contains("copy")));
    }
}

#[test]
fn a_link_is_followed_and_not_replaced() {
    let site = Site::new();
    let (data, link) = (tempfile::tempdir().unwrap(), site.file());
    let real = data.path().join("overrides");
    fs::write(&real, long_file()).unwrap();
    symlink(&real, &link).unwrap();
    let operator = site.start();
    set(&operator, "eve", "7/year").unwrap();
    kill(operator);
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    let text = fs::read_to_string(&real).unwrap();
    assert!((text.lines().count() as u64) < LONG && text.contains("user=eve"), "{} lines", text.lines().count());
}

#[test]
fn everything_acknowledged_on_a_full_disk_survives() {
    let (site, disk) = (Site::new(), Disk::new(512));
    let file = disk.path().join("overrides");
    fs::write(&file, &long_file()[..300_000]).unwrap();
    let start = || Operator::with(site.builder(&file));
    let operator = start();
    set(&operator, "first", "1/year").unwrap();
    disk.fill();
    let mut acknowledged = Vec::new();
    let mut rejected = 0;
    for number in 0..100 {
        match set(&operator, &format!("u{number}"), "3/year") {
            Ok(_) => acknowledged.push(number),
            Err(error) => {
                assert!(error.contains("overrides cannot be stored"), "{error}");
                rejected += 1;
            }
        }
        if rejected > 3 {
            break;
        }
    }
    assert!(rejected > 3, "the disk is not full");
    let before = exported(&operator);
    kill(operator);
    disk.free();
    let operator = start();
    assert_eq!(exported(&operator), before);
    for number in acknowledged {
        assert!(before.contains(&format!("user=u{number},")), "{number}: {before}");
    }
    set(&operator, "last", "9/year").unwrap();
}

/// As in a rolling update, in which the new process must be ready before the old one ends.
#[tokio::test]
async fn the_second_process_follows_the_file_until_the_first_one_ends() {
    let site = Site::new();
    let first = site.start();
    set(&first, "bob", "10/year").unwrap();
    let second = site.start();
    assert_eq!(limit(&second.server, "bob").await, 10);
    assert!(second.server.get("/readyz").starts_with("ready\n"));
    let read_only = |operator: &Operator| operator.server.metric("sluicegate_overrides_read_only");
    assert_eq!((read_only(&first), read_only(&second)), (0.0, 1.0));
    assert!(second.server.get("/readyz").contains("read-only"), "{}", second.server.get("/readyz"));
    let error = set(&second, "eve", "1/year").unwrap_err();
    assert!(error.contains("another process holds") && error.contains(site.file().to_str().unwrap()), "{error}");
    let body = r#"{"changes": [{"target": {"switch": {"everything": true}}, "value": "off"}]}"#;
    let (code, answer) = second.call(crate::support::operator::OPERATE, "PutOverrides", body);
    assert_eq!((code, answer["code"].as_str()), (400, Some("FAILED_PRECONDITION")), "{answer}");
    assert!(!exported(&second).contains("eve"));
    // It follows the first process, also through a rewrite.
    set(&first, "bob", "20/year").unwrap();
    wait_for_async("the change of the first process", async || {
        (limit(&second.server, "bob").await == 20).then_some(())
    })
    .await;
    kill(first);
    wait_for("the second process to hold the file", || (read_only(&second) == 0.0).then_some(()));
    set(&second, "eve", "1/year").unwrap();
    let expected = "limit|api|user=bob,20/year,\nlimit|api|user=eve,1/year,\n";
    assert_eq!(exported(&second), expected);
    let third = site.start();
    assert_eq!((exported(&third).as_str(), read_only(&third)), (expected, 1.0));
    second.server.signal("TERM");
    wait_for("the third process to hold the file", || set(&third, "max", "3/year").ok());
    kill(third);
    drop(second);
    assert_eq!(exported(&site.start()), format!("{expected}limit|api|user=max,3/year,\n"));
}

/// A hundred lines of nonsense, among them one that an earlier release has accepted from a member.
#[tokio::test]
async fn lines_that_cannot_be_read_neither_stop_the_start_nor_take_memory() {
    let site = Site::new();
    let mut text = line(1, "bob", "10/year");
    text += "nonsense\n";
    let items = vec!["*a"; 120_000].join(", ");
    text += &line(2, "huge", &format!("{{a: &a [{}], b: [{items}]}}", "x".repeat(1_000)));
    text += &line(3, "eve", "11/year");
    fs::write(site.file(), &text).unwrap();
    let operator = site.start();
    assert_eq!((limit(&operator.server, "bob").await, limit(&operator.server, "eve").await), (10, 11));
    assert_eq!(limit(&operator.server, "huge").await, 2);
    let log = operator.server.log();
    for expected in ["skipped a line of the override journal", "user=huge", "too long"] {
        assert!(log.contains(expected), "{expected}: {log}");
    }
    assert_eq!(operator.server.metric("sluicegate_overrides_unreadable_total"), 1.0);
    let memory = operator.server.resident_memory();
    assert!(memory < 100 << 20, "{memory} bytes");
    set(&operator, "max", "12/year").unwrap();
    kill(operator);
    assert!(exported(&site.start()).contains("user=max"));
}

#[test]
fn another_file_is_not_taken_for_a_journal() {
    let site = Site::new();
    fs::write(site.file(), RULES).unwrap();
    let rules = site.rules.path().to_str().unwrap();
    let mut command = crate::support::server::command();
    command.args(["serve", "--rules", rules, "--store", "memory", "--grpc-addr", "127.0.0.1:0"]);
    command.args(["--http-addr", "127.0.0.1:0"]).env("SLUICEGATE__OVERRIDES__FILE", site.file());
    let output = command.output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && error.contains("invalid entry in override journal"), "{error}");
    assert_eq!(fs::read_to_string(site.file()).unwrap(), RULES, "the file was changed");
}

/// The recording has the same disk in many installations.
#[tokio::test]
async fn a_full_disk_gets_no_empty_recordings_and_lost_requests_are_counted() {
    let (site, disk) = (Site::new(), Disk::new(256));
    let traffic = disk.path().join("traffic");
    let builder = site.builder(&site.file()).set("record.share", "1");
    let server = builder.set("record.dir", traffic.to_str().unwrap()).start();
    let client = server.client().await;
    let files = || fs::read_dir(&traffic).unwrap().count();
    let ask = async |number: u64| {
        let request = Request::new("api").descriptor(descriptor(&[("user", &number.to_string())]));
        client.check(request).await.unwrap();
    };
    ask(0).await;
    wait_for("the first recording", || (files() == 1).then_some(()));
    disk.fill();
    let lost = || server.metric("sluicegate_recording_skipped_requests_total");
    for number in 1..=5 {
        let before = lost();
        wait_for_async("a request to be lost", async || {
            ask(number).await;
            (lost() > before).then_some(())
        })
        .await;
    }
    assert!(files() <= 2, "{} files", files());
    let log = server.log();
    assert_eq!(log.matches("cannot write recorded requests").count(), 1, "{log}");
    disk.free();
    let before = fs::read_dir(&traffic).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum::<u64>();
    wait_for_async("the recording to continue", async || {
        ask(7).await;
        let now = fs::read_dir(&traffic).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum::<u64>();
        (now > before).then_some(())
    })
    .await;
}
