//! What operators said, as Redis keeps it: one history, which nobody continues who knows another.

use std::time::Duration;

use sluicegate::store::{
    Redis,
    overrides::{Cursor, Update, Versioned, Write, WriteOutcome},
};

use crate::{redis::stores::connect, support::RedisServer};

const TEXTS: &str = "sluicegate:{directives}texts";
const LOG: &str = "sluicegate:{directives}log";

fn part(target: &str, text: &str, expected: Option<u64>) -> Write {
    Write { target: target.into(), text: Some(text.into()), expected }
}

/// Says something under this id, knowing what the mark says.
async fn say(redis: &Redis, id: &str, part: Write, known: &Cursor, exactly: bool) -> Option<WriteOutcome> {
    redis.put_overrides((id, "head"), &[part], (known, exactly), 10_000).await.unwrap()
}

/// The mark after a change that is made.
async fn said(redis: &Redis, id: &str, target: &str, known: &Cursor) -> Cursor {
    match say(redis, id, part(target, id, None), known, false).await {
        Some(WriteOutcome::Done(mark, _)) => mark,
        Some(WriteOutcome::Conflict { .. }) | None => panic!("{id} was not said"),
    }
}

async fn all(redis: &Redis) -> (Option<Cursor>, Vec<Versioned>) {
    let mut all = Vec::new();
    let mark = redis.overrides(|kept| all.extend(kept)).await.unwrap();
    all.sort();
    (mark, all)
}

fn kept(target: &str, version: u64, text: &str) -> Versioned {
    (target.into(), version, text.into())
}

async fn news(redis: &Redis, mark: &Cursor) -> String {
    match redis.overrides_since(mark).await.unwrap() {
        Update::Nothing => "nothing".into(),
        Update::Other => "other".into(),
        Update::Empty => "empty".into(),
        Update::Behind => "behind".into(),
        Update::Changes(changes) => changes.iter().map(|change| change.id.as_str()).collect::<Vec<_>>().join(" "),
    }
}

#[tokio::test]
async fn nobody_continues_a_history_who_knows_another() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    assert_eq!(news(redis, &Cursor::default()).await, "empty");
    let first = said(redis, "one", "a", &Cursor::default()).await;
    let second = said(redis, "two", "b", &first).await;
    let third = said(redis, "three", "a", &first).await;
    assert_eq!([first.version, second.version, third.version], [1, 2, 3]);
    assert_eq!(all(redis).await, (Some(third.clone()), vec![kept("a", 3, "three"), kept("b", 2, "two")]));

    let elsewhere = |mark: &Cursor| Cursor { id: "elsewhere".into(), ..mark.clone() };
    let epoch = |mark: &Cursor| Cursor { epoch: "another".into(), ..mark.clone() };
    let later = Cursor { version: 4, ..third.clone() };
    for (known, expected) in [
        (&Cursor { epoch: third.epoch.clone(), ..Cursor::default() }, "other"),
        (&first, "two three"),
        (&third, "nothing"),
        (&later, "behind"),
        (&elsewhere(&first), "other"),
        (&elsewhere(&third), "other"),
        (&epoch(&first), "other"),
        (&epoch(&third), "other"),
    ] {
        assert_eq!(news(redis, known).await, expected, "{known:?}");
    }
    for known in [&later, &elsewhere(&third), &epoch(&first), &epoch(&third)] {
        assert!(say(redis, "four", part("a", "x", None), known, false).await.is_none(), "{known:?}");
    }
    // What must be the very next is not said after another.
    assert!(say(redis, "four", part("a", "x", None), &second, true).await.is_none());
    for (target, expected, version) in [("a", 1, 3), ("a", 0, 3), ("c", 1, 0)] {
        match say(redis, "four", part(target, "x", Some(expected)), &third, false).await {
            Some(WriteOutcome::Conflict { target: met, version: is }) => assert_eq!((&*met, is), (target, version)),
            Some(WriteOutcome::Done(..)) | None => panic!("{target} {expected}"),
        }
    }
    assert!(say(redis, "four", part("a", "x", Some(3)), &third, true).await.is_some());
    // Whoever knows a change that the log has no more cannot be told what came next.
    server.cli(&["XTRIM", LOG, "MAXLEN", "2"]);
    assert_eq!([news(redis, &first).await, news(redis, &third).await], ["other", "four"]);
}

#[tokio::test]
async fn the_log_is_bounded() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let mut known = Cursor::default();
    for _ in 0..400 {
        let parts = [part("a", "x", None)];
        let written = redis.store().put_overrides(("id", "head"), &parts, (&known, true), 10).await.unwrap();
        let Some(WriteOutcome::Done(mark, _)) = written else {
            panic!("it was not said");
        };
        known = mark;
    }
    let entries: u32 = server.cli(&["XLEN", LOG]).parse().unwrap();
    assert!((10..200).contains(&entries), "{entries}");
}

#[tokio::test]
async fn what_was_lost_is_brought_back_whole_or_not_at_all() {
    let server = RedisServer::start();
    let redis = connect(&server.url(), Duration::from_secs(1)).await;
    let redis = redis.store();
    let known = said(redis, "one", "a", &Cursor::default()).await;
    let known = said(redis, "two", "b", &known).await;
    let (_, texts) = all(redis).await;
    // There it is already: what was on its way goes by itself.
    assert!(!redis.restore_overrides(&known, "head", &[kept("z", 9, "z")]).await.unwrap());
    assert_eq!(all(redis).await, (Some(known.clone()), texts.clone()));
    let gathered = server.cli(&["KEYS", "*gathered*"]);
    let seconds: i64 = server.cli(&["TTL", &gathered]).parse().unwrap();
    assert!((1..=120).contains(&seconds), "{seconds}");

    server.cli(&["FLUSHALL"]);
    assert!(redis.restore_overrides(&known, "head", &texts).await.unwrap());
    assert_eq!((all(redis).await, server.cli(&["TTL", TEXTS])), ((Some(known.clone()), texts), "-1".into()));
    // Others who know the same go on from there.
    assert_eq!(news(redis, &known).await, "nothing");
    let next = said(redis, "three", "c", &known).await;
    assert_eq!((next.version, news(redis, &known).await), (3, "three".into()));

    // A server that evicts leaves a part: that is as good as nothing, and the next beginning is without it.
    server.cli(&["HDEL", TEXTS, "a"]);
    assert_eq!((news(redis, &next).await, redis.overrides_cursor().await.unwrap()), ("empty".into(), None));
    let anew = said(redis, "four", "d", &Cursor::default()).await;
    assert_eq!(all(redis).await, (Some(anew), vec![kept("d", 1, "four")]));
}
