//! Overrides in Redis, as methods of [`Redis`]: three keys of one slot, changed by one script and read a few times a
//! second.
//!
//! Their shard key is `directives`. A ring stores them on the node that is listed first, because the shard would move
//! when nodes are added or removed.

use redis::{Cmd, FromRedisValue, Value, from_redis_value};
use sluicegate_store::{
    StoreError,
    overrides::{Change, Cursor, MAX_CHANGES, OverrideChange, Update, Versioned, Write, WriteOutcome},
};
use tokio::task::{JoinHandle, yield_now};

use super::Redis;

const SCRIPT: &str = include_str!("overrides.lua");
/// Number of texts that one call reads (`COUNT` of `HSCAN`).
const SCAN_COUNT: usize = 1_000;
/// Seconds after which texts that were staged for an empty store expire if they are not adopted.
const STAGING_TTL_SECONDS: u32 = 120;

impl Redis {
    /// Reads all overrides in pages and passes each page to `read_page`. Returns a cursor at the last change, or `None`
    /// if there was no change or Redis has lost overrides.
    ///
    /// Changes that are made meanwhile may or may not be included; they follow the cursor.
    ///
    /// # Errors
    /// Fails if Redis does not answer or its reply is invalid.
    pub async fn overrides(&self, mut read_page: impl FnMut(Vec<Versioned>)) -> Result<Option<Cursor>, StoreError> {
        let Some(cursor) = self.overrides_cursor().await? else {
            return Ok(None);
        };
        let mut next = Some(self.scan_texts("0".to_owned()));
        while let Some(page) = next {
            let reply = page.await.unwrap_or(Err(StoreError::Unavailable))?;
            let (scan_cursor, texts): (String, Vec<(String, String)>) = parse(reply)?;
            // The server reads the next page while this one is processed.
            next = if scan_cursor == "0" { None } else { Some(self.scan_texts(scan_cursor)) };
            yield_now().await;
            let overrides = texts.into_iter().filter_map(|(target, text)| {
                let (version, text) = text.split_once('|')?;
                Some((target, version.parse().ok()?, text.to_owned()))
            });
            read_page(overrides.collect());
        }
        Ok(Some(cursor))
    }

    /// Starts a task that reads the page of texts at a cursor of `HSCAN`.
    fn scan_texts(&self, scan_cursor: String) -> JoinHandle<Result<Value, StoreError>> {
        let this = self.clone();
        tokio::spawn(async move {
            let mut scan = redis::cmd("HSCAN");
            scan.arg(this.override_key("texts")).arg(scan_cursor).arg("COUNT").arg(SCAN_COUNT);
            this.override_command(&scan).await
        })
    }

    /// Returns a cursor at the last change, or `None` if there was no change or Redis has lost overrides.
    ///
    /// # Errors
    /// Fails if Redis does not answer or rejects the command.
    pub async fn overrides_cursor(&self) -> Result<Option<Cursor>, StoreError> {
        Ok(parse_cursor(&self.override_script("mark", "", |_| {}).await?))
    }

    /// Returns the changes since `cursor`, at most [`MAX_CHANGES`].
    ///
    /// # Errors
    /// Fails if Redis does not answer or its reply is invalid.
    pub async fn overrides_since(&self, cursor: &Cursor) -> Result<Update, StoreError> {
        let reply = self
            .override_script("since", "", |call| {
                call.arg(&cursor.epoch).arg(cursor.version).arg(&cursor.id).arg(MAX_CHANGES);
            })
            .await?;
        let (status, fields) = split(&reply)?;
        Ok(match status.as_str() {
            "nothing" => Update::Unchanged,
            "other" => Update::Diverged,
            "empty" => Update::Empty,
            "behind" => Update::Behind,
            "changes" => Update::Changes(parse_changes(fields.first().ok_or(StoreError::Rejected)?)?),
            _ => return Err(StoreError::Rejected),
        })
    }

