//! Feedback and grants: what callers report about hits that they admitted by themselves, and which hits they may admit.
//!
//! `sluicegate.v1` has fields for both. With Envoy's protocol, feedback is in the metadata of the call, a grant is the
//! `quota` of a status, and the TTL of the grant is in the metadata of the response.

use std::{fmt::Write, num::ParseIntError};

use http::{HeaderMap, HeaderName, HeaderValue};
use sluicegate_proto::sluicegate::v1;
use sluicegate_wire::{Fields, Malformed};

use crate::{
    engine::{Feedback, Micros, Sample, Verdict},
    transport::errors::RequestError,
};

/// Metadata of a call: `DEMAND;GRANT_ID;USED;LATENCY_US;OUTCOME` for each descriptor, separated by commas. Each part
/// may be empty. `OUTCOME` is the number of a [`v1::Outcome`].
const FEEDBACK_HEADER: HeaderName = HeaderName::from_static("sluicegate-feedback");
/// Metadata of a response: the TTL of each descriptor's quota in microseconds, separated by commas. The TTL begins when
/// the call was sent.
const GRANT_TTL_HEADER: HeaderName = HeaderName::from_static("sluicegate-grant-ttl-us");
/// Maximum number of descriptors with feedback. By default, a request has fewer descriptors (128).
pub(in crate::transport) const MAX_FEEDBACK: usize = 1_024;

/// Reads the feedback in a call's metadata. Nearly all calls have none.
pub(in crate::transport) fn read_metadata(headers: &HeaderMap) -> Result<Vec<Feedback>, RequestError> {
    let Some(value) = headers.get(FEEDBACK_HEADER) else {
        return Ok(Vec::new());
    };
    let text = value.to_str().map_err(|_| invalid())?;
    let mut feedback = Vec::new();
    for part in text.split(',').take(MAX_FEEDBACK) {
        feedback.push(read_feedback(part).ok_or_else(invalid)?);
    }
    Ok(feedback)
}

fn invalid() -> RequestError {
    RequestError::invalid(
        "sluicegate-feedback must be DEMAND;GRANT_ID;USED;LATENCY_US;OUTCOME for each descriptor, separated by commas",
    )
}

/// Reads the feedback for one descriptor. Returns `None` if it is invalid.
fn read_feedback(text: &str) -> Option<Feedback> {
    let mut parts = text.split(';').map(str::trim);
    let demand = next_number(&mut parts).ok()?.unwrap_or_default();
    let id = next_number(&mut parts).ok()?;
    let used = next_number(&mut parts).ok()?.unwrap_or_default();
    let latency = next_number(&mut parts).ok()?.unwrap_or_default();
    let outcome = next_number(&mut parts).ok()?.unwrap_or_default();
    if parts.next().is_some() {
        return None;
    }
    Some(Feedback { demand, reports: id.map(|id| (id, used)), sample: sample(latency, outcome) })
}

/// Reads the next part as a number. Returns `None` if the part is empty or missing.
fn next_number<'t>(parts: &mut impl Iterator<Item = &'t str>) -> Result<Option<u64>, ParseIntError> {
    match parts.next() {
        None | Some("") => Ok(None),
        Some(text) => text.parse().map(Some),
    }
}

/// Builds a sample. Returns `None` for failed requests, for unknown outcomes and without a latency.
fn sample(latency: u64, outcome: u64) -> Option<Sample> {
    let outcome = i32::try_from(outcome).ok().and_then(|outcome| v1::Outcome::try_from(outcome).ok());
    let dropped = match outcome {
        Some(v1::Outcome::Success) => false,
        Some(v1::Outcome::TimedOut | v1::Outcome::Dropped) => true,
        Some(v1::Outcome::Failed) | None => return None,
    };
    (latency > 0).then_some(Sample { latency: Micros::new(latency), dropped })
}

/// Decodes a `Feedback` message: `demand`, `grant_id`, `used`, `sample`. An id that is not a number is ignored.
pub(in crate::transport) fn read_message(fields: Fields<'_>) -> Result<Feedback, Malformed> {
    let mut demand = 0;
    let mut id = "";
    let mut used = 0;
    let mut latency = 0;
    let mut outcome = 0;
    for field in fields {
        match field? {
            (1, value) => demand = value.number()?,
            (2, value) => id = value.text()?,
            (3, value) => used = value.number()?,
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
    Ok(Feedback { demand, reports: id.parse().ok().map(|id| (id, used)), sample: sample(latency, outcome) })
}

/// Writes the TTLs of the grants of a verdict, if it has any, into the metadata of the response.
pub(in crate::transport) fn write_ttls(verdict: &Verdict, headers: &mut HeaderMap) {
    if verdict.statuses.iter().all(|status| status.grant.is_none()) {
        return;
    }
    let mut ttls = String::new();
    for (index, status) in verdict.statuses.iter().enumerate() {
        let separator = if index > 0 { "," } else { "" };
        let _ = match status.grant {
            Some(grant) => write!(ttls, "{separator}{}", Micros::get(grant.ttl)),
            None => write!(ttls, "{separator}"),
        };
    }
    if let Ok(ttls) = HeaderValue::try_from(ttls) {
        headers.insert(GRANT_TTL_HEADER, ttls);
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
    fn reads_the_fields_of_a_message() {
        let read = |feedback: v1::Feedback| read_message(Fields::new(&feedback.encode_to_vec())).unwrap();
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
    fn writes_the_ttl_of_each_quota_in_the_order_of_descriptors() {
        let granted = |micros| {
            let grant = Grant { hits: NonZeroU32::MIN, ttl: Micros::new(micros), id: 1 };
            Status { grant: Some(grant), ..Status::NO_LIMIT }
        };
        let ttls = |statuses| {
            let mut headers = HeaderMap::new();
            write_ttls(&Verdict { overall: Code::Ok, statuses, metadata: None }, &mut headers);
            headers.get(GRANT_TTL_HEADER).map(|ttls| ttls.to_str().unwrap().to_owned())
        };
        assert_eq!(ttls(smallvec![Status::NO_LIMIT]), None);
        let three = smallvec![granted(5), Status::NO_LIMIT, granted(70)];
        assert_eq!(ttls(three).as_deref(), Some("5,,70"));
    }

    #[test]
    fn reads_the_feedback_of_each_descriptor_from_metadata() {
        let read = |text: &'static str| {
            let headers = HeaderMap::from_iter([(FEEDBACK_HEADER, HeaderValue::from_static(text))]);
            read_metadata(&headers).map_err(|error| error.message)
        };
        let feedback = |demand, reports| Feedback { demand, reports, sample: None };
        assert_eq!(read_metadata(&HeaderMap::new()).unwrap(), []);
        assert_eq!(read("16"), Ok(vec![feedback(16, None)]));
        assert_eq!(
            read("16;7;3, ,;8"),
            Ok(vec![feedback(16, Some((7, 3))), feedback(0, None), feedback(0, Some((8, 0)))])
        );
        let sampled = |latency, dropped| Feedback {
            sample: Some(Sample { latency: Micros::new(latency), dropped }),
            ..Feedback::default()
        };
        assert_eq!(read(";;;70;0,;;;80;3,;;;90;2"), Ok(vec![sampled(70, false), sampled(80, true), sampled(90, true)]));
        assert_eq!(read(";;;70;1,;;;70;9,;;;0;3"), Ok(vec![Feedback::default(); 3]), "these have no sample");
        for malformed in ["x", "1;x", "1;2;x", "1;2;3;4;5;6", "1;2;3;x", "-1"] {
            assert!(read(malformed).is_err(), "{malformed}");
        }
    }
}
