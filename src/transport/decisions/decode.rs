//! Decodes a `RateLimitRequest` into the engine's [`Request`], which borrows all texts from the message. Only requests that
//! the configuration of a caller makes undecidable are rejected, with an error that names the reason. The clients of
//! a gateway can shape the values of entries, so values may have any length and any bytes:
//! [`readable`](crate::transport::texts::readable) has escaped bytes that are not UTF-8.

use sluicegate_proto::envoy::r#type::v3::RateLimitUnit;
use sluicegate_wire::{Fields, Malformed, Value};
use smallvec::SmallVec;

use crate::{
    engine::{Descriptor, Request, bound_hits},
    rules::{Entry, Limit, Unit},
    transport::{errors::RequestError, grpc::Limits},
};

/// Decodes a request: `domain`, `descriptors`, `hits_addend`.
pub(in crate::transport) fn decode<'m>(message: &'m [u8], limits: &Limits) -> Result<Request<'m>, RequestError> {
    let mut domain = "";
    let mut hits = 0;
    // Descriptors are decoded at the end, because those without hits of their own use those of the request.
    let mut descriptors = SmallVec::<[Fields<'m>; 4]>::new();
    let mut count = 0;
    for field in Fields::new(message) {
        match field? {
            (1, value) => domain = value.text()?,
            (2, value) => {
                count += 1;
                // Further ones are only counted: a message of 4 MiB could have two million.
                if count <= limits.max_descriptors {
                    descriptors.push(value.message()?);
                }
            }
            (3, value) => hits = u64::from(value.number()? as u32),
            _ => {}
        }
    }
    if count > limits.max_descriptors {
        let max = limits.max_descriptors;
        let message = format!("the request has {count} descriptors, more than grpc.limits.max_descriptors ({max})");
        return Err(RequestError::invalid(message));
    }
    if domain.len() > limits.max_text_bytes {
        let length = domain.len();
        let max = limits.max_text_bytes;
        let message = format!("a domain of {length} bytes is longer than grpc.limits.max_text_bytes ({max})");
        return Err(RequestError::invalid(message));
    }
    let descriptors = descriptors.into_iter().map(|fields| decode_descriptor(fields, hits.max(1), limits));
    Ok(Request { domain, descriptors: descriptors.collect::<Result<_, _>>()?, feedback: Vec::new() })
}

/// Decodes a descriptor: `entries`, `limit`, `hits_addend`, `is_negative_hits`.
fn decode_descriptor<'m>(fields: Fields<'m>, hits: u64, limits: &Limits) -> Result<Descriptor<'m>, RequestError> {
    let mut entries = SmallVec::<[Entry<'m>; 3]>::new();
    let mut own_hits = None;
    let mut refund = false;
    let mut limit = None;
    let mut count = 0;
    for field in fields {
        match field? {
            (1, value) => {
                count += 1;
                if count <= limits.max_entries {
                    entries.push(decode_entry(value.message()?)?);
                }
            }
            (2, value) => limit.get_or_insert_with(RequestedLimit::default).merge(value.message()?)?,
            (3, value) => merge_wrapper(value, &mut own_hits)?,
            (4, value) => refund = value.number()? != 0,
            _ => {}
        }
    }
    if count > limits.max_entries {
        let max = limits.max_entries;
        let message = format!("a descriptor has {count} entries, more than grpc.limits.max_entries ({max})");
        return Err(RequestError::invalid(message));
    }
    let limit = limit.map(|limit| limit.check().map(Box::new)).transpose()?;
    Ok(Descriptor { entries, hits: bound_hits(own_hits.unwrap_or(hits)), refund, requested_limit: limit })
}

