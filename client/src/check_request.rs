//! What is asked, borrowed from the caller, and how it goes over the wire.

use std::{borrow::Cow, sync::Arc, time::Duration};

use sluicegate_common::wire::Writer;
use smallvec::SmallVec;

/// Something that a request counts as: entries from the general to the particular.
///
/// [`descriptor!`](crate::descriptor) writes one down.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor<'a> {
    entries: SmallVec<[(Cow<'a, str>, Cow<'a, str>); 2]>,
    hits: Option<u64>,
    give_back: bool,
    limit: Option<RequestedLimit>,
}

/// A limit that comes with the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RequestedLimit {
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
    #[inline]
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
    pub fn refund(mut self) -> Self {
        self.give_back = true;
        self
    }

    /// Brings a limit along that replaces whatever the rules say.
    #[must_use]
    pub fn limit(mut self, requests_per_unit: u32, unit: Unit) -> Self {
        self.limit = Some(RequestedLimit { requests_per_unit, unit });
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

    pub(crate) fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
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
pub(crate) struct CheckRequest<'a> {
    pub(crate) domain: Cow<'a, str>,
    pub(crate) descriptors: SmallVec<[Descriptor<'a>; 2]>,
    /// Of those that do not say.
    pub(crate) hits: u32,
    pub(crate) traceparent: Option<Cow<'a, str>>,
    /// What is said of grants: one for each descriptor, or nothing.
    pub(crate) holds: Vec<Feedback>,
}

/// How something ended that held a slot, for limits that follow latency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// It took as long as it takes.
    #[default]
    Success = 0,
    /// It failed for a reason of its own: its latency says nothing.
    Failed,
    /// It took too long: the limit falls.
    TimedOut,
    /// What was asked refused it for overload: the limit falls.
    Dropped,
}

/// How long something took that held a slot, and how it ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) latency: Duration,
    pub(crate) outcome: Outcome,
}

impl Sample {
    /// As the protocol has it: never nothing.
    fn micros(self) -> u64 {
        u64::try_from(self.latency.as_micros()).unwrap_or(u64::MAX).max(1)
    }
}

/// What is said of what is held of a descriptor: grants, or a slot that is given back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Feedback {
    /// So many hits could be used.
    pub(crate) demand: u64,
    /// A grant that is done with, and how many of its hits were spent.
    pub(crate) reports: Option<(Arc<str>, u64)>,
    /// Of what held the slot.
    pub(crate) sample: Option<Sample>,
}

impl CheckRequest<'_> {
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
    pub(crate) fn write(&self, message: &mut Writer<'_>) {
        message.text(1, &self.domain);
        for descriptor in &self.descriptors {
            message.message(2, |message| descriptor.write(message));
        }
        message.number(3, self.hits.into());
    }

    /// What is said of what is held, for the metadata of a call of its own: `WANTS;ID;SPENT;LATENCY_US;OUTCOME` for each
    /// descriptor.
    pub(crate) fn holds_text(&self) -> Option<String> {
        let text = |Feedback { demand: wants, reports, sample }: &Feedback| match (reports, sample) {
            (_, Some(sample)) => format!("{wants};;;{};{}", sample.micros(), sample.outcome as u64),
            (Some((id, spent)), None) => format!("{wants};{id};{spent}"),
            (None, None) => wants.to_string(),
        };
        let texts: Vec<_> = self.holds.iter().map(text).collect();
        (!texts.is_empty()).then(|| texts.join(","))
    }

    /// As one of the `checks` of a `CheckFrame`.
    pub(crate) fn write_check(&self, id: u64, frame: &mut Writer<'_>) {
        frame.message(1, |check| {
            check.number(1, id);
            check.message(2, |request| self.write(request));
            check.text(3, self.traceparent.as_deref().unwrap_or_default());
            for hold in &self.holds {
                check.message(4, |message| hold.write(message));
            }
        });
    }
}

impl Feedback {
    fn write(&self, message: &mut Writer<'_>) {
        message.number(1, self.demand);
        if let Some((id, spent)) = &self.reports {
            message.text(2, id);
            message.number(3, *spent);
        }
        if let Some(sample) = self.sample {
            message.message(4, |message| {
                message.number(1, sample.micros());
                message.number(2, sample.outcome as u64);
            });
        }
    }
}

