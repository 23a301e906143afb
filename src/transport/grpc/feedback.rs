//! Hits that callers admit by themselves: what they say of them, and what they are given. In `sluicegate.v1` that has
//! fields; by Envoy's protocol it goes beside it, in the metadata of the call and of its answer, and the grant itself is
//! the protocol's `quota`.

use std::fmt::Write;

use http::{HeaderMap, HeaderName, HeaderValue};
use sluicegate_common::wire::{Fields, Malformed};
use sluicegate_proto::sluicegate::v1;

use super::RequestError;
use crate::engine::{Feedback, Micros, Sample, Verdict};

/// For each descriptor `WANTS;ID;SPENT;LATENCY_US;OUTCOME`, with commas between; what there is nothing to say of is left out.
const HOLD: HeaderName = HeaderName::from_static("sluicegate-feedback");
/// For each descriptor how many microseconds its quota lives from the moment the call was sent, with commas between.
const LIVES: HeaderName = HeaderName::from_static("sluicegate-grant-life-us");
/// As many as a request has descriptors, and more.
pub(super) const MOST: usize = 1_024;

/// What a call's metadata says; nothing, for nearly all.
pub(super) fn of_metadata(headers: &HeaderMap) -> Result<Vec<Feedback>, RequestError> {
    let Some(value) = headers.get(HOLD) else {
        return Ok(Vec::new());
    };
    let read = |text: &str| text.split(',').take(MOST).map(read_feedback).collect::<Option<Vec<_>>>();
    let holds = value.to_str().ok().and_then(read);
    let form = "sluicegate-feedback is WANTS;ID;SPENT;LATENCY_US;OUTCOME for each descriptor, with commas between";
    holds.ok_or_else(|| RequestError::invalid(form))
}

fn read_feedback(text: &str) -> Option<Feedback> {
    let mut parts = text.split(';').map(str::trim);
    let mut number = || match parts.next() {
        None | Some("") => Some(None),
        Some(text) => text.parse::<u64>().ok().map(Some),
    };
    let (wants, id, spent) = (number()?.unwrap_or_default(), number()?, number()?.unwrap_or_default());
    let sample = sample(number()?.unwrap_or_default(), number()?.unwrap_or_default());
    parts.next().is_none().then_some(Feedback { demand: wants, reports: id.map(|id| (id, spent)), sample })
}

/// What is not known has failed: it says nothing.
fn sample(latency: u64, outcome: u64) -> Option<Sample> {
    let outcome = i32::try_from(outcome).ok().and_then(|outcome| v1::Outcome::try_from(outcome).ok());
    let dropped = match outcome {
        Some(v1::Outcome::Success) => false,
        Some(v1::Outcome::TimedOut | v1::Outcome::Dropped) => true,
        Some(v1::Outcome::Failed) | None => return None,
    };
    (latency > 0).then_some(Sample { latency: Micros::new(latency), dropped })
}

/// A `Hold`: `wants`, `id`, `spent`, `sample`. Ids that are not ours belong to nobody.
pub(super) fn of_message(fields: Fields<'_>) -> Result<Feedback, Malformed> {
    let (mut wants, mut id, mut spent) = (0, "", 0);
    let (mut latency, mut outcome) = (0, 0);
    for field in fields {
        match field? {
            (1, value) => wants = value.number()?,
            (2, value) => id = value.text()?,
            (3, value) => spent = value.number()?,
            (4, value) => {
                for field in value.message()? {
                    match field? {
                        (1, value) => latency = value.number()?,
                        (2, value) => outcome = value.number()?,
                        _ => {}
                    }
                }
            }
            _ => {}
        }
    }
    Ok(Feedback { demand: wants, reports: id.parse().ok().map(|id| (id, spent)), sample: sample(latency, outcome) })
}

/// Says in the metadata of an answer how long its quotas live, if it has any.
pub(super) fn write_ttls(verdict: &Verdict, headers: &mut HeaderMap) {
    if verdict.statuses.iter().all(|status| status.grant.is_none()) {
        return;
    }
    let mut lives = String::new();
    for (place, status) in verdict.statuses.iter().enumerate() {
        let separator = if place > 0 { "," } else { "" };
        let _ = match status.grant {
            Some(grant) => write!(lives, "{separator}{}", Micros::get(grant.ttl)),
            None => write!(lives, "{separator}"),
        };
    }
    if let Ok(lives) = HeaderValue::try_from(lives) {
        headers.insert(LIVES, lives);
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use prost::Message;
    use smallvec::smallvec;

    use super::*;
    use crate::engine::{Code, Grant, Status};

    #[test]
    fn a_message_says_the_same() {
        let read = |hold: v1::Feedback| of_message(Fields::of(&hold.encode_to_vec())).unwrap();
        let sample = v1::Sample { latency_us: 70, outcome: v1::Outcome::Dropped.into() };
        let all = read(v1::Feedback { demand: 16, grant_id: "7".into(), used: 3, sample: Some(sample) });
        let sample = Sample { latency: Micros::new(70), dropped: true };
        assert_eq!(all, Feedback { demand: 16, reports: Some((7, 3)), sample: Some(sample) });
        assert_eq!(
            read(v1::Feedback { grant_id: "theirs".into(), used: 3, ..v1::Feedback::default() }),
            Feedback::default()
        );
    }

    #[test]
    fn each_quota_has_its_life_in_its_place() {
        let granted = |micros| {
            let grant = Grant { hits: NonZeroU32::MIN, ttl: Micros::new(micros), id: 1 };
            Status { grant: Some(grant), ..Status::NO_LIMIT }
        };
        let lives = |statuses| {
            let mut headers = HeaderMap::new();
            write_ttls(&Verdict { overall: Code::Ok, statuses, metadata: None }, &mut headers);
            headers.get(LIVES).map(|lives| lives.to_str().unwrap().to_owned())
        };
        assert_eq!(lives(smallvec![Status::NO_LIMIT]), None);
        let three = smallvec![granted(5), Status::NO_LIMIT, granted(70)];
        assert_eq!(lives(three).as_deref(), Some("5,,70"));
    }

    #[test]
    fn metadata_has_a_word_for_each_descriptor() {
        let read = |text: &'static str| {
            let headers = HeaderMap::from_iter([(HOLD, HeaderValue::from_static(text))]);
            of_metadata(&headers).map_err(|refusal| refusal.message)
        };
        let hold = |wants, reports| Feedback { demand: wants, reports, sample: None };
        assert_eq!(of_metadata(&HeaderMap::new()).unwrap(), []);
        assert_eq!(read("16"), Ok(vec![hold(16, None)]));
        assert_eq!(read("16;7;3, ,;8"), Ok(vec![hold(16, Some((7, 3))), hold(0, None), hold(0, Some((8, 0)))]));
        let sampled = |latency, dropped| Feedback {
            sample: Some(Sample { latency: Micros::new(latency), dropped }),
            ..Feedback::default()
        };
        assert_eq!(read(";;;70;0,;;;80;3,;;;90;2"), Ok(vec![sampled(70, false), sampled(80, true), sampled(90, true)]));
        assert_eq!(read(";;;70;1,;;;70;9,;;;0;3"), Ok(vec![Feedback::default(); 3]), "nothing is said of these");
        for wrong in ["x", "1;x", "1;2;x", "1;2;3;4;5;6", "1;2;3;x", "-1"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
