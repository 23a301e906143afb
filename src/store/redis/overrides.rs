//! What operators have said, in Redis: three keys of one slot, changed by one script and read a few times a second.
//!
//! They are where the shard `overrides` is. On a ring, where a shard moves as nodes come and go, they are on the node that is
//! listed first.

use redis::{Cmd, FromRedisValue, Value, from_redis_value};
use tokio::task::yield_now;

use super::Redis;
use crate::store::{
    StoreError,
    overrides::{Change, Cursor, MAX_CHANGES, OverrideChange, Update, Versioned, Write, WriteOutcome},
};

const SCRIPT: &str = include_str!("overrides.lua");
/// Texts that one call reads.
const SCANNED: usize = 1_000;
/// What was gathered for an empty store, and never became its content, is gone after so many seconds.
const GATHERED: u32 = 120;

impl Redis {
    /// The last change, and all that is kept, a part at a time; `None` where there is nothing. What changes meanwhile may
    /// be in it or not: it is what comes after the mark.
    pub async fn overrides(&self, mut each: impl FnMut(Vec<Versioned>)) -> Result<Option<Cursor>, StoreError> {
        let Some(mark) = self.overrides_cursor().await? else {
            return Ok(None);
        };
        let scan = |cursor: String| {
            let this = self.clone();
            tokio::spawn(async move {
                let mut scan = redis::cmd("HSCAN");
                scan.arg(this.override_key("texts")).arg(cursor).arg("COUNT").arg(SCANNED);
                this.override_command(&scan).await
            })
        };
        let mut next = Some(scan("0".to_owned()));
        while let Some(page) = next {
            let reply = page.await.unwrap_or(Err(StoreError::Unavailable))?;
            let (cursor, texts): (String, Vec<(String, String)>) = read(reply)?;
            // While this page is read, the server finds the next.
            next = (cursor != "0").then(|| scan(cursor));
            yield_now().await;
            let kept = texts.into_iter().filter_map(|(target, text)| {
                let (version, text) = text.split_once('|')?;
                Some((target, version.parse().ok()?, text.to_owned()))
            });
            each(kept.collect());
        }
        Ok(Some(mark))
    }

    /// The last change.
    pub async fn overrides_cursor(&self) -> Result<Option<Cursor>, StoreError> {
        Ok(read_cursor(&self.override_script("mark", "", |_| {}).await?))
    }

    /// What there is that one who knows this has not heard.
    pub async fn overrides_since(&self, mark: &Cursor) -> Result<Update, StoreError> {
        let reply = self
            .override_script("since", "", |call| {
                call.arg(&mark.epoch).arg(mark.version).arg(&mark.id).arg(MAX_CHANGES);
            })
            .await?;
        let (word, rest) = split(&reply)?;
        Ok(match word.as_str() {
            "nothing" => Update::Nothing,
            "other" => Update::Other,
            "empty" => Update::Empty,
            "behind" => Update::Behind,
            "changes" => Update::Changes(changes(rest.first().ok_or(StoreError::Rejected)?)?),
            _ => return Err(StoreError::Rejected),
        })
    }

    /// Makes a change, all of it or nothing; `None` where the store has gone back behind what is known, or is not exactly there
    /// if it has to be. `longest`: of the log.
    pub async fn put_overrides(
        &self,
        (id, head): (&str, &str),
        parts: &[Write],
        (known, exactly): (&Cursor, bool),
        longest: usize,
    ) -> Result<Option<WriteOutcome>, StoreError> {
        let epoch = format!("{:016x}", rand::random::<u64>());
        let reply = self
            .override_script("write", "", |call| {
                call.arg(id).arg(head).arg(longest).arg(&epoch);
                call.arg(&known.epoch).arg(known.version).arg(&known.id).arg(if exactly { "1" } else { "0" });
                for Write { target, text, expected } in parts {
                    call.arg(target).arg(expected.map_or_else(String::new, |version| version.to_string()));
                    call.arg(if text.is_some() { "1" } else { "0" }).arg(text.as_deref().unwrap_or_default());
                }
            })
            .await?;
        let (word, rest) = split(&reply)?;
        match (word.as_str(), rest) {
            ("moved", []) => Ok(None),
            ("conflict", [target, version]) => {
                let (target, version) = (read(target.clone())?, read(version.clone())?);
                Ok(Some(WriteOutcome::Conflict { target, version }))
            }
            ("done", [epoch, version, change]) => {
                let mark = Cursor { epoch: read(epoch.clone())?, version: read(version.clone())?, id: id.to_owned() };
                Ok(Some(WriteOutcome::Done(mark, read_change(change)?)))
            }
            _ => Err(StoreError::Rejected),
        }
    }

