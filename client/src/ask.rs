//! What is asked, borrowed from the caller, and how it goes over the wire.

use std::borrow::Cow;

use bytes::{BufMut, BytesMut};
use smallvec::SmallVec;

/// Something that a request counts as: entries from the general to the particular.
///
/// [`descriptor!`](crate::descriptor) writes one down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor<'a> {
    entries: SmallVec<[(Cow<'a, str>, Cow<'a, str>); 2]>,
    hits: Option<u64>,
    give_back: bool,
    limit: Option<Override>,
}

/// A limit that comes with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Override {
    requests_per_unit: u32,
    unit: Unit,
}

/// A unit of time, as the protocol counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// A second.
    Second = 1,
    /// A minute.
    Minute,
    /// An hour.
    Hour,
    /// A day.
    Day,
    /// A month.
    Month,
    /// A year.
    Year,
}

impl<'a> Descriptor<'a> {
    /// Without entries yet.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds an entry.
    #[must_use]
    pub fn entry(mut self, key: impl Into<Cow<'a, str>>, value: impl Into<Cow<'a, str>>) -> Self {
        self.entries.push((key.into(), value.into()));
        self
    }

    /// What it costs, whatever the others do; 0 looks and takes nothing.
    #[must_use]
    pub fn hits(mut self, hits: u64) -> Self {
        self.hits = Some(hits);
        self
    }

    /// Gives the hits back instead of taking them.
    #[must_use]
    pub fn give_back(mut self) -> Self {
        self.give_back = true;
        self
    }

    /// Brings a limit along that replaces whatever the rules say.
    #[must_use]
    pub fn limit(mut self, requests_per_unit: u32, unit: Unit) -> Self {
        self.limit = Some(Override { requests_per_unit, unit });
        self
    }

    /// The same, borrowed: for one that is kept and asked about again.
    #[must_use]
    pub fn borrowed(&self) -> Descriptor<'_> {
        let entries = self.entries().map(|(key, value)| (key.into(), value.into())).collect();
        Descriptor { entries, ..*self }
    }

    pub(crate) fn owned(&self) -> Descriptor<'static> {
        let entries = self.entries().map(|(key, value)| (key.to_owned().into(), value.to_owned().into())).collect();
        Descriptor { entries, ..*self }
    }

    fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(key, value)| (key.as_ref(), value.as_ref()))
    }
}

/// Writes a [`Descriptor`] down.
///
/// ```
/// use sluicegate_client::{Descriptor, descriptor};
///
/// let user = "alice";
/// assert_eq!(
///     descriptor! { "user" => user, "api" => "/v1/charges" },
///     Descriptor::new().entry("user", user).entry("api", "/v1/charges"),
/// );
/// ```
#[macro_export]
macro_rules! descriptor {
    ($($key:expr => $value:expr),+ $(,)?) => {
        $crate::Descriptor::new()$(.entry($key, $value))+
    };
}

/// Of the descriptors of a question, in their order.
pub(crate) type Identities = SmallVec<[u128; 2]>;

/// One question.
#[derive(Clone, Debug)]
pub(crate) struct Ask<'a> {
    pub(crate) domain: Cow<'a, str>,
    pub(crate) descriptors: SmallVec<[Descriptor<'a>; 2]>,
    /// Of those that do not say.
    pub(crate) hits: u32,
    pub(crate) traceparent: Option<Cow<'a, str>>,
}