/// Decodes an entry: `key`, `value`.
fn decode_entry(fields: Fields<'_>) -> Result<Entry<'_>, Malformed> {
    let mut entry = Entry { key: "", value: "" };
    for field in fields {
        match field? {
            (1, value) => entry.key = value.text()?,
            (2, value) => entry.value = value.text()?,
            _ => {}
        }
    }
    Ok(entry)
}

/// A `RateLimitOverride`. If a descriptor contains several, they are merged as protobuf requires.
#[derive(Default)]
struct RequestedLimit {
    requests_per_unit: u32,
    unit: i32,
    unit_multiplier: Option<u64>,
}

impl RequestedLimit {
    fn merge(&mut self, fields: Fields<'_>) -> Result<(), Malformed> {
        for field in fields {
            match field? {
                (1, value) => self.requests_per_unit = value.number()? as u32,
                (2, value) => self.unit = value.number()? as i32,
                (3, value) => merge_wrapper(value, &mut self.unit_multiplier)?,
                _ => {}
            }
        }
        Ok(())
    }

    /// Converts the message into a limit.
    fn check(self) -> Result<Limit, RequestError> {
        let unit = match RateLimitUnit::try_from(self.unit) {
            Ok(RateLimitUnit::Second) => Unit::Second,
            Ok(RateLimitUnit::Minute) => Unit::Minute,
            Ok(RateLimitUnit::Hour) => Unit::Hour,
            Ok(RateLimitUnit::Day) => Unit::Day,
            Ok(RateLimitUnit::Month) => Unit::Month,
            Ok(RateLimitUnit::Year) => Unit::Year,
            Ok(RateLimitUnit::Unknown) | Err(_) => {
                return Err(RequestError::invalid("a descriptor's limit needs a unit from SECOND to YEAR"));
            }
        };
        // The multiplier is a 32-bit number, so higher bits are dropped, as protobuf does.
        let multiplier = self.unit_multiplier.unwrap_or(1) as u32;
        let limit = Limit::new(self.requests_per_unit.into(), unit, multiplier);
        limit.map_err(|error| RequestError::invalid(format!("invalid limit of a descriptor: {error}")))
    }
}

/// Merges a `UInt64Value` or a `UInt32Value` into `number`. A value of 0 differs from an absent one.
fn merge_wrapper(value: Value<'_>, number: &mut Option<u64>) -> Result<(), Malformed> {
    let number = number.get_or_insert(0);
    for field in value.message()? {
        if let (1, value) = field? {
            *number = value.number()?;
        }
    }
    Ok(())
}

/// A decoded request that owns its texts: its domain, and the entries, hits, refund and limit of each descriptor.
#[cfg(any(test, fuzzing))]
type Decoded = (String, Vec<(Vec<(String, String)>, u64, bool, Option<(u64, crate::rules::Measure)>)>);

/// Decodes with [`decode`].
#[cfg(any(test, fuzzing))]
pub(in crate::transport) fn decode_by_hand(message: &[u8]) -> Option<Decoded> {
    let max = usize::MAX;
    let limits = Limits { max_descriptors: max, max_entries: max, max_text_bytes: max, ..Limits::default() };
    let request = decode(message, &limits).ok()?;
    let mut descriptors = Vec::new();
    for descriptor in &request.descriptors {
        let entries = descriptor.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.to_owned()));
        let limit = descriptor.requested_limit.as_deref().map(|limit| (limit.requests(), limit.measure()));
        descriptors.push((entries.collect(), descriptor.hits, descriptor.refund, limit));
    }
    Some((request.domain.to_owned(), descriptors))
}

