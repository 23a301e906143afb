//! Overrides in Redis: one history, which a writer that knows another history cannot continue.

use std::time::Duration;

use sluicegate::store::{
    Redis,
    overrides::{Change, Cursor, Update, Versioned, Write, WriteOutcome},
};

use crate::{
    redis::stores::connect,
    support::{RedisCluster, RedisServer, ring},
};

const TEXTS: &str = "sluicegate:{directives}texts";
const LOG: &str = "sluicegate:{directives}log";

fn write(target: &str, text: &str, expected: Option<u64>) -> Write {
    Write { target: target.into(), text: Some(text.into()), expected }
}

/// Writes a change with this id, made by a writer that knows the history up to a cursor.
async fn try_put(redis: &Redis, id: &str, write: Write, known: &Cursor) -> Option<WriteOutcome> {
    redis.put_overrides((id, "head"), &[write], known, 10_000).await.unwrap()
}

/// Writes a change that must succeed, and returns the cursor after it.
async fn put(redis: &Redis, id: &str, target: &str, known: &Cursor) -> Cursor {
    match try_put(redis, id, write(target, id, None), known).await {
        Some(WriteOutcome::Done(cursor, _)) => cursor,
        Some(WriteOutcome::Conflict { .. }) | None => panic!("the change {id} was not written"),
    }
}

async fn stored(redis: &Redis) -> (Option<Cursor>, Vec<Versioned>) {
    let mut overrides = Vec::new();
    let cursor = redis.overrides(|versioned| overrides.extend(versioned)).await.unwrap();
    overrides.sort();
    (cursor, overrides)
}

fn versioned(target: &str, version: u64, text: &str) -> Versioned {
    (target.into(), version, text.into())
}

async fn update_since(redis: &Redis, cursor: &Cursor) -> String {
    match redis.overrides_since(cursor).await.unwrap() {
        Update::Unchanged => "unchanged".into(),
        Update::Diverged => "diverged".into(),
        Update::Empty => "empty".into(),
        Update::Behind => "behind".into(),
        Update::Changes(changes) => changes.iter().map(|change| change.id.as_str()).collect::<Vec<_>>().join(" "),
    }
}

#[tokio::test]
async fn a_writer_that_knows_another_history_cannot_continue_this_one() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    assert_eq!(update_since(redis, &Cursor::default()).await, "empty");
    let first = put(redis, "one", "a", &Cursor::default()).await;
    let second = put(redis, "two", "b", &first).await;
    let third = put(redis, "three", "a", &second).await;
    assert_eq!([first.version, second.version, third.version], [1, 2, 3]);
    assert_eq!(stored(redis).await, (Some(third.clone()), vec![versioned("a", 3, "three"), versioned("b", 2, "two")]));

    let with_other_id = |cursor: &Cursor| Cursor { id: "elsewhere".into(), ..cursor.clone() };
    let with_other_epoch = |cursor: &Cursor| Cursor { epoch: "another".into(), ..cursor.clone() };
    let later = Cursor { version: 4, ..third.clone() };
    for (known, expected) in [
        (&Cursor { epoch: third.epoch.clone(), ..Cursor::default() }, "diverged"),
        (&first, "two three"),
        (&third, "unchanged"),
        (&later, "behind"),
        (&with_other_id(&first), "diverged"),
        (&with_other_id(&third), "diverged"),
        (&with_other_epoch(&first), "diverged"),
        (&with_other_epoch(&third), "diverged"),
    ] {
        assert_eq!(update_since(redis, known).await, expected, "{known:?}");
    }
    for known in [&Cursor::default(), &second, &later, &with_other_id(&third), &with_other_epoch(&third)] {
        assert!(try_put(redis, "four", write("a", "x", None), known).await.is_none(), "{known:?}");
    }
    for (target, expected, version) in [("a", 1, 3), ("a", 0, 3), ("c", 1, 0)] {
        match try_put(redis, "four", write(target, "x", Some(expected)), &third).await {
            Some(WriteOutcome::Conflict { target: actual_target, version: actual_version }) => {
                assert_eq!((&*actual_target, actual_version), (target, version));
            }
            Some(WriteOutcome::Done(..)) | None => panic!("{target} {expected}"),
        }
    }
    assert!(try_put(redis, "four", write("a", "x", Some(3)), &third).await.is_some());
    // If the last known change was trimmed from the log, the changes after it cannot be listed.
    server.cli(&["XTRIM", LOG, "MAXLEN", "2"]);
    assert_eq!([update_since(redis, &first).await, update_since(redis, &third).await], ["diverged", "four"]);
}

#[tokio::test]
async fn the_log_is_bounded() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let mut known = Cursor::default();
    for _ in 0..400 {
        let parts = [write("a", "x", None)];
        let written = redis.store().put_overrides(("id", "head"), &parts, &known, 10).await.unwrap();
        let Some(WriteOutcome::Done(cursor, _)) = written else {
            panic!("the change was not written");
        };
        known = cursor;
    }
    let entries: u32 = server.cli(&["XLEN", LOG]).parse().unwrap();
    assert!((10..200).contains(&entries), "{entries}");
}