impl Descriptor<'_> {
    fn write(&self, message: &mut Writer<'_>) {
        for (key, value) in self.entries() {
            message.message(1, |entry| {
                entry.text(1, key);
                entry.text(2, value);
            });
        }
        if let Some(limit) = self.limit {
            message.message(2, |message| {
                message.number(1, limit.requests_per_unit.into());
                message.number(2, limit.unit as u64);
            });
        }
        // A wrapper: 0 is not the same as nothing.
        if let Some(hits) = self.hits {
            message.message(3, |wrapper| wrapper.number(1, hits));
        }
        message.number(4, self.give_back.into());
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use sluicegate_proto::{
        envoy::service::ratelimit::v3::RateLimitRequest,
        sluicegate::v1::{self, CheckFrame},
    };

    use super::*;

    fn ask() -> CheckRequest<'static> {
        let long = "x".repeat(300);
        let sample = Sample { latency: Duration::from_millis(7), outcome: Outcome::Dropped };
        CheckRequest {
            domain: "api".into(),
            descriptors: [
                descriptor! { "user" => "alice", "path" => long }.hits(0),
                descriptor! { "ip" => "" }.hits(1 << 40).refund(),
                Descriptor::new().limit(70_000, Unit::Year),
            ]
            .into_iter()
            .collect(),
            hits: 300,
            traceparent: Some("00-1-2-01".into()),
            holds: vec![
                Feedback { demand: 300, reports: Some(("7".into(), 0)), sample: None },
                Feedback { sample: Some(sample), ..Feedback::default() },
            ],
        }
    }

    #[test]
    fn what_is_written_is_what_prost_reads_and_writes() {
        let mut bytes = Vec::new();
        ask().write(&mut Writer(&mut bytes));
        let message = RateLimitRequest::decode(&bytes[..]).unwrap();
        assert_eq!(message.encode_to_vec(), bytes);
        assert_eq!((message.domain.as_str(), message.hits_addend), ("api", 300));
        let [first, second, third] = message.descriptors.as_slice() else { panic!("{message:?}") };
        assert_eq!((first.entries.len(), first.hits_addend, first.is_negative_hits), (2, Some(0), false));
        assert_eq!(first.entries[1].value.len(), 300);
        assert_eq!((second.hits_addend, second.is_negative_hits), (Some(1 << 40), true));
        assert_eq!(third.limit.map(|limit| (limit.requests_per_unit, limit.unit)), Some((70_000, 6)));
        let mut frame = Vec::new();
        ask().write_check(5, &mut Writer(&mut frame));
        ask().write_check(0, &mut Writer(&mut frame));
        let frame = CheckFrame::decode(&frame[..]).unwrap();
        assert_eq!(frame.checks[0].request.as_ref(), Some(&message));
        assert_eq!((frame.checks[0].id, frame.checks[1].id), (5, 0));
        assert_eq!(frame.checks[0].traceparent, "00-1-2-01");
        let hold = v1::Feedback { demand: 300, grant_id: "7".into(), used: 0, sample: None };
        let sample = v1::Sample { latency_us: 7_000, outcome: v1::Outcome::Dropped.into() };
        let slot = v1::Feedback { sample: Some(sample), ..v1::Feedback::default() };
        assert_eq!(frame.checks[1].feedback, [hold, slot]);
        assert_eq!(ask().holds_text().as_deref(), Some("300;7;0,0;;;7000;3"));
    }

    #[test]
    fn shards_are_the_services() {
        let shard = |descriptor: Descriptor<'static>, shard_by: &[&str]| {
            let shard_by: Vec<_> = shard_by.iter().map(ToString::to_string).collect();
            let descriptors = std::iter::once(descriptor).collect();
            let ask = CheckRequest { domain: "api".into(), descriptors, hits: 1, traceparent: None, holds: Vec::new() };
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
            let ask = CheckRequest { domain: "api".into(), descriptors, hits: 1, traceparent: None, holds: Vec::new() };
            ask.identities().next().unwrap()
        };
        let alice = || descriptor! { "user" => "alice" };
        assert_eq!(identity(alice()), identity(alice().hits(3).refund()));
        assert_ne!(identity(alice()), identity(alice().limit(1, Unit::Second)));
        assert_ne!(identity(alice().limit(2, Unit::Second)), identity(alice().limit(1, Unit::Second)));
        assert_ne!(identity(alice().limit(1, Unit::Minute)), identity(alice().limit(1, Unit::Second)));
        assert_ne!(identity(descriptor! { "user" => "alice" }), identity(descriptor! { "usera" => "lice" }));
        assert_ne!(identity(alice()), identity(alice().entry("", "")));
    }
}