/// Decodes with prost, which [`decode`] must agree with.
#[cfg(any(test, fuzzing))]
pub(in crate::transport) fn decode_with_prost(message: &[u8]) -> Option<Decoded> {
    use prost::Message;
    use sluicegate_proto::envoy::service::ratelimit::v3::RateLimitRequest;

    let message = RateLimitRequest::decode(message).ok()?;
    let descriptors = message.descriptors.into_iter().map(|descriptor| {
        let limit = match descriptor.limit {
            Some(limit) => {
                let limit = RequestedLimit {
                    requests_per_unit: limit.requests_per_unit,
                    unit: limit.unit,
                    unit_multiplier: limit.unit_multiplier.map(u64::from),
                };
                let limit = limit.check().ok()?;
                Some((limit.requests(), limit.measure()))
            }
            None => None,
        };
        let entries = descriptor.entries.into_iter().map(|entry| (entry.key, entry.value)).collect();
        let hits = descriptor.hits_addend.unwrap_or(message.hits_addend.max(1).into());
        Some((entries, bound_hits(hits), descriptor.is_negative_hits, limit))
    });
    Some((message.domain, descriptors.collect::<Option<_>>()?))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message;
    use sluicegate_proto::envoy::{
        extensions::common::ratelimit::v3::{
            RateLimitDescriptor,
            rate_limit_descriptor::{self, RateLimitOverride},
        },
        service::ratelimit::v3::RateLimitRequest,
    };

    use super::*;
    use crate::rules::Measure;

    #[test]
    fn rejects_requests_above_the_configured_limits() {
        let limits = Limits { max_descriptors: 2, max_entries: 3, max_text_bytes: 4, ..Limits::default() };
        let error = |descriptors: usize, entries: usize, letters: usize| {
            let text = || "x".repeat(letters);
            let entry = || rate_limit_descriptor::Entry { key: "k".into(), value: text() };
            let descriptor = RateLimitDescriptor {
                entries: (0..entries).map(|_| entry()).collect(),
                ..RateLimitDescriptor::default()
            };
            let request =
                RateLimitRequest { domain: text(), descriptors: vec![descriptor; descriptors], ..Default::default() };
            decode(&request.encode_to_vec(), &limits).err().map(|error| error.message)
        };
        assert_eq!(error(2, 3, 4), None);
        for (error, expected) in [
            (error(3, 1, 1), "3 descriptors, more than grpc.limits.max_descriptors (2)"),
            (error(1, 4, 1), "4 entries, more than grpc.limits.max_entries (3)"),
            (error(1, 1, 5), "a domain of 5 bytes is longer than grpc.limits.max_text_bytes (4)"),
        ] {
            assert!(error.as_ref().is_some_and(|error| error.contains(expected)), "{error:?}");
        }
    }

    fn descriptor() -> impl Strategy<Value = RateLimitDescriptor> {
        let entry = (".{0,3}", "[a-z]{0,200}").prop_map(|(key, value)| rate_limit_descriptor::Entry { key, value });
        let limit = (any::<u32>(), -1..9, prop::option::of(any::<u32>()));
        let limit = limit.prop_map(|(requests_per_unit, unit, unit_multiplier)| RateLimitOverride {
            requests_per_unit,
            unit,
            unit_multiplier,
        });
        let hits = prop::option::of(prop_oneof![0..3_u64, any::<u64>()]);
        (prop::collection::vec(entry, 0..4), prop::option::of(limit), hits, any::<bool>()).prop_map(
            |(entries, limit, hits_addend, is_negative_hits)| RateLimitDescriptor {
                entries,
                limit,
                hits_addend,
                is_negative_hits,
            },
        )
    }

    fn request() -> impl Strategy<Value = RateLimitRequest> {
        (".{0,4}", prop::collection::vec(descriptor(), 0..4), any::<u32>())
            .prop_map(|(domain, descriptors, hits_addend)| RateLimitRequest { domain, descriptors, hits_addend })
    }

    proptest! {
        #[test]
        fn decodes_as_prost_does(request in request()) {
            let message = request.encode_to_vec();
            prop_assert_eq!(decode_by_hand(&message), decode_with_prost(&message));
        }

        /// In two concatenated messages the later numbers replace the earlier ones, and limits are merged.
        #[test]
        fn decodes_damaged_messages_as_prost_does(
            requests in (request(), request()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            end in any::<prop::sample::Index>(),
        ) {
            let mut message = [requests.0.encode_to_vec(), requests.1.encode_to_vec()].concat();
            if !message.is_empty() {
                for (index, byte) in changes {
                    *index.get_mut(&mut message) = byte;
                }
                message.truncate(message.len() - end.index(message.len()) / 8);
            }
            prop_assert_eq!(decode_by_hand(&message), decode_with_prost(&message));
        }
    }

    #[test]
    fn a_limit_in_several_parts_is_merged() {
        let part = |requests_per_unit, unit, unit_multiplier| {
            let limit = Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier });
            RateLimitDescriptor { limit, ..RateLimitDescriptor::default() }.encode_to_vec()
        };
        let descriptor = [part(7, 0, Some(2)), part(0, 3, None)].concat();
        let message = [&[0x12, descriptor.len() as u8], &descriptor[..]].concat();
        let read = decode_by_hand(&message).map(|(_, descriptors)| descriptors[0].3);
        assert_eq!(read, Some(Some((7, Measure::Rate { unit: Unit::Hour, multiplier: 2 }))));
        assert_eq!(decode_by_hand(&message), decode_with_prost(&message));
    }
}
