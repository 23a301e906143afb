//! [`Descriptor`] and [`CheckRequest`]: the content of a check, borrowed from the caller, and its wire formats.

use std::{borrow::Cow, sync::Arc, time::Duration};

use sluicegate_wire::Writer;
use smallvec::SmallVec;

/// List of entries (key and value) that describes one aspect of a request, such as its user.
///
/// Entries are ordered from the general to the specific. Each descriptor of a check is decided separately. The macro
/// [`descriptor!`](crate::descriptor) builds a descriptor from literal keys.
///
/// # Examples
///
/// ```
/// use sluicegate_client::{Descriptor, Unit};
///
/// let peek = Descriptor::new().entry("user", "alice").hits(0);
/// let refund = Descriptor::new().entry("user", "alice").hits(3).refund();
/// let custom = Descriptor::new().entry("user", "alice").requested_limit(100, Unit::Minute);
/// # let _ = (peek, refund, custom);
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Descriptor<'a> {
    entries: SmallVec<[(Cow<'a, str>, Cow<'a, str>); 2]>,
    hits: Option<u64>,
    is_refund: bool,
    requested_limit: Option<RequestedLimit>,
}

/// Limit that the request itself supplies (`RateLimitOverride` in Envoy's API).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct RequestedLimit {
    requests_per_unit: u32,
    unit: Unit,
}

/// Unit of time of a requested limit. The values are those of Envoy's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// One second.
    Second = 1,
    /// One minute.
    Minute,
    /// One hour.
    Hour,
    /// One day.
    Day,
    /// One month.
    Month,
    /// One year.
    Year,
}

impl<'a> Descriptor<'a> {
    /// Creates a descriptor without entries.
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

    /// Sets the cost of this descriptor, instead of the check's [`Check::hits`](crate::Check::hits). 0 peeks: the limit
    /// is evaluated and no hits are taken.
    #[must_use]
    pub fn hits(mut self, hits: u64) -> Self {
        self.hits = Some(hits);
        self
    }

    /// Refunds the hits instead of taking them.
    #[must_use]
    pub fn refund(mut self) -> Self {
        self.is_refund = true;
        self
    }

    /// Sets a limit that replaces the limit of the rules.
    #[must_use]
    pub fn requested_limit(mut self, requests_per_unit: u32, unit: Unit) -> Self {
        self.requested_limit = Some(RequestedLimit { requests_per_unit, unit });
        self
    }

    /// Returns a copy that borrows the entries, for callers that keep a descriptor and check it repeatedly.
    #[must_use]
    pub fn borrowed(&self) -> Descriptor<'_> {
        let entries = self.entries().map(|(key, value)| (key.into(), value.into())).collect();
        Descriptor { entries, ..*self }
    }

    #[cfg(feature = "tower")]
    pub(crate) fn has_own_hits(&self) -> bool {
        self.hits.is_some()
    }

    pub(crate) fn owned(&self) -> Descriptor<'static> {
        let entries = self.entries().map(|(key, value)| (key.to_owned().into(), value.to_owned().into())).collect();
        Descriptor { entries, ..*self }
    }

    /// Returns the keys and values of the entries, in their order.
    pub fn entries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.entries.iter().map(|(key, value)| (key.as_ref(), value.as_ref()))
    }

    /// Returns the keys of the entries, separated by dots.
    pub(crate) fn keys(&self) -> String {
        let keys: Vec<_> = self.entries().map(|(key, _)| key).collect();
        keys.join(".")
    }
}

/// Builds a [`Descriptor`] from `key => value` pairs.
///
/// # Examples
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

/// Identities of the descriptors of a request, in the same order.
pub(crate) type Identities = SmallVec<[u128; 2]>;

/// Content of one check.
#[derive(Clone, Debug)]
pub(crate) struct CheckRequest<'a> {
    pub(crate) domain: Cow<'a, str>,
    pub(crate) descriptors: SmallVec<[Descriptor<'a>; 2]>,
    /// Cost of descriptors without their own; 0 means 1.
    pub(crate) hits: u32,
    pub(crate) traceparent: Option<Cow<'a, str>>,
    /// Feedback for each descriptor, or empty.
    pub(crate) feedback: Vec<Feedback>,
}

/// Outcome of the work that held a slot. Adaptive limits learn from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Outcome {
    /// The work completed; its latency is meaningful.
    #[default]
    Success = 0,
    /// The work failed for reasons unrelated to load; its latency is ignored.
    Failed,
    /// The work timed out; the limit is reduced.
    TimedOut,
    /// The upstream rejected the work because of overload; the limit is reduced.
    Dropped,
}

/// Latency and outcome of the work that held a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    pub(crate) latency: Duration,
    pub(crate) outcome: Outcome,
}

impl Sample {
    /// Returns the latency in microseconds, at least 1, because 0 means unknown in the protocol.
    fn latency_us(self) -> u64 {
        u64::try_from(self.latency.as_micros()).unwrap_or(u64::MAX).max(1)
    }
}

