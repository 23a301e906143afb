//! Rules that change while they are in use: changes take effect within a second, no request is dropped, and an invalid
//! set changes nothing.

use std::{
    fs,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    time::SystemTime,
};

use crate::support::{Server, request_for, rules, wait_for_async};

fn text(domain: &str, limit: u32) -> String {
    format!("domain: {domain}\ndescriptors: [{{key: k, rate_limit: {{unit: year, requests_per_unit: {limit}}}}}]\n")
}

/// Returns the limit in force, or `None` if the domain is unknown.
async fn limit(server: &Server, domain: &str) -> Option<u32> {
    let answer = server.client().await.check(request_for(domain, &[("k", "v")])).await.unwrap();
    answer.0.statuses[0].current_limit.as_ref().map(|limit| limit.requests_per_unit)
}

async fn wait_for_limit(server: &Server, domain: &str, expected: Option<u32>) {
    let condition = format!("{domain} to have the limit {expected:?}");
    wait_for_async(&condition, async || (limit(server, domain).await == expected).then_some(())).await;
}

#[tokio::test]
async fn changed_added_and_removed_files_take_effect() {
    let folder = rules(&[("a.yaml", &text("a", 1))]);
    let server = Server::start(folder.path(), "memory");
    assert_eq!(limit(&server, "a").await, Some(1));
    fs::write(folder.path().join("a.yaml"), text("a", 20)).unwrap();
    wait_for_limit(&server, "a", Some(20)).await;
    fs::write(folder.path().join("b.yml"), text("b", 5)).unwrap();
    wait_for_limit(&server, "b", Some(5)).await;
    assert!(server.get("/rlconfig").contains("b.k: unit=YEAR requests_per_unit=5"));
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    wait_for_limit(&server, "a", None).await;
    // Each change is loaded once.
    assert_eq!(server.metric("ratelimit_service_config_load_success"), 4.0);
    let misplaced = text("c", 3).replace("}}", ", shadow_mode: true}}");
    fs::write(folder.path().join("c.yaml"), misplaced).unwrap();
    wait_for_limit(&server, "c", Some(3)).await;
    wait_for_async("the warning to be logged", async || {
        server.log().contains("shadow_mode has no effect here").then_some(())
    })
    .await;
}

#[tokio::test]
async fn an_invalid_set_changes_nothing_and_is_reported() {
    let folder = rules(&[("a.yaml", &text("a", 1))]);
    let server = Server::start(folder.path(), "memory");
    fs::write(folder.path().join("b.yaml"), "domain: b\ndescriptors: [{key: k, rate_limit: {unit: fortnight}}]\n")
        .unwrap();
    wait_for_async("the error to be counted", async || {
        (server.metric("ratelimit_service_config_load_error") == 1.0).then_some(())
    })
    .await;
    assert_eq!((limit(&server, "a").await, limit(&server, "b").await), (Some(1), None));
    let message = "b.yaml:2:43: unit \"fortnight\" is not one of second";
    let page = server.get("/rlconfig");
    assert!(page.contains(message) && page.contains("# last error: "), "{page}");
    assert!(server.log().contains("unit \\\"fortnight\\\" is not one of"), "{}", server.log());
    fs::write(folder.path().join("b.yaml"), text("b", 7)).unwrap();
    wait_for_limit(&server, "b", Some(7)).await;
    assert!(!server.get("/rlconfig").contains("last error"));
    fs::remove_dir_all(folder.path()).unwrap();
    wait_for_async("the loss of the directory to be counted", async || {
        (server.metric("ratelimit_service_config_load_error") == 2.0).then_some(())
    })
    .await;
    assert_eq!(limit(&server, "b").await, Some(7));
}

