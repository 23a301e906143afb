//! Recorded requests ([`RecordedRequest`]) in files, to be replayed against other rules.
//!
//! A file is compressed with gzip. It contains `sluicegate.v1.RecordedRequest` messages
//! (proto/sluicegate/v1/traffic.proto), each with its length as a varint prefix, so `gzip -d` and any protobuf library
//! can read it. Envoy's access logs are converted to the same format ([`access_log`]).
//! Descriptors that operators type or paste are read by [`text`].

pub mod access_log;
mod file;
#[cfg(any(test, feature = "fuzz"))]
pub mod fuzz;
pub mod text;

pub use file::{Reader, TrafficError, Writer};

use sluicegate_engine::{Code, Descriptor, Micros, Request, Verdict, bound_hits, bounded};
use sluicegate_rules::{Entry, Limit, Measure, Unit};
use sluicegate_wire::{self as wire, Fields, Malformed, Value};
use smallvec::SmallVec;

/// Maximum number of descriptors and entries of a recorded request. A message of 16 MiB could have eight million, which
/// need a hundred times their size in memory.
const MAX_ITEMS: usize = 65_536;

/// Recorded decision about a request that was denied. 0 is recorded for a request that was not decided.
const RECORDED_DENIED: u64 = 1;
/// Recorded decision about a request that was allowed.
const RECORDED_ALLOWED: u64 = 2;

/// Error returned when bytes are not a recorded request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes are no protobuf message.
    #[error(transparent)]
    Malformed(#[from] Malformed),
    /// The message has more descriptors and entries than any valid request.
    #[error("message has more than {MAX_ITEMS} descriptors and entries")]
    TooManyItems,
}

/// A recorded request, with its time and decision.
#[derive(Clone, Debug)]
pub struct RecordedRequest<'m> {
    /// Time of the request.
    pub at: Micros,
    /// The request.
    pub request: Request<'m>,
    /// Whether the request was allowed; `None` if it was not decided.
    pub allowed: Option<bool>,
    /// For each descriptor, whether its limit denied it.
    pub over: SmallVec<[bool; 2]>,
}

/// Appends an encoded request with its verdict to `bytes`. Long values have their [`bounded`] form.
///
/// `mask` returns a replacement for the value of an entry, or `None` to record the value itself.
pub fn encode(
    at: Micros,
    request: &Request<'_>,
    verdict: Option<&Verdict>,
    mask: impl Fn(&str) -> Option<String>,
    bytes: &mut Vec<u8>,
) {
    let mut message = wire::Writer(bytes);
    message.number(1, at.get());
    let decision = match verdict {
        None => 0,
        Some(verdict) if verdict.overall == Code::Ok => RECORDED_ALLOWED,
        Some(_) => RECORDED_DENIED,
    };
    message.number(2, decision);
    message.text(3, request.domain);
    for (index, descriptor) in request.descriptors.iter().enumerate() {
        let over =
            verdict.and_then(|verdict| verdict.statuses.get(index)).is_some_and(sluicegate_engine::Status::is_over);
        message.message(4, |message| {
            for Entry { key, value } in &descriptor.entries {
                message.message(1, |message| {
                    message.text(1, key);
                    match mask(value) {
                        Some(masked) => message.text(2, &masked),
                        None => message.text(2, &bounded(value)),
                    }
                });
            }
            message.optional(2, if descriptor.hits == 1 { None } else { Some(descriptor.hits) });
            message.number(3, descriptor.refund.into());
            message.number(4, over.into());
            if let Some(limit) = &descriptor.requested_limit
                && let Measure::Rate { unit, multiplier } = limit.measure()
            {
                message.optional(5, Some(limit.requests()));
                message.number(6, Unit::ALL.iter().position(|other| *other == unit).unwrap_or_default() as u64);
                message.optional(7, Some(multiplier.into()));
            }
        });
    }
}

/// Decodes a request that [`encode`] wrote.
///
/// # Errors
///
/// Returns an error if the message is malformed, or has more descriptors and entries than any valid request.
pub fn decode(message: &[u8]) -> Result<RecordedRequest<'_>, DecodeError> {
    let mut at = 0;
    let mut allowed = None;
    let mut domain = "";
    let mut descriptors = SmallVec::new();
    let mut over = SmallVec::new();
    let mut items = 0;
    for field in Fields::new(message) {
        match field? {
            (1, value) => at = value.number()?,
            (2, value) => allowed = Some(value.number()? == RECORDED_ALLOWED),
            (3, value) => domain = value.text()?,
            (4, value) => {
                let RecordedDescriptor { descriptor, is_over } = decode_descriptor(value, MAX_ITEMS - items)?;
                items += 1 + descriptor.entries.len();
                if items > MAX_ITEMS {
                    return Err(DecodeError::TooManyItems);
                }
                descriptors.push(descriptor);
                over.push(is_over);
            }
            _ => {}
        }
    }
    let request = Request { domain, descriptors, feedback: Vec::new() };
    Ok(RecordedRequest { at: Micros::new(at), request, allowed, over })
}