#[tokio::test]
async fn lost_overrides_are_restored_completely_or_not_at_all() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    let known = put(redis, "one", "a", &Cursor::default()).await;
    let known = put(redis, "two", "b", &known).await;
    let (_, texts) = stored(redis).await;
    // The overrides still exist, so that nothing is restored, and the uploaded copy expires.
    assert!(!redis.restore_overrides(&known, "head", &[versioned("z", 9, "z")]).await.unwrap());
    assert_eq!(stored(redis).await, (Some(known.clone()), texts.clone()));
    let gathered = server.cli(&["KEYS", "*gathered*"]);
    let seconds: i64 = server.cli(&["TTL", &gathered]).parse().unwrap();
    assert!((1..=120).contains(&seconds), "{seconds}");

    server.cli(&["FLUSHALL"]);
    assert!(redis.restore_overrides(&known, "head", &texts).await.unwrap());
    assert_eq!((stored(redis).await, server.cli(&["TTL", TEXTS])), ((Some(known.clone()), texts), "-1".into()));
    // Others that know the same history continue it.
    assert_eq!(update_since(redis, &known).await, "unchanged");
    let next = put(redis, "three", "c", &known).await;
    assert_eq!((next.version, update_since(redis, &known).await), (3, "three".into()));

    // A server that evicts keys leaves incomplete overrides. They count as none, and the next history starts without
    // them.
    server.cli(&["HDEL", TEXTS, "a"]);
    assert_eq!((update_since(redis, &next).await, redis.overrides_cursor().await.unwrap()), ("empty".into(), None));
    let restarted = put(redis, "four", "d", &Cursor::default()).await;
    assert_eq!(stored(redis).await, (Some(restarted), vec![versioned("d", 1, "four")]));
}

#[tokio::test]
async fn the_log_has_pages_with_the_texts_before_and_after_each_change() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    let known = put(redis, "one", "a", &Cursor::default()).await;
    let known = put(redis, "two", "b", &known).await;
    put(redis, "three", "a", &known).await;
    let log = redis.override_log(u64::MAX, 10).await.unwrap();
    let ids = |changes: &[Change]| changes.iter().map(|change| change.id.clone()).collect::<Vec<_>>();
    assert_eq!(ids(&log), ["three", "two", "one"]);
    assert_eq!(ids(&redis.override_log(3, 10).await.unwrap()), ["two", "one"]);
    assert_eq!(ids(&redis.override_log(3, 1).await.unwrap()), ["two"]);
    let texts = |change: &Change| (change.changes[0].before.clone(), change.changes[0].after.clone());
    assert_eq!(texts(&log[0]), (Some("one".to_owned()), Some("three".to_owned())));
    assert_eq!(texts(&log[2]), (None, Some("one".to_owned())));
}

#[tokio::test]
async fn a_rule_set_is_stored_until_it_is_deleted() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    redis.put_rule_set("d1", "rules").await.unwrap();
    assert_eq!(redis.get_rule_set("d1").await.unwrap().as_deref(), Some("rules"));
    redis.delete_rule_set("d1").await.unwrap();
    assert_eq!(redis.get_rule_set("d1").await.unwrap(), None);
}

#[tokio::test]
async fn instances_exchange_reports_while_one_of_them_reads() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    let idle = redis.exchange_activity("one", None, false, &[]).await.unwrap();
    assert!(!idle.is_read && idle.reports.is_empty());
    let first = redis.exchange_activity("reader", None, true, &[]).await.unwrap();
    assert!(first.is_read && first.reports.is_empty());
    let own = redis.exchange_activity("one", Some(b"report"), false, &[]).await.unwrap();
    assert!(own.is_read && own.reports.is_empty());
    let read = redis.exchange_activity("reader", None, true, &[]).await.unwrap();
    assert_eq!(read.reports, [("one".to_owned(), b"report".to_vec())]);
    let read = redis.exchange_activity("reader", None, true, &["one".to_owned()]).await.unwrap();
    assert!(read.reports.is_empty());
}

/// So that nodes can be added behind it.
#[tokio::test]
async fn the_first_node_of_a_ring_has_the_overrides() {
    let (nodes, _) = ring(3);
    for (first, node) in nodes.iter().enumerate() {
        let hosts: Vec<_> =
            nodes.iter().cycle().skip(first).take(3).map(|host| format!("127.0.0.1:{}", host.port)).collect();
        let redis = connect(&format!("redis+ring://{}", hosts.join(",")), Duration::from_secs(1)).await;
        put(redis.store(), "one", "a", &Cursor::default()).await;
        assert_eq!(node.cli(&["exists", TEXTS]), "1");
        node.cli(&["flushall"]);
    }
}

/// No call about overrides is redirected.
#[tokio::test]
async fn the_owner_of_their_slot_has_the_overrides_of_a_cluster() {
    let cluster = RedisCluster::start();
    let redis = connect(&cluster.url(), Duration::from_secs(1)).await;
    put(redis.store(), "one", "a", &Cursor::default()).await;
    let owner = cluster.owner(TEXTS);
    for (index, node) in cluster.nodes.iter().enumerate() {
        let stats = node.cli(&["info", "commandstats"]);
        assert_eq!(stats.contains("cmdstat_eval:"), index == owner, "{stats}");
    }
}