/// Report about one descriptor: the demand for grants, a finished grant, or the sample of a released slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Feedback {
    /// Number of hits that are expected to be needed soon.
    pub(crate) demand: u64,
    /// Id of a grant that is used up or expired, and the number of its hits that were used.
    pub(crate) finished_grant: Option<(Arc<str>, u64)>,
    /// Sample of the work that held the released slot.
    pub(crate) sample: Option<Sample>,
}

impl CheckRequest<'_> {
    /// Returns the cost of each descriptor, in the same order, as the service computes it.
    pub(crate) fn costs(&self) -> impl Iterator<Item = u64> {
        let common = u64::from(self.hits.max(1));
        self.descriptors.iter().map(move |descriptor| descriptor.hits.unwrap_or(common))
    }

    /// Returns `true` if every descriptor takes hits. Only such requests can be answered from grants or the deny cache.
    pub(crate) fn only_takes(&self) -> bool {
        self.descriptors.iter().all(|descriptor| !descriptor.is_refund) && self.costs().all(|cost| cost > 0)
    }

    /// Returns `true` if any descriptor refunds hits.
    pub(crate) fn has_refund(&self) -> bool {
        self.descriptors.iter().any(|descriptor| descriptor.is_refund)
    }

    /// Returns a 128-bit identity for each descriptor. It depends on the domain, the entries and the requested limit,
    /// but not on the cost.
    pub(crate) fn identities(&self) -> impl Iterator<Item = u128> {
        self.descriptors.iter().map(|descriptor| self.identity_of(descriptor))
    }

    /// Returns the identity of one descriptor of the request.
    pub(crate) fn identity_of(&self, descriptor: &Descriptor<'_>) -> u128 {
        let mut identity = sluicegate_placement::Identity::new(&self.domain);
        for (key, value) in descriptor.entries() {
            identity.add(key, value);
        }
        if let Some(limit) = descriptor.requested_limit {
            identity.add_number(u64::from(limit.requests_per_unit) << 8 | limit.unit as u64);
        }
        identity.finish()
    }

    /// Returns the shard key of the first descriptor, equal to the service's: `domain|user=alice`. It contains the
    /// entries with the keys in `shard_by`, or all entries if the descriptor has none of these.
    pub(crate) fn shard_key(&self, shard_by: &[String]) -> SmallVec<[u8; 64]> {
        let mut shard = Vec::with_capacity(64);
        sluicegate_placement::escape(&mut shard, &self.domain, sluicegate_placement::ESCAPED);
        let Some(first) = self.descriptors.first() else {
            return SmallVec::from_vec(shard);
        };
        let mut has_chosen = false;
        for chosen in shard_by {
            if let Some((key, value)) = first.entries().find(|(key, _)| key == chosen) {
                append_entry(&mut shard, key, value);
                has_chosen = true;
            }
        }
        if !has_chosen {
            for (key, value) in first.entries() {
                append_entry(&mut shard, key, value);
            }
        }
        SmallVec::from_vec(shard)
    }

    /// Encodes the request as a `RateLimitRequest`. The generated types own their strings, so encoding with them would
    /// allocate for every entry.
    pub(crate) fn write(&self, message: &mut Writer<'_>) {
        message.text(1, &self.domain);
        for descriptor in &self.descriptors {
            message.message(2, |message| descriptor.write(message));
        }
        message.number(3, self.hits.into());
    }

    /// Returns the feedback as metadata of a unary call: `DEMAND;GRANT_ID;USED;LATENCY_US;OUTCOME` for each descriptor.
    pub(crate) fn feedback_metadata(&self) -> Option<String> {
        if self.feedback.is_empty() {
            return None;
        }
        let texts: Vec<_> = self.feedback.iter().map(Feedback::metadata).collect();
        Some(texts.join(","))
    }

    /// Encodes the request as one of the `checks` of a `CheckFrame`.
    pub(crate) fn write_check(&self, id: u64, frame: &mut Writer<'_>) {
        frame.message(1, |check| {
            check.number(1, id);
            check.message(2, |request| self.write(request));
            check.text(3, self.traceparent.as_deref().unwrap_or_default());
            for feedback in &self.feedback {
                check.message(4, |message| feedback.write(message));
            }
        });
    }
}

/// Appends an entry of a descriptor to a shard key: `|user=alice`.
fn append_entry(shard: &mut Vec<u8>, key: &str, value: &str) {
    shard.push(b'|');
    sluicegate_placement::escape(shard, key, sluicegate_placement::ESCAPED);
    shard.push(b'=');
    sluicegate_placement::escape(shard, value, sluicegate_placement::ESCAPED);
}

impl Feedback {
    /// Returns the feedback as part of the metadata of a unary call. Unused fields at the end are omitted.
    fn metadata(&self) -> String {
        let Self { demand, finished_grant, sample } = self;
        if let Some(sample) = sample {
            return format!("{demand};;;{};{}", sample.latency_us(), sample.outcome as u64);
        }
        match finished_grant {
            Some((id, used)) => format!("{demand};{id};{used}"),
            None => demand.to_string(),
        }
    }