/// A recorded descriptor, and whether its limit denied it.
struct RecordedDescriptor<'m> {
    descriptor: Descriptor<'m>,
    is_over: bool,
}

/// Decodes a descriptor of at most `max_entries`.
fn decode_descriptor(value: Value<'_>, max_entries: usize) -> Result<RecordedDescriptor<'_>, DecodeError> {
    let mut descriptor = Descriptor::new(SmallVec::new());
    let mut is_over = false;
    let mut requests = None;
    let mut unit = 0;
    let mut multiplier = 1;
    for field in value.message()? {
        match field? {
            (1, value) => {
                if descriptor.entries.len() == max_entries {
                    return Err(DecodeError::TooManyItems);
                }
                let mut entry = Entry { key: "", value: "" };
                for field in value.message()? {
                    match field? {
                        (1, value) => entry.key = value.text()?,
                        (2, value) => entry.value = value.text()?,
                        _ => {}
                    }
                }
                descriptor.entries.push(entry);
            }
            (2, value) => descriptor.hits = bound_hits(value.number()?),
            (3, value) => descriptor.refund = value.number()? != 0,
            (4, value) => is_over = value.number()? != 0,
            (5, value) => requests = Some(value.number()? as u32),
            (6, value) => unit = value.number()? as usize,
            (7, value) => multiplier = value.number()? as u32,
            _ => {}
        }
    }
    if let Some(requests) = requests
        && let Some(unit) = Unit::ALL.get(unit)
    {
        descriptor.requested_limit = Limit::new(requests.into(), *unit, multiplier).ok().map(Box::new);
    }
    Ok(RecordedDescriptor { descriptor, is_over })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sluicegate_engine::Status;
    use smallvec::smallvec;

    use super::*;

    fn descriptor<'a>(
        entries: &'a [(String, String)],
        hits: u64,
        refund: bool,
        limit: Option<(u32, usize, u32)>,
    ) -> Descriptor<'a> {
        let limit = limit
            .and_then(|(requests, unit, multiplier)| Limit::new(requests.into(), Unit::ALL[unit], multiplier).ok());
        let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        Descriptor { entries, hits, refund, requested_limit: limit.map(Box::new) }
    }

    #[test]
    fn a_request_with_too_many_items_is_rejected() {
        let with_length = |field: u8, contents: &[u8]| {
            let mut bytes = Vec::new();
            wire::Writer(&mut bytes).message(field, |message| message.0.extend_from_slice(contents));
            bytes
        };
        let entries = |count: usize| with_length(4, &with_length(1, b"").repeat(count));
        let descriptors = |count: usize| with_length(4, b"").repeat(count);
        for message in
            [entries(MAX_ITEMS - 1), descriptors(MAX_ITEMS), [entries(9), descriptors(MAX_ITEMS - 10)].concat()]
        {
            assert!(decode(&message).is_ok());
        }
        for message in
            [entries(MAX_ITEMS + 1), descriptors(MAX_ITEMS + 1), [descriptors(MAX_ITEMS), entries(1)].concat()]
        {
            assert_eq!(decode(&message).unwrap_err(), DecodeError::TooManyItems);
        }
    }

    proptest! {
        #[test]
        fn a_decoded_request_is_the_encoded_one(
            at in any::<u64>(),
            domain in ".{0,5}",
            entries in prop::collection::vec((".{0,4}", ".{0,4}"), 0..4),
            hits in 0..=sluicegate_engine::MAX_NUMBER,
            refund in any::<bool>(),
            limit in prop::option::of((any::<u32>(), 0..7_usize, 1..9_u32)),
            over in any::<bool>(),
        ) {
            let one = descriptor(&entries, hits, refund, limit);
            let request = Request { domain: &domain, descriptors: smallvec![one.clone(), one], feedback: Vec::new() };
            let code = if over { Code::OverLimit } else { Code::Ok };
            let statuses = smallvec![Status { code, ..Status::NO_LIMIT }, Status::NO_LIMIT];
            let verdict = Verdict { overall: code, statuses, metadata: None };
            let mut bytes = Vec::new();
            encode(Micros::new(at), &request, Some(&verdict), |_| None, &mut bytes);
            let read = decode(&bytes).unwrap();
            prop_assert_eq!((read.at.get(), read.allowed, read.over.as_slice()), (at, Some(!over), &[over, false][..]));
            prop_assert_eq!(format!("{:?}", read.request), format!("{request:?}"));
            // A truncated message may be rejected but must not cause a panic.
            for cut in 0..bytes.len() {
                let _ = decode(&bytes[..cut]);
            }
        }
    }
}