    /// Writes a change atomically, with its id and the information for the audit log (`head`).
    ///
    /// Returns `None`, without writing, if the cursor is not at the last change of the store. The log is trimmed to about
    /// `max_log_length` entries.
    ///
    /// # Errors
    /// Fails if Redis does not answer or its reply is invalid.
    pub async fn put_overrides(
        &self,
        (id, head): (&str, &str),
        writes: &[Write],
        cursor: &Cursor,
        max_log_length: usize,
    ) -> Result<Option<WriteOutcome>, StoreError> {
        let epoch = format!("{:016x}", rand::random::<u64>());
        let reply = self
            .override_script("write", "", |call| {
                call.arg(id).arg(head).arg(max_log_length).arg(&epoch);
                call.arg(&cursor.epoch).arg(cursor.version).arg(&cursor.id);
                for Write { target, text, expected } in writes {
                    call.arg(target);
                    match expected {
                        Some(version) => call.arg(version),
                        None => call.arg(""),
                    };
                    match text {
                        Some(text) => call.arg("1").arg(text),
                        None => call.arg("0").arg(""),
                    };
                }
            })
            .await?;
        let (status, fields) = split(&reply)?;
        match (status.as_str(), fields) {
            ("moved", []) => Ok(None),
            ("conflict", [target, version]) => {
                let target = parse(target.clone())?;
                let version = parse(version.clone())?;
                Ok(Some(WriteOutcome::Conflict { target, version }))
            }
            ("done", [epoch, version, change]) => {
                let cursor =
                    Cursor { epoch: parse(epoch.clone())?, version: parse(version.clone())?, id: id.to_owned() };
                Ok(Some(WriteOutcome::Done(cursor, parse_change(change)?)))
            }
            _ => Err(StoreError::Rejected),
        }
    }

    /// Restores all overrides into an empty store. Returns false, without changing it, if the store is not empty.
    ///
    /// # Errors
    /// Fails if Redis does not answer or its reply is invalid.
    pub async fn restore_overrides(
        &self,
        cursor: &Cursor,
        head: &str,
        overrides: &[Versioned],
    ) -> Result<bool, StoreError> {
        let staging_id = format!("{:016x}", rand::random::<u64>());
        for texts in overrides.chunks(MAX_CHANGES) {
            self.override_script("gather", &staging_id, |call| {
                call.arg(STAGING_TTL_SECONDS);
                for (target, version, text) in texts {
                    call.arg(target).arg(format!("{version}|{text}"));
                }
            })
            .await?;
        }
        let reply = self
            .override_script("adopt", &staging_id, |call| {
                call.arg(&cursor.epoch).arg(cursor.version).arg(&cursor.id).arg(head);
            })
            .await?;
        Ok(split(&reply)?.0 == "done")
    }

    /// Returns up to `max_changes` changes with a version below `before`, the latest first. `u64::MAX` means the end of
    /// the log.
    ///
    /// # Errors
    /// Fails if Redis does not answer or its reply is invalid.
    pub async fn override_log(&self, before: u64, max_changes: usize) -> Result<Vec<Change>, StoreError> {
        let mut range = redis::cmd("XREVRANGE");
        let end = if before == u64::MAX { "+".to_owned() } else { format!("({before}-0") };
        range.arg(self.override_key("log")).arg(end).arg("-").arg("COUNT").arg(max_changes);
        parse_changes(&self.override_command(&range).await?)
    }

    /// Stores a rule set under its digest.
    ///
    /// # Errors
    /// Fails if Redis does not answer or rejects the command.
    pub async fn put_rule_set(&self, digest: &str, text: &str) -> Result<(), StoreError> {
        let mut set = redis::cmd("SET");
        set.arg(self.override_key(&format!("set:{digest}"))).arg(text);
        self.override_command(&set).await.map(drop)
    }