/// Tools that copy files with their times, such as `rsync -t` and `cp -p`, can keep the size and the time.
#[tokio::test]
async fn a_change_that_keeps_size_and_modification_time_takes_effect() {
    let folder = rules(&[("a.yaml", &text("a", 1))]);
    let path = folder.path().join("a.yaml");
    let set_time = |path: &Path| {
        let file = fs::File::options().write(true).open(path).unwrap();
        file.set_modified(SystemTime::UNIX_EPOCH).unwrap();
    };
    set_time(&path);
    let server = Server::start(folder.path(), "memory");
    assert_eq!(limit(&server, "a").await, Some(1));
    let new = folder.path().join("new");
    fs::write(&new, text("a", 2)).unwrap();
    set_time(&new);
    fs::rename(&new, &path).unwrap();
    wait_for_limit(&server, "a", Some(2)).await;
    fs::write(&path, text("a", 3)).unwrap();
    set_time(&path);
    wait_for_limit(&server, "a", Some(3)).await;
}

#[tokio::test]
async fn a_file_that_cannot_be_read_is_an_error_and_an_empty_folder_a_warning() {
    let folder = rules(&[("a.yaml", &text("a", 1))]);
    let server = Server::start(folder.path(), "memory");
    let link = folder.path().join("b.yaml");
    std::os::unix::fs::symlink("nowhere", &link).unwrap();
    wait_for_async("the error to be shown", async || {
        server.get("/rlconfig").contains("b.yaml: cannot read the file: No such file or directory").then_some(())
    })
    .await;
    fs::write(folder.path().join("nowhere"), text("b", 2)).unwrap();
    wait_for_limit(&server, "b", Some(2)).await;
    fs::remove_file(&link).unwrap();
    wait_for_limit(&server, "b", None).await;
    fs::remove_file(folder.path().join("a.yaml")).unwrap();
    wait_for_async("the warning to be logged", async || {
        server.log().lines().any(|line| line.contains("WARN") && line.contains("contains no *.yaml file")).then_some(())
    })
    .await;
}

/// Kubernetes mounts files as links to `..data/…`, and swaps `..data` by a rename.
#[tokio::test]
async fn a_config_map_swap_takes_effect() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name);
    let version = |name: &str, limit| {
        fs::create_dir(at(name)).unwrap();
        fs::write(at(name).join("a.yaml"), text("a", limit)).unwrap();
    };
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(Path::new(target), at(name)).unwrap();
    version("..v1", 1);
    link("..v1", "..data");
    link("..data/a.yaml", "a.yaml");
    let server = Server::start(folder.path(), "memory");
    assert_eq!(limit(&server, "a").await, Some(1));
    version("..v2", 2);
    link("..v2", "..data_tmp");
    fs::rename(at("..data_tmp"), at("..data")).unwrap();
    wait_for_limit(&server, "a", Some(2)).await;
}

#[tokio::test]
async fn counters_continue_and_no_request_is_dropped() {
    let folder = rules(&[("a.yaml", &text("a", 1_000_000))]);
    let server = Server::start(folder.path(), "memory");
    let client = server.client().await;
    let stop = Arc::new(AtomicBool::new(false));
    let stopped = Arc::clone(&stop);
    let load = tokio::spawn(async move {
        let mut sent = 0;
        while !stopped.load(Relaxed) {
            assert!(client.check(request_for("a", &[("k", "v")])).await.unwrap().allowed());
            sent += 1;
        }
        (sent, client)
    });
    for limit in [2_000_000, 3_000_000] {
        fs::write(folder.path().join("a.yaml"), text("a", limit)).unwrap();
        wait_for_async("the change to take effect", async || {
            server.get("/rlconfig").contains(&format!("requests_per_unit={limit},")).then_some(())
        })
        .await;
    }
    stop.store(true, Relaxed);
    let (sent, client) = load.await.unwrap();
    let last = client.check(request_for("a", &[("k", "v")])).await.unwrap();
    assert_eq!(last.remaining(), Some(3_000_000 - sent - 1));
    let total = "ratelimit_service_rate_limit_total_hits{domain=\"a\",key1=\"k\"}";
    assert_eq!(server.metric(total), f64::from(sent + 1), "an unchanged rule keeps its statistics");
}
