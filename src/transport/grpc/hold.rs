//! Hits that callers admit by themselves: what they say of them, and what they are given. In `sluicegate.v1` that has
//! fields; by Envoy's protocol it goes beside it, in the metadata of the call and of its answer, and the grant itself is
//! the protocol's `quota`.

use std::fmt::Write;

use http::{HeaderMap, HeaderName, HeaderValue};
use sluicegate_common::wire::{Fields, Malformed};

use super::Refusal;
use crate::engine::{Hold, Micros, Verdict};

/// For each descriptor `WANTS;ID;SPENT`, with commas between; what there is nothing to say of is left out.
const HOLD: HeaderName = HeaderName::from_static("sluicegate-hold");
/// For each descriptor how many microseconds its quota lives from the moment the call was sent, with commas between.
const LIVES: HeaderName = HeaderName::from_static("sluicegate-grant-life-us");
/// As many as a request has descriptors, and more.
pub(super) const MOST: usize = 1_024;

/// What a call's metadata says; nothing, for nearly all.
pub(super) fn of_metadata(headers: &HeaderMap) -> Result<Vec<Hold>, Refusal> {
    let Some(value) = headers.get(HOLD) else {
        return Ok(Vec::new());
    };
    let read = |text: &str| text.split(',').take(MOST).map(read_hold).collect::<Option<Vec<_>>>();
    let holds = value.to_str().ok().and_then(read);
    holds.ok_or_else(|| Refusal::invalid("sluicegate-hold is WANTS;ID;SPENT for each descriptor, with commas between"))
}

fn read_hold(text: &str) -> Option<Hold> {
    let mut parts = text.split(';').map(str::trim);
    let mut number = || match parts.next() {
        None | Some("") => Some(None),
        Some(text) => text.parse::<u64>().ok().map(Some),
    };
    let (wants, id, spent) = (number()?.unwrap_or_default(), number()?, number()?.unwrap_or_default());
    parts.next().is_none().then_some(Hold { wants, reports: id.map(|id| (id, spent)) })
}

/// A `Hold`: `wants`, `id`, `spent`. Ids that are not ours belong to nobody.
pub(super) fn of_message(fields: Fields<'_>) -> Result<Hold, Malformed> {
    let (mut wants, mut id, mut spent) = (0, "", 0);
    for field in fields {
        match field? {
            (1, value) => wants = value.number()?,
            (2, value) => id = value.text()?,
            (3, value) => spent = value.number()?,
            _ => {}
        }
    }
    Ok(Hold { wants, reports: id.parse().ok().map(|id| (id, spent)) })
}

/// Says in the metadata of an answer how long its quotas live, if it has any.
pub(super) fn write_lives(verdict: &Verdict, headers: &mut HeaderMap) {
    if verdict.statuses.iter().all(|status| status.grant.is_none()) {
        return;
    }
    let mut lives = String::new();
    for (place, status) in verdict.statuses.iter().enumerate() {
        let separator = if place > 0 { "," } else { "" };
        let _ = match status.grant {
            Some(grant) => write!(lives, "{separator}{}", Micros::get(grant.life)),
            None => write!(lives, "{separator}"),
        };
    }
    if let Ok(lives) = HeaderValue::try_from(lives) {
        headers.insert(LIVES, lives);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metadata_has_a_word_for_each_descriptor() {
        let read = |text: &'static str| {
            let headers = HeaderMap::from_iter([(HOLD, HeaderValue::from_static(text))]);
            of_metadata(&headers).map_err(|refusal| refusal.message)
        };
        let hold = |wants, reports| Hold { wants, reports };
        assert_eq!(of_metadata(&HeaderMap::new()).unwrap(), []);
        assert_eq!(read("16"), Ok(vec![hold(16, None)]));
        assert_eq!(read("16;7;3, ,;8"), Ok(vec![hold(16, Some((7, 3))), hold(0, None), hold(0, Some((8, 0)))]));
        for wrong in ["x", "1;x", "1;2;x", "1;2;3;4", "-1"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