    /// Brings all of it back to a store that has nothing; false when somebody else was faster.
    pub async fn restore_overrides(&self, mark: &Cursor, head: &str, kept: &[Versioned]) -> Result<bool, StoreError> {
        let place = format!("{:016x}", rand::random::<u64>());
        for texts in kept.chunks(MAX_CHANGES) {
            let gather = |call: &mut Cmd| {
                call.arg(GATHERED);
                for (target, version, text) in texts {
                    call.arg(target).arg(format!("{version}|{text}"));
                }
            };
            self.override_script("gather", &place, gather).await?;
        }
        let adopt = |call: &mut Cmd| {
            call.arg(&mark.epoch).arg(mark.version).arg(&mark.id).arg(head);
        };
        let reply = self.override_script("adopt", &place, adopt).await?;
        Ok(split(&reply)?.0 == "done")
    }

    /// The latest changes before this version, the last first.
    pub async fn override_log(&self, before: u64, most: usize) -> Result<Vec<Change>, StoreError> {
        let mut range = redis::cmd("XREVRANGE");
        let end = if before == u64::MAX { "+".to_owned() } else { format!("({before}-0") };
        range.arg(self.override_key("log")).arg(end).arg("-").arg("COUNT").arg(most);
        changes(&self.override_command(&range).await?)
    }

    /// Keeps a large text under its digest.
    pub async fn put_rule_set(&self, digest: &str, text: &str) -> Result<(), StoreError> {
        let mut set = redis::cmd("SET");
        set.arg(self.override_key(&format!("set:{digest}"))).arg(text);
        self.override_command(&set).await.map(drop)
    }

    /// The text of a digest.
    pub async fn get_rule_set(&self, digest: &str) -> Result<Option<String>, StoreError> {
        let mut get = redis::cmd("GET");
        get.arg(self.override_key(&format!("set:{digest}")));
        read(self.override_command(&get).await?)
    }

    /// Forgets it.
    pub async fn delete_rule_set(&self, digest: &str) -> Result<(), StoreError> {
        let mut delete = redis::cmd("DEL");
        delete.arg(self.override_key(&format!("set:{digest}")));
        self.override_command(&delete).await.map(drop)
    }

    fn override_key(&self, name: &str) -> String {
        format!("{}{{directives}}{name}", self.main.key_prefix())
    }

    async fn override_script(
        &self,
        order: &str,
        gathered: &str,
        arguments: impl FnOnce(&mut Cmd),
    ) -> Result<Value, StoreError> {
        // Sent as a whole each time: it is called a few times a second.
        let mut command = redis::cmd("EVAL");
        command.arg(SCRIPT).arg(4);
        for name in ["texts", "log", "head"] {
            command.arg(self.override_key(name));
        }
        command.arg(self.override_key(&format!("gathered:{gathered}"))).arg(order);
        arguments(&mut command);
        self.override_command(&command).await
    }

    async fn override_command(&self, command: &Cmd) -> Result<Value, StoreError> {
        let home = self.main.home(self.override_key("").as_bytes()).ok_or(StoreError::Unavailable)?;
        self.main.command(home, command).await
    }
}

fn read<T: FromRedisValue>(value: Value) -> Result<T, StoreError> {
    from_redis_value(value).map_err(|_| StoreError::Rejected)
}

/// The first word of a reply, and what follows.
fn split(reply: &Value) -> Result<(String, &[Value]), StoreError> {
    let Value::Array(values) = reply else {
        return Err(StoreError::Rejected);
    };
    let (word, rest) = values.split_first().ok_or(StoreError::Rejected)?;
    Ok((read(word.clone())?, rest))
}

fn read_cursor(reply: &Value) -> Option<Cursor> {
    let (_, [epoch, version, id]) = split(reply).ok()? else {
        return None;
    };
    Some(Cursor { epoch: read(epoch.clone()).ok()?, version: read(version.clone()).ok()?, id: read(id.clone()).ok()? })
}

fn changes(reply: &Value) -> Result<Vec<Change>, StoreError> {
    let Value::Array(entries) = reply else {
        return Err(StoreError::Rejected);
    };
    entries.iter().map(read_change).collect()
}

/// An entry of the stream: its version and its fields.
fn read_change(entry: &Value) -> Result<Change, StoreError> {
    let (version, fields): (String, Vec<(String, String)>) = read(entry.clone())?;
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