impl Ask<'_> {
    /// The hits of each descriptor, in their order, as the service reads them.
    pub(crate) fn costs(&self) -> impl Iterator<Item = u64> {
        let common = u64::from(self.hits.max(1));
        self.descriptors.iter().map(move |descriptor| descriptor.hits.unwrap_or(common))
    }

    /// Whether hits are taken, and nothing else: such a question can have an answer from a cache.
    pub(crate) fn takes(&self) -> bool {
        self.descriptors.iter().all(|descriptor| !descriptor.give_back) && self.costs().all(|cost| cost > 0)
    }

    /// Whether anything is given back.
    pub(crate) fn gives_back(&self) -> bool {
        self.descriptors.iter().any(|descriptor| descriptor.give_back)
    }

    /// What distinguishes the descriptors from all others, each for itself: whatever is asked of them.
    pub(crate) fn identities(&self) -> impl Iterator<Item = u128> {
        self.descriptors.iter().map(|descriptor| {
            let mut identity = sluicegate_common::Identity::new(&self.domain);
            descriptor.entries().for_each(|(key, value)| identity.add(key, value));
            if let Some(limit) = descriptor.limit {
                identity.add_number(u64::from(limit.requests_per_unit) << 8 | limit.unit as u64);
            }
            identity.finish()
        })
    }

    /// The shard of the first descriptor, as the service has it: `domain|user=alice`.
    pub(crate) fn shard(&self, shard_by: &[String]) -> SmallVec<[u8; 64]> {
        let mut shard = Vec::with_capacity(64);
        sluicegate_common::escape(&mut shard, &self.domain, sluicegate_common::ESCAPED);
        let Some(first) = self.descriptors.first() else {
            return SmallVec::from_vec(shard);
        };
        let mut add = |(key, value): (&str, &str)| {
            shard.push(b'|');
            sluicegate_common::escape(&mut shard, key, sluicegate_common::ESCAPED);
            shard.push(b'=');
            sluicegate_common::escape(&mut shard, value, sluicegate_common::ESCAPED);
        };
        let chosen = || shard_by.iter().filter_map(|key| first.entries().find(|(name, _)| name == key));
        if chosen().next().is_none() {
            first.entries().for_each(&mut add);
        } else {
            chosen().for_each(&mut add);
        }
        SmallVec::from_vec(shard)
    }

    /// As a `RateLimitRequest`. Written by hand: the types of the protocol own their texts, and a question has many.
    pub(crate) fn write(&self, out: &mut BytesMut) {
        text(out, 1, &self.domain);
        for descriptor in &self.descriptors {
            message(out, 2, descriptor.size());
            descriptor.write(out);
        }
        number(out, 3, self.hits.into());
    }

    pub(crate) fn size(&self) -> usize {
        let descriptors = self.descriptors.iter().map(|descriptor| message_size(descriptor.size()));
        text_size(&self.domain) + descriptors.sum::<usize>() + number_size(self.hits.into())
    }

    /// As one of the `checks` of a `CheckFrame`.
    pub(crate) fn write_check(&self, id: u64, out: &mut BytesMut) {
        let traceparent = self.traceparent.as_deref().unwrap_or_default();
        let request = self.size();
        message(out, 1, number_size(id) + message_size(request) + text_size(traceparent));
        number(out, 1, id);
        message(out, 2, request);
        self.write(out);
        text(out, 3, traceparent);
    }
}

impl Descriptor<'_> {
    fn write(&self, out: &mut BytesMut) {
        for (key, value) in self.entries() {
            message(out, 1, text_size(key) + text_size(value));
            text(out, 1, key);
            text(out, 2, value);
        }
        if let Some(limit) = self.limit {
            let (requests, unit) = (limit.requests_per_unit.into(), limit.unit as u64);
            message(out, 2, number_size(requests) + number_size(unit));
            number(out, 1, requests);
            number(out, 2, unit);
        }
        // A wrapper: 0 is not the same as nothing.
        if let Some(hits) = self.hits {
            message(out, 3, number_size(hits));
            number(out, 1, hits);
        }
        number(out, 4, self.give_back.into());
    }

    fn size(&self) -> usize {
        let entries = self.entries().map(|(key, value)| message_size(text_size(key) + text_size(value)));
        let limit = self.limit.map_or(0, |limit| {
            message_size(number_size(limit.requests_per_unit.into()) + number_size(limit.unit as u64))
        });
        let hits = self.hits.map_or(0, |hits| message_size(number_size(hits)));
        entries.sum::<usize>() + limit + hits + number_size(self.give_back.into())
    }
}

// Protobuf's wire format (<https://protobuf.dev/programming-guides/encoding/>); all fields here are below 16.

fn varint(out: &mut BytesMut, mut value: u64) {
    while value >= 0x80 {
        out.put_u8(value as u8 | 0x80);
        value >>= 7;
    }
    out.put_u8(value as u8);
}

const fn varint_size(value: u64) -> usize {
    // Seven bits a byte, and one byte for 0.
    ((u64::BITS - (value | 1).leading_zeros()).div_ceil(7)) as usize
}

fn message(out: &mut BytesMut, field: u8, size: usize) {
    out.put_u8(field << 3 | 2);
    varint(out, size as u64);
}

const fn message_size(size: usize) -> usize {
    1 + varint_size(size as u64) + size
}

fn text(out: &mut BytesMut, field: u8, text: &str) {
    if !text.is_empty() {
        message(out, field, text.len());
        out.put_slice(text.as_bytes());
    }
}

const fn text_size(text: &str) -> usize {
    if text.is_empty() { 0 } else { message_size(text.len()) }
}

fn number(out: &mut BytesMut, field: u8, value: u64) {
    if value != 0 {
        out.put_u8(field << 3);
        varint(out, value);
    }
}

