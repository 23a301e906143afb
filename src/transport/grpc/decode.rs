//! From the bytes of a `RateLimitRequest` to what the engine asks, which borrows all its texts from them. What the
//! protocol allows and the engine cannot use ends here, with a sentence.

use sluicegate_common::wire::{Fields, Malformed, Value};
use sluicegate_proto::envoy::r#type::v3::RateLimitUnit;
use smallvec::SmallVec;

use super::{Limits, RequestError};
use crate::{
    engine::{Descriptor, Request},
    rules::{Entry, Limit, Unit},
};

/// A request: `domain`, `descriptors`, `hits_addend`.
pub(crate) fn decode<'m>(message: &'m [u8], limits: &Limits) -> Result<Request<'m>, RequestError> {
    let (mut domain, mut hits) = ("", 0);
    // They are read at the end, when the hits are known for those that do not say.
    let mut descriptors = SmallVec::<[Fields<'m>; 4]>::new();
    for field in Fields::of(message) {
        match field? {
            (1, value) => domain = value.text()?,
            (2, value) => descriptors.push(value.message()?),
            (3, value) => hits = u64::from(value.number()? as u32),
            _ => {}
        }
    }
    if descriptors.len() > limits.max_descriptors {
        let (many, max) = (descriptors.len(), limits.max_descriptors);
        return Err(RequestError::invalid(format!("{many} descriptors are more than the {max} a request may have")));
    }
    check_text("domain", domain, limits)?;
    let descriptors = descriptors.into_iter().map(|fields| decode_descriptor(fields, hits.max(1), limits));
    Ok(Request { domain, descriptors: descriptors.collect::<Result<_, _>>()?, feedback: Vec::new() })
}

/// `entries`, `limit`, `hits_addend`, `is_negative_hits`.
fn decode_descriptor<'m>(fields: Fields<'m>, hits: u64, limits: &Limits) -> Result<Descriptor<'m>, RequestError> {
    let mut entries = SmallVec::<[Entry<'m>; 3]>::new();
    let (mut own_hits, mut give_back, mut limit) = (None, false, None);
    for field in fields {
        match field? {
            (1, value) => entries.push(decode_entry(value.message()?)?),
            (2, value) => limit.get_or_insert_with(RequestedLimit::default).merge(value.message()?)?,
            (3, value) => unwrap(value, &mut own_hits)?,
            (4, value) => give_back = value.number()? != 0,
            _ => {}
        }
    }
    if entries.len() > limits.max_entries {
        let (many, max) = (entries.len(), limits.max_entries);
        return Err(RequestError::invalid(format!("{many} entries are more than the {max} a descriptor may have")));
    }
    for Entry { key, value } in &entries {
        check_text("key", key, limits)?;
        check_text("value", value, limits)?;
    }
    let limit = limit.map(|limit| limit.check().map(Box::new)).transpose()?;
    Ok(Descriptor { entries, hits: own_hits.unwrap_or(hits), refund: give_back, requested_limit: limit })
}

/// `key`, `value`.
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

/// A `RateLimitOverride`. When there are several, one is merged into the other, as protobuf has it.
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
                (3, value) => unwrap(value, &mut self.unit_multiplier)?,
                _ => {}
            }
        }
        Ok(())
    }

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
        // The multiplier has 32 bits.
        let multiplier = self.unit_multiplier.map_or(1, |multiplier| multiplier as u32);
        let limit = Limit::new(self.requests_per_unit, unit, multiplier);
        limit.map_err(|error| RequestError::invalid(format!("a descriptor's limit cannot be counted: {error}")))
    }
}

/// The number in a `UInt64Value` or a `UInt32Value`: there and 0 is not the same as not there.
fn unwrap(value: Value<'_>, number: &mut Option<u64>) -> Result<(), Malformed> {
    let number = number.get_or_insert(0);
    for field in value.message()? {
        if let (1, value) = field? {
            *number = value.number()?;
        }
    }
    Ok(())
}