    /// Returns the rule set with this digest, or `None` if there is none.
    ///
    /// # Errors
    /// Fails if Redis does not answer or its reply is invalid.
    pub async fn get_rule_set(&self, digest: &str) -> Result<Option<String>, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(self.override_key(&format!("set:{digest}")));
        parse(self.override_command(&get).await?)
    }

    /// Deletes the rule set with this digest.
    ///
    /// # Errors
    /// Fails if Redis does not answer or rejects the command.
    pub async fn delete_rule_set(&self, digest: &str) -> Result<(), StoreError> {
        let mut delete = redis::cmd("DEL");
        delete.arg(self.override_key(&format!("set:{digest}")));
        self.override_command(&delete).await.map(drop)
    }

    pub(super) fn override_key(&self, name: &str) -> String {
        format!("{}{{directives}}{name}", self.main.key_prefix())
    }

    async fn override_script(
        &self,
        operation: &str,
        staging_id: &str,
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<Value, StoreError> {
        // The script is sent with each call, because calls are rare (a few per second).
        let mut command = redis::cmd("EVAL");
        command.arg(SCRIPT).arg(4);
        for name in ["texts", "log", "head"] {
            command.arg(self.override_key(name));
        }
        command.arg(self.override_key(&format!("gathered:{staging_id}"))).arg(operation);
        arguments(&mut command);
        self.override_command(&command).await
    }

    pub(super) async fn override_command(&self, command: &Cmd) -> Result<Value, StoreError> {
        let batcher = self.main.overrides_batcher(self.override_key("").as_bytes()).ok_or(StoreError::Unavailable)?;
        self.main.command(batcher, command).await
    }
}

fn parse<T: FromRedisValue>(value: Value) -> Result<T, StoreError> {
    from_redis_value(value).map_err(|_| StoreError::Rejected)
}

/// Splits a reply into its status and the fields after it.
fn split(reply: &Value) -> Result<(String, &[Value]), StoreError> {
    let Value::Array(values) = reply else {
        return Err(StoreError::Rejected);
    };
    let (status, fields) = values.split_first().ok_or(StoreError::Rejected)?;
    Ok((parse(status.clone())?, fields))
}

fn parse_cursor(reply: &Value) -> Option<Cursor> {
    let (_, [epoch, version, id]) = split(reply).ok()? else {
        return None;
    };
    Some(Cursor {
        epoch: parse(epoch.clone()).ok()?,
        version: parse(version.clone()).ok()?,
        id: parse(id.clone()).ok()?,
    })
}

fn parse_changes(reply: &Value) -> Result<Vec<Change>, StoreError> {
    let Value::Array(entries) = reply else {
        return Err(StoreError::Rejected);
    };
    entries.iter().map(parse_change).collect()
}

/// Parses an entry of the stream, which has a version and fields.
fn parse_change(entry: &Value) -> Result<Change, StoreError> {
    let (version, fields): (String, Vec<(String, String)>) = parse(entry.clone())?;
    let version = version.split('-').next().and_then(|version| version.parse().ok()).ok_or(StoreError::Rejected)?;
    let mut change = Change { version, ..Change::default() };
    for (name, value) in fields {
        match (name.as_str(), change.changes.last_mut()) {
            ("id", _) => change.id = value,
            ("head", _) => change.info = value,
            ("target", _) => change.changes.push(OverrideChange { target: value, ..OverrideChange::default() }),
            ("before", Some(part)) => part.before = Some(value),
            ("after", Some(part)) => part.after = Some(value),
            _ => {}
        }
    }
    Ok(change)
}

/// Parses a reply as the answer to each command, for a fuzz target.
#[cfg(any(test, feature = "fuzz"))]
pub(super) fn read_any(reply: &Value) {
    let _ = (parse_cursor(reply), parse_changes(reply));
    if let Ok((_, [changes, ..])) = split(reply) {
        let _ = parse_changes(changes);
    }
    let _ = parse::<(String, Vec<(String, String)>)>(reply.clone());
}
