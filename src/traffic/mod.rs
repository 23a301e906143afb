//! Requests that were asked once, in files: to be asked again of other rules.
//!
//! A file is zstd, and in it `sluicegate.v1.RecordedRequest` (proto/sluicegate/v1/traffic.proto), each after its length as a
//! varint; so `zstd -d` and any protobuf library read it. Access logs of Envoy become the same ([`access_log`]).

pub mod access_log;
mod file;

pub use file::{Reader, TrafficError, Writer};

use sluicegate_common::wire::{self, Fields, Malformed, Value};
use smallvec::SmallVec;

use crate::{
    engine::{Code, Descriptor, Micros, Request, Verdict},
    rules::{Entry, Limit, Measure, Unit},
};

/// A request, when it was asked, and what was said.
#[derive(Clone, Debug)]
pub struct RecordedRequest<'m> {
    /// When.
    pub at: Micros,
    /// What.
    pub request: Request<'m>,
    /// Whether it was let pass; `None`: nobody was asked.
    pub allowed: Option<bool>,
    /// Of each descriptor, whether its limit refused it.
    pub over: SmallVec<[bool; 2]>,
}

/// Appends a request and what was said. `masked`: what stands in place of an entry's value.
pub fn encode(
    at: Micros,
    request: &Request<'_>,
    verdict: Option<&Verdict>,
    masked: impl Fn(&str) -> Option<String>,
    bytes: &mut Vec<u8>,
) {
    let mut message = wire::Writer(bytes);
    message.number(1, at.get());
    // 1: refused, 2: let pass.
    message.number(2, verdict.map_or(0, |verdict| 1 + u64::from(verdict.overall == Code::Ok)));
    message.text(3, request.domain);
    for (place, descriptor) in request.descriptors.iter().enumerate() {
        let over = verdict.and_then(|verdict| verdict.statuses.get(place)).is_some_and(crate::engine::Status::is_over);
        message.message(4, |message| {
            for Entry { key, value } in &descriptor.entries {
                message.message(1, |message| {
                    message.text(1, key);
                    message.text(2, masked(value).as_deref().unwrap_or(value));
                });
            }
            message.optional(2, (descriptor.hits != 1).then_some(descriptor.hits));
            message.number(3, descriptor.refund.into());
            message.number(4, over.into());
            if let Some(limit) = &descriptor.requested_limit
                && let Measure::Rate { unit, multiplier } = limit.measure()
            {
                message.optional(5, Some(limit.requests().into()));
                message.number(6, Unit::ALL.iter().position(|known| *known == unit).unwrap_or_default() as u64);
                message.optional(7, Some(multiplier.into()));
            }
        });
    }
}

/// Reads what [`encode`] wrote.
pub fn decode(message: &[u8]) -> Result<RecordedRequest<'_>, Malformed> {
    let (mut at, mut allowed, mut domain) = (0, None, "");
    let (mut descriptors, mut over) = (SmallVec::new(), SmallVec::new());
    for field in Fields::of(message) {
        match field? {
            (1, value) => at = value.number()?,
            (2, value) => allowed = Some(value.number()? == 2),
            (3, value) => domain = value.text()?,
            (4, value) => {
                let (descriptor, refused) = decode_descriptor(value)?;
                descriptors.push(descriptor);
                over.push(refused);
            }
            _ => {}
        }
    }
    let request = Request { domain, descriptors, feedback: Vec::new() };
    Ok(RecordedRequest { at: Micros::new(at), request, allowed, over })
}

fn decode_descriptor(value: Value<'_>) -> Result<(Descriptor<'_>, bool), Malformed> {
    let mut descriptor = Descriptor { entries: SmallVec::new(), hits: 1, refund: false, requested_limit: None };
    let (mut over, mut requests, mut unit, mut multiplier) = (false, None, 0, 1);
    for field in value.message()? {
        match field? {
            (1, value) => {
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
            (2, value) => descriptor.hits = value.number()?,
            (3, value) => descriptor.refund = value.number()? != 0,
            (4, value) => over = value.number()? != 0,
            (5, value) => requests = Some(value.number()? as u32),
            (6, value) => unit = value.number()? as usize,
            (7, value) => multiplier = value.number()? as u32,
            _ => {}
        }
    }
    if let (Some(requests), Some(unit)) = (requests, Unit::ALL.get(unit)) {
        descriptor.requested_limit = Limit::new(requests, *unit, multiplier).ok().map(Box::new);
    }
    Ok((descriptor, over))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use smallvec::smallvec;

    use super::*;
    use crate::engine::Status;

    fn descriptor<'a>(
        entries: &'a [(String, String)],
        hits: u64,
        give_back: bool,
        limit: Option<(u32, usize, u32)>,
    ) -> Descriptor<'a> {
        let limit =
            limit.and_then(|(requests, unit, multiplier)| Limit::new(requests, Unit::ALL[unit], multiplier).ok());
        let entries = entries.iter().map(|(key, value)| Entry { key, value }).collect();
        Descriptor { entries, hits, refund: give_back, requested_limit: limit.map(Box::new) }
    }

    proptest! {
        #[test]
        fn what_was_recorded_is_what_was_asked(
            at in any::<u64>(),
            domain in ".{0,5}",
            entries in prop::collection::vec((".{0,4}", ".{0,4}"), 0..4),
            hits in any::<u64>(),
            give_back in any::<bool>(),
            limit in prop::option::of((any::<u32>(), 0..7_usize, 1..9_u32)),
            over in any::<bool>(),
        ) {
            let one = descriptor(&entries, hits, give_back, limit);
            let request = Request { domain: &domain, descriptors: smallvec![one.clone(), one], feedback: Vec::new() };
            let code = if over { Code::OverLimit } else { Code::Ok };
            let statuses = smallvec![Status { code, ..Status::NO_LIMIT }, Status::NO_LIMIT];
            let verdict = Verdict { overall: code, statuses, metadata: None };
            let mut bytes = Vec::new();
            encode(Micros::new(at), &request, Some(&verdict), |_| None, &mut bytes);
            let read = decode(&bytes).unwrap();
            prop_assert_eq!((read.at.get(), read.allowed, read.over.as_slice()), (at, Some(!over), &[over, false][..]));
            prop_assert_eq!(format!("{:?}", read.request), format!("{request:?}"));
            // Nothing that is damaged does more than be refused.
            for cut in 0..bytes.len() {
                let _ = decode(&bytes[..cut]);
            }
        }
    }
}