const fn number_size(value: u64) -> usize {
    if value == 0 { 0 } else { 1 + varint_size(value) }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use sluicegate_proto::{envoy::service::ratelimit::v3::RateLimitRequest, sluicegate::v1::CheckFrame};

    use super::*;

    fn ask() -> Ask<'static> {
        let long = "x".repeat(300);
        Ask {
            domain: "api".into(),
            descriptors: [
                descriptor! { "user" => "alice", "path" => long }.hits(0),
                descriptor! { "ip" => "" }.hits(1 << 40).give_back(),
                Descriptor::new().limit(70_000, Unit::Year),
            ]
            .into_iter()
            .collect(),
            hits: 300,
            traceparent: Some("00-1-2-01".into()),
        }
    }

    #[test]
    fn what_is_written_is_what_prost_reads_and_writes() {
        let mut bytes = BytesMut::new();
        ask().write(&mut bytes);
        assert_eq!(bytes.len(), ask().size());
        let message = RateLimitRequest::decode(&bytes[..]).unwrap();
        assert_eq!(message.encode_to_vec(), bytes);
        assert_eq!((message.domain.as_str(), message.hits_addend), ("api", 300));
        let [first, second, third] = message.descriptors.as_slice() else { panic!("{message:?}") };
        assert_eq!((first.entries.len(), first.hits_addend, first.is_negative_hits), (2, Some(0), false));
        assert_eq!(first.entries[1].value.len(), 300);
        assert_eq!((second.hits_addend, second.is_negative_hits), (Some(1 << 40), true));
        assert_eq!(third.limit.map(|limit| (limit.requests_per_unit, limit.unit)), Some((70_000, 6)));
        let mut frame = BytesMut::new();
        ask().write_check(5, &mut frame);
        ask().write_check(0, &mut frame);
        let frame = CheckFrame::decode(&frame[..]).unwrap();
        assert_eq!(frame.checks[0].request.as_ref(), Some(&message));
        assert_eq!((frame.checks[0].id, frame.checks[1].id), (5, 0));
        assert_eq!(frame.checks[0].traceparent, "00-1-2-01");
    }

    #[test]
    fn varints_have_the_size_that_is_announced() {
        for value in [0, 1, 127, 128, 16_383, 16_384, u64::from(u32::MAX), u64::MAX] {
            let mut out = BytesMut::new();
            varint(&mut out, value);
            assert_eq!(out.len(), varint_size(value), "{value}");
            assert_eq!(prost::decode_length_delimiter(out).unwrap() as u64, value);
        }
    }

    #[test]
    fn shards_are_the_services() {
        let shard = |descriptor: Descriptor<'static>, shard_by: &[&str]| {
            let shard_by: Vec<_> = shard_by.iter().map(ToString::to_string).collect();
            let descriptors = std::iter::once(descriptor).collect();
            let ask = Ask { domain: "api".into(), descriptors, hits: 1, traceparent: None };
            String::from_utf8(ask.shard(&shard_by).to_vec()).unwrap()
        };
        let both = || descriptor! { "path" => "/x", "user" => "a|b" };
        assert_eq!(shard(both(), &[]), "api|path=/x|user=a%7Cb");
        assert_eq!(shard(both(), &["user"]), "api|user=a%7Cb");
        assert_eq!(shard(both(), &["user", "path"]), "api|user=a%7Cb|path=/x");
        assert_eq!(shard(both(), &["nobody"]), "api|path=/x|user=a%7Cb");
    }

    #[test]
    fn what_is_asked_of_a_descriptor_is_no_part_of_its_identity() {
        let identity = |descriptor: Descriptor<'static>| {
            let descriptors = std::iter::once(descriptor).collect();
            let ask = Ask { domain: "api".into(), descriptors, hits: 1, traceparent: None };
            ask.identities().next().unwrap()
        };
        let alice = || descriptor! { "user" => "alice" };
        assert_eq!(identity(alice()), identity(alice().hits(3).give_back()));
        assert_ne!(identity(alice()), identity(alice().limit(1, Unit::Second)));
        assert_ne!(identity(alice().limit(2, Unit::Second)), identity(alice().limit(1, Unit::Second)));
        assert_ne!(identity(alice().limit(1, Unit::Minute)), identity(alice().limit(1, Unit::Second)));
        assert_ne!(identity(descriptor! { "user" => "alice" }), identity(descriptor! { "usera" => "lice" }));
        assert_ne!(identity(alice()), identity(alice().entry("", "")));
    }
}