fn check_text(what: &str, text: &str, limits: &Limits) -> Result<(), RequestError> {
    let (len, max) = (text.len(), limits.max_text_bytes);
    if len > max {
        return Err(RequestError::invalid(format!("a {what} of {len} bytes is longer than the {max} it may have")));
    }
    Ok(())
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

    type Asked = (String, Vec<(Vec<(String, String)>, u64, bool, Option<(u32, Measure)>)>);

    fn ours(message: &[u8]) -> Option<Asked> {
        let request = decode(message, &Limits::default()).ok()?;
        let limit = |limit: &Limit| (limit.requests(), limit.measure());
        let descriptors = request.descriptors.iter().map(|descriptor| {
            let entries = descriptor.entries.iter().map(|entry| (entry.key.to_owned(), entry.value.to_owned()));
            (entries.collect(), descriptor.hits, descriptor.refund, descriptor.requested_limit.as_deref().map(limit))
        });
        Some((request.domain.to_owned(), descriptors.collect()))
    }

    /// What prost reads, read once more.
    fn prosts(message: &[u8]) -> Option<Asked> {
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
            Some((entries, hits, descriptor.is_negative_hits, limit))
        });
        Some((message.domain, descriptors.collect::<Option<_>>()?))
    }

    #[test]
    fn a_request_may_have_as_much_of_everything_as_is_set() {
        let limits = Limits { max_descriptors: 2, max_entries: 3, max_text_bytes: 4, ..Limits::default() };
        let refusal = |descriptors: usize, entries: usize, letters: usize| {
            let text = || "x".repeat(letters);
            let entry = || rate_limit_descriptor::Entry { key: "k".into(), value: text() };
            let descriptor = RateLimitDescriptor {
                entries: (0..entries).map(|_| entry()).collect(),
                ..RateLimitDescriptor::default()
            };
            let request =
                RateLimitRequest { domain: text(), descriptors: vec![descriptor; descriptors], ..Default::default() };
            decode(&request.encode_to_vec(), &limits).err().map(|refusal| refusal.message)
        };
        assert_eq!(refusal(2, 3, 4), None);
        for (refusal, expected) in [
            (refusal(3, 1, 1), "3 descriptors are more than the 2"),
            (refusal(1, 4, 1), "4 entries are more than the 3"),
            (refusal(1, 1, 5), "a domain of 5 bytes is longer than the 4"),
        ] {
            assert!(refusal.as_ref().is_some_and(|refusal| refusal.contains(expected)), "{refusal:?}");
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
        fn it_reads_what_prost_reads(request in request()) {
            let message = request.encode_to_vec();
            prop_assert_eq!(ours(&message), prosts(&message));
        }

        /// Of two messages one behind the other numbers replace each other, and of two limits one is merged into the other.
        #[test]
        fn it_reads_damaged_messages_as_prost_does(
            requests in (request(), request()),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            end in any::<prop::sample::Index>(),
        ) {
            let mut message = [requests.0.encode_to_vec(), requests.1.encode_to_vec()].concat();
            if !message.is_empty() {
                for (place, byte) in changes {
                    *place.get_mut(&mut message) = byte;
                }
                message.truncate(message.len() - end.index(message.len()) / 8);
            }
            prop_assert_eq!(ours(&message), prosts(&message));
        }
    }

    #[test]
    fn a_limit_that_comes_in_parts_is_merged() {
        let part = |requests_per_unit, unit, unit_multiplier| {
            let limit = Some(RateLimitOverride { requests_per_unit, unit, unit_multiplier });
            RateLimitDescriptor { limit, ..RateLimitDescriptor::default() }.encode_to_vec()
        };
        let descriptor = [part(7, 0, Some(2)), part(0, 3, None)].concat();
        let message = [&[0x12, descriptor.len() as u8], &descriptor[..]].concat();
        let read = ours(&message).map(|(_, descriptors)| descriptors[0].3);
        assert_eq!(read, Some(Some((7, Measure::Rate { unit: Unit::Hour, multiplier: 2 }))));
        assert_eq!(ours(&message), prosts(&message));
    }
}