    fn write(&self, message: &mut Writer<'_>) {
        message.number(1, self.demand);
        if let Some((id, used)) = &self.finished_grant {
            message.text(2, id);
            message.number(3, *used);
        }
        if let Some(sample) = self.sample {
            message.message(4, |message| {
                message.number(1, sample.latency_us());
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
        if let Some(limit) = self.requested_limit {
            message.message(2, |message| {
                message.number(1, limit.requests_per_unit.into());
                message.number(2, limit.unit as u64);
            });
        }
        // The field is a wrapper message, so that 0 differs from absent.
        if let Some(hits) = self.hits {
            message.message(3, |wrapper| wrapper.number(1, hits));
        }
        message.number(4, self.is_refund.into());
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

    fn request() -> CheckRequest<'static> {
        let long = "x".repeat(300);
        let sample = Sample { latency: Duration::from_millis(7), outcome: Outcome::Dropped };
        CheckRequest {
            domain: "api".into(),
            descriptors: [
                descriptor! { "user" => "alice", "path" => long }.hits(0),
                descriptor! { "ip" => "" }.hits(1 << 40).refund(),
                Descriptor::new().requested_limit(70_000, Unit::Year),
            ]
            .into_iter()
            .collect(),
            hits: 300,
            traceparent: Some("00-1-2-01".into()),
            feedback: vec![
                Feedback { demand: 300, finished_grant: Some(("7".into(), 0)), sample: None },
                Feedback { sample: Some(sample), ..Feedback::default() },
            ],
        }
    }

    fn with(descriptor: Descriptor<'static>) -> CheckRequest<'static> {
        let descriptors = std::iter::once(descriptor).collect();
        CheckRequest { domain: "api".into(), descriptors, hits: 1, traceparent: None, feedback: Vec::new() }
    }

    #[test]
    fn the_encoding_matches_prost() {
        let mut bytes = Vec::new();
        request().write(&mut Writer(&mut bytes));
        let message = RateLimitRequest::decode(&bytes[..]).unwrap();
        assert_eq!(message.encode_to_vec(), bytes);
        assert_eq!((message.domain.as_str(), message.hits_addend), ("api", 300));
        let [first, second, third] = message.descriptors.as_slice() else { panic!("{message:?}") };
        assert_eq!((first.entries.len(), first.hits_addend, first.is_negative_hits), (2, Some(0), false));
        assert_eq!(first.entries[1].value.len(), 300);
        assert_eq!((second.hits_addend, second.is_negative_hits), (Some(1 << 40), true));
        assert_eq!(third.limit.map(|limit| (limit.requests_per_unit, limit.unit)), Some((70_000, 6)));
        let mut frame = Vec::new();
        request().write_check(5, &mut Writer(&mut frame));
        request().write_check(0, &mut Writer(&mut frame));
        let frame = CheckFrame::decode(&frame[..]).unwrap();
        assert_eq!(frame.checks[0].request.as_ref(), Some(&message));
        assert_eq!((frame.checks[0].id, frame.checks[1].id), (5, 0));
        assert_eq!(frame.checks[0].traceparent, "00-1-2-01");
        let grant = v1::Feedback { demand: 300, grant_id: "7".into(), used: 0, sample: None };
        let sample = v1::Sample { latency_us: 7_000, outcome: v1::Outcome::Dropped.into() };
        let slot = v1::Feedback { sample: Some(sample), ..v1::Feedback::default() };
        assert_eq!(frame.checks[1].feedback, [grant, slot]);
        assert_eq!(request().feedback_metadata().as_deref(), Some("300;7;0,0;;;7000;3"));
    }

    #[test]
    fn shard_keys_equal_those_of_the_service() {
        let shard = |descriptor: Descriptor<'static>, shard_by: &[&str]| {
            let shard_by: Vec<_> = shard_by.iter().map(ToString::to_string).collect();
            String::from_utf8(with(descriptor).shard_key(&shard_by).to_vec()).unwrap()
        };
        let both = || descriptor! { "path" => "/x", "user" => "a|b" };
        assert_eq!(shard(both(), &[]), "api|path=/x|user=a%7Cb");
        assert_eq!(shard(both(), &["user"]), "api|user=a%7Cb");
        assert_eq!(shard(both(), &["user", "path"]), "api|user=a%7Cb|path=/x");
        assert_eq!(shard(both(), &["nobody"]), "api|path=/x|user=a%7Cb");
    }

    #[test]
    fn the_identity_of_a_descriptor_does_not_depend_on_its_cost() {
        let identity = |descriptor: Descriptor<'static>| with(descriptor).identities().next().unwrap();
        let alice = || descriptor! { "user" => "alice" };
        assert_eq!(identity(alice()), identity(alice().hits(3).refund()));
        let limited = |requests, unit| identity(alice().requested_limit(requests, unit));
        assert_ne!(identity(alice()), limited(1, Unit::Second));
        assert_ne!(limited(2, Unit::Second), limited(1, Unit::Second));
        assert_ne!(limited(1, Unit::Minute), limited(1, Unit::Second));
        assert_ne!(identity(descriptor! { "user" => "alice" }), identity(descriptor! { "usera" => "lice" }));
        assert_ne!(identity(alice()), identity(alice().entry("", "")));
    }
}
